"""Adapter formats: the suite, and the files that it generates."""
