"""Adapters on a rank: the pool of their pages, the rows that use them, and their loading."""
