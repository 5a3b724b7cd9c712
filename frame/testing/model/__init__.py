"""Models: the suite, and sessions of a tiny checkpoint."""
