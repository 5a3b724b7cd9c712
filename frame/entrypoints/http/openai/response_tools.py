"""The tools of the Responses API as functions of a chat request, and their calls as items.

The server runs no tool. Those that the client runs are functions for the model: `function`,
`custom` (one text), `namespace` (several of these), and OpenAI's own `apply_patch`, `shell`,
`local_shell` and `tool_search`. Those that OpenAI's servers run are dropped unless the request
forces a call of one. Used by the request schema and the writers of responses. Must not depend on a
route or the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from frame.entrypoints.http.chat.request_fields import check_object, check_string, make_function_tool
from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.openai.lark_pattern import LarkError, to_pattern

CUSTOM_ARGUMENT = "input"  # a custom tool is a function with one string argument of this name
HOSTED = frozenset({
    "web_search", "web_search_preview", "web_search_preview_2025_03_11", "web_search_2025_08_26", "image_generation", "file_search",
    "code_interpreter", "mcp", "computer", "computer_use", "computer_use_preview", "programmatic_tool_calling",
})  # fmt: skip
TAKEN = "function, custom, namespace, apply_patch, shell, local_shell and tool_search"
_SEPARATOR = "__"  # between a namespace and a name in it


class Tool(NamedTuple):
    """A tool that the client runs. `kind`: the type of the items of its calls, of `CALLS`."""

    kind: str
    name: str
    namespace: str | None = None

    @property
    def function(self) -> str:
        """The name of its function."""
        return self.name if self.namespace is None else f"{self.namespace}{_SEPARATOR}{self.name}"


@dataclass(slots=True)
class ResponseTools:
    """The tools of one request. `dropped`: the paths of those that are left out."""

    functions: list[dict[str, Any]] = field(default_factory=list)  # in the shape of chat completions
    by_function: dict[str, Tool] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)

    def add(self, tools: Any, place: str) -> None:
        """Add a list of tools. `place`: its path. Raises ApiError 400."""
        if not isinstance(tools, list):
            raise ApiError(400, f"{place}: expected a list of tools", place)
        for i, tool in enumerate(tools):
            self._add(check_object(tool, f"{place}[{i}]"), f"{place}[{i}]")

    def add_from_items(self, items: list[dict[str, Any]], place: str) -> None:
        """Add the tools that items bring, once each: of `additional_tools`, and what a tool search
        found. Raises ApiError 400."""
        for i, item in enumerate(items):
            if item.get("type") in ("additional_tools", "tool_search_output"):
                brought = ResponseTools()
                brought.add(item.get("tools") or [], f"{place}[{i}].tools")
                self.functions += [each for each in brought.functions if each["function"]["name"] not in self.by_function]
                self.by_function |= brought.by_function
                self.dropped += brought.dropped

    def _add(self, tool: dict[str, Any], place: str) -> None:
        kind = tool.get("type")
        if not isinstance(kind, str):
            raise ApiError(400, f"{place}.type is {quoted(kind)}; it must be one of {TAKEN}", f"{place}.type")
        if kind == "namespace":
            self._add_namespace(tool, place)
        elif kind in HOSTED or _runs_elsewhere(kind, tool, place):
            self.dropped.append(place)
        elif kind in _BUILT_IN:
            call, description, parameters = _BUILT_IN[kind]
            self._add_function(Tool(call, kind), place, tool.get("description") or description, tool.get("parameters") or parameters)
        else:
            self._add_named(tool, place)

    def _add_namespace(self, tool: dict[str, Any], place: str) -> None:
        namespace, inner = check_string(tool.get("name"), f"{place}.name"), tool.get("tools")
        if not isinstance(inner, list):
            raise ApiError(400, f"{place}.tools: expected a list of tools", f"{place}.tools")
        about = tool.get("description")
        for i, each in enumerate(inner):
            here = f"{place}.tools[{i}]"
            each = check_object(each, here)
            description = "\n".join(text for text in (about, each.get("description")) if isinstance(text, str) and text)
            self._add_named(each | {"description": description}, here, namespace)

    def _add_named(self, tool: dict[str, Any], place: str, namespace: str | None = None) -> None:
        kind, strict = tool.get("type"), tool.get("strict")
        parameters: Any
        if kind == "custom":
            parameters = _custom_parameters(tool, place)
            strict = True if "pattern" in parameters["properties"][CUSTOM_ARGUMENT] else None
        elif kind == "function":
            parameters = tool.get("parameters")
        else:
            sentence = f"{place}.type is {quoted(kind)}; this server runs no tools, and takes those of type {TAKEN}"
            raise ApiError(400, sentence, f"{place}.type")
        call = "custom_tool_call" if kind == "custom" else "function_call"
        name = check_string(tool.get("name"), f"{place}.name")
        self._add_function(Tool(call, name, namespace), place, tool.get("description"), parameters, strict)

    def _add_function(self, tool: Tool, place: str, description: Any, parameters: Any, strict: Any = None) -> None:
        self.functions.append(make_function_tool(tool.function, place, description, parameters, strict))
        self.by_function[tool.function] = tool

    def choice(self, choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        """A tool choice in the shape of chat completions. Raises ApiError 400 for one that forces a
        call which only tools of OpenAI's servers could make."""
        if not isinstance(choice, dict):
            if choice == "required" and not self.functions and self.dropped:
                place = self.dropped[0]
                raise ApiError(400, f"tool_choice requires a call, and {place} is a tool that only OpenAI's servers run", "tool_choice")
            return choice
        if choice.get("type") != "allowed_tools":
            return self._named(choice, "tool_choice")
        tools = choice.get("tools")
        if not isinstance(tools, list):
            raise ApiError(400, "tool_choice.tools: expected a list", "tool_choice.tools")
        allowed = [check_object(tool, f"tool_choice.tools[{i}]") for i, tool in enumerate(tools)]
        named = [self._named(tool, f"tool_choice.tools[{i}]") for i, tool in enumerate(allowed) if str(tool.get("type")) not in HOSTED]
        if named or not allowed or choice.get("mode") == "required":
            return {"type": "allowed_tools", "mode": choice.get("mode"), "tools": named}
        return "none"

    def _named(self, choice: dict[str, Any], place: str) -> dict[str, Any]:
        kind = str(choice.get("type"))
        if kind in HOSTED:
            sentence = f"{place}.type is {quoted(kind)}, a tool that only OpenAI's servers run; use one of your own, or tool_choice auto"
            raise ApiError(400, sentence, "tool_choice")
        if kind in _BUILT_IN:
            return {"type": "function", "function": {"name": kind}}
        if kind not in ("function", "custom"):
            raise ApiError(400, f"{place}.type is {quoted(kind)}; it must be function, custom or allowed_tools", "tool_choice")
        name = check_string(choice.get("name"), f"{place}.name")
        return {"type": "function", "function": {"name": Tool("", name, _namespace(choice, place)).function}}


