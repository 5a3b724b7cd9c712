"""Manifest of the in-tree tool call parsers: records only. Must not import the plugins."""

from __future__ import annotations

from frame.interfaces.parsing import ParserCapabilities
from frame.registration import KindRegistry, hookimpl

_HERE = "frame.plugins.tool_call_parsers"
_DEEPSEEK = "<｜tool▁calls▁begin｜>"


@hookimpl
def register_tool_call_parsers(registry: KindRegistry) -> None:
    """Add the in-tree tool call parsers."""
    registry.add(
        "hermes",
        f"{_HERE}.hermes:Hermes",
        summary="Calls as JSON between <tool_call> and </tool_call>: Hermes, Qwen2.5, Qwen3 and many others.",
        capabilities=ParserCapabilities(("<tool_call>",), never=("<function=", "<arg_key>"), is_general=True),
    )
    registry.add(
        "qwen3_coder",
        f"{_HERE}.qwen3_coder:Qwen3Coder",
        summary="Calls as <function=NAME><parameter=KEY>: Qwen3-Coder, Qwen3.5.",
        capabilities=ParserCapabilities(("<function=", "<parameter=")),
    )
    registry.add(
        "deepseek_v3",
        f"{_HERE}.deepseek_v3:DeepSeekV3",
        summary="DeepSeek-V3 and R1: fenced JSON between marks.",
        capabilities=ParserCapabilities((_DEEPSEEK, "```json")),
    )
    registry.add(
        "deepseek_v31",
        f"{_HERE}.deepseek_v31:DeepSeekV31",
        summary="DeepSeek-V3.1: name and JSON between marks.",
        capabilities=ParserCapabilities((_DEEPSEEK,), never=("```json",)),
    )
    registry.add(
        "llama3",
        f"{_HERE}.llama3:Llama3",
        summary="Llama 3.1 to 3.3: the answer is a JSON object with name and parameters.",
        capabilities=ParserCapabilities(("<|start_header_id|>", '"parameters": ')),
    )
    registry.add(
        "mistral",
        f"{_HERE}.mistral:Mistral",
        summary="Mistral: [TOOL_CALLS] and either name[ARGS]{…} or a list of objects.",
        capabilities=ParserCapabilities(("[TOOL_CALLS]",)),
    )
    registry.add(
        "gpt-oss",
        f"{_HERE}.gpt_oss:GptOss",
        summary="gpt-oss (harmony): messages to functions.NAME in the commentary channel.",
        capabilities=ParserCapabilities(("<|channel|>", "functions.")),
    )
    registry.add(
        "pythonic",
        f"{_HERE}.pythonic:Pythonic",
        summary="A list of Python calls, [f(a=1), g()]: Llama 4 and others that are prompted so.",
        capabilities=ParserCapabilities(),
    )
