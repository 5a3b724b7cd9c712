"""Checks the folder of a checkpoint, whose author may be hostile, before any of its files is read,
and reads its JSON files.

Used by the readers of configurations and tokenizers. A pipe would block its reader for ever, and a
device or a huge JSON file would fill memory, also in libraries. Must not know what files hold.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from frame.core.errors import CheckpointError

MAX_TEXT = 64 << 20  # bytes of a file that is parsed as a whole; indices of weights have 10 MiB
MAX_TOKENIZER = 256 << 20  # of tokenizer.json, which have up to 40 MiB
_TEXTS = (".json", ".jinja", ".txt", ".model")
_WEIGHTS = (".safetensors", ".gguf")


def check_folder(folder: Path) -> None:
    """Raise CheckpointError for a file that is no regular one, or a text that is too large. Links
    are followed, as the cache of Hugging Face consists of them."""
    for path in sorted(folder.iterdir()):
        try:
            status = path.stat()
        except OSError as error:
            if path.suffix in (*_TEXTS, *_WEIGHTS):
                raise CheckpointError(f"{path} cannot be read ({error.strerror}): download it again.") from error
            continue
        if not stat.S_ISREG(status.st_mode):
            if not stat.S_ISDIR(status.st_mode):
                raise CheckpointError(f"{path} is no regular file, but a pipe or a device: remove it, and download the checkpoint again.")
            continue
        largest = MAX_TOKENIZER if path.name == "tokenizer.json" else MAX_TEXT
        if path.suffix in _TEXTS and status.st_size > largest:
            raise CheckpointError(f"{path} is larger than {largest >> 20} MiB, the limit of such files: download it again.")


def is_within(path: Path, folder: Path) -> bool:
    """Whether a path that a file of the folder names stays in it, links aside."""
    return Path(os.path.normpath(path)).is_relative_to(os.path.normpath(folder))


def read_object(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None without the file. Raises CheckpointError for other values."""
    value = read_json(file)
    if not isinstance(value, dict) and (value is not None or file.exists()):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, not a JSON object; download it again.")
    return value


def read_json(file: Path) -> Any:
    """The value in a JSON file; None without the file. Raises CheckpointError."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); download it again.") from error
