"""Checks of a request against the engine's limits before it is submitted, the errors that they
raise, and the fields of its parameters. Used by the client, the servers and the offline engine.
Must not know HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from frame.config.resolved import DEFAULT_PARAMS
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import as_array
from frame.text.stop_regex import PatternError, check_patterns

SHORT_PROMPT = 128  # tokens
DEFAULTS = SamplingParams()
STATES_OF_TOKENS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, return_hidden_states=True)
MAX_STATE_VALUES = 4 * 1024 * 1024  # numbers of the hidden states of one response: 16 MiB, and about 80 MB of JSON


def to_fields(params: SamplingParams) -> dict[str, Any]:
    """The fields of a request over HTTP with these parameters, whatever the server's defaults."""
    return {name: getattr(params, name) for name in DEFAULT_PARAMS} | msgspec.to_builtins(params, str_keys=True)


class QueueFullError(Exception):
    """The queue is full; the client may retry later."""


class InvalidRequestError(ValueError):
    """One sentence for the client. `param`: the name of the parameter at fault."""

    def __init__(self, sentence: str, param: str | None = None) -> None:
        super().__init__(sentence)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt, alone or together with `max_tokens`, exceeds the model's context.

    Clients such as LiteLLM recognise the condition by the beginning of OpenAI's sentence, so every
    message begins with it.
    """

    def __init__(self, max_tokens: int, sentence: str, param: str) -> None:
        super().__init__(f"This model's maximum context length is {max_tokens} tokens; {sentence}", param)


class EngineDeadError(Exception):
    """The engine or another server process has ended, or is being restarted."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What the engine can serve."""

    max_outstanding: int  # sequences running and waiting together
    max_context: int  # tokens, prompt plus output
    vocab_size: int
    capacity: int  # tokens in the KV cache
    grammar: bool = False  # there is a grammar backend
    request_timeout: float = 600.0  # seconds
    seed: int = 0  # of the generator that draws seeds for requests without one
    is_pooling: bool = False  # the model embeds or classifies: no output tokens, the prompt may fill the context
    grammar_processes: bool = False  # grammars are compiled in separate processes
    refused_params: Mapping[str, str] = field(default_factory=dict)  # by parameter without a logits processor: the sentence
    custom_params: Sequence[str] | None = None  # the keys of `custom` that logits processors read; None: any
    hidden_size: int = 1  # numbers of a hidden state

    @property
    def max_pooling_tokens(self) -> int:
        """The most tokens of a sequence that a pooling model reads."""
        return min(self.max_context, self.capacity)


def check_request(limits: ClientLimits, prompt: Sequence[int], params: SamplingParams) -> None:
    """Raise InvalidRequestError when the prompt or the parameters cannot be served."""
    check_params(limits, params)
    check_prompt(limits, prompt, params)


def check_params(limits: ClientLimits, params: SamplingParams) -> None:
    """Raise InvalidRequestError for parameters that cannot be served with any prompt."""
    problems = params.problems(limits.vocab_size)
    if problems:
        raise InvalidRequestError(problems[0].sentence, problems[0].param)
    if params.stop_regex:
        try:
            check_patterns(params.stop_regex)
        except PatternError as error:
            raise InvalidRequestError(f"stop_regex {error}", "stop_regex") from None
    if params.grammar is not None and not limits.grammar and not limits.is_pooling:
        sentence = "this server has no grammar backend; start it with --grammar-backend NAME, and with a tokenizer"
        raise InvalidRequestError(sentence, "response_format")
    if limits.refused_params or params.custom:
        _check_processors(limits, params)


def _check_processors(limits: ClientLimits, params: SamplingParams) -> None:
    """Raise InvalidRequestError for a parameter that no logits processor of the server reads."""
    for name, sentence in limits.refused_params.items():
        if getattr(params, name) != getattr(DEFAULTS, name):
            raise InvalidRequestError(sentence, name)
    known = limits.custom_params
    for key in params.custom:
        if known is not None and key not in known:
            listed = f"they read {', '.join(known)}" if known else "they read none"
            remedy = "leave it out, or add its logits processor to sampling.processors"
            sentence = f"custom holds {key!r}, which no logits processor of this server reads ({listed}); {remedy}"
            raise InvalidRequestError(sentence, "custom")


