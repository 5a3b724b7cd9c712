"""Scheduling policies, prefix caches and eviction policies: the suites."""
