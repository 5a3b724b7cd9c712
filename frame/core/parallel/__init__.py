"""Parallelism: steps of several ranks, stages and attention groups, and the choice of replicas."""
