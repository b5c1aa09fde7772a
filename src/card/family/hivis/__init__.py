"""HiViS: a drafter that reads only text, with the hidden states of a target that sees images."""
