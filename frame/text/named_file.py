"""Reads a text file that a setting names. Used for chat templates, score prompts and moderation
policies."""

from __future__ import annotations

from pathlib import Path

from frame.core.errors import ConfigError


def read_named(setting: str, file: str, remedy: str) -> str:
    """Return the text of `file`, the value of `setting`. Raises ConfigError whose sentence ends
    with `remedy`."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        why = error.strerror or str(error)
    except UnicodeDecodeError:
        why = "it is not UTF-8 text"
    raise ConfigError(f"{setting} {file!r} cannot be read ({why}); {remedy}")
