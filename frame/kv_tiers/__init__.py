"""KV cache tiers: loads of prefixes from host memory or disk, and stores of the prefix cache."""
