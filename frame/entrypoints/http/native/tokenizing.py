"""Text to token ids and back: `/tokenize` and `/detokenize` of vLLM and SGLang. `/tokenize` takes
the requests of text-embeddings-inference too. Must not depend on the engine."""

from __future__ import annotations

import asyncio
from typing import Any

from frame.entrypoints.http.chat.chat_request import encode_chat
from frame.entrypoints.http.chat.request_fields import TemplateFields
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.native.pooling import check_count, lead_of
from frame.entrypoints.http.openai.completions_schema import ChatRequest
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.request_body import RequestBody
from frame.entrypoints.http.request_starter import countable_tokens, encode_prompt
from frame.entrypoints.http.response_types import array, declare
from frame.entrypoints.http.services import Services
from frame.text.tokenizer import SHORT, Tokenizer

router = ApiRouter(access=Access.USER)


class TokenizeRequest(TemplateFields):
    """A text, or messages with the fields of a chat request that the prompt depends on. `inputs`:
    texts of a client of text-embeddings-inference, with `prompt_name`."""

    model: str = ""
    text: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = False
    inputs: str | list[str] | None = None
    prompt_name: str | None = None

    def to_chat_request(self) -> ChatRequest:
        """The messages as a chat request."""
        fields = {name: getattr(self, name) for name in TemplateFields.model_fields}
        return ChatRequest(model=self.model, messages=self.messages or [], **fields)


class DetokenizeRequest(RequestBody):
    tokens: list[int]
    model: str = ""
    skip_special_tokens: bool = False


TokenizeResult = declare("TokenizeResult", "count max_model_len token_strs?", tokens=list[int])
DetokenizeResult = declare("DetokenizeResult", "text prompt", "`text` and `prompt` are the same.")
TokenCard = declare(
    "TokenCard",
    "text",
    "A token, as text-embeddings-inference describes it. `start` and `stop`: characters of the text; null for special tokens.",
    id=int,
    special=bool,
    start=int | None,
    stop=int | None,
)


@router.post("/tokenize", responses=responds_with(TokenizeResult | array(array(TokenCard))))
@router.post("/v1/tokenize", responses=responds_with(TokenizeResult | array(array(TokenCard))))
async def tokenize(request: TokenizeRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Convert text or messages to token ids."""
    services.check_model(request.model, context.tenant)
    tokenizer = services.need_tokenizer()
    text = request.text if request.text is not None else request.prompt
    if [text, request.messages, request.inputs].count(None) != 2:
        raise ApiError(400, "send one of text (or prompt), messages and inputs", "text")
    if request.inputs is not None:
        return await _describe_inputs(request, services, context.tenant)
    if request.messages is not None:
        ids = await encode_chat(context, services, request.to_chat_request())
    else:
        ids = await encode_prompt(services, text or "", request.add_special_tokens is not False, countable_tokens(services))
    result: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": services.resolved.max_context}
    if request.return_token_strs:
        async with services.text_turns.hold_slot(context.tenant):
            result["token_strs"] = await asyncio.to_thread(lambda: [tokenizer.get_token_text(i) for i in ids])
    return result


async def _describe_inputs(request: TokenizeRequest, services: Services, tenant: str) -> list[list[dict[str, Any]]]:
    """The tokens of each of `inputs`. Raises ApiError 400."""
    texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs or []
    check_count(len(texts), "inputs")
    lead, special, tokenizer = lead_of(services, request.prompt_name), request.add_special_tokens is not False, services.need_tokenizer()
    described = []
    for text in texts:
        ids = await encode_prompt(services, lead + text, special)
        async with services.text_turns.hold_slot(tenant):
            described.append(await asyncio.to_thread(describe_tokens, tokenizer, lead + text, ids, special))
    return described


def describe_tokens(tokenizer: Tokenizer, text: str, ids: list[int], special: bool) -> list[dict[str, Any]]:
    """The `TokenCard` of each token. ids: those of the text; special: with special tokens."""
    encoding = tokenizer.backend.encode(text, add_special_tokens=special)
    num_leading = len(ids) - len(encoding.ids)  # a bos token that the tokenizer does not add itself
    offsets = getattr(encoding, "offsets", None) or [(None, None)] * len(encoding.ids)  # of Python code there are none
    places = [(None, None)] * num_leading + list(offsets)
    is_special = [True] * num_leading + [bool(each) for each in encoding.special_tokens_mask]
    cards = []
    for token, (start, stop), special_token in zip(ids, places, is_special, strict=True):
        where = {"start": None, "stop": None} if special_token else {"start": start, "stop": stop}
        cards.append({"id": token, "text": tokenizer.get_token_text(token), "special": special_token, **where})
    return cards


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
