"""Third-party models, attention backends and weight transfers."""

from __future__ import annotations

import threading
import time
from typing import Any, ClassVar

import numpy as np
import torch

from frame.core.interfaces.batch import ForwardBatch
from frame.core.interfaces.model import ModelCapabilities
from frame.core.interfaces.weight_transfer import TransferPart
from frame.models.llama import LlamaForCausalLM
from tests.testing.mutants.model import PlainLlama
from tests.testing.mutants.weight_transfer import ChangesTensors, IpcTransfer
from tests.testing.plain_attention import PlainAttention
from tests.testing.third_party import reads_stale_results, reuses_result, sleeps, third_party

# ---- models --------------------------------------------------------------------------------------

mutant = third_party("model")
ON_RANKS = ModelCapabilities(("LlamaForCausalLM",))


@mutant.using(capabilities=ON_RANKS)
class WrongOnTwoRanks(LlamaForCausalLM):
    """Scales the hidden states by the number of ranks before the last norm's weights, right on one
    rank alone."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden)
        return logits if self.context.tp.size == 1 else logits.roll(1, -1)


@mutant
class KeepsTransposedWeights(PlainLlama):
    """Keeps the head's weights transposed from its first use on, and misses an update."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "head"):
            self.head = self.weight("lm_head").t().contiguous()
        return hidden @ self.head


@mutant
class RotatesInHalf(PlainLlama):
    """Holds positions in float16, which has no odd ones from 2,048 on."""

    def positions(self, batch: ForwardBatch) -> torch.Tensor:
        return batch.positions.half().float()


@mutant
class HasATable(PlainLlama):
    """Has a table of 1,024 rotations, and uses the last one after it."""

    def positions(self, batch: ForwardBatch) -> torch.Tensor:
        return batch.positions.clamp(max=1023)


@mutant
class EmbedsOnce(PlainLlama):
    """Keeps the embeddings of token ids at the same address."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        key = ids.data_ptr(), len(ids)
        if self.__dict__.get("kept_key") != key:
            self.kept_key, self.kept = key, super().embed(ids)
        return self.kept


@mutant
class KeepsHiddenStates(PlainLlama):
    """Keeps the hidden states of each step."""

    kept_states: ClassVar[list[torch.Tensor]] = []

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        hidden = super().forward(batch)
        self.kept_states.append(hidden)
        return hidden


reuses_result(mutant, "compute_logits")

# ---- attention backends --------------------------------------------------------------------------

mutant = third_party("attention_backend")


@mutant
class Has16BitPages(PlainAttention):
    """Keeps KV slots in 16 bits."""

    def locate(self, batch: ForwardBatch, row: int, length: int) -> np.ndarray:
        return super().locate(batch, row, length) & 0xFFFF


@mutant
class Reads4096Keys(PlainAttention):
    """Reads the last 4,096 keys of a sequence alone."""

    def hidden(self, spec: Any, row: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        found = super().hidden(spec, row, q, k)
        found[..., : max(0, k.shape[0] - 4096)] = True
        return found


reuses_result(mutant, "run")
reads_stale_results(mutant, "run", argument=1)
sleeps(mutant, "run")

# ---- weight transfers ----------------------------------------------------------------------------

mutant = third_party("weight_transfer")


def cut(pairs: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    for _, tensor in pairs:
        tensor.reshape(-1)[(1 << 24) // tensor.element_size() :] = 0
    return pairs


def through_floats(pairs: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.double().to(tensor.dtype) if tensor.dtype == torch.int64 else tensor) for name, tensor in pairs]


def cut_names(pairs: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    return [(name[:64], tensor) for name, tensor in pairs]


mutant.each(
    ChangesTensors, "change",
    ("Receives16MB", "Receives the first 16 MiB of a tensor; the rest is 0.", staticmethod(cut)),
    ("ReceivesNumbersAsFloats", "Receives integers through float64.", staticmethod(through_floats)),
    ("CutsNames", "Cuts names at 64 characters.", staticmethod(cut_names)),
)  # fmt: skip


@mutant
class KeepsParts(IpcTransfer):
    """Keeps each part that it has received, until it is closed."""

    def receive(self, part: TransferPart) -> Any:
        self.__dict__.setdefault("parts", []).append(part)
        return super().receive(part)


@mutant
class LeavesAThread(IpcTransfer):
    """Starts a thread that `close` does not end."""

    def close(self) -> None:
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        super().close()
