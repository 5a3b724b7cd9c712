"""Adapters beside the other features: chunks, page sizes, preemption, few places, drafts, ranks,
sampling and grammars. Outputs equal PEFT's, and those of an engine on the merged checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frame import SamplingParams
from frame.testing.checkpoints import load_reference
from tests.adapters.reference.cases import ROUND_SIZES, Case, Reference, make_adapter, make_base, make_rounded, prompts
from tests.adapters.reference.serving import Row, check_prompt, check_tokens, greedy, open_engine, run

# family -> its adapters here: plain, of patterns, DoRA, and one that starts with its invocation
ADAPTERS = {
    "llama": ["everything-r8", "everything-patterns", "all_linear-dora", "all_linear-alora"],
    "deepseek_v3": ["everything-r8", "everything-patterns", "mla-dora", "q_b_proj-alora"],
    "qwen3_moe": ["everything-r8", "everything-patterns", "q_proj-dora", "v_proj-alora"],
    "qwen3_next": ["everything-r8", "everything-patterns", "recurrent-dora", "recurrent-alora"],
    "gemma3": ["everything-r8", "everything-patterns", "all_linear-dora", "all_linear-alora"],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks of 16, pages of 1": {"chunked_prefill_size": 16, "page_size": 1},
    "chunks of 64, pages of 16": {"chunked_prefill_size": 64, "page_size": 16, "overlap": False},
    "preemption": {"max_total_tokens": 640, "max_running_requests": 8, "chunked_prefill_size": 32},
    "one place": {"max_loras": 1},
    "two places, no prefix cache": {"max_loras": 2, "prefix_cache": "none"},
    "ngram": {"speculative_algorithm": "ngram", "speculative_adaptive": False},
    "suffix": {"speculative_algorithm": "suffix", "chunked_prefill_size": 16},
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
    "ep 2": {"tp": 2, "ep": 2},
}
EXPERTS = ("deepseek_v3", "qwen3_moe", "qwen3_next")
ALWAYS = {("llama", "chunks of 16, pages of 1"), ("deepseek_v3", "preemption"), ("llama", "ngram"), ("qwen3_moe", "one place")}
Made = tuple[Path, Any, dict[str, Reference], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """(checkpoint, transformers' model, adapters by name, the folder of theirs) of a family."""
    known: dict[str, Made] = {}

    def get(family: str) -> Made:
        if family not in known:
            folder, scratch = make_base(family, tmp_path_factory.mktemp(family)), tmp_path_factory.mktemp("adapters")
            model = load_reference(folder)
            chosen = [Case(family, *name.split("-")) for name in ADAPTERS[family]]
            known[family] = (folder, model, {case.name: make_adapter(model, case, scratch / case.name) for case in chosen}, scratch)
        return known[family]

    return get


def make_rows(names: list[str]) -> list[Row]:
    """Each prompt under each adapter and under none, so that every prefix is shared."""
    return [(name, prompt) for prompt in prompts() for name in (None, *names)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param(family, name, marks=[] if (family, name) in ALWAYS else pytest.mark.soak, id=f"{family}-{name}")
        for family in ADAPTERS
        for name in SETTINGS
        if name != "ep 2" or family in EXPERTS
    ],
)
def test_settings(family: str, settings: str, made: Any) -> None:
    """Twice, so that the second pass hits what the first one cached."""
    folder, model, references, scratch = made(family)
    rows = make_rows(list(references))
    of = {None: Reference(Case(family, "", "base"), model), **references}
    with open_engine(folder, {name: scratch / name for name in references}, **SETTINGS[settings]) as engine:
        passes = [run(engine, rows, greedy(20, logprobs=20)) for _ in range(2)]
        scored = run(engine, rows, greedy(1, prompt_logprobs=20))
        engine.control("check_integrity")
    for outputs in passes:
        for (name, prompt), output in zip(rows, outputs, strict=True):
            check_tokens(output, prompt, of[name])
    for (name, prompt), output in zip(rows, scored, strict=True):
        check_prompt(output, prompt, of[name].logits(prompt))
    if settings not in ("preemption", "two places, no prefix cache"):
        assert family == "qwen3_next" or sum(output.cached_tokens for output in passes[1]) > 0


