"""Third-party logits processors, grammar backends, poolers and drafters."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from frame.core.interfaces.batch import ForwardBatch
from frame.core.interfaces.drafter import Drafts
from tests.testing.mutants.drafter import PlainDrafter
from tests.testing.mutants.grammar_backend import Compiled, Constraint, Wrapped
from tests.testing.mutants.logits_processor import CountPenalty
from tests.testing.mutants.pooler import Weighted
from tests.testing.third_party import reads_stale_results, reuses_result, sleeps, third_party

# ---- logits processors ---------------------------------------------------------------------------

mutant = third_party("logits_processor")


@mutant
class ClearsItsNeighbour(CountPenalty):
    """Clears the slot after the one that is removed too."""

    def remove_slot(self, slot: int) -> None:
        if len(self.counts):
            self.counts[slot : slot + 2] = 0


@mutant
class CountsInBytes(CountPenalty):
    """Counts tokens in bytes, which wrap after 255."""

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        super().observe_tokens(slots, token_ids)
        self.counts.remainder_(256)


@mutant
class Has16BitTokens(CountPenalty):
    """Keeps token ids in 15 bits."""

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        super().observe_tokens(slots, token_ids & 0x7FFF)


@mutant
class CachesPenalties(CountPenalty):
    """Keeps the penalties of a tensor of slots by its address."""

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        key = slots.data_ptr(), len(slots)
        if self.__dict__.get("key") != key:
            self.key, self.gathered = key, self.penalties[slots]
        logits.index_add_(0, rows, -self.gathered.unsqueeze(1) * self.counts[slots])


@mutant
class IgnoresLateRows(CountPenalty):
    """Changes the first 128 rows of a batch."""

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        super().apply(logits, rows[:128], slots[:128], positions[:128])


@mutant
class EndsAt32K(CountPenalty):
    """Leaves positions after 32,767 as they are."""

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        kept = positions < 32_768
        super().apply(logits, rows[kept], slots[kept], positions[kept])


@mutant
class MakesNaN(CountPenalty):
    """Adds 0 times the logits, which is NaN where a grammar has masked a token."""

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        super().apply(logits, rows, slots, positions)
        logits[rows] = logits[rows] + 0.0 * logits[rows]


@mutant
class KeepsSetups(CountPenalty):
    """Keeps the setup of each request after its end."""

    def add_slot(self, setup: Any) -> None:
        super().add_slot(setup)
        self.__dict__.setdefault("setups", []).append(setup)


sleeps(mutant, "apply")

# ---- grammar backends ----------------------------------------------------------------------------

mutant = third_party("grammar_backend")


@mutant
class CachesByStart(Wrapped):
    """Keeps compiled grammars by their kind and the first 64 characters of their source."""

    def compile(self, kind: str, source: str) -> Any:
        known = self.__dict__.setdefault("known", {})
        if (kind, source[:64]) not in known:
            known[kind, source[:64]] = super().compile(kind, source)
        return known[kind, source[:64]]


class ShortHistory(Constraint):
    """Undoes up to 64 tokens."""

    def rollback_tokens(self, count: int) -> None:
        super().rollback_tokens(min(count, 64))


class ShortMask(Constraint):
    """Writes the first 32 words of the mask."""

    def fill_mask(self, mask: np.ndarray) -> bool:
        whole = np.zeros_like(mask)
        needed = self.inner.fill_mask(whole)
        mask[:32] = whole[:32]
        return needed


class KeptMask(Constraint):
    """Writes the mask of the call before while no token was accepted, and forgets rollbacks."""

    kept: Any = None

    def fill_mask(self, mask: np.ndarray) -> bool:
        if self.kept is None:
            whole = np.zeros_like(mask)
            self.kept = self.inner.fill_mask(whole), whole
        mask[:] = self.kept[1]
        return bool(self.kept[0])

    def accept_token(self, token_id: int) -> bool:
        self.kept = None
        return super().accept_token(token_id)


class Slow(Constraint):
    """Sleeps for 2 ms in each mask."""

    def fill_mask(self, mask: np.ndarray) -> bool:
        import time

        time.sleep(0.002)
        return super().fill_mask(mask)


mutant.each(
    Wrapped, "Request", *((kind.__name__, f"{kind.__doc__}", kind) for kind in (ShortHistory, ShortMask, KeptMask, Slow))
)  # fmt: skip


class KeepsStarts(Compiled):
    """Keeps each constraint that it has started."""

    def start(self) -> Any:
        started = super().start()
        self.__dict__.setdefault("started", []).append(started)
        return started


@mutant
class KeepsConstraints(Wrapped):
    """Keeps each constraint that a compiled grammar has started."""

    def compile(self, kind: str, source: str) -> Any:
        compiled = super().compile(kind, source)
        return KeepsStarts(compiled.inner, self)


# ---- poolers -------------------------------------------------------------------------------------

mutant = third_party("pooler")


@mutant
class SumsInTheDtype(Weighted):
    """Sums in the dtype of the hidden states, in which long prompts lose their ends."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        rows, weights = self.list_rows(batch), self.weigh(batch).to(hidden.dtype)
        sums = torch.zeros(batch.num_rows, hidden.shape[1], device=hidden.device, dtype=hidden.dtype)
        sums.index_add_(0, rows, hidden * weights.unsqueeze(1))
        return sums / torch.zeros(batch.num_rows, device=hidden.device, dtype=hidden.dtype).index_add_(0, rows, weights).unsqueeze(1)


