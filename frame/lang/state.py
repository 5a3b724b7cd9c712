"""`State`: what a program appends to and reads from; `Runtime`: one run, which executes the nodes.

A program is a function in a thread. `+=` returns at once: one asyncio task a state works off its
queue, so branches of a fork run side by side. Reading a value waits for it. Must not know how a
backend reaches its model.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn, Self

import msgspec

from frame.core.errors import did_you_mean
from frame.lang.backends import Backend, Conversation, Generated
from frame.lang.nodes import Gen, Image, Node, Role, Select, TextNode, list_nodes


class ProgramError(RuntimeError):
    """A step of a program failed. The sentence names function, line and branch; `__cause__` is the
    failure."""


class UnsupportedError(ValueError):
    """The backend cannot express something that the program uses."""


class MissingValueError(KeyError):
    """A program reads a value that it has not appended yet."""

    def __str__(self) -> str:  # KeyError quotes its sentence
        return str(self.args[0])


class Event(NamedTuple):
    """A piece of generated text, as `stream` yields it."""

    name: str | None  # of the variable
    text: str
    branch: str  # "" or "0.2"


@dataclass(slots=True)
class Entry:
    """A step of a program, for traces and reports."""

    kind: str  # text, gen, select, image, role, fork, join, call
    detail: str
    branch: str
    where: str  # function and line
    generated: Generated | None = None
    seconds: float = 0.0


class _Item(NamedTuple):
    """What a state's task executes: a node, a state to copy to, a future to wait for, or None
    (nothing: all before is done)."""

    work: Node | State | Future[None] | None
    entry: Entry
    result: Future[Any]


class Runtime:
    """One run: event loop, backend, and all states. Its methods may be called from any thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        backend: Backend,
        sampling: Mapping[str, Any],
        seed: int | None,
        on_event: Callable[[Event], None] | None,
        is_trace: bool = False,
    ) -> None:
        self.loop, self.backend, self.sampling, self.seed = loop, backend, sampling, seed
        self.on_event, self.is_trace, self.is_closed = on_event, is_trace, False
        self.failure: BaseException | None = None
        self.entries: list[Entry] = []
        self.states: list[State] = []

    def cancel(self, failure: BaseException) -> None:
        """Stop all generations; what waits for a value gets `failure`. No effect after `close`."""
        if not self.is_closed:
            self.failure = self.failure or failure
            self.loop.call_soon_threadsafe(self._stop_all, failure)

    def _stop_all(self, failure: BaseException) -> None:
        for state in self.states:
            state.stop(failure)

    async def close(self) -> None:
        """Wait for what is being cancelled."""
        if workers := [state.worker for state in self.states if state.worker is not None]:
            await asyncio.wait(workers)
        self.is_closed = True

    def check(self, features: frozenset[str], where: str) -> None:
        """Raise UnsupportedError for features that the backend lacks."""
        if missing := sorted(features - self.backend.features):
            raise UnsupportedError(f"{where}: backend {self.backend.name} does not support {', '.join(missing)}")


