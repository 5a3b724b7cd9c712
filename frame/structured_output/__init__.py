"""Structured output: grammar compilation, masks of running requests, and jump-forward decoding."""
