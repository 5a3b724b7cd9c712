"""Starts requests of all protocols: admits, tokenizes, checks, submits, and streams the response.

Used by the HTTP routes and the gRPC service. Must not depend on a dialect: the shapes of requests
and responses are the routes'.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import msgspec

from frame.core.interfaces.media import MediaItem
from frame.core.interfaces.model import Task
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.engine_client.limits import (
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    check_params,
    check_prompt,
)
from frame.entrypoints.engine_client.quotas import QuotaExceededError, QuotaLease
from frame.entrypoints.engine_client.request_recovery import MIN_DEADLINE
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.http.adapters import choose_adapters, hold_adapters
from frame.entrypoints.http.chat.request_media import Chat, HeldMedia, TextWithMedia, hold_media, list_media
from frame.entrypoints.http.errors import RETRY_AFTER, ApiError, DisconnectedError
from frame.entrypoints.http.failures import as_api_error, as_sent, raise_failed, too_many
from frame.entrypoints.http.paced_json import TURN, Event
from frame.entrypoints.http.protocol.bodies import MAX_MESSAGES
from frame.entrypoints.http.protocol.sessions import choose_pin
from frame.entrypoints.http.request_body import RequestOptions, TransferParams
from frame.entrypoints.http.request_context import EVENT_STREAM, RequestContext
from frame.entrypoints.http.services import Services
from frame.entrypoints.http.stream_writer import EventPump
from frame.text.chat_template import ChatTemplateError
from frame.text.text_bounds import TextTooLongError

if TYPE_CHECKING:
    from frame.entrypoints.handoff import Handoff

T = TypeVar("T")
R = TypeVar("R")

TIMEOUT_HEADER = "x-request-timeout"
PRIORITY_LIMIT = 2**31
MAX_NAME_CHARS = 256  # of a rid, and of a cache's salt
COUNTED_TOKENS = 256 * 1024  # of a text that is only counted, where the context is not larger
MAX_TOOLS = 512
MAX_TOOL_BYTES = 1024 * 1024  # of all tools and template arguments together, as JSON
MAX_LOGPROBS_HELD = 2 * 1024 * 1024  # of a response that is sent whole; each takes about 350 bytes at the end
CUT = "shorten it, or have it cut with truncate_prompt_tokens: -1"


class Pair(NamedTuple):
    """Two texts of one input, for models that compare them."""

    first: str
    second: str


Prompt = str | list[int] | Chat | TextWithMedia | Pair


class Caller(Protocol):
    """The sender of a request, over any protocol."""

    state: RequestState | None  # set by `start_request`

    @property
    def tenant(self) -> str: ...

    @property
    def request_id(self) -> str: ...

    @property
    def lease(self) -> QuotaLease | None: ...  # of its key's quota

    @property
    def handoff(self) -> Handoff | None: ...  # of the stream of another server that it continues

    def header(self, name: bytes) -> str | None: ...

    def on_disconnect(self, act: Callable[[], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """What a route asks of the engine: prompts, their parameters, and how to start them."""

    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]  # one a prompt
    options: RequestOptions
    _: KW_ONLY
    add_special_tokens: bool = True
    tasks: Sequence[Task] = ("generate",)  # that the route serves; with others than generate, each prompt yields a vector
    max_length: int | None = None  # tokens to which prompts are cut where the task is not generate
    prefix: str = ""  # of the name of a request without one
    # completes the parameters of a prompt once its tokens are known
    refine: Callable[[list[int], SamplingParams], SamplingParams] | None = None
    encoder_items: Sequence[MediaItem] = ()  # one a prompt, for encoder-decoder models
    transfer: TransferParams | None = None  # of the prompt's blocks, to or from another server


async def start_request(call: Caller, services: Services, plan: RequestPlan) -> RequestState:
    """Start a request. It reserves its sequences before any other work, and ends when its client
    disconnects. `plan.options.timeout`, or the header x-request-timeout, is its time limit. Raises
    ApiError."""
    params, options = plan.params, plan.options
    services.need_task(*plan.tasks, takes_audio=bool(plan.encoder_items))
    arrived = time.perf_counter()
    count = sum(each.n for each in params)
    check_sequence_count(services, count)
    deadline, priority = check_request(services, call, params, options)
    salt, rid = options.cache_salt or "", options.request_name()
    adapters = choose_adapters(services, call.tenant, options, len(plan.prompts))
    _check_sizes(plan.prompts)
    if call.handoff is not None:
        rid = call.handoff.start.rid
    if rid is None:  # with the HTTP request's own, so that the engine's lines name it too
        rid = f"{plan.prefix}{call.request_id}-{secrets.token_hex(4)}" if call.request_id else f"{plan.prefix}{secrets.token_hex(16)}"
    pin = choose_pin(services, call, options, rid)
    if services.draining:
        raise ApiError(503, "the server is shutting down; send the request to another one", retry_after=RETRY_AFTER)
    services.check_awake()
    try:
        if call.lease is not None:
            call.lease.reserve_sequences(count, counts="generate" in plan.tasks)
        services.client.reserve_sequences(count)
    except QuotaExceededError as error:
        raise too_many(error) from None
    except QueueFullError as error:
        raise ApiError(503, str(error), code="queue_full", retry_after=RETRY_AFTER) from None
    except (EngineDeadError, InvalidRequestError) as error:
        raise as_api_error(error) from None
    state: RequestState | None = None
    try:
        async with hold_media(services, plan.prompts, call.tenant) as media:
            state = await _prepare_state(services, call, plan, rid, media)
            state.namespace = space = _namespace(services, call, salt)
            seconds = services.client.limits.request_timeout if deadline is None else deadline
            async with hold_adapters(services, call.tenant, adapters, seconds) as uses:
                for sequence in state.sequences if uses else ():
                    sequence.recovery.adapter = uses.get(adapters[sequence.prompt_index])
                if call.handoff is None:
                    _prepare_transfer(services, plan.transfer, state, space)
                else:
                    deadline = await _restore(services, state, call.handoff, seconds)
                for sequence in state.sequences if pin is not None else ():
                    sequence.recovery.pin = pin
                    sequence.num_kept = len(sequence.prompt) // services.resolved.page_size * services.resolved.page_size
                await _start(services, state, priority, space, deadline)
    except BaseException as error:  # noqa: BLE001 - cancellation too must release the sequences
        services.client.release_sequences(count)
        if state is not None:
            state.leave()
        if call.handoff is not None and isinstance(error, InvalidRequestError) and error.param == "rid":  # its client has just left
            raise ApiError(503, f"{error}; try again later", retry_after=RETRY_AFTER) from None
        raise as_sent(as_api_error(error), options.sent_name) from None
    state.created = arrived
    state.sent_name = options.sent_name
    call.state = state
    call.on_disconnect(state.mark_disconnected)
    return state


async def _prepare_state(services: Services, call: Caller, plan: RequestPlan, rid: str, media: HeldMedia) -> RequestState:
    """The state of a request whose prompts are encoded and checked, with its media. Raises ApiError
    and InvalidRequestError."""
    options, params, limits = plan.options, plan.params, services.client.limits
    is_cut = options.truncates or plan.max_length is not None
    maximum = countable_tokens(services) if is_cut else limits.max_context
    ids, second_text_starts = await _encode_all(services, plan, maximum, media)
    if plan.max_length is not None:  # texts and pairs are cut before their closing tokens, by the tokenizer
        ids = [each[: plan.max_length] for each in ids]
    ids = [_truncate(*each, limits.max_context, options) for each in zip(plan.prompts, ids, params, strict=True)]
    await paced_map(lambda pair: check_prompt(limits, *pair), zip(ids, params, strict=True))
    checked = {id(each): each for each in params}
    params = await _with_bad_words(services, params)
    if (refine := plan.refine) is not None:
        params = await paced_map(lambda pair: refine(*pair), zip(ids, params, strict=True))
    await paced_map(partial(check_params, limits), (each for each in _unique(params) if id(each) not in checked))
    state = services.client.prepare_request(ids, params, rid, call.tenant, second_text_starts)
    for sequence in state.sequences if plan.encoder_items else ():
        sequence.recovery.media = [plan.encoder_items[sequence.prompt_index]]
    media.hand_over(state)
    return state


def _prepare_transfer(services: Services, params: TransferParams | None, state: RequestState, namespace: str) -> None:
    """Let the engine keep or expect the blocks of a prompt. Raises InvalidRequestError."""
    if params is not None and (params.do_remote_decode or params.do_remote_prefill):
        from frame.entrypoints.engine_client.transfer_handles import prepare_transfer

        mode, version = services.resolved.user.disaggregation.mode, services.client.commands.weight_version
        minimum = max(services.resolved.page_size, services.resolved.user.cache.min_load_tokens)
        page_size = services.resolved.page_size
        prepare_transfer(mode, params.model_dump(), state, namespace, version=version, page_size=page_size, min_tokens=minimum)


def _truncate(prompt: Prompt, ids: list[int], params: SamplingParams, max_context: int, options: RequestOptions) -> list[int]:
    """The prompt's tokens, cut as asked. Raises ApiError 400 where that would cut media."""
    cut = options.truncated(ids, max_context - (params.max_tokens or 1))
    if len(cut) < len(ids) and list_media(prompt):
        sentence = f"the prompt has {len(ids)} tokens, and one with images, video or audio is never cut; shorten it, or send fewer of them"
        raise ApiError(400, sentence, "truncate_prompt_tokens")
    return cut