def test_hits_stay_within_an_adapter(made: Any) -> None:
    """One prompt under all adapters and none, one after the other: only the second run of the same
    adapter hits, or an aLoRA in front of its invocation, which has the base's pages."""
    folder, _, references, scratch = made("llama")
    prompt = prompts()[5]
    with open_engine(folder, {name: scratch / name for name in references}, page_size=1) as engine:
        cached = {}
        for name in (None, *references):
            first, second = (run(engine, [(name, prompt)], greedy(4))[0].cached_tokens for _ in range(2))
            assert second >= len(prompt) - 1
            cached[name] = first
        engine.flush_cache()
        run(engine, [("all_linear-alora", prompt)], greedy(4))
        (base,) = run(engine, [(None, prompt)], greedy(4))
    assert cached.pop("all_linear-alora") in (0, 40)  # the start of the last invocation
    assert set(cached.values()) == {0}
    assert base.cached_tokens in (0, 40)


SAMPLED = [
    SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=1.0, seed=4, n=4, top_p=0.9, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=1.0, seed=5, json_object=True),
    SamplingParams(max_tokens=24, temperature=0.7, seed=6, repetition_penalty=1.2, top_k=20, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.0, regex="[a-f]{30}", ignore_eos=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"speculative_algorithm": "ngram", "speculative_adaptive": False}], ids=["plain", "ngram"])
@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.soak)])
def test_sampling_equals_the_merged_checkpoint(family: str, settings: dict[str, Any], made: Any, tmp_path: Path) -> None:
    folder, _, references, scratch = made(family)
    name, asked = ADAPTERS[family][0], [(prompt, params) for prompt in prompts()[1:3] for params in SAMPLED]
    references[name].merged().save_pretrained(tmp_path / "merged")
    for file in folder.glob("token*"):
        (tmp_path / "merged" / file.name).write_bytes(file.read_bytes())
    params = [params for _, params in asked]
    with open_engine(tmp_path / "merged", {}, **settings) as engine:
        merged = run(engine, [(None, prompt) for prompt, _ in asked], params)
    with open_engine(folder, {}, **settings) as engine:
        base = run(engine, [(None, prompt) for prompt, _ in asked], params)
    rows: list[Row] = [row for prompt, _ in asked for row in ((name, prompt), (None, prompt), (ADAPTERS[family][1], prompt))]
    with open_engine(folder, {each: scratch / each for each in references}, **settings) as engine:
        mixed = run(engine, rows, [each for each in params for _ in range(3)])

    def tokens(outputs: list[Any]) -> list[Any]:
        return [[part.token_ids for part in output.outputs] or output.token_ids for output in outputs]

    assert tokens(mixed)[::3] == tokens(merged)
    assert tokens(mixed)[1::3] == tokens(base)
    assert tokens(base) != tokens(merged)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["llama", *(pytest.param(name, marks=pytest.mark.soak) for name in ROUND_SIZES if name != "llama")])
def test_quantized_bases(family: str, bits: int, tmp_path: Path) -> None:
    folder = make_rounded(family, bits, tmp_path / "base")
    model = load_reference(folder)
    names = [*ADAPTERS[family], "q_b_proj-r1" if family == "deepseek_v3" else "q_proj-r1"]
    references = {name: make_adapter(model, Case(family, *name.split("-")), tmp_path / name) for name in names}
    rows, of = make_rows(names), {None: Reference(Case(family, "", "base"), model), **references}
    with open_engine(folder, {name: tmp_path / name for name in names}, quantization=f"int{bits}") as engine:
        scored = run(engine, rows, greedy(1, prompt_logprobs=20))
        written = run(engine, rows, greedy(32, logprobs=20))
    for (name, prompt), first, second in zip(rows, scored, written, strict=True):
        check_prompt(first, prompt, of[name].logits(prompt))
        check_tokens(second, prompt, of[name])
