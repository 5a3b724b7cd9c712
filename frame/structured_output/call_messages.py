"""Messages between the engine and the processes that call grammars.

Used by `remote_calls` and `served_calls`. A step's message is a list of calls, whose last one may
have a reply. Arrays are bytes of int32. Must not know how messages travel.
"""

from __future__ import annotations

import msgspec
import numpy as np

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish


class LoadGrammar(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Load compiled grammar `compiled`: arguments of `GrammarBackend.load`. Reply: `Loaded`; none
    where it is one of the calls of a step."""

    compiled: int
    kind: str
    source: str
    data: bytes


class Loaded(msgspec.Struct, frozen=True, array_like=True):
    """num_bytes: of the grammar; error: one sentence, "" where it is loaded. `is_invalid`: the
    grammar's fault, not the backend's. seconds: CPU time that loading took."""

    num_bytes: int = 0
    error: str = ""
    is_invalid: bool = False
    seconds: float = 0.0


class StartRequest(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """A request with compiled grammar `compiled` begins. `request`: its number in this process.
    output: accepted before. max_tokens: most tokens of its output. budget, spent: seconds, of its
    meter."""

    request: int
    compiled: int
    params: SamplingParams
    output: bytes
    max_tokens: int
    stop_ids: tuple[int, ...]
    budget: float
    spent: float


class EndRequest(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Nothing more is called for this request; its number may be used again."""

    request: int


class DropGrammar(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """No request needs this compiled grammar."""

    compiled: int


class HoldRequest(msgspec.Struct, frozen=True, array_like=True, tag="hold"):
    """See `StepGrammars.hold_request`."""

    request: int


class ReleaseRequest(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """See `StepGrammars.release_request`."""

    request: int


class AcceptTokens(msgspec.Struct, frozen=True, array_like=True, tag="accept"):
    """requests: int32 [n]; tokens: int32 [n], one of each. num_rows: of the whole step. Reply:
    `Accepted`."""

    requests: bytes
    tokens: bytes
    num_rows: int


class FillMasks(msgspec.Struct, frozen=True, array_like=True, tag="fill"):
    """Write the masks of requests, int32 [n], to these rows, int32 [n], of the shared masks number
    `buffer`. num_samples: of the whole step. Reply: `Filled`."""

    requests: bytes
    rows: bytes
    buffer: int
    num_samples: int


class PollHeld(msgspec.Struct, frozen=True, array_like=True, tag="poll"):
    """Reply: `Resolved`."""


class Accepted(msgspec.Struct, frozen=True, array_like=True):
    """How requests end, by their place in the message. sizes: bytes of compiled grammars that have
    grown."""

    ends: dict[int, Finish]
    sizes: dict[int, int]


class Filled(msgspec.Struct, frozen=True, array_like=True):
    """runs: forced tokens of requests, which are accepted already; stopped: requests that must
    leave the device because of a slow call."""

    runs: dict[int, list[int]]
    stopped: list[int]


class Resolved(msgspec.Struct, frozen=True, array_like=True):
    """Held requests whose call has ended, each with how it ends. None: it continues."""

    requests: dict[int, Finish | None]


Call = LoadGrammar | StartRequest | EndRequest | DropGrammar | HoldRequest | ReleaseRequest | AcceptTokens | FillMasks | PollHeld


def pack(values: list[int]) -> bytes:
    """Bytes of int32."""
    return np.array(values, np.int32).tobytes()


def unpack(data: bytes) -> np.ndarray:
    """int32 [n]."""
    return np.frombuffer(data, np.int32)