async def _restore(services: Services, state: RequestState, handoff: Handoff, seconds: float) -> float:
    """Let a prepared request continue a stream of another server. -> the rest of its time limit.
    Raises ApiError."""
    from frame.entrypoints.http.protocol.continuation import restore_state

    await restore_state(state, handoff, lambda: services.client.commands.weight_version, services.resolved.model.vocab_size)
    return max(MIN_DEADLINE, seconds - handoff.age)


async def _start(services: Services, state: RequestState, priority: int, namespace: str, deadline: float | None) -> None:
    """Start all sequences of a prepared request, or none. Those that ended before a handoff are
    not started."""
    unfinished = [sequence for sequence in state.sequences if sequence.finish is None]
    try:
        await paced_map(lambda sequence: services.client.start_sequence(sequence, priority, namespace, deadline), unfinished)
    except BaseException:
        services.client.abort_start(state)
        raise
    for _ in range(len(state.sequences) - len(unfinished)):
        services.client.release_sequences(1)
        state.count_left()


def check_sequence_count(services: Services, count: int, param: str = "n") -> None:
    """Raise ApiError 400 for more sequences than one request may have."""
    maximum = services.resolved.user.server.max_sequences_per_request
    if count > maximum:
        sentence = f"the request asks for {count} sequences (prompts x n), and it may have {maximum} (server.max_sequences_per_request)"
        raise ApiError(400, f"{sentence}; send several requests", param)


