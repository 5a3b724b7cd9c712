"""Odd configurations give transformers' log-probabilities in float32: cold, from the prefix cache,
in chunks, and with drafts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from msgspec import structs

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import TokenLogprobs
from frame.testing.checkpoints import load_reference
from frame.testing.local_loop import LocalLoop
from tests.core.greedy import Case, make_loop, random_prompts
from tests.core.odd_configurations import ODD, OddConfiguration

TOLERANCE = 1e-3  # of a log-probability; those of two likely tokens may be as near
PLAIN = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0, num_speculative_tokens=0)
DRAFTED = structs.replace(PLAIN, num_speculative_tokens=None, max_tokens=16)
CHUNK = 16
MANY = list(range(350, 200, -1))  # so that an output token is one of the prompt, after which the next one is drafted


def run_odd(odd: OddConfiguration, folder: Path) -> dict[str, float]:
    """The largest difference of a log-probability in each run."""
    folder = odd.make(folder)
    reference = load_reference(folder)
    if odd.head == "alone":  # transformers does not tie it in some processes, after other models
        reference.get_input_embeddings().weight = reference.get_output_embeddings().weight
    case = Case(str(folder), [], reference)
    drafter = {"speculative": {"algorithm": "ngram"}, "plugins": {"options": {"drafter/ngram": {"prompt_lookup_min": 1}}}}
    loop = make_loop(str(folder), 1024, "torch_native", page_size=4, chunk=CHUNK, **drafter)
    short, long = random_prompts((CHUNK - 2, 3 * CHUNK - 5))
    found = {"cold": measure(loop, case, short, PLAIN), "chunked": measure(loop, case, long, PLAIN)}
    assert loop.stats["cached"] == 0
    found["cached"] = measure(loop, case, [*long[:-3], *short[:5]], PLAIN)
    assert loop.stats["cached"] >= 2 * CHUNK
    found["speculated"] = measure(loop, case, MANY, DRAFTED)
    assert loop.scheduler.get_load()["drafted_tokens"] > 0
    loop.scheduler.check_integrity()
    return found


def measure(loop: LocalLoop, case: Case, prompt: list[int], params: SamplingParams) -> float:
    """The largest difference between an output token's log-probability and that of transformers, or
    by which it is below the likeliest one."""
    rid, tokens, ours = loop.add_request(prompt, params), [], []
    for step in loop.run_steps():
        for index, each in enumerate(step.rids):
            assert each == rid
            assert all(finish.reason == "length" for finish in step.finishes.values())
            tokens += step.token_ids[index]
            known: TokenLogprobs | None = step.logprobs.get(index)
            ours += known.logprobs if known is not None else []
        loop.stats["cached"] += sum(step.num_cached_tokens.values())
    theirs = case.logits(prompt, tokens).log_softmax(-1)
    chosen = theirs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert len(ours) == len(tokens) == params.max_tokens
    return max(float((torch.tensor(ours) - chosen).abs().max()), float((theirs.max(-1).values - chosen).max()))


@pytest.mark.slow
@pytest.mark.parametrize("odd", ODD, ids=str)
def test_runs_equal_transformers(odd: OddConfiguration, tmp_path: Path) -> None:
    found = run_odd(odd, tmp_path)
    shutil.rmtree(tmp_path)
    assert max(found.values()) < TOLERANCE, found
