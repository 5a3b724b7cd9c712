"""Scheduling: which tokens of which requests run in the next step, and how a step's results are
taken in."""
