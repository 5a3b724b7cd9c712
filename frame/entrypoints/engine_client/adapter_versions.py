"""`AdapterVersion`: the bytes of an adapter that a server has, and which requests use them. Made by
the registry; sequences hold them as `AdapterUse`. Must not know how they are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from frame.entrypoints.engine_client.adapter_spool import SpooledAdapter

LABEL_DIGITS = 12  # of a digest, in the header that names a version


@dataclass(slots=True, eq=False)
class AdapterVersion:
    """One digest. It stays while a name or a request has it."""

    files: SpooledAdapter
    on_release: Callable[[AdapterVersion], None]  # called when the last request has ended
    num_names: int = 0
    num_users: int = 0  # sequences, and requests that are being started
    holders: set[object] = field(default_factory=set)  # clients whose engines have it in host memory
    is_leaving: bool = False  # new requests wait until it has given its room to another one
    info: dict[str, Any] = field(default_factory=dict)  # what the engine says of it: rank, pages, bytes

    @property
    def digest(self) -> str:
        return self.files.digest

    def acquire(self) -> None:
        """Count one more user, for whom it stays in host memory."""
        self.num_users += 1

    def release(self) -> None:
        self.num_users -= 1
        if not self.num_users:
            self.on_release(self)


@dataclass(slots=True)
class AdapterCounts:
    """Counts of sequences and their output tokens, by label."""

    running: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)


class AdapterUse(NamedTuple):
    """A version under the name that a request gave. `label`: the name in the metrics."""

    name: str
    version: AdapterVersion
    label: str
    counts: AdapterCounts

    def __str__(self) -> str:
        """What a response says of it."""
        return f"{self.name}@{self.version.digest[:LABEL_DIGITS]}"

    def start(self) -> None:
        """A sequence uses it."""
        self.counts.running[self.label] += 1
        self.version.acquire()

    def end(self, num_tokens: int) -> None:
        """A sequence that used it has ended, with so many output tokens."""
        self.counts.running[self.label] -= 1
        self.counts.tokens[self.label] += num_tokens
        self.version.release()


class AdapterRecovery(Protocol):
    """What an `EngineClient` tells of its engine, so that a new one gets the adapters again."""

    def record_loss(self, client: Any) -> None: ...

    def begin_recovery(self, client: Any) -> bool: ...

    def restore(self, client: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """A name, and the version that new requests get by it. `owner`: the tenant whose requests may
    use it; "": all."""

    name: str
    owner: str
    created: int  # seconds since the epoch
    version: AdapterVersion
    folder: str = ""  # that it came from; "": a body
