"""The kernels `amx`, `avx512` and `avx2` and the attention backends `avx512` and `avx2`: their
suites, products of every way in which the kernels multiply, and the operations between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import frame_x86
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from frame_x86 import library
from frame_x86.attention import Avx2Attention, Avx512Attention
from frame_x86.kernel import AmxKernel, Avx2Kernel, Avx512Kernel, X86Kernel, X86Product
from frame_x86.operations import X86Operations

from frame.core.errors import ConfigurationError
from frame.core.interfaces.attention import AttentionRequirements, AttentionSpec
from frame.core.interfaces.gemm_kernel import GemmChoice, GemmRequirements, Speed, choose_ranges
from frame.core.interfaces.row_operations import KVCacheTarget, QKVLayout
from frame.core.interfaces.weight_format import QuantType, WeightScheme
from frame.entrypoints.tools.bench.paged_batches import PlainKVCache, Rows, build_context, forward_batch, lay_out
from frame.models.layers.embedding import Head, VocabEmbedding
from frame.models.layers.norm import RMSNorm
from frame.plugins.loader import load_registry
from frame.testing import conformance
from frame.testing.gemm_kernels import make_gemm_kernels
from frame.testing.weights.canonical_weights import make_weight

FOLDER = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(frame_x86.find_level("avx2") is None or not shutil.which("c++"), reason="needs AVX2 and a C++ compiler")


def mark(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(frame_x86.find_level(name) is None, reason=f"needs a CPU with {frame_x86.NEEDS[name]}")


KERNELS = [pytest.param(each, marks=mark(each.name), id=each.name) for each in (AmxKernel, Avx512Kernel, Avx2Kernel)]
PANEL_KERNELS = KERNELS[1:]
SCHEMES = (
    WeightScheme("plain"),
    WeightScheme("int8"),
    WeightScheme("int4", (1, 64), zeros=True),
    WeightScheme("int4", (1, 192)),
    WeightScheme("int4", (1, 32)),
)


def build_libraries(folder: Path, levels: Iterable[str]) -> Path:
    """The folder of the libraries, built as an installation builds them."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder), "--build-temp", str(folder / "temp")]
    subprocess.run(command, cwd=FOLDER, check=True, capture_output=True, env={**os.environ, "FRAME_X86_LEVELS": ",".join(levels)})
    return folder / "frame_x86"


