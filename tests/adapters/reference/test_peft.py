"""Adapters in an engine equal PEFT's: prompt logits within 1e-4, 64 greedy tokens equal, many
adapters and base rows in one batch, base rows bit-equal to an engine without adapters.

A few cases run always. All of them, for each family, are `soak` (about ten minutes on two cores):

    pytest -m soak tests/adapters/reference
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from frame.entrypoints.offline.prompts import EngineError
from frame.testing.checkpoints import load_reference
from tests.adapters.reference.cases import (
    ERRORS,
    FAMILIES,
    INVOCATION,
    MLP,
    Case,
    NotInPeft,
    Reference,
    cases,
    change_adapter,
    load_adapter,
    make_adapter,
    make_base,
    make_single_experts,
    prompts,
)
from tests.adapters.reference.serving import Row, check_prompt, check_tokens, greedy, open_engine, run

DECODERS = [family for family in FAMILIES if not family.startswith("bert")]
ENCODERS = [family for family in FAMILIES if family.startswith("bert")]
FEW = {
    "llama": ["attention-r8", "mlp-patterns", "all_linear-r64", "all_linear-dora", "all_linear-alora", "everything-rslora", "lm_head-r1"],
    "deepseek_v3": ["mla-patterns", "kv_b_proj-dora", "everything-r8", "everything-patterns", "q_b_proj-alora"],
    "qwen3_moe": ["experts-r8", "gate_up_experts-rslora", "everything-patterns", "attention-alora", "q_proj-dora"],
    "qwen3_next": ["recurrent-r8", "everything-r8", "shared_expert-dora"],
    "gemma3": ["all_linear-dora", "everything-patterns"],
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """The checkpoint of a family, and transformers' model of it."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(family: str) -> tuple[Path, Any]:
        if family not in made:
            folder = make_base(family, tmp_path_factory.mktemp(family))
            made[family] = (folder, load_reference(folder))
        return made[family]

    return get


def make_all(base: Any, chosen: Iterable[Case], scratch: Path) -> dict[str, Reference]:
    """The adapters that PEFT has, by name, each in the folder of its name."""
    made: dict[str, Reference] = {}
    for case in chosen:
        try:
            made[case.name] = make_adapter(base, case, scratch / case.name)
        except NotInPeft:
            continue
    return made


class Base:
    """The reference of rows without adapter."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.no_grad()
    def logits(self, prompt: list[int], output: Any = ()) -> torch.Tensor:
        logits: torch.Tensor = self.model(torch.tensor([[*prompt, *output]])).logits[0]
        return logits


def make_rows(names: Iterable[str]) -> list[Row]:
    """Base rows between rows of adapters, which share their prompts."""
    each, rows = prompts(), [(None, prompt) for prompt in prompts()]
    for i, name in enumerate(names):
        rows += [(name, each[i % len(each)]), (name, each[(i + 4) % len(each)])]
        rows += [(None, each[i % len(each)])] * (i % 4 == 3)
    return rows


def check_family(folder: Path, model: Any, references: dict[str, Reference], scratch: Path) -> None:
    """One engine with all of these adapters, at most eight of them in a step."""
    rows, base = make_rows(references), Base(model)
    of = {None: base, **references}
    with open_engine(folder, {name: scratch / name for name in references}) as engine:
        scored = run(engine, rows, greedy(1, prompt_logprobs=20))
        written = run(engine, rows, greedy(32, logprobs=20))
        again = run(engine, rows, greedy(32))
    problems = []
    for row, first, second, third in zip(rows, scored, written, again, strict=True):
        name, prompt = row
        try:
            check_prompt(first, prompt, of[name].logits(prompt))
            check_tokens(second, prompt, of[name])
            assert third.token_ids == second.token_ids
        except AssertionError as error:
            problems.append(f"{name}, prompt of {len(prompt)}: {str(error)[:300]}")
    assert not problems, "\n".join(problems)
    check_differences(rows, written, references)


def check_differences(rows: list[Row], outputs: list[Any], references: dict[str, Reference]) -> None:
    """At least 90 % of continuations with an adapter are not the base's."""
    plain = {tuple(prompt): output.token_ids for (name, prompt), output in zip(rows, outputs, strict=True) if name is None}
    changed = [
        output.token_ids != plain[tuple(prompt)]
        for (name, prompt), output in zip(rows, outputs, strict=True)
        if name is not None and (not references[name].is_activated or INVOCATION[0] in prompt)
    ]
    assert sum(changed) >= min(0.9 * len(changed), len(changed) - 1)  # of two, one


