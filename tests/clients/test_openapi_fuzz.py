"""schemathesis over the server's own OpenAPI description: whatever that allows, and what it does
not, no answer is a server error."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from tests.entrypoints.serving import RunningServer

# These stop the engine or record it; what they do is tested by itself.
LEFT_OUT = r"/(pause_generation|continue_generation|start_profile|stop_profile)"
QUIET: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True, "database": None}


SOAK = [pytest.mark.soak, pytest.mark.timeout(0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "count"), [("positive", 2), pytest.param("positive", 300, marks=SOAK), pytest.param("negative", 300, marks=SOAK)]
)
def test_no_server_error(quick_server: RunningServer, mode: str, count: int) -> None:
    import schemathesis  # seconds: only where it is used
    from schemathesis.checks import not_a_server_error

    schema = schemathesis.openapi.from_url(quick_server.url + "/openapi.json").exclude(path_regex=LEFT_OUT)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 30
    for operation in operations:

        @settings(max_examples=count, **QUIET)
        @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
        def ask(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=[not_a_server_error], timeout=60)

        with suppress(Unsatisfiable):  # nothing can be wrong where nothing is asked for
            ask()
    assert quick_server.get("/server_info")["outstanding"] == 0
    quick_server.post("/check_integrity", {}).raise_for_status()
