"""The native API, that of SGLang: `/generate`, tokenizing, `/health_generate`. Must not depend on
the engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal, NotRequired

import msgspec
from pydantic import Field, ValidationError, create_model

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import TokenLogprobs
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.http.chat.chat_request import encode_chat
from frame.entrypoints.http.chat.request_fields import TemplateFields
from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.failures import as_sent, error_event
from frame.entrypoints.http.native.pooling import router as pooling_router
from frame.entrypoints.http.openai.completion_objects import DONE, count_logprobs
from frame.entrypoints.http.openai.completions_schema import ChatRequest
from frame.entrypoints.http.operations.admin import Health
from frame.entrypoints.http.paced_json import INLINE_VALUES, Entries, Event, PacedBody, array_type, encode_steps, in_steps
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, make_extension, responds_with
from frame.entrypoints.http.request_body import RequestBody, RequestOptions
from frame.entrypoints.http.request_starter import (
    MAX_NAME_CHARS,
    Chat,
    RequestPlan,
    check_sequence_count,
    countable_tokens,
    encode_prompt,
    paced_map,
    start_request,
    stream_response,
    wait_complete,
)
from frame.entrypoints.http.response_types import array, declare
from frame.entrypoints.http.services import Services
from frame.entrypoints.http.validation_errors import validation_error
from frame.text.tokenizer import SHORT

router = ApiRouter(access=Access.USER)

# Each event of a stream has all log-probabilities so far: at most so many of all sequences.
MAX_REPEATED_LOGPROBS = 64 * 1024
HEALTH_TIMEOUT = 20.0  # seconds in which /health_generate must get one token

# SGLang's name of a sampling parameter -> the name in `SamplingParams`
_SYNONYMS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "custom_params": "custom",
    "no_stop_trim": "include_stop_str_in_output",
}


# The fields of `SamplingParams` as a body, which is validated like any other.
_FIELDS: dict[str, Any] = {each.name: (each.type, None) for each in msgspec.structs.fields(SamplingParams)}
_SamplingValues = create_model("SamplingValues", __base__=RequestBody, **_FIELDS)


class GenerateRequest(RequestOptions):
    """`text` or `input_ids`, one or several; `sampling_params` for all, or one each."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1)] = -1
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    model: str = ""

    def sent_name(self, parameter: str) -> str:
        if parameter == "prompt":
            return "text" if self.text is not None else "input_ids"
        params = self.sampling_params or {}
        names = {name for each in (params if isinstance(params, list) else [params]) for name in each}
        if parameter in ("logprobs", "prompt_logprobs") and parameter not in names:
            return "top_logprobs_num"
        if parameter in SamplingParams.__struct_fields__:
            sent = next((name for name in names if _SYNONYMS.get(name) == parameter), parameter)
            return f"sampling_params.{sent}"
        return parameter


class TokenizeRequest(TemplateFields):
    """A text, or messages with the fields of a chat request that the prompt depends on."""

    model: str = ""
    text: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = False

    def to_chat_request(self) -> ChatRequest:
        """The messages as a chat request."""
        fields = {name: getattr(self, name) for name in TemplateFields.model_fields}
        return ChatRequest(model=self.model, messages=self.messages or [], **fields)


class DetokenizeRequest(RequestBody):
    tokens: list[int]
    model: str = ""
    skip_special_tokens: bool = False


# generate -----------------------------------------------------------------------------------------

LogprobEntry = tuple[float | None, int, str | None]  # log-probability, token id, text
GenerateFinish = declare(
    "GenerateFinish",
    "length? matched?",
    "`length`: number of generated tokens. `matched`: the stop string or token.",
    type=Literal["stop", "length", "abort", "error"],
)
GenerateMeta = declare(
    "GenerateMeta",
    "id prompt_tokens completion_tokens cached_tokens e2e_latency",
    "`e2e_latency` in seconds.",
    finish_reason=GenerateFinish | None,
    output_token_logprobs=NotRequired[list[LogprobEntry]],
    output_top_logprobs=NotRequired[list[list[LogprobEntry]]],
    input_token_logprobs=NotRequired[list[LogprobEntry]],
    input_top_logprobs=NotRequired[list[list[LogprobEntry]]],
)
GenerateResult = declare(
    "GenerateResult",
    "text output_ids index?",
    "One sequence with all its text and tokens so far. The stream ends with `data: [DONE]`.",
    meta_info=GenerateMeta,
)


