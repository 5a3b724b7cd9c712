"""Conformance suites, and what they and plugin authors' tests use. Must not know a plugin by name.

Each folder has the suites of one family of kinds with their cases. A check of a suite is a function
that raises AssertionError with one sentence; `frame.testing.conformance` runs it, for pytest and
`frame plugins check`. What several suites and tests share is beside the folders.

    pytest --frame-conformance=attention_backend:NAME --frame-conformance-json=verdict.json

Importing this package loads no torch.
"""
