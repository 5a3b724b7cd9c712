"""Reads a text file that a setting names, or says in one sentence why it cannot be read. Knows no setting."""

from __future__ import annotations

from pathlib import Path

from frame.core.errors import ConfigError


def read_named(setting: str, file: str, remedy: str) -> str:
    """The text of `file`, which the user gave as `setting`. Raises ConfigError that ends with the remedy."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        why = error.strerror or str(error)
    except UnicodeDecodeError:
        why = "it is no text in UTF-8"
    raise ConfigError(f"{setting} {file!r} cannot be read ({why}); {remedy}")
