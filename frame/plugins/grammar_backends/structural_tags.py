"""Translates structural tags, in xgrammar's JSON format, to llguidance's Lark dialect.

Used by the backend `llguidance`. Covers the formats that frame's parsers and the server write; any
other raises ValueError, so that another backend can compile it. Knows no vocabulary but the special
tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from frame.plugins.grammar_backends import ebnf

Form = Mapping[str, Any]
# (JSON schema, maximum whitespace in one place or None, its pattern or None) -> library's schema
WriteSchema = Callable[[Any, int | None, str | None], str]

_TEXT = "TEXT: /(?s:.*)/"
_FIELDS = {  # type -> (required fields, optional fields)
    "const_string": (("value",), ()),
    "json_schema": (("json_schema",), ("style", "max_whitespace_cnt", "whitespace_pattern")),
    "any_text": ((), ()),
    "regex": (("pattern",), ()),
    "grammar": (("grammar",), ()),
    "sequence": (("elements",), ()),
    "or": (("elements",), ()),
    "optional": (("content",), ()),
    "tag": (("begin", "content", "end"), ()),
    "tags_with_separator": (("tags", "separator"), ("at_least_one", "stop_after_first")),
    "triggered_tags": (("triggers", "tags"), ("at_least_one", "stop_after_first")),
}


def to_lark(source: str, special_ids: Mapping[str, int], write_schema: WriteSchema) -> str:
    """The grammar of a structural tag. `special_ids`: special tokens of the tokenizer, which the
    library matches by id and not by their text. Raises ValueError."""
    form = json.loads(source)
    if not isinstance(form, dict) or form.get("type") != "structural_tag" or set(form) != {"type", "format"}:
        raise ValueError("expected an object with type structural_tag and format")
    writer = _Writer(special_ids, write_schema)
    root = writer.write(form["format"])
    return "\n".join(["%llguidance {}", f"start: {root}", _TEXT, *writer.rules])


class _Writer:
    """Writes each format as one expression; `rules` are those that it refers to."""

    def __init__(self, special_ids: Mapping[str, int], write_schema: WriteSchema) -> None:
        self.rules: list[str] = []
        self._ids = special_ids
        self._special = re.compile("|".join(map(re.escape, sorted(special_ids, key=len, reverse=True))) or "(?!)")
        self._write_schema = write_schema

    def write(self, form: Any) -> str:
        kind = form.get("type") if isinstance(form, dict) else None
        if kind not in _FIELDS:
            raise ValueError(f"the format type {kind!r} is not supported; use one of {', '.join(_FIELDS)}")
        required, optional = _FIELDS[kind]
        if missing := [name for name in required if name not in form]:
            raise ValueError(f"{kind} lacks {missing[0]}")
        if unknown := [name for name in form if name not in ("type", *required, *optional)]:
            raise ValueError(f"{kind} has an unsupported field {unknown[0]!r}")
        body: str = getattr(self, f"_write_{kind}")(form)
        return self._add_rule(body)

    def _add_rule(self, body: str, attributes: str = "") -> str:
        name = f"part{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def _write_const_string(self, form: Form) -> str:
        return self._literal(form["value"])

    def _literal(self, text: Any) -> str:
        """The text, with special tokens by id; nothing for an empty text."""
        if not isinstance(text, str):
            raise ValueError("begin, end, value, separator and triggers must be texts")
        pieces, end = [], 0
        for match in self._special.finditer(text):
            pieces += [_quoted(text[end : match.start()]), f"<[{self._ids[match[0]]}]>"]
            end = match.end()
        return " ".join(filter(None, [*pieces, _quoted(text[end:])])) or '""'

    def _write_json_schema(self, form: Form) -> str:
        if form.get("style", "json") != "json":
            raise ValueError(f"the style {form['style']!r} is not supported: it needs the grammar backend combined, with xgrammar")
        schema = self._write_schema(form["json_schema"], form.get("max_whitespace_cnt"), form.get("whitespace_pattern"))
        return f"%json {schema}"

    def _write_any_text(self, form: Form) -> str:
        return "TEXT"

    def _write_regex(self, form: Form) -> str:
        plain = re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], form["pattern"], flags=re.DOTALL)
        return f"/{plain}/".replace("\n", r"\n")

    def _write_grammar(self, form: Form) -> str:
        return f"%lark {{\n{ebnf.to_lark(ebnf.read(form['grammar']))}\n}}"

    def _write_sequence(self, form: Form) -> str:
        return " ".join(map(self.write, form["elements"])) or '""'

    def _write_or(self, form: Form) -> str:
        if not form["elements"]:
            raise ValueError("or has no elements")
        return " | ".join(map(self.write, form["elements"]))

    def _write_optional(self, form: Form) -> str:
        return f"{self.write(form['content'])}?"

    def _write_tag(self, form: Form) -> str:
        begin, content, end = self._literal(form["begin"]), form["content"], form["end"]
        last = self._literal(end)
        if isinstance(content, dict) and content == {"type": "any_text"} and end and not self._special.match(end):
            if self._special.search(end):
                raise ValueError(f"the end {end!r} has a special token after other text, which is not supported")
            return f"{begin} {self._add_rule('TEXT', f'[suffix={_quoted(end)}]')}"  # the text up to the first end
        return f"{begin} {self.write(content)} {last}"

    def _write_tags_with_separator(self, form: Form) -> str:
        one = self._either(form["tags"])
        more = "" if form.get("stop_after_first") else f" ({self._literal(form['separator'])} {one})*"
        return f"{one}{more}" if form.get("at_least_one") else f"({one}{more})?"

    def _either(self, tags: Any) -> str:
        if not tags or any(not isinstance(each, dict) or each.get("type", "tag") != "tag" for each in tags):
            raise ValueError("tags must be a list of tags")
        return self._add_rule(" | ".join(self.write({"type": "tag", **each}) for each in tags))

    def _write_triggered_tags(self, form: Form) -> str:
        calls, count = [], 0
        for trigger in form["triggers"]:
            tags = [{**each, "begin": each["begin"][len(trigger) :]} for each in form["tags"] if each["begin"].startswith(trigger)]
            calls.append(f"{self._text_up_to(trigger)} {self._either(tags)}")
            count += len(tags)
        if count != len(form["tags"]):
            raise ValueError("each tag of triggered_tags must begin with exactly one of the triggers")
        one = self._add_rule(" | ".join(calls))
        if form.get("stop_after_first"):
            return one if form.get("at_least_one") else f"{one} | TEXT"
        return f"{one}{'+' if form.get('at_least_one') else '*'} TEXT"

    def _text_up_to(self, trigger: str) -> str:
        """Free text that ends with the first `trigger`."""
        literal = self._literal(trigger)
        if self._special.match(trigger):  # free text has no special tokens
            return f"TEXT {literal}"
        if self._special.search(trigger) or not trigger:
            raise ValueError(f"the trigger {trigger!r} is not supported: it is empty, or has a special token after other text")
        return self._add_rule(f"TEXT {literal}", "[lazy]")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
