"""Routes of SGLang: model information, the server's output parsers for any text, and sessions,
from which `/generate` continues with `session_params`. Must not depend on the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from frame.core.messages import Finish
from frame.entrypoints.http.chat.constraints import resolve_tools
from frame.entrypoints.http.chat.output_parser import OutputParser, ParserPair
from frame.entrypoints.http.chat.request_fields import TOOL
from frame.entrypoints.http.errors import ApiError, quoted, without_folders
from frame.entrypoints.http.operations.admin import ask_engine
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, make_extension, responds_with
from frame.entrypoints.http.protocol.fields import Shape
from frame.entrypoints.http.protocol.session_store import read_number
from frame.entrypoints.http.protocol.sessions import check_session
from frame.entrypoints.http.request_body import RequestBody
from frame.entrypoints.http.response_types import array, declare
from frame.entrypoints.http.services import Services

router = ApiRouter(access=Access.USER)

MAX_CHARS = 1 << 18  # of a text to parse
DEFAULT_SECONDS, MAX_SECONDS = 3600.0, 86400.0  # without a request, after which a session is closed
SLICE = 1024  # characters that are parsed between two yields to the event loop

ModelInfo = declare(
    "ModelInfo",
    "model_path tokenizer_path served_model_name is_generation preferred_sampling_params weight_version has_image_understanding"
    " has_audio_understanding model_type architectures max_model_len",
)
SeparatedReasoning = declare("SeparatedReasoning", "reasoning_text text")
ParsedCall = declare("ParsedCall", "tool_index name parameters", "`parameters` is JSON text.")
ParsedCalls = declare("ParsedCalls", "normal_text", calls=array(ParsedCall))


ClosedSession = declare("ClosedSession", "session_id", "The session that was closed.")


class SeparateReasoningRequest(RequestBody):
    text: str
    reasoning_parser: str | None = None


class ParseCallsRequest(RequestBody):
    NESTED: ClassVar[Mapping[str, Shape]] = {"tools": TOOL}

    text: str
    tools: list[dict[str, Any]]
    tool_call_parser: str | None = None


class OpenSessionRequest(RequestBody):
    """`capacity_of_str_len`: most tokens of a request's prompt and output that are kept. `timeout`:
    seconds without a request after which the session is closed."""

    capacity_of_str_len: int = Field(ge=1)
    session_id: str | None = None
    timeout: float | None = None


class CloseSessionRequest(RequestBody):
    session_id: str


@router.get("/model_info", responses=responds_with(ModelInfo))
@router.get("/get_model_info", responses=responds_with(ModelInfo))
async def model_info(services: ServicesDep) -> Any:
    """Describe the served model."""
    resolved = services.resolved
    weights = without_folders(resolved.user.model.path)
    return {
        "model_path": weights,
        "tokenizer_path": weights if resolved.tokenizer_path is None else without_folders(resolved.tokenizer_path),
        "served_model_name": resolved.served_name,
        "is_generation": resolved.task == "generate",
        "preferred_sampling_params": None,
        "weight_version": services.client.commands.weight_version,
        "has_image_understanding": "image" in services.modalities,
        "has_audio_understanding": "audio" in services.modalities,
        "model_type": resolved.model.config.get("model_type", ""),
        "architectures": [resolved.model.architecture],
        "max_model_len": resolved.max_context,
    }


@router.post("/separate_reasoning", responses=responds_with(SeparatedReasoning))
async def separate_reasoning(request: SeparateReasoningRequest, services: ServicesDep) -> Any:
    """Separate reasoning and content of a text with the server's reasoning parser."""
    _check_parser(services, "reasoning_parser", request.reasoning_parser)
    if services.reasoning is None:
        raise ApiError(400, "this server has no reasoning parser; start it with --reasoning-parser", "reasoning_parser")
    parsers = ParserPair(services.reasoning(), None, None, "")
    message = await _parse(request.text, OutputParser(parsers.reasoning, None))
    return {"reasoning_text": message.get("reasoning_content", ""), "text": message["content"] or ""}


@router.post("/parse_function_call", responses=responds_with(ParsedCalls))
async def parse_function_call(request: ParseCallsRequest, services: ServicesDep) -> Any:
    """Parse the tool calls in a text with the server's tool-call parser."""
    _check_parser(services, "tool_call_parser", request.tool_call_parser)
    if services.tool_calls is None:
        raise ApiError(400, "this server has no tool-call parser; start it with --tool-call-parser", "tool_call_parser")
    use = resolve_tools(request.tools, None, None)
    if use is None:
        raise ApiError(400, "tools is empty; send the functions that may be called", "tools")
    parsers = ParserPair(None, services.tool_calls(), use, "")
    message = await _parse(request.text, OutputParser(None, parsers.tools))
    calls = [
        {"tool_index": index, "name": each["function"]["name"], "parameters": each["function"]["arguments"]}
        for index, each in enumerate(message.get("tool_calls", ()))
    ]
    return {"normal_text": message["content"] or "", "calls": calls}


@router.post("/open_session", responses=responds_with(str))
async def open_session(request: OpenSessionRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Open a session. The response is its name."""
    services.need_task("generate")
    session = None if request.session_id is None else check_session("session_id", request.session_id)
    if session == "":
        raise ApiError(400, "session_id is empty; send a name, or leave it out", "session_id")
    seconds = read_number("timeout", request.timeout, 1.0, MAX_SECONDS, DEFAULT_SECONDS)
    return services.sessions.open_session(context.tenant, session, request.capacity_of_str_len, seconds)


@router.post("/close_session", responses=responds_with(ClosedSession))
async def close_session(request: CloseSessionRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Close a session, and keep its prefix no more. A name of `prompt_cache_key`, `session_id` or
    `X-Session-ID` ends what is kept under it."""
    name = check_session("session_id", request.session_id)
    was_open = services.sessions.close_session(context.tenant, name)
    ended = await ask_engine(services, "end_session", tenant=context.tenant, name=name)
    if not was_open and not ended.get("ended"):
        raise ApiError(404, f"there is no session {quoted(name)}", "session_id")
    return {"session_id": name}


def _check_parser(services: Services, kind: str, name: str | None) -> None:
    """Raise ApiError 400 for a parser other than the server's."""
    choices = services.resolved.plugins.get(kind)
    if name and choices and name not in (configured := choices[0].name, configured.replace("-", "_")):
        raise ApiError(400, f"{kind} is {name[:100]!r}, and this server's is {configured!r}; leave it out", kind)


async def _parse(text: str, parser: OutputParser) -> dict[str, Any]:
    if len(text) > MAX_CHARS:
        raise ApiError(400, f"text has {len(text)} characters; it may have {MAX_CHARS}", "text")
    for start in range(0, len(text), SLICE):
        parser.feed(text[start : start + SLICE], None)
        await asyncio.sleep(0)
    parser.feed("", Finish("stop"))
    return parser.build_message()


SglangRoutes = make_extension(__name__, router)
