"""The JSON of `/generate` for `Client`: prompts and parameters to a request body, results and
events to outputs. Must not know a connection."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from frame.core.messages import TokenLogprobs
from frame.entrypoints.engine_client.limits import InvalidRequestError, to_fields
from frame.entrypoints.offline.collector import Delta, Output, group_outputs
from frame.entrypoints.offline.prompts import EngineError, Params, check_text, expand_params, has_media, to_list, to_token_ids

_decode = msgspec.json.Decoder().decode
DATA = "data: "


class Job:
    """One call: the request's `body`, and the outputs that its response becomes. If all prompts are
    texts they are sent as texts; else the server's tokenizer first converts all to token ids."""

    def __init__(
        self,
        prompts: Any,
        params: Params | Sequence[Params] | None,
        encode: Callable[[str], list[int]],
        encode_chat: Callable[[list[dict[str, Any]]], list[int]],
    ) -> None:
        self._is_single, several = to_list(prompts)
        self.count = len(several)
        all_params = expand_params(params, self.count)
        self._params = [each for each in all_params for _ in range(each.n)]  # one per sequence
        self._counts = [each.n for each in all_params]
        self._outputs = [Output() for _ in self._params]
        self.body: dict[str, Any] = {}
        if all(isinstance(prompt, str) for prompt in several):
            self.body["text"] = [check_text(str(prompt)) for prompt in several]
        else:
            self.body["input_ids"] = [_ids(prompt, encode, encode_chat) for prompt in several]
        if params is not None:
            # The server's default is 128 tokens, so a max_tokens of None is sent explicitly
            bare = [msgspec.structs.replace(each, return_hidden_states=False) for each in all_params]
            self.body["sampling_params"] = [{"max_tokens": None, **to_fields(each)} for each in bare]
        self.body["return_logprob"] = any(each.logprobs is not None or each.prompt_logprobs is not None for each in all_params)

        if any(each.return_hidden_states for each in all_params):
            self.body["return_hidden_states"] = True

    def parse_results(self, results: list[dict[str, Any]]) -> Output | list[Output]:
        """The outputs of a complete response: one, or one per prompt."""
        for place, result in enumerate(results):
            self._update(place, result)
        firsts = group_outputs(self._outputs, self._counts)
        return firsts[0] if self._is_single else firsts

    def parse_event(self, event: dict[str, Any]) -> Delta:
        """What a stream's event adds to its sequence. Raises the error that the event reports."""
        if "error" in event:
            raise make_error(event, None)
        place = int(event.get("index", 0))
        output = self._outputs[place]
        had_text, had_ids = len(output.text), len(output.token_ids)
        self._update(place, event)
        return Delta(place, output.text[had_text:], output.token_ids[had_ids:], output)

    def _update(self, place: int, result: dict[str, Any]) -> None:
        output, params, meta = self._outputs[place], self._params[place], result["meta_info"]
        output.text, output.token_ids = result["text"], result["output_ids"]
        output.prompt_tokens, output.cached_tokens = meta["prompt_tokens"], meta["cached_tokens"]
        if (reason := meta["finish_reason"]) is not None:
            output.finish_reason, output.matched = reason["type"], reason.get("matched")
        if params.logprobs is not None:
            output.logprobs = _logprobs(meta, "output")
        if params.prompt_logprobs is not None and "input_token_logprobs" in meta:
            output.prompt_logprobs = _logprobs(meta, "input")
        if params.return_hidden_states:
            of_prompt, *of_output = meta["hidden_states"]
            output.hidden_states = np.array([*of_prompt, *of_output], np.float32)


def parse_line(line: str) -> dict[str, Any] | None:
    """The JSON of a line of the event stream; None for a line without."""
    if not line.startswith(DATA) or line == f"{DATA}[DONE]":
        return None
    event: dict[str, Any] = _decode(line.removeprefix(DATA))
    return event


def make_error(body: Any, status: int | None) -> Exception:
    """InvalidRequestError for an error in the request, EngineError for any other."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return EngineError(f"the server answered with status {status}")
    message = str(error.get("message"))
    if error.get("type") in ("invalid_request_error", "not_found_error"):
        return InvalidRequestError(message, error.get("param"))
    return EngineError(message)


def decode_vectors(rows: list[dict[str, Any]]) -> np.ndarray:
    """Embeddings in base64 as float32 [rows, width]."""
    if not rows:
        return np.empty((0, 0), np.float32)
    return np.stack([np.frombuffer(base64.b64decode(row["embedding"]), np.float32) for row in rows])


def _ids(prompt: Any, encode: Callable[[str], list[int]], encode_chat: Callable[[list[dict[str, Any]]], list[int]]) -> list[int]:
    if isinstance(prompt, str):
        return encode(check_text(prompt))
    if has_media(prompt):
        sentence = "a Client sends text and token ids; send images, video and audio with OpenAI's client to /v1/chat/completions"
        raise InvalidRequestError(sentence, "prompt")
    return encode_chat(prompt) if prompt and isinstance(prompt[0], dict) else to_token_ids(prompt)


def _logprobs(meta: dict[str, Any], side: str) -> TokenLogprobs:
    triples = meta[f"{side}_token_logprobs"]
    top = [[(token, value) for value, token, _ in tops] for tops in meta[f"{side}_top_logprobs"]]
    for entries, listed in zip(top, meta.get(f"{side}_token_ids_logprobs", ()), strict=False):
        entries += [(token, value) for value, token, _ in listed]
    return TokenLogprobs([token for _, token, _ in triples], [value for value, _, _ in triples], top)