@pytest.fixture(scope="module")
def built_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those that this CPU runs."""
    levels = {level for name in frame_x86.NEEDS if (level := frame_x86.find_level(name))}
    return build_libraries(tmp_path_factory.mktemp("x86"), sorted(levels))


@pytest.mark.soak
def test_every_level_compiles(tmp_path: Path) -> None:
    assert len(list(build_libraries(tmp_path, frame_x86.LEVELS).iterdir())) == len(frame_x86.LEVELS)


@pytest.fixture(autouse=True)
def found_library(built_libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_library", lambda level: next(built_libraries.glob(f"_{level}.*")))


def make_kernel(kernel: type[X86Kernel] = Avx2Kernel) -> X86Kernel:
    return kernel(build_context("cpu", torch.bfloat16, 16))


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert float((got.double() - wanted).abs().max() / wanted.abs().max()) < 8e-3  # two roundings to bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "plugin", "minimum"),
    [
        *(pytest.param("gemm_kernel", each.name, each, 12, marks=mark(each.name)) for each in (AmxKernel, Avx512Kernel, Avx2Kernel)),
        pytest.param("attention_backend", "avx512", Avx512Attention, 8, marks=mark("avx512")),
        ("attention_backend", "avx2", Avx2Attention, 8),
    ],
)
def test_conformance(kind: str, name: str, plugin: type, minimum: int) -> None:
    registry = load_registry(installed=False)
    part = registry.kind(kind, "frame_x86")
    {"gemm_kernel": frame_x86.register_gemm_kernels, "attention_backend": frame_x86.register_attention_backends}[kind](part)
    registry.commit(part)
    subject = conformance.Subject(registry.get(kind, name), plugin, None, conformance.Setting())
    done = 0
    for check in conformance.checks(kind, subject):
        try:
            check.run()
            done += 1
        except conformance.SkipCheck:
            continue
    assert done >= minimum


@pytest.mark.pairwise
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("outputs", [96, 256])
def test_products(scheme: WeightScheme, threads: int, kernel: type[X86Kernel], outputs: int) -> None:
    """Rows up to and beyond tiles and each way's limit; rows apart in memory; panels that are read
    two and eight at once."""
    weight = make_weight(scheme, outputs, 576, dtype=torch.bfloat16)
    gemm, expected = make_kernel(kernel).prepare(weight), weight.dequantize(torch.float32).double().t()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 1000 if outputs == 96 else 129):
            x = torch.randn(rows, 580, generator=torch.Generator().manual_seed(rows)).bfloat16()[:, 2:578]
            wanted = x.double() @ expected
            close(gemm(x), wanted)
            gated = gemm.multiply_gated(x)
            if gated is not None:
                gate, up = wanted.chunk(2, -1)
                close(gated, F.silu(gate) * up)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "scheme",
    [*SCHEMES[:2], *(WeightScheme("int4", (1, group), zeros=zeros) for group in (64, 192, 384) for zeros in (False, True))],
    ids=str,
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_one_row(scheme: WeightScheme, kernel: type[X86Kernel]) -> None:
    """Of int4, 128 inputs whose two halves have one group or two."""
    weight = make_weight(scheme, 128, 384, dtype=torch.bfloat16)
    gemm, x = make_kernel(kernel).prepare(weight), (torch.randn(1, 384) + 1).bfloat16()
    wanted = x.double() @ weight.dequantize(torch.float32).double().t()
    close(gemm(x), wanted)
    gate, up = wanted.chunk(2, -1)
    gated = gemm.multiply_gated(x)
    assert gated is not None
    close(gated, F.silu(gate) * up)
    x[0, 5] = torch.nan
    assert gemm(x).isnan().all()


@pytest.mark.parametrize("scheme", SCHEMES[:3], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_stays_in_its_row(scheme: WeightScheme, kernel: type[X86Kernel]) -> None:
    gemm = make_kernel(kernel).prepare(make_weight(scheme, 64, 128, dtype=torch.bfloat16))
    for rows in (4, 20):
        x = torch.randn(rows, 128).bfloat16()
        x[1, 5], x[2, 7] = torch.nan, torch.inf
        finite = torch.isfinite(gemm(x)).all(1).tolist()
        assert finite == [row not in (1, 2) for row in range(rows)]


@pytest.mark.parametrize(
    ("scheme", "outputs", "said"),
    [
        (WeightScheme("plain"), 48, "multiples of 32 outputs"),
        (WeightScheme("int8", (1, 32)), 64, "one scale per output"),
        (WeightScheme("int4", (1, 16)), 64, "a multiple of 32 inputs"),
        (WeightScheme("int4", (1, 32), ordered=True), 64, "no order"),
    ],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_obstacles(scheme: WeightScheme, outputs: int, said: str, kernel: type[X86Kernel]) -> None:
    assert said in str(make_kernel(kernel).find_obstacle(make_weight(scheme, outputs, 64, dtype=torch.bfloat16)))


@pytest.mark.parametrize("kernel", PANEL_KERNELS)
def test_largest_sums(kernel: type[X86Kernel]) -> None:
    """Sums of as many inputs as the kernel takes fit an int32."""
    for scheme, inputs in ((WeightScheme("int8"), 1 << 17), (WeightScheme("int4", (1, 1 << 13), zeros=True), 1 << 14)):
        weight = make_weight(scheme, 32, inputs, dtype=torch.bfloat16)
        weight.quantized.fill_(-128 if scheme.quant_type == "int8" else 255)
        if weight.zeros is not None:
            weight.zeros.zero_()
        for sign in (1, -1):
            x = torch.full((1, inputs), float(sign)).bfloat16()
            close(make_kernel(kernel).prepare(weight)(x), x.double() @ weight.dequantize(torch.float32).double().t())


@pytest.mark.parametrize("kernel", PANEL_KERNELS)
def test_what_panels_leave_to_others(kernel: type[X86Kernel]) -> None:
    weight = make_weight(WeightScheme("int4", (1, 1 << 14)), 64, 1 << 14, dtype=torch.bfloat16)
    assert "groups of up to 8192 inputs" in str(make_kernel(kernel).find_obstacle(weight))
    weight = replace(make_weight(WeightScheme("int8"), 64, 64, dtype=torch.bfloat16), quantizes_inputs=True)
    assert "quantized inputs" in str(make_kernel(kernel).find_obstacle(weight))


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_tied_head_shares_the_weight(kernel_class: type[X86Kernel]) -> None:
    kernel = make_kernel(kernel_class)
    choice = GemmChoice("x86", kernel, (Speed("plain", 0, 1.0),))
    context = replace(build_context("cpu", torch.bfloat16, 16), gemm_kernels=(choice,))
    embedding = VocabEmbedding(context, "embed", 64, 32)
    head = Head(context, "head", 64, 32, tied=embedding)
    embedding.weight.data.copy_(torch.randn(64, 32))
    head.process_weights_after_loading()
    assert isinstance(head.gemm, X86Product)
    assert head.gemm.quantized.data_ptr() == embedding.weight.data_ptr()
    x = torch.randn(3, 32).bfloat16()
    close(head(x), x.double() @ embedding.weight.double().t())


@pytest.fixture(params=PANEL_KERNELS)
def operations(request: pytest.FixtureRequest) -> X86Operations:
    found = make_kernel(request.param).row_operations
    assert isinstance(found, X86Operations)
    return found


@pytest.mark.parametrize("rows", [1, 70])
def test_norm_adds_the_residual(operations: X86Operations, rows: int) -> None:
    """Rows apart in memory; the sum is written over the residual."""
    x, residual = torch.randn(rows, 560).bfloat16()[:, :544], torch.randn(rows, 544).bfloat16()
    weight, total = torch.rand(544) + 0.5, (x + residual)
    out, stream = operations.add_rms_norm(x, residual, weight, 1e-6)
    assert stream is residual
    assert torch.equal(residual, total)
    close(out, F.rms_norm(total.double(), (544,), weight.double(), 1e-6))
    out, stream = operations.add_rms_norm(x, None, weight, 1e-6)
    assert stream is x
    close(out, F.rms_norm(x.double(), (544,), weight.double(), 1e-6))


@pytest.mark.parametrize(("heads", "is_normed"), [(QKVLayout(6, 2, 64, 64), True), (QKVLayout(3, 1, 96, 32), False)])
def test_rotation_and_store(operations: X86Operations, heads: QKVLayout, is_normed: bool) -> None:
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.dim
    rows = torch.randn(5, width + 8).bfloat16()[:, :width]
    angles = torch.randn(20, heads.rotated // 2)
    cos, sin = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
    table, positions = torch.stack((cos, sin), 1).unsqueeze(2).bfloat16(), torch.tensor([3, 0, 19, 7, 7])
    weights = torch.rand(2, heads.dim) + 0.5
    parts = rows.double().unflatten(1, (-1, heads.dim)).split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), 1)
    wanted = []
    for part, weight in zip(parts[:2], weights.double(), strict=True):
        part = F.rms_norm(part, (heads.dim,), weight, 1e-6) if is_normed else part
        cos, sin = table.double()[positions].unbind(1)
        head, tail = part[..., : heads.rotated], part[..., heads.rotated :]
        wanted.append(torch.cat((head * cos + head.roll(heads.rotated // 2, -1) * sin, tail), -1))
    caches = [torch.full((3, 4, heads.num_kv_heads, heads.dim), torch.nan).bfloat16() for _ in range(2)]
    slots = torch.tensor([4, 11, 0, 6, 5])
    q = operations.norm_rope_store(rows, positions, table, heads, (weights, 1e-6) if is_normed else None, KVCacheTarget(slots, *caches))
    close(q, wanted[0])
    close(caches[0].flatten(0, 1)[slots], wanted[1])
    assert torch.equal(caches[1].flatten(0, 1)[slots].double(), parts[2])
    assert int(caches[0].isnan().sum()) == 7 * heads.num_kv_heads * heads.dim
    stored = rows.unflatten(1, (-1, heads.dim))[:, heads.num_heads : -heads.num_kv_heads]
    assert torch.equal(stored, caches[0].flatten(0, 1)[slots])


def test_model_uses_the_operations() -> None:
    """Layers built with the kernel give what PyTorch's operations give."""
    context = build_context("cpu", torch.bfloat16, 16)
    fast = replace(context, gemm_kernels=(GemmChoice("x86", make_kernel(), (Speed("plain", 0, 1.0),)),))
    norms = [RMSNorm(each, "norm", 64, 1e-6, offset) for each in (context, fast) for offset in (0.0, 1.0)]
    for norm in norms:
        norm.weight.data.copy_(torch.linspace(0.5, 1.5, 64))
        norm.process_weights_after_loading()
    assert [norm.kernel is None for norm in norms] == [True, True, False, False]
    x = torch.randn(3, 64).bfloat16()
    for plain, quick in zip(norms[:2], norms[2:], strict=True):
        close(quick(x), plain(x).double())
        parts = torch.randn(3, 2, 64).bfloat16()
        for got, wanted in zip(quick.add_residual(parts, x.clone()), plain.add_residual(parts, x.clone()), strict=True):
            close(got, wanted.double())


