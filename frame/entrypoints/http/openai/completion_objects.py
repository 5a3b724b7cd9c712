"""The response bodies of chat completions and completions: their types, their log-probabilities,
and the events of their streams.

Log-probabilities are in OpenAI's shapes (chat, completions, Responses) and in vLLM's
`prompt_logprobs`. In the events, what is equal in every chunk of a response is written once, and
only a chunk's text goes through a JSON encoder. Used by the OpenAI routes and by dialects that
reply in the same shapes. Must not depend on a route or the engine.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import GenericAlias
from typing import Any, Literal, NotRequired

import msgspec

from frame.core.messages import Finish, TokenLogprobs
from frame.entrypoints.engine_client.response_state import SequenceState
from frame.entrypoints.http.paced_json import Event, array_type, encode_steps
from frame.entrypoints.http.response_types import CachedTokens, array, declare
from frame.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "tool_calls", "function_call", "abort", "error"]

WeightVersionOf = declare("WeightVersionOf", "version", "`first_token`: index of the first output token of these weights.", first_token=int)
_Metadata = declare("CompletionMetadata", "weight_version")
ReasoningTokens = declare("ReasoningTokens", "reasoning_tokens")
CompletionTokensDetails = declare(
    "CompletionTokensDetails",
    "reasoning_tokens? accepted_prediction_tokens? rejected_prediction_tokens?",
    "`reasoning_tokens`: of chats. The others: drafted tokens of speculative decoding.",
)
Usage = declare(
    "Usage",
    "prompt_tokens completion_tokens total_tokens",
    "Numbers of tokens. Each prompt counts once, even with `n` choices.",
    prompt_tokens_details=CachedTokens,
    completion_tokens_details=NotRequired[CompletionTokensDetails],
)
FunctionCall = declare("FunctionCall", "name arguments", "`arguments` is JSON text.")
ToolCall = declare("ToolCall", "id", type="function", function=FunctionCall)
FunctionCallDelta = declare("FunctionCallDelta", "name? arguments")
ToolCallDelta = declare(
    "ToolCallDelta",
    "index id?",
    "A piece of the tool call with this index. The first piece has id, type and name.",
    type=NotRequired[Literal["function"]],
    function=FunctionCallDelta,
)
TopLogprob = declare("TopLogprob", "token logprob", "`bytes`: the token in UTF-8.", bytes=list[int])
TokenLogprob = declare("TokenLogprob", base=TopLogprob, top_logprobs=array(TopLogprob))
ChatLogprobs = declare("ChatLogprobs", content=array(TokenLogprob))
PromptLogprob = declare("PromptLogprob", "logprob rank decoded_token", "An entry of vLLM's `prompt_logprobs`. `rank` counts from 1.")
PromptLogprobs = array(GenericAlias(dict, (str, PromptLogprob)) | None)  # by token id; null for the first token
ChatMessage = declare(
    "ChatMessage",
    "role refusal reasoning_content? reasoning?",
    "`reasoning` and `reasoning_content` are the same text.",
    content=str | None,
    tool_calls=NotRequired[array(ToolCall)],
    function_call=NotRequired[FunctionCall],
)
ChatDelta = declare(
    "ChatDelta",
    "role? refusal? reasoning_content? reasoning?",
    content=NotRequired[str | None],
    tool_calls=NotRequired[array(ToolCallDelta)],
    function_call=NotRequired[FunctionCallDelta],
)
_AnyChoice = declare(
    "AnyChoice",
    "index token_ids? prompt_token_ids?",
    "`weight_versions`: where several versions of the weights have made it. `hidden_states`: of the last token that the model read.",
    hidden_states=NotRequired[list[float]],
    finish_reason=FinishReason | None,
    weight_versions=NotRequired[array(WeightVersionOf)],
)
# `stop_reason` (vLLM) and `matched_stop` (SGLang): the stop string or token that ended it.
_Choice = declare("Choice", "matched_stop", base=_AnyChoice, stop_reason=str | int | None)
_ChunkChoice = declare("ChunkChoice", "matched_stop?", base=_AnyChoice, stop_reason=NotRequired[str | int | None])
_ChatChoice = declare("ChatChoice", base=_Choice, message=ChatMessage, logprobs=ChatLogprobs | None)
_ChatChunkChoice = declare("ChatChunkChoice", base=_ChunkChoice, delta=ChatDelta, logprobs=ChatLogprobs | None)
_Head = declare("ResponseHead", "id created model system_fingerprint service_tier")
_ChunkHead = declare("ChunkHead", base=_Head, usage=NotRequired[Usage | None], metadata=NotRequired[_Metadata])
_PROMPT_FIELDS: dict[str, Any] = {"prompt_token_ids": NotRequired[list[int]], "prompt_logprobs": NotRequired[PromptLogprobs]}
_Transfer = NotRequired[dict[str, Any]]  # of a prefill server's response; see docs/disaggregation.md
ChatCompletion = declare(
    "ChatCompletion",
    base=_Head,
    object="chat.completion",
    choices=array(_ChatChoice),
    usage=Usage,
    metadata=_Metadata,
    kv_transfer_params=_Transfer,
    **_PROMPT_FIELDS,
)
ChatCompletionChunk = declare(
    "ChatCompletionChunk",
    doc="An event of a streamed chat completion. The stream ends with `data: [DONE]`.",
    base=_ChunkHead,
    object="chat.completion.chunk",
    choices=array(_ChatChunkChoice),
    **_PROMPT_FIELDS,
)
CompletionLogprobs = declare(
    "CompletionLogprobs", "text_offset", tokens=list[str], token_logprobs=list[float | None], top_logprobs=list[dict[str, float] | None]
)
_CompletionChoice = declare(
    "CompletionChoice", "text", base=_Choice, logprobs=CompletionLogprobs | None, prompt_logprobs=NotRequired[PromptLogprobs]
)
_CompletionChunkChoice = declare("CompletionChunkChoice", "text", base=_ChunkChoice, logprobs=CompletionLogprobs | None)
Completion = declare(
    "Completion",
    base=_Head,
    object="text_completion",
    choices=array(_CompletionChoice),
    usage=Usage,
    metadata=_Metadata,
    kv_transfer_params=_Transfer,
)
CompletionChunk = declare(
    "CompletionChunk",
    doc="An event of a streamed completion. The stream ends with `data: [DONE]`.",
    base=_ChunkHead,
    object="text_completion",
    choices=array(_CompletionChunkChoice),
)


# log-probabilities --------------------------------------------------------------------------------


MIN_LOGPROB = -9999.0  # written for minus infinity, which JSON does not have; vLLM's value


class TextOffsets:
    """The `text_offset` of the tokens of one sequence, in characters, for tokens in order.

    A token that begins inside a multi-byte character has the offset of that character. Special
    tokens that are left out of the text have no length.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def next_offset(self, token_id: int) -> int:
        """The offset of the next token of the sequence."""
        offset = self._offset
        if token_id not in self._hidden:
            self._offset += len(self._decoder.decode(self._tokenizer.get_token_bytes(token_id)))
        return offset


