"""Compares two plugins of one kind, for `frame plugins check --against`."""
