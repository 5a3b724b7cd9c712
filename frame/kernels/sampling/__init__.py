"""Kernels of the sampler: token draws, filters, log-probabilities, logit updates.

`operations` hands them to the sampler; logits processors use some. Must not know a request.
"""
