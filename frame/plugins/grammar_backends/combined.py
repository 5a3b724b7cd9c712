"""The grammar backend `combined`: llguidance, and xgrammar for grammars that llguidance does not
support.

Knows one tokenizer and one vocabulary. xgrammar takes seconds to load and is loaded on first use.
"""

from __future__ import annotations

import threading

from pydantic import BaseModel

from frame.core.interfaces.sampling import CompiledGrammar, GrammarBackend, GrammarContext
from frame.plugins.grammar_backends.library_errors import WorkLimitError
from frame.plugins.grammar_backends.llguidance import LLGuidanceBackend
from frame.plugins.grammar_backends.options import XGrammarOptions
from frame.plugins.grammar_backends.sources import SourceError


class CombinedBackend(GrammarBackend):
    """Compiles for one tokenizer. Raises ValueError if one of the libraries cannot read it."""

    def __init__(self, context: GrammarContext, options: BaseModel | None = None) -> None:
        options = options if isinstance(options, XGrammarOptions) else XGrammarOptions()
        self._context, self._options = context, options
        self._llguidance = LLGuidanceBackend(context, options)
        self._xgrammar: GrammarBackend | None = None
        self._lock = threading.Lock()  # guards `_xgrammar`

    def compile(self, kind: str, source: str) -> CompiledGrammar:
        """See `GrammarBackend.compile`. The error of a grammar that both reject is llguidance's.
        xgrammar would take until the time limit for one that exceeds llguidance's work limits."""
        try:
            return self._llguidance.compile(kind, source)
        except (SourceError, WorkLimitError):
            raise
        except ValueError as refusal:
            try:
                return self._load_xgrammar().compile(kind, source)
            except ValueError:
                raise refusal from None

    def dump(self, compiled: CompiledGrammar) -> bytes:
        return b"" if self._xgrammar is None else self._xgrammar.dump(compiled)

    def load(self, kind: str, source: str, data: bytes) -> CompiledGrammar:
        return self._load_xgrammar().load(kind, source, data) if data else self._llguidance.load(kind, source, data)

    def _load_xgrammar(self) -> GrammarBackend:
        with self._lock:
            if self._xgrammar is None:
                with self._context.without_limits():
                    from frame.plugins.grammar_backends.xgrammar import XGrammarBackend

                    self._xgrammar = XGrammarBackend(self._context, self._options)
            return self._xgrammar
