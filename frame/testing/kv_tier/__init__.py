"""The conformance suite of KV cache tiers."""
