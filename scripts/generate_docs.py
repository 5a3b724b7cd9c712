"""Writes docs/reference/ from the code: configuration, hooks, capabilities, conformance, plugins,
building blocks of models, flags of other servers, command line.

`--check` writes nothing and fails when a page is out of date. Imports no torch: records, schemas
and docstrings hold everything.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script

from scripts.markdown import NOTE, code, table

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"


# ---- configuration -------------------------------------------------------------------------------


def configuration() -> str:
    """Every setting with its key, flag, variable, default and meaning."""
    from frame.config.schema import FrameConfig
    from frame.entrypoints.configuration.flat_settings import ALIASES, settings
    from frame.entrypoints.configuration.tier_flags import TIER_FLAGS

    parts = [
        "# Configuration reference",
        NOTE,
        (
            "This page is for users and operators: every setting with its flag, default and values. A setting can be given in a YAML "
            "file (`section:` and below it `key:`), as an environment variable, or as a flag. A flag overrides a variable, a variable "
            "the file, the file the default. With `auto` frame chooses, and `frame config explain` shows the choice and its reason. "
            "[Configuration](../configuration.md) explains the rest."
        ),
    ]
    by_section: dict[str, list[Any]] = {}
    for setting in settings():
        by_section.setdefault(setting.key.partition(".")[0], []).append(setting)
    for section, found in by_section.items():
        model = FrameConfig.model_fields[section].annotation
        parts += [f"## {section}", inspect.getdoc(model) or ""]
        rows = [[code(s.key), _flag(s), _default(s), _values(model, s), s.description] for s in found]
        parts.append(table(["key", "flag", "default", "values", "meaning"], rows))
    others = {flag: text for flag, (_, _, text) in ALIASES.items()} | {flag: text for flag, (_, text) in TIER_FLAGS.items()}
    parts += ["## Other flags", table(["flag", "meaning"], [[code(f"--{flag}"), text] for flag, text in others.items()])]
    parts += [
        "## Environment variables",
        (
            "`FRAME_` and the key in capitals, with `__` between section and name: `cache.page_size` is `FRAME_CACHE__PAGE_SIZE`. "
            "`FRAME_CONFIG` names the file."
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _flag(setting: Any) -> str:
    return "" if setting.shape == "table" else code(f"--{setting.flag}")


def _default(setting: Any) -> str:
    if setting.default is None:
        return "auto" if _has_auto(setting) else "not set"
    if setting.default == () or setting.default == {}:
        return "empty"
    return code(str(setting.default).lower() if isinstance(setting.default, bool) else setting.default)


def _has_auto(setting: Any) -> bool:
    from frame.config.schema import FrameConfig
    from frame.config.section import Auto

    section, name = setting.key.split(".")
    field = FrameConfig.model_fields[section].annotation.model_fields[name]  # type: ignore[union-attr]
    return Auto in field.metadata


def _values(model: Any, setting: Any) -> str:
    if setting.choices:
        return ", ".join(code(choice) for choice in setting.choices)
    bounds = {type(item).__name__: item for item in model.model_fields[setting.key.partition(".")[2]].metadata}
    words = {"Ge": ("from", "ge"), "Gt": ("above", "gt"), "Le": ("to", "le"), "Lt": ("below", "lt")}
    limits = " ".join(f"{word} {getattr(bounds[kind], name):g}" for kind, (word, name) in words.items() if kind in bounds)
    if setting.shape == "switch":
        return "`true`, `false`"
    if setting.shape == "list":
        return "list of words"
    if setting.shape == "table":
        return "table"
    names = {int: "integer", float: "number", str: "text"}
    kind = next((names[leaf] for leaf in setting.accepts if leaf in names), "text")
    return f"{kind} {limits}".strip()


# ---- hooks ---------------------------------------------------------------------------------------


def hooks() -> str:
    """Every hook with its arguments, and the table of plugin kinds."""
    from frame.interfaces.kinds import KINDS
    from frame.plugins import hookspecs
    from frame.registration import PROJECT

    found = {name: value for name, value in vars(hookspecs).items() if hasattr(value, f"{PROJECT}_spec")}
    registers = [name for name in found if name.startswith("register_")]
    observers = [name for name in found if name.startswith("on_")]
    parts = [
        "# Hooks",
        NOTE,
        (
            "This page is for plugin authors: the kinds of plugins and every hook. A plugin package lists its manifest modules in the "
            "entry-point group `frame` and marks functions in them with `@frame.hookimpl`. `register_…` hooks add records when a process "
            "starts. `on_…` hooks are observers: they take the arguments they declare, their results are ignored, and one that raises "
            "is logged and switched off. No hook is called inside a forward pass."
        ),
        "## Kinds of plugins",
        table(
            ["kind", "setting", "hook", "interface", "class to derive from", "context"],
            [
                [code(text.replace(":", ".")) for text in (k.name, k.key or "frame NAME", k.hook, k.api, k.interface_path, k.context_path)]
                for k in KINDS.values()
            ],
        ),
        "## Registration",
        *(_hook(name, found[name]) for name in registers),
        "`registry.add` takes:",
        _add_arguments(),
        "## Observers",
        *(_hook(name, found[name]) for name in observers),
    ]
    return "\n\n".join(parts) + "\n"


def _hook(name: str, function: Callable[..., Any]) -> str:
    arguments = ", ".join(inspect.signature(function).parameters)
    return f"### `{name}({arguments})`\n\n{inspect.getdoc(function)}"


def _add_arguments() -> str:
    from frame.registration import KindRegistry

    signature = inspect.signature(KindRegistry.add)
    text = ", ".join(str(parameter) for name, parameter in signature.parameters.items() if name != "self")
    documentation = (inspect.getdoc(KindRegistry.add) or "").replace("\n", " ")
    return f"```python\nregistry.add({text})\n```\n\n{documentation}"


# ---- plugins -------------------------------------------------------------------------------------


def own_records() -> Mapping[str, list[Any]]:
    """Built-in plugins by kind, best-ranked first."""
    from frame.plugins.loader import load_registry

    return load_registry(installed=False).all_records()


def plugins() -> str:
    """Every plugin that is part of the package."""
    parts = [
        "# Built-in plugins",
        NOTE,
        (
            "This page is for users and plugin authors: every plugin that is part of the package. `frame plugins list` shows these and "
            "all other installed plugins; `frame plugins info NAME` shows the capabilities and options of one."
        ),
    ]
    for kind, records in own_records().items():
        if records:
            parts.append(f"## {kind}")
            rows = [[code(r.name), r.summary, ", ".join(map(code, r.requires)) or "", _options(r)] for r in records]
            parts.append(table(["name", "what it is", "needs", "options"], rows))
    return "\n\n".join(parts) + "\n"


def _options(record: Any) -> str:
    if record.options is None:
        return ""
    fields = record.options.model_fields
    return "; ".join(f"`{name}` ({field.default!r}): {field.description or ''}".rstrip(": ") for name, field in fields.items())


def backends() -> str:
    """What each plugin with capabilities supports, one column per plugin."""
    parts = [
        "# Capabilities",
        NOTE,
        (
            "This page is for operators and plugin authors: what each built-in plugin supports, from the capability records that also "
            "drive `auto`, checks and error texts. `any` means no limit."
        ),
    ]
    for kind, records in own_records().items():
        with_fields = [r for r in records if dataclasses.is_dataclass(r.capabilities) and dataclasses.fields(r.capabilities)]
        if with_fields:
            parts += [f"## {kind}", _matrix(kind, with_fields)]
    return "\n\n".join(parts) + "\n"


def _matrix(kind: str, records: Sequence[Any]) -> str:
    names = [field.name for field in dataclasses.fields(records[0].capabilities)]
    if kind == "model":  # many records with few fields: a row each
        return table(
            ["model", *(name.replace("_", " ") for name in names)],
            [[code(r.name), *(_cell(getattr(r.capabilities, name), name) for name in names)] for r in records],
        )
    rows = [[name.replace("_", " "), *(_cell(getattr(r.capabilities, name), name) for r in records)] for name in names]
    return table(["", *(code(r.name) for r in records)], rows)


def _cell(value: Any, name: str) -> str:
    if value is None:
        return "the model's dtype" if name == "kv_dtypes" else "any"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "selects":
        return ", ".join(f"{key}: {json.dumps(part)}" for key, part in value)
    if isinstance(value, tuple):
        return ", ".join("plain" if part is None else str(part) for part in value) or "none"
    return str(value)


# ---- conformance ---------------------------------------------------------------------------------


def models() -> str:
    """What each model plugin serves, one row per plugin."""
    from frame.testing.checkpoints import TINY
    from tests.models.media_checkpoints import FAMILIES

    rows = []
    for record in own_records()["model"]:
        able = record.capabilities
        names = able.architectures
        if names is None:
            shown, checked = "any other decoder", "transformers, some of them"
        else:
            shown = ", ".join(map(code, names))
            checked = f"transformers: {', '.join(code(name) for name in names if name in TINY or name in FAMILIES or able.cross_attention)}"
        groups = ["tokens", *["window"] * (able.windows or names is None), *["snapshot"] * able.recurrent, *["sidecar"] * able.sparse]
        groups += ["write_once"] * able.cross_attention
        rows.append(
            [
                code(record.name),
                shown,
                "fallback" if names is None else "native",
                _yes(able.tensor_parallel),
                "linear layers" if names is None else "yes",
                _yes(able.graphs and not able.encoder),
                "none" if able.encoder else ", ".join(groups),
                "`mtp`" if able.draft_layers else "none",
                _yes(able.adapters),
                "audio" if able.cross_attention else ", ".join(able.modalities) or "none",
                checked,
            ]
        )
    head = ["plugin", "architectures", "form", "tp", "quantization", "graphs", "cache groups", "draft layers", "LoRA", "media"]
    head.append("checked against")
    return "\n\n".join([
        "# Models",
        NOTE,
        ("This page is for operators: which checkpoints the built-in model plugins serve. `fallback`: the layers "
        "of the installed transformers, over the paged cache. `tp`: `parallel.tp` above 1. `quantization`: the "
        "weight formats of [quantization](quantization.md). `graphs`: CUDA graphs. `cache groups`: what layers may store, keys "
        "and values of all tokens, those of a sliding window, a snapshot of a recurrent state, in a sidecar the keys of an "
        "indexer, or in write_once the keys and values of an "
        "encoder's output. `draft layers`: the drafter of the multi-token-prediction module that checkpoints may have. "
        "`LoRA`: [adapters](lora.md). `media`: what a prompt may hold besides text, where the checkpoint has an encoder for it: images "
        "and videos by its `vision_config`, audio by its `audio_config`. The encoders are those of the installed transformers, on every "
        "rank. `checked against`: tests compare the logits and the greedy tokens of small random checkpoints in float32, with encoders the "
        "logits of prompts with each of its media. Other `ForConditionalGeneration` checkpoints go through the fallback, "
        "[some of them](multimodal.md) with their encoder of images. [Whisper](speech.md) transcribes."),
        table(head, rows),
        ("**LongRoPE** (Phi-3 with 128k tokens, Phi-3.5, Phi-4-mini) has two lists of rotary factors. Models, also of the fallback, "
        "choose one at the start: the long factors if the context (`--max-model-len`, by default the checkpoint's) exceeds the original "
        "length of the checkpoint, else the short ones. So all requests share cached keys, and a request that grows beyond the original "
        "length keeps its keys. transformers chooses by the length of each sequence. With the long factors, prompts within the original "
        "length give other logits and texts than transformers, and a warning at the start says so; longer prompts give the same. "
        "`--max-model-len` of at most the original length (4096 for Phi-3-mini-128k) gives the short factors, and the results of "
        "transformers. With rope type `dynamic`, a token beyond the trained length turns as in a sequence that ends there."),
    ]) + "\n"  # fmt: skip


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def conformance() -> str:
    """What the kit has for each kind of plugin, and what its suites find."""
    from scripts.conformance_page import conformance_page

    return conformance_page(REFERENCE.parents[1])


# ---- building blocks of models -------------------------------------------------------------------


def model_blocks() -> str:
    """The classes and functions that model plugins are built from."""
    from scripts.model_blocks import blocks, introduction

    parts = [
        "# Building blocks of models",
        NOTE,
        "This page is for authors of model plugins: what `frame.models.layers` offers, with its promise of stability.",
        introduction(),
    ]
    for name, text in blocks():
        parts += [f"## {name}", text]
    return "\n\n".join(parts) + "\n"


# ---- flags of other servers ----------------------------------------------------------------------


def other_servers() -> str:
    """The table of flags of other servers."""
    from frame.entrypoints.configuration.equivalents import EQUIVALENTS

    rows = []
    for each in EQUIVALENTS:
        values = ", ".join(f"{code(other)} is {code(own)}" for other, own in each.values.items() if other != "*")
        use = code(each.use.replace("{}", "VALUE")) if each.use else ""
        note = "; ".join(part for part in (each.note, values) if part)
        rows.append([" ".join(map(code, each.names)), ", ".join(each.servers), use, note])
    return "\n\n".join([
        "# Flags of other servers",
        NOTE,
        ("This page is for users of vLLM, SGLang and llama.cpp: what frame has for their flags. Flags that frame also has under "
        "the same name, such as `--served-model-name` or `--chunked-prefill-size`, are left out. `frame serve` prints the row of "
        "such a flag. Values are those of the other server unless the note says otherwise."),
        table(["flag", "of", "in frame", "note"], rows),
    ]) + "\n"  # fmt: skip


# ---- command line --------------------------------------------------------------------------------


def command_line() -> str:
    """The help of every command."""
    from scripts.cli_help import help_pages, shared_flags

    parts = [
        "# Command line",
        NOTE,
        (
            "This page is for users and operators: the help of every command. The flags of settings are listed once, under "
            "[shared flags](#shared-flags)."
        ),
    ]
    for name, text in [*help_pages(), ("Shared flags", shared_flags())]:
        parts += [f"## {name}", f"```text\n{text.strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def rooms() -> str:
    """The picture of the rooms and of the imports between them."""
    from scripts.draw_rooms import draw_rooms

    return draw_rooms()


def determinism() -> str:
    """The page of the batch-invariant mode, with its table of the parts that have it."""
    marker = "<!-- The table is written by `make docs` from the capability records. -->"
    before, after = (REFERENCE.parent / "determinism.md").read_text().split(marker)
    rows = []
    for kind in ("attention_backend", "gemm_kernel", "moe_runner", "moe_dispatcher", "collective", "model"):
        records = sorted(own_records()[kind], key=lambda record: record.name)
        have = [[_name_devices(each) for each in records if each.capabilities.batch_invariant is wanted] for wanted in (True, False)]
        rows.append([code(kind), *(", ".join(names) for names in have)])
    text = after[after.index("\n\nNot in this mode") :]
    return f"{before}{marker}\n\n{table(['kind', 'batch-invariant', 'not'], rows)}{text}"


def _name_devices(record: Any) -> str:
    """The name of a part, with the devices on which it is batch-invariant if these are not all."""
    devices = getattr(record.capabilities, "invariant_on", ())
    return f"{code(record.name)} ({', '.join(devices)})" if devices else code(record.name)


PAGES: Mapping[str, Callable[[], str]] = {
    "backends.md": backends,
    "cli.md": command_line,
    "config.md": configuration,
    "conformance.md": conformance,
    "hooks.md": hooks,
    "model_blocks.md": model_blocks,
    "other_servers.md": other_servers,
    "../determinism.md": determinism,
    "../models.md": models,
    "plugins.md": plugins,
    "rooms.svg": rooms,
}


def stale(folder: Path = REFERENCE) -> list[str]:
    """Names of the pages that differ from the code."""
    return [name for name, make in PAGES.items() if not (folder / name).is_file() or (folder / name).read_text() != make()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page is stale")
    if parser.parse_args(arguments).check:
        found = stale()
        print(f"stale: {', '.join(found)}; run `make docs`" if found else "docs/reference is up to date")
        return bool(found)
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (REFERENCE / name).write_text(make())
    return 0


if __name__ == "__main__":
    sys.exit(main())
