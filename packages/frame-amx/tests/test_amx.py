"""The kernel `amx`: the suite of GEMM kernels, and products of every way in which it multiplies."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import frame_amx
import pytest
import torch
from frame_amx import kernel as amx
from frame_amx.kernel import AmxKernel, AmxProduct

from frame.core.errors import ConfigurationError
from frame.core.interfaces.gemm_kernel import GemmChoice, Speed
from frame.core.interfaces.weight_format import WeightScheme
from frame.models.layers.embedding import Head, VocabEmbedding
from frame.plugins.loader import load_registry
from frame.testing import conformance
from frame.testing.attention_cases import build_context
from frame.testing.packed_weights import make_weight

FOLDER = Path(__file__).parents[1]
FLAGS = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
pytestmark = pytest.mark.skipif("amx_bf16" not in FLAGS or not shutil.which("c++"), reason="needs a CPU with AMX and a C++ compiler")
SCHEMES = (
    WeightScheme("plain"),
    WeightScheme("int8"),
    WeightScheme("int4", (1, 64), zeros=True),
    WeightScheme("int4", (1, 192)),
    WeightScheme("int4", (1, 32)),
)


@pytest.fixture(scope="module")
def built_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, built as an installation builds it."""
    folder = tmp_path_factory.mktemp("amx")
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(folder), "--build-temp", str(folder / "temp")]
    subprocess.run(command, cwd=FOLDER, check=True, capture_output=True)
    return next((folder / "frame_amx").glob("_products*"))


@pytest.fixture(autouse=True)
def found_library(built_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "find_library", lambda: built_library)


def make_kernel() -> AmxKernel:
    return AmxKernel(build_context("cpu", torch.bfloat16, 16))


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert float((got.double() - wanted).abs().max() / wanted.abs().max()) < 8e-3  # two roundings to bfloat16


def test_conformance() -> None:
    registry = load_registry(installed=False)
    part = registry.kind("gemm_kernel", "frame_amx")
    frame_amx.register_gemm_kernels(part)
    registry.commit(part)
    subject = conformance.Subject(registry.get("gemm_kernel", "amx"), AmxKernel, None, conformance.Setting())
    done = 0
    for check in conformance.checks("gemm_kernel", subject):
        try:
            check.run()
            done += 1
        except conformance.SkipCheck:
            continue
    assert done >= 12


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_products(scheme: WeightScheme, threads: int) -> None:
    """Rows up to and beyond tiles and each way's limit; rows apart in memory."""
    weight = make_weight(scheme, 96, 576, dtype=torch.bfloat16)
    product, expected = make_kernel().prepare(weight), weight.dequantize(torch.float32).double().t()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 1000):
            x = torch.randn(rows, 580, generator=torch.Generator().manual_seed(rows)).bfloat16()[:, 2:578]
            wanted = x.double() @ expected
            close(product(x), wanted)
            gated = product.multiply_gated(x)
            if gated is not None:
                gate, up = wanted.chunk(2, -1)
                close(gated, torch.nn.functional.silu(gate) * up)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("scheme", SCHEMES[:3], ids=str)
def test_nan_stays_in_its_row(scheme: WeightScheme) -> None:
    product = make_kernel().prepare(make_weight(scheme, 64, 128, dtype=torch.bfloat16))
    for rows in (4, 20):
        x = torch.randn(rows, 128).bfloat16()
        x[1, 5], x[2, 7] = torch.nan, torch.inf
        finite = torch.isfinite(product(x)).all(1).tolist()
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
def test_obstacles(scheme: WeightScheme, outputs: int, said: str) -> None:
    assert said in str(make_kernel().find_obstacle(make_weight(scheme, outputs, 64, dtype=torch.bfloat16)))


def test_tied_head_shares_the_weight() -> None:
    kernel = make_kernel()
    choice = GemmChoice("amx", kernel, (Speed("plain", 0, 1.0),))
    context = replace(build_context("cpu", torch.bfloat16, 16), gemm_kernels=(choice,))
    embedding = VocabEmbedding(context, "embed", 64, 32)
    head = Head(context, "head", 64, 32, tied=embedding)
    embedding.weight.data.copy_(torch.randn(64, 32))
    head.finish()
    assert isinstance(head.product, AmxProduct)
    assert head.product.codes.data_ptr() == embedding.weight.data_ptr()
    x = torch.randn(3, 32).bfloat16()
    close(head(x), x.double() @ embedding.weight.double().t())


def test_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "find_library", lambda: None)
    with pytest.raises(ConfigurationError, match="no compiled library"):
        make_kernel()
