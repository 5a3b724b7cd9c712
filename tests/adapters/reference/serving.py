"""Runs an engine with adapters, and compares its outputs with PEFT's. The only module here that
knows frame's Python API."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from frame import Engine, SamplingParams
from tests.adapters.reference.cases import Reference

KEYS: dict[str, Any] = {"max_model_len": 512, "max_total_tokens": 8192, "threads": 1, "dtype": "float32", "max_running_requests": 16}
CLOSE = 1e-4
Row = tuple[str | None, list[int]]  # adapter, prompt


def open_engine(folder: Path, adapters: Mapping[str, Path], **keys: Any) -> Engine:
    """An engine over a checkpoint, with adapters by name; without any, one that has no adapters."""
    if adapters:
        modules = tuple(f"{name}={path}" for name, path in adapters.items())
        keys = {"lora_modules": modules, "max_cpu_loras": len(modules), "max_lora_rank": 128, "lora_routers": True} | keys
        keys["enable_lora"] = True
    return Engine(str(folder), **KEYS | keys)


def greedy(tokens: int, **keys: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, **keys)


def run(engine: Engine, rows: Sequence[Row], params: Any, is_paused: bool = False) -> list[Any]:
    """One call with all rows. `is_paused` makes the batches the same each time: the engine has all
    rows before it starts."""
    prompts, names = [prompt for _, prompt in rows], [name for name, _ in rows]
    keys: dict[str, Any] = {"lora": names} if any(names) else {}
    if not is_paused:
        return check_finished(engine.generate(prompts, params, **keys))
    outputs: list[Any] = []
    engine.control("pause")
    thread = threading.Thread(target=lambda: outputs.extend(engine.generate(prompts, params, **keys)))
    thread.start()
    time.sleep(0.3)
    engine.control("resume")
    thread.join()
    return check_finished(outputs)


def check_finished(outputs: list[Any]) -> list[Any]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return outputs


def check_prompt(output: Any, prompt: list[int], logits: torch.Tensor) -> None:
    """The log-probabilities of the prompt's tokens, and of the likeliest ones at each."""
    reference, entries = logits.log_softmax(-1), output.prompt_logprobs
    for i in range(1, len(prompt)):
        assert abs(entries.logprobs[i] - reference[i - 1, prompt[i]]) < CLOSE, i
        compare_top(entries.top[i], reference[i - 1])


def check_tokens(output: Any, prompt: list[int], reference: Reference | Any) -> None:
    """Each token is the likeliest one after those before it, within rounding, and has the
    reference's log-probability."""
    tokens = output.token_ids
    logits = reference.logits(prompt, tokens)[len(prompt) - 1 : -1]
    assert bool((logits.max(-1).values - logits[range(len(tokens)), tokens] < 2e-5).all()), (logits.argmax(-1).tolist(), tokens)
    if output.logprobs is not None:
        logprobs = logits.log_softmax(-1)
        for i, token in enumerate(tokens):
            assert abs(output.logprobs.logprobs[i] - logprobs[i, token]) < CLOSE, i
            compare_top(output.logprobs.top[i], logprobs[i])


def compare_top(top: Sequence[tuple[int, float]], reference: torch.Tensor) -> None:
    assert len(top) == 20
    assert float((reference[[token for token, _ in top]] - torch.tensor([value for _, value in top])).abs().max()) < CLOSE
    assert abs(top[-1][1] - float(reference.topk(20).values[-1])) < CLOSE
