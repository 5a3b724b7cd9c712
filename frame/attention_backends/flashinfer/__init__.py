"""Attention by FlashInfer's kernels (flashinfer.ai, arXiv 2501.01005): paged prefill and decode, latent attention, ragged prefill.

The manifest is `frame.attention_backends`; the backend is in `backend.py` and is imported when it is selected.
"""