def _runs_elsewhere(kind: str, tool: dict[str, Any], place: str) -> bool:
    """Whether a tool that may run at the client runs at OpenAI."""
    if kind == "shell":
        environment = check_object(tool.get("environment") or {}, f"{place}.environment")
        return bool(environment.get("type", "local") != "local")
    return kind == "tool_search" and tool.get("execution") != "client"


def _namespace(item: dict[str, Any], place: str) -> str | None:
    namespace = item.get("namespace")
    return None if namespace is None else check_string(namespace, f"{place}.namespace")


def _custom_parameters(tool: dict[str, Any], place: str) -> dict[str, Any]:
    """The schema of a custom tool: one string, whose pattern is its format. Raises ApiError 400."""
    here = f"{place}.format"
    form = check_object(tool.get("format") or {"type": "text"}, here)
    text: dict[str, Any] = {"type": "string"}
    if form.get("type") == "grammar":
        syntax, definition = form.get("syntax"), check_string(form.get("definition"), f"{here}.definition")
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
        elif syntax == "lark":
            try:
                text["pattern"] = to_pattern(definition)
            except LarkError as error:
                raise ApiError(400, f"{here}.definition: {error}", f"{here}.definition") from None
        else:
            raise ApiError(400, f"{here}.syntax is {quoted(syntax)}; it must be lark or regex", f"{here}.syntax")
    elif form.get("type") != "text":
        raise ApiError(400, f"{here}.type is {quoted(form.get('type'))}; it must be text or grammar", f"{here}.type")
    return {"type": "object", "properties": {CUSTOM_ARGUMENT: text}, "required": [CUSTOM_ARGUMENT], "additionalProperties": False}


# OpenAI's own tools that clients run --------------------------------------------------------------

