"""Writes the package of `frame plugins new KIND NAME`: one working plugin, its manifest and its
tests.

Each kind has an implementation in `templates/`, a `string.Template` file. Must not
know the registry.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template

from frame.core.errors import ConfigurationError
from frame.interfaces.kinds import KINDS, Kind

_NAME = re.compile(r"[a-z][a-z0-9_-]*")

# `capabilities=` in the manifest with its import. Kinds without an entry have no requirements.
_CAPABILITIES: Mapping[str, tuple[str, str]] = {
    "adapter": ("frame.interfaces.adapter", 'AdapterCapabilities(selects=(("format", "$name"),))'),
    "attention_backend": (
        "frame.core.interfaces.attention",
        """AttentionCapabilities(
    devices=("cpu", "cuda"),
    kinds=("mha", "mla"),
    kv_dtypes=("fp8_e4m3",),  # beside the model's own dtype
    sliding_window=True,
    soft_cap=True,
    sinks=True,
)""",
    ),
    "collective": ("frame.core.interfaces.collective", 'CollectiveCapabilities(devices=("cpu",))'),
    "drafter": ("frame.core.interfaces.drafter", "DrafterCapabilities()"),
    "grammar_backend": ("frame.core.interfaces.sampling", 'GrammarCapabilities(kinds=("choice",))'),
    "key_store": ("frame.interfaces.keys", "KeyStoreCapabilities(has_operators=True)"),
    "kv_tier": ("frame.core.interfaces.kv_tier", "KVTierCapabilities(in_memory=True)"),
    "logits_processor": ("frame.core.interfaces.sampling", 'ProcessorCapabilities(custom=("$name",))'),
    "launcher": ("frame.interfaces.launcher", "LauncherCapabilities(several_hosts=False)"),
    "modality": ("frame.interfaces.modality", 'ModalityCapabilities("image", ("PNG",))'),
    "model": ("frame.core.interfaces.model", 'ModelCapabilities(architectures=("${class_name}ForCausalLM",))'),
    "moe_dispatcher": ("frame.core.interfaces.moe", 'DispatcherCapabilities(devices=("cpu", "cuda"))'),
    "moe_runner": ("frame.core.interfaces.moe", 'MoECapabilities(devices=("cpu", "cuda"))'),
    "platform": (
        "frame.core.interfaces.platform",
        'PlatformCapabilities(find_devices="$package.plugin:find_devices", compatible=("cpu",))',
    ),
    "prefix_cache": ("frame.core.interfaces.cache", "PrefixCacheCapabilities(eviction_policy=False)"),
    "sampler": ("frame.interfaces.sampler", 'SamplerCapabilities(params=("seed",), custom=("$name",))'),
    "weight_transfer": ("frame.interfaces.weight_transfer", "WeightTransferCapabilities(shares=True)"),
    "weight_source": ("frame.interfaces.weights", "WeightSourceCapabilities()"),
    "weight_format": ("frame.core.interfaces.weight_format", 'FormatCapabilities(checkpoints=(None,), quant_types=("plain", "int8"))'),
    "gemm_kernel": (
        "frame.core.interfaces.gemm_kernel",
        'GemmCapabilities(devices=("cpu", "cuda"), speeds=(Speed("int8", 0, 0.2), Speed("e4m3", 0, 0.2)))',
    ),
}
# Settings that `KIND.key` needs beside it to serve the embedded model or a checkpoint.
_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "adapter": ("enabled: true",),
    "collective": ("tp: 2  # it connects ranks",),
    "gemm_kernel": ("quantization: int8  # it multiplies quantized weights",),
    "launcher": ("tp: 2  # it starts ranks",),
    "routing_policy": ("dp: 2  # it chooses replicas",),
    "pooler": ("task: embed  # it makes the vectors of embeddings",),
    "model": ("path: /path/to/checkpoint  # config.json has the architecture ${class_name}ForCausalLM",),
}
# Lists that have no plugin unless it is named.
_ALONE = frozenset({"kv_tier", "weight_transfer"})
# What the generated plugin does once it is served.
_EFFECTS: Mapping[str, str] = {
    "adapter": 'It reads adapters whose adapter_config.json has `"format": "$name"`.',
    "grammar_backend": 'It compiles `"structured_outputs": {"choice": ["yes", "no"]}` of a request, and no other kind of grammar.',
    "http_extension": "It adds the route `/$name/status` and logs each response.",
    "logits_processor": 'It bans the token ids that a request lists: `"custom": {"$name": "1,2"}`.',
    "sampler": 'It leaves out tokens by `"custom": {"$name": "1.5"}` of a request, and refuses `top_k`, `top_p` and `min_p`.',
    "platform": "A start logs that the memory plan is off until `measure_memory` reads a device: the host takes memory when it is written.",
    "reasoning_parser": "The text of an answer before `</think>` becomes its `reasoning_content`.",
    "tool_call_parser": 'It reads `<call>{"name": "f", "arguments": {}}</call>` in answers to requests with `tools`.',
}
_OPTIONS = '''

class Options(BaseModel):
    """The plugin's own settings; add fields with defaults.

    Users set them under `plugins.options`, `$kind/$name`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
