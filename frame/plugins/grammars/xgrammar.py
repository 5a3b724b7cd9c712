"""Grammars by xgrammar: JSON schema, any JSON object, regular expressions, EBNF, choices, structural tags.

Sources are bounded before the compiler sees them, and its cache is bounded, because both come from clients.
Knows one tokenizer and one vocabulary; which request has which grammar is the scheduler's.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xgrammar
from transformers import PreTrainedTokenizerFast

from frame.core.interfaces.sampling import GrammarBackend
from frame.plugins.grammars.options import XGrammarOptions

if TYPE_CHECKING:
    from pydantic import BaseModel

KINDS = ("json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag")
_LONGEST_REASON = 200
_PREAMBLE = re.compile(r"^\[[\d:]+\] \S+\.cc:\d+: (Check failed: .* is false: )?", re.DOTALL)  # where in the library's source


class XGrammar:
    """One request's matcher (`Grammar`)."""

    def __init__(self, compiled: Any, vocab_size: int, stop_token_ids: tuple[int, ...]) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._scratch = np.empty(-(-vocab_size // 32), np.int32)
        self._stops = np.zeros_like(self._scratch)
        for token in stop_token_ids:
            self._stops.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))

    def fill(self, mask: np.ndarray) -> bool:
        """See `Grammar.fill`; when the end was accepted everything is allowed."""
        if self._matcher.is_terminated():
            mask[...] = -1
            return False
        if not self._matcher.fill_next_token_bitmask(mask.reshape(1, -1)):
            mask[...] = -1
            return False
        return True

    def accept(self, token_id: int) -> bool:
        return not self._matcher.is_terminated() and bool(self._matcher.accept_token(token_id))

    def is_finished(self) -> bool:
        if self._matcher.is_terminated():
            return True
        return self.fill(self._scratch) and not (self._scratch & ~self._stops).any()


class XGrammarBackend(GrammarBackend):
    """Compiles for one tokenizer: a folder in Hugging Face layout, a `tokenizers.Tokenizer`, or what holds one as `backend`.

    End tokens are the tokenizer's `eos_token_ids` where it has them. Raises ValueError when the tokenizer cannot be read.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, options: BaseModel | None = None) -> None:
        self._options = options if isinstance(options, XGrammarOptions) else XGrammarOptions()
        self._vocab_size = vocab_size
        stops = [int(token) for token in getattr(tokenizer, "eos_token_ids", ())]
        info = xgrammar.TokenizerInfo.from_huggingface(_as_transformers(tokenizer), vocab_size=vocab_size, stop_token_ids=stops or None)
        self._stops = tuple(token for token in info.stop_token_ids if token < vocab_size)
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=self._options.threads, cache_enabled=True, cache_limit_bytes=self._options.cache_bytes
        )

    def compile(self, kind: str, source: str) -> XGrammar:
        """See `GrammarBackend.compile`. Raises ValueError, one sentence, for a grammar that is too large or does not compile."""
        if kind not in KINDS:
            raise ValueError(f"grammar kind {kind!r} is unknown; use {', '.join(KINDS)}")
        if len(source) > self._options.max_source_chars:
            raise ValueError(f"{kind} has {len(source)} characters; the limit is {self._options.max_source_chars}")
        if kind in ("json_schema", "structural_tag"):
            _check_depth(kind, source, self._options.max_depth)
        try:
            compiled = self._compile(kind, source)
        except Exception as error:  # the library raises RuntimeError, InvalidJSONError and others, some of many lines
            reason = " ".join(_PREAMBLE.sub("", str(error)).split())[:_LONGEST_REASON]
            raise ValueError(f"{kind} does not compile: {reason}") from error
        grammar = XGrammar(compiled, self._vocab_size, self._stops)
        first = np.empty(-(-self._vocab_size // 32), np.int32)
        if grammar.fill(first) and not first.any():  # root ::= root
            raise ValueError(f"{kind} allows no text at all")
        return grammar

    def _compile(self, kind: str, source: str) -> Any:
        if kind == "json_schema":
            return self._compiler.compile_json_schema(source, any_whitespace=self._options.any_whitespace)
        if kind == "json_object":
            return self._compiler.compile_json_schema('{"type": "object"}', any_whitespace=self._options.any_whitespace, strict_mode=False)
        if kind == "choice":
            texts = [{"type": "const_string", "value": text} for text in json.loads(source)]
            return self._compiler.compile_structural_tag({"type": "structural_tag", "format": {"type": "or", "elements": texts}})
        if kind == "structural_tag":
            return self._compiler.compile_structural_tag(source)
        if kind == "regex":
            return self._compiler.compile_regex(source)
        return self._compiler.compile_grammar(source)


def _as_transformers(tokenizer: Any) -> PreTrainedTokenizerFast:
    if isinstance(tokenizer, str | Path):
        return PreTrainedTokenizerFast.from_pretrained(str(tokenizer))
    return PreTrainedTokenizerFast(tokenizer_object=getattr(tokenizer, "backend", tokenizer))


def _check_depth(kind: str, source: str, limit: int) -> None:
    """Refuse nesting that a recursive compiler might not survive, before anything recursive reads it."""
    depth, is_string, is_escaped = 0, False, False
    for char in source:
        if is_escaped:
            is_escaped = False
        elif is_string:
            is_escaped, is_string = char == "\\", char != '"'
        elif char in "{[":
            depth += 1
            if depth > limit:
                raise ValueError(f"{kind} is nested deeper than {limit} levels")
        else:
            is_string = char == '"'
            depth -= char in "}]"
    try:
        parsed = json.loads(source)
    except ValueError as error:
        raise ValueError(f"{kind} is no JSON: {error}") from None
    if not isinstance(parsed, dict | bool):
        raise ValueError(f"{kind} must be a JSON object")