def check_request(services: Services, call: Caller, params: Sequence[SamplingParams], options: RequestOptions) -> tuple[float | None, int]:
    """(time limit in seconds, priority) of a request. Raises ApiError 400 for what cannot be served
    with any prompt."""
    deadline, rid = _deadline(services, call, options.timeout), options.request_name()
    priority = check_all_params(services, params, options)
    _check_sizes((), **{"request_id" if options.rid is None else "rid": rid, "cache_salt": options.cache_salt})
    return deadline, priority


def check_all_params(services: Services, params: Sequence[SamplingParams], options: RequestOptions) -> int:
    """The priority of a request with these parameters. Raises ApiError 400 for a parameter or a
    priority that cannot be served with any prompt."""
    priority = options.resolve_priority()
    try:
        for each in _unique(params):
            check_params(services.client.limits, each)
    except InvalidRequestError as error:
        raise as_sent(as_api_error(error), options.sent_name) from None
    if not -PRIORITY_LIMIT <= priority < PRIORITY_LIMIT:
        raise ApiError(400, f"priority is {priority}; it must fit in 32 bits", "priority")
    return priority


def _namespace(services: Services, call: Caller, salt: str) -> str:
    """The namespace of the prefix cache that a request reads: that of its key and, within it, of
    its salt, because latencies would reveal the prompts of another tenant. Scheduling and eviction
    divide by the part before the colon.
    """
    owner = "" if services.resolved.user.server.share_cache else call.tenant
    return f"{owner}:{salt}" if owner or salt else ""


def _deadline(services: Services, call: Caller, time_limit: float | None) -> float | None:
    """The time limit of a request in seconds, at most the server's. Raises ApiError 400."""
    seconds = read_timeout_header(call) if time_limit is None else _check_time_limit("timeout", time_limit)
    return None if seconds is None else min(seconds, services.resolved.user.scheduler.request_timeout)


