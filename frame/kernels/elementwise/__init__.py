"""Norms, activations and rotations."""
