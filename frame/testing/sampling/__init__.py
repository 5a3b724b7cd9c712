"""Logits processors and grammar backends: the suites, and grammars with known languages."""
