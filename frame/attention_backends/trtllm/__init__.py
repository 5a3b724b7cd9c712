"""The TensorRT-LLM attention kernels that FlashInfer brings, for Blackwell cards: `trtllm_mha` (heads.py) and `trtllm_mla` (latent.py).

The manifest is `frame.attention_backends`; a backend's module is imported when it is selected.
"""
