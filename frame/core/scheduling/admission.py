"""`SchedulerConfig`, and `Admission`, which turns a `Generate` message into a `Request` or refuses
it.

Used by the scheduler. Checks a request against fixed limits only, not against what runs or waits:
`StepPlanner` admits requests to the device.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from frame.core.interfaces.cache import add_version, owner_of
from frame.core.interfaces.sampling import Grammar
from frame.core.interfaces.sampling_params import ParamProblem
from frame.core.messages import Finish, Generate, as_array
from frame.core.scheduling.prefix_dedup import MIN_SHARED_TOKENS
from frame.core.scheduling.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits that the scheduler works within (vLLM: `SchedulerConfig` and `CacheConfig`)."""

    page_size: int  # tokens in a KV page
    num_pages: int  # all pages of the pool, the reserved page 0 included
    max_running: int  # most requests on the device; one slot each
    token_budget: int  # most prompt tokens of a step; decodes come on top, one token each
    max_context: int  # tokens of prompt and output together
    vocab_size: int
    max_queued: int = 10_240  # most waiting requests
    eos_ids: tuple[int, ...] = ()
    request_timeout: float = 600.0  # seconds from arrival
    seed: int = 0  # of the seeds drawn for requests that bring none
    overlap: bool = False  # a batch may be scheduled while another one is in flight
    overlaps_drafts: bool = False  # also a batch with the drafts of a device drafter, while one with drafts is in flight
    # Tokens of output growth that are kept free for each running request when another one is
    # admitted. The reserve starts at this value, doubles with a preemption, and halves after
    # RESERVE_DECAY_STEPS steps without one, down to half of this value.
    growth_reserve: int = 32
    pools: bool = False  # a request ends when its prompt is computed, and yields a vector instead of tokens
    whole_prompts: bool = False  # a prompt is computed in one step
    short_prompt_share: float = 0.5  # share of the token budget kept for short prompts while long ones are computed
    preemption: bool = True  # a waiting request may preempt running ones
    min_shared_tokens: int = MIN_SHARED_TOKENS  # shortest prefix for which a waiting request waits for a running one
    jump_forward: int = 0  # fewest tokens forced by a grammar that are computed in one step; 0: all are sampled
    jump_rows: int = 0  # a forced run needs one token for each `jump_rows` rows of the step; 0: any number of rows
    jump_tokens: int = 0  # most tokens of a step with forced runs; 0: any number
    max_pinned_pages: int = 0  # of each tenant's sessions; 0: sessions keep nothing

    @property
    def capacity(self) -> int:
        """Tokens that the KV cache holds."""
        return (self.num_pages - 1) * self.page_size

    @property
    def max_pages(self) -> int:
        """Pages of the longest request: the width of the page table."""
        return -(-self.max_context // self.page_size)

    @property
    def max_tokens_per_step(self) -> int:
        return self.token_budget + self.max_running


class Admission:
    """Checks requests, numbers them in order of arrival, and draws a seed for each that brings
    none.

    Prefixes of a request are cached for the present weights only. Seeds come from one generator
    with a fixed seed, so equal sequences of requests get equal seeds.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._random = random.Random(config.seed)
        self._arrived = 0
        self.num_updates = 0  # of the weights

    def create_request(self, message: Generate, now: float, grammar: Grammar | None) -> Request | Finish:
        """The request, or how it ends because it is refused. `now`: its arrival, in seconds of the
        scheduler's clock."""
        try:
            tokens = as_array(message.token_ids)
        except OverflowError:
            tokens = np.array([-1], np.int32)  # an id that does not fit in 32 bits is outside every vocabulary
        problem = self._problem(message, tokens)
        if problem is not None:
            return Finish("error", error=problem.sentence, code="invalid_request", param=problem.param)
        prompt_len = len(message.token_ids) - message.output_len
        max_num_tokens = self._max_total(message, prompt_len)
        if message.output_len and len(message.token_ids) >= max_num_tokens:
            return Finish("length")
        params, config = message.params, self._config
        request = Request(
            rid=message.rid,
            prompt=tokens[:prompt_len],
            params=params,
            seed=self._random.getrandbits(63) if params.seed is None else params.seed,
            index=self._arrived,
            arrival=now,
            deadline=now + (config.request_timeout if message.deadline is None else message.deadline),
            max_num_tokens=max_num_tokens,
            stop_ids=params.ends(config.eos_ids),
            priority=message.priority,
            namespace=add_version(message.namespace, self.num_updates),
            tenant=owner_of(message.namespace),
            is_further=message.is_further,
            trace=message.trace,
            grammar=grammar,
            second_text_start=message.second_text_start,
            adapter=message.adapter,
            media=message.media,
            transfer=message.transfer,
            pin=message.pin,
            wants_prompt_logprobs=params.prompt_logprobs is not None or params.return_hidden_states,
            is_reported=message.output_len > 0,
        )
        request.output.frombytes(tokens[prompt_len:].tobytes())
        self._arrived += 1
        return request

    def _problem(self, message: Generate, tokens: np.ndarray) -> ParamProblem | None:
        config, count = self._config, len(message.token_ids)
        prompt_len = count - message.output_len
        if prompt_len < 1 or message.output_len < 0:
            return ParamProblem("prompt", "the prompt is empty; it needs at least one token")
        if tokens.min() < 0 or tokens.max() >= config.vocab_size:
            return ParamProblem("prompt", f"the prompt holds a token id outside the vocabulary (0 to {config.vocab_size - 1})")
        problems = message.params.problems(config.vocab_size)  # the client checks the same; the engine does not rely on it
        if problems:
            return problems[0]
        if config.pools:
            return self._too_long_to_pool(prompt_len)
        return self._too_long(prompt_len, message.params.max_tokens)

    def _too_long_to_pool(self, prompt_len: int) -> ParamProblem | None:
        config = self._config
        limit = min(config.max_context, config.capacity, config.token_budget if config.whole_prompts else prompt_len)
        if prompt_len > limit:
            return ParamProblem("input", f"the input has {prompt_len} tokens, and the model takes {limit}; shorten it")
        return None

    def _too_long(self, prompt_len: int, max_tokens: int | None) -> ParamProblem | None:
        config = self._config
        asked = max_tokens or 1
        if prompt_len >= config.max_context:
            sentence = f"the prompt has {prompt_len} tokens, the context holds {config.max_context} with the answer; shorten the prompt"
            return ParamProblem("prompt", sentence)
        if prompt_len + asked > config.max_context:
            return ParamProblem(
                "max_tokens",
                f"the prompt has {prompt_len} tokens and max_tokens is {asked}: {prompt_len + asked} together, above the context of "
                f"{config.max_context}; lower max_tokens to {config.max_context - prompt_len} or shorten the prompt",
            )
        # The last token's K and V are never needed, so a sequence of n + 1 tokens fits in a cache
        # of n.
        if prompt_len + asked - 1 > config.capacity:
            pages = -(-(prompt_len + asked - 1) // config.page_size)
            return ParamProblem(
                "max_tokens",
                f"the request needs {pages} pages of {config.page_size} tokens ({prompt_len} of prompt plus {asked} of output), the KV "
                f"cache has {config.num_pages - 1}; lower max_tokens, shorten the prompt or enlarge cache.max_total_tokens",
            )
        return None

    def _max_total(self, message: Generate, prompt_len: int) -> int:
        if self._config.pools:
            return prompt_len
        limit = min(self._config.max_context, self._config.capacity + 1)
        return limit if message.params.max_tokens is None else min(limit, prompt_len + message.params.max_tokens)
