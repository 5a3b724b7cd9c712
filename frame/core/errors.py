"""Errors of a start that the user can mend: wrong configuration, wrong checkpoint, wrong plugin. Each text names the thing and the remedy.

Knows nothing of who reports them; the command line turns all of them into exit code 78.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigurationError(Exception):
    """The start cannot go on as it was configured. The message is for the user, without a traceback."""


class ConfigError(ConfigurationError):
    """A configuration file, an environment variable or a flag holds what the schema does not take."""


class CheckpointError(ConfigurationError):
    """A checkpoint's files are missing, unreadable or not what they should be."""


class PluginError(ConfigurationError):
    """A plugin that was asked for is unknown, ambiguous, incompatible or does not load."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest known word, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.55)
    return f"; did you mean {near[0]!r}?" if near else ""
