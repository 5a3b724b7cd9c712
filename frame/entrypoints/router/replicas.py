"""The router's replicas: which there are and which of them answer, how many requests each has,
and which one gets the next one.

A replica is joining until its first health check succeeds, then serving, or asleep; draining where
it ends or is to be removed; and lost after failed connections or checks, until one succeeds. Must
not know HTTP routes or prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal, get_args

import httpx

from frame.entrypoints.handoff import FLEET, KV_EVENTS, LOAD, VERSION
from frame.entrypoints.router.cached_prefixes import CachedPrefixes, PromptPrefixes
from frame.entrypoints.router.discovery import MAX_REPLICAS
from frame.entrypoints.router.first_bytes import FirstBytes, judge_slowness
from frame.entrypoints.router.scaling import DesiredReplicas, FleetSignals, find_percentile, read_inter_token
from frame.interfaces.routing import RoutingRequest
from frame.kv_events.subscriber import Subscription
from frame.parallel.replica_choice import ReplicaChooser

log = logging.getLogger(__name__)

State = Literal["joining", "serving", "asleep", "draining", "lost"]
ANNOUNCED: dict[str, State] = {"asleep": "asleep", "draining": "draining"}  # by a health check that fails
STATES: tuple[State, ...] = get_args(State)
RECENT = 30.0  # seconds in which a stream's first byte counts for the latency targets
FIRST_TOKENS = 4096  # that are kept
PATIENCE = 2  # failed checks after which a replica is unhealthy
MIN_SILENCE, MAX_SILENCE = 1.0, 10.0  # seconds that a check waits for an answer
SLOW_CHECK = 4.0  # times the time of answered checks that a check waits
OPERATOR = "admin"  # the source of replicas that an operator added
STEP = 0.1  # seconds of a wait that count at most where the router itself is late
MAX_CHECKS = 3  # without an answer, of a replica
CHECK_PAUSE = 0.002  # seconds between the beginnings of two checks: many at once delay streams
MAX_RESTART = 600.0  # seconds in which streams stay with a replica that answers its checks with an error


@dataclass(slots=True)
class Backend:
    """One server. `lost` is set while it is lost: requests that wait for it give up. One that is
    asleep or drains gets no new requests, and keeps those that it has. `instance`: its process,
    `identity`: of what its tokens depend on, where it has a fleet key and the router's version of
    handoffs; else empty. `sources`: what names it; "" is the command line. `is_leaving`: it drains
    until it has no requests. `is_removed`: by an operator, so no source brings it back."""

    url: str
    number: int
    group: Backends
    state: State = "serving"
    instance: str = ""
    identity: str = ""
    outstanding: int = 0
    failed_checks: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    watchers: dict[asyncio.Future[None], bool] = field(default_factory=dict)  # that end when it is lost: see `watch_lost`
    sources: set[str] = field(default_factory=lambda: {""})
    is_leaving: bool = False
    is_removed: bool = False
    first_bytes: FirstBytes = field(default_factory=FirstBytes)
    heard: float = -math.inf  # when a part of an answer came; monotonic
    checks: list[asyncio.Task[httpx.Response | Exception]] = field(default_factory=list)  # without an answer, oldest first
    suspected: asyncio.Task[None] | None = None  # the check after a connection broke
    check_time: float = -1.0  # seconds that the last answered check took; below 0: none was
    silent_since: float = math.inf  # when the first of the checks began that were not answered in time; monotonic
    was_silent: bool = False  # whether it was lost by silence alone
    woken_at: float = -math.inf  # when it answered after a silence; monotonic
    served_at: float = -math.inf  # when it last told that it serves, sleeps or drains; monotonic
    inter_token: float = 0.0  # seconds, lately, as its last health check tells; 0.0: unknown
    events: Subscription | None = None  # the KV events of this process
    events_source: str = ""  # the process and what it says of them

    def close_events(self) -> None:
        """What its cache holds is not known any more."""
        if self.events is not None:
            self.events.is_closed = True
        self.events, self.events_source = None, ""

    def watch_lost(self, *, can_move: bool) -> asyncio.Future[None]:
        """Ends when the replica is lost; the caller takes it out of `watchers`. can_move: also
        when it only tells that it is not ready, as while its engine restarts, and another replica
        is healthy. A task that waits for the event would cost each part of an answer a turn of the
        loop."""
        watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.lost.is_set():
            watcher.set_result(None)
        self.watchers[watcher] = can_move
        return watcher

    @property
    def is_suspended(self) -> bool:
        """Whether it gets no requests because it is slow."""
        return self.first_bytes.suspended_until > time.monotonic()

    @property
    def is_healthy(self) -> bool:
        """Whether it gets requests."""
        return self.state == "serving"

    @property
    def is_asleep(self) -> bool:
        return self.state == "asleep"


class Backends:
    """All replicas. `interval`: seconds between health checks, and of each. `prefixes`: reads their
    KV events; None: they are not read."""

    def __init__(
        self,
        urls: Sequence[str],
        client: httpx.AsyncClient,
        interval: float,
        chooser: ReplicaChooser | None = None,
        prefixes: CachedPrefixes | None = None,
    ) -> None:
        self._members = {number: Backend(url.rstrip("/"), number, self) for number, url in enumerate(urls)}
        self._client, self._interval = client, interval
        self._chooser = chooser or ReplicaChooser(None)
        self.prefixes = prefixes
        self._usual_check = 0.0  # seconds, the median of the replicas' last answered checks
        self._num_waiting = dict[str, int]()  # by source, replicas beyond `MAX_REPLICAS`
        self.closing = ""  # why no replica gets requests any more
        self.desired: DesiredReplicas | None = None  # set where the fleet has latency targets
        self.first_tokens: deque[tuple[float, float]] = deque(maxlen=FIRST_TOKENS)  # (when, seconds) of streams

    @property
    def all(self) -> list[Backend]:
        return [*self._members.values()]

    def find(self, url: str) -> Backend | None:
        return next((backend for backend in self._members.values() if backend.url == url), None)

    def add(self, url: str, source: str) -> Backend:
        """Have a replica, which is joining; one that was to leave stays."""
        backend = self.find(url)
        if backend is None:
            number = next(number for number in count() if number not in self._members)  # small ones: policies keep bits for them
            backend = Backend(url, number, self, "joining", sources=set())
            self._members = dict(sorted({**self._members, number: backend}.items()))
            log.info("replica %s joins", url)
        elif backend.is_leaving:
            backend.is_leaving = backend.is_removed = False
            backend.state = "joining"
        backend.sources.add(source)
        return backend

    def remove(self, backend: Backend) -> None:
        """Let a replica drain and then leave, and stay away while a source names it."""
        backend.is_removed = True
        backend.sources -= {"", OPERATOR}
        self._let_leave(backend)

    def update(self, source: str, urls: Sequence[str]) -> None:
        """These are all replicas that the source names now. Those that do not fit wait."""
        named, num_waiting = set(urls), 0
        for backend in self.all:
            if source in backend.sources and backend.url not in named:
                backend.sources.discard(source)
                if not backend.sources:
                    backend.is_removed = False
                    self._let_leave(backend)
        for url in urls:
            known = self.find(url)
            if known is not None and known.is_removed:
                known.sources.add(source)
            elif known is None and len(self._members) >= MAX_REPLICAS:
                num_waiting += 1
            else:
                self.add(url, source)
        if num_waiting != self._num_waiting.get(source, 0):
            log.warning("%d replicas of %s wait: the router has at most %d", num_waiting, source, MAX_REPLICAS)
        self._num_waiting[source] = num_waiting

    def _let_leave(self, backend: Backend) -> None:
        if not backend.is_leaving:
            log.info("replica %s leaves: it drains", backend.url)
            backend.is_leaving = True
        if backend.state != "lost":
            backend.state = "draining"

    def _drop_left(self) -> None:
        """Forget replicas that have drained. One that a source still names stays known."""
        for backend in self.all:
            if backend.is_leaving and not backend.sources and (not backend.outstanding or backend.state == "lost"):
                del self._members[backend.number]
                for check in backend.checks:
                    check.cancel()
                backend.close_events()
                self._chooser.forget_replica(backend.number)
                log.info("replica %s has left", backend.url)

    @property
    def healthy(self) -> list[Backend]:
        return [backend for backend in self.all if backend.is_healthy]

    def choose(self, request: RoutingRequest, tried: Collection[int] = (), prefixes: PromptPrefixes | None = None) -> Backend | None:
        """The replica of a request, among the healthy ones that were not tried. Slow ones count as
        more loaded, and suspended ones are the last resort. `prefixes`: of its prompt."""
        left = [backend for backend in self.healthy if backend.number not in tried]
        left = [backend for backend in left if not backend.is_suspended] or left
        loads = {backend.number: round(backend.outstanding * backend.first_bytes.factor) for backend in left}
        if not loads:
            return None
        if prefixes is not None and self.prefixes is not None:
            cached = self.prefixes.find_shares(prefixes, {backend.number: (backend.url, backend.events) for backend in left})
            request = replace(request, cached=cached)
        chosen = self._members[self._chooser.choose(request, loads)]
        if prefixes is not None:
            prefixes.is_cached = request.cached.get(chosen.number, 0.0) >= 1.0
        return chosen

    def refuse(self, request: RoutingRequest, place: Place) -> None:
        """The replica of the place refused the request: its cache has nothing of it."""
        place.is_refused = True
        self.forget_request(request, place.backend)

    def forget_request(self, request: RoutingRequest, backend: Backend) -> None:
        """A replica that was chosen for a request has nothing of it."""
        self._chooser.forget_request(request, backend.number)

    def mark_lost(self, backend: Backend, reason: str, *, is_silent: bool = False, is_reachable: bool = False) -> None:
        """The replica gets no requests. `is_silent`: all that is known is that it does not answer.
        is_reachable: it tells that it is not ready, so its requests may go on there."""
        backend.was_silent = is_silent
        backend.close_events()
        if backend.state in ("serving", "draining"):
            log.warning("replica %s is unhealthy: %s", backend.url, reason)
            self._chooser.forget_replica(backend.number)
        backend.state = "lost"
        if not is_reachable:
            backend.lost.set()
        has_other = bool(self.healthy)
        for watcher, can_move in backend.watchers.items():
            if not watcher.done() and (not is_reachable or (can_move and has_other)):
                watcher.set_result(None)

    def close(self, reason: str) -> None:
        """End the requests that run: all replicas are lost to them, and none is checked again."""
        self.closing = reason
        for backend in self.all:
            backend.state = "lost"  # before `mark_lost`, which would log that the replica is unhealthy
            self.mark_lost(backend, reason)

    async def watch(self) -> None:
        """Check every replica, until cancelled."""
        while True:
            try:
                times = sorted(each.check_time for each in self.all if each.check_time >= 0)
                self._usual_check = times[len(times) // 2] if times else 0.0
                backends = self.all
                pause = min(CHECK_PAUSE, self._interval / max(1, len(backends)))
                await asyncio.gather(*(self._check_later(i * pause, backend) for i, backend in enumerate(backends)))
                self._drop_left()
                self.judge_slowness()
                self.update_desired()
            except Exception:
                log.exception("the health checks failed; they go on")
            await asyncio.sleep(self._interval)

    async def _check_later(self, seconds: float, backend: Backend) -> None:
        await asyncio.sleep(seconds)
        await self.check(backend)

    def judge_slowness(self) -> None:
        """Compare the healthy replicas' times to the first byte."""
        backends = self.healthy
        suspended = judge_slowness([backend.first_bytes for backend in backends], time.monotonic())
        for backend in backends:
            if backend.first_bytes in suspended:
                log.warning("replica %s gets no requests for a while: it is slow against the others", backend.url)

    def update_desired(self) -> None:
        """Tell the controller what the replicas do."""
        if self.desired is None:
            return
        now, serving = time.monotonic(), self.healthy
        late = [age for backend in serving for age in backend.first_bytes.list_ages(now)]
        recent = [seconds for at, seconds in self.first_tokens if at > now - RECENT]
        gaps = [backend.inter_token for backend in serving if backend.inter_token]
        joining = sum(backend.state == "joining" for backend in self.all)
        load = sum(backend.outstanding for backend in self.all)
        usual = find_percentile(recent)
        first_token = find_percentile(recent + [age for age in late if age > usual])
        self.desired.update(FleetSignals(now, len(serving), joining, load, first_token, max(gaps, default=0.0)))

    async def check(self, backend: Backend, *, is_suspect: bool = False) -> None:
        """Ask a replica for its health once. `is_suspect`: a connection broke, or none was tried
        yet, so one failed check is enough; those of many requests are one."""
        if self.closing:
            return
        if not is_suspect:
            await self._check(backend, is_suspect=False)
            return
        if backend.suspected is None or backend.suspected.done():
            backend.suspected = asyncio.create_task(self._check(backend, is_suspect=True))
        await asyncio.shield(backend.suspected)

    async def _check(self, backend: Backend, *, is_suspect: bool) -> None:
        usual = max(backend.check_time, self._usual_check)
        max_silence = MIN_SILENCE if backend.state == "lost" else MAX_SILENCE  # a round waits for all of its checks
        patience, started = max(MIN_SILENCE, self._interval, min(max_silence, SLOW_CHECK * usual)), time.monotonic()
        reply = await self._wait_reply(backend, patience)
        announced, reason = "", f"no answer to /health within {patience:.1f} s"
        if isinstance(reply, httpx.Response):
            reason = "" if reply.status_code == 200 else f"/health answers {reply.status_code}"
            announced = reply.headers.get("x-frame-state", "")
            if reply.status_code == 508:  # a router refuses its own request
                if not backend.is_leaving:
                    log.error("replica %s is this router itself: it is removed", backend.url)
                    self.remove(backend)
                return
        elif reply is not None:
            reason = f"{type(reply).__name__} {reply}".strip()
        if reply is not None:
            if backend.silent_since < math.inf:
                backend.woken_at = time.monotonic()
            backend.silent_since = math.inf
        state = "serving" if not reason else ANNOUNCED.get(announced)
        if state is not None and isinstance(reply, httpx.Response):
            self._note_health(backend, state, reply.headers)
            return
        if backend.state == "joining":  # it may still load its model
            return
        if reply is None:
            backend.silent_since = min(backend.silent_since, started)
            if self._may_be_late(backend, patience):
                return
            is_suspect = is_suspect and backend.check_time < 0
        backend.failed_checks += 1
        if is_suspect or backend.failed_checks >= PATIENCE:
            is_reachable = isinstance(reply, httpx.Response) and time.monotonic() - backend.served_at < MAX_RESTART
            self.mark_lost(backend, reason, is_silent=reply is None, is_reachable=is_reachable)

    async def _wait_reply(self, backend: Backend, patience: float) -> httpx.Response | Exception | None:
        """The answer to a new check, or a late one to an earlier check; None: there is none in
        time. Time in which this process was late does not count."""
        mine, checks, left = asyncio.create_task(self._ask_health(backend)), backend.checks, patience
        checks[:] = [each for each in checks if not each.done()]
        for old in checks[: -(MAX_CHECKS - 1)]:
            old.cancel()
        checks.append(mine)
        while left > 0:
            begun = time.monotonic()
            waiting = {mine, *checks}
            await asyncio.wait(waiting, timeout=min(left, STEP), return_when=asyncio.FIRST_COMPLETED)
            left -= min(STEP, time.monotonic() - begun)
            for task in [each for each in waiting if each.done()]:
                if task in checks:
                    checks.remove(task)
                if not task.cancelled() and (task is mine or isinstance(task.result(), httpx.Response)):
                    return task.result()
            if mine.cancelled():  # the replica leaves
                return None
        return None

    async def _ask_health(self, backend: Backend) -> httpx.Response | Exception:
        """The head of the answer; its body may not end."""
        begun = time.monotonic()
        try:
            async with self._client.stream("GET", f"{backend.url}/health") as reply:
                backend.check_time = time.monotonic() - begun
                return reply
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:  # UnicodeError is a ValueError
            return error

    def _may_be_late(self, backend: Backend, patience: float) -> bool:
        """Whether a replica without an answer is one of a busy machine: it answers others, or most
        other replicas are as silent."""
        now = time.monotonic()
        if now - backend.heard < patience:
            return True
        others = [each for each in self.all if each is not backend and each.state in ("serving", "draining")]
        num_silent = sum(0 <= now - each.silent_since < 2 * MAX_SILENCE or now - each.woken_at < patience for each in others)
        return 2 * num_silent > len(others) and now - backend.silent_since < MAX_SILENCE

    def _note_health(self, backend: Backend, state: State, headers: httpx.Headers) -> None:
        """It answers that it serves, sleeps or drains."""
        instance, _, rest = headers.get(FLEET.decode(), "").partition(" ")
        backend.identity, _, version = rest.partition(" ")
        backend.instance = instance if version == str(VERSION) else ""  # one of another version serves, without moves
        backend.inter_token = read_inter_token(headers.get(LOAD.decode(), ""))
        if backend.state == "lost":
            log.warning("replica %s is healthy again", backend.url)
        if backend.lost.is_set():
            backend.lost = asyncio.Event()
        backend.served_at = time.monotonic()
        if state == "draining" and backend.state != state:
            log.info("replica %s drains", backend.url)
        backend.state, backend.failed_checks = "draining" if backend.is_leaving else state, 0
        self._follow_events(backend, headers.get(KV_EVENTS.decode(), ""))

    def _follow_events(self, backend: Backend, told: str) -> None:
        """Read the KV events of a replica's process, where it says."""
        is_read = self.prefixes is not None and self._chooser.has_policy
        source = f"{backend.instance} {told}" if told and backend.instance and is_read else ""
        if source == backend.events_source or self._members.get(backend.number) is not backend:  # it has left meanwhile
            return
        backend.close_events()
        backend.events_source = source
        if source and self.prefixes is not None:
            try:
                backend.events = self.prefixes.follow(backend.url, told)
            except ValueError as error:
                log.warning("replica %s: its KV events cannot be read: %s", backend.url, error)


