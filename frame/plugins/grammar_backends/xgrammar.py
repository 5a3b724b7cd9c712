"""The grammar backend `xgrammar`: JSON schema, JSON objects, regular expressions, EBNF, choices,
structural tags.

Knows one tokenizer and one vocabulary. The engine limits time and memory.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import xgrammar
from pydantic import BaseModel
from transformers import PreTrainedTokenizerFast

from frame.core.interfaces.sampling import CompiledGrammar, GrammarBackend, GrammarContext
from frame.plugins.grammar_backends.options import XGrammarOptions
from frame.plugins.grammar_backends.sources import check_source, one_sentence

_PREAMBLE = re.compile(r"^\[[\d:]+\] \S+\.cc:\d+: (Check failed: .* is false: )?", re.DOTALL)  # source location and failed check


class XGrammar:
    """One request's matcher (`Grammar`)."""

    def __init__(self, compiled: XCompiled) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled.handle)
        self._vocabulary = compiled.vocabulary
        self._next: np.ndarray | None = None  # the mask, if `is_finished` has computed it

    def fill_mask(self, mask: np.ndarray) -> bool:
        """See `Grammar.fill_mask`. All tokens are allowed after the end token."""
        if self._next is not None:
            mask[:] = self._next
            return True
        if self._matcher.is_terminated() or not self._matcher.fill_next_token_bitmask(mask.reshape(1, -1)):
            mask[...] = -1
            return False
        return True

    def accept_token(self, token_id: int) -> bool:
        self._next = None
        return not self._matcher.is_terminated() and bool(self._matcher.accept_token(token_id))

    def is_finished(self) -> bool:
        if self._matcher.is_terminated():
            return True
        if not self._matcher.is_completed():
            return False
        words = np.empty(self._vocabulary.words, np.int32)
        if not self.fill_mask(words):  # every token may follow
            return False
        self._next = words
        return not (words & self._vocabulary.others).any()

    def rollback_tokens(self, count: int) -> None:
        self._next = None
        if count:
            self._matcher.rollback(count)


class Vocabulary:
    """The end tokens of a vocabulary. `others`: the bits of all other tokens, int32 [words]."""

    def __init__(self, size: int, stop_token_ids: tuple[int, ...]) -> None:
        self.words = -(-size // 32)
        self.others = np.full(self.words, -1, np.int32)
        for token in stop_token_ids:
            self.others.view(np.uint32)[token // 32] &= ~np.uint32(1 << (token % 32))


class XCompiled:
    """A compiled grammar (`CompiledGrammar`)."""

    def __init__(self, handle: Any, vocabulary: Vocabulary, num_bytes: int = 0) -> None:
        self.handle = handle
        self.vocabulary = vocabulary
        self.num_bytes = max(num_bytes, int(handle.memory_size_bytes))  # the library's figure leaves some parts out

    def start(self) -> XGrammar:
        return XGrammar(self)


class XGrammarBackend(GrammarBackend):
    """Compiles for one tokenizer: a folder in Hugging Face layout, a `tokenizers.Tokenizer`, or an
    object that holds one as `backend`.

    The end tokens are the tokenizer's `eos_token_ids` if it has them. Raises ValueError if the
    tokenizer cannot be read.
    """

    def __init__(self, context: GrammarContext, options: BaseModel | None = None) -> None:
        self._options = options if isinstance(options, XGrammarOptions) else XGrammarOptions()
        tokenizer, vocab_size = context.tokenizer, context.vocab_size
        stops = [int(token) for token in getattr(tokenizer, "eos_token_ids", ())]
        self._info = xgrammar.TokenizerInfo.from_huggingface(
            _as_transformers(tokenizer), vocab_size=vocab_size, stop_token_ids=stops or None
        )
        self._vocabulary = Vocabulary(vocab_size, tuple(token for token in self._info.stop_token_ids if token < vocab_size))
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=self._options.threads, cache_enabled=False)

    def compile(self, kind: str, source: str) -> XCompiled:
        """See `GrammarBackend.compile`. Raises ValueError, one sentence, for a grammar that is too
        large or does not compile."""
        check_source(kind, source, self._options.max_source_chars, self._options.max_depth, pointers_only=True)
        try:
            compiled = XCompiled(self._compile(kind, source), self._vocabulary)
        except Exception as error:  # the library raises RuntimeError, InvalidJSONError and others, some of many lines
            raise ValueError(one_sentence(kind, _PREAMBLE.sub("", str(error)))) from error
        first = np.empty(self._vocabulary.words, np.int32)
        if compiled.start().fill_mask(first) and not first.any():  # root ::= root
            raise ValueError(f"{kind} allows no text at all")
        return compiled

    def dump(self, compiled: CompiledGrammar) -> bytes:
        return str(compiled.handle.serialize_json()).encode() if isinstance(compiled, XCompiled) else b""

    def load(self, kind: str, source: str, data: bytes) -> XCompiled:
        return XCompiled(xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._info), self._vocabulary, len(data))

    def _compile(self, kind: str, source: str) -> Any:
        if kind in ("json_schema", "json_object"):
            return self._compiler.compile_json_schema(
                source or '{"type": "object"}',
                strict_mode=kind == "json_schema",
                **self._whitespace(),
            )
        if kind == "choice":
            texts = [{"type": "const_string", "value": text} for text in json.loads(source)]
            return self._compiler.compile_structural_tag({"type": "structural_tag", "format": {"type": "or", "elements": texts}})
        if kind == "structural_tag":
            return self._compiler.compile_structural_tag(self._compact(json.loads(source)))
        if kind == "regex":
            return self._compiler.compile_regex(source)
        if kind == "ebnf":
            return self._compiler.compile_grammar(source)
        raise ValueError(f"grammar kind {kind!r} is unknown")

    def _whitespace(self) -> dict[str, Any]:
        """The arguments for whitespace. Without free whitespace there is a space after each comma
        and colon: the library has no other separators for the parts that a schema leaves open."""
        if self._options.any_whitespace:
            return {"any_whitespace": True, "max_whitespace_cnt": self._options.max_whitespace}
        return {"any_whitespace": False}

    def _compact(self, form: Any) -> Any:
        """Apply the whitespace options to the JSON parts of a structural tag that do not set them:
        the library has no field for that."""
        if isinstance(form, list):
            return [self._compact(each) for each in form]
        if not isinstance(form, dict):
            return form
        if form.get("type") == "json_schema" and "whitespace_pattern" in form:
            raise ValueError("whitespace_pattern is not supported by xgrammar; use disable_any_whitespace: false")
        if form.get("type") != "json_schema" or "max_whitespace_cnt" in form:
            return {key: value if key == "json_schema" else self._compact(value) for key, value in form.items()}
        if form.get("style", "json") != "json" or set(form) - {"type", "json_schema", "style"}:
            return {**form, "max_whitespace_cnt": self._options.max_whitespace if self._options.any_whitespace else 1}
        grammar = xgrammar.Grammar.from_json_schema(json.dumps(form.get("json_schema")), **self._whitespace())
        return {"type": "grammar", "grammar": str(grammar)}


def _as_transformers(tokenizer: Any) -> PreTrainedTokenizerFast:
    if isinstance(tokenizer, str | Path):
        return PreTrainedTokenizerFast.from_pretrained(str(tokenizer), local_files_only=True, trust_remote_code=False)
    return PreTrainedTokenizerFast(tokenizer_object=getattr(tokenizer, "backend", tokenizer))
