"""`Services`: what routes share, and the steps that every generating route takes: admit, tokenize,
check, submit, watch for a hang-up.

Knows no dialect: the shapes of requests and responses are the routes'.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import msgspec

from frame.core.text.chat_template import ChatTemplateError
from frame.core.text.text_bounds import TextTooLongError
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.limits import ContextLengthError, EngineDeadError, InvalidRequestError, QueueFullError
from frame.entrypoints.engine_client.quotas import QuotaExceededError, QuotaLease, TenantQuotas
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.http.errors import RETRY_AFTER, ApiError, DisconnectedError, quoted
from frame.entrypoints.http.failures import as_api_error, raise_failed, too_many
from frame.entrypoints.http.openai.batch_files import FileStore
from frame.entrypoints.http.openai.batch_jobs import BatchJobRunner
from frame.entrypoints.http.openai.response_store import ResponseStore
from frame.entrypoints.http.operations.metrics import package_version
from frame.entrypoints.http.protocol.bodies import MAX_MESSAGES, prompt_limit
from frame.entrypoints.http.request_context import EVENT_STREAM
from frame.entrypoints.http.request_options import RequestOptions
from frame.entrypoints.http.stream_writer import EventPump
from frame.entrypoints.keys import load_keys

if TYPE_CHECKING:
    from frame.core.config.resolved import Resolved
    from frame.core.interfaces.model import Task
    from frame.core.interfaces.parsing import ReasoningParser, ToolCallParser
    from frame.core.interfaces.sampling_params import SamplingParams
    from frame.core.text.tokenizer import Tokenizer
    from frame.entrypoints.engine_client.tokenizing import AsyncTokenizer
    from frame.entrypoints.http.operations.metrics import ServerMetrics
    from frame.entrypoints.http.request_context import RequestContext
    from frame.entrypoints.processes.resource_monitor import ResourceMonitor
    from frame.entrypoints.tracing import Tracing

log = logging.getLogger(__name__)
T = TypeVar("T")

NO_TOKENIZER = "this server was started with --skip-tokenizer-init and takes token ids only; send input_ids to /generate"
TIMEOUT_HEADER = "x-request-timeout"
PRIORITY_LIMIT = 2**31
MAX_NAME_CHARS = 256  # of a rid, and of a cache's salt
COUNTED_TOKENS = 256 * 1024  # of a text that is only counted, where the context is not larger
MAX_TOOLS = 512
MAX_TOOL_BYTES = 1024 * 1024  # of all tools and template arguments together, as JSON
TURN = 0.005  # seconds of work over many items before others get a turn
CUT = "shorten it, or have it cut with truncate_prompt_tokens: -1"


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to be made a prompt of."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


class Pair(NamedTuple):
    """Two texts that a model reads together."""

    first: str
    second: str


Prompt = str | list[int] | Chat | Pair


class Caller(Protocol):
    """A request's sender, whatever protocol it speaks."""

    answer: RequestState | None  # filled in by `begin`

    @property
    def tenant(self) -> str: ...

    @property
    def request_id(self) -> str: ...

    @property
    def lease(self) -> QuotaLease | None: ...  # of what its key may have at work

    def header(self, name: bytes) -> str | None: ...

    def on_disconnect(self, act: Callable[[], None]) -> None: ...


ROUTES_FOR = {
    "generate": "/v1/chat/completions or /v1/completions",
    "embed": "/v1/embeddings, /v1/rerank or /v1/score",
    "classify": "/v1/classify, /v1/rerank or /v1/score",
}


