"""The routes `/v1/chat/completions`, `/v1/completions` and `/v1/models` of the OpenAI API.

`ChatResponse` and `CompletionResponse` write the responses; the routes of vLLM use them too. Must
not depend on the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import UTC, datetime
from functools import cached_property
from importlib import import_module
from typing import Any

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import TokenLogprobs
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.http.chat.chat_request import count_reasoning, make_output_parsers, start_chat
from frame.entrypoints.http.chat.output_parser import OutputParser
from frame.entrypoints.http.chat.request_media import count_media_tokens
from frame.entrypoints.http.failures import error_event
from frame.entrypoints.http.openai.completion_objects import (
    DONE,
    ChatCompletion,
    ChatCompletionChunk,
    ChunkWriter,
    Completion,
    CompletionChunk,
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    end_fields,
    finish_reason,
    list_tiers,
    prompt_logprobs,
    token_namer,
    usage_of,
)
from frame.entrypoints.http.openai.completions_schema import ChatRequest, CompletionRequest, GenerationRequest, fill_in_middle
from frame.entrypoints.http.paced_json import INLINE_VALUES, Entries, Event, PacedBody, join_events
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.protocol.hidden_states import bound_states, compute_states, last_state
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.request_starter import (
    RequestPlan,
    check_sequence_count,
    paced_map,
    start_request,
    stream_response,
    wait_complete,
)
from frame.entrypoints.http.response_types import array, declare
from frame.entrypoints.http.services import Services
from frame.host.installation import has_module
from frame.interfaces.http import HttpExtension

router = ApiRouter(access=Access.USER)
models_router = ApiRouter(access=Access.USER)  # clients of Anthropic use it too


class Response(ABC):
    """A chat or text completion. Its id is the request id, which `/abort_request` takes."""

    def __init__(self, services: Services, request: GenerationRequest, state: RequestState, kind: str) -> None:
        self.services = services
        self.request = request
        self.state = state
        self._states: dict[int, list[float]] = {}  # by index of the sequence
        state.fingerprint = state.fingerprint or services.fingerprint
        options = request.stream_options
        self.has_usage = bool(request.stream and options and options.include_usage)
        self.has_running_usage = bool(self.has_usage and options and options.continuous_usage_stats)
        self._head = {
            "id": state.rid,
            "object": "chat.completion.chunk" if request.stream and kind == "chat.completion" else kind,
            "created": int(state.created_at),
            "model": services.response_model(request.model),
            "system_fingerprint": state.fingerprint,
            "service_tier": "default",
        }

    @cached_property
    def chunks(self) -> ChunkWriter:
        """The writer of the events of a stream."""
        return ChunkWriter(self._head, self.has_usage)

    def num_generated(self) -> int:
        return sum(sequence.num_tokens for sequence in self.state.sequences)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object. Each prompt counts once, even with `n` sequences."""
        firsts = self.state.first_sequences
        usage = usage_of(sum(len(s.prompt) for s in firsts), self.num_generated(), sum(s.cached for s in firsts))
        details = usage["prompt_tokens_details"]
        details |= count_media_tokens(self.state) | list_tiers(firsts)
        if any(sequence.num_kept for sequence in firsts):
            details["cache_write_tokens"] = sum(sequence.num_written for sequence in firsts)
        return usage

    def final_usage(self) -> dict[str, Any]:
        """The usage after every sequence has finished, with counts that are made only once."""
        drafted = self.drafted_tokens()
        return {**self.usage(), "completion_tokens_details": drafted} if drafted else self.usage()

    def drafted_tokens(self) -> dict[str, int]:
        """Drafted tokens of all sequences that were accepted and rejected; empty without drafts."""
        accepted = sum(sequence.recovery.num_accepted for sequence in self.state.sequences)
        rejected = sum(sequence.recovery.num_rejected for sequence in self.state.sequences)
        return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected} if accepted or rejected else {}

    def running_usage(self) -> dict[str, Any] | None:
        return self.usage() if self.has_running_usage else None

    def closing_events(self) -> bytes:
        return (self.chunks.usage(self.final_usage()) if self.has_usage else b"") + DONE

    def token_fields(self, ids: list[int]) -> dict[str, Any]:
        """The field `token_ids` of a choice, if requested: the tokens of a chunk, or all."""
        return {"token_ids": ids} if self.request.return_token_ids else {}

    def states_field(self, sequence: SequenceState) -> dict[str, Any]:
        """SGLang's field `hidden_states`, if requested."""
        return {"hidden_states": self._states[sequence.index]} if sequence.index in self._states else {}

    def prompt_logprobs_field(self, sequence: SequenceState) -> dict[str, Any]:
        """The field `prompt_logprobs`, if requested."""
        logprobs = sequence.prompt_logprobs
        if self.request.prompt_logprobs is None or logprobs is None:
            return {}
        name = token_namer(self.services.need_tokenizer(), self.request.return_tokens_as_token_ids)
        return {"prompt_logprobs": prompt_logprobs(logprobs, name)}

    async def send(self, context: RequestContext) -> dict[str, Any] | PacedBody | None:
        """The response, or None where it was streamed. Raises ApiError, DisconnectedError."""
        if self.request.stream:
            await stream_response(context, self.services, self.state, self.write_events, self.closing_events)
            return None
        await wait_complete(self.state)
        if self.request.return_hidden_states:
            states = await compute_states(context, self.services, self.request, self.state)
            self._states = {index: last_state(self.state.sequences[index], each) for index, each in enumerate(states)}
        if sum(sequence.num_logprobs for sequence in self.state.sequences) > INLINE_VALUES:
            built = Entries(map(self.build_choice, self.state.sequences), is_nested=True)
            return PacedBody({**self._head, "choices": built, **self._last_fields(), "usage": self.final_usage})
        choices = await paced_map(self.build_choice, self.state.sequences)
        return {**self._head, "choices": choices, "usage": self.final_usage(), **self._last_fields()}

    def _last_fields(self) -> dict[str, Any]:
        """The fields after the choices of a response that is not streamed."""
        fields = {**self.extra_fields(), **self.metadata(self.state.sequences[0])}
        section = self.services.resolved.user.disaggregation
        if section.mode != "prefill":
            return fields
        from frame.entrypoints.engine_client.transfer_handles import describe_transfer

        names = {"remote_engine_id": self.services.fingerprint, "remote_host": section.host, "remote_port": section.port}
        handle = describe_transfer(self.state, {**names, "weight_version": self.services.client.commands.weight_version})
        return fields if handle is None else {**fields, "kv_transfer_params": handle}

    def metadata(self, sequence: SequenceState) -> dict[str, Any]:
        """SGLang's field: the version of the weights that made the last token."""
        return {"metadata": {"weight_version": sequence.weight_version}}

    def extra_fields(self) -> dict[str, Any]:
        """Further fields of a response that is not streamed."""
        return {}

    @abstractmethod
    def write_events(self, sequence: SequenceState) -> Event:
        """The events of the new output of a sequence."""

    @abstractmethod
    def build_choice(self, sequence: SequenceState) -> dict[str, Any]:
        """The choice of a finished sequence."""


