"""Reasoning parsers and tool-call parsers: the suites, and texts for both."""
