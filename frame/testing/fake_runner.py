"""`FakeRunner`: a `ModelRunner` without a model, whose tokens are a hash of the whole prefix read
back through the page table.

For tests of schedulers and caches: a wrong page, a page that was freed too early or a lost token
changes the outcome, and the runner says which position of which slot was wrong. `continuation`
gives what an unconstrained run yields.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from frame.core.interfaces.batch import PromptLogprobs, ScheduledBatch, SlotSetup, StepResult
from frame.core.interfaces.runner import ModelRunner, UnsampledStep
from frame.core.interfaces.sampling import Grammar
from frame.core.interfaces.sampling_params import SamplingParams

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_RESERVED_PAGE = 0


class FakeRunnerError(AssertionError):
    """A step asked for something that no correct scheduler asks for."""


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A step that is done, but counts as in flight until it is waited for. `ends` is told then."""

    result: StepResult
    ends: Callable[[int], object] | None = None

    def wait(self) -> StepResult:
        if self.ends is not None:
            self.ends(self.result.step)
        return self.result


class LaterStep(UnsampledStep):
    """A step whose tokens are drawn when the mask comes."""

    def __init__(self, finish: Callable[[np.ndarray | None], DoneStep]) -> None:
        self._finish = finish
        self._step: DoneStep | None = None

    def sample(self, mask: np.ndarray | None) -> None:
        if self._step is not None:
            raise FakeRunnerError("the mask of a step came twice")
        self._step = self._finish(mask)

    def wait(self) -> StepResult:
        if self._step is None:
            raise FakeRunnerError("a step is waited for before its mask came")
        return self._step.wait()


