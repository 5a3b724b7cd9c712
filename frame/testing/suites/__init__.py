"""Further conformance suites, one module each."""
