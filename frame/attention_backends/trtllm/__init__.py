"""TensorRT-LLM's attention kernels for Blackwell GPUs, as packaged by FlashInfer: `trtllm_mha`
(mha.py) and `trtllm_mla` (mla.py).

The manifest is `frame.attention_backends`; a backend's module is imported when it is selected.
"""