class State:
    """A program's conversation or text so far. `s += node` appends, `s[name]` is a generated value.

    Roles make a conversation and plain text makes a plain prompt; one program uses either.
    """

    def __init__(self, runtime: Runtime, branch: str = "") -> None:
        self.runtime, self.branch = runtime, branch
        self.worker: asyncio.Task[None] | None = None
        self.prompt_text, self.prompt_messages = "", list[dict[str, Any]]()
        self.futures: dict[str, Future[Any]] = {}
        self._queue: deque[_Item] = deque()
        self._failure: BaseException | None = None
        self.is_chat: bool | None = None
        self._num_generations = self._num_forks = 0
        runtime.states.append(self)

    # what programs use ----------------------------------------------------------------------------

    def __iadd__(self, node: Node | str) -> Self:
        where = _caller()
        for part in list_nodes(node):
            is_chat = isinstance(part, Role)
            if self.is_chat not in (None, is_chat):
                raise ValueError(f"{where}: roles and plain text do not mix in one program; put the text into user() or assistant()")
            self.is_chat = is_chat
            self.runtime.check(frozenset({"role" if is_chat else "text"}), where)
            for each in (part, *part.nodes) if isinstance(part, Role) else (part,):
                self.runtime.check(each.features, where)
                result = self.enqueue(each, self.note(_kind(each), _detail(each), where))
                if isinstance(each, Gen | Select) and each.name is not None:
                    self.futures[each.name] = result
        return self

    def __getitem__(self, name: str) -> Any:
        """The value of a `gen`, `select`, `call` or joined branch; waits for it. Raises
        MissingValueError, a KeyError, before it is appended."""
        if name not in self.futures:
            raise MissingValueError(self._describe_missing(name))
        return self.futures[name].result()

    def __contains__(self, name: str) -> bool:
        """Whether the value was appended."""
        return name in self.futures

    def __eq__(self, other: object) -> bool:
        return self is other if isinstance(other, State) else self._refuse()

    __hash__ = object.__hash__

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError('a state is no value; read a value with s["name"], and the prompt with s.text or s.messages')

    __bool__ = __len__ = __iter__ = __str__ = __format__ = _refuse  # type: ignore[assignment]

    def _describe_missing(self, name: object) -> str:
        if any(name in state.futures for state in self.runtime.states):
            remedy = "another branch has it; read it there, or call join() of the branches first"
        else:
            remedy = "append what generates it first (s += …)"
        hint = did_you_mean(name, self.futures) if isinstance(name, str) else ""
        return f"{_caller()}: s[{name!r}] is read before it has a value{hint or f'; {remedy}'}"

    @property
    def values(self) -> dict[str, Any]:
        """All values by name; waits for them."""
        return {name: self[name] for name in list(self.futures)}

    @property
    def text(self) -> str:
        """The prompt with all generated text; of a conversation one line a message, "role:
        content"."""
        self.wait()
        return self.prompt_text or "\n".join(f"{message['role']}: {_plain(message['content'])}" for message in self.prompt_messages)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as OpenAI messages; empty for plain text."""
        self.wait()
        return [dict(message) for message in self.prompt_messages]

    @property
    def usage(self) -> dict[str, int]:
        """Token counts of the whole run: prompt_tokens, cached_tokens, completion_tokens."""
        counts = [entry.generated for entry in self.runtime.entries if entry.generated is not None]
        return {name: sum(getattr(each, name) for each in counts) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")}

    def fork(self, count: int = 1) -> Branches:
        """Copies of this state that continue side by side. The engine computes their common prefix
        once."""
        entry = self.note("fork", f"{count} branches", _caller())
        prefix = (f"{self.branch}." if self.branch else "") + (f"{self._num_forks}:" if self._num_forks else "")
        self._num_forks += 1
        branches = Branches(self, (State(self.runtime, f"{prefix}{index}") for index in range(count)))
        for child in branches:
            child.futures, child.is_chat = dict(self.futures), self.is_chat
            child.enqueue(self.enqueue(child, entry), entry)
        return branches

    def call(self, name: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Run an external function (or coroutine function); its result is `s[name]` too. `trace`
        does not run it."""
        self.note("call", f"{name} = {getattr(function, '__name__', function)}()", _caller())
        if self.runtime.is_trace:
            value: Any = f"<{name}>"
        elif inspect.iscoroutinefunction(function):
            value = asyncio.run_coroutine_threadsafe(function(*arguments, **keywords), self.runtime.loop).result()
        else:
            value = function(*arguments, **keywords)
        self.futures[name] = _done(value)
        return value

    def wait(self) -> None:
        """Wait until everything appended so far is done. Raises what failed."""
        if self.runtime.is_closed:
            if self._failure is not None:
                raise self._failure
            return
        self.enqueue(None, Entry("wait", "", self.branch, "")).result()

    # execution, in the event loop -----------------------------------------------------------------

    def stop(self, failure: BaseException) -> None:
        """End this state: its running generation is cancelled and all that is queued fails."""
        self._failure = self._failure or failure
        while self._queue:
            self._queue.popleft().result.set_exception(self._failure)
        if self.worker is not None and self.worker is not asyncio.current_task():
            self.worker.cancel()

    def enqueue(self, work: Node | State | Future[None] | None, entry: Entry) -> Future[Any]:
        result: Future[Any] = Future()

        def put() -> None:
            if failure := self._failure or self.runtime.failure:
                result.set_exception(failure)
                return
            self._queue.append(_Item(work, entry, result))
            if self.worker is None:
                self.worker = self.runtime.loop.create_task(self._work())

        self.runtime.loop.call_soon_threadsafe(put)
        return result

    async def _work(self) -> None:
        """Execute the queue; the first failure ends this branch."""
        try:
            while self._queue:
                item = self._queue[0]
                try:
                    value = await self._execute(item.work, item.entry)
                except (ProgramError, UnsupportedError) as error:  # of the branch that this one comes from
                    self.stop(error)
                except Exception as error:  # noqa: BLE001 - whatever a backend may raise
                    branch = f", branch {self.branch}" if self.branch else ""
                    reason = "timed out" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
                    failure = ProgramError(f"{item.entry.where}{branch}: {reason}")
                    failure.__cause__ = error
                    self.stop(failure)
                else:
                    self._queue.popleft().result.set_result(value)
        finally:
            self.worker = None

    async def _execute(self, work: Node | State | Future[None] | None, entry: Entry) -> Any:
        if isinstance(work, Role):
            self.prompt_messages.append({"role": work.role, "content": ""})
        elif isinstance(work, TextNode):
            self._add_text(work.text)
        elif isinstance(work, Image):
            content = self.prompt_messages[-1]["content"]
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}] * bool(content)
            self.prompt_messages[-1]["content"] = [*parts, {"type": "image_url", "image_url": {"url": work.url}}]
        elif isinstance(work, State):
            work.prompt_text, work.prompt_messages = self.prompt_text, [dict(message) for message in self.prompt_messages]
        elif isinstance(work, Future):
            await asyncio.wrap_future(work)
        elif isinstance(work, Gen | Select):
            began = time.perf_counter()
            async with asyncio.timeout(work.timeout):
                entry.generated, value, text = await (self._generate(work) if isinstance(work, Gen) else self._select(work))
            entry.seconds = time.perf_counter() - began
            self._add_text(text)
            return value
        return None

    async def _generate(self, node: Gen) -> tuple[Generated, Any, str]:
        runtime, self._num_generations = self.runtime, self._num_generations + 1
        params = {**runtime.sampling, **node.params}
        if runtime.seed is not None:  # a generation's own seed: a function of the run's, the branch and the place in it
            key = f"{runtime.seed}/{self.branch}/{self._num_generations}".encode()
            params.setdefault("seed", int.from_bytes(blake2b(key, digest_size=7).digest(), "little"))
        tell = runtime.on_event
        generated = await runtime.backend.generate(
            self._prompt(), params, tell and (lambda text: tell(Event(node.name, text, self.branch)))
        )
        values = generated.texts if runtime.is_trace else [_parsed(node, text, generated.finish_reason) for text in generated.texts]
        return generated, values if params.get("n", 1) > 1 else values[0], generated.texts[0]

    async def _select(self, node: Select) -> tuple[Generated, Any, str]:
        if node.method == "constrained":
            generated = await self.runtime.backend.generate(self._prompt(), {"choice": node.choices, "temperature": 0.0}, None)
            chosen = generated.texts[0]
        else:
            tokens, generated = await self.runtime.backend.score(self._prompt(), node.choices)
            generated.scores = [sum(values) / (len(values) if node.normalization == "token" else 1) for values in tokens]
            chosen = node.choices[generated.scores.index(max(generated.scores))]
        if self.runtime.on_event is not None:
            self.runtime.on_event(Event(node.name, chosen, self.branch))
        return generated, chosen, chosen

    def _prompt(self) -> Conversation:
        messages = self.prompt_messages
        if messages and messages[-1]["role"] == "assistant":
            if messages[-1]["content"]:
                self.runtime.check(frozenset({"continued message"}), "a generation after text in assistant()")
            else:
                messages = messages[:-1]
        return Conversation(self.prompt_text, tuple(messages))

    def _add_text(self, text: str) -> None:
        if not self.prompt_messages:
            self.prompt_text += text
        elif isinstance(content := self.prompt_messages[-1]["content"], str):
            self.prompt_messages[-1]["content"] = content + text
        else:
            self.prompt_messages[-1]["content"] = [*content, {"type": "text", "text": text}]

    def note(self, kind: str, detail: str, where: str) -> Entry:
        entry = Entry(kind, detail, self.branch, where)
        self.runtime.entries.append(entry)
        return entry


