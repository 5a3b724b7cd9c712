"""Patterns of layer names, as the configurations of quantized checkpoints write them. Used by the
weight formats. Must not know a format."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import lru_cache

# How the names of a model's body begin: by itself, beside encoders (transformers 5 and 4), beside a
# model that speaks (Qwen3-Omni), and of Nemotron-H.
_BODIES = ("model.", "model.language_model.", "language_model.model.", "thinker.model.", "backbone.")
_BODY = re.compile(r"model\.language_model\.|(?:language_model|thinker)\.(?:model\.|(?=lm_head))|model\.|backbone\.")
_MARKS = re.compile(r"[\\^$|(+]")  # of regular expressions, which no layer's name has
# Layers that checkpoints may store as one, and what a pattern has that means it: `.*up_proj` means
# a layer alone. Any pattern may mean the projections of recurrent layers, which are stored as one
# always.
_FUSED = {
    "q_proj": ("qkv_proj", "qkv"),
    "k_proj": ("qkv_proj", "qkv"),
    "v_proj": ("qkv_proj", "qkv"),
    "gate_proj": ("gate_up_proj", "gate_up"),
    "up_proj": ("gate_up_proj", "gate_up"),
    **{f"in_proj_{part}": ("in_proj_qkv", "") for part in "qkv"},
    # of Mamba-2; other recurrent layers have an `in_proj_z` of their own
    **{f"{parent}.in_proj_{part}": ("in_proj", "") for parent in ("mamba", "mixer") for part in ("z", "x", "b", "c", "dt")},
}


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches one of a layer's names: the name itself, an enclosing module (also
    with a dot after it), its last parts, `*` for anything, or a regular expression after `re:`.
    Without `re:` an expression ends where a part of the name ends, as in transformers
    (`should_convert_module`)."""
    if (expression := find_expression(pattern)) is not None:
        return find_match(expression, name)
    pattern = pattern.removesuffix(".")
    return any(_fits(pattern, layer) or _fits(_strip_body(pattern), _strip_body(layer)) for layer in _list_layers(pattern, name))


def find_expression(pattern: str) -> str | None:
    """The regular expression that a pattern is; None: it is a name."""
    if pattern.startswith("re:"):
        return pattern.removeprefix("re:")
    return rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))" if _MARKS.search(pattern) else None


def find_match(expression: str, name: str) -> bool:
    """Whether a regular expression matches one of a layer's names from its start."""
    return any(re.match(expression, alias) for layer in _list_layers(expression, name) for alias in _list_aliases(layer))


def _fits(pattern: str, name: str) -> bool:
    if "*" in pattern:
        return fnmatchcase(name, pattern)
    return name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}") or f".{pattern}." in name


@lru_cache(1 << 14)
def _strip_body(name: str) -> str:
    return name[body.end() :] if (body := _BODY.match(name)) else name


def _list_layers(pattern: str, name: str) -> tuple[str, ...]:
    """The layer, and the one of which a checkpoint may make it a part, if the pattern means it."""
    prefix, dot, last = name.rpartition(".")
    fused, mark = _FUSED.get(last) or _FUSED.get(f"{prefix.rpartition('.')[2]}.{last}", ("", ""))
    return (name, f"{prefix}{dot}{fused}") if fused and mark in pattern else (name,)


@lru_cache(1 << 14)
def _list_aliases(name: str) -> tuple[str, ...]:
    """The names that a configuration may have for a layer, the model's own first."""
    if name == "lm_head":
        return name, f"language_model.{name}", f"thinker.{name}"
    return tuple(body + name.removeprefix("model.") for body in _BODIES) if name.startswith("model.") else (name,)
