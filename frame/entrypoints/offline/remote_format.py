"""What `Client` sends to `/generate` and makes of the answers: prompts and parameters to JSON, results and events to outputs.

Knows no connection.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import TokenLogprobs
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.entrypoints.offline.collector import Delta, Output
from frame.entrypoints.offline.prompts import EngineError, Params, checked_text, listed, spread, token_ids_of

_decode = msgspec.json.Decoder().decode
DATA = "data: "


class Job:
    """One call: `body` for the server, and the outputs that its answers become.

    Texts alone go as they are; where other prompts are among them, the server's tokenizer makes ids of all.
    """

    def __init__(
        self,
        prompts: Any,
        params: Params | Sequence[Params] | None,
        encode: Callable[[str], list[int]],
        encode_chat: Callable[[list[dict[str, Any]]], list[int]],
    ) -> None:
        self._is_single, several = listed(prompts)
        self.count = len(several)
        wanted = spread(params, self.count)
        self._wanted = [own for own in wanted for _ in range(own.n)]  # one a sequence
        self._counts = [own.n for own in wanted]
        self._outputs = [Output() for _ in self._wanted]
        self.body: dict[str, Any] = {}
        if all(isinstance(prompt, str) for prompt in several):
            self.body["text"] = [checked_text(str(prompt)) for prompt in several]
        else:
            self.body["input_ids"] = [_ids(prompt, encode, encode_chat) for prompt in several]
        if params is not None:
            self.body["sampling_params"] = [_as_json(own) for own in wanted]
        self.body["return_logprob"] = any(own.logprobs is not None or own.prompt_logprobs is not None for own in wanted)

    def results(self, answers: list[dict[str, Any]]) -> Output | list[Output]:
        """The outputs of a whole answer: one, or one a prompt, the first of its siblings."""
        for place, answer in enumerate(answers):
            self._take(place, answer)
        left = iter(self._outputs)
        firsts = []
        for count in self._counts:
            siblings = [next(left) for _ in range(count)]
            siblings[0].outputs = siblings
            firsts.append(siblings[0])
        return firsts[0] if self._is_single else firsts

    def delta(self, event: dict[str, Any]) -> Delta:
        """What an event adds to its sequence. Raises what the event says."""
        if "error" in event:
            raise error_of(event, None)
        place = int(event.get("index", 0))
        output = self._outputs[place]
        had_text, had_ids = len(output.text), len(output.token_ids)
        self._take(place, event)
        return Delta(place, output.text[had_text:], output.token_ids[had_ids:], output)

    def _take(self, place: int, answer: dict[str, Any]) -> None:
        output, wanted, meta = self._outputs[place], self._wanted[place], answer["meta_info"]
        output.text, output.token_ids = answer["text"], answer["output_ids"]
        output.prompt_tokens, output.cached_tokens = meta["prompt_tokens"], meta["cached_tokens"]
        if (reason := meta["finish_reason"]) is not None:
            output.finish_reason, output.matched = reason["type"], reason.get("matched")
        if wanted.logprobs is not None:
            output.logprobs = _logprobs(meta, "output")
        if wanted.prompt_logprobs is not None and "input_token_logprobs" in meta:
            output.prompt_logprobs = _logprobs(meta, "input")


def event_of(line: str) -> dict[str, Any] | None:
    """The JSON of a line of the stream; None for lines that hold none."""
    if not line.startswith(DATA) or line == f"{DATA}[DONE]":
        return None
    event: dict[str, Any] = _decode(line.removeprefix(DATA))
    return event


def error_of(body: Any, status: int | None) -> Exception:
    """What to raise for the server's error. A fault of the request is InvalidRequestError, everything else EngineError."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return EngineError(f"the server answered with status {status}")
    message = str(error.get("message"))
    if error.get("type") in ("invalid_request_error", "not_found_error"):
        return InvalidRequestError(message, error.get("param"))
    return EngineError(message)


def vectors_of(rows: list[dict[str, Any]]) -> np.ndarray:
    """float32 [rows, width] of embeddings in base64."""
    if not rows:
        return np.empty((0, 0), np.float32)
    return np.stack([np.frombuffer(base64.b64decode(row["embedding"]), np.float32) for row in rows])


def _ids(prompt: Any, encode: Callable[[str], list[int]], encode_chat: Callable[[list[dict[str, Any]]], list[int]]) -> list[int]:
    if isinstance(prompt, str):
        return encode(checked_text(prompt))
    return encode_chat(prompt) if prompt and isinstance(prompt[0], dict) else token_ids_of(prompt)


def _as_json(params: SamplingParams) -> dict[str, Any]:
    """As the server reads them; no `max_tokens` means the context's end here, and 128 there."""
    return {"max_tokens": None, **msgspec.to_builtins(params, str_keys=True)}


def _logprobs(meta: dict[str, Any], side: str) -> TokenLogprobs:
    triples = meta[f"{side}_token_logprobs"]
    top = [[(token, value) for value, token, _ in tops] for tops in meta[f"{side}_top_logprobs"]]
    return TokenLogprobs([token for _, token, _ in triples], [value for value, _, _ in triples], top)
