"""`frame eval`: seeded tasks, scoring, and the evaluation of a backend."""
