"""Simulates a fleet of servers on a virtual clock, with the real scheduler, prefix cache and
routing policy."""
