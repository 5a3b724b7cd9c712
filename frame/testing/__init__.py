"""Conformance suites and fakes that plugin authors import; knows the interfaces, no plugin by name."""
