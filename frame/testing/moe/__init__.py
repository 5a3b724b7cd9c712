"""MoE runners and dispatchers: the suites, and random layers of experts."""
