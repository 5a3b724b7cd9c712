"""Lower bounds of dependencies permit no version with a published vulnerability."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.architecture.source import ROOT

# package -> (first version that is not affected, vulnerability); as published up to September 2026
FIXED: dict[str, tuple[tuple[str, str], ...]] = {
    "grpcio": (("1.53.2", "CVE-2023-33953"), ("1.53.2", "CVE-2023-4785"), ("1.65.4", "CVE-2024-7246")),
    "h11": (("0.16.0", "CVE-2025-43859"),),
    "httpcore": (("1.0.9", "CVE-2025-43859"),),  # of h11, which it requires in a version that is not affected
    "httptools": (("0.5.0", "CVE-2022-32213"), ("0.5.0", "CVE-2022-32214"), ("0.5.0", "CVE-2022-32215")),
    "httpx": (("0.23.0", "CVE-2021-41945"),),
    "jinja2": (("3.1.4", "CVE-2024-34064"), ("3.1.5", "CVE-2024-56201"), ("3.1.5", "CVE-2024-56326"), ("3.1.6", "CVE-2025-27516")),
    "numpy": (("1.22.0", "CVE-2021-34141"), ("1.22.0", "CVE-2021-41496")),
    "protobuf": (("6.31.1", "CVE-2025-4565"), ("6.33.5", "CVE-2026-0994")),
    "psutil": (("5.6.6", "CVE-2019-18874"),),
    "pillow": (("10.2.0", "CVE-2023-50447"), ("10.3.0", "CVE-2024-28219"), ("11.3.0", "CVE-2025-48379")),
    "pydantic": (("2.4.0", "CVE-2024-3772"),),
    "pyyaml": (("5.4", "CVE-2020-14343"),),
    "setuptools": (("70.0.0", "CVE-2024-6345"), ("78.1.1", "CVE-2025-47273")),
    "starlette": (("0.49.1", "CVE-2025-62727"), ("1.0.1", "CVE-2026-48710"), ("1.1.0", "CVE-2026-48818"), ("1.3.1", "CVE-2026-54283")),
    "torch": (("2.6.0", "CVE-2025-32434"), ("2.8.0", "CVE-2025-2953"), ("2.8.0", "CVE-2025-3730"), ("2.10.0", "CVE-2026-24747")),
    "transformers": (
        ("4.48.0", "CVE-2024-11392"), ("4.53.0", "CVE-2025-6921"), ("5.0.0", "CVE-2026-1839"), ("5.3.0", "CVE-2026-4372"),
        ("5.5.0", "CVE-2026-5241"), ("5.10.0", "CVE-2026-9856"),
    ),
    "uvicorn": (("0.11.7", "CVE-2020-7694"), ("0.11.7", "CVE-2020-7695")),
    "xgrammar": (("0.1.18", "CVE-2025-32381"), ("0.1.21", "CVE-2025-57809"), ("0.1.32", "CVE-2026-25048")),
}  # fmt: skip
# Without a published vulnerability in the versions that the bounds permit.
NONE_KNOWN = {
    "av", "click", "fastapi", "flashinfer-python", "grpcio-health-checking", "grpcio-reflection", "huggingface-hub", "humming-kernels",
    "llguidance",
    "matplotlib", "msgspec", "nixl-cu13", "openai", "opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk", "packaging", "pluggy",
    "prometheus-client",
    "pydantic-core", "pyzmq", "rich", "safetensors", "sgl-deep-gemm", "sgl-flash-mla", "soundfile", "tokenizers", "torch-memory-saver",
    "triton", "typing-extensions", "uvloop", "websockets", "xxhash",
}  # fmt: skip
NOT_SERVING = ("test", "test-kit", "load", "docs", "dev")  # extras that servers do not use


def requirements(*left_out: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name, found in extras.items() if name not in left_out for line in found)]
    return [found for found in map(Requirement, lines) if found.name != project["name"]]


def vulnerable(requirement: Requirement) -> list[str]:
    """Vulnerabilities of versions that a requirement permits."""
    bounds = [Version(each.version) for each in requirement.specifier if each.operator in (">=", "==", "~=", ">")]
    minimum = max(bounds, default=Version("0"))
    return [name for fixed, name in FIXED.get(requirement.name.lower(), ()) if minimum < Version(fixed)]


@pytest.mark.parametrize("requirement", requirements(), ids=lambda each: each.name)
def test_no_vulnerable_version_is_permitted(requirement: Requirement) -> None:
    assert vulnerable(requirement) == [], f"{requirement}: raise the lower bound"


def test_every_dependency_is_listed() -> None:
    names = {found.name.lower() for found in requirements(*NOT_SERVING)}
    assert names - set(FIXED) - NONE_KNOWN == set()


def test_bounds_are_compared_as_versions() -> None:
    assert vulnerable(Requirement("jinja2>=3.1")) == ["CVE-2024-34064", "CVE-2024-56201", "CVE-2024-56326", "CVE-2025-27516"]
    assert vulnerable(Requirement("jinja2>=3.1.10")) == []
    assert len(vulnerable(Requirement("jinja2"))) == 4
