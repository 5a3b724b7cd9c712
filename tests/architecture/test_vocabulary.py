"""Holds the vocabulary of docs/glossary.md: words that this project replaced may not return, in
code or documents."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.architecture.source import ROOT

PLACES = (
    "*.md",
    "docs/**/*.md",
    "changelog/*.md",
    "benchmarks/**/*.md",
    "benchmarks/*.py",
    "examples/**/*.py",
    "examples/**/*.md",
    "examples/*.yaml",
    "frame/**/*.py",
    "packages/**/*.py",
    "packages/**/*.md",
    "scripts/**/*.py",
    "tests/**/*.py",
)
# The tables have to name the words; the text in `checkpoints` decides a test tokenizer's bytes.
EXEMPT = {"frame/plugins/renames.py", "frame/testing/checkpoints.py", "tests/architecture/test_vocabulary.py"}
HELD_OUT = "tests/testing/held_out/"  # plugins in the words of another author, as they were measured

# A pattern over text in lower case, with camel case split by `_` -> what to write instead.
WORDS: dict[str, str] = {
    r"ledgers?": "KV cache manager",
    r"rosters?": "in-flight file, request hash",
    r"re-?admi(t|ts|tted|tting|ssions?)": "request recovery, recover",
    r"retract(s|ed|ing|ions?)?": "preempt",
    r"(give|gives|gave|given|giving)[ _]way": "preempt, or say what happens",
    r"(is|are|was|were|be)[ _]set[ _]back": "preempt",
    r"pushed[ _](off|back)": "preempt",
    r"shared[ _]starts?": "in-batch prefix sharing",
    r"paired[ _]attention": "hybrid attention",
    r"step[ _]outcomes?": "output processor",
    r"riders?": "step arrays",
    r"masks?[ _](that[ _])?follows?": "deferred grammar mask",
    r"narrows": "supports_token_selection",
    r"wanted[ _]tokens": "SelectedTokens",
    r"laws?": "contract, invariant",
    r"pil(e|es|ed|ing)[ _]up": "add_unread, accumulate",
    r"by[ _]kernels": "use_triton",
    r"materialis(e|es|ed|ing)": "allocate",
    r"nobody(s)?": "name the owner, or use the passive",
    r"whoever": "name the actor",
    r"strangers?": "third party",
    r"killers?": "name the cause",
    r"heed(s|ed)?": "apply, read, respect",
}
# Identifiers (names, arguments, attributes, functions) that have a replacement.
IDENTIFIERS = {
    "alike": "common_prefix_len",
    "facts": "model_config",
    "needs": "requirements",
    "num_recent": "token_buffer_len",
    "mistakes": "validation_errors",
    "taps": "hidden_outputs",
    "unsettled": "pending",
    "settle": "resolve",
    "given": "explicit, or a name for the value",
    "wanted": "a name for the value",
    "found": "a name for the value",
    "most": "maximum",
    "longest": "max_length",
    "least": "minimum",
}
# Class names, anywhere in the package.
CLASSES = {
    "Answer": "RequestState",
    "Stream": "SequenceState",
    "Standing": "RecoveryState",
    "Feed": "TokenRouter",
    "Terms": "RequestOptions",
    "Share": "QuotaLease",
    "Shares": "TenantQuota",
    "Call": "RequestContext",
    "Watch": "StartDetokenize",
    "Tokens": "StepTokens",
    "Text": "StepText",
    "Halves": "SplitPlan",
    "PlainNeeds": "requirements",
    "ModelNeeds": "ModelRequirements",
    "AttentionNeeds": "AttentionRequirements",
    "QuantizationNeeds": "QuantizationRequirements",
    "MoENeeds": "MoERequirements",
}
# Fields of one class each, since the words are good English elsewhere.
FIELDS = {
    "SlotArrays.known": "num_committed_tokens",
    "SlotArrays.computed": "num_computed_tokens",
    "SlotArrays.total": "num_tokens",
    "SlotArrays.ready": "can_decode",
    "SlotArrays.recent": "token_buffer",
    "ScheduledBatch.cached": "skip_kv_store",
    "Generate.segment": "second_text_start",
    "Request.segment": "second_text_start",
    "SlotSetup.segment": "second_text_start",
}
# Without a look behind: a search for a pattern that begins with letters is a fast one.
COMPILED = {re.compile(rf"(?:{pattern})(?![a-z])"): remedy for pattern, remedy in WORDS.items()}


def words_in(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, word, remedy) for each replaced word in the text."""
    plain = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", text).lower()
    plain = re.sub(r"num_retracted_requests|[\"`]retract[\"`]", "", plain)  # a metric of SGLang, a mode of its pauses
    for pattern, remedy in COMPILED.items():
        for match in pattern.finditer(plain):
            if not re.match("[a-z]", plain[max(0, match.start() - 1) : match.start()]):
                yield plain.count("\n", 0, match.start()) + 1, match[0], remedy


