"""`flashinfer`: library calls against a float64 fake with the library's signatures, captured plans,
capabilities."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from frame.attention_backends.flashinfer import wrappers
from frame.attention_backends.flashinfer.backend import FlashInferBackend
from frame.attention_backends.flashinfer.library import Library, Module, choose_family, compile_modules
from frame.attention_backends.flashinfer.page_lists import list_pages
from frame.attention_backends.libraries import FLASHINFER
from frame.core.errors import ConfigurationError
from frame.core.interfaces.attention import AttentionRequirements, AttentionSpec
from frame.entrypoints.tools.bench.paged_batches import PlainKVCache, Rows, build_context, forward_batch, lay_out, planned
from frame.testing.attention import suite
from tests.attention_backends import fake_flashinfer as fake

ON_CPU = replace(FLASHINFER, devices=("cpu",), compute_capability=None, dtypes=("float32",), latents=None)


def library(compiled: list[Module] | None = None) -> Library:
    return Library(
        decode=fake.BatchDecodeWithPagedKVCacheWrapper,
        prefill=fake.BatchPrefillWithPagedKVCacheWrapper,
        ragged=fake.BatchPrefillWithRaggedKVCacheWrapper,
        latent=fake.BatchMLAPagedAttentionWrapper,
        plan_captured=fake.fast_decode_plan,
        compile=lambda modules, on_compile: None if compiled is None else compiled.extend(modules),
    )


def make(case: suite.Case, compiled: list[Module] | None = None) -> FlashInferBackend:
    return FlashInferBackend(build_context(case.device, case.dtype, case.page_size), library=library(compiled))


def cases() -> Iterator[tuple[str, suite.Case]]:
    yield from suite.cases("cpu", False, ON_CPU)
    deepseek: dict[str, Any] = {"heads": 4, "rank": 64, "rope": 64, "head_dim": 192, "v_head_dim": 128}
    for name, rows in (("fresh", Rows.of([3], [(0, 90), (0, 7)])), ("prefixed", Rows.of([40], [(30, 60), (0, 9)]))):
        yield f"mla-expanded-{name}", suite.Case(rows, **deepseek)
    yield "mla-few-new-tokens", suite.Case(Rows.of([40], [(250, 2)]), **deepseek)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for _, case in cases()], ids=[name for name, _ in cases()])
def test_calls_compute_attention(case: suite.Case) -> None:
    suite.check_case(make, case)


@pytest.mark.parametrize("rows", [Rows.of([], [(0, 90), (0, 7)]), Rows.of([40], [(30, 60), (0, 9)]), Rows.of([3], [(0, 33)])])
def test_long_extends_use_ragged_keys(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrappers, "MIN_RAGGED_QUERIES", 8)
    case = suite.Case(rows, heads=4, kv_heads=2, head_dim=64, v_head_dim=64)
    backend, inputs = make(case), suite.make_inputs(case)
    got = suite.compute(backend, case, inputs)
    assert float((got - suite.reference(case, inputs)).abs().max()) < suite.TOLERANCE[case.dtype]
    ((role, *_),) = [key for key in backend._wrappers._wrappers if key[0] != "decode"]
    assert role == "ragged"


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_captured_plans_describe_the_given_batch(kind: str) -> None:
    """The wrappers of a graph read only buffers; `replay_plan` is all that runs between two
    batches."""
    sizes: dict[str, Any] = {"rank": 32, "rope": 16, "head_dim": 40, "v_head_dim": 24} if kind == "mla" else {"window": 33}
    first = suite.Case(Rows.of([5, 37, 130, 1]), head_dim=64, v_head_dim=64) if kind == "mha" else suite.Case(Rows.of([5, 37, 130, 1]))
    first = replace(first, **sizes)
    second = replace(first, rows=Rows.of([90, 2, 31, 64]), seed=1)
    backend = make(first)
    suite.compute(backend, first, suite.make_inputs(first))  # a step without a graph, which records the layer's shape
    captured: list[Any] = []
    backend.plan = lambda batch: captured[0] if captured else captured.append(backend.capture_plan(batch)) or captured[0]  # type: ignore[method-assign]
    for case in (first, second, first):
        if captured:
            inputs = suite.make_inputs(case)
            backend.plan = lambda batch: (backend.replay_plan(captured[0], batch), captured[0])[1]  # type: ignore[method-assign]
        inputs = suite.make_inputs(case)
        got = suite.compute(backend, case, inputs)
        assert float((got - suite.reference(case, inputs)).abs().max()) < suite.TOLERANCE[case.dtype]


def test_kernels_are_compiled_for_both_phases_when_a_shape_is_first_seen() -> None:
    compiled: list[Module] = []
    case = suite.Case(Rows.of([5, 37]), heads=8, kv_heads=2, head_dim=128, v_head_dim=128)
    backend = make(case, compiled)
    for _ in range(2):
        suite.compute(backend, case, suite.make_inputs(case))
    assert [(module.kind, module.form) for module in compiled] == [("prefill", "fa2"), ("prefill", "fa3")]


def test_prepare_compiles_all_modules_before_the_first_step() -> None:
    compiled: list[Module] = []
    backend = make(suite.Case(Rows.of([5])), compiled)
    context = replace(backend.context, kv_dtype=torch.float8_e4m3fn)
    backend.context = context
    plain = AttentionSpec(layer=0, num_heads=8, num_kv_heads=2, head_dim=128, v_head_dim=128, scale=1.0)
    window = replace(plain, layer=1, sliding_window=64)
    backend.prepare([plain, replace(plain, layer=2), window])
    found = [(module.kind, module.form, module.window, module.kv_dtype) for module in compiled]
    assert found == [("prefill", "fa2", False, torch.float8_e4m3fn), ("prefill", "fa2", True, torch.float8_e4m3fn)]


def test_the_library_is_imported_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constructor does not import it: the import takes seconds and may run in the
    background."""
    loads: list[int] = []
    monkeypatch.setattr(Library, "load", lambda: loads.append(1) or library())
    backend = FlashInferBackend(build_context("cpu", torch.float32, 16))
    assert not loads
    backend.prepare([])
    backend.prepare([])
    assert loads == [1]