@dataclass(slots=True)
class Services:
    """One a server.

    `reasoning` and `tool_calls` make a parser for a response; None where none is configured.
    """

    resolved: Resolved
    client: EngineClient
    tokenizer: Tokenizer | None = None
    text_input: AsyncTokenizer | None = None
    reasoning: Callable[[], ReasoningParser] | None = None
    tool_calls: Callable[[], ToolCallParser] | None = None
    info: dict[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    metrics: ServerMetrics | None = None
    about: dict[str, Any] = field(default_factory=dict)  # plugins and settings, for the page
    draining: bool = False
    tracing: Tracing | None = None
    watch: ResourceMonitor | None = None  # over what processes hold
    score_prompt: str | None = None  # text.score_prompt, read
    moderation_policy: str | None = None  # text.moderation_policy, read
    quotas: TenantQuotas = field(init=False)  # what each key has at work
    responses: ResponseStore = field(init=False)  # of /v1/responses
    # Of requests whose clients do not wait
    tasks: set[asyncio.Task[None]] = field(init=False, default_factory=set)
    # None where there is no folder for them
    batches: BatchJobRunner | None = field(init=False, default=None)
    # Of the model and what runs it: OpenAI's system_fingerprint
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        server, batches = self.resolved.user.server, self.resolved.user.batches
        self.fingerprint = _fingerprint(self.resolved)
        has_neighbours = len(load_keys(server) or ()) > 1
        self.quotas = TenantQuotas(server.max_requests_per_key, max(1, self.client.limits.max_outstanding // 2) if has_neighbours else None)
        if self.tokenizer is not None:
            # Reading a large vocabulary takes a while, which no request should wait for
            _ = self.tokenizer.bounds
        store = (server.response_store_size, server.response_store_bytes, server.response_store_ttl, server.response_store_share)
        self.responses = ResponseStore(*store, prompt_limit(self.resolved.max_context))
        if batches.folder is not None:
            self.batches = BatchJobRunner(batches, FileStore(batches), self.quotas, lambda: self.draining)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work that no client waits for.

        What it needs of the engine, it holds already, so there is never more than of other work.
        """
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("work without a client failed", exc_info=error)

    @property
    def model_names(self) -> tuple[str, ...]:
        """What the model is called in the API; responses have the first."""
        return tuple(dict.fromkeys((self.resolved.served_name, *self.resolved.user.model.served_aliases)))

    def check_model(self, name: str) -> None:
        """Raise ApiError 404 for a model that is not served here."""
        if name and name not in (*self.model_names, self.resolved.user.model.path):
            raise ApiError(
                404, f"the model {quoted(name)} does not exist; this server has {self.resolved.served_name!r}", "model", "model_not_found"
            )

    def need_task(self, *tasks: Task) -> None:
        """Raise ApiError 400 unless the model that is served here is asked for one of these."""
        task = self.resolved.task
        if task not in tasks:
            name, wanted = self.resolved.served_name, " or ".join(tasks)
            raise ApiError(
                400, f"{name!r} is served to {task} (model.task), not to {wanted}; use {ROUTES_FOR[task]}", "model", "wrong_task"
            )

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ApiError(400, NO_TOKENIZER)
        return self.tokenizer

    def need_text_input(self) -> AsyncTokenizer:
        if self.text_input is None:
            raise ApiError(400, NO_TOKENIZER)
        return self.text_input

    async def begin(
        self,
        call: Caller,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        terms: RequestOptions,
        *,
        add_special_tokens: bool = True,
        tasks: Sequence[Task] = ("generate",),
        longest: int | None = None,
        prefix: str = "",
        refine: Callable[[list[int], SamplingParams], SamplingParams] | None = None,
    ) -> RequestState:
        """Start a request. Its places are taken before any work is spent on it, and the client's
        hang-up ends it. Raises ApiError.

        `terms.timeout`, or the header x-request-timeout, ends it early. `tasks` are those that the
        route is for; with other tasks than generating, each prompt yields its sequence's `vector`,
        and texts of more than `longest` tokens are cut. A request without a name gets one that
        begins with `prefix`. `refine` completes the parameters of a prompt once its tokens are
        known.
        """
        self.need_task(*tasks)
        deadline = self._deadline(call, terms.timeout)
        arrived = time.perf_counter()
        priority, salt, rid = terms.resolve_priority(), terms.cache_salt or "", terms.request_name()
        count = sum(own.n for own in params)
        self.check_count(count)
        self._check_params(params, priority, terms)
        _check_sizes(prompts, rid=rid, cache_salt=salt)
        if self.draining:
            raise ApiError(503, "the server is shutting down; send the request to another one", retry_after=RETRY_AFTER)
        try:
            if call.lease is not None:
                call.lease.reserve_sequences(count, counts="generate" in tasks)
            self.client.reserve_sequences(count)
        except QuotaExceededError as error:
            raise too_many(error) from None
        except QueueFullError as error:
            raise ApiError(503, str(error), code="queue_full", retry_after=RETRY_AFTER) from None
        except (EngineDeadError, InvalidRequestError) as error:
            raise as_api_error(error) from None
        if rid is None:  # with the HTTP request's own, so that the engine's lines name it too
            rid = f"{prefix}{call.request_id}-{uuid.uuid4().hex[:8]}" if call.request_id else f"{prefix}{uuid.uuid4().hex}"
        try:
            most = self.countable_tokens if terms.truncates else self.client.limits.max_context
            ids, second_text_starts = await self._encode_all(prompts, add_special_tokens, longest, most)
            room = self.client.limits.max_context
            ids = [terms.truncated(prompt, room - (own.max_tokens or 1)) for prompt, own in zip(ids, params, strict=True)]
            async for prompt, own in paced(zip(ids, params, strict=True)):
                self.client.check_prompt(prompt, own)
            params = await self._with_bad_words(params)
            if refine is not None:
                params = [refine(prompt, own) async for prompt, own in paced(zip(ids, params, strict=True))]
            async for own in paced(_unique(params)):
                self.client.check_params(own)
            space = self._namespace(call, salt)
            answer = self.client.prepare_request(ids, params, rid, call.tenant, second_text_starts)
            await self._start(answer, priority, space, deadline)
        except BaseException as error:  # noqa: BLE001 - cancellation too must give the places back
            self.client.release_sequences(count)
            raise as_sent(as_api_error(error), terms) from None
        answer.created = arrived
        call.answer = answer
        call.on_disconnect(answer.mark_disconnected)
        return answer

    async def _start(self, answer: RequestState, priority: int, namespace: str, deadline: float | None) -> None:
        """Start all sequences of a prepared answer, or none."""
        try:
            async for sequence in paced(answer.sequences):
                self.client.start_sequence(sequence, priority, namespace, deadline)
        except BaseException:
            self.client.cancel_request(answer)
            raise

    def check_count(self, count: int, param: str = "n") -> None:
        """Raise ApiError 400 for more sequences than one request may have; to be asked before
        anything is made for each of them.
        """
        most = self.resolved.user.server.max_sequences_per_request
        if count > most:
            sentence = f"the request asks for {count} sequences (prompts x n), and it may have {most} (server.max_sequences_per_request)"
            raise ApiError(400, f"{sentence}; send several requests", param)

    def _check_params(self, params: Sequence[SamplingParams], priority: int, terms: RequestOptions) -> None:
        vocabulary = self.resolved.model.vocab_size
        for own in _unique(params):
            problems = own.problems(vocabulary)
            if problems:
                raise as_sent(ApiError(400, problems[0].sentence, problems[0].param), terms)
        if not -PRIORITY_LIMIT <= priority < PRIORITY_LIMIT:
            raise ApiError(400, f"priority is {priority}; it must fit in 32 bits", "priority")

    def _namespace(self, call: Caller, salt: str) -> str:
        """Which prefix cache a request sees: its key's own, and in that its salt's; else timing
        would tell one tenant of another. The part before the colon is whose it is, also where turns
        are taken and pages are evicted.
        """
        owner = "" if self.resolved.user.server.share_cache else call.tenant
        return f"{owner}:{salt}" if owner or salt else ""

    def _deadline(self, call: Caller, time_limit: float | None) -> float | None:
        """Seconds that a request may take, when it says so itself; never more than the server
        allows.
        """
        name, given = "timeout", time_limit
        if given is None:
            text = call.header(TIMEOUT_HEADER.encode())
            if text is None:
                return None
            name = TIMEOUT_HEADER
            try:
                given = float(text)
            except ValueError:
                raise ApiError(400, f"{name} is {text[:40]!r}; it must be a number of seconds", name) from None
        if not given > 0:  # nan too
            raise ApiError(400, f"{name} is {given}; it must be a number of seconds above 0", name)
        return min(given, self.resolved.user.scheduler.request_timeout)

    async def _encode_all(
        self, prompts: Sequence[Prompt], add_special_tokens: bool, longest: int | None, most: int
    ) -> tuple[list[list[int]], list[int]]:
        """Token ids of each, and where the second texts of pairs begin."""
        inputs = [[prompt] if isinstance(prompt, str) else [*prompt] for prompt in prompts if isinstance(prompt, str | Pair)]
        if len(inputs) < len(prompts) or (len(inputs) == 1 and self.resolved.task == "generate"):
            given = paced(prompts)
            return [one if isinstance(one, list) else await self.encode(one, add_special_tokens, most) async for one in given], []
        special = add_special_tokens or self.resolved.task != "generate"
        bound = None if longest is not None else most  # what is cut has no bound
        encoded = await self._within(most, self.need_text_input().encode_inputs(inputs, longest, bound, special))
        return [ids for ids, _ in encoded], [second_text_start for _, second_text_start in encoded if self.resolved.task != "generate"]

    async def encode(self, prompt: str | Chat | Pair, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """The token ids of a text or a conversation.

        Raises ApiError for one of more than `most` tokens (the context's, where it is left out),
        before all of it is tokenized.
        """
        text_input, most = self.need_text_input(), self.client.limits.max_context if most is None else most
        if isinstance(prompt, Chat):
            _check_sizes([prompt])
            work = text_input.encode_chat(prompt.messages, prompt.tools, prompt.arguments, most)
        elif isinstance(prompt, str):
            work = text_input.encode(prompt, add_special_tokens, most)
        else:
            raise TypeError(f"{type(prompt).__name__} is no text to be encoded alone")
        return await self._within(most, work)

    @property
    def countable_tokens(self) -> int:
        """The most tokens of a text that is tokenized for its own sake."""
        return max(self.client.limits.max_context, COUNTED_TOKENS)

    async def _within(self, most: int, work: Awaitable[T]) -> T:
        try:
            return await work
        except TextTooLongError:
            sentence = "the text is longer; shorten it" if self.resolved.task == "generate" else f"the input is longer; {CUT}"
            raise as_api_error(ContextLengthError(most, sentence, "prompt")) from None
        except ChatTemplateError as error:
            raise as_api_error(error) from None

    async def _with_bad_words(self, params: Sequence[SamplingParams]) -> Sequence[SamplingParams]:
        """The parameters with their bad words as token ids."""
        if not any(own.stop or own.bad_words for own in params):
            return params
        tokenizer = self.need_tokenizer()  # stop strings are matched on text
        made = {id(own): await asyncio.to_thread(tokenizer.encode_bad_words, own) for own in _unique(params) if own.bad_words}
        return [made.get(id(own), own) for own in params]

    async def complete(self, answer: RequestState) -> list[SequenceState]:
        """Wait for a whole answer.

        Raises ApiError when a sequence failed, DisconnectedError when nobody waits any more.
        """
        await answer.wait_until_complete()
        if answer.is_disconnected:
            raise DisconnectedError
        raise_failed(answer.sequences)
        return answer.sequences

    async def stream(
        self,
        context: RequestContext,
        answer: RequestState,
        write: Callable[[SequenceState], bytes],
        close: Callable[[], bytes],
        media_type: bytes = EVENT_STREAM,
    ) -> None:
        """Send `write` of each sequence that has something new, as it comes, then `close`.

        A failure before the first token is an ordinary error response; a later one is an event of
        its sequence. A client that falls too far behind is told so and given up.
        """
        pump = EventPump(context, answer, write)
        self.set_backpressure_limit(answer, pump.give_up)
        changed = await answer.wait()
        if answer.is_disconnected:
            raise DisconnectedError
        raise_failed(changed)
        await context.start_events(media_type)
        await pump.run(changed)
        if answer.is_disconnected:
            raise DisconnectedError
        await context.end(close())

    def set_backpressure_limit(self, answer: RequestState, give_up: Callable[[ApiError], None]) -> None:
        """Let no more of a streamed answer wait for its reader than the server allows."""
        most = self.resolved.user.server.max_unread_tokens
        sentence = f"the answer was not read: more than {most} of its tokens wait (server.max_unread_tokens); read it as it comes"
        answer.set_backpressure_limit(most, lambda: give_up(ApiError(408, sentence, code="answer_not_read")))

    def health_problem(self) -> str | None:
        """Why this server cannot be helped; None while it lives, also while it restarts a process
        that died.
        """
        return self.client.dead_reason

    def ready_problem(self) -> str | None:
        """Why this server should get no requests now; None when it is well."""
        return "the server is shutting down" if self.draining else self.client.dead_reason or self.client.unavailable_reason


def _fingerprint(resolved: Resolved) -> str:
    """Names this build and all settings that outputs may depend on."""
    digest = hashlib.sha256(resolved.model_dump_json(exclude={"user": {"server", "batches", "log"}}).encode())
    return f"frame-{package_version()}-{digest.hexdigest()[:8]}"


PROSE = ("prompt", "input")  # names of parameters that sentences use as words


def as_sent(error: BaseException, terms: RequestOptions) -> BaseException:
    """The error with the name that the client gave to the field that it is about."""
    if not isinstance(error, ApiError) or error.param is None:
        return error
    ours = re.split(r"[.\[]", error.param, maxsplit=1)[0]
    name = terms.sent_name(ours)
    if name == ours:
        return error
    message = error.message if ours in PROSE else re.sub(rf"\b{re.escape(ours)}\b", name, error.message)
    return ApiError(error.status, message, name + error.param[len(ours) :], error.code, error.retry_after)


async def paced(items: Iterable[T]) -> AsyncIterator[T]:
    """The items, with a turn for the event loop's other work every few milliseconds."""
    until = time.perf_counter() + TURN
    for item in items:
        yield item
        if time.perf_counter() >= until:
            await asyncio.sleep(0)
            until = time.perf_counter() + TURN


def _unique(params: Sequence[SamplingParams]) -> Iterable[SamplingParams]:
    """Each once; many prompts may share one."""
    return {id(own): own for own in params}.values()


def _check_sizes(prompts: Sequence[Prompt], **names: str | None) -> None:
    """Raise ApiError for names that are too long, and for conversations of too many parts."""
    for field_name, value in names.items():
        if value and len(value) > MAX_NAME_CHARS:
            raise ApiError(400, f"{field_name} has {len(value)} characters; it may have {MAX_NAME_CHARS}", field_name)
    for prompt in prompts:
        if isinstance(prompt, Chat):
            for part, found, most in (("messages", prompt.messages, MAX_MESSAGES), ("tools", prompt.tools or (), MAX_TOOLS)):
                if len(found) > most:
                    raise ApiError(400, f"{part} has {len(found)} entries; it may have {most}", part)
            if len(msgspec.json.encode((prompt.tools, prompt.arguments))) > MAX_TOOL_BYTES:
                raise ApiError(400, f"tools and chat_template_kwargs have more than {MAX_TOOL_BYTES} bytes; shorten them", "tools")
