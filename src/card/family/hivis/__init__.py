"""HiViS: a drafter that reads text alone, fused with the hidden states of a target that sees images."""
