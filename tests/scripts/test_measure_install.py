"""The size of what `pip install frame-serve` brings."""

from __future__ import annotations

import pytest

from scripts.measure_install import format_sizes, main, measure, read_requirements

MAX_MB = 1300  # with the CPU build of torch, which is two thirds of it


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    return measure(read_requirements())


@pytest.mark.slow
def test_the_base_installation_is_bounded(sizes: dict[str, int]) -> None:
    if any(name.startswith("nvidia") for name in sizes):
        pytest.skip("this torch brings CUDA")
    assert sum(sizes.values()) < MAX_MB * 1e6, f"make the largest of these an extra:\n{format_sizes(sizes)}"


def test_no_kernel_compiler_is_in_it(sizes: dict[str, int]) -> None:
    if any(name.startswith("nvidia") for name in sizes):
        pytest.skip("this torch requires triton")
    assert not {"triton", "xgrammar"} & set(sizes)
    assert {"torch", "llguidance", "transformers", "sympy"} <= set(sizes)  # sympy: of torch


@pytest.mark.slow
def test_extras_of_requirements_are_followed() -> None:
    assert "pytest" not in measure(["hypothesis"])
    assert {"grpcio", "xgrammar"} <= set(measure(["frame-serve[grpc]", "xgrammar"]))


def test_what_exceeds_the_limit_or_is_missing_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.measure_install.read_requirements", lambda: ["numpy"])
    assert main(["--max-mb", "10000"]) == 0
    assert main(["--max-mb", "1"]) == 1
    assert "make the largest of these an extra" in capsys.readouterr().out
    monkeypatch.setattr("scripts.measure_install.read_requirements", lambda: ["no-such-distribution"])
    assert main([]) == 1
    assert capsys.readouterr().out == "no-such-distribution is not installed; run pip install .\n"
