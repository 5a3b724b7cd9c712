"""Parallelism: steps of several ranks, pipeline stages, attention groups and the choice of replicas."""
