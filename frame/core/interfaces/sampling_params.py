"""`SamplingParams`: how the tokens of one request are sampled, and when it ends. A wire struct;
must not know a tokenizer or a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

MAX_STOP = 16
MAX_STOP_IDS = 64
MAX_STOP_CHARS = 1024  # of a stop string or pattern
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_BIASES = 4096
MAX_CUSTOM = 64
MAX_CUSTOM_CHARS = 64 * 1024
MAX_GRAMMAR_CHARS = 256 * 1024
MAX_LOGPROBS = 20
MAX_LOGPROB_IDS = 128
MIN_REPETITION_PENALTY = 0.01
MAX_WHITESPACE_CHARS = 256  # of a whitespace pattern
MAX_JSON_WHITESPACE = 8  # characters between the parts of JSON; without a limit a model may write whitespace without end
MAX_DRAFT = 16  # tokens
MAX_STREAM_INTERVAL = 1024  # tokens
MAX_INT = 2**31 - 1  # of counts and ids, which engines keep in 32 bits


class ParamProblem(NamedTuple):
    """Why a request cannot be served: the parameter's name, and a sentence for the client."""

    param: str
    sentence: str


_JSON = ("json_schema", "json_object")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters, with the names of the OpenAI API and SGLang.

    `max_tokens=None`: up to the end of the context. `temperature=0`: greedy. `top_k=-1` (or 0) and
    `top_p=1`: off. `seed=None`: random. `stop` strings and `stop_regex` patterns are matched on
    text. `stop_token_ids` end a request even where `ignore_eos` disables the model's end tokens.
    `logprobs=k` returns the log-probabilities of the sampled token and of the k likeliest (0: of
    the sampled token only; None: none), and of the tokens in `logprob_token_ids`; `prompt_logprobs`
    does so for the prompt. `return_hidden_states` returns the hidden states of the last layer; the
    engine itself returns those of the prompt's tokens, with the first token. `logit_bias` adds to
    single logits. At most one of `json_schema`, `json_object`, `regex`, `ebnf`, `choice` (one of
    these texts) and `structural_tag` (JSON: which grammar holds where in free text) constrains the
    output. JSON has no whitespace unless `disable_any_whitespace` is false.
    `num_speculative_tokens`: most drafted tokens a step where the server drafts (0: none; None: as
    many as it is set to).
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
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # the tokenizer fills this from bad_words
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    return_hidden_states: bool = False
    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    ebnf: str | None = None
    choice: tuple[str, ...] | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = True
    whitespace_pattern: str | None = None  # regular expression of the whitespace in JSON
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    num_speculative_tokens: int | None = None
    thinking_token_budget: int | None = None  # tokens of reasoning
    thinking_start_ids: tuple[int, ...] = ()  # in chats the reasoning parser sets both; empty: the prompt opens the reasoning
    thinking_end_id: int | None = None
    stream_interval: int = 1  # tokens of one event of a stream; the first token is sent at once
    custom: dict[str, str] = {}  # for third-party logits processors

    def __post_init__(self) -> None:
        # `stop="END"` is one stop string, not three letters
        for name, value in (("stop", self.stop), ("stop_regex", self.stop_regex), ("bad_words", self.bad_words), ("choice", self.choice)):
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
                for name, ids in (
                    ("logit_bias", self.logit_bias),
                    ("stop_token_ids", self.stop_token_ids),
                    ("logprob_token_ids", self.logprob_token_ids),
                    ("thinking_start_ids", self.thinking_start_ids),
                    ("thinking_end_id", () if self.thinking_end_id is None else (self.thinking_end_id,)),
                )
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
        if self.logprob_token_ids and self.logprobs is None:
            yield ParamProblem("logprob_token_ids", "logprob_token_ids needs logprobs; send both, or neither")
        if not (self.num_speculative_tokens is None or 0 <= self.num_speculative_tokens <= MAX_DRAFT):
            yield ParamProblem(
                "num_speculative_tokens",
                f"num_speculative_tokens is {self.num_speculative_tokens}; it must be from 0 (no drafts) to {MAX_DRAFT}",
            )
        if not (self.thinking_token_budget is None or 0 <= self.thinking_token_budget <= MAX_INT):
            yield ParamProblem(
                "thinking_token_budget", f"thinking_token_budget is {self.thinking_token_budget}; it must be from 0 to {MAX_INT}"
            )
        if self.thinking_token_budget is not None and self.thinking_end_id is None:
            sentence = "thinking_token_budget needs thinking_end_id, the id of the token that ends the reasoning; send it too"
            yield ParamProblem("thinking_token_budget", sentence)
        if not 1 <= self.stream_interval <= MAX_STREAM_INTERVAL:
            sentence = f"stream_interval is {self.stream_interval}; it must be from 1 to {MAX_STREAM_INTERVAL}"
            yield ParamProblem("stream_interval", sentence)
        if not all(-100.0 <= bias <= 100.0 for bias in self.logit_bias.values()):
            yield ParamProblem("logit_bias", "logit_bias holds a value outside -100 to 100")
        if not all(0 <= token <= MAX_INT for word in self.bad_words_ids for token in word):
            yield ParamProblem("bad_words_ids", f"bad_words_ids has an id outside 0 to {MAX_INT}")
        if not all(self.stop):
            yield ParamProblem("stop", "stop holds an empty string; leave it out")
        if not all(self.bad_words):
            yield ParamProblem("bad_words", "bad_words holds an empty string; leave it out")
        if self.whitespace_pattern is not None and not (self.json_object or self.json_schema is not None):
            yield ParamProblem(
                "whitespace_pattern", "whitespace_pattern needs json_schema or json_object; send one of them, or leave it out"
            )
        if self.choice is not None and not all(self.choice or [""]):
            fault = "holds an empty string" if self.choice else "is empty"
            yield ParamProblem("choice", f"choice {fault}; leave it out")
        if len(grammars := self._grammars()) > 1:
            yield ParamProblem(grammars[0][0], f"{' and '.join(name for name, _ in grammars)} exclude each other; keep one")

    def _too_large(self) -> Iterator[ParamProblem]:
        """Values that would cost too much time or memory."""
        for name, texts in (("stop", self.stop), ("stop_regex", self.stop_regex)):
            if len(texts) > MAX_STOP:
                yield ParamProblem(name, f"{name} has {len(texts)} strings; it may have {MAX_STOP}")
            if any(len(text) > MAX_STOP_CHARS for text in texts):
                yield ParamProblem(name, f"{name} holds a string of more than {MAX_STOP_CHARS} characters")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            yield ParamProblem("stop_token_ids", f"stop_token_ids has {len(self.stop_token_ids)} ids; it may have {MAX_STOP_IDS}")
        if len(self.logprob_token_ids) > MAX_LOGPROB_IDS:
            count = len(self.logprob_token_ids)
            yield ParamProblem("logprob_token_ids", f"logprob_token_ids has {count} ids; it may have {MAX_LOGPROB_IDS}")
        if len(self.bad_words) + len(self.bad_words_ids) > MAX_BAD_WORDS:
            yield ParamProblem(
                "bad_words", f"bad_words has {len(self.bad_words) + len(self.bad_words_ids)} words; it may have {MAX_BAD_WORDS}"
            )
        if any(len(word) > MAX_BAD_WORD_CHARS for word in (*self.bad_words, *self.bad_words_ids)):
            yield ParamProblem("bad_words", f"bad_words holds a word of more than {MAX_BAD_WORD_CHARS} characters")
        if len(self.thinking_start_ids) > MAX_STOP_IDS:
            count = len(self.thinking_start_ids)
            yield ParamProblem("thinking_start_ids", f"thinking_start_ids has {count} ids; it may have {MAX_STOP_IDS}")
        if len(self.logit_bias) > MAX_BIASES:
            yield ParamProblem("logit_bias", f"logit_bias has {len(self.logit_bias)} tokens; it may have {MAX_BIASES}")
        if len(self.custom) > MAX_CUSTOM:
            yield ParamProblem("custom", f"custom has {len(self.custom)} entries; it may have {MAX_CUSTOM}")
        if any(len(text) > MAX_CUSTOM_CHARS for text in (*self.custom, *self.custom.values())):
            yield ParamProblem("custom", f"custom holds a text of more than {MAX_CUSTOM_CHARS} characters")
        for name in ("json_schema", "regex", "ebnf", "structural_tag"):
            if len(source := getattr(self, name) or "") > MAX_GRAMMAR_CHARS:
                yield ParamProblem(name, f"{name} has {len(source)} characters; it may have {MAX_GRAMMAR_CHARS}")
        if (size := len(self.whitespace_pattern or "")) > MAX_WHITESPACE_CHARS:
            yield ParamProblem("whitespace_pattern", f"whitespace_pattern has {size} characters; it may have {MAX_WHITESPACE_CHARS}")
        if (size := sum(map(len, self.choice or ()))) > MAX_GRAMMAR_CHARS:
            yield ParamProblem("choice", f"choice has {size} characters; it may have {MAX_GRAMMAR_CHARS}")

    def ends(self, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The token ids that end this request, without duplicates, given the model's end tokens."""
        return tuple(dict.fromkeys((*(() if self.ignore_eos else eos_ids), *self.stop_token_ids)))

    @property
    def num_alternatives(self) -> int:
        """Log-probabilities of an output token besides its own; 0 without `logprobs`."""
        return 0 if self.logprobs is None else self.logprobs + len(self.logprob_token_ids)

    @property
    def grammar(self) -> tuple[str, str] | None:
        """(kind, source) of the grammar that constrains the output; None: no constraint."""
        return next(iter(self._grammars()), None)

    def _grammars(self) -> list[tuple[str, str]]:
        texts = [(kind, getattr(self, kind)) for kind in ("json_schema", "regex", "ebnf", "structural_tag")]
        grammars = [(kind, source) for kind, source in texts if source is not None]
        if self.json_object:
            grammars.append(("json_object", ""))
        if not self.disable_any_whitespace or self.whitespace_pattern is not None:
            pattern = self.whitespace_pattern
            grammars = [_spaced(kind, source, pattern) if kind in _JSON else (kind, source) for kind, source in grammars]
        if self.choice:
            grammars.append(("choice", msgspec.json.encode(self.choice).decode()))
        return grammars


def whitespace_fields(pattern: str | None) -> dict[str, str | int]:
    """The fields of a format `json_schema` that allow whitespace: by a pattern, else so many
    characters."""
    return {"max_whitespace_cnt": MAX_JSON_WHITESPACE} if pattern is None else {"whitespace_pattern": pattern}


def _spaced(kind: str, source: str, pattern: str | None) -> tuple[str, str]:
    """The same JSON with whitespace between its parts, as a structural tag: the kind and source of
    a grammar cannot say so."""
    schema = msgspec.Raw(source.encode()) if kind == "json_schema" else {"type": "object"}
    form = {"type": "json_schema", "json_schema": schema, **whitespace_fields(pattern)}
    return "structural_tag", msgspec.json.encode({"type": "structural_tag", "format": form}).decode()
