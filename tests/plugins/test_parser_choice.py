"""Which parser `auto` selects for the chat templates of real models."""

from __future__ import annotations

import pytest

from frame.config.resolution.plugins import Choices, choose_parser
from frame.plugins.loader import load_registry

RECORDS = load_registry(installed=False).all_records()
DEEPSEEK = "{{'<｜User｜>' + message['content']}}{{'<｜Assistant｜>'}}{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'"
# model -> (part of its template, tool-call parser, reasoning parser)
TEMPLATES = {
    "Qwen2.5": ("<|im_start|>system ... return a json object within <tool_call></tool_call> XML tags", "hermes", None),
    "Qwen3": ("<|im_start|> ... <tool_call></tool_call> ... {{ content.split('</think>')[-1] }}<think>", "hermes", "qwen3"),
    "Qwen3-Coder": ("<|im_start|> <tool_call>\n<function=example>\n<parameter=x>", "qwen3_coder", None),
    "DeepSeek-V3": (DEEPSEEK + " + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '```json'", "deepseek_v3", None),
    "DeepSeek-R1": (DEEPSEEK + " + '```json' {% set content = content.split('</think>')[-1] %}", "deepseek_v3", "deepseek_r1"),
    "DeepSeek-V3.1": (DEEPSEEK + " + tool['function']['name'] + '<｜tool▁sep｜>' ... '</think>'", "deepseek_v31", "deepseek_r1"),
    "Llama-3.2": ('<|start_header_id|> {"name": function name, "parameters": dictionary} <|eot_id|>', "llama3", None),
    "Mistral": ("[INST] [AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral", None),
    "Magistral": ("[SYSTEM_PROMPT] [THINK] [TOOL_CALLS] [ARGS]", "mistral", "mistral"),
    "gpt-oss": ("<|start|>assistant<|channel|>analysis<|message|> to=functions.", "gpt-oss", "gpt-oss"),
    "plain": ("<|user|>{{ message.content }}<|assistant|>", "hermes", None),
    "none": ("", None, None),
    "two forms": ("<tool_call> [TOOL_CALLS] </think> [THINK]", None, None),
}


@pytest.mark.parametrize("model", TEMPLATES)
def test_templates(model: str) -> None:
    template, tools, reasoning = TEMPLATES[model]
    chosen = Choices()
    for kind in ("tool_call_parser", "reasoning_parser"):
        choose_parser(chosen, RECORDS, kind, template)
    found = {kind: selected[0].record.name for kind, selected in chosen.selected.items()}
    assert (found.get("tool_call_parser"), found.get("reasoning_parser")) == (tools, reasoning)
    assert set(chosen.reasons) == {"text.tool_call_parser", "text.reasoning_parser"}  # each with its sentence


def test_a_tie_names_both() -> None:
    chosen = Choices()
    choose_parser(chosen, RECORDS, "tool_call_parser", TEMPLATES["two forms"][0])
    assert chosen.reasons["text.tool_call_parser"] == "none: the chat template has the markers of hermes and mistral; name one"