_STRING, _STRINGS, _NUMBER = {"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "integer"}


def _object_schema(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


# type of the tool, which is the name of its function -> (type of its calls, description, schema)
_BUILT_IN: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "local_shell": (
        "local_shell_call",
        "Runs a program on the user's machine and returns its output.",
        _object_schema("command", command=_STRINGS, working_directory=_STRING, timeout_ms=_NUMBER),
    ),
    "shell": (
        "shell_call",
        "Runs shell commands on the user's machine and returns their output.",
        _object_schema("commands", commands=_STRINGS, timeout_ms=_NUMBER, max_output_length=_NUMBER),
    ),
    "apply_patch": (
        "apply_patch_call",
        "Creates, updates or deletes a file. diff has the lines of the file, or of hunks that @@ begins, each after +, - or a space.",
        _object_schema("type path", type={"enum": ["create_file", "update_file", "delete_file"]}, path=_STRING, diff=_STRING),
    ),
    "tool_search": ("tool_search_call", "Searches for further tools.", _object_schema("query", query=_STRING, limit=_NUMBER)),
}


class CallForm(NamedTuple):
    """How the items of one kind of calls are written. `prefix`: of their ids. `event`: the name of
    the events of the arguments, if there are any. `write`: the fields of an item from the
    arguments, JSON text. `read`: the arguments from an item; raises ApiError 400 with its path."""

    prefix: str
    event: str | None
    write: Callable[[str], dict[str, Any]]
    read: Callable[[dict[str, Any], str], str]


def parse_object(arguments: str) -> dict[str, Any]:
    """The arguments as an object; empty for text that is not one."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def custom_input(arguments: str) -> str:
    """A custom tool's input in the model's arguments; else the arguments."""
    text = parse_object(arguments).get(CUSTOM_ARGUMENT)
    return text if isinstance(text, str) else arguments


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _read_custom(item: dict[str, Any], place: str) -> str:
    return _encode({CUSTOM_ARGUMENT: check_string(item.get("input"), f"{place}.input")})


def _read_field(name: str) -> Callable[[dict[str, Any], str], str]:
    return lambda item, place: _encode(check_object(item.get(name), f"{place}.{name}"))


def _write_exec(arguments: str) -> dict[str, Any]:
    return {"action": {"type": "exec", "command": [], "env": {}, **parse_object(arguments)}}


def _read_exec(item: dict[str, Any], place: str) -> str:
    action = check_object(item.get("action"), f"{place}.action")
    return _encode({name: action[name] for name in ("command", "working_directory", "timeout_ms") if action.get(name) is not None})


CALLS: Mapping[str, CallForm] = {
    "function_call": CallForm(
        "fc",
        "function_call_arguments",
        lambda arguments: {"arguments": arguments},
        lambda item, place: check_string(item.get("arguments"), f"{place}.arguments"),
    ),
    "custom_tool_call": CallForm(
        "ctc", "custom_tool_call_input", lambda arguments: {"input": custom_input(arguments)}, _read_custom
    ),
    "local_shell_call": CallForm("lsh", None, _write_exec, _read_exec),
    "shell_call": CallForm("sh", None, lambda arguments: {"action": {"commands": [], **parse_object(arguments)}}, _read_field("action")),
    "apply_patch_call": CallForm(
        "apc",
        None,
        lambda arguments: {"operation": {"type": "update_file", "path": "", **parse_object(arguments)}},
        _read_field("operation"),
    ),
    "tool_search_call": CallForm(
        "tsc", None, lambda arguments: {"execution": "client", "arguments": parse_object(arguments)}, _read_field("arguments")
    ),
}  # fmt: skip
_OF_TOOL = {call: kind for kind, (call, _, _) in _BUILT_IN.items()}  # type of calls -> of the tool


def tool_of(item: dict[str, Any], place: str) -> Tool:
    """The tool that the item of a call names. Raises ApiError 400."""
    kind = item["type"]
    if kind in _OF_TOOL:
        return Tool(kind, _OF_TOOL[kind])
    return Tool(kind, check_string(item.get("name"), f"{place}.name"), _namespace(item, place))


def to_chat_call(item: dict[str, Any], place: str) -> dict[str, Any]:
    """The item of a call as a tool call of a chat message. Raises ApiError 400."""
    arguments = CALLS[item["type"]].read(item, place)
    name = check_string(item.get("call_id"), f"{place}.call_id")
    return {"id": name, "type": "function", "function": {"name": tool_of(item, place).function, "arguments": arguments}}


def call_fields(tool: Tool, call_id: str, arguments: str) -> dict[str, Any]:
    """The fields of the item of a call, besides `id` and `status`."""
    fields: dict[str, Any] = {"type": tool.kind, "call_id": call_id}
    if tool.kind not in _OF_TOOL:
        fields["name"] = tool.name
        if tool.namespace is not None:
            fields["namespace"] = tool.namespace
    return fields | CALLS[tool.kind].write(arguments)


def result_content(item: dict[str, Any]) -> Any:
    """The result in an item of type `*_output`, as text or a list of parts."""
    kind, output = item["type"], item.get("output")
    if kind == "tool_search_output":
        tools: Sequence[Any] = item.get("tools") or ()
        return _encode([tool.get("name") for tool in tools if isinstance(tool, dict)])
    if kind == "shell_call_output":
        return _encode(output)
    if kind == "apply_patch_call_output" and not output:
        return str(item.get("status") or "completed")
    return output
