"""The attention suite asks for what the capabilities cover, and nothing else; `test_mutants` shows
what it finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from frame.attention_backends.torch_native.backend import TorchNativeBackend
from frame.core.errors import PluginError
from frame.core.interfaces.attention import AttentionCapabilities
from frame.core.interfaces.plugin import PluginRecord
from frame.testing import conformance
from frame.testing.attention.cases import cases
from frame.testing.attention.invariance import CASES


def test_a_record_that_differs_from_its_class_is_caught() -> None:
    record = PluginRecord("attention_backend", "b", "m:C", "attention/2", AttentionCapabilities(devices=("cpu",)))
    subject = conformance.Subject(record, TorchNativeBackend, None, conformance.Setting())
    first = conformance.checks("attention_backend", subject)[0]
    with pytest.raises(AssertionError, match="the record states"):
        first.run()


def test_only_what_the_capabilities_cover_is_asked() -> None:
    narrow = AttentionCapabilities(devices=("cpu",), kinds=("mha",), head_dims=(64,), page_sizes=(16,), dtypes=("float32",))
    found = list(cases("cpu", thorough=False, capabilities=narrow))
    assert found
    assert all(case.head_dim == 64 and case.page_size == 16 and not case.rank and case.window is None for _, case in found)


@pytest.mark.parametrize("claims", [True, False])
def test_bits_are_compared_where_the_capabilities_claim_it(claims: bool) -> None:
    able = AttentionCapabilities(devices=("cpu",), kinds=("mha",), dtypes=("float32", "bfloat16"), batch_invariant=claims)
    record = PluginRecord("attention_backend", "b", "m:C", "attention/2", able)
    subject = conformance.Subject(record, TorchNativeBackend, None, conformance.Setting(thorough=True))
    found = [check.name for check in conformance.checks("attention_backend", subject) if check.name.startswith("batch_invariant-")]
    names = [name for name, case in CASES.items() if not case.rank and case.window is None]
    assert found == [f"batch_invariant-{name}-{dtype}" for name in names for dtype in able.dtypes if claims]
    short = conformance.checks("attention_backend", replace(subject, setting=conformance.Setting()))
    some = [check.name for check in short if check.name.startswith("batch_invariant-")]
    assert set(some) < set(found) if claims else not some
    assert [name.rsplit("-", 1)[0] for name in some] == [f"batch_invariant-{name}" for name in names if claims], "a case is left out"
    assert len({name.rsplit("-", 1)[1] for name in some}) == 2 * claims, "a dtype is left out"


def test_a_backend_for_another_device_cannot_be_checked_here() -> None:
    record = PluginRecord("attention_backend", "b", "m:C", "attention/2", AttentionCapabilities(devices=("cuda",)))
    subject = conformance.Subject(record, TorchNativeBackend, None, conformance.Setting())
    with pytest.raises(PluginError, match="No conformance check"):
        conformance.checks("attention_backend", subject)


def test_a_backend_of_float16_alone_has_checks_of_invariance_left_out() -> None:
    record = PluginRecord(
        "attention_backend", "b", "m:C", "attention/2", AttentionCapabilities(devices=("cpu",), dtypes=("float16",), batch_invariant=True)
    )
    checks = conformance.checks("attention_backend", conformance.Subject(record, TorchNativeBackend, None, conformance.Setting()))
    assert checks and not [check for check in checks if check.name.startswith("batch_invariant")]
