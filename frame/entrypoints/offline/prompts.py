"""Prompts and parameters in the forms that the offline `Engine` and the remote `Client` take, and
the errors of both. Must not know an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from frame.core.errors import did_you_mean
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.text.chat_template import ChatTemplateError

if TYPE_CHECKING:
    from frame.text.tokenizer import Tokenizer

Prompt = str | list[int] | list[dict[str, Any]] | dict[str, Any]  # the last one: a text with media
Params = SamplingParams | Mapping[str, Any]


class EngineError(RuntimeError):
    """The engine or the server has crashed, failed or cannot be reached. `outputs`: of an offline
    call, all sequences in order with what was generated; those without an `error` are finished."""

    outputs: Sequence[Any] = ()

    def __init__(self, sentence: str, outputs: Sequence[Any] = ()) -> None:
        super().__init__(sentence)
        self.outputs = outputs


def to_list(prompts: Any) -> tuple[bool, list[Prompt]]:
    """(whether a single prompt was given, the prompts as a list). Arrays of token ids become
    lists."""
    prompts = _without_arrays(prompts)
    if isinstance(prompts, str) or (isinstance(prompts, dict) and "prompt" in prompts):
        return True, [prompts]
    if not isinstance(prompts, list | tuple):
        raise _not_a_prompt(prompts)
    several = [_without_arrays(prompt) for prompt in prompts]
    if several and isinstance(several[0], int | dict) and not (isinstance(several[0], dict) and "prompt" in several[0]):
        return True, [several]
    for prompt in several:
        if not isinstance(prompt, str | list | tuple | dict):
            raise _not_a_prompt(prompt)
    return False, several


def encode_messages(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int]:
    """The token ids of a conversation of texts. Raises InvalidRequestError."""
    for i, message in enumerate(messages):
        if isinstance(message, dict) and message.get("content") is None and message.get("role") != "assistant":
            raise InvalidRequestError(f"messages[{i}].content is missing; give a string", f"messages[{i}].content")
    try:
        return tokenizer.encode_chat(messages)
    except ChatTemplateError as error:
        raise InvalidRequestError(str(error), "messages") from error


def _without_arrays(value: Any) -> Any:
    """NumPy and torch arrays and numbers as Python lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def has_media(prompts: Any) -> bool:
    """Whether a prompt, or one of several, has media."""
    if isinstance(prompts, Mapping):
        content = prompts.get("content")
        parts = content if isinstance(content, list) else ()
        return "prompt" in prompts or any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)
    return isinstance(prompts, list | tuple) and bool(prompts) and not isinstance(prompts[0], int) and any(map(has_media, prompts))


def to_token_ids(prompt: Sequence[Any]) -> list[int]:
    """The prompt as a list of int. Raises InvalidRequestError."""
    try:
        return msgspec.convert(prompt, list[int])  # the fast path, for a plain list of int
    except msgspec.ValidationError:
        ids = [_without_arrays(token) for token in prompt]
        wrong = [token for token in ids if type(token) is not int]
        if wrong:
            raise _not_a_prompt(wrong[0]) from None
        return ids


def _not_a_prompt(value: Any) -> InvalidRequestError:
    return InvalidRequestError(
        f"the prompt is or contains {value!r:.80}; give a string, a list of token ids or a list of chat messages", "prompt"
    )


def check_text(text: str) -> str:
    """The text. Raises InvalidRequestError if it is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError("the prompt contains half of a surrogate pair, which is not valid text; remove it", "prompt") from None
    return text


def expand_params(params: Params | Sequence[Params] | None, count: int) -> list[SamplingParams]:
    """The parameters of each of `count` prompts. Raises InvalidRequestError."""
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams | Mapping):
        return [_params(params)] * count
    if not isinstance(params, list | tuple):
        raise InvalidRequestError(f"params is {params!r:.80}; give SamplingParams or a dict, or a list of these", "params")
    if len(params) != count:
        raise InvalidRequestError(f"params has {len(params)} entries for {count} prompts; give one for all, or one per prompt", "params")
    return [_params(each) for each in params]


def _params(params: Params) -> SamplingParams:
    if not isinstance(params, SamplingParams | Mapping):
        raise InvalidRequestError(f"params is {params!r:.80}; give SamplingParams or a dict", "params")
    fields = dict(params) if isinstance(params, Mapping) else msgspec.structs.asdict(params)
    unknown = sorted(map(str, set(fields) - set(SamplingParams.__struct_fields__)))
    if unknown:
        hint = did_you_mean(unknown[0], SamplingParams.__struct_fields__) or "; SamplingParams lists them"
        raise InvalidRequestError(f"unknown sampling parameter {unknown[0]!r}{hint}", unknown[0])
    for name in ("stop", "stop_regex", "bad_words"):
        if isinstance(fields.get(name), str):
            fields[name] = (fields[name],)
    for name in ("json_schema", "structural_tag"):
        if isinstance(fields.get(name), Mapping):
            fields[name] = msgspec.json.encode(fields[name]).decode()
    try:  # the constructor does not check types
        return msgspec.convert(fields, SamplingParams)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        name = place.removesuffix("`") or "params"
        raise InvalidRequestError(f"{name}: {message[0].lower()}{message[1:]}", name) from error