class Branches(list[State]):
    """The states of a fork."""

    def __init__(self, parent: State, states: Any) -> None:
        super().__init__(states)
        self._parent = parent

    def join(self) -> None:
        """Wait for all branches. What they generated is a list in the parent, one entry a branch,
        under the same name."""
        old, names = self._parent.futures, dict.fromkeys(name for state in self for name in state.futures)
        for name in [name for name in names if any(state.futures.get(name) is not old.get(name) for state in self)]:
            old[name] = _done([state[name] if name in state.futures else None for state in self])
        for state in self:
            state.wait()
        self._parent.note("join", "", _caller())


def _caller() -> str:
    """Function and line of the program's code that called into this package."""
    frame = sys._getframe(1)  # noqa: SLF001 - documented for this use
    while frame.f_globals.get("__name__", "").startswith("frame.lang.") and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_name}, line {frame.f_lineno}"


def _kind(node: Node) -> str:
    return type(node).__name__.lower().removesuffix("node")


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _detail(node: Node) -> str:
    return str(next(getattr(node, name) for name in ("text", "url", "role", "name") if hasattr(node, name)) or "")


def _parsed(node: Gen, text: str, finish_reason: str | None) -> Any:
    """The text, or what the schema makes of it. Raises ValueError for JSON that was cut."""
    if node.schema is None:
        return text
    try:
        return msgspec.json.decode(text) if isinstance(node.schema, Mapping) else node.schema.model_validate_json(text)
    except ValueError as error:
        hint = "; raise max_tokens" if finish_reason == "length" else ""
        raise ValueError(f"gen({node.name!r}) made no valid JSON of its schema{hint} ({error})") from None


def _plain(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "<image>") for part in content)
