"""Names the plugin at fault for an error: the origins of the loaded plugin classes, and the search
of a traceback for one of them.

The registry notes origins; the engine, the runner and the composition roots ask. Costs nothing
until an error is raised. Must not know a plugin by name.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from frame.core.errors import ConfigurationError, PluginError
from frame.core.interfaces.plugin import PluginRecord


@dataclass(frozen=True, slots=True)
class Origin:
    """Who brought a plugin class."""

    kind: str
    name: str
    distribution: str
    version: str
    change: str  # what a user can set instead of the plugin, such as "leave it out of KEY"; "": no setting selects it

    def __str__(self) -> str:
        owner = f"{self.distribution} {self.version}".strip()
        return f"{self.kind} {self.name!r}{f' ({owner})' if owner else ''}"

    @property
    def remedy(self) -> str:
        """What a user can do about a fault of the plugin."""
        package = self.distribution or "the plugin"
        if not self.change:
            return f"update or uninstall {package}, or report the fault to its authors"
        return f"{self.change}, or report the fault to the authors of {package}"


_ATTRIBUTE = "_frame_origin"  # of a loaded plugin class


def note_origin(target: type, record: PluginRecord, change: str) -> None:
    """Remember which record a class was loaded for. change: see `Origin`."""
    setattr(target, _ATTRIBUTE, Origin(record.kind, record.name, record.distribution, record.version, change))


def find_origin(value: object) -> Origin | None:
    """The origin of an instance or a class of a plugin; None for anything else."""
    origin: Origin | None = getattr(value if isinstance(value, type) else type(value), _ATTRIBUTE, None)
    return origin


def describe(value: object) -> str:
    """Name a plugin instance with its package and version; its class where no registry made it."""
    kind = type(value)
    return str(find_origin(value) or f"{kind.__module__}.{kind.__qualname__}")


def remedy(value: object) -> str:
    """What a user can do about a fault of a plugin instance."""
    origin = find_origin(value)
    return origin.remedy if origin is not None else "correct its code"


def find_culprit(error: BaseException) -> tuple[Origin, str] | None:
    """The plugin whose code the error came from, and the function of it; None if it came from no
    plugin. The innermost frame of a plugin counts, first of the error itself, then of its
    causes."""
    seen: set[int] = set()
    current: BaseException | None = error
    possible: tuple[Origin, str] | None = None  # a function beside several plugins of one package
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        for frame in reversed([frame for frame, _ in traceback.walk_tb(current.__traceback__)]):
            origins = _origins_of_frame(frame)
            if len(origins) == 1:
                return origins[0], frame.f_code.co_qualname
            possible = possible or (origins[0], frame.f_code.co_qualname) if origins else possible
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return possible


def explain(error: BaseException) -> str:
    """One line that says what an error is and, where a plugin raised it, whose fault it is and what
    to do."""
    text = str(error).strip().split("\n", 1)[0]
    sentence = f"{type(error).__name__}: {text}" if text else type(error).__name__
    culprit = None if isinstance(error, ConfigurationError) else find_culprit(error)
    return sentence if culprit is None else f"{culprit[0]} failed in {culprit[1]}: {sentence}; {culprit[0].remedy}"


@contextlib.contextmanager
def blaming(phase: str) -> Iterator[None]:
    """Raise PluginError in place of an error that a plugin raised in the body. `phase` completes
    the sentence "… failed in Class.method PHASE". Errors that no plugin raised, configuration
    errors and a lack of memory pass."""
    try:
        yield
    except (ConfigurationError, MemoryError):
        raise
    except Exception as error:
        culprit = None if type(error).__name__ == "OutOfMemoryError" else find_culprit(error)
        if culprit is None:
            raise
        origin, function = culprit
        raise PluginError(f"{origin} failed in {function} {phase}: {_sentence(error)}; {origin.remedy}.") from error


def _sentence(error: BaseException) -> str:
    """The error and the place in the plugin's own code or below it that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({last[0].filename}:{last[0].lineno})" if last else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


def _origins_of_frame(frame: FrameType) -> list[Origin]:
    """The plugin whose method a frame runs, else those whose classes its module defines."""
    code = frame.f_code
    owner: Any = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    if owner is not None and (origin := find_origin(owner)) is not None:
        return [origin]
    module = frame.f_globals.get("__name__", "")
    defined = [each for each in list(frame.f_globals.values()) if isinstance(each, type) and each.__module__ == module]
    return [origin for each in defined if (origin := vars(each).get(_ATTRIBUTE)) is not None]