@router.post("/generate", responses=responds_with(GenerateResult | array(GenerateResult), events=GenerateResult))
async def generate(request: GenerateRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Generate from text or token ids. Each event of a stream has all text so far."""
    services.check_model(request.model, context.tenant)
    prompts, is_single = _prompts(request)
    check_sequence_count(services, len(prompts), "input_ids" if request.text is None else "text")
    params, prompts_only = to_sampling_params(request, len(prompts))
    plan = RequestPlan(prompts, params, request, refine=partial(_check_start, request))
    state = await start_request(context, services, plan)
    builder = ResultBuilder(services, request, state, is_single and params[0].n == 1, prompts_only)
    if request.stream:
        await stream_response(context, services, state, builder.write_events, lambda: DONE)
        return None
    await wait_complete(state)
    if sum(sequence.num_logprobs for sequence in state.sequences) > INLINE_VALUES:
        return PacedBody(builder.build_results_in_steps(state.sequences))
    results = await paced_map(builder.build_result, state.sequences)
    return results[0] if builder.is_single else results


def _check_start(request: GenerateRequest, prompt: list[int], params: SamplingParams) -> SamplingParams:
    """The parameters. Raises ApiError 400 for log-probabilities that begin after the prompt."""
    if request.logprob_start_len > len(prompt):
        sentence = f"logprob_start_len is {request.logprob_start_len}; it may be {len(prompt)}, the number of tokens of the prompt"
        raise ApiError(400, sentence, "logprob_start_len")
    return params


class ResultBuilder:
    """Builds the results of `/generate`, with all text and tokens so far."""

    def __init__(self, services: Services, request: GenerateRequest, state: RequestState, is_single: bool, prompts_only: set[int]) -> None:
        self.is_single = is_single
        self._services = services
        self._request = request
        self._created = state.created
        self._prompts_only = prompts_only
        self._max_repeated = MAX_REPEATED_LOGPROBS // len(state.sequences)
        self._texts: dict[int, str] = {}
        self._ids: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[list[Any]]] = {}
        self._tops: dict[int, list[Any]] = {}

    def write_events(self, sequence: SequenceState) -> Event:
        if (failed := error_event(sequence)) is not None:
            return failed
        if self._request.return_logprob and sequence.num_logprobs > self._max_repeated:
            sentence = f"each event has all log-probabilities so far, and the last one more than {self._max_repeated} of this sequence"
            raise ApiError(400, f"{sentence}; ask for fewer, or leave stream out", "top_logprobs_num")
        result = self.build_result(sequence)
        if not self.is_single:
            result["index"] = sequence.index
        if sequence.num_logprobs > INLINE_VALUES:
            return chain([b"data: "], encode_steps(in_steps(result)), [b"\n\n"])
        return b"data: " + msgspec.json.encode(result) + b"\n\n"

    def build_results_in_steps(self, sequences: Sequence[SequenceState]) -> Any:
        """The results of finished sequences, as `PacedBody` has them."""
        results = map(self._build_last_result, sequences)
        return next(results) if self.is_single else Entries(results, is_nested=True)

    def _build_last_result(self, sequence: SequenceState) -> dict[str, Any]:
        """`build_result` of a sequence without earlier results, with large arrays in steps."""
        text, ids, pieces = self._take_output(sequence)
        array = array_type(count_logprobs(pieces))
        return self._result(sequence, text, ids, array(self._entries_of(pieces)), array(self._tops_of(pieces)))

    def _take_output(self, sequence: SequenceState) -> tuple[str, list[int], list[TokenLogprobs]]:
        output = sequence.take_output()
        return ("", [], []) if sequence.prompt_index in self._prompts_only else output

    def _entries_of(self, pieces: Iterable[TokenLogprobs]) -> Iterator[list[Any]]:
        for piece in pieces:
            yield from map(self._logprob_entry, piece.token_ids, piece.logprobs)

    def _tops_of(self, pieces: Iterable[TokenLogprobs]) -> Iterator[list[Any]]:
        for piece in pieces:
            yield from ([self._logprob_entry(i, p) for i, p in top] for top in piece.top)

    def _prompt_fields(self, sequence: SequenceState) -> dict[str, Any]:
        prompt, start = sequence.prompt_logprobs, max(self._request.logprob_start_len, 0)
        if prompt is None:
            return {}
        scored = [TokenLogprobs(prompt.token_ids[start:], prompt.logprobs[start:], prompt.top[start:])]
        array = array_type(count_logprobs(scored))
        return {"input_token_logprobs": array(self._entries_of(scored)), "input_top_logprobs": array(self._tops_of(scored))}

    def build_result(self, sequence: SequenceState) -> dict[str, Any]:
        text, ids, pieces = self._take_output(sequence)
        index = sequence.index
        self._texts[index] = self._texts.get(index, "") + text
        self._ids.setdefault(index, []).extend(ids)
        entries, tops = self._logprobs.setdefault(index, []), self._tops.setdefault(index, [])
        if self._request.return_logprob:
            entries.extend(self._entries_of(pieces))
            tops.extend(self._tops_of(pieces))
        return self._result(sequence, self._texts[index], self._ids[index], entries, tops)

    def _result(self, sequence: SequenceState, text: str, ids: list[int], entries: Any, tops: Any) -> dict[str, Any]:
        """`entries` and `tops`: the log-probabilities of the tokens, and of their alternatives."""
        finish = sequence.finish
        num_tokens = 0 if sequence.prompt_index in self._prompts_only else sequence.num_tokens
        reason: dict[str, Any] | None = None
        if finish is not None:
            reason = {"type": finish.reason}
            reason |= {"length": num_tokens} if finish.reason == "length" else {"matched": finish.matched}
        meta = {
            "id": sequence.name,
            "finish_reason": reason,
            "prompt_tokens": len(sequence.prompt),
            "completion_tokens": num_tokens,
            "cached_tokens": sequence.cached,
            "e2e_latency": time.perf_counter() - self._created,
        }
        if self._request.return_logprob:
            meta |= {"output_token_logprobs": entries, "output_top_logprobs": tops, **self._prompt_fields(sequence)}
        return {"text": text, "output_ids": ids, "meta_info": meta}

    def _logprob_entry(self, token_id: int, logprob: float | None) -> list[Any]:
        tokenizer = self._services.tokenizer
        has_text = self._request.return_text_in_logprobs and tokenizer is not None
        return [logprob, token_id, tokenizer.get_token_text(token_id) if has_text and tokenizer else None]


def _prompts(request: GenerateRequest) -> tuple[list[str | list[int] | Chat], bool]:
    """(the prompts, whether there is a single one that is not in a list). Raises ApiError 400."""
    if (request.text is None) == (request.input_ids is None):
        raise ApiError(400, "send either text or input_ids", "text")
    if request.text == [] or request.input_ids == []:
        raise ApiError(400, "the prompt is empty; send at least one token", "text" if request.text is not None else "input_ids")
    if request.text is not None:
        return ([request.text], True) if isinstance(request.text, str) else (list(request.text), False)
    ids = request.input_ids or []
    kinds = {type(each) for each in ids}
    if len(kinds) > 1:
        raise ApiError(400, "input_ids mixes ids and lists of ids; send one kind", "input_ids")
    return ([ids], True) if kinds <= {int} else (list(ids), False)  # type: ignore[list-item,arg-type]


def to_sampling_params(request: GenerateRequest, count: int) -> tuple[list[SamplingParams], set[int]]:
    """(parameters of each prompt, indices of the prompts with `max_new_tokens: 0`). The latter
    return only the log-probabilities of the prompt. Raises ApiError 400."""
    sent = {} if request.sampling_params is None else request.sampling_params
    if not isinstance(sent, list):
        is_prompt_only = _is_prompt_only(sent)
        return [_params(sent, request, is_prompt_only)] * count, set(range(count) if is_prompt_only else ())
    several = sent
    if len(several) != count:
        sentence = f"there are {count} prompts but {len(several)} sampling_params; send one object, or one for each prompt"
        raise ApiError(400, sentence, "sampling_params")
    prompts_only = {i for i, each in enumerate(several) if _is_prompt_only(each)}
    return [_params(each, request, i in prompts_only) for i, each in enumerate(several)], prompts_only


def _is_prompt_only(values: dict[str, Any]) -> bool:
    return any(values.get(name) == 0 and values[name] is not False for name in ("max_new_tokens", "max_tokens"))


def _params(sent: dict[str, Any], request: GenerateRequest, is_prompt_only: bool) -> SamplingParams:
    values = {_SYNONYMS.get(name, name): value for name, value in sent.items() if value is not None}
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    for name in ("json_schema", "structural_tag"):
        if isinstance(values.get(name), dict):
            values[name] = msgspec.json.encode(values[name]).decode()
    unknown = sorted(set(values) - set(SamplingParams.__struct_fields__))
    if unknown:
        close = get_close_matches(unknown[0][:MAX_NAME_CHARS], (*SamplingParams.__struct_fields__, *_SYNONYMS), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ApiError(400, f"unknown sampling parameter {quoted(unknown[0])}{hint}", f"sampling_params.{unknown[0]}")
    if sent.get("max_tokens", 0) is None:
        values["max_tokens"] = None  # the rest of the context
    values.setdefault("max_tokens", 128)
    if is_prompt_only:
        values["max_tokens"] = 1  # the engine generates at least one
    if request.return_logprob:
        values.setdefault("logprobs", request.top_logprobs_num)
        if request.logprob_start_len >= 0:
            values.setdefault("prompt_logprobs", request.top_logprobs_num)
    try:
        validated = _SamplingValues.model_validate(values)
    except ValidationError as error:
        raise as_sent(validation_error(error.errors(include_url=False), values), request.sent_name) from None
    return SamplingParams(**{name: getattr(validated, name) for name in validated.model_fields_set})


# text ---------------------------------------------------------------------------------------------

TokenizeResult = declare("TokenizeResult", "count max_model_len token_strs?", tokens=list[int])
DetokenizeResult = declare("DetokenizeResult", "text prompt", "`text` and `prompt` are the same.")


@router.post("/tokenize", responses=responds_with(TokenizeResult))
@router.post("/v1/tokenize", responses=responds_with(TokenizeResult))
async def tokenize(request: TokenizeRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Convert text or messages to token ids."""
    services.check_model(request.model, context.tenant)
    tokenizer = services.need_tokenizer()
    text = request.text if request.text is not None else request.prompt
    if (text is None) == (request.messages is None):
        raise ApiError(400, "send either text (or prompt) or messages", "text")
    if request.messages is not None:
        ids = await encode_chat(context, services, request.to_chat_request())
    else:
        ids = await encode_prompt(services, text or "", request.add_special_tokens is not False, countable_tokens(services))
    result: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": services.resolved.max_context}
    if request.return_token_strs:
        async with services.text_turns.hold_slot(context.tenant):
            result["token_strs"] = await asyncio.to_thread(lambda: [tokenizer.get_token_text(i) for i in ids])
    return result


@router.post("/detokenize", responses=responds_with(DetokenizeResult))
@router.post("/v1/detokenize", responses=responds_with(DetokenizeResult))
async def detokenize(request: DetokenizeRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Convert token ids to text."""
    services.check_model(request.model, context.tenant)
    text = await detokenize_ids(services, request.tokens, request.skip_special_tokens, "tokens", context.tenant)
    return {"text": text, "prompt": text}


async def detokenize_ids(services: Services, ids: list[int], skip_special_tokens: bool, name: str, tenant: str) -> str:
    """The text of token ids from the field `name`, in turn by tenant. Raises ApiError 400."""
    tokenizer, maximum = services.need_tokenizer(), countable_tokens(services)
    if len(ids) > maximum:
        raise ApiError(400, f"{name} has {len(ids)} ids; it may have {maximum}", name)
    if ids and not 0 <= min(ids) <= max(ids) < services.resolved.model.vocab_size:
        raise ApiError(400, f"{name} has an id outside the vocabulary (0 to {services.resolved.model.vocab_size - 1})", name)
    if len(ids) <= SHORT:
        return tokenizer.decode(ids, skip_special_tokens)
    async with services.text_turns.hold_slot(tenant):
        return await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens)


@router.get("/health_generate", responses=responds_with(Health))
async def health_generate(context: ContextDep, services: ServicesDep) -> Any:
    """200 when the model generates a token, or computes a vector, in time."""
    prompt = [services.resolved.model.eos_token_ids[0] if services.resolved.model.eos_token_ids else 0]
    await context.body()
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    options = RequestOptions(rid=f"health-{uuid.uuid4().hex}")
    plan = RequestPlan([prompt], [params], options, tasks=(services.resolved.task,))
    state = await start_request(context, services, plan)
    try:
        await asyncio.wait_for(wait_complete(state), HEALTH_TIMEOUT)
    except TimeoutError:
        raise ApiError(503, f"the model generated nothing within {HEALTH_TIMEOUT:g} s") from None
    await context.respond(b"{}")


NativeRoutes = make_extension(__name__, router, pooling_router)