@pytest.mark.parametrize("kernel_class", KERNELS)
def test_recorded_calls(kernel_class: type[X86Kernel]) -> None:
    """A product, norms, the rotation and attention, made again with other numbers in the same
    tensors."""
    heads, rows, kernel = QKVLayout(2, 1, 64, 64), Rows.of([5]), make_kernel(kernel_class)
    found, pages = kernel.row_operations, lay_out(rows, 4, np.random.default_rng(0))
    gemm = kernel.prepare(make_weight(WeightScheme("int8"), 256, 128, dtype=torch.bfloat16))
    assert isinstance(found, X86Operations)
    caches = [torch.randn(pages.num_pages, 4, 1, 64).bfloat16() for _ in range(2)]
    batch = forward_batch(rows, pages, PlainKVCache(4, caches), "cpu")
    backend = Avx2Attention if kernel_class is Avx2Kernel else Avx512Attention
    attention, spec = backend(kernel.context), AttentionSpec(0, 2, 1, 64, 64, 0.1)
    x, residual = torch.empty(2, 1, 128).bfloat16()
    weight, table = torch.rand(128), torch.randn(9, 2, 1, 64).bfloat16()

    def compute() -> tuple[torch.Tensor, ...]:
        normed, _ = found.add_rms_norm(x, residual, weight, 1e-6)
        qkv = gemm(normed)
        q = found.norm_rope_store(qkv, batch.positions, table, heads, None, KVCacheTarget(batch.kv_slots, *caches))
        k, v = qkv[:, 128:].unflatten(1, (2, 1, 64)).unbind(1)
        return normed, qkv, q, attention.run(spec, q, k, v, batch)

    def fill(seed: int) -> None:
        for index, tensor in enumerate((x, residual, *caches)):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed + index)))
        batch.positions.fill_(seed)

    fill(1)
    found.begin_recording()
    kept = compute()
    replay = found.end_recording()
    fill(5)
    wanted = [each.clone() for each in (*compute(), *caches)]
    assert not torch.equal(kept[3], wanted[3])
    fill(5)
    replay()
    for got, each in zip((*kept, *caches), wanted, strict=True):
        assert torch.equal(got, each)


