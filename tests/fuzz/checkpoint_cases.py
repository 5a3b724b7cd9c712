"""Damaged and hostile checkpoints for `test_checkpoints.py`: each case changes a copy of a whole
one, and says what the error names."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Change = Callable[[Path], object]
WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
PICKLE, EVIL = b"cevil\nrun\n(tR.", "raise SystemExit"


@dataclass(frozen=True)
class Case:
    """A change of a checkpoint. `says`: regular expressions that the error matches; none: it loads,
    and the change has no effect. `may_load`: it may. `base`: the checkpoint that it changes."""

    name: str
    change: Change
    says: tuple[str, ...]
    base: str = "plain"
    may_load: bool = False


def configure(*paths: str, to: Any) -> Change:
    """Set a field of config.json."""

    def change(folder: Path) -> None:
        content = json.loads((folder / CONFIG).read_text())
        place = content
        for path in paths[:-1]:
            place = place.setdefault(path, {})
        place[paths[-1]] = to
        (folder / CONFIG).write_text(json.dumps(content))

    return change


def remove(name: str) -> Change:
    """Remove a field of config.json."""

    def change(folder: Path) -> None:
        content = json.loads((folder / CONFIG).read_text())
        del content[name]
        (folder / CONFIG).write_text(json.dumps(content))

    return change


def write(name: str, content: str | bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def make_fifo(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def link(name: str, target: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return change


def extend(name: str, size: int) -> Change:
    """A sparse file of this size."""

    def change(folder: Path) -> None:
        (folder / name).touch()
        os.truncate(folder / name, size)

    return change


def flip(name: str, seed: int, first: int = 4096) -> Change:
    """Replace some of the first bytes of a file."""

    def change(folder: Path) -> None:
        numbers, content = random.Random(seed), bytearray((folder / name).read_bytes())
        for _ in range(numbers.choice((1, 1, 2, 8))):
            content[numbers.randrange(min(first, len(content)))] = numbers.choice((0, 0xFF, 0x7F, numbers.randrange(256)))
        (folder / name).write_bytes(content)

    return change


def header(text: str | bytes, data: bytes = b"", size: int | None = None) -> bytes:
    """A safetensors file."""
    content = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(content) if size is None else size) + content + data


def entry(name: str, shape: str = "[1]", offsets: str = "[0,4]", dtype: str = "F32") -> str:
    return f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


def replace(name: str, value: Any) -> Change:
    """Change a tensor of the file: None removes it, a function maps it."""

    def change(folder: Path) -> None:
        stored = load_file(folder / WEIGHTS)
        if value is None:
            del stored[name]
        else:
            stored[name] = (value(stored[name]) if callable(value) else value).contiguous()
        save_file(stored, folder / WEIGHTS, {"format": "pt"})

    return change


def name_shards(*shards: str) -> Change:
    """An index whose tensors are in these files."""
    return write(INDEX, json.dumps({"weight_map": {f"tensor.{number}": shard for number, shard in enumerate(shards)}}))


def nest(depth: int, opening: str = "[", closing: str = "]") -> str:
    return opening * depth + closing * depth


OTHERS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "modules.json")
FILES = [
    *(Case(f"fifo {name}", make_fifo(name), (name, "regular file")) for name in (CONFIG, WEIGHTS, INDEX, *OTHERS, "hf_quant_config.json")),
    *(
        Case(f"device {name}", link(name, "/dev/zero"), (name, "regular file"))
        for name in (CONFIG, WEIGHTS, INDEX, "tokenizer.json", "chat_template.jinja")
    ),
    *(Case(f"sparse {name}", extend(name, 1 << 40), (name, "too large|larger than")) for name in (CONFIG, INDEX, *OTHERS)),
    *(Case(f"loop {name}", link(name, name), (name, "symbolic links")) for name in (CONFIG, WEIGHTS, INDEX, "tokenizer.json")),
    *(
        Case(f"no utf-8 {name}", write(name, b"\xff\xfe{}"), (name,))
        for name in (CONFIG, INDEX, "tokenizer_config.json", "chat_template.jinja")
    ),
    *(Case(f"nested {name}", write(name, nest(100_000)), (name,)) for name in (CONFIG, INDEX, "tokenizer.json", "modules.json")),
    *(Case(f"nested objects {name}", write(name, nest(100_000, '{"a":', "}").replace("}", "1}", 1)), (name,)) for name in (CONFIG, INDEX)),
    *(Case(f"other type {name}", write(name, "[1]"), (name,)) for name in (CONFIG, INDEX, "tokenizer.json", "generation_config.json")),
    Case("secret config", link(CONFIG, "/etc/passwd"), (CONFIG, "not valid JSON")),
    Case("secret weights", link(WEIGHTS, "/etc/passwd"), (WEIGHTS, "truncated or damaged")),
]

SAFETENSORS = [
    *(
        Case(f"length {size:#x}", write(WEIGHTS, header("{}", size=size)), (WEIGHTS,))
        for size in (1 << 63, (1 << 64) - 1, 1 << 40, 1 << 20)
    ),
    Case("empty file", write(WEIGHTS, b""), (WEIGHTS,)),
    Case("no JSON", write(WEIGHTS, header("x" * 64)), (WEIGHTS,)),
    Case("nested header", write(WEIGHTS, header(f'{{"a":{nest(200_000)}}}')), (WEIGHTS,)),
    Case("twice", write(WEIGHTS, header(f"{{{entry('a')},{entry('a', offsets='[4,8]')}}}", bytes(8))), (WEIGHTS,)),
    Case("overlap", write(WEIGHTS, header(f"{{{entry('a')},{entry('b', offsets='[2,6]')}}}", bytes(8))), (WEIGHTS,)),
    Case("beyond", write(WEIGHTS, header(f"{{{entry('a', offsets='[0,400]', shape='[100]')}}}", bytes(8))), (WEIGHTS,)),
    Case("backward", write(WEIGHTS, header(f"{{{entry('a', offsets='[4,0]')}}}", bytes(8))), (WEIGHTS,)),
    Case("hole", write(WEIGHTS, header(f"{{{entry('a', offsets='[4,8]')}}}", bytes(8))), (WEIGHTS,)),
    Case("product", write(WEIGHTS, header(f"{{{entry('a', shape='[4294967296,4294967296,4294967296]')}}}", bytes(8))), (WEIGHTS,)),
    Case("negative", write(WEIGHTS, header(f"{{{entry('a', shape='[-1]')}}}", bytes(8))), (WEIGHTS,)),
    Case("dtype", write(WEIGHTS, header(f"{{{entry('a', dtype='X9')}}}", bytes(8))), (WEIGHTS,)),
    Case("zero sizes", replace("model.norm.weight", torch.zeros(0)), ("model.norm.weight", r"\[0\]")),
    Case("other shape", replace("model.norm.weight", torch.zeros(2, 2)), ("model.norm.weight", r"\[2, 2\]")),
    Case("lacking", replace("model.norm.weight", None), ("model.norm.weight",)),
    Case("complex", replace("model.norm.weight", torch.zeros(128, dtype=torch.complex64)), ("C64|complex",)),
    Case("traversal", name_shards("../../etc/passwd"), (INDEX, "outside of its folder")),
    Case("absolute", name_shards("/etc/passwd"), (INDEX, "outside of its folder")),
    Case("dots", name_shards(".."), (INDEX,)),
    Case("null byte", name_shards("a\0b.safetensors"), (INDEX,)),
    Case("long name", name_shards("a" * 100_000), (INDEX,)),
    Case("not text", write(INDEX, '{"weight_map": {"a": 1}}'), (INDEX,)),
    Case("no map", write(INDEX, "{}"), (INDEX,)),
    Case(
        "pickled shard",
        lambda folder: (name_shards("pytorch_model.bin")(folder), write("pytorch_model.bin", PICKLE)(folder)),
        ("pytorch_model.bin",),
    ),
    Case("pickle in its name", write(WEIGHTS, PICKLE), (WEIGHTS,)),
    *(
        Case(
            f"pickled {name}",
            lambda folder, name=name: ((folder / WEIGHTS).unlink(), write(name, PICKLE)(folder)),
            (name, "pickled weights"),
        )
        for name in (
            "pytorch_model.bin",
            "consolidated.00.pth",
            "model.pt",
            "model.ckpt",
        )
    ),
]

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "head_dim",
    "max_position_embeddings",
)
WRONG: tuple[tuple[Any, ...], ...] = ((-1, "x"), (1.5, 1 << 40), (True, {}), ([1], -(1 << 40)))
CONFIGS = [
    *(
        Case(f"{name} {value!r:.20}", configure(name, to=value), (CONFIG, name))
        for name, values in zip(SIZES, 2 * WRONG, strict=True)
        for value in values
    ),
    *(
        Case(f"{name} 0", configure(name, to=0), (".",))
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    ),
    *(Case(f"{name} large", configure(name, to=2**31 - 1), (CONFIG, name)) for name in (*SIZES[:6], "head_dim")),
    Case(
        "labels",
        lambda folder: (
            configure("architectures", to=["LlamaForSequenceClassification"])(folder),
            configure("num_labels", to=2**31 - 1)(folder),
        ),
        (CONFIG, "num_labels"),
    ),
    Case(
        "all large",
        lambda folder: [configure(name, to=2**24)(folder) for name in ("hidden_size", "intermediate_size", "vocab_size")],
        ("the KV cache does not fit", "GiB weights"),
    ),
    Case("300 layers", configure("num_hidden_layers", to=300), ("lacks", r"model\.layers\.\d")),
    Case("long number", write(CONFIG, '{"architectures": ["LlamaForCausalLM"], "vocab_size": ' + "9" * 100_000 + "}"), (CONFIG,)),
    Case("no architecture", configure("architectures", to=[{"a": 1}]), (CONFIG, "architecture")),
    Case("python class", configure("architectures", to=["os.system"]), ("os.system",)),
    Case("hidden_act", configure("hidden_act", to="evil.run"), ("hidden_act",)),
    Case("rope type", configure("rope_parameters", to={"rope_type": "evil", "rope_theta": 1.0}), ("evil",)),
    Case("rope theta", configure("rope_parameters", to={"rope_type": "default", "rope_theta": "x"}), ("rope_theta",)),
    Case("rope list", configure("rope_parameters", to=[1]), ("rope_parameters",)),
    Case("eps", configure("rms_norm_eps", to="x"), ("rms_norm_eps",)),
    *(Case(f"no {name}", remove(name), (CONFIG, name)) for name in ("intermediate_size", "vocab_size", "num_hidden_layers")),
    Case("experts", configure("num_local_experts", to=2**31 - 1), (CONFIG, "num_local_experts")),
    Case(
        "rope factor",
        configure("rope_parameters", to={"rope_type": "linear", "rope_theta": 1.0, "factor": [2]}),
        ("rope_parameters.factor",),
    ),
    Case("quantization method", configure("quantization_config", to={"quant_method": "evil.Method"}), ("evil.Method",)),
    Case("quantization list", configure("quantization_config", to=[1]), (CONFIG, "quantization_config")),
    Case("quantization type", configure("quantization_config", to={"quant_method": ["gptq"]}), (CONFIG, "quantization_config")),
    Case(
        "remote code",
        lambda folder: (
            configure("auto_map", to={"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"})(folder),
            configure("architectures", to=["EvilForCausalLM"])(folder),
            write("evil.py", EVIL)(folder),
        ),
        ("--trust-remote-code",),
    ),
    Case(
        "remote tokenizer",
        lambda folder: (
            (folder / "tokenizer.json").unlink(),
            write("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["evil.Slow", null]}}')(folder),
            write("evil.py", EVIL)(folder),
        ),
        ("--trust-remote-code",),
    ),
    Case(
        "unused remote code",
        lambda folder: (
            configure("auto_map", to={"AutoModelForCausalLM": "evil.Model"})(folder),
            write("evil.py", EVIL)(folder),
        ),
        (),
    ),
]

TOKENIZERS = [
    Case("tokenizer no object", write("tokenizer.json", "3"), ("tokenizer.json",)),
    Case("tokenizer model", write("tokenizer.json", '{"version": "1.0", "model": {"type": "Evil"}}'), ("tokenizer.json",)),
    Case("tokenizer empty", write("tokenizer.json", ""), ("tokenizer.json",)),
    Case(
        "template type",
        lambda folder: (
            (folder / "chat_template.jinja").unlink(),
            write("chat_template.json", '{"chat_template": 3}')(folder),
        ),
        ("chat_template.json",),
    ),
    Case("token type", write("tokenizer_config.json", '{"bos_token": [1]}'), ("tokenizer_config.json", "bos_token")),
    Case(
        "modules outside",
        lambda folder: (write("modules.json", '[{"type": "Pooling", "path": "../../../../../../etc"}]')(folder),),
        ("modules.json",),
    ),
]

NAMES = (CONFIG, WEIGHTS, "tokenizer.json", "tokenizer_config.json", "generation_config.json")
FLIPPED = [Case(f"{name} {seed}", flip(name, seed), (".",), may_load=True) for name in NAMES for seed in range(6)]