'''
# Fields of the options that an implementation reads.
_FIELDS: Mapping[str, str] = {
    "key_store": 'file: str = ""',
    "kv_tier": "max_blocks: int = 1000",
    "tracer": 'file: str = ""\n    max_bytes: int = 10_000_000  # of spans in memory, and in the file',
}


@dataclass(frozen=True, slots=True)
class Written:
    """A new package: its folder, the files in it (relative), and the distribution's name."""

    folder: Path
    files: tuple[Path, ...]
    distribution: str


def write_plugin(kind: str, name: str, parent: Path, package: str = "") -> Written:
    """Write the package of a new plugin below `parent`. `package`: its distribution's name; "":
    frame-NAME. Raises ConfigurationError."""
    if kind not in KINDS:
        raise ConfigurationError(f"Unknown plugin kind {kind!r}; kinds: {', '.join(KINDS)}.")
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigurationError(f"{name!r} cannot name a plugin; use lower-case letters, digits, '-' and '_', with a letter first.")
    if package and not _NAME.fullmatch(package):
        raise ConfigurationError(f"--package {package!r} cannot name a package; use lower-case letters, digits, '-', a letter first.")
    words = _words(KINDS[kind], name, package)
    folder = parent / words["distribution"]
    if folder.exists():
        raise ConfigurationError(f"{folder} exists; choose another name or remove it.")
    module = words["package"]
    contents = {
        Path("pyproject.toml"): "pyproject.toml",
        Path("README.md"): "README.md",
        Path(module) / "__init__.py": "manifest.py" if KINDS[kind].key else "package.py",
        Path(module) / "plugin.py": f"{kind}.py",
        Path("tests") / "test_plugin.py": "test_plugin.py" if KINDS[kind].suite else "test_load.py",
    }
    for path, template in contents.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        source = files(__package__) / "templates" / f"{template}.tmpl"
        target.write_text(_fill(source.read_text(), words))
    return Written(folder, tuple(contents), words["distribution"])


def _words(kind: Kind, name: str, package: str) -> dict[str, str]:
    """The variables of the templates. Without a name of the package, plugin `my_x` gets the
    distribution frame-my-x and the package frame_my_x."""
    slug = re.sub(r"[-_]+", "-", name).strip("-")
    distribution = re.sub(r"[-_]+", "-", package).strip("-") or (slug if slug.startswith("frame-") else f"frame-{slug}")
    words = {
        "name": name,
        "kind": kind.name,
        "kind_words": kind.name.replace("_", " "),
        "hook": kind.hook,
        "api": kind.api,
        "distribution": distribution,
        "package": distribution.replace("-", "_"),
        "class_name": "".join(part.capitalize() for part in slug.split("-")),
        "test_requires": '"frame-serve[test-kit]"',
        "interface_module": kind.interface_path.partition(":")[0],
    }
    imports, constants, arguments = ["from frame import hookimpl"], "", ""
    if kind.name in _CAPABILITIES:
        module, expression = _CAPABILITIES[kind.name]
        names = sorted(set(re.findall(r"[A-Z]\w+(?=\()", expression)))
        imports.append(f"from {module} import {', '.join(names)}")
        constants += f"\nCAPABILITIES = {_fill(expression, words)}\n"
        arguments += "\n        capabilities=CAPABILITIES,"
    imports.insert(0, "from pydantic import BaseModel, ConfigDict\n")
    constants += _fill(_OPTIONS, words)
    constants += f"\n    {_FIELDS[kind.name]}\n" if kind.name in _FIELDS else ""
    arguments += "\n        options=Options,"
    words |= {"imports": "\n".join(imports), "constants": constants, "arguments": arguments}
    if not kind.key:  # a command, which help lists without a manifest
        words |= {"group": "frame_commands", "entry": _fill('$name = "$package.plugin:$class_name"', words)}
        return words | {"use": f"Call it:\n\n```sh\nframe {name}\n```", "manifest_note": "`pyproject.toml` names the command"}
    section, _, key = kind.key.partition(".")
    chosen = f"[{name}]" if kind.name in _ALONE else f"[builtin, {name}]"
    settings = (f"{key}: {chosen if kind.is_list else name}", *(_fill(each, words) for each in _SETTINGS.get(kind.name, ())))
    words |= {"group": "frame", "entry": _fill('$package = "$package"', words)}
    select = "\n".join((f"{section}:", *(f"  {each}" for each in settings)))
    words["use"] = f"Choose it in a configuration file, here `frame.yaml`:\n\n```yaml\n{select}\n```\n\n"
    words["use"] += "```sh\nframe serve --config frame.yaml\n```"
    words["use"] += _fill(f"\n\n{_EFFECTS[kind.name]}", words) if kind.name in _EFFECTS else ""
    words["manifest_note"] = _fill("`$package/__init__.py` is the manifest (name, capabilities, options)", words)
    return words


def _fill(text: str, words: dict[str, str]) -> str:
    return Template(text).substitute(words)
