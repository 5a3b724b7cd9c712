"""Drafters: the suite, and the checks of those on a device."""
