"""Engines of the batch-invariant mode: tokens and the bits of their log-probabilities, alone and in
company.

Used by the tests on the CPU and on GPUs.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from msgspec import structs
from safetensors import safe_open
from safetensors.torch import save_file

from frame.adapters.builder import build_commands, plan_sizes
from frame.adapters.places import AdapterPlaces, AdapterVersions
from frame.config.schema import FrameConfig
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Control
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.testing.local_loop import LocalLoop

NUMBERS = random.Random(3)
# on a GPU more than one split of keys of the attention kernels, also in windows
PROMPT = [NUMBERS.randrange(6, 250) for _ in range(300 if torch.cuda.is_available() else 137)]
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=20, ignore_eos=True, logprobs=2)
FIRST = structs.replace(DRAWN, max_tokens=6)  # its first tokens, whose keys are those of the prompt
# few tokens again and again, which the drafter ngram proposes
REPEATED = SamplingParams(temperature=2.0, seed=5, max_tokens=28, ignore_eos=True, logprobs=2, logit_bias={7: 60.0, 8: 60.0, 9: 58.0})

# of the drafter mtp, whose layer is trained on text
LIKELY = SamplingParams(temperature=0.2, seed=5, max_tokens=28, ignore_eos=True, logprobs=2)


@dataclass
class Scores:
    """The output tokens of a request, their log-probabilities, and those of its prompt."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    prompt: list[float | None] = field(default_factory=list)


def make_engine(
    path: Path | str, device: str, dtype: str, adapters: Mapping[str, Path] | None = None, **sections: dict[str, Any]
) -> LocalLoop:
    """adapters: folders by digest; `PROMPT` has the first one."""
    config: dict[str, Any] = {
        "model": {"path": str(path), "dtype": dtype, "skip_tokenizer_init": True, "max_context": 512},
        "cache": {"max_total_tokens": 32_768},
        "scheduler": {"max_running_requests": 256, "chunked_prefill_size": 512},
        "execution": {"device": device, "deterministic": True},
    }
    if adapters is not None:
        config["adapters"] = {"enabled": True, "max_rank": 32, "max_active": 4}
    for name, values in sections.items():
        config[name] = config.get(name, {}) | values
    prepared = prepare(FrameConfig.model_validate(config))
    runner = build_rank(prepared.resolved, prepared.registry)
    if adapters is None:
        return LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner)
    settings = prepared.resolved.user.adapters
    sizes = plan_sizes(settings.max_active, settings.max_rank, settings.pages)
    versions = AdapterVersions()
    places = AdapterPlaces(versions, sizes.places, sizes.pages)
    scheduler = build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools, make_adapters=lambda: places)
    commands = build_commands(runner, runner, versions, [places])
    assert commands is not None
    for digest, folder in ((key, value) for key, value in adapters.items() if key):
        assert commands.begin(Control(digest, "load_adapter", arguments={"digest": digest, "folder": str(folder)})) is None
        while not (replies := commands.take_replies()):
            time.sleep(0.01)
        assert replies[0].ok, replies[0].error
    return AdaptedLoop(scheduler, runner, list(adapters))


class AdaptedLoop(LocalLoop):
    """Gives requests adapters by the length of their prompts: none, or one of `digests`."""

    def __init__(self, scheduler: Any, runner: Any, digests: Sequence[str]) -> None:
        super().__init__(scheduler, runner)
        self.digests = digests

    def add_request(self, prompt: Sequence[int], params: SamplingParams, *others: Any) -> str:
        place = len(prompt) % (len(self.digests) + 1)
        adapter = self.digests[0] if tuple(prompt[: len(PROMPT)]) == tuple(PROMPT) else ("", *self.digests)[place]
        return super().add_request(prompt, params, adapter=adapter)


def write_adapter(model: Path | str, folder: Path, rank: int) -> Path:
    """An adapter, as PEFT writes it, with random deltas of all linear layers of a checkpoint."""
    folder.mkdir(parents=True)
    random, tensors = torch.Generator().manual_seed(rank), {}
    for name, (outputs, inputs) in _list_matrices(Path(model)):
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) * inputs**-0.5
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * 0.1 * rank**-0.5
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _list_matrices(model: Path) -> Iterator[tuple[str, Sequence[int]]]:
    """The names and shapes of projections of the layers that do not draft."""
    draft = f".layers.{json.loads((model / 'config.json').read_text())['num_hidden_layers']}."
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - no mapping
                if key.endswith("_proj.weight") and draft not in key and len(shape := file.get_slice(key).get_shape()) == 2:
                    yield key.removesuffix(".weight"), shape