@pytest.mark.slow
@pytest.mark.parametrize("family", FEW)
def test_some_adapters_equal_peft(family: str, bases: Any, tmp_path: Path) -> None:
    folder, model = bases(family)
    references = make_all(model, (case for case in cases(family) if case.name in FEW[family]), tmp_path)
    assert len(references) == len(FEW[family])
    check_family(folder, model, references, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("family", DECODERS)
def test_all_adapters_equal_peft(family: str, bases: Any, tmp_path: Path) -> None:
    folder, model = bases(family)
    check_family(folder, model, make_all(model, cases(family), tmp_path), tmp_path)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_experts_one_by_one(family: str, bases: Any, tmp_path: Path) -> None:
    folder, model = bases(family)
    reference = make_single_experts(model, Case(family, "experts", "single"), tmp_path / "single")
    check_family(folder, model, {"single": reference}, tmp_path)


def test_routers_need_a_setting(bases: Any, tmp_path: Path) -> None:
    """Without it, steps with adapters launch no kernels for routers, and an adapter of them is
    refused; with it, it equals PEFT's."""
    folder, model = bases("qwen3_moe")
    references = make_all(model, (case for case in cases("qwen3_moe") if case.target == "router"), tmp_path)
    name = next(iter(references))
    with pytest.raises(EngineError, match=r"changes model\.layers\.\d\.mlp\.gate, a router of experts; start .* --lora-routers"):
        open_engine(folder, {name: tmp_path / name}, lora_routers=False)
    check_family(folder, model, {name: references[name]}, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_merged_checkpoint_gives_the_same_tokens(family: str, bases: Any, tmp_path: Path) -> None:
    folder, model = bases(family)
    reference = make_adapter(model, Case(family, "everything", "r8"), tmp_path / "adapter")
    reference.merged().save_pretrained(tmp_path / "merged")
    for file in folder.glob("token*"):
        (tmp_path / "merged" / file.name).write_bytes(file.read_bytes())
    with open_engine(folder, {"adapter": tmp_path / "adapter"}) as engine:
        adapted = run(engine, [("adapter", prompt) for prompt in prompts()], greedy(32))
    with open_engine(tmp_path / "merged", {}) as engine:
        merged = run(engine, [(None, prompt) for prompt in prompts()], greedy(32))
    assert [output.token_ids for output in adapted] == [output.token_ids for output in merged]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "deepseek_dense"])
def test_base_rows_are_bit_equal_to_an_engine_without_adapters(family: str, bases: Any, tmp_path: Path) -> None:
    """In the same batches: alone, and beside rows of adapters. Of dense models: an expert's product
    of a row depends on its other rows, and their adapters change which these are."""
    folder, model = bases(family)
    references = make_all(model, [Case(family, "everything", "r8"), Case(family, "lm_head", "r64")], tmp_path)
    mixed: list[Row] = [((None, *references)[i % 3], prompt) for i, prompt in enumerate(prompts() * 2)]
    base: list[Row] = [(None, prompt) for _, prompt in mixed]
    bits = {}
    for key, adapters, rows in (("without", (), base), ("with", references, base), ("mixed", references, mixed)):
        with open_engine(folder, {name: tmp_path / name for name in adapters}, prefix_cache="none") as engine:
            outputs = run(engine, rows, greedy(32, logprobs=20), is_paused=True)
        bits[key] = [(output.token_ids, output.logprobs.logprobs, output.logprobs.top) for output in outputs]
    assert bits["with"] == bits["without"]
    assert bits["mixed"][::3] == bits["without"][::3]
    assert bits["mixed"][1][0] != bits["without"][1][0]


