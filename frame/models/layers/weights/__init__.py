"""Weights of linear layers and experts: stored tensors, canonical forms, and their GEMMs."""
