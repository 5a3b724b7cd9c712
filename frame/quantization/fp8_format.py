"""Reads how an fp8 checkpoint stores its weights: the dialects of `quantization_config`, as one
`Fp8Format`.

Depends on no tensor and no layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from frame.core.errors import CheckpointError
from frame.quantization.fields import read_patterns
from frame.quantization.patterns import matches

Sharing = Literal["tensor", "channel", "block"]


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """How weights are stored.

    `sharing`: what shares one scale: a whole tensor, an output ("channel"), or a `block` of
    (outputs, inputs). `scale`, `input_scale`: names of the scale tensors beside `weight`;
    `input_scale` None: one scale a token. `plain`: patterns of layers that are stored
    unquantized. `targets`: if not empty, layers that match none of these are unquantized too.
    """

    sharing: Sharing
    scale: str = "weight_scale"
    input_scale: str | None = None
    block: tuple[int, int] = (128, 128)
    plain: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()

    def stores_layer(self, name: str) -> bool:
        """Whether the checkpoint stores the layer `name` in fp8."""
        if any(matches(pattern, name) for pattern in self.plain):
            return False
        return not self.targets or any(matches(pattern, name) for pattern in self.targets)


def read_format(config: Mapping[str, Any]) -> Fp8Format:
    """The format that a checkpoint's `quantization_config` describes. Raises CheckpointError if the
    weights are not fp8."""
    readers = {"fp8": _read_fp8}
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in readers:
        raise CheckpointError(f"quantization_config.quant_method is {method!r}; fp8 supports {', '.join(readers)}.")
    return readers[method](config)


def _read_fp8(config: Mapping[str, Any]) -> Fp8Format:
    """DeepSeek's and transformers' block scales (`weight_scale_inv`), and one scale per tensor
    under either of its two names."""
    kind = config.get("fmt") or "e4m3"
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise CheckpointError(f"quantization_config.fmt is {kind!r}; only e4m3 weights are supported.")
    is_static = config.get("activation_scheme") == "static"
    name = "modules_to_not_convert" if config.get("modules_to_not_convert") else "ignored_layers"
    plain = read_patterns(config.get(name), f"quantization_config.{name}")
    block = config.get("weight_block_size")
    if block is not None:
        return Fp8Format("block", "weight_scale_inv", None, read_block(block), plain)
    if "weight_block_size" in config:
        return Fp8Format("tensor", "weight_scale_inv", "activation_scale" if is_static else None, plain=plain)
    return Fp8Format("tensor", "weight_scale", "input_scale" if is_static else None, plain=plain)


def read_block(value: Any) -> tuple[int, int]:
    """Check the sizes of blocks: (outputs, inputs)."""
    if not isinstance(value, Sequence) or len(value) != 2 or not all(isinstance(size, int) and size > 0 for size in value):
        raise CheckpointError(f"quantization_config has blocks of {value!r}; two positive sizes are expected, such as [128, 128].")
    return value[0], value[1]
