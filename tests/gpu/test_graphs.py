"""Steps as CUDA graphs: the tokens of plain steps, for every backend that can be captured, with
heads and with latents."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from frame.checkpoint.model_config import EMBEDDED, find_model
from frame.config.schema import FrameConfig
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import build_rank
from frame.entrypoints.processes.build_scheduler import build_scheduler
from frame.entrypoints.tools.bench.paged_batches import Case, requirements
from frame.plugins.loader import load_registry
from frame.testing.attention.cases import DECODES, with_pages_for
from frame.testing.checkpoints import make_checkpoint
from frame.testing.local_loop import LocalLoop
from tests.core.masked_requests import EveryThird, generate_with

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROWS, MAXIMUM = 24, 96
SHORT = 16  # tokens that are compared where near ties may tip
NUMBERS = random.Random(1)
PROMPTS = [[NUMBERS.randrange(6, 384) for _ in range(NUMBERS.randrange(2, 90))] for _ in range(ROWS)]
GREEDY = [SamplingParams(temperature=0.0, max_tokens=8 + 2 * row, ignore_eos=True) for row in range(ROWS)]
DRAWN = [
    SamplingParams(
        temperature=(0.0, 0.8)[row % 2],
        top_p=(1.0, 0.9)[row // 2 % 2],
        logprobs=(None, 2)[row // 4 % 2],
        frequency_penalty=0.3 * (row // 8 % 2),
        seed=row,
        max_tokens=8 + 2 * row,
        ignore_eos=True,
    )
    for row in range(ROWS)
]
LAYERS = {  # of the models
    "latents": Case(DECODES, heads=8, rank=128, rope=32, head_dim=64, v_head_dim=32, dtype=torch.bfloat16, device="cuda"),
    "wide-latents": Case(DECODES, heads=4, rank=512, rope=64, head_dim=192, v_head_dim=128, dtype=torch.bfloat16, device="cuda"),
    "heads": Case(DECODES, heads=8, kv_heads=2, head_dim=64, v_head_dim=64, dtype=torch.bfloat16, device="cuda"),
}
RECORDS = {record.name: record for record in load_registry(installed=False).records("attention_backend")}


def found() -> dict[tuple[str, str], str]:
    """Backends that can be captured, by the models whose attention they have -> why not here, or
    nothing."""
    if not torch.cuda.is_available():
        return {}
    reasons = {}
    for name, record in RECORDS.items():
        for model, layer in LAYERS.items():
            if record.capabilities.graphs != "none" and ("mla" if layer.rank else "mha") in record.capabilities.kinds:
                asked = requirements(with_pages_for(layer, record.capabilities), graphs=True)
                against = record.problems or record.capabilities.unsupported(asked)
                reasons[name, model] = str(against[0]) if against else ""
    return reasons


FOUND = found()
CAPTURABLE = [key for key, reason in FOUND.items() if not reason]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Of the embedded model, which has latents, or of one with latents or heads of the widths that
    every library takes."""
    wide = {"q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

    @functools.cache
    def made(model: str) -> Path:
        if model == "latents":
            return find_model(EMBEDDED)
        folder = tmp_path_factory.mktemp(model)
        if model == "wide-latents":
            return make_checkpoint("DeepseekV3ForCausalLM", folder, hidden_size=256, **wide)
        return make_checkpoint("LlamaForCausalLM", folder, hidden_size=512, num_attention_heads=8, head_dim=64)

    return made


def make_loop(path, backend, maximum, graph_tokens=0, chunk=512, dtype="bfloat16"):
    capabilities = RECORDS[backend].capabilities
    config = {
        "model": {"path": str(path), "dtype": dtype},
        "cache": {"max_total_tokens": 16_384, "page_size": (capabilities.page_sizes or (None,))[0]},
        "scheduler": {"max_running_requests": MAXIMUM, "chunked_prefill_size": chunk},
        "execution": {"device": "cuda", "cuda_graph_max_bs": maximum, "prompt_graph_max_tokens": graph_tokens},
        "attention": {"backend": backend if "extend" in capabilities.phases else {"prefill": "triton", "decode": backend}},
    }
    prepared = prepare(FrameConfig.model_validate(config))
    runner = build_rank(prepared.resolved, prepared.registry)
    assert (runner.decode_graphs is not None) == bool(maximum)
    assert (runner.piecewise_graphs is not None) == bool(graph_tokens)
    return LocalLoop(build_scheduler(prepared.resolved, prepared.registry, runner.capacity.pools), runner)


@pytest.mark.parametrize(
    ("graph_tokens", "chunk", "dtype"),
    [(0, 512, "bfloat16"), (64, 512, "bfloat16"), (512, 512, "float32"), (0, 48, "float32"), (0, 48, "bfloat16")],
)
@pytest.mark.parametrize(("backend", "model"), CAPTURABLE)
def test_tokens_are_those_of_plain_steps(backend, model, graph_tokens, chunk, dtype, path_of):
    path = path_of(model)
    dtypes = RECORDS[backend].capabilities.dtypes
    if dtype not in dtypes:
        dtype = "float16" if "float16" in dtypes else dtypes[0]
    plain = make_loop(path, backend, 0, dtype=dtype)
    captured = make_loop(path, backend, ROWS if chunk > MAXIMUM else MAXIMUM, graph_tokens, chunk, dtype)
    length = None if dtype == "float32" else SHORT
    for params in (GREEDY, DRAWN):
        outputs = plain.generate(PROMPTS, params), captured.generate(PROMPTS, params)
        same = sum(a[:length] == b[:length] for a, b in zip(*outputs, strict=True))
        print(f"{backend}, {model}, {dtype}, pieces of {graph_tokens}, chunks of {chunk}: {same} of {ROWS} rows the same")
        # in bf16 near ties may tip, more of them where prompts are computed by other kernels, and
        # all that follows is another text
        assert same >= (ROWS - 2 if dtype == "float32" else ROWS * 2 // 3 if chunk > MAXIMUM else ROWS // 3)
    captured.scheduler.check_integrity()


@pytest.mark.parametrize("filters", [{}, {"top_k": 20, "top_p": 0.9}], ids=str)
def test_grammar_masks(filters, path_of):
    """Drawn in a graph, of some rows only."""
    params = [
        SamplingParams(temperature=(0.0, 0.8)[row % 2], seed=row, max_tokens=8 + 2 * row, ignore_eos=True, **filters) for row in range(ROWS)
    ]
    path, loops = path_of("heads"), []
    for maximum in (0, MAXIMUM):
        loops.append(make_loop(path, "triton", maximum, dtype="float32"))
    vocab = loops[0].runner.vocab_size
    grammars = [EveryThird(vocab, row) if row % 4 else None for row in range(ROWS)]
    drawn, draw = [], loops[1].runner.decode_graphs.draw_masked
    loops[1].runner.decode_graphs.draw_masked = lambda *given: drawn.append(given[2]) or draw(*given)
    plain, captured = (generate_with(loop, PROMPTS, params, grammars) for loop in loops)
    assert sum(a == b for a, b in zip(plain, captured, strict=True)) >= ROWS - 2
    assert {0 if mask is None else len(mask.rows) for mask in drawn} >= {1, 10}
    for tokens, grammar in zip(captured, grammars, strict=True):
        assert grammar is None or all(grammar.allows(token, place) for place, token in enumerate(tokens))


@pytest.mark.parametrize("graph_tokens", [0, 512])
@pytest.mark.parametrize("architecture", ["Qwen3NextForCausalLM", "KimiLinearForCausalLM", "NemotronHForCausalLM"])
def test_recurrent_layers(architecture, graph_tokens, tmp_path):
    """Chunks of prompts, mixed steps and decodes of layers with states."""
    path = make_checkpoint(architecture, tmp_path)
    plain = make_loop(path, "triton", 0, dtype="float32")
    captured = make_loop(path, "triton", ROWS, graph_tokens, 96, "float32")
    outputs = plain.generate(PROMPTS, GREEDY), captured.generate(PROMPTS, GREEDY)
    assert sum(a == b for a, b in zip(*outputs, strict=True)) >= ROWS - 2
    captured.scheduler.check_integrity()


@pytest.mark.parametrize("architecture", ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"])
def test_selected_keys(architecture, tmp_path):
    """Decodes of rows below and above the number of selected keys."""
    path = make_checkpoint(architecture, tmp_path)
    plain, captured = make_loop(path, "triton", 0), make_loop(path, "triton", ROWS, chunk=96)
    outputs = plain.generate(PROMPTS, GREEDY), captured.generate(PROMPTS, GREEDY)
    same = sum(a[:SHORT] == b[:SHORT] for a, b in zip(*outputs, strict=True))
    assert same >= ROWS * 2 // 3, f"{same} of {ROWS} rows are the same"
    captured.scheduler.check_integrity()


@pytest.mark.parametrize("graph_tokens", [0, 512])
@pytest.mark.parametrize(("backend", "model"), CAPTURABLE)
def test_prompts_after_a_cached_prefix(backend, model, graph_tokens, path_of):
    """Of up to 64 tokens they are decodes, of more they run in pieces."""
    numbers = random.Random(2)
    begin = [numbers.randrange(6, 384) for _ in range(800)]
    tails = [[numbers.randrange(6, 384) for _ in range(length)] for length in (1, 7, 16, 40, 64, 100, 200, 300)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    path = path_of(model)
    outputs = []
    for loop in (make_loop(path, backend, 0), make_loop(path, backend, MAXIMUM, graph_tokens)):
        loop.generate([begin], params)
        outputs.append([loop.generate([begin + tail], params) for tail in tails])
        loop.scheduler.check_integrity()
    assert sum(a == b for a, b in zip(*outputs, strict=True)) >= len(tails) - 2


@pytest.mark.parametrize(("backend", "model"), [key for key, reason in FOUND.items() if reason])
def test_what_is_not_captured(backend, model):
    pytest.skip(f"{backend}, {model}: {FOUND[backend, model]}")


def test_some_backend_is_captured():
    assert {("triton", "latents"), ("triton", "heads")} <= set(CAPTURABLE)
