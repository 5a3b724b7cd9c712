"""Products of tokens and weights."""
