"""`@function` and `Program`: runs a program once, streaming, in batches, or as a trace.

The program's function runs in a thread, its generations in an event loop. Must not know how nodes
are executed.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import inspect
import queue
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from frame.host.progress import show_progress
from frame.lang import nodes
from frame.lang.backends import Backend, Conversation, Generated, make_backend
from frame.lang.report import Trace
from frame.lang.state import Event, ProgramError, Runtime, State, UnsupportedError


class Program:
    """A program: call it with a state to run it inside another one, or `run` it on a backend.

    Every form takes the function's keywords and: `backend`; `sampling`, defaults for every `gen`;
    `seed`, which makes a run replayable (each `gen` without a seed gets one of its own from it);
    `timeout` of the whole run in seconds. Raises UnsupportedError before anything runs where the
    source shows a feature that the backend lacks, ProgramError for a failed step, and what the
    function raises.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.name, self.__doc__ = function, function.__name__, function.__doc__

    def __call__(self, state: State, *arguments: Any, **keywords: Any) -> Any:
        """Run inside another program, on its state; returns what the function returns."""
        return self.function(state, *arguments, **keywords)

    def run(self, *, backend: Any, timeout: float | None = None, **keywords: Any) -> State:
        """Run to the end. The state has all values."""
        with _loop(target := make_backend(backend)) as loop:
            runtime, keywords = self._runtime(loop, target, keywords)
            return self._run(runtime, timeout, keywords)

    async def arun(self, *, backend: Any, timeout: float | None = None, **keywords: Any) -> State:  # noqa: ASYNC109 - as in `run`
        """`run` for an event loop, which executes the generations; cancelling it stops them."""
        runtime, keywords = self._runtime(asyncio.get_running_loop(), make_backend(backend), keywords)
        return await self._arun(runtime, timeout, keywords)

    def stream(self, *, backend: Any, timeout: float | None = None, **keywords: Any) -> Generator[Event, None, State]:
        """Text as it is generated, branches interleaved; the generator returns the state. Leaving
        it early stops the run."""
        events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        with _loop(target := make_backend(backend)) as loop, ThreadPoolExecutor(1) as threads:
            runtime, keywords = self._runtime(loop, target, keywords, events.put)
            done = threads.submit(self._run, runtime, timeout, keywords)
            done.add_done_callback(lambda _: events.put(None))
            try:
                yield from iter(events.get, None)
                return done.result()
            finally:
                runtime.cancel(ProgramError("the stream was left"))

    async def astream(self, *, backend: Any, timeout: float | None = None, **keywords: Any) -> AsyncIterator[Event]:  # noqa: ASYNC109
        """`stream` for an event loop."""
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        runtime, keywords = self._runtime(asyncio.get_running_loop(), make_backend(backend), keywords, events.put_nowait)
        running = asyncio.ensure_future(self._arun(runtime, timeout, keywords))
        running.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            await running
        finally:
            running.cancel()
            await asyncio.wait([running])

    def run_batch(
        self,
        arguments: Sequence[Mapping[str, Any]],
        *,
        backend: Any,
        concurrency: int = 64,
        progress: bool = False,
        timeout: float | None = None,
        sort_by_prefix: bool = True,
        return_errors: bool = False,
        **options: Any,
    ) -> list[Any]:
        """Run the program for each keyword mapping, at most `concurrency` at once; the states in
        order.

        Programs whose prompts begin alike run together (`sort_by_prefix`): for this each function
        runs up to its first generation beforehand. `return_errors` puts a program's error into its
        place instead of stopping the batch. `timeout` is of each program; `options` are `sampling`
        and `seed`.
        """
        results: list[Any] = [None] * len(arguments)
        target, threads = make_backend(backend), ThreadPoolExecutor(max(1, concurrency))
        shown = show_progress(self.name, len(arguments)) if progress else contextlib.nullcontext(lambda _: None)
        with _loop(target) as loop, shown as advance, threads:
            runs = [self._runtime(loop, target, {**options, **keywords}) for keywords in arguments]
            firsts = [self._first_prompt(loop, keywords) if sort_by_prefix else "" for keywords in arguments]

            def run(index: int) -> None:
                try:
                    results[index] = self._run(runs[index][0], timeout, runs[index][1])
                except Exception as error:
                    if not return_errors:
                        raise
                    results[index] = error
                advance(1)

            futures = [threads.submit(run, index) for index in sorted(range(len(runs)), key=firsts.__getitem__)]
            try:
                for future in futures:
                    future.result()
            except BaseException as error:
                for future, (runtime, _) in zip(futures, runs, strict=True):
                    future.cancel()
                    runtime.cancel(error)
                raise
        return results

    def trace(self, **keywords: Any) -> Trace:
        """What the program appends, without a model: generated values are placeholders, and `call`
        runs nothing."""
        with _loop(target := _Placeholders()) as loop:
            runtime = Runtime(loop, target, {}, None, None, is_trace=True)
            self._run(runtime, None, keywords)
            return Trace(self.name, runtime.entries)

    # parts ----------------------------------------------------------------------------------------

    @functools.cached_property
    def _features(self) -> frozenset[str]:
        return used_features(self.function)  # parses source: once, not for each run of a batch

    def _runtime(
        self,
        loop: asyncio.AbstractEventLoop,
        backend: Backend,
        keywords: Mapping[str, Any],
        on_event: Callable[[Event], None] | None = None,
    ) -> tuple[Runtime, dict[str, Any]]:
        """The run, and the function's own keywords."""
        rest = dict(keywords)
        sampling, seed = nodes.check_sampling(rest.pop("sampling", None) or {}), rest.pop("seed", None)
        if missing := sorted(self._features - backend.features):
            raise UnsupportedError(f"{self.name} uses {', '.join(missing)}, which backend {backend.name} does not support")
        inspect.signature(self.function).bind(None, **rest)  # raises TypeError for keywords that it has not
        return Runtime(loop, backend, sampling, seed, on_event), rest

    def _run(self, runtime: Runtime, timeout: float | None, keywords: Mapping[str, Any]) -> State:
        """In a thread that is not the loop's."""
        late = ProgramError(f"{self.name} took longer than {timeout} s")
        timer = threading.Timer(timeout or 0, runtime.cancel, (late,))
        try:
            if timeout is not None:
                timer.start()
            state = State(runtime)
            self.function(state, **keywords)
            for each in runtime.states:
                each.wait()
            return state
        except BaseException as error:
            runtime.cancel(error if isinstance(error, Exception) else ProgramError("the program was interrupted"))
            raise
        finally:
            timer.cancel()
            asyncio.run_coroutine_threadsafe(runtime.close(), runtime.loop).result()

    async def _arun(self, runtime: Runtime, limit: float | None, keywords: Mapping[str, Any]) -> State:
        with ThreadPoolExecutor(1) as threads:
            running = asyncio.get_running_loop().run_in_executor(threads, self._run, runtime, limit, keywords)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                runtime.cancel(ProgramError("the program was cancelled"))
                with contextlib.suppress(Exception):
                    await running
                raise
            finally:
                await runtime.backend.close()

    def _first_prompt(self, loop: asyncio.AbstractEventLoop, keywords: Mapping[str, Any]) -> str:
        """The prompt of the program's first generation; "" where it has none."""
        first = _FirstPrompt()
        with contextlib.suppress(Exception):  # the run itself reports it
            self._run(Runtime(loop, first, {}, None, None, is_trace=True), None, keywords)
        return first.prompt


