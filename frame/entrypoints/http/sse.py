"""Server-sent events of OpenAI streams, as bytes: what is equal in every chunk of a response is
written once. Only a chunk's text goes through a JSON encoder. Must not know an engine or a
socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish
from frame.entrypoints.http.paced_json import Event, encode_steps

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


def end_fields(finish: Finish | None, params: SamplingParams) -> dict[str, Any]:
    """What ended a choice: `matched_stop` as SGLang has it, `stop_reason` as vLLM, which is null
    for the model's own end token."""
    matched = finish.matched if finish is not None else None
    is_asked = isinstance(matched, str) or matched in params.stop_token_ids
    return {"matched_stop": matched, "stop_reason": matched if is_asked else None}


def finish_reason(finish: Finish | None, has_calls: bool = False) -> str | None:
    """How OpenAI calls the end of a sequence."""
    if finish is None:
        return None
    return "tool_calls" if has_calls and finish.reason == "stop" else finish.reason