def is_served(case: Case) -> bool:
    """Refused are invocations, heads over labels and their pooler, and DoRA of embeddings."""
    has_head = case.target in ("classifier", "pooler", "everything")
    return case.variant != "alora" and not has_head and not (case.variant.startswith("dora") and case.target == "word_embeddings")


@pytest.mark.slow
@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_equal_peft(family: str, bases: Any, tmp_path: Path) -> None:
    """Embeddings and classes of mixed batches."""
    folder, model = bases(family)
    references = make_all(model, (case for case in cases(family) if is_served(case)), tmp_path)
    rows = make_rows(references)
    names, inputs = [name for name, _ in rows], [prompt for _, prompt in rows]
    with open_engine(folder, {name: tmp_path / name for name in references}) as engine:
        got = (engine.embed if family == "bert" else engine.classify)(inputs, lora=names)
    for name, prompt, vector in zip(names, inputs, got, strict=True):
        model_of = model if name is None else references[name].model
        with torch.no_grad():
            output = model_of(input_ids=torch.tensor([prompt]))
        if family == "bert":
            mean = output.last_hidden_state[0].mean(0)
            np.testing.assert_allclose(vector, mean / mean.norm(), atol=1e-5, err_msg=str(name))
        else:
            np.testing.assert_allclose([*vector.values()], output.logits[0].softmax(-1), atol=1e-5, err_msg=str(name))


# the reference itself -----------------------------------------------------------------------------


def as_output(logits: torch.Tensor, prompt: list[int]) -> Any:
    """What an engine with these logits would return for a prompt."""
    logprobs = logits.log_softmax(-1)
    chosen = [None, *(float(logprobs[i - 1, prompt[i]]) for i in range(1, len(prompt)))]
    best = logprobs.topk(20)
    top = [[], *([(int(t), float(v)) for t, v in zip(ids, values)] for ids, values in zip(best.indices[:-1], best.values[:-1]))]  # noqa: B905
    return SimpleNamespace(prompt_logprobs=SimpleNamespace(logprobs=chosen, top=top))


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_of_an_implementation_shows(error: str, bases: Any, tmp_path: Path) -> None:
    target, variant = ERRORS[error].rsplit("-", 1)
    family = "qwen3_moe" if target == "experts" else "llama"
    case, (_, model) = Case(family, target, variant), bases(family)
    right = make_adapter(model, case, tmp_path / "right")
    change_adapter(tmp_path / "right", tmp_path / "wrong", error)
    wrong, same = load_adapter(model, case, tmp_path / "wrong"), load_adapter(model, case, tmp_path / "right")
    for prompt in prompts()[1:4]:
        check_prompt(as_output(same.logits(prompt), prompt), prompt, right.logits(prompt))
        with pytest.raises(AssertionError):
            check_prompt(as_output(wrong.logits(prompt), prompt), prompt, right.logits(prompt))


@pytest.mark.parametrize("name", ["all_linear-r8", "all_linear-dora", "all_linear-alora", "everything-patterns"])
def test_peft_agrees_with_itself(name: str, bases: Any, tmp_path: Path) -> None:
    """With and without its cache, and merged."""
    target, variant = name.split("-")
    reference = make_adapter(bases("llama")[1], Case("llama", target, variant), tmp_path)
    for prompt in prompts()[3:6]:
        tokens = reference.greedy(prompt, 32)
        logits = reference.logits(prompt, tokens)
        assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        if not reference.is_activated:
            torch.testing.assert_close(Base(reference.merged()).logits(prompt, tokens), logits, atol=1e-4, rtol=0)


def test_single_experts_equal_those_that_peft_loads(bases: Any, tmp_path: Path) -> None:
    model = bases("qwen3_moe")[1]
    single = make_single_experts(model, Case("qwen3_moe", "experts", "single"), tmp_path / "single")
    assert MLP[0] in str((tmp_path / "single" / "adapter_config.json").read_text())
    for prompt in prompts()[1:3]:
        loaded = load_adapter(model, single.case, tmp_path / "single")
        torch.testing.assert_close(loaded.logits(prompt), single.logits(prompt), atol=1e-4, rtol=0)