def read_timeout_header(call: Caller) -> float | None:
    """The seconds in the header x-request-timeout; None without one. Raises ApiError 400."""
    text = call.header(TIMEOUT_HEADER.encode())
    if text is None:
        return None
    try:
        seconds = float(text if "_" not in text else "")  # Python takes 1_0
    except ValueError:
        raise ApiError(400, f"{TIMEOUT_HEADER} is {text[:40]!r}; it must be a number of seconds", TIMEOUT_HEADER) from None
    return _check_time_limit(TIMEOUT_HEADER, seconds)


def _check_time_limit(name: str, seconds: float) -> float:
    if not 0 < seconds < math.inf:  # nan too
        raise ApiError(400, f"{name} is {seconds}; it must be a finite number of seconds above 0", name)
    return seconds


async def _encode_all(services: Services, plan: RequestPlan, maximum: int, media: HeldMedia) -> tuple[list[list[int]], list[int]]:
    """Token ids of each prompt, and the index of each pair's second text."""
    prompts, add_special_tokens = plan.prompts, plan.add_special_tokens
    inputs = [[prompt] if isinstance(prompt, str) else [*prompt] for prompt in prompts if isinstance(prompt, str | Pair)]
    if len(inputs) < len(prompts) or (len(inputs) == 1 and services.resolved.task == "generate"):
        works = (_encode_one(services, prompt, add_special_tokens, maximum, media, i) for i, prompt in enumerate(prompts))
        return await paced_await(works), []
    bound = None if plan.max_length is not None else maximum  # a text that is truncated may have any length
    encoded = await _within(services, maximum, services.need_text_input().encode_inputs(inputs, plan.max_length, bound, add_special_tokens))
    return [ids for ids, _ in encoded], [second_text_start for _, second_text_start in encoded if services.resolved.task != "generate"]


async def encode_prompt(
    services: Services, prompt: str | Chat | TextWithMedia, add_special_tokens: bool = True, maximum: int | None = None, owner: str = ""
) -> list[int]:
    """The token ids of a text or a conversation. owner: the tenant. Raises ApiError for more than
    `maximum` tokens (None: those of the context), before all of it is tokenized."""
    maximum = services.client.limits.max_context if maximum is None else maximum
    services.need_text_input()
    _check_sizes([prompt])
    async with hold_media(services, [prompt], owner) as media:
        return await _encode_one(services, prompt, add_special_tokens, maximum, media, 0)


async def _encode_one(
    services: Services, prompt: Prompt, add_special_tokens: bool, maximum: int, media: HeldMedia, index: int
) -> list[int]:
    """The token ids of prompt number `index` of the request with these media."""
    if isinstance(prompt, list):
        return prompt
    text_input = services.need_text_input()
    if isinstance(prompt, TextWithMedia) or (isinstance(prompt, Chat) and list_media(prompt)):
        return await _within(services, maximum, media.encode(index, prompt, add_special_tokens, maximum))
    if isinstance(prompt, Chat):
        work = text_input.encode_chat(prompt.messages, prompt.tools, prompt.arguments, maximum)
    elif isinstance(prompt, str):
        work = text_input.encode(prompt, add_special_tokens, maximum)
    else:
        raise TypeError(f"{type(prompt).__name__} is no text to be encoded alone")
    return await _within(services, maximum, work)


def countable_tokens(services: Services) -> int:
    """The most tokens of a text that is only tokenized."""
    return max(services.client.limits.max_context, COUNTED_TOKENS)


async def _within(services: Services, maximum: int, work: Awaitable[T]) -> T:
    try:
        return await work
    except TextTooLongError:
        sentence = "the text is longer; shorten it" if services.resolved.task == "generate" else f"the input is longer; {CUT}"
        raise as_api_error(ContextLengthError(maximum, sentence, "prompt")) from None
    except ChatTemplateError as error:
        raise as_api_error(error) from None


async def _with_bad_words(services: Services, params: Sequence[SamplingParams]) -> Sequence[SamplingParams]:
    """The parameters with their bad words as token ids. Raises ApiError 400 without a tokenizer."""
    if not any(each.stop or each.stop_regex or each.bad_words for each in params):
        return params
    tokenizer = services.need_tokenizer()  # stop strings and patterns are matched on text
    encoded = {id(each): await asyncio.to_thread(tokenizer.encode_bad_words, each) for each in _unique(params) if each.bad_words}
    return [encoded.get(id(each), each) for each in params]