def check_prompt(limits: ClientLimits, prompt: Sequence[int], params: SamplingParams) -> None:
    """Raise InvalidRequestError for a prompt that exceeds the context with its output."""
    if not prompt:
        raise InvalidRequestError(f"the {'input' if limits.is_pooling else 'prompt'} is empty; send at least one token", "prompt")
    if params.return_hidden_states:
        output = 0 if limits.is_pooling else (params.max_tokens or count_output_room(limits, prompt)) - 1
        check_num_states(limits, params.n * (len(prompt) + output))
    if limits.is_pooling:
        if len(prompt) > limits.max_pooling_tokens:
            sentence = f"the input has {len(prompt)} tokens; shorten it, or have it cut with truncate_prompt_tokens: -1"
            raise ContextLengthError(limits.max_pooling_tokens, sentence, "input")
        _check_ids(limits, prompt)
        return
    if len(prompt) >= limits.max_context:
        remedy = "shorten the prompt, or serve with a larger --max-model-len"
        sentence = f"the prompt has {len(prompt)} tokens and must leave room for one more; {remedy}"
        raise ContextLengthError(limits.max_context, sentence, "prompt")
    maximum = min(limits.max_context, limits.capacity + 1)
    room = maximum - len(prompt)
    if (params.max_tokens or 1) > room:
        remedy = f"lower max_tokens to {room}" if room > 0 else "enlarge cache.max_total_tokens"
        sentence = f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens or 1}; {remedy}, or shorten the prompt"
        raise ContextLengthError(maximum, sentence, "max_tokens")
    _check_ids(limits, prompt)


def count_output_room(limits: ClientLimits, prompt: Sequence[int]) -> int:
    """The most output tokens after a prompt; at least 1."""
    return max(1, min(limits.max_context, limits.capacity + 1) - len(prompt))


def check_num_states(limits: ClientLimits, num_tokens: int) -> None:
    """Raise InvalidRequestError for a request whose hidden states, of so many tokens at most,
    exceed the bound."""
    if num_tokens * limits.hidden_size > MAX_STATE_VALUES:
        size = f"hidden states of up to {num_tokens} tokens with {limits.hidden_size} numbers each"
        remedy, param = "lower max_tokens, or shorten the prompt", "return_hidden_states"
        if limits.is_pooling:  # such a request has no field of this name
            remedy, param = "send fewer or shorter inputs", "prompt"
        sentence = f"{size} exceed the bound of a response, {MAX_STATE_VALUES} numbers ({MAX_STATE_VALUES // limits.hidden_size} tokens)"
        raise InvalidRequestError(f"{sentence}; {remedy}", param)


def _check_ids(limits: ClientLimits, prompt: Sequence[int]) -> None:
    if len(prompt) <= SHORT_PROMPT:  # an array would cost more than it saves
        minimum, maximum = min(prompt), max(prompt)
    else:
        try:
            ids = as_array(prompt)
        except OverflowError:
            minimum = maximum = -1
        else:
            minimum, maximum = int(ids.min()), int(ids.max())
    is_valid = minimum >= 0 and maximum < limits.vocab_size
    if not is_valid:
        raise InvalidRequestError(f"the prompt holds a token id outside the vocabulary (0 to {limits.vocab_size - 1})", "prompt")


def get_child_params(params: SamplingParams, number: int) -> SamplingParams:
    """The parameters of sequence `number` of a request with `n` > 1. The seeds differ, and the
    first is that of `n` = 1."""
    seed = None if params.seed is None else (params.seed + number if params.seed + number < 2**63 else number)
    return msgspec.structs.replace(params, n=1, seed=seed)