def function(program: Callable[..., Any]) -> Program:
    """Make a `Program` of a function whose first parameter is the state."""
    return Program(program)


def used_features(program: Callable[..., Any]) -> frozenset[str]:
    """What the source of a program, and of the programs that it calls, asks of a backend; empty
    without source."""
    features, seen, left = set[str](), set[Callable[..., Any]](), [program]
    while left:
        current = left.pop()
        seen.add(current)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(current)))
        except (OSError, SyntaxError, TypeError):
            continue
        names = {**current.__globals__, **inspect.getclosurevars(current).nonlocals}
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            target = _resolved(call.func, names)
            if isinstance(target, Program) and target.function not in seen:
                left.append(target.function)
            features |= _features_of_call(target, {str(keyword.arg): keyword.value for keyword in call.keywords})
    return frozenset(features)


def _features_of_call(target: Any, keywords: Mapping[str, ast.expr]) -> set[str]:
    if any(target is role for role in (nodes.system, nodes.user, nodes.assistant)):
        return {"role"}
    if target is nodes.image:
        return {"image"}
    if target is nodes.gen:
        return {{"choices": "choice"}.get(key, key) for key in ("regex", "schema", "ebnf", "choices") if key in keywords}
    if target is nodes.select:
        method = keywords.get("method", ast.Constant("logprob"))
        return {"choice" if method.value == "constrained" else "logprob select"} if isinstance(method, ast.Constant) else set()
    return set()


def _resolved(expression: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(expression, ast.Attribute):
        return getattr(_resolved(expression.value, names), expression.attr, None)
    return names.get(expression.id) if isinstance(expression, ast.Name) else None


class _AllFeatures(frozenset[str]):
    def __rsub__(self, other: Any) -> frozenset[str]:
        return frozenset()


class _Placeholders(Backend):
    """Generates placeholders, for traces."""

    name, features = "trace", _AllFeatures()

    async def generate(self, prompt: Conversation, params: Mapping[str, Any], on_text: Any) -> Generated:
        return Generated([params["choice"][0] if params.get("choice") else "<text>"] * params.get("n", 1))

    async def score(self, prompt: Conversation, choices: Sequence[str]) -> tuple[list[list[float]], Generated]:
        return [[0.0] for _ in choices], await self.generate(prompt, {"choice": choices}, None)

    async def close(self) -> None:
        return


class _FirstPrompt(_Placeholders):
    """Ends the program at its first generation, whose prompt it keeps."""

    prompt = ""

    async def generate(self, prompt: Conversation, params: Mapping[str, Any], on_text: Any) -> Generated:
        self.prompt = self.prompt or prompt.text or repr(prompt.messages)
        raise ProgramError("the first generation")


@contextlib.contextmanager
def _loop(backend: Backend) -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own, for this backend."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="frame.lang", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(backend.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
