"""The conformance suite of tool-call parsers, on noise and on texts that the parser's own grammar
allows, of which the calls are known. Must not know a parser by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from frame.interfaces.parsing import CallRule, Function, ToolCallParser
from frame.testing.conformance import Check, SkipCheck, Subject, collect
from frame.testing.contexts import PARSER
from frame.testing.generators import make_alike, require_growth
from frame.testing.parsing.reading import (
    MAX_HELD,
    ODD,
    compare_interleaved,
    compare_splits,
    require_bounded_responses,
    require_linear_time,
    require_no_error,
    require_quick_pieces,
)
from frame.testing.parsing.texts import CHARACTERS, MARKS, STEPS, accepts, draw, noise

PLAIN = (
    *("", "Hello.", " a < b [1] {2} \n", '{"city": "Rome"}', "[1, 2]", "| a | b |\n|---|---|\n", '```json\n{"a": 1}\n```', "x = f(1)"),
    *("5 > 3 & 2 < 4", "<b>bold</b>", "日本 🙂", "\n\n", *CHARACTERS),
)
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"city": "Köln 🙂"},
    {"text": 'quote " and back\\slash', "other": "a/b"},
    {"number": -5, "share": 1.5, "is_exact": True, "none": None, "id": 2**53 + 1},
    {"items": [1, "two", [3]], "deep": {"a": {"b": [{}]}}},
    {"text": "braces } ] { [ in , a : text"},
    {"long": "abc " * 80 + "end"},
)
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", list: "array", dict: "object"}
ODD_SCHEMAS: tuple[Any, ...] = ({"enum": 3}, {"type": [{}, "integer"]}, {"anyOf": 1}, {"anyOf": [2]}, {"type": {}}, [], None)
LONG_CALL = 20_000  # characters of a call whose time is compared with that of `TIMES` as many
TIMES, MAX_GROWTH = 8, 24.0  # a square takes 64 times as long: far from both on a busy machine
CITY = "Zanzibar"  # stands in every drawn call once

Calls = list[tuple[str, str]]
MakeCalls = Callable[[], ToolCallParser]


def suite(subject: Subject) -> Iterable[Check]:
    """The suite of the kind `tool_call_parser`."""
    return collect(__name__, partial(subject.target, PARSER, subject.options))


def read_calls(make: MakeCalls, pieces: Iterable[str], functions: Sequence[Function] = (), is_cut: bool = False) -> tuple[str, Calls]:
    """The content and the calls of a text in pieces. Asserts the order of the deltas."""
    parser = make()
    parser.begin(functions or make_rule(ARGUMENTS[1]).functions)
    deltas = [*map(parser.feed, pieces), parser.finish_cut() if is_cut else parser.finish()]
    calls: list[tuple[str, list[str]]] = []
    for call in (call for delta in deltas for call in delta.calls):
        if call.name is not None:
            assert call.index == len(calls), f"call {call.index} begins after {len(calls)} calls"
            calls.append((call.name, []))
        assert call.index == len(calls) - 1, f"arguments of call {call.index} come when call {len(calls) - 1} is the last"
        calls[-1][1].append(call.arguments)
    return "".join(delta.content for delta in deltas), [(name, "".join(pieces)) for name, pieces in calls]


def check_plain_text_is_content(make: MakeCalls) -> None:
    for text in PLAIN:
        for pieces in ([text], list(text)):
            result = read_calls(make, pieces)
            assert result == (text, []), f"{text!r} is no call, and is read as {result}"


def check_parts_of_characters_are_content(make: MakeCalls) -> None:
    """U+FFFD, which stands for a part of a character, at the end of a piece and anywhere else."""
    for text in ("a\ufffd", "\ufffd", "50 \ufffd\ufffd b", "a\ufffd\n", "\ufffd<\ufffd"):
        for pieces in ([text], list(text), *([text[:place], text[place:]] for place in range(1, len(text)))):
            result = read_calls(make, pieces)
            assert result == (text, []), f"{pieces!r} is no call, and is read as {result}"


def check_content_is_not_held_back(make: MakeCalls) -> None:
    parser, text = make(), "word " * 400
    parser.begin(make_rule(ARGUMENTS[1]).functions)
    content = "".join(parser.feed(piece).content for piece in text)
    assert len(content) >= len(text) - MAX_HELD, f"{len(text) - len(content)} of {len(text)} characters of plain text are held back"


def check_known_calls_are_read(make: MakeCalls) -> None:
    """Every text that the grammar of known calls allows is read as these calls."""
    for arguments in ARGUMENTS:
        for text in _drawn(make, make_rule(arguments)):
            content, calls = read_calls(make, [text], make_rule(arguments).functions)
            assert not content.strip(), f"{text!r} is allowed by the grammar, and {content!r} of it is read as content"
            assert read_values(calls) == [("f", arguments)], f"{text!r} is allowed, and is read as {calls}"
    for text in _several(make):
        content, calls = read_calls(make, [text])
        expected = [("f", {"city": CITY})] * text.count(CITY)
        assert not content.strip(), f"{text!r} is allowed by the grammar, and {content!r} of it is read as content"
        assert read_values(calls) == expected, f"{text!r} has {len(expected)} calls, and is read as {calls}"


def check_calls_without_arguments(make: MakeCalls) -> None:
    """Models leave the arguments out: such a call has an object without members as its arguments,
    or is no call."""
    arguments = {"city": CITY}
    for text in _drawn(make, make_rule(arguments)):
        absent = re.sub(r',\s*"\w+"\s*:\s*\{[^{}]*\}', "", text)
        for _, value in read_calls(make, [absent], make_rule(arguments).functions)[1]:
            assert isinstance(_json(value), dict), f"{absent!r} has the arguments {value!r}, which are no object"


def check_marks_within_arguments(make: MakeCalls) -> None:
    """Code of a parser is an argument too: texts with its marks, of formats that quote texts. One
    that does not quote them cannot tell its marks from theirs."""
    parser, rule = make(), make_rule({"text": CITY})
    parser.begin(rule.functions)
    marks = sorted(_find_marks(parser.grammar(rule)))
    for arguments in [{"text": text} for mark in marks for text in (f"a {mark} b", f"'{mark}' {mark[:-1]}".strip())]:
        for text in find_calls(make, make_rule(arguments)):
            plain = text.replace("\\'", "'")
            if '\\"' not in text and not any(f"{quote}{arguments['text']}{quote}" in plain for quote in ("'", '"')):
                continue
            for pieces in ([text], list(text)):
                content, calls = read_calls(make, pieces, make_rule(arguments).functions)
                assert read_values(calls) == [("f", arguments)], f"{text!r} is allowed, and is read as {content!r}, {calls}"


def _find_marks(form: Any) -> set[str]:
    """The texts that begin and end the tags of a format."""
    if isinstance(form, list):
        return set().union(*map(_find_marks, form))
    if not isinstance(form, dict):
        return set()
    ends = form.get("end", ())
    own = {form["begin"], *([ends] if isinstance(ends, str) else ends)} if form.get("type") == "tag" else set()
    return {mark for mark in own if mark.strip()} | set().union(*(_find_marks(part) for key, part in form.items() if key != "json_schema"))


def check_open_calls_are_not_lost(make: MakeCalls) -> None:
    """An answer that the model ended within the arguments of a call is content, or the call as far
    as it was written."""
    for text in find_calls(make, make_rule({"city": CITY}))[:1]:
        for size in range(text.index(CITY) + len(CITY), len(text)):
            content, calls = read_calls(make, [text[:size]])
            assert content.strip() or calls, f"the answer {text[:size]!r}, which the model ended, is lost"


def check_text_around_calls_is_content(make: MakeCalls) -> None:
    """Text before and after a call, where the grammar allows it."""
    rule = CallRule(make_rule({"city": CITY}).functions)
    parser = make()
    parser.begin(rule.functions)
    form = parser.grammar(rule)
    if form is None or form.get("type") != "triggered_tags":
        raise SkipCheck("the grammar does not say which text begins a call within other text")
    for call in _several(make):
        for before, after in (("Let me see.\n", ""), ("", "\nDone."), ("Let me see.\n", "\nDone.")):
            text = before + call + after
            if accepts(form, text):
                content, calls = read_calls(make, [text])
                assert len(calls) == call.count(CITY), f"{text!r} has {call.count(CITY)} calls, and is read as {calls}"
                assert "".join(content.split()) == "".join((before + after).split()), f"the text of {text!r} is read as {content!r}"


def check_splits_change_nothing(make: MakeCalls) -> None:
    known = [text for arguments in ARGUMENTS[1:5] for text in find_calls(make, make_rule(arguments))]
    known += find_calls(make, make_rule({"city": CITY}, is_parallel=True))
    compare_splits(lambda pieces: read_calls(make, pieces), [*noise(), *PLAIN, *known, *(f"Hm. {text} So." for text in known)])


def check_cut_calls_leave_no_content(make: MakeCalls) -> None:
    """An answer that ends within a call has the calls before it, and no marks as content."""
    for text in _several(make):
        whole = read_calls(make, [text])[1]
        for size in range(0, len(text), 3):
            content, calls = read_calls(make, [text[:size]], is_cut=True)
            assert not content.strip(), f"{text[:size]!r}, cut within a call, leaves {content!r} as content"
            for (name, arguments), (known, complete) in zip(calls, whole, strict=False):
                is_prefix = complete.startswith(arguments) or _json(arguments) == _json(complete)
                assert name == known and is_prefix, f"{text[:size]!r}, cut within a call, is read as {calls}"
            assert len(calls) <= len(whole), f"{text[:size]!r}, cut within a call, is read as {calls}"


def check_arguments_are_not_held_back(make: MakeCalls) -> None:
    """Of formats that write the arguments as JSON: a client sees long ones while they are written,
    and has those of an answer that was cut off."""
    rule = make_rule({"text": "word " * 400})
    for text in find_calls(make, rule)[:1]:
        _, ((_, whole),) = read_calls(make, [text], rule.functions)
        start = text.find(whole)
        if start < 0:
            raise SkipCheck("the format has another form of arguments than JSON")
        for size in (start + len(whole) // 2, start + len(whole) - 2):
            parser = _started(make(), rule.functions)
            deltas = [parser.feed(piece) for piece in text[:size]]
            count = sum(len(call.arguments) for delta in deltas for call in delta.calls)
            assert count >= size - start - MAX_HELD, f"{size - start - count} of {size - start} characters of arguments are held back"


def check_strict_functions_are_held_to_their_schemas(make: MakeCalls) -> None:
    """Whether calls are required or not, one or several."""
    schema = {"type": "object", "properties": {"only_here": {"type": "integer"}}, "required": ["only_here"]}
    for is_required in (True, False):
        for is_parallel in (True, False):
            functions = (Function("f", schema, is_strict=True), Function("g"))
            form = _started(make(), functions).grammar(CallRule(functions, is_required, is_parallel))
            if form is None:
                raise SkipCheck("the parser has no grammar")
            what = f"is_required={is_required} and is_parallel={is_parallel}"
            assert "only_here" in json.dumps(form), f"the grammar with {what} does not hold a strict function to its schema"


def check_responses_stand_alone(make: MakeCalls) -> None:
    """Parsers of two responses, fed in turn, share nothing."""
    texts = [*noise()[:10], *find_calls(make, make_rule(ARGUMENTS[1]))]
    compare_interleaved(lambda: _started(make()), lambda pieces: read_calls(make, pieces), texts)


def check_odd_texts_do_not_raise(make: MakeCalls) -> None:
    calls = find_calls(make, make_rule(ARGUMENTS[1]))[:1]
    for odd in ODD:
        within = [call[:at] + odd + call[at:] for call in calls for at in range(0, len(call), 4)]
        for text in (odd, *(f"{mark}{odd}{mark}" for mark in MARKS), *within):
            for is_cut in (False, True):
                require_no_error(lambda text=text, is_cut=is_cut: read_calls(make, [text], is_cut=is_cut), text)  # type: ignore[misc]


def check_odd_schemas_do_not_raise(make: MakeCalls) -> None:
    """Clients send any JSON as the schema of a function."""
    texts = find_calls(make, make_rule(ARGUMENTS[1]))[:1] or [MARKS[14]]
    for schema in ODD_SCHEMAS:
        functions = (Function("f", {"type": "object", "properties": {"city": schema}}), Function("g", {"properties": schema}))
        require_no_error(lambda functions=functions: read_calls(make, texts, functions), f"the schema {schema!r}")  # type: ignore[misc]
    require_no_error(lambda: _started(make(), ()).feed(texts[0]), "no functions")


def check_time_is_linear(make: MakeCalls) -> None:
    heads = ["", "<tool_call>", "[TOOL_CALLS]", '{"name": "f", "arguments": "']
    heads += [text[: text.index("abc") + 3] for text in find_calls(make, make_rule(ARGUMENTS[6]))[:1]]
    require_linear_time(lambda pieces: read_calls(make, pieces, make_rule(ARGUMENTS[6]).functions), heads)


def check_long_calls(make: MakeCalls) -> None:
    """Arguments of 120,000 characters are read whole, and in a time that grows with their
    length."""
    rule = make_rule({"long": "abc end"})
    known = find_calls(make, rule)[:1]
    if not known:
        raise SkipCheck("the parser has no grammar, so no text is known to hold a call")
    at = known[0].index("abc ")

    def write(length: int) -> str:
        return known[0][:at] + "abc " * (length // 4) + known[0][at:]

    _, calls = read_calls(make, [write(120_000)], rule.functions)
    received = len(calls[0][1]) if calls else 0
    assert received >= 120_000, f"of arguments of more than 120,000 characters, {received} are read"

    def feed(length: int) -> Callable[[], object]:
        text = write(length)
        return lambda: read_calls(make, [text[place : place + 4] for place in range(0, len(text), 4)], rule.functions)

    require_growth(feed, LONG_CALL, TIMES * LONG_CALL, "a call in pieces of four characters", MAX_GROWTH, minimum=0.05)


def check_many_calls(make: MakeCalls) -> None:
    """An answer with 40 calls, where the grammar allows them."""
    rule = make_rule({"city": CITY}, is_parallel=True)
    parser = make()
    parser.begin(rule.functions)
    form, one = parser.grammar(rule), find_calls(make, make_rule({"city": CITY}))[:1]
    joined = (separator.join(one * 40) for separator in ("", "\n", "\n\n", ", ", ",", " ", "; "))
    text = next((text for text in joined if form is not None and one and accepts(form, text)), None)
    if text is None:
        raise SkipCheck("the grammar does not allow calls that follow one another")
    for pieces in ([text], list(text)):
        _, calls = read_calls(make, pieces)
        assert len(calls) == 40, f"of 40 calls {len(calls)} are read"


def check_names_are_compared_whole(make: MakeCalls) -> None:
    """Functions whose names are equal in up to 60 characters."""
    for pair in make_alike((8, 16, 32, 60), fill="f"):
        schema = make_rule({"city": CITY}).functions[0].parameters
        functions = tuple(Function(name.replace("-", "_"), schema, is_strict=True) for name in pair)
        rule = CallRule(functions, is_required=True, is_parallel=False)
        for text in find_calls(make, rule):
            (name, _), *_ = read_calls(make, [text], rule.functions)[1] or [("", "")]
            expected = next(function.name for function in rule.functions if function.name in text)
            assert name == expected, f"{text[:200]!r} calls {expected}, and is read as a call of {name!r}"


def check_calls_of_two_functions(make: MakeCalls) -> None:
    """The index counts the calls of an answer, whichever functions they call."""
    functions = tuple(replace(make_rule({"city": CITY}).functions[0], name=name) for name in ("f", "g"))
    form = _started(make(), functions).grammar(CallRule(functions, is_required=True))
    if form is None:
        raise SkipCheck("the parser has no grammar, so no text is known to hold a call")
    for text in draw(form, 24):
        names = [name for name, _ in read_calls(make, [text], functions)[1]]
        assert len(names) == text.count(CITY), f"{text!r} has {text.count(CITY)} calls, and {names} are read"


def check_names_of_all_characters(make: MakeCalls) -> None:
    """Names that differ in letters which are no part of identifiers, and in the case of letters."""
    schema = make_rule({"city": CITY}).functions[0].parameters
    for name in ("a.b", "a_b", "a-b", "A-b", "a:b", "a/b", "2a"):
        rule = CallRule((Function(name, schema, is_strict=True),), is_required=True, is_parallel=False)
        for text in find_calls(make, rule)[:1]:
            called = [each for each, _ in read_calls(make, [text], rule.functions)[1]]
            assert called == [name], f"{text!r} is allowed for the function {name!r}, and calls {called}"


def check_rules_are_not_changed(make: MakeCalls) -> None:
    """The schemas of a rule are the client's, which the response may repeat."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "where": {"type": "object"}}}
    functions = (Function("f", schema, is_strict=True), Function("g", schema))
    before, parser = json.dumps(schema), _started(make(), functions)
    for is_required in (True, False):
        parser.grammar(CallRule(functions, is_required, is_parallel=True))
    assert json.dumps(schema) == before, f"grammar() changes the schema of a function from {before} to {json.dumps(schema)}"


