"""The routes of pooling models that read single texts: `/v1/embeddings` of OpenAI, `/v1/classify`
of vLLM.

Used by the routes of other dialects and by the gRPC service, which compute vectors with it. Must
not depend on the engine.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from frame.core.interfaces.model import SentenceTransformersConfig, Task
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.engine_client.limits import STATES_OF_TOKENS
from frame.entrypoints.http.chat.request_media import Chat
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.failures import aborted
from frame.entrypoints.http.native.vector_encoding import EmbedDtype, encode_vectors, respond_bytes
from frame.entrypoints.http.openai.completions_schema import to_template_messages
from frame.entrypoints.http.paced_json import INLINE_VALUES, Entries, PacedBody
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.protocol.hidden_states import bound_states, read_states
from frame.entrypoints.http.request_body import RequestOptions
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.request_starter import Caller, Prompt, RequestPlan, start_request, wait_complete
from frame.entrypoints.http.response_types import array, declare
from frame.entrypoints.http.services import Services
from frame.entrypoints.relevance import finished, normalized

embeddings_router = ApiRouter(access=Access.USER)
router = ApiRouter(access=Access.USER)

PoolingUsage = declare("PoolingUsage", "prompt_tokens total_tokens")
PoolingReply = declare("PoolingReply", "id created model", object="list", usage=PoolingUsage)


MAX_INPUTS = 2048  # of one request
CUT_FIELD = "truncate_prompt_tokens: -1"  # the remedy that sentences name for long inputs
NOTHING_SAMPLED = SamplingParams(max_tokens=1)  # pooling models sample no token


class PoolingRequestFields(RequestOptions):
    """Fields of all pooling requests. `truncate_prompt_tokens`: length in tokens to which longer
    texts are cut; -1: the model's maximum, as Voyage's `truncation`."""

    model: str = ""
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation: bool | None = None
    add_special_tokens: bool | None = None

    def sent_name(self, parameter: str) -> str:
        return "input" if parameter == "prompt" else parameter

    def truncate_length(self, services: Services) -> int | None:
        """Tokens to which texts are cut; None: longer ones are refused. Raises ApiError."""
        asked, maximum = self.truncate_prompt_tokens, services.client.limits.max_pooling_tokens
        if self.truncation is not None and asked is not None:
            raise ApiError(400, "truncation and truncate_prompt_tokens exclude each other; keep one", "truncation")
        if asked is None:
            return maximum if self.truncation else None
        if asked == 0 or asked < -1 or asked > maximum:
            sentence = f"truncate_prompt_tokens is {asked}; it must be from 1 to {maximum}, or -1 for {maximum}"
            raise ApiError(400, sentence, "truncate_prompt_tokens")
        return maximum if asked == -1 else asked


class ActivationFields(PoolingRequestFields):
    """`use_activation`: false returns logits in place of probabilities, and vectors of any
    length."""

    use_activation: bool | None = None


def check_count(count: int, name: str) -> None:
    """Raise ApiError 400 for no inputs, or more than `MAX_INPUTS`."""
    if not count:
        raise ApiError(400, f"{name} is empty; send at least one", name)
    if count > MAX_INPUTS:
        raise ApiError(400, f"{name} has {count} entries; send at most {MAX_INPUTS} at once", name)


async def compute_vectors(
    context: Caller, services: Services, request: PoolingRequestFields, prompts: Sequence[Prompt], tasks: Sequence[Task], prefix: str = ""
) -> tuple[np.ndarray, int]:
    """(the model's outputs, float32 [prompts, width], without activation; number of prompt tokens).
    Raises ApiError."""
    each, count = await _run_prompts(context, services, request, prompts, tasks, prefix)
    return np.frombuffer(b"".join(each), "<f4").reshape(len(each), -1), count


async def compute_token_vectors(
    context: Caller, services: Services, request: EmbeddingRequest, prefix: str = ""
) -> tuple[list[np.ndarray], int]:
    """(of each input float32 [tokens, dimensions], the hidden states of its tokens, of length 1 if
    that is asked for; number of prompt tokens). Raises ApiError."""
    prompts = _check_embedding(services, request)
    data, count = await _run_prompts(context, services, request, prompts, ("embed",), prefix, returns_tokens=True)
    each = [read_states(one, services)[:, : request.dimensions] for one in data]
    return ([normalized(vectors) for vectors in each] if _is_normalized(request) else each), count


async def _run_prompts(
    context: Caller,
    services: Services,
    request: PoolingRequestFields,
    prompts: Sequence[Prompt],
    tasks: Sequence[Task],
    prefix: str,
    *,
    returns_tokens: bool = False,
) -> tuple[list[bytes], int]:
    """(the model's output for each prompt, or that for each of its tokens; number of prompt
    tokens). Raises ApiError."""
    services.check_model(request.model, context.tenant)
    services.need_task(*tasks)
    params = [STATES_OF_TOKENS if returns_tokens else NOTHING_SAMPLED] * len(prompts)
    plan = RequestPlan(
        prompts,
        params,
        request,
        add_special_tokens=request.add_special_tokens is not False,
        tasks=tasks,
        max_length=request.truncate_length(services),
        prefix=prefix,
        refine=bound_states(services, ()) if returns_tokens else None,
    )
    state = await start_request(context, services, plan)
    sequences = await wait_complete(state)
    if len(state.vectors) < len(sequences):
        raise aborted()
    return [state.vectors[s.index] for s in sequences], sum(len(s.prompt) for s in sequences)


def list_reply(
    model: str,
    rid: str,
    data: Iterable[dict[str, Any]],
    num_tokens: int,
    num_values: int,
    more: dict[str, Any] | None = None,
    *,
    is_nested: bool = False,
) -> Any:
    """The response of a route with one entry for each input, in OpenAI's shape. `num_values`: the
    numbers in all of `data`. is_nested: its entries have `value_array`s."""
    head = {"id": rid, "object": "list", "created": int(time.time()), "model": model}
    array = value_array(data, num_values, is_nested=is_nested)
    return paced({**head, "data": array, "usage": usage(num_tokens), **(more or {})}, num_values)


def value_array(rows: Iterable[Any], num_values: int, *, is_nested: bool = False) -> Any:
    """The rows of a response with so many numbers. is_nested: they are, or have, arrays of this
    kind."""
    return list(rows) if num_values <= INLINE_VALUES else Entries(rows, batch=1, is_nested=is_nested)


def paced(reply: Any, num_values: int) -> Any:
    """The response, whose `value_array`s have so many numbers."""
    return reply if num_values <= INLINE_VALUES else PacedBody(reply)


def usage(num_tokens: int) -> dict[str, int]:
    """OpenAI's usage object of a response without generated tokens."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


# embeddings ---------------------------------------------------------------------------------------

Embedding = declare(
    "Embedding", "index", "`embedding`: numbers, or base64 of little-endian float32.", object="embedding", embedding=list[float] | str
)
EmbeddingList = declare("EmbeddingList", base=PoolingReply, data=array(Embedding))


class EmbeddingRequest(ActivationFields):
    """An embedding request: texts or token ids, or a conversation (`messages`), which the chat
    template makes one text. `dimensions`: length to which vectors are cut (Matryoshka models).
    `prompt_name`: one of the checkpoint's prompts, put before each text. `normalize`: whether
    vectors have length 1; None: as the checkpoint says; `use_activation` is the same. `embed_dtype`
    is that of base64 and bytes."""

    input: str | list[str | int | list[int]] | None = None
    messages: list[dict[str, Any]] | None = None
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: EmbedDtype | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    normalize: bool | None = None

    @property
    def is_bytes(self) -> bool:
        return self.encoding_format in ("bytes", "bytes_only")


@embeddings_router.post("/v1/embeddings", responses=responds_with(EmbeddingList))
async def embeddings(request: EmbeddingRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Create embeddings."""
    vectors, count = await compute_embeddings(context, services, request)
    if request.is_bytes:
        return await send_bytes(context, services, request, vectors, count)
    encoded = enumerate(encode_vectors(vectors, request.encoding_format, request.embed_dtype))
    data = ({"object": "embedding", "index": index, "embedding": vector} for index, vector in encoded)
    return list_reply(
        services.response_model(request.model), context.state.rid if context.state is not None else "", data, count, vectors.size
    )


async def compute_embeddings(context: Caller, services: Services, request: EmbeddingRequest) -> tuple[np.ndarray, int]:
    """(float32 [inputs, dimensions], number of prompt tokens). Raises ApiError."""
    prompts, asked = _check_embedding(services, request), _is_normalized(request)
    vectors, count = await compute_vectors(context, services, request, prompts, ("embed",), "embd-")
    vectors = np.ascontiguousarray(vectors[:, : request.dimensions])
    if asked is None:
        return finished(vectors, services.resolved.pooling), count
    return normalized(vectors) if asked else vectors, count


def _check_embedding(services: Services, request: EmbeddingRequest) -> list[Prompt]:
    """The prompts. Raises ApiError 400."""
    services.need_task("embed")
    prompts, width = to_prompts(request, services), services.resolved.model.hidden_size
    if request.dimensions is not None and not 1 <= request.dimensions <= width:
        raise ApiError(400, f"dimensions is {request.dimensions}; it must be from 1 to {width}", "dimensions")
    check_encoding(request)
    return prompts


def _is_normalized(request: EmbeddingRequest) -> bool | None:
    """Whether the request asks for vectors of length 1; None: it does not say."""
    return request.use_activation if request.normalize is None else request.normalize


async def send_bytes(context: RequestContext, services: Services, request: EmbeddingRequest, vectors: np.ndarray, count: int) -> None:
    """Send the vectors as bytes. Raises ApiError 400."""
    head = None
    if request.encoding_format == "bytes":
        name, model = f"embd-{uuid.uuid4().hex}", services.response_model(request.model)
        head = {"id": name, "created": int(time.time()), "model": model, "usage": usage(count)}
    await respond_bytes(context, vectors, request.embed_dtype, head)


def check_encoding(request: EmbeddingRequest) -> None:
    """Raise ApiError 400 for fields that contradict each other."""
    if None not in (request.normalize, request.use_activation) and request.normalize is not request.use_activation:
        raise ApiError(400, "normalize and use_activation contradict each other; send one of them", "use_activation")
    if request.embed_dtype not in (None, "float32") and request.encoding_format in (None, "float"):
        sentence = f"embed_dtype {request.embed_dtype} needs encoding_format base64 or bytes; send both, or neither"
        raise ApiError(400, sentence, "embed_dtype")


def to_prompts(request: EmbeddingRequest, services: Services) -> list[Prompt]:
    """The inputs as a list, with the prompt of `prompt_name` before each text. Raises ApiError 400
    for mixed kinds of inputs, or an unknown prompt."""
    sent: Any = request.input
    if (sent is None) == (request.messages is None):
        raise ApiError(400, "send either input or messages", "input")
    if request.messages is not None:
        if request.prompt_name is not None:
            raise ApiError(400, "prompt_name is for texts in input; leave it out", "prompt_name")
        return [Chat(to_template_messages(request.messages), None, {"add_generation_prompt": False})]
    several: list[Any] = [sent] if isinstance(sent, str) or (sent and isinstance(sent[0], int)) else sent
    check_count(len(several), "input")
    kind = str if isinstance(several[0], str) else list
    if not all(isinstance(one, kind) for one in several) or (kind is list and not all(type(i) is int for one in several for i in one)):
        raise ApiError(400, "input mixes kinds; send a string, a list of strings, token ids, or a list of lists of token ids", "input")
    lead = lead_of(services, request.prompt_name)
    return [f"{lead}{text}" for text in several] if kind is str and lead else several


def lead_of(services: Services, prompt_name: str | None) -> str:
    """The checkpoint's prompt of this name, else its default one. Raises ApiError 400."""
    try:
        return (services.resolved.model.sentence or SentenceTransformersConfig()).lead(prompt_name)
    except ValueError as error:
        raise ApiError(400, str(error), "prompt_name") from None


# classes ------------------------------------------------------------------------------------------

Classification = declare("Classification", "index label num_classes", probs=list[float])
ClassificationList = declare("ClassificationList", "labels", base=PoolingReply, data=array(Classification))


class ClassifyRequest(ActivationFields):
    input: str | list[str]


@router.post("/v1/classify", responses=responds_with(ClassificationList))
@router.post("/classify", responses=responds_with(ClassificationList))
async def classify(request: ClassifyRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Classify texts."""
    vectors, count = await classify_texts(context, services, request)
    names = get_labels(services)
    data = (
        {"index": index, "label": names[int(row.argmax())], "probs": row.tolist(), "num_classes": len(names)}
        for index, row in enumerate(vectors)
    )
    model = services.response_model(request.model)
    return list_reply(model, f"classify-{uuid.uuid4().hex}", data, count, vectors.size, {"labels": names})


async def classify_texts(context: Caller, services: Services, request: ClassifyRequest) -> tuple[np.ndarray, int]:
    """(probabilities float32 [texts, labels], number of prompt tokens). Raises ApiError."""
    services.need_task("classify")
    texts = [request.input] if isinstance(request.input, str) else request.input
    check_count(len(texts), "input")
    vectors, count = await compute_classes(context, services, request, texts)
    names = get_labels(services)
    if len(names) != vectors.shape[1]:
        raise ApiError(500, f"the model has {vectors.shape[1]} outputs, and its config.json names {len(names)} classes")
    return vectors, count


async def compute_classes(
    context: Caller, services: Services, request: ActivationFields, prompts: Sequence[Prompt]
) -> tuple[np.ndarray, int]:
    """(probabilities, or logits without `use_activation`, float32 [prompts, labels]; number of
    prompt tokens). Raises ApiError."""
    logits, count = await compute_vectors(context, services, request, prompts, ("classify",))
    return logits if request.use_activation is False else finished(logits, services.resolved.pooling), count


def get_labels(services: Services) -> list[str]:
    """The names of a classifier's outputs, in order."""
    pooling = services.resolved.pooling
    return list(pooling.label_tokens if pooling and pooling.label_tokens else services.resolved.model.labels)
