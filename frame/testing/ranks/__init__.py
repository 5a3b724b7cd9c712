"""Platforms, collectives and launchers: the suites, and ranks that are threads."""