def check_grammars_are_those_of_their_functions(make: MakeCalls) -> None:
    """Requests have functions of equal names with other parameters."""
    for number in (1, 2, 1):
        rule = make_rule({f"only_in_{number}": "x"})
        parser = make()
        parser.begin(rule.functions)
        form = parser.grammar(rule)
        if form is None:
            raise SkipCheck("the parser has no grammar")
        assert f"only_in_{number}" in json.dumps(form), "the grammar is that of another request, whose functions have the same names"


def check_grammars_are_those_of_their_rules(make: MakeCalls) -> None:
    """A parser that has given one grammar gives others as a new parser does: calls may be required
    or not, and one or several."""
    shared, functions = make(), _functions_of_a_request()
    shared.begin(functions)
    kinds = [(is_required, is_parallel) for is_required in (True, False) for is_parallel in (True, False)]
    for kind in [*kinds, *reversed(kinds)]:
        others = _functions_of_a_request()
        alone = _started(make(), others).grammar(CallRule(others, *kind))
        form = shared.grammar(CallRule(functions, *kind))
        assert form == alone, f"the grammar of calls with is_required, is_parallel = {kind} is another one after those of other rules"


def _functions_of_a_request() -> tuple[Function, ...]:
    """One whose schema always counts, and one whose schema counts where calls are required."""
    (strict,) = make_rule(ARGUMENTS[1]).functions
    return strict, Function("g", strict.parameters)


