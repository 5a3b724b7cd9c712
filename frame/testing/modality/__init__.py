"""The conformance suite of modalities: tiny checkpoints, generated files, checks."""
