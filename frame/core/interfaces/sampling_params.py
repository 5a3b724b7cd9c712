"""`SamplingParams`: how the tokens of one request are sampled, and when it ends. A wire struct;
must not know a tokenizer or a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

MAX_STOP = 16
MAX_STOP_IDS = 64
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_BIASES = 4096
MAX_CUSTOM = 64
MAX_CUSTOM_CHARS = 64 * 1024
MAX_GRAMMAR_CHARS = 256 * 1024
MAX_LOGPROBS = 20
MIN_REPETITION_PENALTY = 0.01
MAX_JSON_WHITESPACE = 8  # characters between the parts of JSON; without a limit a model may write whitespace without end
MAX_DRAFT = 16  # tokens
MAX_INT = 2**31 - 1  # of counts and ids, which engines keep in 32 bits


class ParamProblem(NamedTuple):
    """Why a request cannot be served: the parameter's name, and a sentence for the client."""

    param: str
    sentence: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters, with the names of the OpenAI API and SGLang.

    `max_tokens=None`: up to the end of the context. `temperature=0`: greedy. `top_k=-1` (or 0) and
    `top_p=1`: off. `seed=None`: random. `stop` strings are matched on text. `stop_token_ids` end a
    request even where `ignore_eos` disables the model's end tokens. `logprobs=k` returns the
    log-probabilities of the sampled token and of the k likeliest (0: of the sampled token only;
    None: none); `prompt_logprobs` does so for the prompt. `logit_bias` adds to single logits. At
    most one of `json_schema`, `json_object`, `regex`, `ebnf`, `choice` (one of these texts) and
    `structural_tag` (JSON: which grammar holds where in free text) constrains the output. JSON has
    no whitespace unless `disable_any_whitespace` is false. `num_speculative_tokens`: most drafted
    tokens a step where the server drafts (0: none; None: as many as it is set to).
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # the tokenizer fills this from bad_words
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    ebnf: str | None = None
    choice: tuple[str, ...] | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    num_speculative_tokens: int | None = None
    custom: dict[str, str] = {}  # for third-party logits processors

    def __post_init__(self) -> None:
        # `stop="END"` is one stop string, not three letters
        for name, value in (("stop", self.stop), ("bad_words", self.bad_words), ("choice", self.choice)):
            if isinstance(value, str):
                msgspec.structs.force_setattr(self, name, (value,))
        if self.top_k == 0:  # off in vLLM, -1 in SGLang
            msgspec.structs.force_setattr(self, "top_k", -1)

    def problems(self, vocab_size: int | None = None) -> list[ParamProblem]:
        """Every reason why these parameters cannot be served; each sentence names the parameter and
        its range."""
        problems = [*self._out_of_range(), *self._too_large()]
        if vocab_size is not None:
            problems += [
                ParamProblem(name, f"{name} holds the token id {i}, outside the vocabulary (0 to {vocab_size - 1})")
                for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids))
                for i in ids
                if not 0 <= i < vocab_size
            ]
        return problems

    def _out_of_range(self) -> Iterator[ParamProblem]:
        """Values out of range. Each condition states the valid range, so that NaN fails it."""
        if not (self.max_tokens is None or self.max_tokens >= 1):
            yield ParamProblem("max_tokens", f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.min_tokens <= MAX_INT:
            yield ParamProblem("min_tokens", f"min_tokens is {self.min_tokens}; it must be from 0 to {MAX_INT}")
        if not (self.max_tokens is None or self.min_tokens <= self.max_tokens):
            yield ParamProblem("min_tokens", f"min_tokens is {self.min_tokens}, above max_tokens ({self.max_tokens})")
        if not 1 <= self.n <= 128:
            yield ParamProblem("n", f"n is {self.n}; it must be from 1 to 128")
        if not 0.0 <= self.temperature <= 100.0:
            yield ParamProblem("temperature", f"temperature is {self.temperature}; it must be from 0 to 100")
        if not 0.0 < self.top_p <= 1.0:
            yield ParamProblem("top_p", f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not (self.top_k == -1 or 1 <= self.top_k <= MAX_INT):
            yield ParamProblem("top_k", f"top_k is {self.top_k}; it must be 0 or -1 (off), or from 1 to {MAX_INT}")
        if not 0.0 <= self.min_p <= 1.0:
            yield ParamProblem("min_p", f"min_p is {self.min_p}; it must be from 0 to 1")
        if not -2.0 <= self.frequency_penalty <= 2.0:
            yield ParamProblem("frequency_penalty", f"frequency_penalty is {self.frequency_penalty}; it must be from -2 to 2")
        if not -2.0 <= self.presence_penalty <= 2.0:
            yield ParamProblem("presence_penalty", f"presence_penalty is {self.presence_penalty}; it must be from -2 to 2")
        if not MIN_REPETITION_PENALTY <= self.repetition_penalty <= 10.0:  # logits are divided by it, and must stay finite in 32 bits
            yield ParamProblem(
                "repetition_penalty", f"repetition_penalty is {self.repetition_penalty}; it must be from {MIN_REPETITION_PENALTY} to 10"
            )
        if not (self.seed is None or -(2**63) <= self.seed < 2**63):
            yield ParamProblem("seed", f"seed is {self.seed}; it must fit in 64 bits")
        if not (self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS):
            yield ParamProblem("logprobs", f"logprobs is {self.logprobs}; it must be from 0 to {MAX_LOGPROBS}")
        if not (self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS):
            yield ParamProblem("prompt_logprobs", f"prompt_logprobs is {self.prompt_logprobs}; it must be from 0 to {MAX_LOGPROBS}")
        if not (self.num_speculative_tokens is None or 0 <= self.num_speculative_tokens <= MAX_DRAFT):
            yield ParamProblem(
                "num_speculative_tokens",
                f"num_speculative_tokens is {self.num_speculative_tokens}; it must be from 0 (no drafts) to {MAX_DRAFT}",
            )
        if not all(-100.0 <= bias <= 100.0 for bias in self.logit_bias.values()):
            yield ParamProblem("logit_bias", "logit_bias holds a value outside -100 to 100")
        if not all(0 <= token <= MAX_INT for word in self.bad_words_ids for token in word):
            yield ParamProblem("bad_words_ids", f"bad_words_ids has an id outside 0 to {MAX_INT}")
        if not all(self.stop):
            yield ParamProblem("stop", "stop holds an empty string; leave it out")
        if not all(self.bad_words):
            yield ParamProblem("bad_words", "bad_words holds an empty string; leave it out")
        if self.choice is not None and not all(self.choice or [""]):
            fault = "holds an empty string" if self.choice else "is empty"
            yield ParamProblem("choice", f"choice {fault}; leave it out")
        if len(grammars := self._grammars()) > 1:
            yield ParamProblem(grammars[0][0], f"{' and '.join(name for name, _ in grammars)} exclude each other; keep one")

    def _too_large(self) -> Iterator[ParamProblem]:
        """Values that would cost too much time or memory."""
        if len(self.stop) > MAX_STOP:
            yield ParamProblem("stop", f"stop has {len(self.stop)} strings; it may have {MAX_STOP}")
        if any(len(text) > MAX_STOP_CHARS for text in self.stop):
            yield ParamProblem("stop", f"stop holds a string of more than {MAX_STOP_CHARS} characters")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            yield ParamProblem("stop_token_ids", f"stop_token_ids has {len(self.stop_token_ids)} ids; it may have {MAX_STOP_IDS}")
        if len(self.bad_words) + len(self.bad_words_ids) > MAX_BAD_WORDS:
            yield ParamProblem(
                "bad_words", f"bad_words has {len(self.bad_words) + len(self.bad_words_ids)} words; it may have {MAX_BAD_WORDS}"
            )
        if any(len(word) > MAX_BAD_WORD_CHARS for word in (*self.bad_words, *self.bad_words_ids)):
            yield ParamProblem("bad_words", f"bad_words holds a word of more than {MAX_BAD_WORD_CHARS} characters")
        if len(self.logit_bias) > MAX_BIASES:
            yield ParamProblem("logit_bias", f"logit_bias has {len(self.logit_bias)} tokens; it may have {MAX_BIASES}")
        if len(self.custom) > MAX_CUSTOM:
            yield ParamProblem("custom", f"custom has {len(self.custom)} entries; it may have {MAX_CUSTOM}")
        if any(len(text) > MAX_CUSTOM_CHARS for text in (*self.custom, *self.custom.values())):
            yield ParamProblem("custom", f"custom holds a text of more than {MAX_CUSTOM_CHARS} characters")
        for name in ("json_schema", "regex", "ebnf", "structural_tag"):
            if len(source := getattr(self, name) or "") > MAX_GRAMMAR_CHARS:
                yield ParamProblem(name, f"{name} has {len(source)} characters; it may have {MAX_GRAMMAR_CHARS}")
        if (size := sum(map(len, self.choice or ()))) > MAX_GRAMMAR_CHARS:
            yield ParamProblem("choice", f"choice has {size} characters; it may have {MAX_GRAMMAR_CHARS}")

    def ends(self, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The token ids that end this request, without duplicates, given the model's end tokens."""
        return tuple(dict.fromkeys((*(() if self.ignore_eos else eos_ids), *self.stop_token_ids)))

    @property
    def grammar(self) -> tuple[str, str] | None:
        """(kind, source) of the grammar that constrains the output; None: no constraint."""
        return next(iter(self._grammars()), None)

    def _grammars(self) -> list[tuple[str, str]]:
        texts = [(kind, getattr(self, kind)) for kind in ("json_schema", "regex", "ebnf", "structural_tag")]
        grammars = [(kind, source) for kind, source in texts if source is not None]
        if self.json_object:
            grammars.append(("json_object", ""))
        if not self.disable_any_whitespace:
            grammars = [_spaced(kind, source) if kind in ("json_schema", "json_object") else (kind, source) for kind, source in grammars]
        if self.choice:
            grammars.append(("choice", msgspec.json.encode(self.choice).decode()))
        return grammars


def _spaced(kind: str, source: str) -> tuple[str, str]:
    """The same JSON with whitespace between its parts, as a structural tag: the kind and source of
    a grammar cannot say so."""
    schema = msgspec.Raw(source.encode()) if kind == "json_schema" else {"type": "object"}
    form = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_JSON_WHITESPACE}
    return "structural_tag", msgspec.json.encode({"type": "structural_tag", "format": form}).decode()