class Place:
    """A request that counts as one of a replica. `prefixes`: of its prompt. `is_refused`: the
    replica has nothing of it."""

    def __init__(self, backend: Backend, prefixes: PromptPrefixes | None) -> None:
        self.backend, self._prefixes, self.is_refused = backend, prefixes, False
        backend.outstanding += 1
        if self._prefixes is not None:
            self._prefixes.owner.enter(self._prefixes, backend.url)

    def leave(self) -> None:
        """It has ended there."""
        self.backend.outstanding -= 1
        if self._prefixes is not None:
            self._prefixes.owner.leave(self._prefixes, self.backend.url, is_refused=self.is_refused)

    def move(self, place: Place) -> None:
        """It goes on at the other place, which the caller does not leave."""
        self.leave()
        self.backend, self.is_refused = place.backend, False


@contextlib.contextmanager
def counted(backend: Backend, prefixes: PromptPrefixes | None = None) -> Iterator[Place]:
    """Count a request of a replica inside a with block."""
    place = Place(backend, prefixes)
    try:
        yield place
    finally:
        place.leave()


@contextlib.contextmanager
def timed(backend: Backend, is_stream: bool) -> Iterator[None]:
    """Measure the time to the first byte of a stream, which a with block waits for."""
    if not is_stream:
        yield
        return
    number, has_answer = backend.first_bytes.start(time.monotonic()), False
    try:
        yield
        has_answer = True
    finally:
        now = time.monotonic()
        seconds = backend.first_bytes.finish(number, now, has_answer=has_answer)
        if has_answer:
            backend.group.first_tokens.append((now, seconds))
