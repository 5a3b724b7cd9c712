"""Starts chat requests: renders the prompt, starts the sequences, makes their output parsers.

Used by the chat routes of all APIs, which translate their requests into `ChatRequest`. Must not
depend on the response shape of an API.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.http.chat.constraints import ToolUse
from frame.entrypoints.http.chat.output_parser import OutputParser, ParserPair, count_reasoning_tokens, decode_prompt_end
from frame.entrypoints.http.chat.request_media import Chat, list_media
from frame.entrypoints.http.chat.thinking_fields import ThinkingBudget
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.failures import as_sent
from frame.entrypoints.http.openai.completions_schema import ChatRequest, to_template_messages
from frame.entrypoints.http.protocol.hidden_states import Refine, bound_states
from frame.entrypoints.http.request_starter import (
    Caller,
    RequestPlan,
    check_request,
    countable_tokens,
    encode_prompt,
    start_request,
)
from frame.entrypoints.http.services import Services
from frame.interfaces.parsing import ReasoningParser
from frame.text.chat_template import RESERVED, TEMPLATE
from frame.text.tokenizer import Tokenizer


async def start_chat(context: Caller, services: Services, request: ChatRequest, prefix: str = "") -> RequestState:
    """Start a chat request. `prefix`: of the id where there is none. Raises ApiError."""
    return await start_chats(context, services, request, [request.messages], prefix)


async def start_chats(
    context: Caller, services: Services, request: ChatRequest, conversations: Sequence[list[dict[str, Any]]], prefix: str = ""
) -> RequestState:
    """Like `start_chat`, for several conversations that differ only in their messages."""
    services.check_model(request.model, context.tenant)
    try:
        params = request.to_sampling_params(services.resolved.default_params)
        use, first = request.resolve_tools(), make_chat(services, request)
        chats = [first, *(Chat(to_template_messages(messages), first.tools, first.arguments) for messages in conversations[1:])]
    except ApiError as error:
        raise as_sent(error, request.sent_name) from None
    refine: Refine = partial(_refine, services, request, use)
    if request.return_hidden_states:
        refine = bound_states(services, chats, refine)
    plan = RequestPlan(
        chats,
        [params] * len(chats),
        request,
        prefix=prefix,
        refine=refine,
        transfer=request.kv_transfer_params,
    )
    return await start_request(context, services, plan)


async def render_chat(context: Caller, services: Services, request: ChatRequest) -> tuple[list[int], SamplingParams]:
    """(prompt token ids, sampling parameters) without running it. Raises ApiError."""
    params = request.to_sampling_params(services.resolved.default_params)
    ids = await encode_chat(context, services, request)
    return ids, _refine(services, request, request.resolve_tools(), ids, params)


async def encode_chat(context: Caller, services: Services, request: ChatRequest) -> list[int]:
    """The token ids of a chat request's prompt. Raises ApiError."""
    services.check_model(request.model, context.tenant)
    try:
        chat = make_chat(services, request)
        return await encode_prompt(services, chat, maximum=countable_tokens(services), owner=context.tenant)
    except ApiError as error:
        raise as_sent(error, request.sent_name) from None


async def count_chat(context: Caller, services: Services, request: ChatRequest) -> int:
    """The number of tokens of a chat request's prompt. Raises ApiError, also for what the request
    could not run with."""
    try:
        params = request.to_sampling_params(services.resolved.default_params)
    except ApiError as error:
        raise as_sent(error, request.sent_name) from None
    check_request(services, context, [params], request)
    return len(await encode_chat(context, services, request))


async def drop_oldest_turns(services: Services, request: ChatRequest) -> ChatRequest:
    """The request without its oldest turns, so that the prompt and `max_tokens` fit the context.

    Drops as few turns as possible (binary search). Leading system messages and the last user
    message stay. A conversation with media stays whole: it is refused where it is too long. Raises
    ApiError.
    """
    messages = request.messages
    try:
        if list_media(make_chat(services, request)):
            return request
    except ApiError as error:
        raise as_sent(error, request.sent_name) from None
    roles = [message.get("role") for message in messages]
    lead = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
    starts = [lead, *(i for i in range(lead + 1, len(roles)) if roles[i] == "user")]

    def without(count: int) -> ChatRequest:
        return request.model_copy(update={"messages": messages[:lead] + messages[starts[count] :]})

    limits = services.client.limits
    room = min(limits.max_context, limits.capacity + 1) - (request.max_completion_tokens or request.max_tokens or 1)
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if await _prompt_fits(services, without(middle), room):
            high = middle
        else:
            low = middle + 1
    return without(low)


