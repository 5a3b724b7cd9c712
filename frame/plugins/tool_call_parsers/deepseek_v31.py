"""`deepseek_v31`: tool calls of DeepSeek-V3.1: `NAME<｜tool▁sep｜>{…}` between the marks of a
call."""

from __future__ import annotations

import re

from frame.plugins.tool_call_parsers.deepseek import END, SEPARATOR, DeepSeek


class DeepSeekV31(DeepSeek):
    """Calls follow each other directly."""

    header = re.compile(rf"\s*(?P<name>[^\s<{{]+)\s*{SEPARATOR}\s*")
    before, after, between = ("", SEPARATOR), END, ""
