"""The in-tree samplers, and how the configuration and requests treat one that honours fewer
parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from frame import Engine, SamplingParams
from frame.config.schema import FrameConfig
from frame.config.selection import ResolveError
from frame.core.sampling.sampler import TORCH
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.interfaces.sampler import RowSampler, SamplerCapabilities, SamplerContext, SamplerRequirements
from frame.plugins.loader import load_registry
from frame.plugins.samplers.torch import TorchSampler


class Greatest(RowSampler):
    """Draws the greatest logit of every row."""

    capabilities = SamplerCapabilities(params=("min_p",), drafts=False, graphs=False)

    def draw_tokens(self, logits: torch.Tensor, params: Any, slots: torch.Tensor) -> torch.Tensor:
        return logits.argmax(dim=-1)


def test_the_reference_is_that_of_the_core() -> None:
    context = SamplerContext(97, 5, torch.device("cpu"), TORCH, TORCH)
    assert TorchSampler(context).make_operations() is TORCH


def test_a_cpu_draws_by_torch_and_a_gpu_by_its_kernels() -> None:
    assert prepare(FrameConfig()).resolved.choice("sampler").name == "torch"
    kernels = load_registry(installed=False).get("sampler", "triton").capabilities
    assert kernels.unsupported(SamplerRequirements("cuda", (9, 0), deterministic=True, drafts=True)) == []
    assert "needs compute capability 8.0" in str(kernels.unsupported(SamplerRequirements("cuda", (7, 5)))[0])
    assert "runs on cuda, not on cpu" in str(kernels.unsupported(SamplerRequirements("cpu"))[0])


def test_a_sampler_serves_and_what_it_does_not_honour_is_refused() -> None:
    with Engine(plugins=[Greatest], threads=1, max_total_tokens=1024, sampling_sampler="greatest") as engine:
        hot, cold = (engine.generate([5, 6, 7], SamplingParams(max_tokens=6, temperature=each)).token_ids for each in (9.0, 0.0))
        assert hot == cold
        engine.generate([5], SamplingParams(max_tokens=2, min_p=0.2))
        for params in ({"top_k": 3}, {"top_p": 0.5}, {"seed": 1}):
            (name,) = params
            with pytest.raises(InvalidRequestError, match=f"^{name} has no effect with the sampler greatest of this server; leave it out"):
                engine.generate([5], SamplingParams(max_tokens=2, **params))


def test_drafts_and_deterministic_results_need_a_sampler_for_them() -> None:
    def resolve(**sections: Any) -> None:
        prepare(FrameConfig.model_validate({"sampling": {"sampler": "greatest"}, **sections}), classes=[Greatest])

    resolve()
    with pytest.raises(ResolveError, match=r"draws the tokens of a row one after the other"):
        resolve(speculative={"algorithm": "ngram"})
    with pytest.raises(ResolveError, match=r"depend on the other rows of a batch"):
        resolve(execution={"deterministic": True})


def test_a_parameter_that_no_sampler_knows_is_an_error_of_the_record() -> None:
    with pytest.raises(ValueError, match="params holds 'temprature'"):
        SamplerCapabilities(params=("temprature",))
