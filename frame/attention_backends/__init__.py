"""Manifest of the in-tree attention backends: names, capabilities, options.

Imports no torch and no kernel; a backend's module is imported when it is selected.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import Field

from frame.attention_backends.libraries import FA3, FLASHINFER, FLASHMLA, TRTLLM_MHA, TRTLLM_MLA, FlashInferOptions, WorkspaceOptions
from frame.attention_backends.measured import MEASURED
from frame.core.interfaces.attention import AttentionCapabilities, AttentionRequirements
from frame.core.interfaces.plugin import Reason
from frame.registration import KindRegistry, PluginOptions, count_interpreter, hookimpl


@dataclass(frozen=True, slots=True)
class NativeCapabilities(AttentionCapabilities):
    """invariant_on: the devices on which the backend is `batch_invariant`: PyTorch's products on a
    GPU choose their sums by the number of rows."""

    invariant_on: tuple[str, ...] = ("cpu",)


TORCH_NATIVE = NativeCapabilities(
    devices=("cpu", "cuda"),
    kinds=("mha", "mla"),
    latent_heads=True,
    sliding_window=True,
    chunked=True,
    soft_cap=True,
    sinks=True,
    sparse=True,
    bidirectional=True,
    tree_mask=True,
    spans=True,
    kv_dtypes=("fp8_e4m3", "int8"),
    batch_invariant=True,
)

FLEX_ATTENTION = replace(
    TORCH_NATIVE, chunked=False, tree_mask=False, spans=False, batch_invariant=False, invariant_on=(), compute_capability=((8, 0), (12, 1))
)


@dataclass(frozen=True, slots=True)
class KernelCapabilities(AttentionCapabilities):
    """Capabilities of Triton kernels, which run on a GPU or in Triton's interpreter."""

    def unsupported(self, requirements: AttentionRequirements) -> list[Reason]:
        return AttentionCapabilities.unsupported(self, count_interpreter(requirements))


TRITON = KernelCapabilities(
    devices=("cuda",),
    compute_capability=((8, 0), (12, 1)),
    kinds=("mha", "mla"),
    max_head_dim=512,
    latent_heads=True,
    sliding_window=True,
    chunked=True,
    soft_cap=True,
    sinks=True,
    sparse=True,
    tree_mask=True,
    spans=True,
    kv_dtypes=("fp8_e4m3", "int8"),
    graphs="decode",
    shared_prefixes=True,
    device_lengths=True,
    batch_invariant=True,
    expanded_bytes=2 << 30,
    dequantized_bytes=1 << 30,
    measured=MEASURED["triton"],
)


class TritonOptions(PluginOptions):
    """Settings of the `triton` backend."""

    share_prefixes: bool = Field(
        True, description="Decode rows with a common prefix, or of one draft, read its keys once for all (cascade attention)."
    )


UNPROVEN = 12  # rank of backends that were never run on the hardware they are made for: below all that were


@hookimpl
def register_attention_backends(registry: KindRegistry) -> None:
    registry.add(
        "torch_native",
        "frame.attention_backends.torch_native.backend:TorchNativeBackend",
        capabilities=TORCH_NATIVE,
        rank=10,
        summary="PyTorch operations only: the reference on every device, and the fastest on a CPU.",
    )
    registry.add(
        "triton",
        "frame.attention_backends.triton.backend:TritonBackend",
        capabilities=TRITON,
        rank=20,
        requires=("triton>=3.4",),
        options=TritonOptions,
        summary="Triton kernels that read the page table: split-KV decode with grouped heads, FlashAttention extend, latent attention.",
    )
    registry.add(
        "flashinfer",
        "frame.attention_backends.flashinfer.backend:FlashInferBackend",
        capabilities=FLASHINFER,
        options=FlashInferOptions,
        rank=15,
        requires=("flashinfer-python>=0.6.12,<0.8",),
        summary="FlashInfer's paged prefill and decode, latent attention and ragged prefill (FlashAttention-2 and -3 kernels).",
    )
    registry.add(
        "flex_attention",
        "frame.attention_backends.flex_attention:FlexAttentionBackend",
        capabilities=FLEX_ATTENTION,
        rank=5,
        summary="PyTorch's flex_attention over gathered pages: compiled on a GPU, eager on a CPU.",
    )
    registry.add(
        "trtllm_mha",
        "frame.attention_backends.trtllm.mha:TrtllmMHABackend",
        capabilities=TRTLLM_MHA,
        options=WorkspaceOptions,
        rank=UNPROVEN,
        requires=("flashinfer-python>=0.6.12,<0.8",),
        summary="TensorRT-LLM's multi-head attention kernels for Blackwell GPUs, as packaged by FlashInfer.",
    )
    registry.add(
        "trtllm_mla",
        "frame.attention_backends.trtllm.mla:TrtllmMLABackend",
        capabilities=TRTLLM_MLA,
        options=WorkspaceOptions,
        rank=UNPROVEN,
        requires=("flashinfer-python>=0.6.12,<0.8",),
        summary="TensorRT-LLM's latent-attention kernels for Blackwell GPUs, as packaged by FlashInfer.",
    )
    registry.add(
        "fa3",
        "frame.attention_backends.fa3:FlashAttention3Backend",
        capabilities=FA3,
        rank=14,
        modules={"flash_attn_interface": "build it from the folder hopper/ of github.com/Dao-AILab/flash-attention"},
        summary="FlashAttention-3 from its own library: multi-head and absorbed latent attention.",
    )
    registry.add(
        "flashmla",
        "frame.attention_backends.flashmla:FlashMLABackend",
        capabilities=FLASHMLA,
        rank=14,
        requires=("sgl-flash-mla>=1.0",),
        summary="DeepSeek's FlashMLA kernels for decode steps of latent attention.",
    )
    registry.suggest_distribution("avx512", "frame-x86")