async def wait_complete(state: RequestState, read: Callable[[SequenceState], None] | None = None) -> list[SequenceState]:
    """Wait for all sequences of a request; `read` may take new output before. Raises ApiError for a
    failure, DisconnectedError."""
    await state.wait_until_complete(MAX_LOGPROBS_HELD, read)
    if state.is_disconnected:
        raise DisconnectedError
    if state.num_unfinished:
        sentence = f"the response has more than {MAX_LOGPROBS_HELD} log-probabilities; ask for fewer of them, fewer tokens or a smaller n"
        raise ApiError(400, f"{sentence}, or stream it", "logprobs")
    raise_failed(state.sequences)
    return state.sequences


async def stream_response(
    context: RequestContext,
    services: Services,
    state: RequestState,
    write: Callable[[SequenceState], Event],
    close: Callable[[], bytes],
    media_type: bytes = EVENT_STREAM,
) -> None:
    """Send `write` of each sequence with new output as it arrives, then `close`.

    A failure before the first token is an ordinary error response; a later one is an event of
    its sequence. A client that reads too slowly gets an error event, and its request ends.
    """
    if context.handoff is not None and services.fleet is not None:
        from frame.entrypoints.http.protocol.continuation import replay_output

        await replay_output(context.handoff, state, services.fleet.detokenizer, write)
    pump = EventPump(context, state, write, services.formatting)
    limit_unread_tokens(services, state, pump.abort)
    changed = await state.wait()
    if state.is_disconnected:
        raise DisconnectedError
    raise_failed(changed)
    await context.start_events(media_type)
    await pump.run(changed)
    if state.is_disconnected:
        raise DisconnectedError
    await context.end(close())


def limit_unread_tokens(services: Services, state: RequestState, abort: Callable[[ApiError], None]) -> None:
    """Call `abort` when more tokens of a stream wait for its reader than the server allows."""
    maximum = services.resolved.user.server.max_unread_tokens
    sentence = f"the answer was not read: more than {maximum} of its tokens wait (server.max_unread_tokens); read it as it comes"
    state.set_backpressure_limit(maximum, lambda: abort(ApiError(408, sentence, code="answer_not_read")))


async def paced_map(act: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """`act` of each item; other work of the event loop runs every `TURN` seconds."""
    results, until = [], time.perf_counter() + TURN
    for item in items:
        results.append(act(item))
        if time.perf_counter() >= until:
            await asyncio.sleep(0)
            until = time.perf_counter() + TURN
    return results


async def paced_await(works: Iterable[Awaitable[R]]) -> list[R]:
    """The results of works one after another, as `paced_map`: a short text is encoded at once, so
    that waiting for it lets nothing else run."""
    results, until = [], time.perf_counter() + TURN
    for work in works:
        results.append(await work)
        if time.perf_counter() >= until:
            await asyncio.sleep(0)
            until = time.perf_counter() + TURN
    return results


def _unique(params: Sequence[SamplingParams]) -> Iterable[SamplingParams]:
    """Each object once; prompts may share one."""
    return {id(each): each for each in params}.values()


def _check_sizes(prompts: Sequence[Prompt], **names: str | None) -> None:
    """Raise ApiError for names that are too long, and for conversations of too many parts."""
    for field_name, value in names.items():
        if value and len(value) > MAX_NAME_CHARS:
            raise ApiError(400, f"{field_name} has {len(value)} characters; it may have {MAX_NAME_CHARS}", field_name)
    for prompt in prompts:
        if isinstance(prompt, Chat):
            for field_of_chat, entries, maximum in (("messages", prompt.messages, MAX_MESSAGES), ("tools", prompt.tools or (), MAX_TOOLS)):
                if len(entries) > maximum:
                    raise ApiError(400, f"{field_of_chat} has {len(entries)} entries; it may have {maximum}", field_of_chat)
            if len(msgspec.json.encode((prompt.tools, prompt.arguments))) > MAX_TOOL_BYTES:
                raise ApiError(400, f"tools and chat_template_kwargs have more than {MAX_TOOL_BYTES} bytes; shorten them", "tools")