def score(
    loop: LocalLoop, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], preempt_every: int | None = None
) -> list[Scores]:
    """Run the requests together. preempt_every: steps after which all are preempted."""
    scores = {loop.add_request(prompt, each): Scores() for prompt, each in zip(prompts, params, strict=True)}
    for number, step in enumerate(loop.run_checked(), 1):
        if preempt_every is not None and number % preempt_every == 0:
            loop.scheduler.preempt_all()  # type: ignore[attr-defined]
        for index, rid in enumerate(step.rids):
            scores[rid].tokens += step.token_ids[index]
            if index in step.logprobs:
                scores[rid].logprobs += step.logprobs[index].logprobs
            if index in step.prompt_logprobs:
                scores[rid].prompt += step.prompt_logprobs[index].logprobs
    return list(scores.values())


def score_one(loop: LocalLoop, params: SamplingParams, others: int = 0, preempt_every: int | None = None) -> Scores:
    """Of `PROMPT`, in a random place among other requests."""
    numbers = random.Random(others)
    prompts = [[numbers.randrange(6, 250) for _ in range(numbers.randrange(2, 60))] for _ in range(others)]
    each = [SamplingParams(temperature=1.0, seed=n, max_tokens=1 + n % 20, ignore_eos=True) for n in range(others)]
    place = numbers.randrange(others + 1)
    prompts.insert(place, PROMPT)
    each.insert(place, params)
    return score(loop, prompts, each, preempt_every)[place]


def score_as_prompt(loop: LocalLoop, tokens: Sequence[int]) -> list[float | None]:
    """The log-probabilities of output tokens as those of a prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    (scores,) = score(loop, [[*PROMPT, *tokens]], [params])
    return scores.prompt[len(PROMPT) :]


def check_engine(
    path: Path | str,
    device: str,
    dtype: str,
    others: int = 255,
    plain: dict[str, dict[str, Any]] | None = None,
    adapters: Mapping[str, Path] | None = None,
    drafters: Mapping[str, SamplingParams] = MappingProxyType({"ngram": REPEATED}),
    chunks: Sequence[int] = (16, 33, 64, 100),
    **sections: dict[str, Any],
) -> Scores:
    """Raises AssertionError if the bits of the request depend on anything. Returns them. plain:
    sections of the engines with other chunks, instead of those in `sections`."""
    loop = make_engine(path, device, dtype, adapters, **sections)
    expected, repeated = score_one(loop, DRAWN), score_one(loop, REPEATED)
    assert len(expected.logprobs) == len(expected.tokens) == DRAWN.max_tokens
    assert score_one(loop, DRAWN) == expected, "after a cache hit"
    assert loop.stats["cached"] >= 96  # a recurrent state is saved where the second prompt began as the first
    for params, alone in ((DRAWN, expected), (REPEATED, repeated)):
        assert score_one(loop, params, others) == alone, f"among {others} others"
        assert score_as_prompt(loop, alone.tokens) == alone.logprobs, "as a prompt"
    for chunk in chunks:
        chunked = sections | (plain or {}) | {"scheduler": sections.get("scheduler", {}) | {"chunked_prefill_size": chunk}}
        found = score_one(make_engine(path, device, dtype, adapters, **chunked), FIRST)
        count = len(found.tokens)
        assert (found.tokens, found.logprobs) == (expected.tokens[:count], expected.logprobs[:count]), f"chunks of {chunk}"
    scheduler = sections.get("scheduler", {}) | {"overlap": False}
    waiting = make_engine(path, device, dtype, adapters, **sections | {"scheduler": scheduler})
    assert score_one(waiting, DRAWN, 4, preempt_every=7) == expected, "preempted"
    assert waiting.scheduler.get_load()["preempted"] > 0
    for drafter, params in drafters.items():
        speculative = {"algorithm": drafter, "num_steps": 4, "adaptive": False}
        drafting = make_engine(path, device, dtype, adapters, **sections | {"speculative": speculative})
        assert score_one(drafting, params, 8) == score_one(loop, params), f"with drafts of {drafter}"
        load = drafting.scheduler.get_load()
        assert 0 < load["accepted_tokens"] < load["drafted_tokens"], drafter
    return expected
