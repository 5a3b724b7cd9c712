"""Processes: how the engine's processes are built, started, supervised and stopped."""
