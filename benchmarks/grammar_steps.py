"""What grammars cost beside a device of a fixed speed: `python benchmarks/grammar_steps.py` prints
one JSON object.

The scheduler runs with overlapped steps and a real grammar backend. The device is simulated: it
takes `--decode-ms` for a step of decodes and `--mixed-ms` for one with prompt tokens, and draws a
random allowed token. So a machine without a GPU shows how much of the masks' time a GPU would hide,
and how often requests leave the batch. Threads of the host need its cores for themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from made_tokenizer import MadeTokenizer, RankedTokenizer
from structured_throughput import PROMPT, kinds

from frame.core.interfaces.batch import ScheduledBatch, StepResult
from frame.core.interfaces.runner import ModelRunner, UnsampledStep
from frame.core.interfaces.sampling import CompiledGrammar, GrammarContext
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Generate
from frame.core.scheduling.scheduler import Scheduler, SchedulerConfig
from frame.plugins.loader import load_registry
from frame.structured_output.grammar_calls import GrammarMeter, MeteredGrammar
from frame.testing.contexts import SCHEDULING
from frame.testing.local_loop import LocalLoop
from frame.testing.scheduler_rig import SchedulerRig


class TimedStep(UnsampledStep):
    """Ends `seconds` after the step before it, and not before its mask came."""

    def __init__(self, device: TimedDevice, batch: ScheduledBatch, seconds: float) -> None:
        self._device, self._batch = device, batch
        self._ready = max(time.perf_counter(), device.ready) + seconds
        device.ready = self._ready
        self._mask = batch.grammar_mask

    def sample(self, mask: np.ndarray | None) -> None:
        self._mask = mask
        self._ready = self._device.ready = max(self._ready, time.perf_counter())

    def wait(self) -> StepResult:
        tokens = self._device.draw(int(self._batch.samples.sum()), self._mask)
        while (left := self._ready - time.perf_counter()) > 0:
            time.sleep(left)
        return StepResult(step=self._batch.step, token_ids=tokens)


class TimedDevice(ModelRunner):
    """A runner without a model."""

    def __init__(self, vocab_size: int, decode: float, mixed: float) -> None:
        self.ready = 0.0
        self._vocab_size, self._decode, self._mixed = vocab_size, decode, mixed
        self._numbers = np.random.default_rng(0)

    def launch(self, batch: ScheduledBatch) -> TimedStep:
        return TimedStep(self, batch, self._decode if batch.num_decodes == len(batch.slots) else self._mixed)

    def draw(self, count: int, mask: np.ndarray | None) -> np.ndarray:
        """A random allowed token of each sample."""
        tokens = self._numbers.integers(1, self._vocab_size, count).astype(np.int32)
        for i in range(0 if mask is None else count):
            words = np.flatnonzero(mask[i])
            word = int(words[int(self._numbers.integers(len(words)))])
            bits = int(mask[i, word]) & 0xFFFFFFFF
            tokens[i] = 32 * word + random.choice([bit for bit in range(32) if bits >> bit & 1])
        return tokens

    def close(self) -> None:
        pass


def run(scheduler: Scheduler, device: TimedDevice, grammars: Sequence[CompiledGrammar | None], length: int) -> dict[str, Any]:
    """Output tokens a second, and what steps ran."""
    loop, numbers = LocalLoop(scheduler, device), random.Random(0)
    for i, compiled in enumerate(grammars):
        params = SamplingParams(max_tokens=length, ignore_eos=True, seed=i)
        message = Generate(rid=str(i), token_ids=[numbers.randint(5, 1000) for _ in range(PROMPT)], params=params)
        grammar = None if compiled is None else MeteredGrammar(compiled.start(), GrammarMeter(1000.0))
        if (refusal := scheduler.add_request(message, grammar)) is not None:
            raise RuntimeError(refusal.error)
    began, busy, ended, tokens = time.perf_counter(), time.process_time(), [0.0] * len(grammars), 0
    for step in loop.run_steps():
        tokens += sum(map(len, step.token_ids))
        for index, finish in step.finishes.items():
            if finish.reason == "error":
                raise RuntimeError(finish.error)
            ended[int(step.rids[index])] = time.perf_counter() - began
    seconds = time.perf_counter() - began
    plain = [end for end, compiled in zip(ended, grammars, strict=True) if compiled is None]
    steps = {key: loop.stats[key] for key in ("decode", "mixed", "extend")}
    cpu = round((time.process_time() - busy) * 1e3 / loop.stats["steps"], 2)
    found = {"tokens_per_second": round(tokens / seconds, 1), "cpu_ms_per_step": cpu, **steps}
    return found if not plain else {**found, "plain_tokens_per_second": round(length / max(plain), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="combined")
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--ranks", type=Path, help="a file of tokens in tiktoken's format instead of a made vocabulary")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--plain", type=int, default=0, help="requests without a grammar beside them")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--decode-ms", type=float, default=4.6)
    parser.add_argument("--mixed-ms", type=float, default=7.0)
    parser.add_argument("--only", nargs="+", default=["regex", "counted", "schema", "schemas", "ebnf"])
    options = parser.parse_args()
    tokenizer = MadeTokenizer(options.vocab) if options.ranks is None else RankedTokenizer(options.ranks, options.vocab)
    registry = load_registry()
    backend = registry.load(registry.get("grammar_backend", options.backend))(GrammarContext(tokenizer, options.vocab))
    config = SchedulerConfig(
        page_size=16, num_pages=1 + options.length * (options.rows + options.plain), max_running=options.rows + options.plain,
        token_budget=8192, max_context=PROMPT + options.length, vocab_size=options.vocab, overlap=True, request_timeout=1e9,
    )  # fmt: skip
    policy = registry.load(registry.get("scheduling_policy", "fcfs"))(SCHEDULING)
    asked = kinds(tokenizer.backend, options.rows)
    rows: dict[str, Any] = {}
    for label in ("free", *options.only):
        compiled = {json.dumps(each): backend.compile(*next(iter(each.items()))) for each in asked[label] if each}
        grammars = [*(compiled.get(json.dumps(each)) for each in asked[label]), *[None] * options.plain]
        for _ in range(2):  # the second has masks that the first computed
            scheduler = SchedulerRig(config, policy).scheduler
            device = TimedDevice(options.vocab, options.decode_ms / 1e3, options.mixed_ms / 1e3)
            rows[label] = run(scheduler, device, grammars, options.length)
            scheduler.close()
        rows[label]["loss_percent"] = round(100 * (1 - rows[label]["tokens_per_second"] / rows["free"]["tokens_per_second"]), 1)
    machine = {"cores": os.cpu_count(), "load_after": os.getloadavg()[0]}
    print(json.dumps({**vars(options), "ranks": options.ranks and options.ranks.name, "machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
