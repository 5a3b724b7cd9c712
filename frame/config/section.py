"""`Section` and `setting`: the base class and the fields of the configuration's sections, and the
validators that fields share. Used by `frame.config.schema`. It must not know a section."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

TYPE_ALIASES: dict[str, str] = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "fp8_e4m3",
}


def _auto_is_none(value: Any) -> Any:
    return None if value == "auto" else value


def lower(value: Any) -> Any:
    """SGLang writes the names of algorithms in capitals."""
    return value.lower() if isinstance(value, str) else value


def _full_type_name(value: Any) -> Any:
    return TYPE_ALIASES.get(value, value) if isinstance(value, str) else value


Auto = BeforeValidator(_auto_is_none)
TypeName = BeforeValidator(_full_type_name)  # `bf16` means bfloat16 wherever a type is named


def phase_backends(text: str | None) -> dict[str, str]:
    """Parse `attention.backend` into names by phase ("prefill", "decode"). A single name applies to
    both; open phases are left out. Raises ValueError for any other text."""
    if text is None or "=" not in text:
        return {} if text is None else dict.fromkeys(PHASES, text)
    backends: dict[str, str] = {}
    for entry in text.split(","):
        phase, _, name = (piece.strip() for piece in entry.partition("="))
        if phase not in PHASES or not name or phase in backends:
            raise ValueError(f"a backend's name, or prefill=NAME,decode=NAME, not {text!r}")
        if name != "auto":
            backends[phase] = name
    return backends


def _phases_as_text(value: Any) -> Any:
    """A mapping of phases as text, the form that flags and variables use too."""
    if isinstance(value, Mapping):
        value = ",".join(f"{phase}={name}" for phase, name in value.items() if name is not None) or None
    if not isinstance(value, str):
        return value
    backends = phase_backends(value)
    if len(set(backends.values())) == 1 and len(backends) == len(PHASES):
        return backends["decode"]
    return ",".join(f"{phase}={backends[phase]}" for phase in PHASES if phase in backends) or None


def _module_as_text(value: Any) -> Any:
    """NAME=FOLDER of an adapter, also of vLLM's object with `name` and `path`."""
    if isinstance(value, Mapping) and {"name", "path"} <= value.keys() <= {"name", "path", "base_model_name"}:
        value = f"{value['name']}={value['path']}"
    if isinstance(value, str) and not all(map(str.strip, value.partition("="))):
        raise ValueError(f"NAME=FOLDER, not {value!r}")
    return value


Module = BeforeValidator(_module_as_text)


def _parse_counts(value: Any) -> Any:
    """NAME=COUNT,NAME=COUNT as a mapping, also of a list of such texts, or of JSON."""
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    if not isinstance(value, str) or value.lstrip().startswith("{"):
        return _parse_object(value)
    pairs = [piece.partition("=") for piece in value.split(",") if piece.strip()]
    if not all(name.strip() and count.strip().isdigit() for name, _, count in pairs):
        raise ValueError(f"NAME=COUNT,NAME=COUNT, not {value!r}")
    return {name.strip(): int(count) for name, _, count in pairs}


def _parse_object(value: Any) -> Any:
    """A mapping of JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError(f"a JSON object, not {value!r}") from None


def _parse_defaults(value: Any) -> Any:
    """Sampling parameters of JSON text, or one of SGLang's two words for them."""
    words: dict[str, Any] = {"openai": {}, "model": None, "auto": None}
    return words[value] if isinstance(value, str) and value in words else _parse_object(value)


def _check_name(value: Any) -> Any:
    names = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(name, str) and not name.isprintable() for name in names):
        raise ValueError("printable text")
    return value


def _check_endpoint(value: Any) -> Any:
    if isinstance(value, str) and not _ENDPOINT.fullmatch(value):
        raise ValueError("tcp://*:PORT, tcp://HOST:PORT or ipc://PATH")
    return value


_ENDPOINT = re.compile(r"tcp://[^\s/]+:(?!0+$)\d{1,5}|ipc:///\S+")
Endpoint = BeforeValidator(_check_endpoint)
ModelName = BeforeValidator(_check_name)  # names of the API, which logs and errors repeat; one or a list
Counts = BeforeValidator(_parse_counts)
JsonObject = BeforeValidator(_parse_object)
Defaults = BeforeValidator(_parse_defaults)
PHASES = ("prefill", "decode")
Phases = BeforeValidator(_phases_as_text)  # one attention backend, or one a phase


def setting(default: Any, description: str, *, flag: str | None = None, **bounds: Any) -> Any:
    """A configuration field with its default, one-sentence description, bounds and flag (`tp` ->
    `--tp`)."""
    return Field(default, description=description, json_schema_extra={"flag": flag} if flag else None, **bounds)


class Section(BaseModel):
    """Base of all sections: frozen. Unknown keys are errors, and so are NaN and infinity, which
    JSON cannot hold."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=False, protected_namespaces=())
