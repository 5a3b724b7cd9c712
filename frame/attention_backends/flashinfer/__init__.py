"""FlashInfer's kernels (flashinfer.ai, arXiv 2501.01005): paged prefill and decode, latent
attention, ragged prefill.

The manifest is `frame.attention_backends`; `backend.py` is imported when the backend is selected.
"""
