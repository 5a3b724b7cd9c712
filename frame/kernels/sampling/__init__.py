"""Kernels of the sampler: token draws, filters, log-probabilities, logit updates."""
