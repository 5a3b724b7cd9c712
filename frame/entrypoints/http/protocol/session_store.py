"""`SessionStore`: the sessions that clients have opened, with the tokens of their requests, from
which later requests continue (SGLang: `Session`).

Used by the routes of sessions and of `/generate`. Must not know the engine.
"""

from __future__ import annotations

import math
import secrets
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

from frame.entrypoints.http.errors import ApiError, quoted

MAX_SESSIONS = 256  # of a tenant
MAX_TOKENS = 1 << 22  # that are kept for a tenant's sessions
MAX_REQUESTS = 64  # of a session, from which others may continue
PARAM = "session_params"


@dataclass(slots=True)
class OpenSession:
    """`requests`: prompt and output by request id, the oldest first."""

    seconds: float  # without a request, after which it is closed
    max_tokens: int  # of a request's prompt and output
    until: float  # seconds of the clock
    num_running: int = 0  # requests that continue it
    requests: OrderedDict[str, tuple[array[int], int]] = field(default_factory=OrderedDict)  # tokens, and how many are the prompt

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for tokens, _ in self.requests.values())


@dataclass(frozen=True, slots=True)
class Continuation:
    """Where a request goes on. `rid`: the request before it; None: none. `offset`: tokens of that
    one's which are kept; 0: all."""

    session: str
    rid: str | None = None
    offset: int = 0
    replaces: bool = False  # the requests after `rid` are forgotten once this one has finished
    drops_output: bool = False  # the output of `rid` is left out


class SessionStore:
    """Sessions by tenant: no tenant finds another one's. The least recently used are closed where a
    tenant's have too many tokens. `clock`: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[str, OrderedDict[str, OpenSession]] = {}

    def open_session(self, tenant: str, session: str | None, max_tokens: int, seconds: float) -> str:
        """-> its name. Raises ApiError 400 for one that is open, and 429 for too many."""
        mine = self._list_open(tenant)
        name = session or secrets.token_hex(16)
        if name in mine:
            raise ApiError(400, f"session {quoted(name)} is open; close it, or choose another session_id", "session_id")
        if len(mine) >= MAX_SESSIONS:
            raise ApiError(429, f"{len(mine)} sessions are open, and a key may have {MAX_SESSIONS}; close some", "session_id")
        self._sessions.setdefault(tenant, mine)[name] = OpenSession(seconds, max_tokens, self._clock() + seconds)
        return name

    def close_session(self, tenant: str, session: str) -> bool:
        """Whether it was open."""
        mine = self._list_open(tenant)
        was_open = mine.pop(session, None) is not None
        if not mine:
            self._sessions.pop(tenant, None)
        return was_open

    def find_seconds(self, tenant: str, session: str) -> float | None:
        """After how many seconds without a request an open session is closed; it is used now. None:
        it is not open."""
        mine = self._list_open(tenant)
        opened = mine.get(session)
        if opened is None:
            return None
        mine.move_to_end(session)
        opened.until = self._clock() + opened.seconds
        return opened.seconds

    @contextmanager
    def use_session(self, tenant: str, session: str) -> Iterator[None]:
        """Keep an open session open meanwhile; its seconds count from the end."""
        opened = self._list_open(tenant).get(session)
        if opened is None:
            yield
            return
        opened.num_running += 1
        try:
            yield
        finally:
            opened.num_running -= 1
            opened.until = self._clock() + opened.seconds

    def read_history(self, tenant: str, where: Continuation) -> list[int]:
        """The tokens before those of a request. Raises ApiError 400 for a session that is not open,
        and for a request that it does not have."""
        if self.find_seconds(tenant, where.session) is None:
            raise ApiError(400, f"session {quoted(where.session)} is not open; open it with /open_session", f"{PARAM}.id")
        requests = self._sessions[tenant][where.session].requests
        if where.rid is None:
            return []
        if where.rid not in requests:
            sentence = f"session {quoted(where.session)} has no finished request {quoted(where.rid)}; send the id of an earlier response"
            raise ApiError(400, sentence, f"{PARAM}.rid")
        tokens, prompt_len = requests[where.rid]
        history = tokens[:prompt_len] if where.drops_output else tokens
        if where.offset > len(history):
            sentence = f"{PARAM}.offset is {where.offset}, and the request before has {len(history)} tokens; send fewer"
            raise ApiError(400, sentence, f"{PARAM}.offset")
        return history[: where.offset or None].tolist()

    def add_request(self, tenant: str, where: Continuation, rid: str, prompt: Sequence[int], output: Sequence[int]) -> None:
        """A request of a session has finished, and takes the place of those that it replaces. It is
        not kept where the session was closed, or would hold too many tokens."""
        mine = self._list_open(tenant)
        opened = mine.get(where.session)
        if opened is None:
            return
        if where.replaces and (where.rid is None or where.rid in opened.requests):
            while opened.requests and next(reversed(opened.requests)) != where.rid:
                opened.requests.popitem()
        if len(prompt) + len(output) > min(opened.max_tokens, MAX_TOKENS):
            return
        opened.requests[rid] = array("i", [*prompt, *output]), len(prompt)
        opened.requests.move_to_end(rid)
        while len(opened.requests) > MAX_REQUESTS or (opened.num_tokens > MAX_TOKENS and len(opened.requests) > 1):
            opened.requests.popitem(last=False)
        total = sum(each.num_tokens for each in mine.values())
        for name in list(islice(mine, len(mine) - 1)):
            if total <= MAX_TOKENS:
                break
            if name != where.session:
                total -= mine.pop(name).num_tokens

    def _list_open(self, tenant: str) -> OrderedDict[str, OpenSession]:
        """A tenant's sessions, without those whose time has passed."""
        mine = self._sessions.get(tenant, OrderedDict[str, OpenSession]())
        now = self._clock()
        for name in [name for name, each in mine.items() if each.until <= now and not each.num_running]:
            del mine[name]
        if not mine:
            self._sessions.pop(tenant, None)
        return mine


def read_number(place: str, value: float | None, minimum: float, maximum: float, default: float) -> float:
    """A number in a range. Raises ApiError 400."""
    if value is None:
        return default
    if not minimum <= value <= maximum or math.isnan(value):
        raise ApiError(400, f"{place} is {value:g}; it must be a number from {minimum:g} to {maximum:g}", place)
    return value
