"""The fields by which clients switch reasoning, one meaning in every chat API: those of OpenAI,
vLLM, SGLang, DeepSeek, OpenRouter, Groq and llama.cpp.

An explicit switch is stronger than an effort. Must not depend on a route or a parser.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

from frame.core.interfaces.sampling_params import MAX_INT
from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.request_body import RequestBody

# Of the reasoning: OpenAI's values, and Anthropic's
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
SWITCHES = ("enable_thinking", "thinking")  # arguments by which templates know the switch
_TYPES = {"enabled": True, "adaptive": True, "auto": True, "disabled": False}
_RAW = ("raw", "none")  # values of `reasoning_format` with which the content holds the reasoning


class ThinkingBudget(NamedTuple):
    """A limit of reasoning tokens. `place`: the field. `is_required`: a server that cannot keep it
    refuses the request."""

    place: str
    num_tokens: int
    is_required: bool = True


class ThinkingFields(RequestBody):
    """`enable_thinking`, `thinking` (a switch, or an object with `type`) and `reasoning.enabled`
    switch reasoning. `reasoning_effort` and `reasoning.effort` set the effort; `none` switches it
    off. `include_reasoning`, `reasoning.exclude` and `reasoning_format` (`hidden`) leave the
    reasoning out of the response; `separate_reasoning` and `reasoning_format` (`raw`) leave it in
    the content. `thinking_token_budget`, `reasoning.max_tokens` and `thinking.budget_tokens` limit
    the tokens of the reasoning."""

    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking: bool | dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    reasoning_format: Literal["parsed", "raw", "hidden", "auto", "none", "deepseek"] | None = None
    separate_reasoning: bool | None = None
    thinking_token_budget: int | None = None

    def thinking_arguments(self, explicit: dict[str, Any] | None = None) -> dict[str, Any]:
        """The arguments of the chat template, with those of `explicit` (`chat_template_kwargs`).
        Raises ApiError 400 for fields that contradict each other."""
        explicit = explicit or {}
        arguments: dict[str, Any] = {}
        if (effort := self._effort()) is not None:
            arguments = {"reasoning_effort": effort, **dict.fromkeys(SWITCHES, effort != "none")}
        sent = self._switches()
        sent += [(f"chat_template_kwargs.{name}", explicit[name]) for name in SWITCHES if isinstance(explicit.get(name), bool)]
        for (first, value), (second, other) in pairwise(sent):
            if value is not other:
                raise ApiError(400, f"{first} and {second} contradict each other; send one of them", second)
        return arguments | dict.fromkeys(SWITCHES if sent else (), sent and sent[0][1]) | explicit

    @property
    def separates_reasoning(self) -> bool:
        """Whether a parser takes the reasoning out of the content."""
        return self.separate_reasoning is not False and self.reasoning_format not in _RAW

    @property
    def shows_reasoning(self) -> bool:
        """Whether the response has the reasoning that was taken out."""
        return self.include_reasoning is not False and self.reasoning_format != "hidden" and not (self.reasoning or {}).get("exclude")

    def find_budget(self) -> ThinkingBudget | None:
        """The most tokens of reasoning; None: no limit. Raises ApiError 400."""
        thinking = self.thinking if isinstance(self.thinking, dict) else {}
        limit = None if self.thinking_token_budget == -1 else self.thinking_token_budget
        places = {"thinking_token_budget": limit, "reasoning.max_tokens": (self.reasoning or {}).get("max_tokens")}
        places["thinking.budget_tokens"] = thinking.get("budget_tokens")
        budgets = [ThinkingBudget(place, value) for place, value in places.items() if value is not None]
        for each in budgets:
            if type(each.num_tokens) is not int or not 0 <= each.num_tokens <= MAX_INT:
                raise ApiError(400, f"{each.place} is {quoted(each.num_tokens)}; it must be a whole number from 0 to {MAX_INT}", each.place)
            if each.num_tokens != budgets[0].num_tokens:
                raise ApiError(400, f"{budgets[0].place} and {each.place} contradict each other; send one of them", each.place)
        return budgets[0] if budgets else None

    def _effort(self) -> str | None:
        effort = (self.reasoning or {}).get("effort")
        if effort is None:
            return self.reasoning_effort
        checked = check_effort(effort, "reasoning.effort")
        if self.reasoning_effort not in (None, checked):
            raise ApiError(400, "reasoning_effort and reasoning.effort contradict each other; send one of them", "reasoning.effort")
        return checked

    def _switches(self) -> list[tuple[str, bool]]:
        """The switches that were sent, by the field."""
        switches = [] if self.enable_thinking is None else [("enable_thinking", self.enable_thinking)]
        if isinstance(self.thinking, bool):
            switches.append(("thinking", self.thinking))
        elif self.thinking is not None:
            kind = self.thinking.get("type")
            if not isinstance(kind, str) or kind not in _TYPES:
                raise ApiError(400, f"thinking.type is {quoted(kind)}; it must be enabled, adaptive, auto or disabled", "thinking.type")
            switches.append(("thinking.type", _TYPES[kind]))
        reasoning = self.reasoning or {}
        for name in ("enabled", "exclude"):
            if not isinstance(reasoning.get(name), bool | None):
                raise ApiError(400, f"reasoning.{name}: expected true or false", f"reasoning.{name}")
        if reasoning.get("enabled") is not None:
            switches.append(("reasoning.enabled", reasoning["enabled"]))
        return switches


def check_effort(value: Any, place: str) -> str:
    """`value`, if it is a reasoning effort. Raises ApiError 400 that names `place`."""
    if not isinstance(value, str):
        raise ApiError(400, f"{place}: expected a string", place)
    if value not in get_args(Effort):
        raise ApiError(400, f"{place} is {quoted(value)}; it must be one of {', '.join(get_args(Effort))}", place)
    return value
