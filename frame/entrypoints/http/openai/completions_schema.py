"""Request bodies of chat completions and completions, and their translation into `SamplingParams`.

Used by the routes; other chat APIs translate into `ChatRequest`. A field that cannot be served
raises ApiError 400 with its name. Must not depend on the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal

import msgspec
from pydantic import Field

from frame.core.interfaces.sampling_params import MAX_STOP_IDS, SamplingParams
from frame.entrypoints.http.chat.constraints import (
    GRAMMAR_PARAMS,
    ToolUse,
    check_schemas,
    constraint_params,
    rename_error_params,
    resolve_functions,
    resolve_tools,
    sent_constraint,
)
from frame.entrypoints.http.chat.media_parts import PARTS, read_chat_part
from frame.entrypoints.http.chat.request_fields import TemplateFields
from frame.entrypoints.http.chat.thinking_fields import SWITCHES
from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.protocol.bodies import MAX_MESSAGES
from frame.entrypoints.http.request_body import Metadata, NestedBody, SamplingFields, TransferParams
from frame.entrypoints.http.validation_errors import type_name
from frame.entrypoints.media.media_service import MediaPart
from frame.text.fill_in_middle import find_form, list_end_ids
from frame.text.tokenizer import Tokenizer

# Brackets, braces and colons in the tool-call arguments of one request.
MAX_ARGUMENT_PARTS = 48 * 1024

ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]
# OpenAI's service tiers as priorities. Policies that use the priority run higher ones first.
TIERS: Mapping[ServiceTier, int] = {"auto": 0, "default": 0, "flex": -1, "scale": 1, "priority": 1}


class StreamOptions(NestedBody):
    """OpenAI's stream options, and vLLM's `continuous_usage_stats`: usage in every chunk."""

    place = "stream_options"
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(SamplingFields):
    """Fields of both chat and text completion requests."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = Field(None, ge=0, le=2)  # OpenAI's range; /generate takes more
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None
    service_tier: ServiceTier | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    kv_transfer_params: TransferParams | None = None
    return_hidden_states: bool | None = None

    @property
    def constrains_whole_output(self) -> bool:
        """Whether the grammar describes the whole output, with reasoning and tool calls.

        `regex`, `ebnf`, `json_schema` and `structural_tag` do. `response_format`, `guided_*` and
        `structured_outputs` describe only the content.
        """
        return any(value is not None for value in (self.regex, self.ebnf, self.json_schema, self.structural_tag))

    def resolve_priority(self) -> int:
        """The priority, or that of the service tier."""
        return self.priority if self.priority is not None else TIERS[self.service_tier or "auto"]

    def sampling(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """The sampling parameters; `more` overrides fields. defaults: of what the request leaves
        out. Raises ApiError 400."""
        options = self.stream_options
        if options is not None and not self.stream and (options.include_usage or options.continuous_usage_stats):
            raise ApiError(400, "stream_options needs stream: true; send both, or neither", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(400, "prompt_logprobs cannot be streamed; leave stream out", "prompt_logprobs")
        if self.return_hidden_states and self.stream:
            raise ApiError(400, "return_hidden_states cannot be streamed; leave stream out", "return_hidden_states")
        if self.stream and self.kv_transfer_params is not None and self.kv_transfer_params.do_remote_decode:
            raise ApiError(400, "kv_transfer_params.do_remote_decode needs a response that is not streamed; send stream: false", "stream")
        values = self.sampling_fields()
        values |= {name: value for name in ("temperature", "top_p", "n", "prompt_logprobs") if (value := getattr(self, name)) is not None}
        if self.stop is not None:
            values["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        values |= constraint_params(self, self.response_format)
        return msgspec.structs.replace(defaults, **{**values, **{name: value for name, value in more.items() if value is not None}})

    def sent_name(self, parameter: str) -> str:
        if parameter == "whitespace_pattern":
            return "guided_whitespace_pattern" if self.guided_whitespace_pattern is not None else "structured_outputs.whitespace_pattern"
        if parameter in GRAMMAR_PARAMS:
            return sent_constraint(self, self.response_format, parameter)
        return super().sent_name(parameter)


class ChatRequest(GenerationRequest, TemplateFields):
    """A chat completion request, also of other chat APIs, which subclass it to name their fields in
    errors.

    `FIELD_NAMES`: our field -> the field of the API. `TOOL_PLACES`: the same for parts of a tool's
    path.
    """

    FIELD_NAMES: ClassVar[Mapping[str, str]] = {"prompt": "messages", "logprobs": "top_logprobs"}
    TOOL_PLACES: ClassVar[Mapping[str, str]] = {}

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None
    user: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    # beyond OpenAI
    echo: bool | None = None

    def to_sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        if self.modalities not in (None, ["text"]):
            raise ApiError(400, f"modalities is {quoted(self.modalities)}; this model answers in text", "modalities")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return self.sampling(defaults, max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    def sent_name(self, parameter: str) -> str:
        if parameter == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        sent = super().sent_name(parameter)
        return self.FIELD_NAMES.get(sent, sent)

    def resolve_tools(self) -> ToolUse | None:
        """The tools and the rule for calls, None where no call is possible. Raises ApiError 400."""
        if self.is_legacy:
            use = resolve_functions(self.functions, self.function_call)
        else:
            with rename_error_params(self.TOOL_PLACES):
                use = resolve_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        if use is not None and use.rule.is_required and self.constrains_whole_output:
            raise ApiError(400, "regex, ebnf, json_schema and structural_tag leave no room for a required call; keep one", "tool_choice")
        return use

    def check_schemas(self) -> None:
        """Check the JSON schemas of the tools. Raises ApiError 400."""
        with rename_error_params(self.TOOL_PLACES):
            check_schemas([(t["function"].get("parameters"), f"tools[{i}].function.parameters") for i, t in enumerate(self.tools or ())])
            check_schemas([(f.get("parameters"), f"functions[{i}].parameters") for i, f in enumerate(self.functions or ())])

    @property
    def is_legacy(self) -> bool:
        """Whether the request has the deprecated `functions`, which change the shape of the
        response. Raises ApiError 400 for both forms at once."""
        if self.functions is None and self.function_call is None:
            return False
        if self.tools is not None or self.tool_choice is not None:
            raise ApiError(400, "functions and function_call are the deprecated form of tools and tool_choice; send one form", "functions")
        return True

    @property
    def response_role(self) -> str:
        """The role of the response: assistant, or that of the message it continues."""
        continues = self.continue_final_message or self.add_generation_prompt is False
        role = self.messages[-1].get("role") if continues and self.messages else None
        return role if isinstance(role, str) else "assistant"

    def echoed_text(self) -> str:
        """With `echo`, the text of the last message if the response continues it; else ""."""
        last = self.messages[-1] if self.echo and self.messages else {}
        content = _content(last.get("content"), "messages") if last.get("role") == self.response_role else ""
        return content if isinstance(content, str) else ""

    def template_arguments(self) -> dict[str, Any]:
        """Arguments of the chat template besides messages and tools. Raises ApiError 400."""
        arguments = self.thinking_arguments(self.chat_template_kwargs)
        for name in ("verbosity", "continue_final_message", "add_generation_prompt", "add_special_tokens", "documents"):
            value = getattr(self, name)
            if value is not None:
                arguments[name] = value
        return arguments

    @property
    def may_think(self) -> bool:
        """Whether the output may contain reasoning: it is not switched off."""
        arguments = self.template_arguments()
        return all(arguments.get(name) is not False for name in SWITCHES)

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates read them. Raises ApiError 400."""
        return to_template_messages(self.messages)


class CompletionRequest(GenerationRequest):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool = True
    user: str | None = None

    def to_sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        if self.suffix:
            for name in ("echo", "truncate_prompt_tokens"):
                if getattr(self, name):
                    raise ApiError(400, f"suffix and {name} exclude each other; keep one", "suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, "best_of is not supported; use n", "best_of")
        limit = 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default
        if self.echo:
            limit = max(1, limit)
        scored = self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs
        return self.sampling(defaults, max_tokens=limit, logprobs=self.logprobs, prompt_logprobs=scored)

    def sent_name(self, parameter: str) -> str:
        return "logprobs" if parameter == "prompt_logprobs" and self.prompt_logprobs is None else super().sent_name(parameter)

    def to_prompts(self) -> list[str | list[int]]:
        """The prompts as a list. Raises ApiError 400 for an empty or mixed list."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ApiError(400, "prompt is empty; send a string, a list of strings, token ids, or a list of token-id lists", "prompt")
        kinds = {type(each) for each in prompt}
        if len(kinds) > 1:
            raise ApiError(400, "prompt mixes strings and token ids; send one kind", "prompt")
        return [prompt] if kinds == {int} else prompt  # type: ignore[list-item,return-value]


def fill_in_middle(
    tokenizer: Tokenizer, suffix: str, params: SamplingParams, prompts: Sequence[str | list[int]]
) -> tuple[SamplingParams, list[str | list[int]]]:
    """The sampling parameters and prompts for the text between each prompt and the suffix. Raises
    ApiError 400 where the model has no tokens for it."""
    if (form := find_form(tokenizer)) is None:
        raise ApiError(400, "suffix needs a model with fill-in-the-middle tokens, which this one does not have; leave it out", "suffix")
    joined: list[str | list[int]] = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise ApiError(400, "suffix needs a prompt of text; send text in place of token ids", "prompt")
        joined.append(form.join(prompt, suffix))
    ends = (*params.stop_token_ids, *list_end_ids(tokenizer, form))
    return msgspec.structs.replace(params, stop_token_ids=ends[:MAX_STOP_IDS]), joined


def to_template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: text joined, arguments parsed. A content with media
    is a list of parts. Raises ApiError."""
    if not messages:
        raise ApiError(400, "messages is empty; send at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise ApiError(400, f"messages has {len(messages)} entries; it may have {MAX_MESSAGES}", "messages")
    _check_arguments(messages)
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_arguments(messages: list[dict[str, Any]]) -> None:
    """Raise ApiError 400 for tool-call arguments that would take too long to decode. The check of
    the whole body (`problem_of`) counts them as one string."""
    count = 0
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, str):
                count += arguments.count("[") + arguments.count("{") + arguments.count(":")
    if count > MAX_ARGUMENT_PARTS:
        sentence = f"the arguments of all tool calls have more than {MAX_ARGUMENT_PARTS} brackets, braces and colons; leave some calls out"
        raise ApiError(400, sentence, "messages")


def _message(message: dict[str, Any], place: str) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        wrong = "is missing" if role is None else f"is {quoted(role)}"
        raise ApiError(400, f"{place}.role {wrong}; send system, user, assistant or tool", f"{place}.role")
    if content is None and role not in ("assistant", "function"):
        raise ApiError(400, f"{place}.content is missing; send a string or a list of parts", f"{place}.content")
    if message.get("images"):
        raise ApiError(400, f"{place}.images is not supported; send parts of the type image_url in content", f"{place}.images")
    result = {**message, "content": _content(content, f"{place}.content")}
    if "reasoning" in message and "reasoning_content" not in message:
        result["reasoning_content"] = message["reasoning"]  # the name that templates use
    if role == "function":  # the result of a deprecated function_call
        name = message.get("name")
        result |= {"role": "tool", "tool_call_id": name}
    calls, legacy = message.get("tool_calls"), message.get("function_call")
    if calls is None and legacy is not None:
        name = legacy.get("name") if isinstance(legacy, dict) else None
        calls = [{"id": name, "type": "function", "function": legacy}]
        place = f"{place}.function_call"
        del result["function_call"]
    if calls is not None:
        if not isinstance(calls, list):
            raise ApiError(400, f"{place}.tool_calls: expected a list", f"{place}.tool_calls")
        result["tool_calls"] = [_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return result


def _content(content: Any, place: str) -> str | list[Any]:
    """The text, or the parts of a content with media."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{place}: expected a string or a list of parts", place)
    parts: list[Any] = []
    texts: list[str] = []
    for i, part in enumerate(content):
        if isinstance(part, MediaPart):  # of another API's schema
            parts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get(kind) if isinstance(part, dict) and kind in ("text", "refusal") else None
        if not isinstance(text, str) and kind in ("text", "refusal"):
            raise ApiError(400, f"{place}[{i}].{kind} is {type_name(text)}; send a string", f"{place}[{i}].{kind}")
        if isinstance(text, str):
            texts.append(text)
            parts.append({"type": "text", "text": text})
        elif kind in PARTS:
            parts.append(read_chat_part(kind, part, f"{place}[{i}]"))
        else:
            kinds = ", ".join(("text", *PARTS))
            raise ApiError(400, f"{place}[{i}].type is {quoted(kind)}; it must be one of {kinds}", f"{place}[{i}].type")
    return parts if len(parts) > len(texts) else "".join(texts)


def _call(call: Any, place: str) -> Any:
    """A tool call of an earlier message with its arguments decoded, as templates print them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ApiError(400, f"{place}.function: expected an object", place)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # Arguments that are not JSON are printed as text
        with suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments) if arguments else {}
    return {**call, "function": {**function, "arguments": arguments}}
