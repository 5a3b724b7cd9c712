"""The in-tree adapter formats and the example pass the suite of their kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from frame.config.server_sections import PluginsSection
from frame.interfaces.adapter import AdapterConfig, AdapterError, LowRankDelta
from frame.plugins.loader import load_configured, load_registry
from frame.testing.adapters.files import Maker
from frame.testing.adapters.suite import suite
from frame.testing.conformance import Check, Setting, SkipCheck, Subject, find
from tests.testing.mutants import load_mutants

REGISTRY = load_registry(installed=False)
# Checks that a format skips: what it does not offer.
ROWS = {"invocation_is_read", "many_experts", "stacked_experts", "factors_of_rows"}
ONE_SCALE = {"layers_have_ranks_and_scales_of_their_own", "layers_that_are_off"}
SKIPPED = {"lora": {"factors_of_rows"}, "dora": ROWS | {"embeddings"}, "mlx": ROWS | ONE_SCALE | {"options_that_are_absent"}}
EXAMPLE = Path(__file__).parents[1] / "plugins" / "adapter_example.py"


def skips(check: Check) -> bool:
    try:
        check.run()
    except SkipCheck:
        return True
    return False


@pytest.mark.parametrize("name", [*(record.name for record in REGISTRY.records("adapter")), "mlx"])
def test_our_formats(name: str) -> None:
    registry = load_configured(PluginsSection(paths=(str(EXAMPLE),))) if name == "mlx" else REGISTRY
    checks = list(suite(find(registry, f"adapter:{name}", Setting())))
    assert {check.name for check in checks if skips(check)} == SKIPPED[name]


def test_a_writer_that_stores_nothing_is_named() -> None:
    plain = load_mutants("adapter").reference.subject()

    class Useless(plain.target):  # type: ignore[name-defined, misc]
        @staticmethod
        def write_conformance_adapter(config: AdapterConfig, deltas: dict[str, LowRankDelta]) -> None:
            raise NotImplementedError

    with pytest.raises(AssertionError, match="write_conformance_adapter stores no adapter of one layer"):
        list(suite(Subject(plain.record, Useless, None, Setting())))


def test_files_that_are_written_are_read() -> None:
    subject = find(REGISTRY, "adapter:lora", Setting())
    maker = Maker(subject)
    written = maker.make(experts=0)
    assert maker.read(written.stored, written.tensors).keys() == written.deltas.keys()
    with pytest.raises(AdapterError):
        maker.read({}, written.tensors)
