"""`flex_attention` keeps the laws in its plain form; its kernels are checked where there is a GPU."""

from __future__ import annotations

import warnings

import pytest

from frame.plugins.loader import load_registry
from frame.testing import conformance

SUBJECT = conformance.find(load_registry(installed=False), "attention:flex_attention", conformance.Setting())
CHECKS = conformance.checks("attention", SUBJECT)


SOME = ("record", "-mixed", "window-of-one", "soft-cap", "sinks-", "short-extends", "encoder-shared")


def _marks(name: str) -> list[pytest.MarkDecorator]:
    return [] if any(part in name for part in SOME) else [pytest.mark.soak]


@pytest.mark.parametrize("check", [pytest.param(check, id=check.name, marks=_marks(check.name)) for check in CHECKS])
def test_conformance(check: conformance.Check) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        check.run()
