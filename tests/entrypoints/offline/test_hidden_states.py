"""Hidden states of prompts and outputs equal those of transformers; what exceeds the bound is
refused before anything runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frame import Engine, SamplingParams
from frame.entrypoints.engine_client import limits
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.testing.checkpoints import load_reference, make_checkpoint

SMALL = {"max_total_tokens": 512, "max_running_requests": 4, "chunked_prefill_size": 16, "threads": 1, "dtype": "float32", "device": "cpu"}
STATES = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, return_hidden_states=True)
PROMPTS = [list(range(7, 7 + length)) for length in (1, 16, 40, 90)]


@torch.no_grad()
def wanted(model: Any, prompt: list[int], output: list[int]) -> np.ndarray:
    states: np.ndarray = model.model(torch.tensor([prompt + output[:-1]])).last_hidden_state[0].numpy()
    return states


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "Gemma3ForCausalLM", "DeepseekV3ForCausalLM"])
def test_states_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Over chunks, beside other requests, and after the prompts are in the prefix cache."""
    folder = make_checkpoint(name, tmp_path)
    model = load_reference(folder)
    plain = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, prompt_logprobs=1)
    with Engine(str(folder), **SMALL) as engine:
        for _ in range(2):
            outputs = engine.generate([*PROMPTS, *PROMPTS], [STATES] * len(PROMPTS) + [plain] * len(PROMPTS))
            for prompt, output, other in zip(PROMPTS, outputs, outputs[len(PROMPTS) :], strict=False):
                assert output.token_ids == other.token_ids and other.hidden_states is None and output.finish_reason == "length"
                np.testing.assert_allclose(output.hidden_states, wanted(model, prompt, output.token_ids), atol=1e-4, rtol=1e-4)
        engine.control("check_integrity")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("m"))
    with Engine(str(folder), max_model_len=256, **SMALL) as engine:
        yield engine, load_reference(folder)


def test_several_sequences_stop_strings_and_streams(llama: Any) -> None:
    engine, model = llama
    text = "The quick brown fox"
    ids = engine.tokenizer.encode(text)
    whole = engine.generate(text, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    stop = whole.text[3:6]
    several = SamplingParams(max_tokens=5, n=3, seed=1, temperature=1, return_hidden_states=True, logprobs=1)
    stopped = SamplingParams(max_tokens=12, temperature=0, stop=(stop,), ignore_eos=True, return_hidden_states=True)
    outputs = engine.generate([text, text], [several, stopped])
    found = [*outputs[0].outputs, outputs[1]]
    assert outputs[1].matched == stop and len({tuple(each.token_ids) for each in found}) == 4
    streamed = list(engine.stream(text, stopped))[-1].output
    assert streamed.text == outputs[1].text
    awaited = asyncio.run(engine.agenerate(text, stopped))
    for each in (*found, streamed, awaited):
        np.testing.assert_allclose(each.hidden_states, wanted(model, ids, each.token_ids), atol=1e-4, rtol=1e-4)


def test_the_bound_is_checked_before_anything_runs(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = llama
    monkeypatch.setattr(engine, "_start", lambda job: pytest.fail("it ran"))
    monkeypatch.setattr(limits, "MAX_STATE_VALUES", 200 * engine._resolved.model.hidden_size)
    longest = SamplingParams(max_tokens=101, n=2, return_hidden_states=True)  # 101 tokens each
    for params in (longest, SamplingParams(max_tokens=None, return_hidden_states=True)):
        with pytest.raises(
            InvalidRequestError, match=r"exceed the bound of a response, \d+ numbers \(200 tokens\); lower max_tokens"
        ) as caught:
            engine.generate(PROMPTS[0], params)
        assert caught.value.param == "return_hidden_states"
    with pytest.raises(pytest.fail.Exception, match="it ran"):
        engine.generate(PROMPTS[0], SamplingParams(max_tokens=100, n=2, return_hidden_states=True))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param({"tp": 2}, marks=pytest.mark.exhaustive), {"pp": 2}])  # ranks of tp have the same states
def test_states_of_several_ranks(ranks: dict[str, int], tmp_path: Path) -> None:
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    model = load_reference(folder)
    with Engine(str(folder), **SMALL, **ranks) as engine:
        outputs = engine.generate(PROMPTS, [STATES, STATES, SamplingParams(max_tokens=3, prompt_logprobs=1), STATES])
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            if output.hidden_states is not None:
                np.testing.assert_allclose(output.hidden_states, wanted(model, prompt, output.token_ids), atol=1e-4, rtol=1e-4)
    assert [output.hidden_states is None for output in outputs] == [False, False, True, False]