def check_a_piece_is_read_at_once(make: MakeCalls) -> None:
    require_quick_pieces(lambda: _started(make()))


def check_nothing_is_kept_of_responses(make: MakeCalls) -> None:
    require_bounded_responses(lambda: _started(make()))


def check_special_tokens_are_kept(make: MakeCalls) -> None:
    """Marks such as `<|x|>` are special tokens, which only `keeps_special_tokens` leaves in the
    text."""
    for text in _drawn(make, make_rule(ARGUMENTS[1])):
        match = re.search(r"<[|｜][^>]*[|｜]>", text)
        assert match is None or make().keeps_special_tokens, f"{match and match[0]} is a special token, and `keeps_special_tokens` is False"


def _started(parser: ToolCallParser, functions: Sequence[Function] | None = None) -> ToolCallParser:
    parser.begin(make_rule(ARGUMENTS[1]).functions if functions is None else functions)
    return parser


def make_rule(arguments: dict[str, Any], is_parallel: bool = False) -> CallRule:
    """One function, `f`, that takes these arguments alone."""
    values = {name: {"type": TYPES[type(value)], "const": value} for name, value in arguments.items()}
    schema = {"type": "object", "properties": values, "required": list(values), "additionalProperties": False}
    return CallRule((Function("f", schema, is_strict=True),), is_required=True, is_parallel=is_parallel)


