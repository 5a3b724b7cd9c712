"""`deepseek_v3`: tool calls of DeepSeek-V3 and R1: `function<｜tool▁sep｜>NAME`, then the arguments
as a fenced block of JSON."""

from __future__ import annotations

import re

from frame.plugins.tool_call_parsers.deepseek import END, SEPARATOR, DeepSeek


class DeepSeekV3(DeepSeek):
    """The opening fence is part of the header; the closing fence is dropped after the arguments."""

    header = re.compile(rf"\s*function{SEPARATOR}\s*(?P<name>[^\s<{{]+)\s*```(?:json)?\s*")
    before, after, between = (f"function{SEPARATOR}", "\n```json\n"), f"\n```{END}", "\n"
