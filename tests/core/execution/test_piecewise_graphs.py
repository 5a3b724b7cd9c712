"""Steps with prompts through graphs in pieces give the tokens and log-probabilities that plain
steps give. On a CPU the pieces are computed anew, over the same padded inputs;
tests/gpu/test_graphs.py captures them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from frame.core.errors import ConfigurationError
from frame.core.execution.piecewise_graphs import PiecewiseGraphs, _intercepted, piece_sizes
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.processes.components import _capture_graphs
from tests.core.greedy import NATIVE, greedy, make_case, make_loop, random_prompts, run

TOKENS = 2048
PROMPTS = random_prompts((1, 3, 17, 30, 41, 64, 90))


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    made = {}

    def case(architecture):
        if architecture not in made:
            made[architecture] = make_case(architecture, tmp_path_factory.mktemp(architecture), PROMPTS)
        return made[architecture]

    return case


def captured_loop(case, maximum, **settings):
    loop = make_loop(case.folder, TOKENS, **settings)
    loop.runner.capture_piecewise_graphs(maximum)
    loop.steps = watch(loop.runner.piecewise_graphs)
    return loop


def watch(graphs):
    steps, plain = [], graphs.run

    def watched(batch):
        steps.append((batch.num_decodes, batch.num_rows, batch.num_tokens))
        return plain(batch)

    graphs.run = watched
    return steps


@pytest.mark.parametrize("maximum", [1, 8, 100, 256, 300, 2048])
def test_sizes_hold_every_step_and_waste_little(maximum):
    sizes = piece_sizes(maximum)
    assert sizes == tuple(sorted(set(sizes))) and sizes[-1] == maximum
    for tokens in range(9, maximum + 1):
        assert next(size for size in sizes if size >= tokens) <= max(tokens + 31, tokens * 4 / 3)


@pytest.mark.parametrize("architecture", (*NATIVE, "KimiLinearForCausalLM"))
def test_greedy(cases, architecture):
    case = cases(architecture)
    loop = captured_loop(case, 64, chunk=48)  # longer prompts in chunks, decodes beside them
    run(loop, case, greedy(6))
    assert any(decodes and decodes < rows for decodes, rows, _ in loop.steps)
    run(loop, case, greedy(6))  # from cached prefixes


def test_larger_steps_run_plainly(cases):
    case = cases("Qwen3ForCausalLM")
    loop = captured_loop(case, 24)
    run(loop, case, greedy(8))
    assert loop.steps and max(tokens for *_, tokens in loop.steps) <= 24


def test_padding_is_written_to_the_reserved_page_only(cases):
    loop = captured_loop(cases("Qwen3ForCausalLM"), 64)
    for length in (60, 3):  # the second leaves places of the first behind it
        loop.generate([PROMPTS[-1][:length]], greedy(1))
    inputs = loop.runner.piecewise_graphs._buffers.tensors
    for tensor in inputs.values():
        assert not tensor[3:8].any()
    assert inputs["kv_slots"][:3].all()


def test_log_probabilities_of_prompts(cases):
    case = cases("Qwen3ForCausalLM")
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    found = []
    for loop in (make_loop(case.folder, TOKENS, chunk=48), captured_loop(case, 64, chunk=48)):
        seen, launch = [], loop.runner.launch

        def launched(batch, launch=launch, seen=seen):
            pending = launch(batch)
            seen.append(pending.wait())
            return pending

        loop.runner.launch = launched
        loop.generate(PROMPTS, params)
        found.append([part.logprobs for result in seen for part in result.prompt_logprobs or () if part is not None])
    plain, captured = found
    assert len(plain) == len(captured) > len(PROMPTS) - 1
    for ours, theirs in zip(captured, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_layers_meet_the_backend_again_when_a_pass_has_failed(cases):
    loop = captured_loop(cases("Qwen3ForCausalLM"), 64)
    backend = loop.runner.context.attention
    method = backend.run
    with pytest.raises(KeyError), _intercepted(backend, lambda *_: 1 / 0):
        assert backend.run != method
        raise KeyError
    assert backend.run == method and "run" not in vars(backend)


@pytest.mark.parametrize("wanted", [None, 64])
def test_a_start_fails_for_graphs_of_prompts_only_where_they_are_wanted(cases, monkeypatch, wanted, caplog):
    loop = make_loop(cases("Qwen3ForCausalLM").folder, TOKENS)

    def fails(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(PiecewiseGraphs, "capture", fails)
    user = SimpleNamespace(execution=SimpleNamespace(prompt_graph_max_tokens=wanted))
    resolved = SimpleNamespace(cuda_graph_max_bs=0, prompt_graph_max_tokens=64, user=user)
    with pytest.raises(ConfigurationError, match="prompt-graph-max-tokens 0") if wanted else nullcontext():
        _capture_graphs(loop.runner, resolved, {})
    assert loop.runner.piecewise_graphs is None
    assert bool(caplog.records) == (wanted is None)


@pytest.mark.parametrize(
    ("architecture", "wanted", "captured"),
    [
        ("KimiLinearForCausalLM", None, False),
        ("KimiLinearForCausalLM", 64, True),
        ("Gemma3ForCausalLM", None, False),
        ("Gemma3ForCausalLM", 64, None),
    ],
)
def test_cache_groups(cases, architecture, wanted, captured):
    loop = make_loop(cases(architecture).folder, TOKENS)
    user = SimpleNamespace(execution=SimpleNamespace(prompt_graph_max_tokens=wanted))
    resolved = SimpleNamespace(cuda_graph_max_bs=0, prompt_graph_max_tokens=64, user=user)
    with pytest.raises(ConfigurationError, match="layers with windows") if captured is None else nullcontext():
        _capture_graphs(loop.runner, resolved, {})
    assert (loop.runner.piecewise_graphs is not None) == bool(captured)