def test_other_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The records say what they need; `auto` then chooses other plugins."""
    needed = AttentionRequirements("cpu", None, "mha", 64, 64, None, "bfloat16", "bfloat16", 16, phases=("decode",))
    required = GemmRequirements("cpu", None, "bfloat16")
    flags = {flag for level in frame_x86.LEVELS.values() for flag in level}
    monkeypatch.setattr(frame_x86, "read_cpu_flags", lambda: flags)

    def list_reasons() -> dict[str, list[str]]:
        reasons = {each.name: each.unsupported(required) for each in (frame_x86.AMX, frame_x86.AVX512, frame_x86.AVX2)}
        for each in (frame_x86.ATTENTION, frame_x86.AVX2_ATTENTION):
            assert each.unsupported(needed) == reasons[each.name]
        return {name: [reason.sentence for reason in each] for name, each in reasons.items()}

    tiles = ["needs a CPU with AMX tiles of bfloat16"]
    assert list_reasons() == {"amx": tiles, "avx512": [], "avx2": []}
    assert frame_x86.find_level("avx512") == "avx512_bf16"
    assert "no AMX tiles" in str(make_kernel(AmxKernel).find_obstacle(make_weight(WeightScheme("int8"), 64, 64, dtype=torch.bfloat16)))
    flags.remove("avx512_bf16")
    assert frame_x86.find_level("avx512") == "avx512"
    assert list_reasons()["avx512"] == []
    flags.remove("avx512_vnni")
    assert list_reasons() == {"amx": tiles, "avx512": ["needs a CPU with AVX-512 and its VNNI"], "avx2": []}
    assert "no AVX-512" in str(make_kernel(Avx512Kernel).find_obstacle(make_weight(WeightScheme("int8"), 64, 64, dtype=torch.bfloat16)))
    flags.remove("fma")
    assert list_reasons()["avx2"] == ["needs a CPU with AVX2 and FMA"]


def test_levels_that_were_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next lower level is used, so that `auto` chooses no plugin without a library."""
    monkeypatch.setattr(frame_x86, "read_cpu_flags", lambda: {flag for level in frame_x86.LEVELS.values() for flag in level})
    required = GemmRequirements("cpu", None, "bfloat16")
    monkeypatch.setattr(frame_x86, "list_built", lambda: frozenset(("avx512", "avx2")))
    assert frame_x86.find_level("avx512") == "avx512"
    monkeypatch.setattr(frame_x86, "list_built", lambda: frozenset(("avx2",)))
    assert (frame_x86.find_level("avx512"), frame_x86.find_level("avx2")) == (None, "avx2")
    assert [reason.sentence for reason in frame_x86.AVX512.unsupported(required)] == [
        "was left out when frame-x86 was compiled (FRAME_X86_LEVELS)"
    ]
    assert frame_x86.AVX2.unsupported(required) == []


@pytest.mark.parametrize("quant_type", ["plain", "int8", "int4"])
def test_auto_takes_one_kernel_without_tiles(quant_type: QuantType) -> None:
    """A second one for other numbers of rows would keep the weights twice."""
    kernel = make_kernel()
    speeds = tuple(replace(speed, automatic=True) for speed in frame_x86.AVX512.speeds)
    choices = [GemmChoice("avx512", kernel, speeds), *make_gemm_kernels(kernel.context)]
    assert [(rows, choice.name) for rows, choice in choose_ranges(choices, quant_type)] == [(0, "avx512")]


def test_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_library", lambda level: None)
    with pytest.raises(ConfigurationError, match="no compiled library"):
        make_kernel()
