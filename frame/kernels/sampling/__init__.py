"""Kernels of the sampler: token draws, filters, log-probabilities, logit updates.

Used by `frame.core.sampling` and the logits processors. Must not know a request.
"""
