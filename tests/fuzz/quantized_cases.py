"""Damaged and hostile quantized checkpoints, as in `checkpoint_cases.py`: bitsandbytes, torchao and
GGUF, and a scale that is not finite of each other format."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from frame.core.interfaces.weight_format import NF4
from tests.fuzz.checkpoint_cases import WEIGHTS, Case, Change, configure, flip, header, link, make_fifo, nest, replace, write

ATTENTION = "model.layers.0.self_attn.q_proj"


def quantize(**config: Any) -> Change:
    return configure("quantization_config", to=config)


def torchao(kind: Any, **data: Any) -> Change:
    return quantize(quant_method="torchao", quant_type={"default": {"_type": kind, "_version": 2, "_data": data}})


STATE = f"{ATTENTION}.weight.quant_state.bitsandbytes__nf4"


def state(content: Any) -> Change:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return replace(STATE, torch.tensor(list(text), dtype=torch.uint8))


def nf4(**changes: Any) -> dict[str, Any]:
    return {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [128, 128]} | changes


BITSANDBYTES = [
    *(
        Case(f"state {name}", state(content), (STATE,), "bitsandbytes")
        for name, content in {
            "empty": b"",
            "no JSON": b"\xff\x00",
            "nested": nest(100_000).encode(),
            "list": [1],
            "text": "x",
            "null": None,
            "shape text": nf4(shape="ab"),
            "shape null": nf4(shape=None),
            "shape nested": nf4(shape=[[1], [2]]),
            "shape long": nf4(shape=[1, 2, 3]),
            "shape floats": nf4(shape=[128.0, 128.0]),
            "shape negative": nf4(shape=[-128, -128]),
            "shape zero": nf4(shape=[0, 128]),
            "block text": nf4(blocksize="64"),
            "block null": nf4(blocksize=None),
            "block zero": nf4(blocksize=0),
            "block bool": nf4(blocksize=True),
            "block float": nf4(blocksize=64.0),
            "block 3": nf4(blocksize=3),
        }.items()
    ),
    Case("state large", state(nf4(shape=[2**40, 2**40])), (ATTENTION, "shape"), "bitsandbytes"),
    Case("state block large", state(nf4(blocksize=2**60)), (ATTENTION, "shape"), "bitsandbytes"),
    Case("absmax short", replace(f"{ATTENTION}.weight.absmax", lambda part: part[:-1]), ("absmax", "shape"), "bitsandbytes"),
    Case("absmax type", replace(f"{ATTENTION}.weight.absmax", lambda part: part.to(torch.uint8)), ("absmax", "uint8|U8"), "bitsandbytes"),
    Case("absmax scalar", replace(f"{ATTENTION}.weight.absmax", torch.tensor(1.0)), ("absmax", "shape"), "bitsandbytes"),
    Case("absmax nan", replace(f"{ATTENTION}.weight.absmax", lambda part: part * float("nan")), ("absmax", "finite"), "bitsandbytes"),
    Case("map nan", replace(f"{ATTENTION}.weight.quant_map", torch.full((16,), float("nan"))), ("quant_map",), "bitsandbytes"),
    Case("codes type", replace(f"{ATTENTION}.weight", lambda part: part.to(torch.int8)), ("q_proj.weight", "int8"), "bitsandbytes"),
    Case("both bits", quantize(quant_method="bitsandbytes", load_in_8bit="yes", load_in_4bit=[]), ("weight",), "bitsandbytes"),
    Case(
        "quant type list",
        quantize(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type=["nf4"]),
        ("bnb_4bit_quant_type",),
        "bitsandbytes",
    ),
    Case(
        "skip text",
        quantize(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=3),
        ("llm_int8_skip_modules",),
        "bitsandbytes",
    ),
    Case("bnb fifo", make_fifo("more.safetensors"), ("more.safetensors", "regular file"), "bitsandbytes"),
    Case("bnb length", write("model.safetensors", header("{}", size=1 << 63)), ("model.safetensors",), "bitsandbytes"),
]

TORCHAO = [
    *(
        Case(f"torchao {kind!r:.30}", torchao(kind), ("quant_type",))
        for kind in ("evil.Config", "os.system", ["a"], {"a": 1}, None, 3, "__import__")
    ),
    Case("torchao data", torchao("Int8WeightOnlyConfig", granularity={"_type": "evil.Granularity"}), ("granularity",)),
    Case("torchao group", torchao("IntxWeightOnlyConfig", group_size="x"), ("granularity|group_size",)),
    Case("torchao large group", torchao("IntxWeightOnlyConfig", granularity={"_type": "PerGroup", "_data": {"group_size": 2**60}}), (".",)),
    Case("torchao dtype", torchao("IntxWeightOnlyConfig", weight_dtype={"_type": "evil.dtype", "_data": "evil"}), (".",)),
    Case(
        "torchao version",
        quantize(quant_method="torchao", quant_type={"default": {"_type": "Int8WeightOnlyConfig", "_version": -1}}),
        ("version",),
    ),
    Case("torchao plain weights", torchao("Int8WeightOnlyConfig"), ("down_proj.weight",)),
    Case("torchao no type", quantize(quant_method="torchao"), ("quant_type",)),
]

# Layers of the llama family in GGUF files.
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TEXT, UINT32, ARRAY = 8, 4, 9  # types of values
FILE = "model.gguf"


def text(content: str | bytes, length: int | None = None) -> bytes:
    raw = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: tuple[int, ...] = (128,), kind: int = 0, offset: int = 0, count: int | None = None) -> bytes:
    """The description of a tensor."""
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + struct.pack("<I", len(dims) if count is None else count) + sizes + struct.pack("<IQ", kind, offset)


NEEDED = (
    pair("general.architecture", TEXT, text("llama")),
    pair("llama.attention.head_count", UINT32, struct.pack("<I", 4)),
    pair("llama.attention.head_count_kv", UINT32, struct.pack("<I", 2)),
)


def gguf(
    *infos: bytes,
    pairs: tuple[bytes, ...] = (),
    counts: tuple[int | None, int | None] = (None, None),
    version: int = 3,
    data: bytes = bytes(4096),
    needed: tuple[bytes, ...] = NEEDED,
) -> bytes:
    """A file with these descriptions; `counts`: of tensors and values, as its head says."""
    values = (*needed, *pairs)
    tensors, fields = (len(each) if count is None else count for each, count in zip((infos, values), counts, strict=True))
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + b"".join(values) + b"".join(infos)
    return head + bytes(-len(head) % 32) + data


def write_gguf(plain: Path, folder: Path) -> Path:
    """The checkpoint as a GGUF file of float32."""
    shutil.copytree(plain, folder)
    infos, data = [], b""
    for name, stored in sorted(load_file(folder / WEIGHTS).items()):
        stem = re.sub(r"^model\.layers\.\d+\.", "", name.removesuffix(".weight"))
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        named = f"{f'blk.{layer[1]}.' if layer else ''}{GGUF_NAMES[stem]}.weight"
        infos.append(tensor(named, tuple(reversed(stored.shape)), offset=len(data)))
        data += stored.numpy().tobytes()
    (folder / WEIGHTS).unlink()
    (folder / FILE).write_bytes(gguf(*infos, data=data))
    (folder / "load.json").write_text('{"load_format": "gguf", "quantization": "gguf"}')
    return folder


def write_nf4(plain: Path, folder: Path) -> Path:
    """The checkpoint with the projections in NF4."""
    shutil.copytree(plain, folder)
    stored = load_file(folder / WEIGHTS)
    for name, weight in list(stored.items()):
        if "_proj" in name:
            description = nf4(shape=list(weight.shape))
            stored[name] = torch.randint(0, 256, (weight.numel() // 2, 1), dtype=torch.uint8)
            stored[f"{name}.absmax"] = torch.rand(weight.numel() // 64) * 0.1
            stored[f"{name}.quant_map"] = torch.tensor(NF4)
            stored[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(description).encode()), dtype=torch.uint8)
    save_file(stored, folder / WEIGHTS, {"format": "pt"})
    quantize(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")(folder)
    return folder


def nested_array(depth: int) -> bytes:
    return struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQI", UINT32, 1, 0)


GGUF = [
    *(
        Case(f"gguf {name}", write(FILE, content), (rf"{FILE}|model\.\S+|lm_head",), "gguf")
        for name, content in {
            "empty": b"",
            "magic": b"GGML" + bytes(64),
            "head alone": gguf()[:24],
            "version 0": gguf(version=0),
            "version 1": gguf(version=1),
            "version large": gguf(version=2**32 - 1),
            "big endian": gguf(version=3 << 24),
            "tensors 2^63": gguf(counts=(1 << 63, None)),
            "tensors 2^40": gguf(counts=(1 << 40, None)),
            "values 2^63": gguf(counts=(None, 1 << 63)),
            "values 2^40": gguf(counts=(None, 1 << 40)),
            "values 10^6": gguf(counts=(None, 10**6)),
            "key 2^63": gguf(pairs=(text("a", 1 << 63),)),
            "key 2^40": gguf(pairs=(text("a", 1 << 40),)),
            "text 2^63": gguf(pairs=(pair("a", TEXT, text("", 1 << 63)),)),
            "text beyond": gguf(pairs=(pair("a", TEXT, text("", 1 << 20)),)),
            "array 2^63": gguf(pairs=(pair("a", ARRAY, struct.pack("<IQ", UINT32, 1 << 63)),)),
            "array of 2^19 and no data": gguf(pairs=(pair("a", ARRAY, struct.pack("<IQ", UINT32, 1 << 19)),)),
            "array of arrays": gguf(pairs=(pair("a", ARRAY, nested_array(3)),)),
            "array of arrays 10^4": gguf(pairs=(pair("a", ARRAY, nested_array(10**4)),)),
            "array of unknown": gguf(pairs=(pair("a", ARRAY, struct.pack("<IQ", 99, 1)),)),
            "value of unknown": gguf(pairs=(pair("a", 99, bytes(8)),)),
            "key no UTF-8": gguf(pairs=(pair(b"\xff\xfe", UINT32, bytes(4)),)),
            "key twice": gguf(pairs=(pair("llama.attention.head_count", UINT32, bytes(4)),)),
            "no architecture": gguf(needed=NEEDED[1:]),
            "no heads": gguf(needed=NEEDED[:1]),
            "architecture number": gguf(needed=(pair("general.architecture", UINT32, bytes(4)), *NEEDED[1:])),
            "architecture array": gguf(needed=(pair("general.architecture", ARRAY, struct.pack("<IQI", UINT32, 1, 0)), *NEEDED[1:])),
            "architecture evil": gguf(needed=(pair("general.architecture", TEXT, text("../evil")), *NEEDED[1:])),
            "heads text": gguf(needed=(NEEDED[0], pair("llama.attention.head_count", TEXT, text("x")), NEEDED[2])),
            "heads 0": gguf(
                tensor("blk.0.attn_q.weight", (8, 8)), needed=(NEEDED[0], pair("llama.attention.head_count", UINT32, bytes(4)))
            ),
            "alignment 0": gguf(pairs=(pair("general.alignment", UINT32, bytes(4)),)),
            "alignment text": gguf(pairs=(pair("general.alignment", TEXT, text("x")),)),
            "alignment large": gguf(tensor("output_norm.weight"), pairs=(pair("general.alignment", UINT32, struct.pack("<I", 2**31)),)),
            "tensor type": gguf(tensor("output_norm.weight", kind=99)),
            "tensor type large": gguf(tensor("output_norm.weight", kind=2**32 - 1)),
            "dims overflow": gguf(tensor("output_norm.weight", (2**32, 2**32))),
            "dims overflow 2": gguf(tensor("output_norm.weight", (2**63, 2))),
            "dims zero": gguf(tensor("output_norm.weight", (0,))),
            "dims none": gguf(tensor("output_norm.weight", ())),
            "dims 2^32": gguf(tensor("output_norm.weight", (64,), count=2**32 - 1)),
            "dims many": gguf(tensor("output_norm.weight", (1,) * 1000)),
            "offset beyond": gguf(tensor("output_norm.weight", offset=1 << 40)),
            "offset 2^63": gguf(tensor("output_norm.weight", offset=1 << 63)),
            "offset wraps": gguf(tensor("output_norm.weight", offset=(1 << 64) - 32)),
            "name 2^63": gguf(text("a", 1 << 63)),
            "name no UTF-8": gguf(text(b"\xff\xfe") + struct.pack("<IQIQ", 1, 64, 0, 0)),
            "name twice": gguf(tensor("output_norm.weight"), tensor("output_norm.weight")),
            "name unknown": gguf(tensor("../../evil.weight")),
            "layer large": gguf(tensor(f"blk.{9**30}.attn_q.weight", (8, 8))),
            "block odd": gguf(tensor("blk.0.attn_q.weight", (33, 8), kind=2)),
            "lacking": gguf(tensor("output_norm.weight")),
            "overlapping": gguf(tensor("output_norm.weight"), tensor("output.weight", (64, 2), offset=32)),
            "shapes": gguf(tensor("output_norm.weight", (64, 2))),
            "experts large": gguf(tensor("blk.0.ffn_gate_exps.weight", (1, 1, 2**31))),
        }.items()
    ),
    Case("gguf fifo", make_fifo(FILE), (FILE, "regular file"), "gguf"),
    Case("gguf device", link(FILE, "/dev/zero"), (FILE, "regular file"), "gguf"),
    Case("gguf two files", write("other.gguf", b""), ("2 GGUF files",), "gguf"),
]

FLIPPED_GGUF = [Case(f"gguf {seed}", flip(FILE, seed, 1200), (".",), "gguf", may_load=True) for seed in range(24)]
FLIPPED_NF4 = [Case(f"nf4 {seed}", flip(WEIGHTS, seed, 1 << 20), (".",), "bitsandbytes", may_load=True) for seed in range(8)]
