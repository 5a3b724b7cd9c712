"""Third-party key stores, tracers, stat loggers, HTTP extensions and subcommands."""

from __future__ import annotations

import hmac
import math
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import click

from frame.interfaces.http import HttpRequest, HttpResponse, RefuseRequest
from frame.interfaces.keys import KeyHolder
from frame.interfaces.stats import RenderedMetrics, RequestRecord, StepRecord
from frame.interfaces.tracing import TraceParent
from tests.testing.mutants.cli_command import Greeting
from tests.testing.mutants.http_extension import AddHeader, Reference
from tests.testing.mutants.key_store import Digests
from tests.testing.mutants.stat_logger import PlainLogger
from tests.testing.mutants.tracer import Lines
from tests.testing.third_party import sleeps, third_party

# ---- key stores ----------------------------------------------------------------------------------

mutant = third_party("key_store")


class ChangesKeys(Digests):
    """Digests a part of the key."""

    change: ClassVar[Any] = None

    def digest(self, key: bytes) -> bytes:
        return super().digest(type(self).change(key))

    def __init__(self, context: Any, options: Any = None) -> None:
        super().__init__(context, options)
        self.digests = {super(ChangesKeys, self).digest(type(self).change(key)): may for key, may in self.read_keys(options).items()}

    @staticmethod
    def make_conformance_store(folder: Any, keys: dict[str, bool]) -> Any:
        context, _ = Digests.make_conformance_store(folder, {})
        return context, {key.encode(): may for key, may in keys.items()}

    def read_keys(self, options: Any) -> dict[bytes, bool]:
        return dict(options or {})


mutant.each(
    ChangesKeys, "change",
    ("ReadsTheFirst72Bytes", "Digests the first 72 bytes of a key, as bcrypt does.", staticmethod(lambda key: key[:72])),
    ("ReadsTheFirst64Bytes", "Tells keys apart by their first 64 bytes.", staticmethod(lambda key: key[:64])),
    ("StripsKeys", "Removes white space around a key.", staticmethod(lambda key: key.strip())),
    (
        "IgnoresBadBytes", "Drops the bytes of a key that are not valid UTF-8.",
        staticmethod(lambda key: key.decode("utf-8", "ignore").encode()),
    ),
    ("EndsAtZero", "Ends a key at a zero byte.", staticmethod(lambda key: key.partition(b"\0")[0])),
)  # fmt: skip


@mutant
class ComparesAll(Digests):
    """Compares a key with each of its digests in turn, in a time that grows with the number of
    keys."""

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        digest = self.digest(key)
        found = None
        for known in self.digests:
            if all(hmac.compare_digest(known, digest) for _ in range(20)):
                found = known
        return None if found is None else KeyHolder(self.name(found, key), self.digests[found])


@mutant
class IsOpenWithoutKeys(Digests):
    """Accepts each key while it has none."""

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        return await super().find_holder(key) if self.digests else KeyHolder("all")


sleeps(mutant, "find_holder")

# ---- tracers -------------------------------------------------------------------------------------

mutant = third_party("tracer")


@mutant
class NumbersIn12Bits(Lines):
    """Numbers spans by a counter that begins again after 4,096."""

    numbers = 0

    def name_span(self, parent: TraceParent | None) -> TraceParent:
        self.numbers = self.numbers % 4096 + 1
        return TraceParent(
            (parent or TraceParent.make_root()).trace_id,
            f"{id(self):012x}"[-12:] + f"{self.numbers:04x}",
            parent is None or parent.is_sampled,
        )


@mutant
class HasNoBooleans(Lines):
    """Writes booleans as numbers."""

    def keep(self, name: str, own: Any, parent: Any, times: Any, attributes: Any, error: Any) -> None:
        super().keep(
            name, own, parent, times, {key: int(value) if isinstance(value, bool) else value for key, value in attributes.items()}, error
        )


@mutant
class KeepsAttributes(Lines):
    """Keeps the attributes themselves, which the caller changes for the next span."""

    def keep(self, name: str, own: Any, parent: Any, times: Any, attributes: Any, error: Any) -> None:
        super().keep(name, own, parent, times, attributes, error)
        if self.spans and self.spans[-1]["span_id"] == own.span_id:
            self.spans[-1]["attributes"] = attributes


