"""Manifest of the in-tree tool call parsers: records only. Must not import the plugins."""

from __future__ import annotations

from frame.interfaces.parsing import ParserCapabilities
from frame.registration import KindRegistry, hookimpl

_HERE = "frame.plugins.tool_call_parsers"
_DEEPSEEK = "<｜tool▁calls▁begin｜>"


@hookimpl
def register_tool_call_parsers(registry: KindRegistry) -> None:
    """Add the in-tree tool call parsers."""
    for name, target, capabilities, summary in (
        ("hermes", "hermes:Hermes", ParserCapabilities(("<tool_call>",), never=("<function=", "<arg_key>"), is_general=True),
         "Calls as JSON between <tool_call> and </tool_call>: Hermes, Qwen2.5, Qwen3 and many others."),
        ("qwen3_coder", "qwen3_coder:Qwen3Coder", ParserCapabilities(("<function=", "<parameter=")),
         "Calls as <function=NAME><parameter=KEY>: Qwen3-Coder, Qwen3.5."),
        ("deepseek_v3", "deepseek_v3:DeepSeekV3", ParserCapabilities((_DEEPSEEK, "```json")),
         "DeepSeek-V3 and R1: fenced JSON between marks."),
        ("deepseek_v31", "deepseek_v31:DeepSeekV31", ParserCapabilities((_DEEPSEEK,), never=("```json",)),
         "DeepSeek-V3.1: name and JSON between marks."),
        ("llama3", "llama3:Llama3", ParserCapabilities(("<|start_header_id|>", '"parameters": ')),
         "Llama 3.1 to 3.3: the answer is a JSON object with name and parameters."),
        ("mistral", "mistral:Mistral", ParserCapabilities(("[TOOL_CALLS]",)),
         "Mistral: [TOOL_CALLS] and either name[ARGS]{…} or a list of objects."),
        ("gpt-oss", "gpt_oss:GptOss", ParserCapabilities(("<|channel|>", "functions.")),
         "gpt-oss (harmony): messages to functions.NAME in the commentary channel."),
        ("pythonic", "pythonic:Pythonic", ParserCapabilities(),
         "A list of Python calls, [f(a=1), g()]: Llama 4 and others that are prompted so."),
    ):  # fmt: skip
        registry.add(name, f"{_HERE}.{target}", capabilities=capabilities, summary=summary)
