"""Errors at start that the user can fix: configuration, checkpoint and plugin errors. Each text
names the fault and the remedy.

Raised in all of core; the command line reports them with exit code 78.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_CONFIGURATION = 78  # of a process, for these errors; sysexits' EX_CONFIG
CLOSENESS = 0.65  # of two words, from 0 to 1, from which one is suggested for the other


class ConfigurationError(Exception):
    """The engine cannot start as configured. The message is for the user, without a traceback."""


class ConfigError(ConfigurationError):
    """A configuration file, environment variable or flag has an invalid key or value."""


class CheckpointError(ConfigurationError):
    """A checkpoint's files are missing, unreadable or invalid. `sentence`: without the `remedy`,
    which is for files."""

    def __init__(self, sentence: str, remedy: str = "") -> None:
        super().__init__(f"{sentence}: {remedy}" if remedy else sentence)
        self.sentence, self.remedy = sentence, remedy


class PluginError(ConfigurationError):
    """A configured plugin is unknown, ambiguous, incompatible or cannot be loaded."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The text "; did you mean 'x'?" with the nearest known word, or an empty string."""
    near = nearest_word(word, known)
    return f"; did you mean {near!r}?" if near is not None else ""


def nearest_word(word: str, known: Iterable[str]) -> str | None:
    """The known word most similar to `word`; None if none is similar. `kind/name` is compared with
    the names of that kind, `section.key` with the keys of that section."""
    known = list(known)
    outer, sign, inner = word.rpartition("/" if "/" in word else ".")
    prefix = outer + sign
    same = [each.removeprefix(prefix) for each in known if sign and each.startswith(prefix)]
    near = difflib.get_close_matches(inner if same else word, same or known, n=1, cutoff=CLOSENESS)
    return (prefix if same else "") + near[0] if near else None