@mutant
class KnowsOneFlag(Lines):
    """Takes a trace for sampled only if its flags are 01."""

    def read_parent(self, headers: Sequence[tuple[bytes, bytes]]) -> TraceParent | None:
        parent = super().read_parent(headers)
        flags = next((value[-2:] for name, value in headers if name == b"traceparent"), b"")
        return parent and TraceParent(parent.trace_id, parent.span_id, flags == b"01")


@mutant
class CutsNames(Lines):
    """Cuts the names of spans at 32 characters."""

    def keep(self, name: str, *others: Any) -> None:
        super().keep(name[:32], *others)


@mutant
class CutsLists(Lines):
    """Writes the first eight texts of a list."""

    def keep(self, name: str, own: Any, parent: Any, times: Any, attributes: Any, error: Any) -> None:
        super().keep(
            name, own, parent, times, {key: value[:8] if isinstance(value, list) else value for key, value in attributes.items()}, error
        )


sleeps(mutant, "start_span")

# ---- stat loggers --------------------------------------------------------------------------------

mutant = third_party("stat_logger")


@mutant
class TakesLogarithms(PlainLogger):
    """Takes the logarithm of a time, which may be 0."""

    def record_request(self, request: RequestRecord) -> None:
        math.log(request.end_to_end)
        super().record_request(request)


class Renders(PlainLogger):
    """Renders counters and gauges."""

    def __init__(self, context: Any, options: Any = None) -> None:
        super().__init__(context, options)
        self.read_metrics = context.read_metrics

    def format(self, value: float) -> str:
        return repr(value)

    def render_metrics(self) -> RenderedMetrics:
        lines = []
        for metric in self.read_metrics():
            for values, number in metric.samples:
                labels = ",".join(f'{name}="{value}"' for name, value in zip(metric.labels, values, strict=True))
                lines.append(f"frame_{metric.name}{{{labels}}} {self.format(number)}")
        return RenderedMetrics("text/plain", ("\n".join(lines) + "\n").encode())


mutant.each(
    Renders, "format",
    ("RoundsCounters", "Renders six digits of a counter.", lambda self, value: f"{value:g}"),
    ("Counts32Bits", "Renders counters in 32 bits.", lambda self, value: str(int(value) & 0xFFFFFFFF)),
)  # fmt: skip


@mutant
class StartsTimers(PlainLogger):
    """Starts threads for its first records, which end in a minute."""

    def record_step(self, step: StepRecord) -> None:
        timers = self.__dict__.setdefault("timers", [])
        if len(timers) < 4:
            timers.append(threading.Timer(60.0, print))
            timers[-1].daemon = True
            timers[-1].start()


@mutant
class WritesAFile(PlainLogger):
    """Appends each record to a file in the working folder."""

    def record_request(self, request: RequestRecord) -> None:
        with Path("requests.log").open("a") as file:
            file.write(request.rid.encode("ascii", "ignore").decode() + "\n")


@mutant
class SortsAll(PlainLogger):
    """Sorts the last 100,000 times for a percentile with each record."""

    def record_step(self, step: StepRecord) -> None:
        times = self.__dict__.setdefault("times", deque(maxlen=100_000))
        times.append(step.generated_tokens)
        sorted(times, key=lambda number: -number)


@mutant
class CountsByKey(PlainLogger):
    """Keeps counters for each tenant's key, in 64 places that tenants share, and a list for each
    place."""

    def record_request(self, request: RequestRecord) -> None:
        places = self.__dict__.setdefault("places", [[] for _ in range(64)])
        places[len(request.key) % 64].append(request.output_tokens)


sleeps(mutant, "record_request")

# ---- HTTP extensions -----------------------------------------------------------------------------

mutant = third_party("http_extension")


