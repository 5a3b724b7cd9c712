"""What the greedy equality tests share: a checkpoint beside transformers' view of it, and a
scheduler with a runner over it.

Everything runs in this process, without a server. Knows no attention backend but by the name it is
given.
"""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from frame.checkpoint.model_config import EMBEDDED, find_model, read_model_config
from frame.config.schema import FrameConfig
from frame.core.interfaces.platform import HOST
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.configuration.prepare import Prepared, prepare
from frame.entrypoints.processes.build_engine import build_rank, load_parts
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.entrypoints.processes.components import RunnerPlan, build_runner
from frame.entrypoints.processes.join_groups import Groups
from frame.parallel.rank_channels import decode_batch, encode_batch
from frame.parallel.tp_follower import LeadingRunner, follow
from frame.testing.checkpoints import load_reference, make_checkpoint
from frame.testing.local_loop import LocalLoop
from tests.models.ranks import ThreadGroup, on_ranks

T = TypeVar("T")

WHOLE = ("LlamaForCausalLM", "DeepseekV3ForCausalLM")  # run the full cross product
NATIVE = (
    *WHOLE,
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    EMBEDDED,
)
NEWER = (  # `test_forms_at_once` in each run, every form in `soak`
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "Phi3ForCausalLM",
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "KimiLinearForCausalLM",
    "Llama4ForCausalLM",
    "NemotronHForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MinistralForCausalLM",
    "Ministral3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma4ForCausalLM",
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "FalconH1ForCausalLM",
)
TRANSFORMERS = "transformers/"  # before an architecture: by transformers' layers over our cache
FALLBACK = tuple(TRANSFORMERS + name for name in ("Gemma2ForCausalLM", "Phi3ForCausalLM", "Olmo2ForCausalLM", "GPT2LMHeadModel"))
WINDOWED: dict[str, dict[str, Any]] = {  # windows shorter than most prompts
    "MistralForCausalLM": {"sliding_window": 24},
    "Qwen2ForCausalLM": {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 1},  # the first layer has none
    "Gemma2ForCausalLM": {"sliding_window": 24},
}


@dataclass(frozen=True)
class Case:
    """A checkpoint and what transformers makes of it."""

    folder: str
    prompts: list[list[int]]
    reference: Any
    implementation: str | None = None  # model.implementation
    known: dict[Any, list[int]] = field(default_factory=dict)  # (prompt, output) -> the likeliest tokens after each prefix

    def check(self, outputs: Sequence[list[int]]) -> None:
        for prompt, output in zip(self.prompts, outputs, strict=True):
            key = (tuple(prompt), tuple(output))
            if key not in self.known:
                self.known[key] = self.logits(prompt, output).argmax(-1).tolist()
            assert output == self.known[key]

    def logits(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """What transformers computes at each output token's place, [len(output), vocab]."""
        with torch.no_grad():
            logits: torch.Tensor = self.reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        return logits


def make_case(architecture: str, scratch: Path, prompts: list[list[int]]) -> Case:
    """`architecture` is a name in `frame.testing.checkpoints.TINY`, one of `FALLBACK`, or that of
    the embedded model."""
    name = architecture.removeprefix(TRANSFORMERS)
    folder = find_model(EMBEDDED) if name == EMBEDDED else make_checkpoint(name, scratch, **WINDOWED.get(name, {}))
    return Case(str(folder), prompts, load_reference(folder), "transformers" if name != architecture else None)


def random_prompts(lengths: Sequence[int]) -> list[list[int]]:
    numbers = random.Random(7)
    return [[numbers.randrange(6, 384) for _ in range(length)] for length in lengths]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def prepared_for(folder: str, tokens: int, backend: str | None = None, tp: int = 1, **settings: Any) -> Prepared:
    """`tokens` is the size of the pool; `settings` are page_size, chunk, overlap, prefix,
    moe_runner, implementation, speculative and plugins (sections)."""
    known = {"page_size": 16, "chunk": 512, "overlap": True, "prefix": "radix", "moe_runner": None, "implementation": None}
    known |= {"speculative": {}, "plugins": {}}
    assert settings.keys() <= known.keys()
    known |= settings
    config = {
        "model": {"path": folder, "dtype": "float32", "implementation": known["implementation"]},
        "cache": {"page_size": known["page_size"], "max_total_tokens": tokens, "prefix": known["prefix"]},
        "scheduler": {"max_running_requests": 16, "chunked_prefill_size": known["chunk"], "overlap": known["overlap"]},
        "attention": {"backend": backend},
        "moe": {"runner": known["moe_runner"] if read_model_config(folder).num_experts else None},
        "execution": {"device": "cpu", "threads": 1},
        "parallel": {"tp": tp},
        "speculative": known["speculative"],
        "plugins": known["plugins"],
    }
    return prepare(FrameConfig.model_validate(config))


def make_loop(folder: str, tokens: int, backend: str | None = None, **settings: Any) -> LocalLoop:
    prepared = prepared_for(folder, tokens, backend, **settings)
    assert backend in {None, prepared.resolved.choice("attention_backend").name}
    runner = build_rank(prepared.resolved, prepared.registry)
    return LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner)


class Wire:
    """Carries batches from rank 0 to rank 1: a queue of encoded bytes."""

    def __init__(self) -> None:
        self.batches: queue.Queue[Any] = queue.Queue()

    def send(self, batch: Any) -> None:
        self.batches.put(encode_batch(batch))

    def receive(self) -> Any:
        data = self.batches.get(timeout=60)
        return None if data is None else decode_batch(data)

    def close(self) -> None:
        self.batches.put(None)


def on_two_ranks(case: Case, act_with: Callable[[LocalLoop], T], backend: str | None = None, **settings: Any) -> T:
    """Run `act_with` on rank 0's loop, while rank 1 follows; returns its result. A rank is a
    thread."""
    prepared = prepared_for(case.folder, backend=backend, tp=2, **settings)
    wire = Wire()

    def act(group: ThreadGroup) -> Any:
        runner = build_runner(RunnerPlan(prepared.resolved, load_parts(prepared.resolved, prepared.registry), HOST, Groups(group)))
        if group.rank:
            return follow(runner, wire)
        loop = LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), LeadingRunner(runner, wire))
        try:
            return act_with(loop)
        finally:
            loop.runner.close()  # type: ignore[attr-defined]

    result: T = on_ranks(2, act)[0]
    return result


def run(loop: LocalLoop, case: Case, params: SamplingParams) -> None:
    case.check(loop.generate(case.prompts, params))
    loop.scheduler.check_integrity()


def check_logits(loop: LocalLoop, case: Case, prompts: Sequence[list[int]], params: SamplingParams) -> None:
    """Each prompt alone: the logits that its tokens are drawn from, beside those of
    transformers."""
    head, seen = loop.runner.model.compute_logits, []  # type: ignore[attr-defined]

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(head(hidden))
        return seen[-1].clone()

    loop.runner.model.compute_logits = watched  # type: ignore[attr-defined]
    for prompt in prompts:
        seen.clear()
        (output,) = loop.generate([prompt], params)
        ours = torch.cat([logits for logits in seen if len(logits)])[: len(output)]
        theirs = case.logits(prompt, output)
        assert output == theirs.argmax(-1).tolist()
        assert (ours - theirs).abs().max() < 1e-4
