"""Fields that the request bodies of several routes share: `RequestOptions` on every route that runs
the model, and `SamplingFields` on every route that generates. Must not depend on a route."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.request_body import RequestBody

# What a client may attach to what is kept for it: as much as OpenAI allows.
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)]
_TOKEN_ID = re.compile(r"-?(?:0|[1-9][0-9]{0,18})")  # `int` takes spaces, underscores and digits of other scripts too


class RequestOptions(RequestBody):
    """`cache_salt` is the client's part of the name of the prefix cache that the request sees;
    `rid` names the request, and vLLM's name for it is `request_id`."""

    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None  # seconds
    rid: str | None = None
    request_id: str | None = None

    def resolve_priority(self) -> int:
        """The priority for the scheduler."""
        return self.priority or 0

    def request_name(self) -> str | None:
        """What the client calls the request. Raises ApiError for two different names, and for one
        with control characters, which the log would repeat."""
        if self.rid is not None and self.request_id is not None and self.rid != self.request_id:
            raise ApiError(400, "rid and request_id name the same thing and differ; send one of them", "request_id")
        field_name, name = ("request_id", self.request_id) if self.rid is None else ("rid", self.rid)
        if name is not None and not name.isprintable():
            raise ApiError(400, f"{field_name} holds a character that is not printable; leave it out", field_name)
        return name

    def sent_name(self, parameter: str) -> str:
        """How the client's request calls a sampling parameter."""
        return parameter

    @property
    def truncates(self) -> bool:
        """Whether a prompt that is too long is cut rather than refused."""
        return False

    def truncated(self, prompt: list[int], room: int) -> list[int]:
        """The prompt, cut as asked; `room`: the most tokens that it may have. Raises ApiError."""
        return prompt


class SamplingFields(RequestOptions):
    """Sampling parameters beyond a dialect's own, with the names that clients of vLLM and SGLang
    send.

    `truncate_prompt_tokens` keeps so many tokens of a longer prompt, the last ones unless
    `truncation_side` is `right`; -1: as many as fit.
    """

    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's name of include_stop_str_in_output
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    regex: str | None = None
    ebnf: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    num_speculative_tokens: int | None = None
    custom: dict[str, str] | None = None
    custom_params: dict[str, str] | None = None  # SGLang's name of custom

    def sent_name(self, parameter: str) -> str:
        if parameter == "custom" and self.custom_params is not None:
            return "custom_params"
        if parameter == "include_stop_str_in_output" and self.no_stop_trim is not None:
            return "no_stop_trim"
        return parameter

    def sampling_fields(self) -> dict[str, Any]:
        """Those that were sent, as `SamplingParams` types them, without constraints."""
        for name, other in (("custom", "custom_params"), ("include_stop_str_in_output", "no_stop_trim")):
            if getattr(self, name) is not None and getattr(self, other) is not None:
                raise ApiError(400, f"{name} and {other} are the same; send one of them", other)
        values = {name: value for name in _SAME & self.model_fields_set if (value := getattr(self, name)) is not None}
        for name in ("stop_token_ids", "bad_words"):
            if name in values:
                values[name] = tuple(values[name])
        if self.no_stop_trim is not None:
            values["include_stop_str_in_output"] = self.no_stop_trim
        if self.custom_params is not None:
            values["custom"] = self.custom_params
        if self.logit_bias:
            if (wrong := next((token for token in self.logit_bias if not _TOKEN_ID.fullmatch(token)), None)) is not None:
                raise ApiError(400, f"logit_bias has the key {quoted(wrong)}; the keys must be token ids", "logit_bias")
            values["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return values

    @property
    def truncates(self) -> bool:
        return self.truncate_prompt_tokens is not None

    def truncated(self, prompt: list[int], room: int) -> list[int]:
        asked = self.truncate_prompt_tokens
        if asked is None:
            return prompt
        if asked < -1 or asked == 0:
            sentence = f"truncate_prompt_tokens is {asked}; it must be 1 or more, or -1 for what fits"
            raise ApiError(400, sentence, "truncate_prompt_tokens")
        count = max(1, room) if asked == -1 else asked
        if len(prompt) <= count:
            return prompt
        return prompt[:count] if self.truncation_side == "right" else prompt[-count:]


_SAME = frozenset({"seed", "frequency_penalty", "presence_penalty", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos",
         "stop_token_ids", "bad_words", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
         "disable_any_whitespace", "num_speculative_tokens", "custom"})  # fmt: skip
