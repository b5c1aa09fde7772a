"""Choose among many candidates by an expensive score, after a cheap score has ruled out most of them."""
