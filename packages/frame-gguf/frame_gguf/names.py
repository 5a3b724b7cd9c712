"""The tensors of a GGUF file under the names of Hugging Face checkpoints.

Used by the source and the format. Must not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

from frame.core.errors import CheckpointError

KEPT = ("Q4_0", "Q4_1", "Q4_K", "Q8_0", "Q6_K")  # types that stay quantized
WITH_MINIMA = ("Q4_1", "Q4_K")  # experts of these types are dequantized, as GPU kernels take minima for one matrix
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe")
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_DEQUANTIZED = ("token_embd", "output")
_BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}  # fmt: skip
_NAME = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>\w+)\.(?P<kind>weight|bias)$")
_EXPERTS = re.compile(r"ffn_(gate|up|down)_exps$")
MAX_VALUES = 1 << 20  # of an array of the file's head; vocabularies have 300,000
_UNUSED = ("rope_freqs.weight",)


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of the file. `expert`: its slice; None: the whole tensor. `heads`: heads whose rows
    llama.cpp has permuted; 0: none. `is_kept`: it stays quantized."""

    tensor: Any
    expert: int | None = None
    heads: int = 0
    is_kept: bool = False

    @property
    def type(self) -> str:
        return str(self.tensor.tensor_type.name)


class WholeReader(GGUFReader):
    """Refuses a count that goes past the end of the file or `MAX_VALUES`, and arrays of arrays:
    the library reads value by value, and makes objects of several hundred bytes."""

    def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        found = super()._get(offset, dtype, count, override_order)
        if len(found) != count:
            raise ValueError(f"byte {offset} and what follows are missing")
        return found

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY:
            kind, count = int(self._get(orig_offs, np.uint32)[0]), int(self._get(orig_offs + 4, np.uint64)[0])
            if kind == GGUFValueType.ARRAY or count > MAX_VALUES:
                raise ValueError(f"byte {orig_offs} begins an array of arrays, or of more than {MAX_VALUES} values")
        return super()._get_field_parts(orig_offs, raw_type)


@lru_cache(maxsize=4)
def read_places(folder: Path) -> dict[str, Place]:
    """The tensors by checkpoint name. Raises CheckpointError for a folder without one whole GGUF
    file, an unknown architecture or an unknown tensor."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise CheckpointError(f"{folder} holds {len(files)} GGUF files: put one file, not in parts, into it.")
    try:
        reader = WholeReader(files[0])
        architecture = str(reader.fields["general.architecture"].contents())
        heads = {part: int(_field(reader, f"{architecture}.attention.{name}")) for part, name in _HEADS.items()}
    except (ValueError, KeyError, IndexError, TypeError, OSError) as error:
        raise CheckpointError(f"{files[0]} is no whole GGUF file ({error!r}): download it again.") from error
    if architecture not in ARCHITECTURES:
        raise CheckpointError(f"{files[0]} is of the architecture {architecture!r}; of GGUF's {', '.join(ARCHITECTURES)} are read.")
    _check_places(reader, files[0])
    permuted = heads if architecture == "llama" else {}
    return {name: place for tensor in reader.tensors for name, place in _place(tensor, permuted, files[0])}


def _check_places(reader: GGUFReader, file: Path) -> None:
    """Raise CheckpointError for tensors that share bytes, or are empty."""
    end, before = 0, ""
    for tensor in sorted(reader.tensors, key=lambda each: int(each.data_offset)):
        if int(tensor.data_offset) < end or not tensor.n_bytes:
            what = f"begins inside {before}" if tensor.n_bytes else "is empty"
            raise CheckpointError(f"{file}: {tensor.name} {what}: download it again.")
        end, before = int(tensor.data_offset) + int(tensor.n_bytes), str(tensor.name)


_HEADS = {"attn_q": "head_count", "attn_k": "head_count_kv"}


def _field(reader: GGUFReader, name: str) -> Any:
    if name not in reader.fields:  # without head_count_kv each head has its own keys
        name = name.removesuffix("_kv")
    return reader.fields[name].contents()


def _place(tensor: Any, permuted: dict[str, int], file: Path) -> Iterator[tuple[str, Place]]:
    name = str(tensor.name)
    whole, _, kind = name.partition(".")
    type_name = tensor.tensor_type.name
    is_kept = type_name in KEPT and whole not in _DEQUANTIZED
    if name in _UNUSED:
        return
    if whole in _WHOLE and kind in ("weight", "bias"):
        yield f"{_WHOLE[whole]}.{kind}", Place(tensor)
        return
    found = _NAME.match(name)
    experts = _EXPERTS.match(found["part"]) if found else None
    if found is None or (experts is None and found["part"] not in _BLOCK):
        raise CheckpointError(f"{file} holds {name}, which no model of GGUF that is read has: choose another file.")
    prefix = f"model.layers.{found['layer']}."
    if experts is None:
        heads = permuted.get(found["part"], 0)
        if heads and len(tensor.data) % (2 * heads):
            raise CheckpointError(f"{file}: {name} has {len(tensor.data)} rows, which {heads} heads do not divide: download it again.")
        yield prefix + f"{_BLOCK[found['part']]}.{found['kind']}", Place(tensor, None, heads, is_kept)
        return
    stays = is_kept and type_name not in WITH_MINIMA
    for expert in range(len(tensor.data)):
        yield prefix + f"mlp.experts.{expert}.{experts[1]}_proj.{found['kind']}", Place(tensor, expert, 0, stays)