def _drawn(make: MakeCalls, rule: CallRule) -> list[str]:
    """Texts that the parser's grammar of required calls allows. Raises SkipCheck without."""
    parser = make()
    parser.begin(rule.functions)
    form = parser.grammar(rule)
    if form is None:
        raise SkipCheck("the parser has no grammar, so no text is known to hold a call")
    texts = draw(form, 2)
    assert texts, f"no text of {STEPS} bytes that the grammar of one call allows ends"
    return texts


def find_calls(make: MakeCalls, rule: CallRule) -> list[str]:
    try:
        return _drawn(make, rule)
    except SkipCheck:
        return []


def _several(make: MakeCalls) -> list[str]:
    """Texts of one or more calls."""
    return _drawn(make, make_rule({"city": CITY})) + _drawn(make, make_rule({"city": CITY}, is_parallel=True))


def _json(text: str) -> Any:
    """The value of a JSON text; the text itself where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_values(calls: Calls) -> list[tuple[str, Any]]:
    """The calls with their arguments as values. Formats without quotes may have whitespace around a
    string."""
    values = [(name, _json(arguments)) for name, arguments in calls]
    for _, arguments in values:
        if isinstance(arguments, dict):
            arguments.update({name: value.strip() for name, value in arguments.items() if isinstance(value, str)})
    return values