def names_in(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, name, remedy) for each replaced identifier, class or field in Python source."""
    for node in ast.walk(ast.parse(text)):
        name = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "attr", None) or getattr(node, "name", None)
        if not isinstance(node, ast.alias) and name in IDENTIFIERS:
            yield getattr(node, "lineno", 1), name, IDENTIFIERS[name]
        if isinstance(node, ast.ClassDef):
            if node.name in CLASSES:
                yield node.lineno, f"class {node.name}", CLASSES[node.name]
            for part in node.body:
                field = f"{node.name}.{ast.unparse(part.target)}" if isinstance(part, ast.AnnAssign) else ""
                if field in FIELDS:
                    yield part.lineno, field, FIELDS[field]


def readable(path: str, text: str) -> str:
    """The text without what may name a replaced word: ids of tests in documents, code spans in
    change notes."""
    if not path.endswith(".md"):
        return text
    text = re.sub(r"`[^`\n]*::[^`\n]*`", "", text)
    return re.sub(r"`[^`\n]*`", "", text) if path.startswith("changelog/") or path == "CHANGELOG.md" else text


def breaches(path: str, text: str) -> list[str]:
    found = [*words_in(readable(path, text)), *(names_in(text) if path.endswith(".py") and path.startswith("frame/") else ())]
    return [f"{path}:{line}: {word!r}: write {remedy}" for line, word, remedy in sorted(set(found))]


def all_breaches() -> dict[str, list[str]]:
    files = sorted({path for place in PLACES for path in ROOT.glob(place)})
    names = [path.relative_to(ROOT).as_posix() for path in files if not {"__pycache__", "templates"} & {*path.parts}]
    found = {name: breaches(name, (ROOT / name).read_text()) for name in names if name not in EXEMPT and not name.startswith(HELD_OUT)}
    return {name: lines for name, lines in found.items() if lines}


def test_replaced_words_do_not_return() -> None:
    assert [line for lines in all_breaches().values() for line in lines] == []


def test_checks_find() -> None:
    for text in ("nobody's", "PageLedger", "test_nobody_is_asked", "a row that gives way", "mask_follows = 1", "Retracted", "re-admission"):
        assert list(words_in(text)), text
    assert list(words_in("flaws, lawn, sglang:num_retracted_requests, border, the slower half")) == []
    assert list(names_in("facts = 1"))
    assert list(names_in("def f(needs): ..."))
    assert list(names_in("class Answer: ..."))
    assert list(names_in("class SlotArrays:\n    known: int"))
    assert list(names_in("class Other:\n    known: int\n    total: int")) == []
    assert breaches("docs/security.md", "`tests/x.py::test_nobody` is fine") == []
    assert breaches("changelog/x.changed.md", "`narrows` is now `supports_token_selection`.") == []
    assert breaches("docs/x.md", "Laws hold.") == ["docs/x.md:1: 'laws': write contract, invariant"]
