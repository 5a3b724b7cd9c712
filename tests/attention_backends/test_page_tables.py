"""Backends with page tables: library calls against float64 fakes with the real signatures, and
capabilities."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from frame.attention_backends import page_tables
from frame.attention_backends.fa3 import FlashAttention3Backend
from frame.attention_backends.flashmla import FlashMLABackend, FlashMLAKernels
from frame.attention_backends.libraries import FA3, FLASHMLA, TRTLLM_MHA, TRTLLM_MLA, WorkspaceOptions
from frame.attention_backends.page_tables import PageTableBackend
from frame.attention_backends.trtllm.mha import MHAKernels, TrtllmMHABackend
from frame.attention_backends.trtllm.mla import MLAKernels, TrtllmMLABackend
from frame.core.interfaces.attention import AttentionCapabilities, AttentionRequirements
from frame.entrypoints.tools.bench.paged_batches import Case, Rows, build_context
from frame.plugins.loader import load_registry
from frame.testing.attention import suite
from frame.testing.attention.cases import LATENT, cases
from tests.attention_backends import fake_page_tables as fake


def make(name: str, case: Case) -> PageTableBackend:
    context = build_context(case.device, case.dtype, case.page_size)
    if name == "trtllm_mha":
        kernels = MHAKernels(fake.trtllm_batch_decode_with_kv_cache, fake.trtllm_batch_context_with_kv_cache)
        return TrtllmMHABackend(context, WorkspaceOptions(), kernels)
    if name == "trtllm_mla":
        latent = MLAKernels(fake.trtllm_batch_decode_with_kv_cache_mla, fake.trtllm_ragged_attention_deepseek)
        return TrtllmMLABackend(context, WorkspaceOptions(), latent)
    if name == "fa3":
        return FlashAttention3Backend(context, attend=fake.flash_attn_with_kvcache)
    return FlashMLABackend(context, kernels=FlashMLAKernels(fake.flash_mla_with_kvcache, fake.get_mla_metadata))


def on_cpu(capabilities: AttentionCapabilities) -> AttentionCapabilities:
    """The capabilities of the calls when the fake computes them."""
    changes: dict[str, Any] = {"devices": ("cpu",), "compute_capability": None, "dtypes": ("float32",), "latents": None, "page_sizes": None}
    if hasattr(capabilities, "widths"):
        changes["widths"] = None
    return replace(capabilities, **changes)


def library_cases() -> Iterator[tuple[str, str, Case]]:
    for name, capabilities in (("trtllm_mha", TRTLLM_MHA), ("trtllm_mla", TRTLLM_MLA), ("fa3", FA3)):
        for title, case in cases("cpu", False, on_cpu(capabilities)):
            if not (case.rank and (case.window or case.soft_cap)):
                yield name, title, case
    for title, case in cases("cpu", False, on_cpu(FLASHMLA)):
        yield "flashmla", title, case


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), [(n, c) for n, _, c in library_cases()], ids=[f"{n}-{t}" for n, t, _ in library_cases()])
def test_calls_compute_attention(name: str, case: Case) -> None:
    suite.check_case(lambda found: make(name, found), case)


@pytest.mark.parametrize("keys", [1, 40, 10_000])
def test_latents_are_expanded_in_chunks(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    monkeypatch.setattr(page_tables, "EXPANDED_KEYS", keys)
    rows = Rows.of([40], [(0, 21), (34, 9), (0, 30), (0, 2)])
    suite.check_case(lambda found: make("trtllm_mla", found), Case(rows, **LATENT))


@pytest.mark.parametrize("name", ["trtllm_mha", "trtllm_mla", "fa3", "flashmla"])
def test_captured_plans_describe_the_given_batch(name: str) -> None:
    shape: dict[str, Any] = {"head_dim": 64, "v_head_dim": 64} if name == "trtllm_mha" else LATENT
    first = Case(Rows.of([5, 37, 130, 1]), **shape)
    second = replace(first, rows=Rows.of([90, 2, 31, 64]), seed=1)
    backend = make(name, first)
    limits = replace(backend.context.limits, max_running_requests=2, max_single_rows=4)  # each token of a draft is a row
    backend.context = replace(backend.context, limits=limits)
    inputs = suite.make_inputs(first)
    plan = backend.capture_plan(suite.place(backend, first, inputs).batch)
    for case in (first, second, first):
        inputs = suite.make_inputs(case)
        placed = suite.place(backend, case, inputs)
        backend.replay_plan(plan, placed.batch)
        assert plan.decodes is not None
        plan.decodes.seq_lens.copy_(placed.batch.seq_lens)  # a captured step reads the batch's own tensors
        got = placed.run(backend, inputs.spec, replace(placed.batch, plan=plan)).double()
        assert float((got - suite.reference(case, inputs)).abs().max()) < suite.TOLERANCE[case.dtype]


def test_flashmla_refuses_prompts() -> None:
    case = Case(Rows.of([5], [(0, 3)]), **LATENT)
    with pytest.raises(TypeError, match="name another backend for prompts"):
        suite.compute(make("flashmla", case), case, suite.make_inputs(case))


def requirements(**changes: Any) -> AttentionRequirements:
    return replace(AttentionRequirements("cuda", (10, 0), "mha", 128, 128, None, "bfloat16", "bfloat16", 64), **changes)


MLA: dict[str, Any] = {"kind": "mla", "head_dim": 192, "v_head_dim": 128, "latent": (512, 64)}


def test_blackwell_kernels_are_refused_on_other_gpus_with_the_reason() -> None:
    assert TRTLLM_MHA.unsupported(requirements()) == TRTLLM_MLA.unsupported(requirements(**MLA)) == []
    for capabilities, kind in ((TRTLLM_MHA, {}), (TRTLLM_MLA, MLA)):
        for card in ((9, 0), (12, 0)):
            (reason,) = capabilities.unsupported(requirements(compute_capability=card, **kind))
            assert reason.sentence == f"needs compute capability 10.0 to 10.3, this card has {card[0]}.{card[1]}"


@pytest.mark.parametrize(
    ("capabilities", "changes", "words"),
    [
        (TRTLLM_MHA, {"soft_cap": True}, "soft cap"),
        (TRTLLM_MHA, {"page_size": 128}, "page size 128"),
        (TRTLLM_MHA, {"kv_dtype": "fp8_e4m3"}, "fp8_e4m3"),
        (TRTLLM_MLA, {**MLA, "head_dim": 96}, "widths (96, 128)"),
        (TRTLLM_MLA, {**MLA, "page_size": 16}, "page size 16"),
        (FLASHMLA, {**MLA, "compute_capability": (9, 0)}, "does not compute prompts"),
        (FLASHMLA, {**MLA, "compute_capability": (9, 0), "page_size": 16}, "page size 16"),
        (FA3, {**MLA, "compute_capability": (9, 0), "sliding_window": True}, "no sliding window"),
        (FA3, {"compute_capability": (10, 0)}, "this card has 10.0"),
        (FA3, {"compute_capability": (9, 0), "head_dim": 512, "v_head_dim": 512}, "above 256"),
    ],
)
def test_reports_unsupported_requirements(capabilities: AttentionCapabilities, changes: dict[str, Any], words: str) -> None:
    assert any(words in reason.sentence for reason in capabilities.unsupported(requirements(**changes)))


@pytest.mark.skipif(find_spec("flash_attn_interface") is not None, reason="flash_attn_interface is installed")
def test_fa3_names_the_missing_module_and_its_source() -> None:
    records = {record.name: record for record in load_registry(installed=False).records("attention_backend")}
    (reason,) = records["fa3"].problems
    assert "flash_attn_interface" in reason.sentence
    assert "hopper" in reason.sentence


@pytest.mark.parametrize("name", ["trtllm_mha", "trtllm_mla", "fa3", "flashmla"])
def test_records_import_no_library(name: str) -> None:
    records = {record.name: record for record in load_registry(installed=False).records("attention_backend")}
    module, _, _ = records[name].target.partition(":")
    assert find_spec(module) is not None


SOURCES = {
    "trtllm_batch_decode_with_kv_cache": "flashinfer.decode",
    "trtllm_batch_decode_with_kv_cache_mla": "flashinfer.decode",
    "trtllm_batch_context_with_kv_cache": "flashinfer.prefill",
    "trtllm_ragged_attention_deepseek": "flashinfer.prefill",
    "flash_attn_with_kvcache": "flash_attn_interface",
    "flash_mla_with_kvcache": "flash_mla",
}


@pytest.mark.parametrize("name", SOURCES)
def test_fake_has_the_signatures_of_the_installed_library(name: str) -> None:
    module = pytest.importorskip(SOURCES[name], exc_type=ImportError)
    assert _names(getattr(fake, name)) <= _names(getattr(module, name))


def _names(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(inspect.unwrap(function)).parameters)


def test_a_row_longer_than_its_table_is_padded() -> None:
    """A cache's page table may be narrower than the multiple that the kernels require."""
    case = Case(Rows.of([3]), head_dim=64, v_head_dim=64)
    backend = make("trtllm_mha", case)
    batch = suite.place(backend, case, suite.make_inputs(case)).batch
    plan = backend.plan(batch)
    assert plan.decodes is not None
    assert plan.decodes.table.shape == (1, 8)
    assert plan.decodes.table.dtype == torch.int32