Name = Callable[[int], str]  # token id -> the token as the response shows it


def token_namer(tokenizer: Tokenizer, as_ids: bool | None) -> Name:
    """Names tokens by their text or, with vLLM's `return_tokens_as_token_ids`, as `token_id:ID`."""
    return (lambda token_id: f"token_id:{token_id}") if as_ids else tokenizer.get_token_text


def _unique_namer(tokenizer: Tokenizer, as_ids: bool | None) -> Name:
    """Like `token_namer`, but a token that is a part of a character is named by its bytes
    (`bytes:\\xe9`, OpenAI's form), so that two tokens have two keys in `top_logprobs`."""
    by_text = token_namer(tokenizer, as_ids)

    def name(token_id: int) -> str:
        text = by_text(token_id)
        if "\ufffd" not in text:
            return text
        data = tokenizer.get_token_bytes(token_id)
        return text if data == text.encode() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    return name


def count_logprobs(pieces: list[TokenLogprobs]) -> int:
    """The log-probabilities of the tokens and of their alternatives."""
    return sum(len(piece.token_ids) * (1 + len(piece.top[-1] if piece.top else ())) for piece in pieces)


def chat_logprobs(pieces: list[TokenLogprobs], tokenizer: Tokenizer, name: Name) -> dict[str, Any]:
    """`{"content": [{token, logprob, bytes, top_logprobs}]}`. Large arrays are `Entries`."""
    return {"content": array_type(count_logprobs(pieces))(chat_entries(pieces, tokenizer, name))}