def test_page_lists() -> None:
    rows = Rows.of([5, 8, 1], [(3, 6)])
    pages = lay_out(rows, 4, np.random.default_rng(0))
    lists = list_pages(forward_batch(rows, pages, PlainKVCache(4, []), "cpu"), 1, 4)
    assert lists.page_starts.tolist() == [0, 2, 3, 6]
    assert lists.query_starts.tolist() == [0, 1, 2, 8]
    assert lists.last_page.tolist() == [4, 1, 1]
    assert lists.lengths.tolist() == [8, 1, 9]
    expected = [pages.table[pages.slots[row], page] for row, count in ((1, 2), (2, 1), (3, 3)) for page in range(count)]
    assert lists.pages.tolist() == expected


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_lists_pages() -> None:
    """Runs in its own process under the interpreter."""
    program = """
import numpy as np, torch
from tests.interpreter import pytest_configure
pytest_configure()
from frame.attention_backends.flashinfer.page_list_kernel import write_page_lists
rng = np.random.default_rng(0)
lengths = torch.tensor([5, 1, 4097, 64, 16, 4096] * 43, dtype=torch.int32)  # rows: more than the block of 256
rows = len(lengths)
table = torch.from_numpy(rng.integers(0, 9999, (rows + 3, 300)).astype(np.int32))
slots = torch.from_numpy(rng.permutation(rows + 3)[:rows])
counts = (lengths + 15) // 16
starts, last, pages = (torch.full((n,), -1, dtype=torch.int32) for n in (rows + 1, rows, int(counts.sum()) + 7))
write_page_lists(table, slots, lengths, starts, last, pages, 16)
assert starts.tolist() == [0, *counts.cumsum(0).tolist()]
assert last.tolist() == (lengths - (counts - 1) * 16).tolist()
assert pages[:-7].tolist() == torch.cat([table[s, :c] for s, c in zip(slots, counts)]).tolist()
assert pages[-7:].tolist() == [-1] * 7
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 100}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=Path(__file__).parents[2], check=False, **options)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("capability", "kv_dtype", "widths", "form"),
    [
        ((9, 0), torch.bfloat16, (128, 128), "fa3"),
        ((9, 0), torch.bfloat16, (192, 128), "fa3"),
        ((9, 0), torch.bfloat16, (96, 96), "fa2"),
        ((9, 0), torch.float8_e4m3fn, (128, 128), "fa2"),
        ((8, 0), torch.bfloat16, (128, 128), "fa2"),
        ((10, 0), torch.bfloat16, (128, 128), "fa2"),
    ],
)
def test_kernel_family_by_device_and_shape(capability: tuple[int, int], kv_dtype: torch.dtype, widths: tuple[int, int], form: str) -> None:
    assert choose_family(capability, torch.bfloat16, kv_dtype, *widths) == form


def requirements(**changes: Any) -> AttentionRequirements:
    base = AttentionRequirements("cuda", (9, 0), "mha", 128, 128, None, "bfloat16", "bfloat16", 16)
    return replace(base, **changes)


def test_is_unsupported_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frame.attention_backends.libraries._has_kernels", lambda: False)
    assert "nvcc" in FLASHINFER.unsupported(requirements())[0].sentence
    monkeypatch.setattr("frame.attention_backends.libraries._has_kernels", lambda: True)
    assert FLASHINFER.unsupported(requirements()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"v_head_dim": 64}, "of one width"),
        ({"head_dim": 96, "v_head_dim": 96}, "head size 96"),
        ({"other_head_dims": (512,)}, "head size 512 is not among"),
        ({"dtype": "float32", "kv_dtype": "float32"}, "not in float32"),
        ({"sinks": True}, "sinks"),
        ({"kind": "mla", "latent": (512, 64), "sliding_window": True}, "no sliding window"),
        ({"kind": "mla", "latent": (512, 64), "kv_dtype": "fp8_e4m3"}, "cache of latents"),
        ({"kind": "mla", "latent": (256, 64)}, "latent and rope"),
        ({"compute_capability": (7, 5)}, "7.5"),
    ],
)
def test_reports_unsupported_requirements(changes: dict[str, Any], words: str) -> None:
    assert any(words in reason.sentence for reason in FLASHINFER.unsupported(requirements(**changes)))


def test_a_mixed_step_is_two_calls() -> None:
    case = suite.Case(Rows.of([5, 37], [(4, 9)]), head_dim=64, v_head_dim=64)
    backend = make(case)
    pages = lay_out(case.rows, 16, np.random.default_rng(0))
    cache = PlainKVCache(16, [torch.zeros(pages.num_pages, 16, 2, 64)] * 2)
    batch = planned(backend, forward_batch(case.rows, pages, cache, "cpu"))
    spec = suite.make_inputs(case).spec
    q = torch.randn(11, 4, 64)
    assert backend.run(spec, q, q[:, :2], q[:, :2], batch).shape == (11, 4, 64)


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed")
@pytest.mark.parametrize(
    "name",
    [
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "BatchMLAPagedAttentionWrapper",
    ],
)
def test_fake_has_the_signatures_of_the_installed_library(name: str) -> None:
    import flashinfer
    import flashinfer.mla

    real = getattr(flashinfer, name, None) or getattr(flashinfer.mla, name)
    mine = getattr(fake, name)
    for method in ("__init__", "plan", "run"):
        parameters = inspect.signature(inspect.unwrap(getattr(real, method))).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        wanted = {p.name for p in inspect.signature(getattr(mine, method)).parameters.values() if p.kind is not p.VAR_KEYWORD}
        assert takes_any or wanted <= set(parameters), method


def test_a_failed_compilation_gives_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Ninja build failed.\n[1/2] nvcc -c a.cu\na.cu:1:10: fatal error: page.cuh: No such file\nninja: stopped")

    monkeypatch.setattr(
        Module, "make_spec", lambda _: SimpleNamespace(name="prefill_64", is_aot=False, is_compiled=False, build_and_load=fail)
    )
    with pytest.raises(ConfigurationError, match=r"\(a\.cu:1:10: fatal error: page\.cuh: No such file\).*--attention-backend triton"):
        compile_modules([Module("prefill", "fa2", torch.bfloat16, torch.bfloat16, 64, 64)])


def test_modules_are_built_as_the_library_builds_them_and_only_missing_ones_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The library would compile a file without a ninja log again, in the first step that uses
    it."""
    (tmp_path / "logged").mkdir()
    (tmp_path / "logged" / ".ninja_log").touch()
    built: list[str] = []

    def spec(name: str, folder: str, is_aot: bool, is_compiled: bool) -> SimpleNamespace:
        build = lambda: built.append(name)  # noqa: E731
        return SimpleNamespace(name=name, is_aot=is_aot, is_compiled=is_compiled, build_dir=tmp_path / folder, build_and_load=build)

    specs = {
        64: spec("prebuilt", "none", is_aot=True, is_compiled=True),
        128: spec("cached", "logged", is_aot=False, is_compiled=True),
        192: spec("of another build", "none", is_aot=False, is_compiled=True),
        256: spec("new", "none", is_aot=False, is_compiled=False),
    }
    monkeypatch.setattr(Module, "make_spec", lambda module: specs[module.width])
    named: list[str] = []
    compile_modules([Module("prefill", "fa2", torch.bfloat16, torch.bfloat16, width, width) for width in specs], named.append)
    assert named == ["of another build, new"]
    assert sorted(built) == ["cached", "new", "of another build", "prebuilt"]


@pytest.mark.slow
def test_a_program_that_ends_does_not_wait_for_a_compilation() -> None:
    program = """
import threading, time
from types import SimpleNamespace
from frame.attention_backends.flashinfer import library
began = threading.Event()
spec = SimpleNamespace(name="slow", is_aot=False, is_compiled=False, build_and_load=lambda: (began.set(), time.sleep(600)))
library.Module.make_spec = lambda module: spec
module = library.Module("prefill", "fa2", None, None, 64, 64)
threading.Thread(target=library.compile_modules, args=([module],), daemon=True).start()
assert began.wait(60)
"""
    subprocess.run([sys.executable, "-c", program], timeout=500, check=True)
