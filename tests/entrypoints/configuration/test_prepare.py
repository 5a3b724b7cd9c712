"""`prepare` refuses what a start of the server would, so that `frame config check` does."""

from __future__ import annotations

from typing import Any

import pytest

from frame.config.schema import FrameConfig, ServerSection
from frame.core.errors import ConfigurationError
from frame.entrypoints.configuration import prepare as module
from frame.entrypoints.configuration.prepare import prepare


@pytest.mark.parametrize(
    ("server", "sentence"),
    [
        ({"ssl_certfile": "/none"}, "cannot serve TLS with server.ssl_certfile /none"),
        ({"port": 7, "admin_port": 7}, "server.admin_port is 7, as is server.port; choose another port"),
        ({"admin_port": 8, "grpc_port": 8}, "server.grpc_port is 8, as is server.admin_port; choose another port"),
        ({"grpc_port": 9}, "server.grpc_port needs grpcio"),
    ],
)
def test_a_server_that_cannot_start_is_refused(server: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if server == {"grpc_port": 9}:
        monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=sentence):
        prepare(FrameConfig(server=ServerSection(**server)), is_served=True)


@pytest.mark.parametrize(
    ("section", "values", "sentence"),
    [
        ("batches", {"concurrency": 3}, "batches.concurrency is set without batches.folder; give both, or neither"),
        ("server", {"admin_host": "::1"}, "server.admin_host is set without server.admin_port; give both, or neither"),
    ],
)
def test_settings_of_a_feature_that_is_off_are_refused(section: str, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        prepare(FrameConfig.model_validate({section: values}), is_served=True)