@mutant
class LimitsByPrefix(Reference):
    """Counts the requests of tenants by the first 8 characters of their names, and refuses after
    100."""

    def __init__(self, context: Any, options: Any = None) -> None:
        super().__init__(context, options)
        self.counts: dict[str, int] = {}

    async def on_request(self, request: HttpRequest) -> None:
        name = request.tenant[:8]
        if len(self.counts) < 1000:
            self.counts[name] = self.counts.get(name, 0) + 1
        if self.counts.get(name, 0) > 100:
            raise RefuseRequest(429, "too many requests; send fewer")
        await super().on_request(request)


@mutant
class KeepsPaths(Reference):
    """Keeps a counter for each path, which clients choose."""

    async def on_request(self, request: HttpRequest) -> None:
        counts = self.__dict__.setdefault("counts", {})
        counts[request.path] = counts.get(request.path, 0) + 1
        await super().on_request(request)


@mutant
class PacksTokens(Reference):
    """Packs the numbers of tokens into 16 bits."""

    async def on_response(self, request: HttpRequest, response: HttpResponse) -> None:
        struct.pack("H", response.prompt_tokens)
        await super().on_response(request, response)


class ChangesMessages(AddHeader):
    """Changes the messages of a response."""

    def change(self, message: Any) -> Any:
        return message

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def changed(message: Any) -> None:
            message = self.change(message)
            if message is not None:
                await send(message)

        await super().__call__(scope, receive, changed)


class CutsLargeParts(ChangesMessages):
    """Sends the first 64 KiB of each part of a body."""

    def change(self, message: Any) -> Any:
        return {**message, "body": message.get("body", b"")[:65536]} if message["type"] == "http.response.body" else message


class DropsEmptyParts(ChangesMessages):
    """Drops parts without bytes, and with them the end of a stream."""

    def change(self, message: Any) -> Any:
        return None if message["type"] == "http.response.body" and not message.get("body") else message


class KeepsTheStart(ChangesMessages):
    """Keeps the start of a response in the object, where another response replaces it."""

    start: Any = None

    def change(self, message: Any) -> Any:
        if message["type"] == "http.response.start":
            self.start = message
            return None
        return message

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def changed(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.start = message
                return
            if self.start is not None:
                start, self.start = self.start, None
                await send(start)
            await send(message)

        await self.app(scope, receive, changed)


mutant.each(
    Reference, "middleware",
    *((kind.__name__, f"Its middleware is wrong: {kind.__doc__}", kind) for kind in (CutsLargeParts, DropsEmptyParts, KeepsTheStart)),
)  # fmt: skip
sleeps(mutant, "on_request")

# ---- subcommands ---------------------------------------------------------------------------------

mutant = third_party("cli_command")


@mutant
class LeavesAFile(Greeting):
    """Leaves a file in the working folder."""

    def run(self, name: str, times: int) -> None:
        with Path(".greeting-cache").open("w") as file:
            file.write(name)
        super().run(name, times)


@mutant
class LeavesAVariable(Greeting):
    """Sets an environment variable in its call."""

    def run(self, name: str, times: int) -> None:
        os.environ["GREETING_NAME"] = name
        super().run(name, times)


@mutant
class LeavesAProcess(Greeting):
    """Starts a process that lives on after the call."""

    def run(self, name: str, times: int) -> None:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])
        super().run(name, times)


@mutant
class AddsUp(Greeting):
    """Keeps the greetings of earlier calls in the class, and repeats them."""

    names: ClassVar[list[str]] = []

    def run(self, name: str, times: int) -> None:
        self.names.append(name)
        for one in self.names:
            super().run(one, times)


@mutant
class ReplacesOutput(Greeting):
    """Replaces standard error, to hide warnings."""

    def run(self, name: str, times: int) -> None:
        super().run(name, times)
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115


@mutant
class LeavesATemporaryFile(Greeting):
    """Leaves a file in the folder of temporary files."""

    def run(self, name: str, times: int) -> None:
        tempfile.mkstemp(prefix="greeting")
        super().run(name, times)


@mutant
class SleepsInItsHelp(Greeting):
    """Waits for half a second before its help appears."""

    def make_command(self) -> click.Command:
        time.sleep(0.5)
        return super().make_command()
