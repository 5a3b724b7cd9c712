"""The native API, that of SGLang: `/generate`, `/health_generate`. Must not depend on the
engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from difflib import get_close_matches
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal, NotRequired

import msgspec
import numpy as np
from pydantic import Field, ValidationError, create_model

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import TokenLogprobs
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.http.chat.media_parts import MODALITIES, from_text
from frame.entrypoints.http.chat.request_media import TextWithMedia
from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.failures import as_sent, error_event
from frame.entrypoints.http.native.pooling import router as pooling_router
from frame.entrypoints.http.native.ranking import router as ranking_router
from frame.entrypoints.http.native.tokenizing import router as tokenizing_router
from frame.entrypoints.http.openai.completion_objects import DONE, WeightVersionOf, count_logprobs, list_versions
from frame.entrypoints.http.operations.admin import Health
from frame.entrypoints.http.paced_json import INLINE_VALUES, Entries, Event, PacedBody, array_type, encode_steps, in_steps
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, make_extension, responds_with
from frame.entrypoints.http.protocol.hidden_states import FIELD, Refine, bound_states, compute_states
from frame.entrypoints.http.protocol.session_store import Continuation
from frame.entrypoints.http.request_body import NestedBody, RequestBody, RequestOptions, to_custom
from frame.entrypoints.http.request_starter import (
    MAX_NAME_CHARS,
    RequestPlan,
    check_sequence_count,
    encode_prompt,
    paced_map,
    start_request,
    stream_response,
    wait_complete,
)
from frame.entrypoints.http.response_types import array, declare
from frame.entrypoints.http.services import Services
from frame.entrypoints.http.validation_errors import type_name, validation_error
from frame.entrypoints.media.media_service import MediaPart

router = ApiRouter(access=Access.USER)

# Each event of a stream has all log-probabilities so far: at most so many of all sequences.
MAX_REPEATED_LOGPROBS = 64 * 1024
HEALTH_TIMEOUT = 20.0  # seconds in which /health_generate must get one token

MEDIA_FIELDS = {f"{modality}_data": modality for modality in MODALITIES}

# SGLang's name of a sampling parameter -> the name in `SamplingParams`
_SYNONYMS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "custom_params": "custom",
    "no_stop_trim": "include_stop_str_in_output",
}


# The fields of `SamplingParams` as a body, which is validated like any other.
_NAMES = tuple(name for name in SamplingParams.__struct_fields__ if name != "return_hidden_states")  # which is the request's
_FIELDS: dict[str, Any] = {each.name: (each.type, None) for each in msgspec.structs.fields(SamplingParams) if each.name in _NAMES}
_SamplingValues = create_model("SamplingValues", __base__=RequestBody, **_FIELDS)


class SessionParams(NestedBody):
    """Continues from request `rid` of session `id`; without `rid` the request is the first of its
    kind. `offset`: tokens of that request which are kept; none, 0 or -1: all."""

    place = "session_params"
    id: str
    rid: str | None = None
    offset: Annotated[int, Field(ge=-1)] | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


class GenerateRequest(RequestOptions):
    """`text` or `input_ids`, one or several; `sampling_params` for all, or one each.

    `image_data`, `video_data` and `audio_data`: the media of a text with a placeholder for each: a
    URL, a file in base64, or a list of these; of several texts a list with one such value each.
    """

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    image_data: str | list[Any] | None = None
    video_data: str | list[Any] | None = None
    audio_data: str | list[Any] | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1)] = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    return_text_in_logprobs: bool = False
    model: str = ""
    session_params: SessionParams | None = None
    return_hidden_states: bool = False

    def sent_name(self, parameter: str) -> str:
        if parameter in ("prompt", "messages"):
            return "text" if self.text is not None else "input_ids"
        params = self.sampling_params or {}
        names = {name for each in (params if isinstance(params, list) else [params]) for name in each}
        if parameter in ("logprobs", "prompt_logprobs") and parameter not in names:
            return "top_logprobs_num"
        if parameter == "logprob_token_ids" and self.token_ids_logprob is not None:
            return "token_ids_logprob"
        if parameter in _NAMES:
            sent = next((name for name in names if _SYNONYMS.get(name) == parameter), parameter)
            return f"sampling_params.{sent}"
        return parameter


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
    "id prompt_tokens completion_tokens cached_tokens e2e_latency weight_version",
    "`e2e_latency` in seconds. `weight_version`: of the weights that made the last token.\n"
    "`weight_versions`: where several have made the sequence. `hidden_states`: a list for the prompt,\n"
    "then one state for each token of the output but the last.",
    weight_versions=NotRequired[array(WeightVersionOf)],
    finish_reason=GenerateFinish | None,
    output_token_logprobs=NotRequired[list[LogprobEntry]],
    output_top_logprobs=NotRequired[list[list[LogprobEntry]]],
    output_token_ids_logprobs=NotRequired[list[list[LogprobEntry]]],
    input_token_logprobs=NotRequired[list[LogprobEntry]],
    input_top_logprobs=NotRequired[list[list[LogprobEntry]]],
    hidden_states=NotRequired[list[list[float] | list[list[float]]]],
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
    params, prompts_only = to_sampling_params(request, len(prompts), services.resolved.default_params)
    special, sessions, tenant = True, services.sessions, context.tenant
    continued: Continuation | None = None
    if request.session_params is not None:
        request, continued, history = _continue(request, services, tenant, prompts, params)
        prompts, special = [await _join_prompt(services, history, prompts[0])] if history else prompts, not history
    refine: Refine = partial(_check_start, request)
    if request.return_hidden_states:
        if request.stream:
            raise ApiError(400, f"{FIELD} cannot be streamed; leave stream out", FIELD)
        refine = bound_states(services, prompts, refine)
    plan = RequestPlan(prompts, params, request, refine=refine, add_special_tokens=special)
    with nullcontext() if continued is None else sessions.use_session(tenant, continued.session):
        state = await start_request(context, services, plan)
        sequence = state.sequences[0]
        builder = ResultBuilder(services, request, state, is_single and params[0].n == 1, prompts_only)
        if request.stream:
            await stream_response(context, services, state, builder.write_events, lambda: DONE)
        else:
            await wait_complete(state)
        if continued is not None and sequence.finish is not None and sequence.finish.reason in ("stop", "length"):
            sessions.add_request(tenant, continued, sequence.name, sequence.prompt, sequence.recovery.output_ids)
    if request.stream:
        return None
    if request.return_hidden_states:
        builder.states = await compute_states(context, services, request, state)
        return PacedBody(builder.build_results_in_steps(state.sequences))
    if sum(sequence.num_logprobs for sequence in state.sequences) > INLINE_VALUES:
        return PacedBody(builder.build_results_in_steps(state.sequences))
    results = await paced_map(builder.build_result, state.sequences)
    return results[0] if builder.is_single else results


def _continue(
    request: GenerateRequest, services: Services, tenant: str, prompts: Sequence[Any], params: Sequence[SamplingParams]
) -> tuple[GenerateRequest, Continuation, list[int]]:
    """The request in its session, where it continues, and the tokens before it. Raises ApiError
    400."""
    where = request.session_params
    assert where is not None
    if len(prompts) > 1 or params[0].n > 1 or isinstance(prompts[0], TextWithMedia):
        raise ApiError(400, "session_params takes one prompt without media, and n 1; send several requests", "session_params")
    offset = max(0, where.offset or 0)
    continuation = Continuation(where.id, where.rid, offset, where.replace is True, where.drop_previous_output is True)
    history = services.sessions.read_history(tenant, continuation)
    return request.model_copy(update={"session_id": where.id}), continuation, history


async def _join_prompt(services: Services, history: list[int], prompt: Any) -> list[int]:
    room = services.client.limits.max_context
    return history + (prompt if isinstance(prompt, list) else await encode_prompt(services, prompt, False, room))


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
        self.states: list[np.ndarray] = []  # by index of the sequence; empty: they were not asked for
        self._texts: dict[int, str] = {}
        self._ids: dict[int, list[int]] = {}
        self._scores: dict[int, dict[str, list[Any]]] = {}  # by the name of the field

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
        return self._result(sequence, text, ids, {name: array(values) for name, values in self._scores_of(sequence, pieces).items()})

    def _take_output(self, sequence: SequenceState) -> tuple[str, list[int], list[TokenLogprobs]]:
        output = sequence.take_output()
        return ("", [], []) if sequence.prompt_index in self._prompts_only else output

    def _entries_of(self, pieces: Iterable[TokenLogprobs]) -> Iterator[list[Any]]:
        for piece in pieces:
            yield from map(self._logprob_entry, piece.token_ids, piece.logprobs)

    def _tops_of(self, pieces: Iterable[TokenLogprobs], start: int = 0, stop: int | None = None) -> Iterator[list[Any]]:
        for piece in pieces:
            yield from ([self._logprob_entry(i, p) for i, p in top[start:stop]] for top in piece.top)

    def _scores_of(self, sequence: SequenceState, pieces: list[TokenLogprobs]) -> dict[str, Iterator[Any]]:
        """The log-probabilities of output tokens, of the likeliest ones, and of those asked for."""
        if not self._request.return_logprob:
            return {}
        count = sequence.params.logprobs or 0
        scores: dict[str, Iterator[Any]] = {"output_token_logprobs": self._entries_of(pieces)}
        scores["output_top_logprobs"] = self._tops_of(pieces, 0, count)
        if sequence.params.logprob_token_ids:
            scores["output_token_ids_logprobs"] = self._tops_of(pieces, count)
        return scores

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
        scores = self._scores.setdefault(index, {})
        for name, values in self._scores_of(sequence, pieces).items():
            scores.setdefault(name, []).extend(values)
        return self._result(sequence, self._texts[index], self._ids[index], scores)

    def _result(self, sequence: SequenceState, text: str, ids: list[int], scores: Mapping[str, Any]) -> dict[str, Any]:
        """`scores`: see `_scores_of`."""
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
            "weight_version": sequence.weight_version,
            **list_versions(sequence),
        }
        if self.states:
            states, count = self.states[sequence.index], len(sequence.prompt)
            prompt = Entries((each.tolist() for each in states[:count]), batch=1)
            meta["hidden_states"] = Entries(chain([prompt], (each.tolist() for each in states[count:])), is_nested=True)
        if self._request.return_logprob:
            meta |= {**scores, **self._prompt_fields(sequence)}
        return {"text": text, "output_ids": ids, "meta_info": meta}

    def _logprob_entry(self, token_id: int, logprob: float | None) -> list[Any]:
        tokenizer = self._services.tokenizer
        has_text = self._request.return_text_in_logprobs and tokenizer is not None
        return [logprob, token_id, tokenizer.get_token_text(token_id) if has_text and tokenizer else None]


def _prompts(request: GenerateRequest) -> tuple[list[str | list[int] | TextWithMedia], bool]:
    """(the prompts, whether there is a single one that is not in a list). Raises ApiError 400."""
    if (request.text is None) == (request.input_ids is None):
        raise ApiError(400, "send either text or input_ids", "text")
    if request.text == [] or request.input_ids == []:
        raise ApiError(400, "the prompt is empty; send at least one token", "text" if request.text is not None else "input_ids")
    if request.text is not None:
        is_single = isinstance(request.text, str)
        texts = [request.text] if isinstance(request.text, str) else request.text
        media = _media(request, len(texts), is_single)
        return [TextWithMedia(text, each) if each else text for text, each in zip(texts, media, strict=True)], is_single
    if media_field := next((name for name in MEDIA_FIELDS if getattr(request, name)), None):
        raise ApiError(400, f"{media_field} needs text with a placeholder for each item; send text in place of input_ids", media_field)
    ids = request.input_ids or []
    kinds = {type(each) for each in ids}
    if len(kinds) > 1:
        raise ApiError(400, "input_ids mixes ids and lists of ids; send one kind", "input_ids")
    return ([ids], True) if kinds <= {int} else (list(ids), False)  # type: ignore[list-item,arg-type]


def _media(request: GenerateRequest, count: int, is_single: bool) -> list[list[MediaPart]]:
    """The media of each of `count` texts. Raises ApiError 400."""
    media: list[list[MediaPart]] = [[] for _ in range(count)]
    for name, modality in MEDIA_FIELDS.items():
        value = getattr(request, name)
        if not value:
            continue
        values = [value] if is_single else value
        if not isinstance(values, list) or len(values) != count:
            raise ApiError(400, f"{name} must be a list with one entry for each of the {count} texts, or null where there is none", name)
        for i, entry in enumerate(values):
            place = name if is_single else f"{name}[{i}]"
            sources = entry if isinstance(entry, list) else [] if entry is None else [entry]
            for j, source in enumerate(sources):
                here = f"{place}[{j}]" if isinstance(entry, list) else place
                if isinstance(source, dict):
                    raise ApiError(400, f"{here} is {type_name(source)}; embeddings and features are not taken: send a file", here)
                media[i].append(MediaPart(modality, from_text(source, here), here))
    return media


def to_sampling_params(request: GenerateRequest, count: int, defaults: SamplingParams) -> tuple[list[SamplingParams], set[int]]:
    """(parameters of each prompt, indices of the prompts with `max_new_tokens: 0`). The latter
    return only the log-probabilities of the prompt. defaults: of what the request leaves out.
    Raises ApiError 400."""
    sent = {} if request.sampling_params is None else request.sampling_params
    if not isinstance(sent, list):
        is_prompt_only = _is_prompt_only(sent)
        return [_params(sent, request, defaults, is_prompt_only)] * count, set(range(count) if is_prompt_only else ())
    several = sent
    if len(several) != count:
        sentence = f"there are {count} prompts but {len(several)} sampling_params; send one object, or one for each prompt"
        raise ApiError(400, sentence, "sampling_params")
    prompts_only = {i for i, each in enumerate(several) if _is_prompt_only(each)}
    return [_params(each, request, defaults, i in prompts_only) for i, each in enumerate(several)], prompts_only


def _is_prompt_only(values: dict[str, Any]) -> bool:
    return any(values.get(name) == 0 and values[name] is not False for name in ("max_new_tokens", "max_tokens"))


def _params(sent: dict[str, Any], request: GenerateRequest, defaults: SamplingParams, is_prompt_only: bool) -> SamplingParams:
    values = {_SYNONYMS.get(name, name): value for name, value in sent.items() if value is not None}
    for name in ("stop", "stop_regex"):
        if isinstance(values.get(name), str):
            values[name] = [values[name]]
    if isinstance(sent.get("custom_params"), dict):
        values["custom"] = to_custom(sent["custom_params"])
    for name in ("json_schema", "structural_tag"):
        if isinstance(values.get(name), dict):
            values[name] = msgspec.json.encode(values[name]).decode()
    unknown = sorted(set(values) - set(_NAMES))
    if unknown:
        close = get_close_matches(unknown[0][:MAX_NAME_CHARS], (*_NAMES, *_SYNONYMS), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ApiError(400, f"unknown sampling parameter {quoted(unknown[0])}{hint}", f"sampling_params.{unknown[0]}")
    if sent.get("max_tokens", 0) is None:
        values["max_tokens"] = None  # the rest of the context
    values.setdefault("max_tokens", 128)
    if is_prompt_only:
        values["max_tokens"] = 1  # the engine generates at least one
    if request.return_logprob:
        values.setdefault("logprobs", request.top_logprobs_num)
        if request.token_ids_logprob is not None:
            values.setdefault("logprob_token_ids", request.token_ids_logprob)
        if request.logprob_start_len >= 0:
            values.setdefault("prompt_logprobs", request.top_logprobs_num)
    try:
        validated = _SamplingValues.model_validate(values)
    except ValidationError as error:
        raise as_sent(validation_error(error.errors(include_url=False), values), request.sent_name) from None
    return msgspec.structs.replace(defaults, **{name: getattr(validated, name) for name in validated.model_fields_set})


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


NativeRoutes = make_extension(__name__, router, tokenizing_router, pooling_router, ranking_router)
