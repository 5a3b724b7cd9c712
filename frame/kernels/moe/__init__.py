"""Products of mixtures of experts, and their routing."""
