"""The capability record of drafters."""

from __future__ import annotations

import pytest

from frame.core.interfaces.drafter import DrafterCapabilities, DrafterRequirements


@pytest.mark.parametrize(("needs", "given", "problem"), [(True, False, "draft_model_path"), (False, True, "no draft model")])
def test_a_draft_model_is_asked_for_and_refused(needs: bool, given: bool, problem: str) -> None:
    capabilities = DrafterCapabilities(needs_draft_model=needs)
    (reason,) = capabilities.unsupported(DrafterRequirements("cpu", draft_model=given))
    assert problem in str(reason)
    assert capabilities.unsupported(DrafterRequirements("cpu", draft_model=needs)) == []