# chat ---------------------------------------------------------------------------------------------


@router.post("/v1/chat/completions", responses=responds_with(ChatCompletion, events=ChatCompletionChunk))
async def chat_completions(request: ChatRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Create a chat completion."""
    state = await start_chat(context, services, request, "chatcmpl-")
    return await ChatResponse(services, request, state).send(context)


class ChatResponse(Response):
    """A chat completion, whole or as deltas."""

    request: ChatRequest

    def __init__(self, services: Services, request: ChatRequest, state: RequestState) -> None:
        super().__init__(services, request, state, "chat.completion")
        self._opened: set[int] = set()
        self._parsers = make_output_parsers(services, request, state)
        self._is_legacy = request.is_legacy
        self._is_plain = not (self._parsers or request.logprobs or self.has_running_usage or request.return_token_ids)

    def final_usage(self) -> dict[str, Any]:
        counts = [count_reasoning(self.services, self.request, s, self._parsers.get(s.index)) for s in self.state.sequences]
        return {**self.usage(), "completion_tokens_details": {"reasoning_tokens": sum(counts), **self.drafted_tokens()}}

    def write_events(self, sequence: SequenceState) -> Event:
        text, ids, logprobs = sequence.take_output()
        index = sequence.index
        if sequence.finish is None and self._is_plain and index in self._opened:
            return self.chunks.text(index, text) if text else b""
        return join_events([*self._opening_events(sequence), *self._delta_events(sequence, text, ids, logprobs)])

    def _opening_events(self, sequence: SequenceState) -> list[Event]:
        index = sequence.index
        if index in self._opened:
            return []
        self._opened.add(index)
        delta = {"role": self.request.response_role, "content": "", "refusal": None}
        opening = self.chunks.full(index, delta, usage=self.running_usage(), choice=self._prompt_ids(sequence), chunk=self.extra_fields())
        echoed = self.request.echoed_text()
        return [opening, self.chunks.full(index, {"content": echoed}, usage=self.running_usage())] if echoed else [opening]

    def _delta_events(self, sequence: SequenceState, text: str, ids: list[int], logprobs: list[TokenLogprobs]) -> list[Event]:
        finish = sequence.finish
        if (failed := error_event(sequence)) is not None:
            return [failed]
        parser = self._parsers.get(sequence.index)
        deltas: list[dict[str, Any]] = parser.feed(text, finish) if parser else [{"content": text}] if text else []
        if finish is not None and not deltas:
            deltas = [{}]
        if not deltas and (logprobs or (ids and self.request.return_token_ids)):
            deltas = [{"content": ""}]
        ends = {} if finish is None else end_fields(sequence)
        events = []
        for place, delta in enumerate(deltas):
            is_last = place == len(deltas) - 1
            events.append(
                self.chunks.full(
                    sequence.index,
                    legacy_delta(delta) if self._is_legacy else delta,
                    self._finish_reason(sequence, parser) if is_last else None,
                    self._logprobs(logprobs) if is_last and logprobs else None,
                    self.running_usage(),
                    {**ends, **self.token_fields(ids)} if is_last else None,
                    self.metadata(sequence) if is_last and finish is not None else None,
                )
            )
        return events

    def build_choice(self, sequence: SequenceState) -> dict[str, Any]:
        text, ids, logprobs = sequence.take_output()
        parser = self._parsers.get(sequence.index)
        message: dict[str, Any] = {"content": text}
        if parser is not None:
            parser.feed(text, sequence.finish)
            message = parser.build_message()
        message = {**message, "role": self.request.response_role, "refusal": None}
        if echoed := self.request.echoed_text():
            message["content"] = echoed + (message["content"] or "")
        return {
            "index": sequence.index,
            "message": legacy_delta(message) if self._is_legacy else message,
            "logprobs": self._logprobs(logprobs) if self.request.logprobs else None,
            "finish_reason": self._finish_reason(sequence, parser),
            **end_fields(sequence),
            **self.token_fields(ids),
            **self._prompt_ids(sequence),
            **self.states_field(sequence),
        }

    def extra_fields(self) -> dict[str, Any]:
        """vLLM's fields of the response, as all choices have the same prompt."""
        first = self.state.sequences[0]
        ids = {"prompt_token_ids": first.prompt} if self.request.return_token_ids else {}
        return {**ids, **self.prompt_logprobs_field(first)}

    def _prompt_ids(self, sequence: SequenceState) -> dict[str, Any]:
        """The prompt token ids, where SGLang has them."""
        return {"prompt_token_ids": sequence.prompt} if self.request.return_prompt_token_ids else {}

    def _logprobs(self, pieces: list[TokenLogprobs]) -> dict[str, Any]:
        tokenizer = self.services.need_tokenizer()
        return chat_logprobs(pieces, tokenizer, token_namer(tokenizer, self.request.return_tokens_as_token_ids))

    def _finish_reason(self, sequence: SequenceState, parser: OutputParser | None) -> str | None:
        reason = finish_reason(sequence.finish, parser is not None and parser.ends_in_call(sequence.finish))
        return "function_call" if self._is_legacy and reason == "tool_calls" else reason


def legacy_delta(delta: dict[str, Any]) -> dict[str, Any]:
    """A message or delta with its tool call as OpenAI's deprecated `function_call`."""
    if not delta.get("tool_calls"):
        return delta
    function = delta["tool_calls"][0]["function"]
    return {**{name: value for name, value in delta.items() if name != "tool_calls"}, "function_call": function}


# completions --------------------------------------------------------------------------------------


@router.post("/v1/completions", responses=responds_with(Completion, events=CompletionChunk))
async def completions(request: CompletionRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Create a text completion."""
    params, prompts = prepare_completion(request, context, services)
    if request.echo or not (params.logprobs is None and params.prompt_logprobs is None):
        services.need_tokenizer()  # an error before the request starts
    special = request.add_special_tokens
    transfer, refine = request.kv_transfer_params, bound_states(services, prompts) if request.return_hidden_states else None
    plan = RequestPlan(
        prompts, [params] * len(prompts), request, add_special_tokens=special, prefix="cmpl-", transfer=transfer, refine=refine
    )
    state = await start_request(context, services, plan)
    return await CompletionResponse(services, request, state).send(context)


def prepare_completion(
    request: CompletionRequest, context: RequestContext, services: Services
) -> tuple[SamplingParams, list[str | list[int]]]:
    """(sampling parameters, prompts) of a request. Raises ApiError."""
    services.check_model(request.model, context.tenant)
    params, prompts = request.to_sampling_params(services.resolved.default_params), request.to_prompts()
    check_sequence_count(services, len(prompts) * params.n, "prompt" if params.n == 1 else "n")
    return fill_in_middle(services.need_tokenizer(), request.suffix, params, prompts) if request.suffix else (params, prompts)


class CompletionResponse(Response):
    """A text completion. `echo` puts the prompt first; `max_tokens: 0` returns it alone."""

    request: CompletionRequest

    def __init__(self, services: Services, request: CompletionRequest, state: RequestState) -> None:
        super().__init__(services, request, state, "text_completion")
        self._offsets: dict[int, TextOffsets] = {}
        self._opened: set[int] = set()  # indices of sequences whose prompt was returned
        self._is_prompt_only = bool(request.echo and request.max_tokens == 0)
        wants_ids = request.return_token_ids or request.return_prompt_token_ids
        self._is_plain = not (request.echo or request.logprobs is not None or self.has_running_usage or wants_ids)

    def num_generated(self) -> int:
        # The engine generates one token, which is not returned
        return 0 if self._is_prompt_only else super().num_generated()

    def write_events(self, sequence: SequenceState) -> Event:
        finish = sequence.finish
        if finish is None and self._is_plain:
            text, _, _ = sequence.take_output()
            return self.chunks.text(sequence.index, text) if text else b""
        if (failed := error_event(sequence)) is not None:
            return failed
        text, logprobs, more = self._take_output(sequence)
        if not text and finish is None and logprobs is None and not more:
            return b""
        if finish is not None:
            more |= end_fields(sequence)
        chunk = self.metadata(sequence) if finish is not None else None
        return self.chunks.full(sequence.index, text, finish_reason(finish), logprobs, self.running_usage(), more, chunk)

    def build_choice(self, sequence: SequenceState) -> dict[str, Any]:
        text, logprobs, more = self._take_output(sequence)
        return {
            "index": sequence.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason(sequence.finish),
            **end_fields(sequence),
            **more,
            **self.prompt_logprobs_field(sequence),
            **self.states_field(sequence),
        }

    def _take_output(self, sequence: SequenceState) -> tuple[str, dict[str, Any] | None, dict[str, Any]]:
        """(text, logprobs, further fields) of the new output; the first time with the prompt's."""
        text, ids, pieces = sequence.take_output()
        if self._is_prompt_only:
            text, ids, pieces = "", [], []
        index = sequence.index
        skips = sequence.params.skip_special_tokens
        more = self.token_fields(ids) if ids or sequence.finish is not None else {}
        if index not in self._opened:
            self._opened.add(index)
            if self.request.return_token_ids or self.request.return_prompt_token_ids:
                more["prompt_token_ids"] = sequence.prompt
            if self.request.echo:
                text = self.services.need_tokenizer().decode(sequence.prompt, skips) + text
                pieces = ([sequence.prompt_logprobs] if sequence.prompt_logprobs else []) + pieces
        if self.request.logprobs is None:
            return text, None, more
        tokenizer = self.services.need_tokenizer()
        offsets = self._offsets.get(index)
        if offsets is None:
            offsets = self._offsets[index] = TextOffsets(tokenizer, skips)
        return text, completion_logprobs(pieces, tokenizer, self.request.return_tokens_as_token_ids, offsets), more


# models -------------------------------------------------------------------------------------------

ModelPermission = declare(
    "ModelPermission",
    "id created organization",
    "What clients of older versions of OpenAI's API read; it grants nothing.",
    object="model_permission",
    allow_create_engine=bool,
    allow_sampling=bool,
    allow_logprobs=bool,
    allow_search_indices=bool,
    allow_view=bool,
    allow_fine_tuning=bool,
    group=str | None,
    is_blocking=bool,
)
ModelCard = declare(
    "ModelCard", "id created owned_by root max_model_len", object="model", parent=str | None, permission=array(ModelPermission)
)
ModelList = declare("ModelList", object="list", data=array(ModelCard))
AnthropicModel = declare("AnthropicModel", "id display_name", type="model", created_at=str)
AnthropicModelList = declare("AnthropicModelList", "has_more first_id last_id", data=array(AnthropicModel))


@models_router.get("/v1/models", responses=responds_with(ModelList | AnthropicModelList))
async def models(context: ContextDep, services: ServicesDep) -> Any:
    """List the served model and its adapters, in Anthropic's shape for its clients."""
    adapters = [] if services.adapters is None else services.adapters.list_adapters(context.tenant)
    names = list(dict.fromkeys((*services.model_names, *(named.name for named in adapters))))
    if _is_anthropic(context):
        cards = [_anthropic_card(services, name) for name in names]
        return {"data": cards, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    else:
        return {"object": "list", "data": [_card(services, name, context.tenant) for name in names]}


@models_router.get("/v1/models/{name:path}", responses=responds_with(ModelCard | AnthropicModel))
async def model(name: str, context: ContextDep, services: ServicesDep) -> Any:
    """Retrieve the served model, or an adapter."""
    services.check_model(name, context.tenant)
    if name not in services.model_names:  # the path of the checkpoint, or an adapter
        name = services.adapter_of(name, context.tenant) or services.resolved.served_name
    return _anthropic_card(services, name) if _is_anthropic(context) else _card(services, name, context.tenant)


def _is_anthropic(context: RequestContext) -> bool:
    return context.header(b"anthropic-version") is not None


def _card(services: Services, name: str, tenant: str) -> dict[str, Any]:
    """The card of a name of the model, or of an adapter: its root is the digest of its files."""
    named = None if services.adapters is None or name in services.model_names else services.adapters.find(name, tenant)
    served, created = services.resolved.served_name, services.created if named is None else named.created
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "frame",
        "root": served if named is None else named.version.digest,
        "parent": None if named is None else served,
        "max_model_len": services.resolved.max_context,
        "permission": [_permission(name, created)],
    }


def _permission(name: str, created: int) -> dict[str, Any]:
    may = dict.fromkeys(("allow_sampling", "allow_logprobs", "allow_view"), True)
    may_not = dict.fromkeys(("allow_create_engine", "allow_search_indices", "allow_fine_tuning", "is_blocking"), False)
    head = {"id": f"modelperm-{name}", "object": "model_permission", "created": created, "organization": "*", "group": None}
    return {**head, **may, **may_not}


def _anthropic_card(services: Services, name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(services.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": created}


# The modules beside chat, each with a `router`. One that is deleted adds no routes.
_MODULES = tuple(f"frame.entrypoints.http.openai.{name}" for name in ("responses", "moderations", "batches", "transcriptions"))


class OpenAIRoutes(HttpExtension):
    """The HTTP extension `openai`, whose other modules are imported when it is selected."""

    def make_routers(self) -> tuple[ApiRouter, ...]:
        from frame.entrypoints.http.native.pooling import embeddings_router

        modules = [import_module(name) for name in _MODULES if has_module(name)]
        return (router, models_router, embeddings_router, *(module.router for module in modules))
