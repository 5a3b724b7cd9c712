"""`/v1/responses`' request body, and how its items become a chat request. Unknown fields are ignored; what cannot be served is an error
that names the field. Knows no engine."""

from __future__ import annotations

from typing import Any

from frame.entrypoints.http.dialects import Extensions, function_tool, object_at, parts_at, text_at
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.openai_schema import ChatRequest

# What this server cannot do, with what to do instead: to ignore these would give another answer than was asked for.
UNSERVED = {
    "conversation": "use previous_response_id, or send the conversation as input",
    "prompt": "send the prompt's text as input",
    "top_logprobs": "use /v1/chat/completions",
    "max_tool_calls": "leave it out",
}
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
ROLES = ("user", "assistant", "system", "developer")
FORMATS = ("text", "json_object", "json_schema", "structural_tag")  # of the answer


class ResponsesRequest(Extensions, kw_only=True):
    """`input` is a text or a list of items; `previous_response_id` puts a kept conversation before it."""

    input: str | list[dict[str, Any]]
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = False
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    # known and refused
    conversation: Any = None
    prompt: Any = None
    top_logprobs: Any = None
    max_tool_calls: Any = None

    def items(self) -> list[dict[str, Any]]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": self.input}]}]
        return self.input

    def chat(self, history: list[dict[str, Any]], rid: str) -> ChatRequest:
        """The same as a chat request, after the items of `history`. Raises ApiError."""
        for name, remedy in UNSERVED.items():
            if getattr(self, name):
                raise ApiError(400, f"{name} is not supported; {remedy}", name)
        if self.truncation not in (None, "disabled"):
            raise ApiError(400, f"truncation is {self.truncation!r}; it must be disabled: a conversation is not cut", "truncation")
        fields = self.extensions() | {"rid": rid}
        if self.tools:
            fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)]
        if (effort := (self.reasoning or {}).get("effort")) is not None:
            fields["reasoning_effort"] = text_at(effort, "reasoning.effort")
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return ChatRequest(
            model=self.model,
            messages=[*instructions, *messages_of(history, "previous_response_id"), *messages_of(self.items(), "input")],
            stream=self.stream,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_format(self.text),
            **fields,
        )


def messages_of(items: list[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    """Items as chat messages: what the model thought, said and called in a row is one message. Raises ApiError."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    for i, item in enumerate(items):
        here, kind = f"{place}[{i}]", item.get("type") or "message"
        if kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant"):
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _extend(turn, kind, item, here)
        else:
            turn = None
            messages.append(_message(kind, item, here))
    return messages


def _extend(turn: dict[str, Any], kind: str, item: dict[str, Any], place: str) -> None:
    if kind == "reasoning":
        turn["reasoning_content"] = turn.get("reasoning_content", "") + _text(item.get("content") or item.get("summary"), place)
    elif kind == "function_call":
        function = {"name": text_at(item.get("name"), f"{place}.name"), "arguments": text_at(item.get("arguments"), f"{place}.arguments")}
        call = {"id": text_at(item.get("call_id"), f"{place}.call_id"), "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    else:
        turn["content"] += _text(item.get("content"), place)


def _message(kind: str, item: dict[str, Any], place: str) -> dict[str, Any]:
    if kind == "function_call_output":
        name = text_at(item.get("call_id"), f"{place}.call_id")
        return {"role": "tool", "tool_call_id": name, "content": _text(item.get("output"), f"{place}.output")}
    if kind != "message":
        raise ApiError(
            400, f"{place}.type is {kind!r}; it must be message, function_call, function_call_output or reasoning", f"{place}.type"
        )
    role = item.get("role")
    if role not in ROLES:
        raise ApiError(400, f"{place}.role is {role!r}; it must be one of {', '.join(ROLES)}", f"{place}.role")
    return {"role": role, "content": _text(item.get("content"), f"{place}.content")}


def _text(content: Any, place: str) -> str:
    texts = []
    for i, part in enumerate(parts_at(content, place)):
        if part["type"] == "refusal":
            texts.append(text_at(part.get("refusal"), f"{place}[{i}].refusal"))
        elif part["type"] in TEXTS:
            texts.append(text_at(part.get("text"), f"{place}[{i}].text"))
        else:
            raise ApiError(400, f"{place}[{i}]: this model takes text only, not {part['type']!r}", place)
    return "".join(texts)


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = tool.get("type")
        raise ApiError(400, f"{place}.type is {kind!r}; this server runs no tools: describe a function of your own", f"{place}.type")
    return function_tool(tool.get("name"), place, tool.get("description"), tool.get("parameters"), tool.get("strict"))


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise ApiError(400, f"tool_choice.type is {choice.get('type')!r}; it must be function", "tool_choice")
    return {"type": "function", "function": {"name": text_at(choice.get("name"), "tool_choice.name")}}


def _format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    form = (text or {}).get("format")
    if form is None:
        return None
    form = object_at(form, "text.format")
    kind = form.get("type")
    if kind not in FORMATS:
        raise ApiError(400, f"text.format.type is {kind!r}; it must be one of {', '.join(FORMATS)}", "text.format.type")
    if kind != "json_schema":
        return form
    object_at(form.get("schema"), "text.format.schema")
    return {"type": "json_schema", "json_schema": {name: form[name] for name in ("name", "schema", "strict") if name in form}}
