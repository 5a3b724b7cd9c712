"""The grammar backend `automata`: regular grammars as automata, all others by frame's backend
`combined`.

Knows one tokenizer and one vocabulary. Reaches `combined` by name, through the registry.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING

from llguidance import LLTokenizer

from frame.core.interfaces.sampling import GrammarBackend
from frame.plugins.grammar_backends import ebnf
from frame.plugins.grammar_backends.closed_schema import close_schema
from frame.plugins.grammar_backends.ebnf import UnsupportedSyntaxError
from frame.plugins.grammar_backends.options import XGrammarOptions
from frame.plugins.grammar_backends.sources import check_source, one_sentence
from frame.plugins.grammar_backends.states.regular import Language, Node
from frame.plugins.grammar_backends.states.regular_syntax import literals, read
from frame.plugins.grammar_backends.states.schema_language import read_schema
from frame.plugins.loader import load_registry
from frame_automata.automaton import AutomatonCompiled, Masks, Vocabulary
from frame_automata.regular_ebnf import read_rules
from frame_automata.states import TooMuchWorkError

if TYPE_CHECKING:
    from frame.core.interfaces.sampling import CompiledGrammar, GrammarContext

FALLBACK = "combined"
REGULAR_KINDS = ("regex", "choice", "ebnf", "json_schema")


class AutomataBackend(GrammarBackend):
    """Compiles for one tokenizer: a `tokenizers.Tokenizer`, or an object that holds one as
    `backend`, with its `eos_token_ids`.

    Raises ValueError when the tokenizer cannot be read or is larger than the model's vocabulary.
    """

    def __init__(self, context: GrammarContext, options: XGrammarOptions | None = None) -> None:
        self._options = options or XGrammarOptions()
        self._tokenizer, self._vocab_size = context.tokenizer, context.vocab_size
        registry = load_registry(installed=False)
        self._fallback: GrammarBackend = registry.load(registry.get("grammar_backend", FALLBACK))(context, self._options)
        self._masks: Masks | None = None
        self._lock = threading.Lock()  # guards the construction of `_masks`

    def compile(self, kind: str, source: str) -> CompiledGrammar:
        """See `GrammarBackend.compile`. Raises ValueError, one sentence, for a grammar that is too
        large or does not compile."""
        if kind not in REGULAR_KINDS:
            return self._fallback.compile(kind, source)
        check_source(kind, source, self._options.max_source_chars, self._options.max_depth)
        try:
            return self._compile_regular(kind, source)
        except (UnsupportedSyntaxError, TooMuchWorkError, RecursionError):
            return self._fallback.compile(kind, source)  # it supports more syntax, or says what is wrong
        except ValueError as error:
            raise ValueError(one_sentence(kind, str(error))) from error

    def dump(self, compiled: CompiledGrammar) -> bytes:
        return b"" if isinstance(compiled, AutomatonCompiled) else self._fallback.dump(compiled)

    def load(self, kind: str, source: str, data: bytes) -> CompiledGrammar:
        return self._fallback.load(kind, source, data) if data else self.compile(kind, source)

    def _compile_regular(self, kind: str, source: str) -> AutomatonCompiled:
        language = Language()
        node: Node | None
        if kind == "ebnf":
            node = read_rules(language, ebnf.read(source))
            if node is None:
                raise UnsupportedSyntaxError("the grammar is recursive")
        elif kind == "regex":
            node = read(language, source)
        elif kind == "json_schema":
            whitespace = self._options.max_whitespace if self._options.any_whitespace else 0
            node = read_schema(language, close_schema(json.loads(source)), whitespace)
        else:
            node = literals(language, json.loads(source))
        return AutomatonCompiled(language, node, self._get_masks(), lambda: self._fallback.compile(kind, source).start())

    def _get_masks(self) -> Masks:
        """The masks of this vocabulary, built on first use: 0.3 s for 128,000 tokens."""
        with self._lock:
            if self._masks is None:
                backend = getattr(self._tokenizer, "backend", self._tokenizer)
                stops = [int(token) for token in getattr(self._tokenizer, "eos_token_ids", ()) if token < self._vocab_size]
                table = LLTokenizer(backend.to_str(), n_vocab=self._vocab_size, eos_token=stops or None)
                texts = [b"" if table.is_special_token(i) else table.decode_bytes([i]) for i in range(table.vocab_size)]
                self._masks = Masks(Vocabulary(texts, frozenset(table.eos_tokens), table.tokenize_bytes))
            return self._masks