def chat_entries(pieces: Iterable[TokenLogprobs], tokenizer: Tokenizer, name: Name) -> Iterator[dict[str, Any]]:
    """The entries of `chat_logprobs`."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        value = MIN_LOGPROB if logprob is None else max(logprob, MIN_LOGPROB)
        return {"token": name(token_id), "logprob": value, "bytes": list(tokenizer.get_token_bytes(token_id))}

    for token_id, logprob, top in _tokens_of(pieces):
        # once where a token is among the likeliest and in `logprob_token_ids`
        yield {**entry(token_id, logprob), "top_logprobs": [entry(other, value) for other, value in dict(top).items()]}


class TextLogprobs:
    """Assigns the log-probabilities of tokens to the pieces of text that the output parsers return.
    Tokens that are in no piece, such as the tags of a tool call, are left out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pending: list[tuple[str, msgspec.Raw]] = []  # text, and the entry as in `chat_logprobs`, in JSON

    def add(self, pieces: Iterable[TokenLogprobs]) -> None:
        """Add the tokens since the last call."""
        entries = chat_entries(pieces, self._tokenizer, self._tokenizer.get_token_text)
        self._pending += ((entry["token"], msgspec.Raw(msgspec.json.encode(entry))) for entry in entries)

    def take_logprobs(self, piece: str) -> list[msgspec.Raw]:
        """Remove and return the entries of the tokens that `piece` was made of. All pending entries
        where the piece is not found among them, as inside a multi-byte character."""
        pending, self._pending = self._pending, []
        start, offset = "".join(text for text, _ in pending).find(piece), 0
        if start < 0:
            return [entry for _, entry in pending]
        taken: list[msgspec.Raw] = []
        for text, entry in pending:
            after = offset + len(text)
            if offset >= start + len(piece):
                self._pending.append((text, entry))
            elif after > start:
                taken.append(entry)
            offset = after
        return taken


def completion_logprobs(
    pieces: list[TokenLogprobs], tokenizer: Tokenizer, as_ids: bool | None, text_offsets: TextOffsets
) -> dict[str, Any]:
    """`{tokens, token_logprobs, top_logprobs, text_offset}`; `text_offsets` was given the
    sequence's earlier tokens. `as_ids`: see `token_namer`. Large arrays are `Entries`."""
    name, array = _unique_namer(tokenizer, as_ids), array_type(count_logprobs(pieces))
    if array is list:  # one pass, for the few tokens of an event
        rows = [(name(i), logprob, top, text_offsets.next_offset(i)) for i, logprob, top in _tokens_of(pieces)]
        return {
            "tokens": [text for text, _, _, _ in rows],
            "token_logprobs": [None if logprob is None else max(logprob, MIN_LOGPROB) for _, logprob, _, _ in rows],
            "top_logprobs": [None if logprob is None else _alternatives(text, logprob, top, name) for text, logprob, top, _ in rows],
            "text_offset": [offset for _, _, _, offset in rows],
        }
    return {
        "tokens": array(name(token_id) for token_id, _, _ in _tokens_of(pieces)),
        "token_logprobs": array(None if logprob is None else max(logprob, MIN_LOGPROB) for _, logprob, _ in _tokens_of(pieces)),
        "top_logprobs": array(
            None if logprob is None else _alternatives(name(token_id), logprob, top, name) for token_id, logprob, top in _tokens_of(pieces)
        ),
        "text_offset": array(text_offsets.next_offset(token_id) for token_id, _, _ in _tokens_of(pieces)),
    }


def _tokens_of(pieces: Iterable[TokenLogprobs]) -> Iterator[tuple[int, float | None, list[tuple[int, float]]]]:
    """(id, log-probability, alternatives) of each token."""
    for piece in pieces:
        yield from zip(piece.token_ids, piece.logprobs, piece.top, strict=True)


def prompt_logprobs(logprobs: TokenLogprobs, name: Name) -> Any:
    """vLLM's `prompt_logprobs`: for each prompt token the entries of itself and of the most likely
    tokens. A large array is `Entries`.

    An entry is `{id: {logprob, rank, decoded_token}}`; `rank` counts from 1. The first prompt token
    has None.
    """
    return array_type(count_logprobs([logprobs]))(_prompt_entries(logprobs, name))


def _prompt_entries(logprobs: TokenLogprobs, name: Name) -> Iterator[dict[str, dict[str, Any]] | None]:
    ranks = logprobs.ranks or [None] * len(logprobs.token_ids)
    for token_id, logprob, top, rank_of_token in zip(logprobs.token_ids, logprobs.logprobs, logprobs.top, ranks, strict=True):
        if logprob is None:
            yield None
            continue
        ranked: list[tuple[int, float, int | None]] = [(other, value, rank) for rank, (other, value) in enumerate(top, 1)]
        if all(other != token_id for other, _ in top):
            ranked.append((token_id, logprob, rank_of_token))
        yield {str(i): {"logprob": max(p, MIN_LOGPROB), "rank": r, "decoded_token": name(i)} for i, p, r in ranked}


