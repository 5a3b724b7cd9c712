"""The interface of tracers: where the spans of requests go (kind `tracer`).

Each process of a server has a tracer of its own. Spans are made when work ends, from recorded
times. Imports no torch. Must not know HTTP or a request.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from frame.core.interfaces.plugin import Anything

if TYPE_CHECKING:
    from pydantic import BaseModel

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TraceParent:
    """The W3C header `traceparent`: a span, as its children name it."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16 hexadecimal digits
    is_sampled: bool = True  # False: the caller does not record this trace, and neither does a tracer

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}"

    def make_child(self) -> TraceParent:
        """A new span of the same trace."""
        return TraceParent(self.trace_id, secrets.token_hex(8), self.is_sampled)

    @classmethod
    def make_root(cls) -> TraceParent:
        """The first span of a new trace."""
        return cls(secrets.token_hex(16), secrets.token_hex(8))

    @classmethod
    def parse(cls, text: str) -> TraceParent | None:
        """None for a text that the standard does not allow."""
        match = _TRACEPARENT.fullmatch(text.strip())
        if match is None or match[1] == "ff" or (match[1] == "00" and match[5]) or not (int(match[2], 16) and int(match[3], 16)):
            return None
        return cls(match[2], match[3], bool(int(match[4], 16) & 1))

    @classmethod
    def read(cls, headers: Sequence[tuple[bytes, bytes]]) -> TraceParent | None:
        """That of a request's headers; None without one that can be read."""
        sent = [value for name, value in headers if name == b"traceparent"]
        return cls.parse(sent[0].decode("latin-1")) if len(sent) == 1 else None


@dataclass(frozen=True, slots=True)
class TracerContext:
    """What a tracer is built for."""

    process: str = "main"  # the name of the process
    endpoint: str | None = None  # `server.otlp_endpoint`


class Span(ABC):
    """A span that was started and is not written yet."""

    traceparent: str  # in W3C form; other processes name it as the parent of their spans

    @abstractmethod
    def end(self, attributes: Mapping[str, Any], error: str | None = None) -> None:
        """Write the span, which ends now. Called once, or never, for a request that is gone.
        attributes: texts, numbers, booleans or lists of texts. error: the sentence of a failure."""


class Tracer(ABC):
    """Writes spans.

    Contract: any thread calls it, and waits for it, so no method waits for a destination: what
    cannot be written soon is dropped. A tracer that writes while the server runs writes a span
    within ten seconds of its end, and waits for no further one. What is kept is bounded. Its
    threads are daemons. No method raises, whatever a client sends. A span of a trace that its
    caller does not sample is not written.
    """

    def __init__(self, context: TracerContext, options: BaseModel | None = None) -> None:
        """Raises ConfigurationError for settings that cannot be used."""

    @abstractmethod
    def start_span(self, name: str, headers: Sequence[tuple[bytes, bytes]]) -> Span:
        """Start the span of a request: the child of the span in its header `traceparent`, or the
        first of a new trace."""

    @abstractmethod
    def add_span(self, name: str, trace: str, start: float, end: float, attributes: Mapping[str, Any]) -> None:
        """Write a span that is over, as a child of `trace`, the `traceparent` of another span; ""
        or a text that is none: write nothing. Times are of `time.perf_counter`."""

    def close(self) -> None:
        """Write what is left, within two seconds. May be called twice; later spans are dropped."""


@dataclass(frozen=True, slots=True)
class TracerCapabilities(Anything):
    """What a tracer reads."""

    needs_endpoint: bool = False  # it reads `server.otlp_endpoint`, or OpenTelemetry's variables
