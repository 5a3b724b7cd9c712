"""The training loop: batches of code and conversations, losses of both heads, a schedule over
wall-clock time.

The learning rate and the length of recall lists follow the elapsed share of the given minutes, so a
run always ends with a rate of zero, whatever the machine's speed; two runs are therefore not
bitwise equal. It knows nothing of files except through `save`.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from scripts.train_frame_tiny.model import FrameTiny, MoE
from scripts.train_frame_tiny.optimizer import Optimizer
from scripts.train_frame_tiny.samples import CLASS_WEIGHTS, REPLY, TEXT, task_batches


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a training run is made of."""

    minutes: float
    rows: int = 32
    length: int = 4096
    long_length: int = 8192
    long_share: float = 0.15
    task_share: float = 0.4
    muon_rate: float = 0.02
    adam_rate: float = 4e-3
    weight_decay: float = 0.02
    prediction_weight: float = 0.2
    bias_rate: float = 2e-3
    workers: int = 14
    seed: int = 1


class TaskRows(IterableDataset[NDArray[np.int32]]):
    """Conversation batches, made in worker processes; `progress` is shared with them."""

    def __init__(self, encoder: Tokenizer, rows: int, length: int, progress: Any, seed: int) -> None:
        self.make = partial(task_batches, encoder=encoder, rows=rows, length=length, progress=progress)
        self.seed = seed

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        worker = get_worker_info()
        return self.make(self.seed * 1000 + (worker.id if worker else 0))


class CodeRows:
    """Random slices of the packed source text, half of them from the beginning of a file; they live
    on the device."""

    def __init__(self, stream: NDArray[np.int32], starts: NDArray[np.int64], device: torch.device) -> None:
        self.stream = torch.from_numpy(stream.astype(np.int16)).to(device)
        self.starts = torch.from_numpy(starts).to(device)

    def take(self, rows: int, length: int) -> Tensor:
        """`[rows, length]` token ids."""
        device = self.stream.device
        anywhere = torch.randint(0, self.stream.numel(), (rows,), device=device)
        at_start = self.starts[torch.randint(0, self.starts.numel(), (rows,), device=device)]
        begin = torch.where(torch.rand(rows, device=device) < 0.5, anywhere, at_start).clamp(max=self.stream.numel() - length)
        return self.stream[begin[:, None] + torch.arange(length, device=device)].long()


def rate_scale(progress: float, step: int) -> float:
    """Warm-up over 100 steps, constant for 35 % of the time, then linear to zero."""
    return min(1.0, (step + 1) / 100) * min(1.0, (1.0 - progress) / 0.65)


class Trainer:
    """One run over one model. `report` receives a line of text now and then."""

    def __init__(self, model: FrameTiny, code: CodeRows, encoder: Tokenizer, recipe: Recipe, report: Callable[[str], None]) -> None:
        self.model, self.code, self.encoder, self.recipe, self.report = model, code, encoder, recipe, report
        self.device = code.stream.device
        self.optimizer = Optimizer(model, recipe.muon_rate, recipe.adam_rate, recipe.weight_decay)
        self.routers = [module.gate for module in model.modules() if isinstance(module, MoE)]
        self.class_weights = torch.tensor(CLASS_WEIGHTS, device=self.device)
        self.losses = torch.compile(model.losses, dynamic=False) if self.device.type == "cuda" else model.losses
        self.progress = multiprocessing.Value("d", 0.0)
        self.step = 0

    def _batches(self, rows: int, length: int) -> Iterator[Tensor]:
        recipe = self.recipe
        tasks = max(1, round(rows * recipe.task_share))
        data = TaskRows(self.encoder, tasks, length + 2, self.progress, recipe.seed + length)
        context = "fork" if recipe.workers else None
        loader = DataLoader(data, batch_size=None, num_workers=recipe.workers, multiprocessing_context=context)
        for batch in loader:
            conversations = torch.as_tensor(batch).to(self.device, non_blocking=True).long()
            source = self.code.take(rows - tasks, length + 2)
            yield torch.stack((torch.cat((conversations[0], source)), torch.cat((conversations[1], torch.full_like(source, TEXT)))))

    def _update(self, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One optimizer step; returns mean loss of code, of answers, and of the prediction
        layer."""
        tokens, classes = batch
        with torch.autocast(self.device.type, torch.bfloat16):
            main, later, each, loads = self.losses(tokens, self.class_weights[classes])
        (main + self.recipe.prediction_weight * later).backward()
        progress = float(self.progress.value)
        self.optimizer.step(rate_scale(progress, self.step))
        with torch.no_grad():
            change = self.recipe.bias_rate * min(1.0, 2 * (1 - progress)) * torch.sign(loads.mean(1, keepdim=True) - loads)
            for router, delta in zip(self.routers, change, strict=True):
                router.e_score_correction_bias += delta
        targets = classes[:, 1:-1]
        return each[targets == TEXT].mean(), each[targets == REPLY].mean(), later.detach()

    def run(self, save: Callable[[FrameTiny], None]) -> None:
        """Train for the recipe's minutes; `save` is called at a few points on the way."""
        recipe = self.recipe
        phases = [(recipe.rows, recipe.length, 1 - recipe.long_share)]
        if recipe.long_share > 0:
            phases.append((max(2, recipe.rows * recipe.length // recipe.long_length), recipe.long_length, 1.0))
        begun, saved, tokens = 0.0, 0.0, 0
        for rows, length, until in phases:
            for batch in self._batches(rows, length):
                numbers = self._update(batch)
                self.step += 1
                tokens += rows * length
                if self.step == 3:  # compilation is over: the clock starts
                    torch.cuda.synchronize() if self.device.type == "cuda" else None
                    begun, tokens = time.monotonic(), 0
                elapsed = time.monotonic() - begun if begun else 0.0
                self.progress.value = min(elapsed / (60 * recipe.minutes), 1.0)
                if self.step % 100 == 0 or self.step == 1:
                    code, replies, later = (round(float(number), 4) for number in numbers)
                    speed = round(tokens / elapsed / 1000) if elapsed else 0
                    losses = f"code {code}  answers {replies}  mtp {later}"
                    self.report(f"{elapsed:6.1f} s  step {self.step}  {losses}  {speed}k tokens/s  length {length}")
                if self.progress.value > saved + 0.25:
                    saved = self.progress.value
                    save(self.model)
                if self.progress.value >= until:
                    break
        save(self.model)
