"""The attention suite notices what it is there for: each broken backend here breaks one law."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from frame.attention_backends.torch_native.backend import TorchNativeBackend
from frame.core.errors import PluginError
from frame.core.interfaces.attention import AttentionCapabilities, AttentionSpec
from frame.core.interfaces.batch import ForwardBatch
from frame.core.interfaces.plugin import PluginRecord
from frame.testing import conformance
from frame.testing.attention_cases import cases


class IgnoresTheWindow(TorchNativeBackend):
    def run(self, spec: AttentionSpec, *rest: Any) -> torch.Tensor:
        return super().run(replace(spec, sliding_window=None), *rest)


class IgnoresSinks(TorchNativeBackend):
    def run(self, spec: AttentionSpec, *rest: Any) -> torch.Tensor:
        return super().run(replace(spec, sinks=None), *rest)


class ReadsForeignPages(TorchNativeBackend):
    """Adds nothing of a slot that no row owns, which is NaN."""

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return super().run(spec, q, k, v, batch) + 0 * batch.kv.layer(0)[0].float().sum()


class MixesRows(TorchNativeBackend):
    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        out = super().run(spec, q, k, v, batch)
        return out + 0 * out.sum(0, keepdim=True)


class LeavesHoles(TorchNativeBackend):
    """Returns memory that it did not write."""

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        out = super().run(spec, q, k, v, batch)
        holed = torch.empty_like(out)
        holed[:-1] = out[:-1]
        return holed


class SlightlyOff(TorchNativeBackend):
    def run(self, spec: AttentionSpec, *rest: Any) -> torch.Tensor:
        return super().run(replace(spec, scale=spec.scale * 1.1), *rest)


class ForgetsTheRotatedPart(TorchNativeBackend):
    def run_mla(self, layer: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, *rest: Any) -> torch.Tensor:
        return super().run_mla(layer, q_nope, torch.zeros_like(q_rope), *rest)


class OtherType(TorchNativeBackend):
    def run(self, *arguments: Any) -> torch.Tensor:
        return super().run(*arguments).float()


class ClaimsBatchInvariance(TorchNativeBackend):
    capabilities = replace(TorchNativeBackend.capabilities, batch_invariant=True)

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return super().run(spec, q, k, v, batch) * (1 + 1e-6 * batch.num_rows)


def failures(target: type[TorchNativeBackend]) -> dict[str, str]:
    """The checks that a backend fails, with what they say."""
    record = PluginRecord("attention_backend", "broken", "tests:Broken", "attention/2", target.capabilities)
    subject = conformance.Subject(record, target, None, conformance.Setting())
    found = {}
    for check in conformance.checks("attention_backend", subject):
        try:
            check.run()
        except AssertionError as error:
            found[check.name] = str(error)
    return found


@pytest.mark.parametrize(
    ("target", "check", "sentence"),
    [
        (IgnoresTheWindow, "mha-window", "largest error"),
        (IgnoresSinks, "mha-sinks", "largest error"),
        (ReadsForeignPages, "mha-decodes", "not finite"),
        (MixesRows, "mha-mixed", "while all others are NaN: the result is not finite"),
        (LeavesHoles, "mha-mixed", "not finite"),
        (SlightlyOff, "mha-extends", "largest error"),
        (ForgetsTheRotatedPart, "mla-mixed", "largest error"),
        (OtherType, "mha-", "the result's dtype"),
        (ClaimsBatchInvariance, "mha-decodes", "other bits"),
    ],
)
def test_a_broken_backend_is_caught(target: type[TorchNativeBackend], check: str, sentence: str) -> None:
    found = failures(target)
    assert any(name.startswith(check) and sentence in text for name, text in found.items()), found


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


def test_a_backend_for_another_device_cannot_be_checked_here() -> None:
    record = PluginRecord("attention_backend", "b", "m:C", "attention/2", AttentionCapabilities(devices=("cuda",)))
    subject = conformance.Subject(record, TorchNativeBackend, None, conformance.Setting())
    with pytest.raises(PluginError, match="No conformance check"):
        conformance.checks("attention_backend", subject)
