"""Python code in a checkpoint (`auto_map` in its JSON files): finds what needs it, and imports it.

Used by the tokenizer, the transformers fallback and the checks at start. It reads no setting:
callers pass a folder only if `model.trust_remote_code` allows its code. transformers' own loader is
not used, because it asks on standard input and copies the code to a folder that processes share.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

from frame.core.errors import CheckpointError
from frame.core.interfaces.model import ModelConfig

FLAG = "--trust-remote-code"
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_TOKENIZER_FILES = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json", "config.json")


def find_tokenizer_code(folder: Path) -> tuple[str, str] | None:
    """The tokenizer's class, or the processor's, which has the tokenizer: (auto class, reference).
    None if the checkpoint names none."""
    maps = [_auto_map(folder / name) for name in _TOKENIZER_FILES]
    for kind in ("AutoTokenizer", "AutoProcessor"):
        for auto_map in maps:
            references = auto_map.get(kind)
            pair = references if isinstance(references, list) else [references]
            named = [reference for reference in reversed(pair) if isinstance(reference, str)]  # [slow, fast]: the fast one first
            if named:
                return kind, named[0]
    return None


def check_tokenizer_code(folder: Path) -> None:
    """Raise CheckpointError if the folder's tokenizer cannot be loaded without its code."""
    code = find_tokenizer_code(folder)
    if code is not None and not (folder / "tokenizer.json").is_file():
        raise refuse(folder, "tokenizer", code[1])


def check_model_code(model_config: ModelConfig, folder: str) -> None:
    """Raise CheckpointError if the model needs the checkpoint's code, because transformers does not
    have its architecture."""
    named = model_config.config.get("auto_map")
    reference = named.get("AutoModelForCausalLM") if isinstance(named, dict) else None
    if not isinstance(reference, str):
        return
    import transformers

    if model_config.architecture not in dir(transformers):
        raise refuse(folder, "model", reference)


def refuse(folder: Path | str, component: str, reference: str) -> CheckpointError:
    """The error for a checkpoint that is not served without its code. `component`: what the code is
    for."""
    return CheckpointError(
        f"{folder} has Python code for its {component} ({reference[:200]}), which is not run by default: read it, and serve with {FLAG}"
        " if it may run with the server's rights."
    )


def load_class(code_folder: Path | None, component: str, reference: str) -> Any:
    """Import `module.Class` from the checkpoint's folder, which runs its code. `code_folder`: None
    if no code may run.

    Raises CheckpointError if no code may run, the reference leads out of the folder, or the code
    fails.
    """
    if code_folder is None:
        raise refuse("this checkpoint", component, reference)
    if not _REFERENCE.fullmatch(reference):
        raise CheckpointError(
            f"{code_folder} names {reference[:200]!r} for its {component}; it must be module.Class of a file in this folder."
        )
    module, _, name = reference.rpartition(".")
    try:
        return getattr(importlib.import_module(f"{_package(code_folder)}.{module}"), name)
    except Exception as error:  # the code may raise anything
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"{code_folder}: the code of its {component} ({reference}) cannot be loaded ({cause})") from error


def _package(folder: Path) -> str:
    """Register the folder as a package, once for each process, so that its modules can import each
    other. -> the package's name."""
    folder = folder.resolve()
    name = f"frame_checkpoint_{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        sys.modules[name] = module_from_spec(spec)
    return name


def _auto_map(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # the file's own reader reports the error
        return {}
    auto_map = content.get("auto_map") if isinstance(content, dict) else None
    # Old tokenizer_config.json files list only the tokenizer's classes.
    return auto_map if isinstance(auto_map, dict) else {"AutoTokenizer": auto_map} if isinstance(auto_map, list) else {}