@mutant
class WeighsInHalf(Weighted):
    """Weighs positions in float16, which ends at 65,504."""

    def weigh(self, batch: ForwardBatch) -> torch.Tensor:
        return (batch.positions + 1).half().float()


@mutant
class Reads512Tokens(Weighted):
    """Reads the first 512 tokens of a prompt."""

    def weigh(self, batch: ForwardBatch) -> torch.Tensor:
        return super().weigh(batch) * (batch.positions < 512)


@mutant
class CachesRows(Weighted):
    """Keeps the rows of the tokens by the sizes of a batch."""

    def list_rows(self, batch: ForwardBatch) -> torch.Tensor:
        key = batch.num_rows, batch.num_tokens
        if self.__dict__.get("key") != key:
            self.key, self.rows = key, super().list_rows(batch)
        return self.rows


reuses_result(mutant, "pool")
reads_stale_results(mutant, "pool")
sleeps(mutant, "pool")

# ---- drafters ------------------------------------------------------------------------------------

mutant = third_party("drafter")


@mutant
class ClearsTheNextSlot(PlainDrafter):
    """Clears the slot after the one that is removed too."""

    def remove_slot(self, slot: int) -> None:
        super().remove_slot(slot)
        if slot + 1 in self.following:
            self.following[slot + 1] = {}


@mutant
class ReadsTheTextAgain(PlainDrafter):
    """Reads the whole text of a slot again for each draft."""

    def add_slot(self, setup: Any) -> None:
        super().add_slot(setup)
        self.__dict__.setdefault("texts", {})[setup.slot] = setup.token_ids.tolist()

    def remove_slot(self, slot: int) -> None:
        super().remove_slot(slot)
        del self.texts[slot]

    def draft(self, slot: int, maximum: int) -> list[int]:
        assert dict(pairwise(self.texts[slot])) is not None
        return super().draft(slot, maximum)


@mutant
class Drafts16BitTokens(PlainDrafter):
    """Drafts token ids in 16 bits."""

    def draft(self, slot: int, maximum: int) -> list[int]:
        return [token & 0xFFFF for token in super().draft(slot, maximum)]


@mutant
class DraftsFor64Slots(PlainDrafter):
    """Drafts for the first 64 slots of a batch."""

    def propose_tokens(self, slots: np.ndarray, max_tokens: np.ndarray) -> Drafts:
        found = super().propose_tokens(slots[:64], max_tokens[:64])
        return Drafts(found.token_ids, np.concatenate([found.counts, np.zeros(max(len(slots) - 64, 0), np.int32)]))


@mutant
class RemembersEnded(PlainDrafter):
    """Keeps what followed each token of a removed slot."""

    def remove_slot(self, slot: int) -> None:
        self.__dict__.setdefault("ended", []).append(self.following[slot])
        super().remove_slot(slot)


@mutant
class ReusesItsDrafts(PlainDrafter):
    """Returns drafts in a buffer that the next drafts overwrite."""

    def propose_tokens(self, slots: np.ndarray, max_tokens: np.ndarray) -> Drafts:
        found = super().propose_tokens(slots, max_tokens)
        buffer = self.__dict__.setdefault("buffer", np.zeros(1 << 16, np.int32))
        buffer[: len(found.token_ids)] = found.token_ids
        return Drafts(buffer[: len(found.token_ids)], found.counts)


sleeps(mutant, "propose_tokens")