def _alternatives(text: str, logprob: float, top: list[tuple[int, float]], name: Name) -> dict[str, float]:
    """OpenAI's `top_logprobs` of one token, which is always among them."""
    alternatives: dict[str, float] = {}
    for other, value in top:
        alternatives.setdefault(name(other), max(value, MIN_LOGPROB))
    alternatives.setdefault(text, max(logprob, MIN_LOGPROB))
    return alternatives


# events -------------------------------------------------------------------------------------------

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


class ChunkWriter:
    """The events of one response. `head`: the fields of every chunk, whose `object` is
    "chat.completion.chunk" or "text_completion"; `has_usage`: chunks carry `"usage": null` (or
    numbers), because the client asked for usage."""

    def __init__(self, head: dict[str, Any], has_usage: bool) -> None:
        self._head = b"data: " + _encode(head)[:-1]
        self._open = self._head + b',"choices":[{"index":'
        self._is_chat = head["object"] == "chat.completion.chunk"
        self._field = b',"delta":{"content":' if self._is_chat else b',"text":'
        self._middle = b"}" if self._is_chat else b""
        self._null_usage = b',"usage":null' if has_usage else b""
        self._plain_end = self._middle + b',"logprobs":null,"finish_reason":null}]' + self._null_usage + b"}\n\n"
        self._starts: dict[int, bytes] = {}

    def text(self, index: int, text: str) -> bytes:
        """A piece of text and nothing else: the hot path."""
        start = self._starts.get(index)
        if start is None:
            start = self._starts[index] = self._open + b"%d" % index + self._field
        return start + _encode(text) + self._plain_end

    def full(
        self, index: int, delta: dict[str, Any] | str, finish: str | None = None, logprobs: Any = None, usage: dict[str, Any] | None = None,
        choice: dict[str, Any] | None = None, chunk: dict[str, Any] | None = None,
    ) -> Event:  # fmt: skip
        """Any chunk: a chat delta or a text, with logprobs, a finish reason, running usage, and
        further fields of the choice and the chunk. In steps where one of them has `Entries`."""
        body = {"delta" if self._is_chat else "text": delta, "logprobs": logprobs, "finish_reason": finish, **(choice or {})}
        tail = self._null_usage if usage is None else b',"usage":' + _encode(usage)
        try:
            if chunk:
                tail += b"," + _encode(chunk)[1:-1]
            return self._open + b"%d," % index + _encode(body)[1:] + b"]" + tail + b"}\n\n"
        except TypeError:  # msgspec's for `Entries`
            return self._encode_steps(index, body, tail, chunk or {})

    def _encode_steps(self, index: int, body: dict[str, Any], tail: bytes, chunk: dict[str, Any]) -> Iterator[bytes]:
        steps = encode_steps(body)
        yield self._open + b"%d," % index + next(steps)[1:]
        yield from steps
        yield b"]" + tail
        for name, value in chunk.items():
            yield b"," + _encode(name) + b":"
            yield from encode_steps(value)
        yield b"}\n\n"

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk before [DONE]: no choices, the numbers of the whole response."""
        return self._head + b',"choices":[],"usage":' + _encode(usage) + b"}\n\n"


def usage_of(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def list_tiers(sequences: Sequence[SequenceState]) -> dict[str, dict[str, int]]:
    """Where the cached tokens came from, if some came from a tier."""
    tiers: Counter[str] = Counter()
    for sequence in sequences:
        tiers.update(sequence.cached_tiers)
    if not tiers:
        return {}
    device = sum(sequence.cached for sequence in sequences) - tiers.total()
    return {"cached_tokens_by_tier": {"device": max(0, device), **tiers}}


def end_fields(sequence: SequenceState) -> dict[str, Any]:
    """What ended a choice: `matched_stop` as SGLang has it, `stop_reason` as vLLM, which is null
    for the model's own end token. `weight_versions`: where several have made it."""
    matched = sequence.finish.matched if sequence.finish is not None else None
    is_asked = isinstance(matched, str) or matched in sequence.params.stop_token_ids
    return {"matched_stop": matched, "stop_reason": matched if is_asked else None, **list_versions(sequence)}


def list_versions(sequence: SequenceState) -> dict[str, Any]:
    """The field `weight_versions`, if several versions of the weights have made the sequence."""
    if len(versions := sequence.weight_versions) < 2:
        return {}
    return {"weight_versions": [{"first_token": first, "version": version} for first, version in versions]}


def finish_reason(finish: Finish | None, has_calls: bool = False) -> str | None:
    """How OpenAI calls the end of a sequence."""
    if finish is None:
        return None
    return "tool_calls" if has_calls and finish.reason == "stop" else finish.reason
