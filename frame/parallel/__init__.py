"""Parallelism: steps of several ranks, pipeline stages, attention groups, moves of experts and
choice of replicas."""
