"""Grammars of running requests: compiled off the engine's loop, called in threads of their own, and their forced tokens."""