@dataclass(slots=True)
class _Slot:
    setup: SlotSetup
    tokens: list[int]  # prompt and output, those in flight included
    seed: int


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A sampling row: its slot, its draft, and the hash of the prefix of each sample."""

    slot: int
    draft: list[int]
    prefixes: list[int]


class FakeRunner(ModelRunner):
    """Keeps "K and V" (token, position, running hash) for every cached position and checks all that
    a row reads.

    A page that a step in flight writes to must not be handed to another slot, nor a slot of its
    rows be set up again. `is_invalid(slot tokens) -> bool` makes a row's logits not finite. The
    chosen token depends on the prefix, and on the seed when the temperature is above 0.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_slots: int,
        max_pages: int,
        vocab_size: int,
        is_invalid: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.num_tokens = 0  # computed in all, prompts and decodes
        self._is_invalid = is_invalid
        self.bans_all = False  # invalid rows have no token with a logit above -inf
        self._table = np.zeros((num_slots, max_pages), np.int32)
        self._token = np.full((num_pages, page_size), -1, np.int64)
        self._hash = np.zeros((num_pages, page_size), np.uint64)
        self._slots: dict[int, _Slot] = {}
        self._step = -1
        self._written: dict[int, dict[int, int]] = {}  # steps in flight -> page -> slot that writes to it

    def launch(self, batch: ScheduledBatch) -> DoneStep | LaterStep:
        if batch.step <= self._step:
            raise FakeRunnerError(f"step {batch.step} is launched after step {self._step}")
        self._step = batch.step
        self._enter_and_leave(batch)
        self._written[batch.step] = self._check_writes(batch)
        offset = 0
        sampled: list[_Sampled] = []
        for row, slot in enumerate(batch.slots.tolist()):
            count, drafted = int(batch.num_scheduled[row]), 0 if batch.num_drafts is None else int(batch.num_drafts[row])
            draft: list[int] = []
            if row >= batch.num_decodes:
                draft = batch.token_ids[offset + count - drafted : offset + count].tolist()
                self._check_chunk(batch, row, batch.token_ids[offset : offset + count - drafted])
                offset += count
            prefixes = self._compute(slot, int(batch.num_computed[row]), count, draft, stores=not _is_cached(batch, row))
            if batch.samples[row]:
                sampled.append(_Sampled(slot, draft, prefixes))

        def finish(mask: np.ndarray | None) -> DoneStep:
            drawn: list[list[tuple[int, bool]]] = []
            for each in sampled:
                first = sum(map(len, drawn))
                drawn.append(self._draw_row(each, None if mask is None else mask[first : first + len(each.prefixes)]))
            return DoneStep(self._result(batch, sampled, drawn), self._end)

        return LaterStep(finish) if batch.has_deferred_grammar_mask else finish(batch.grammar_mask)

    def close(self) -> None:
        self._slots.clear()

    def _end(self, step: int) -> None:
        self._written.pop(step, None)

    # one step -------------------------------------------------------------------------------------

    def _enter_and_leave(self, batch: ScheduledBatch) -> None:
        for slot in batch.released:
            if self._slots.pop(slot, None) is None:
                raise FakeRunnerError(f"slot {slot} is released but empty")
        for setup in batch.setups:
            tokens, state = setup.token_ids.tolist(), self._slots.get(setup.slot)
            if state is None and any(setup.slot in pages.values() for pages in self._written.values()):
                raise FakeRunnerError(f"slot {setup.slot} is set up while in use")
            if state is not None and tokens[: len(state.tokens)] != state.tokens:  # else more tokens of the same request
                raise FakeRunnerError(f"slot {setup.slot} is set up while in use")
            self._slots[setup.slot] = _Slot(setup, tokens, setup.seed)
        for slot, index, page in batch.new_pages.tolist():
            if page == _RESERVED_PAGE:
                raise FakeRunnerError("the reserved page 0 was handed out")
            for step, pages in self._written.items():
                if pages.get(page, slot) != slot:
                    raise FakeRunnerError(f"page {page} is handed to slot {slot} while step {step}, in flight, writes to it")
            self._table[slot, index] = page

    def _check_chunk(self, batch: ScheduledBatch, row: int, chunk: np.ndarray) -> None:
        slot = int(batch.slots[row])
        start, count = int(batch.num_computed[row]), len(chunk)
        expected = self._slots[slot].tokens[start : start + count]
        if chunk.tolist() != expected:
            raise FakeRunnerError(f"slot {slot}: the chunk at {start} holds other tokens than its setup")
        if bool(batch.samples[row]) != (start + count == len(self._slots[slot].tokens)):
            raise FakeRunnerError(f"slot {slot}: `samples` is wrong for the chunk at {start}")

    def _check_writes(self, batch: ScheduledBatch) -> dict[int, int]:
        """No row of a step may write a page that another one reads. -> the slot that writes each
        page."""
        if len(set(batch.slots.tolist())) != len(batch.slots):
            raise FakeRunnerError("a slot has two rows in one step")
        written: dict[int, int] = {}
        readers: Counter[int] = Counter()
        for row, slot in enumerate(batch.slots.tolist()):
            first = int(batch.num_computed[row]) // self.page_size
            last = (int(batch.num_computed[row] + batch.num_scheduled[row]) - 1) // self.page_size
            pages = self._table[slot, : last + 1].tolist()
            if _RESERVED_PAGE in pages:
                raise FakeRunnerError(f"slot {slot} has no page for a position that it reads")
            readers.update(pages)
            if not _is_cached(batch, row):
                written.update(dict.fromkeys(pages[first:], slot))
        disputed = sorted(page for page in written if readers[page] > 1)
        if disputed:
            raise FakeRunnerError(f"pages {disputed} are written by a row while another row of the step has them")
        return written

    def _compute(self, slot: int, start: int, count: int, draft: list[int], *, stores: bool) -> list[int]:
        """Read positions [0, start), write [start, start + count), unless they are there already,
        the last ones with the draft; returns the hashes of the prefixes that end before and at each
        token of the draft, as read back."""
        state = self._slots[slot]
        end, known = start + count, state.tokens + draft
        if end > len(known) or (draft and end != len(known)):
            raise FakeRunnerError(f"slot {slot} computes position {end - 1} but has {len(known)} tokens")
        positions = np.arange(end)
        pages, offsets = self._table[slot, positions // self.page_size], positions % self.page_size
        tokens = np.array(known[:end], np.int64)
        before = self._hash[pages[start - 1], offsets[start - 1]] if start else np.uint64(0)
        if stores:
            self._token[pages[start:], offsets[start:]] = tokens[start:]
            self._hash[pages[start:], offsets[start:]] = before + hash_tokens(tokens, start)
        wrong = np.flatnonzero(self._token[pages, offsets] != tokens)
        if wrong.size:
            raise FakeRunnerError(f"slot {slot} reads a wrong token at position {wrong[0]} (page {pages[wrong[0]]})")
        self.num_tokens += count
        sampled = range(end - len(draft) - 1, end)
        return [int(self._hash[pages[i], offsets[i]]) for i in sampled]

    def _draw_row(self, row: _Sampled, masks: np.ndarray | None) -> list[tuple[int, bool]]:
        """Draw the token of every sample of a row, as a sampler does that does not look at the
        draft. Tokens after the first that differs from the draft do not belong to the slot."""
        state, drawn = self._slots[row.slot], []
        count = len(state.tokens)
        for i, prefix in enumerate(row.prefixes):
            drawn.append(self._draw(row.slot, prefix, None if masks is None else masks[i]))
            state.tokens[count + i :] = row.draft[i : i + 1]
        state.tokens[count:] = [token for token, _ in drawn[: _count_output(row, drawn)]]
        return drawn

    def _draw(self, slot: int, prefix: int, mask: np.ndarray | None) -> tuple[int, bool]:
        state = self._slots[slot]
        allowed = None if mask is None else _allowed(mask, self.vocab_size)
        token = _token_of(prefix, len(state.tokens), state.setup.params, state.seed, self.vocab_size, allowed)
        invalid = self._is_invalid is not None and self._is_invalid(state.tokens)
        state.tokens.append(token)
        return token, invalid

    def _result(self, batch: ScheduledBatch, sampled: list[_Sampled], rows: list[list[tuple[int, bool]]]) -> StepResult:
        drawn = [each for row in rows for each in row]
        tokens = np.array([token for token, _ in drawn], np.int32)
        invalid = np.array([bad for _, bad in drawn], np.bool_)
        counts = [_count_output(*each) for each in zip(sampled, rows, strict=True)]
        slots = batch.slots[batch.samples].tolist()
        asked = [self._slots[slot].setup.params.logprobs for slot in slots]
        requested = [k for k in asked if k is not None]
        width = max(requested, default=0)
        top = (tokens[:, None] + np.arange(width)) % self.vocab_size
        listed = [self._slots[slot].setup.params.logprob_token_ids for slot in slots]
        most_listed = max(map(len, listed), default=0)
        ids = np.array([[*each, *[0] * (most_listed - len(each))] for each in listed], np.int64).reshape(len(listed), most_listed)
        return StepResult(
            step=batch.step,
            token_ids=tokens,
            counts=None if batch.num_drafts is None else np.array(counts, np.int32),
            logprobs=_logprob(tokens) if requested else None,
            top_ids=top.astype(np.int32) if width else None,
            top_logprobs=_logprob(top) if width else None,
            listed_logprobs=_logprob(ids) if most_listed else None,
            prompt_logprobs=self._prompt_logprobs(batch) if batch.prompt_logprobs is not None else None,
            hidden_states=self._hidden_states(batch) if batch.prompt_logprobs is not None else None,
            invalid=invalid if invalid.any() else None,
            banned=invalid if self.bans_all and invalid.any() else None,
        )

    def _prompt_logprobs(self, batch: ScheduledBatch) -> list[PromptLogprobs | None]:
        results: list[PromptLogprobs | None] = []
        assert batch.prompt_logprobs is not None
        for row, slot in enumerate(batch.slots.tolist()):
            setup = self._slots[slot].setup
            if not batch.prompt_logprobs[row] or setup.params.return_hidden_states:
                results.append(None)
                continue
            first = int(batch.num_computed[row]) + 1
            last = min(first + int(batch.num_scheduled[row]), setup.prompt_len)
            ids = setup.token_ids[first:last]
            top = (ids[:, None] + np.arange(setup.params.prompt_logprobs or 0)) % self.vocab_size
            results.append(PromptLogprobs(first, _logprob(ids), top.astype(np.int32), _logprob(top)))
        return results

    def _hidden_states(self, batch: ScheduledBatch) -> list[np.ndarray | None]:
        """The token ids themselves, one number a token."""
        results: list[np.ndarray | None] = []
        assert batch.prompt_logprobs is not None
        for row, slot in enumerate(batch.slots.tolist()):
            setup, first = self._slots[slot].setup, int(batch.num_computed[row])
            asks = batch.prompt_logprobs[row] and setup.params.return_hidden_states
            ids = setup.token_ids[first : first + int(batch.num_scheduled[row])]
            results.append(ids[:, None].astype(np.float32) if asks else None)
        return results


def continuation(
    tokens: Sequence[int], params: SamplingParams, seed: int, vocab_size: int, count: int, grammar: Grammar | None = None
) -> list[int]:
    """The `count` tokens that `FakeRunner` yields after `tokens`, whatever is scheduled with them,
    and without any stop but the grammar's."""
    mask = np.empty(-(-vocab_size // 32), np.int32)
    known = list(tokens)
    for _ in range(count):
        prefix = int(hash_tokens(np.array(known, np.int64), 0)[-1])
        allowed = _allowed(mask, vocab_size) if grammar is not None and grammar.fill_mask(mask) else None
        known.append(_token_of(prefix, len(known), params, seed, vocab_size, allowed))
        if grammar is not None and not grammar.accept_token(known[-1]):
            raise FakeRunnerError(f"the grammar refuses {known[-1]}, which it allowed")
        if grammar is not None and grammar.is_finished():
            break
    return known[len(tokens) :]


def _count_output(row: _Sampled, drawn: list[tuple[int, bool]]) -> int:
    """How many samples of a row are output."""
    agrees = [token == draft for (token, _), draft in zip(drawn, row.draft, strict=False)]
    return next((i for i, same in enumerate(agrees) if not same), len(agrees)) + 1


def _is_cached(batch: ScheduledBatch, row: int) -> bool:
    return batch.skip_kv_store is not None and bool(batch.skip_kv_store[row])


def _allowed(mask: np.ndarray, vocab_size: int) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]).tolist()


def hash_tokens(tokens: np.ndarray, start: int) -> np.ndarray:
    """For each position from `start`: the sum over [start, position] of a hash of (token,
    position), modulo 2^64."""
    positions = np.arange(start, len(tokens), dtype=np.uint64)
    mixed = _mix((tokens[start:].astype(np.uint64) << np.uint64(32)) ^ positions)
    return np.cumsum(mixed, dtype=np.uint64)


def _token_of(prefix: int, position: int, params: SamplingParams, seed: int, vocab_size: int, allowed: list[int] | None) -> int:
    value = prefix if params.temperature == 0 else prefix ^ (seed * 0x2545F4914F6CDD1D + position)
    drawn = int(_mix(np.array([value & (2**64 - 1)], np.uint64))[0])
    return drawn % vocab_size if allowed is None else allowed[drawn % len(allowed)]


def _logprob(tokens: np.ndarray) -> np.ndarray:
    return (-(tokens.astype(np.float32) + 1) / 8).astype(np.float32)


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea, Flood 2014) over an array."""
    values = values * _FACTOR + _FACTOR
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
