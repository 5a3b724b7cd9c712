"""Conformance suites, and what they and plugin authors' tests use. Must not know a plugin by name.

Each folder has the suites of one family of kinds with their cases. What several suites and tests
share is beside the folders: contexts, tiny checkpoints, a fake runner, a scheduler in one thread.

    pytest --frame-conformance=attention_backend:NAME --frame-conformance-json=verdict.json

Importing this package loads no torch.
"""
