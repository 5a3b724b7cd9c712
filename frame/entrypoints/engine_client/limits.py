"""What a request may ask of an engine, checked before anything runs, and the errors that say why it may not. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.text.token_ids import as_array


class QueueFullError(Exception):
    """As many requests wait as may; the client may come back later."""


class InvalidRequestError(ValueError):
    """The request cannot be served; one sentence for the client. `param` names the offending field."""

    def __init__(self, sentence: str, param: str | None = None) -> None:
        super().__init__(sentence)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """The prompt, alone or together with `max_tokens`, is longer than the model's context.

    Clients such as LiteLLM recognise the condition by the sentence's beginning, so all of these begin alike.
    """

    def __init__(self, most: int, sentence: str, param: str) -> None:
        super().__init__(f"This model's maximum context length is {most} tokens; {sentence}", param)


class EngineDeadError(Exception):
    """The engine or another process is gone."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """`max_outstanding`: requests running and waiting together. Tokens: `max_context` prompt plus output, `capacity` of the KV cache.
    `pools`: there is no output, the prompt may fill the context. `request_timeout` in seconds; `seed` draws the seeds of requests that
    bring none. `grammar_processes`: grammars are compiled in processes of their own."""

    max_outstanding: int
    max_context: int
    vocab_size: int
    capacity: int
    grammar: bool = False
    request_timeout: float = 600.0
    seed: int = 0
    pools: bool = False
    grammar_processes: bool = False

    @property
    def longest_input(self) -> int:
        """The most tokens of a sequence that yields a vector."""
        return min(self.max_context, self.capacity)


def check_request(limits: ClientLimits, prompt: Sequence[int], params: SamplingParams) -> None:
    """Raise InvalidRequestError when a sequence cannot be served, with the sentence for the client."""
    check_params(limits, params)
    check_prompt(limits, prompt, params)


def check_params(limits: ClientLimits, params: SamplingParams) -> None:
    """Raise InvalidRequestError for parameters that cannot be served, whatever the prompt."""
    problems = params.problems(limits.vocab_size)
    if problems:
        raise InvalidRequestError(problems[0].sentence, problems[0].param)
    if params.grammar is not None and not limits.grammar and not limits.pools:
        raise InvalidRequestError(
            "this server has no grammar backend; start it with --grammar-backend NAME, and with a tokenizer",
            "response_format",
        )


def check_prompt(limits: ClientLimits, prompt: Sequence[int], params: SamplingParams) -> None:
    """Raise InvalidRequestError for a prompt that does not fit, alone or with the tokens that `params` asks for."""
    if not prompt:
        raise InvalidRequestError("the prompt is empty; send at least one token", "prompt")
    if limits.pools:
        _check_pooled(limits, prompt)
        return
    if len(prompt) >= limits.max_context:
        raise ContextLengthError(
            limits.max_context,
            f"the prompt has {len(prompt)} tokens and must leave room for one more; shorten the prompt, or serve with a larger"
            " --max-model-len",
            "prompt",
        )
    most = min(limits.max_context, limits.capacity + 1)
    room = most - len(prompt)
    if (params.max_tokens or 1) > room:
        remedy = f"lower max_tokens to {room}" if room > 0 else "enlarge cache.max_total_tokens"
        raise ContextLengthError(
            most,
            f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens or 1}; {remedy}, or shorten the prompt",
            "max_tokens",
        )
    _check_ids(limits, prompt)


def _check_ids(limits: ClientLimits, prompt: Sequence[int]) -> None:
    try:
        ids = as_array(prompt)
        is_known = ids.min() >= 0 and ids.max() < limits.vocab_size
    except OverflowError:
        is_known = False
    if not is_known:
        raise InvalidRequestError(f"the prompt holds a token id outside the vocabulary (0 to {limits.vocab_size - 1})", "prompt")


def _check_pooled(limits: ClientLimits, prompt: Sequence[int]) -> None:
    if len(prompt) > limits.longest_input:
        raise ContextLengthError(
            limits.longest_input,
            f"the input has {len(prompt)} tokens; shorten it, or have it cut with truncate_prompt_tokens: -1",
            "input",
        )
    _check_ids(limits, prompt)


def sibling(params: SamplingParams, number: int) -> SamplingParams:
    # Siblings of one seed must differ, and the first is what n=1 would give.
    seed = None if params.seed is None else (params.seed + number if params.seed + number < 2**63 else number)
    return msgspec.structs.replace(params, n=1, seed=seed)