async def _prompt_fits(services: Services, request: ChatRequest, room: int) -> bool:
    try:
        return len(await encode_prompt(services, make_chat(services, request), maximum=max(room, 0))) <= room
    except ApiError as error:
        if error.code != "context_length_exceeded":
            raise as_sent(error, request.sent_name) from None
        return False


def make_chat(services: Services, request: ChatRequest) -> Chat:
    """The input of the chat template. Raises ApiError 400."""
    services.need_text_model()
    arguments, use = request.template_arguments(), request.resolve_tools()
    if use is not None and use.is_enforced:
        request.check_schemas()
    if taken := ", ".join(sorted(RESERVED & arguments.keys())):
        raise ApiError(400, f"chat_template_kwargs cannot set {taken}; use the field {taken}", "chat_template_kwargs")
    if request.chat_template is not None:
        if not services.resolved.user.text.trust_request_chat_template:
            sentence = "chat_template is code, which this server does not accept (text.trust_request_chat_template is false)"
            raise ApiError(400, f"{sentence}; leave it out", "chat_template")
        arguments[TEMPLATE] = request.chat_template
    return Chat(request.conversation(), None if use is None else use.tools, arguments)


def make_output_parsers(services: Services, request: ChatRequest, state: RequestState) -> dict[int, OutputParser]:
    """An output parser for each sequence index; empty where no parser applies."""
    use, parsers = request.resolve_tools(), {}
    for sequence in state.sequences:
        pair = _parsers(services, request, sequence.prompt, use)
        if pair.reasoning is not None or pair.tools is not None:
            max_calls = 1 if pair.use is not None and not pair.use.rule.is_parallel else None
            parsers[sequence.index] = OutputParser(pair.reasoning, pair.tools, max_calls, request.shows_reasoning)
    return parsers


def count_reasoning(services: Services, request: ChatRequest, sequence: SequenceState, parser: OutputParser | None) -> int:
    """The number of reasoning tokens of a sequence whose output `parser` has read."""
    if parser is None or not parser.has_reasoning:
        return 0

    def make() -> ReasoningParser:
        reasoning = _parsers(services, request, sequence.prompt, request.resolve_tools()).reasoning
        assert reasoning is not None  # the parser has found reasoning
        return reasoning

    decode = partial(services.need_tokenizer().decode, skip_special_tokens=sequence.params.skip_special_tokens)
    return count_reasoning_tokens(sequence.recovery.output_ids, decode, make)


def _refine(services: Services, request: ChatRequest, use: ToolUse | None, prompt: list[int], params: SamplingParams) -> SamplingParams:
    """The parameters with what reasoning, tools and the thinking budget add. Raises ApiError."""
    pair = _parsers(services, request, prompt, use)
    params = pair.constrain_params(params, is_whole=request.constrains_whole_output)
    return params if (budget := request.find_budget()) is None else _with_budget(services, request, prompt, params, budget)


def _with_budget(
    services: Services, request: ChatRequest, prompt: list[int], params: SamplingParams, budget: ThinkingBudget
) -> SamplingParams:
    """The parameters with a limit of reasoning tokens. Raises ApiError 400 where it cannot be
    kept."""
    tokenizer, marks, problem = services.need_tokenizer(), None, "needs a reasoning parser; start the server with --reasoning-parser NAME"
    if services.reasoning is not None:
        parser = services.reasoning()
        parser.begin(decode_prompt_end(prompt, tokenizer), request.may_think)
        marks, problem = parser.find_marks(), "is not supported by this server's reasoning parser; use reasoning_effort"
    if marks is not None:
        if not marks.end:
            return params  # there is no reasoning
        begin, end = _encode_mark(tokenizer, marks.begin), _encode_mark(tokenizer, marks.end)
        if len(end) == 1:
            return msgspec.structs.replace(
                params, thinking_token_budget=budget.num_tokens, thinking_start_ids=tuple(begin), thinking_end_id=end[0]
            )
        problem = f"is not supported by this model: {marks.end} is not a single token; use reasoning_effort"
    if budget.is_required:
        raise ApiError(400, f"{budget.place} {problem}", budget.place)
    return params


def _encode_mark(tokenizer: Tokenizer, text: str) -> list[int]:
    token = tokenizer.find_token_id(text)  # `encode` may put a space before it
    return tokenizer.encode(text, add_special_tokens=False) if token is None else [token]


def _parsers(services: Services, request: ChatRequest, prompt: list[int], use: ToolUse | None) -> ParserPair:
    """New parsers for one sequence of the request with this prompt and these tools."""
    tools = services.tool_calls() if use is not None and services.tool_calls is not None else None
    reasoning = services.reasoning() if request.separates_reasoning and services.reasoning is not None else None
    end = decode_prompt_end(prompt, services.tokenizer if reasoning is not None else None)
    return ParserPair(reasoning, tools, use, end, may_think=request.may_think)
