"""Conformance suites, and the parts that they and plugin authors' tests use: batches over a paged
cache, fake runners, tiny checkpoints. Must not know a plugin by name.

    pytest --frame-conformance=attention_backend:NAME --frame-conformance-json=verdict.json

Importing this package loads no torch.
"""
