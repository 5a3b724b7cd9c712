"""Python code that a checkpoint brings (`auto_map` in its JSON files): what needs it, and the one function that imports it.

Used by the tokenizer, the transformers fallback and the checks of a start. Knows no setting: who calls gives a folder only where
`model.trust_remote_code` allows its code. transformers' own loader is not used: it asks on standard input and copies the code to a
folder that processes share.
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
from typing import TYPE_CHECKING, Any

from frame.core.errors import CheckpointError

if TYPE_CHECKING:
    from frame.core.interfaces.model import ModelConfig

FLAG = "--trust-remote-code"
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_TOKENIZER_FILES = ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json", "config.json")


def find_tokenizer_code(folder: Path) -> tuple[str, str] | None:
    """The tokenizer's class, else the processor's that holds it: (auto class, reference). None where the checkpoint names none."""
    maps = [_auto_map(folder / name) for name in _TOKENIZER_FILES]
    for kind in ("AutoTokenizer", "AutoProcessor"):
        for found in maps:
            references = found.get(kind)
            pair = references if isinstance(references, list) else [references]
            named = [reference for reference in reversed(pair) if isinstance(reference, str)]  # [slow, fast]: the fast one first
            if named:
                return kind, named[0]
    return None


def check_tokenizer_code(folder: Path) -> None:
    """Raise CheckpointError where the folder's tokenizer cannot be made without its code."""
    code = find_tokenizer_code(folder)
    if code is not None and not (folder / "tokenizer.json").is_file():
        raise refuse(folder, "tokenizer", code[1])


def check_model_code(model_config: ModelConfig, folder: str) -> None:
    """For a model that runs by transformers without the checkpoint's code. Raise CheckpointError where transformers lacks it."""
    named = model_config.config.get("auto_map")
    reference = named.get("AutoModelForCausalLM") if isinstance(named, dict) else None
    if not isinstance(reference, str):
        return
    import transformers

    if model_config.architecture not in dir(transformers):
        raise refuse(folder, "model", reference)


def refuse(folder: Path | str, part: str, reference: str) -> CheckpointError:
    """Why the checkpoint is not served without its code; `part` is what the code is for."""
    return CheckpointError(
        f"{folder} brings Python code for its {part} ({reference[:200]}), which is never run unasked: read it, and serve with {FLAG}"
        " if it may run with the server's rights."
    )


def load_class(code_folder: Path | None, part: str, reference: str) -> Any:
    """Import `module.Class` from the checkpoint's folder, which runs its code. `code_folder` is None where no code may run.

    Raises CheckpointError for that, for a reference that leads out of the folder, and for code that fails.
    """
    if code_folder is None:
        raise refuse("this checkpoint", part, reference)
    if not _REFERENCE.fullmatch(reference):
        raise CheckpointError(
            f"{code_folder} names {reference[:200]!r} for its {part}; it must be module.Class of a file in this folder."
        )
    module, _, name = reference.rpartition(".")
    try:
        return getattr(importlib.import_module(f"{_package(code_folder)}.{module}"), name)
    except Exception as error:  # whatever the code raises
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"{code_folder}: the code of its {part} ({reference}) cannot be loaded ({cause})") from error


def _package(folder: Path) -> str:
    """A package over the folder, so that its modules can import each other relatively. One a folder and process."""
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
    except (OSError, ValueError):  # who reads the file for what it says refuses it
        return {}
    found = content.get("auto_map") if isinstance(content, dict) else None
    # an old form of tokenizer_config.json lists the tokenizer's classes alone
    return found if isinstance(found, dict) else {"AutoTokenizer": found} if isinstance(found, list) else {}
