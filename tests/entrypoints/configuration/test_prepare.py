"""`prepare` refuses what a start of the server would, so that `frame config check` does."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from frame.config.schema import FrameConfig
from frame.config.server_sections import ServerSection
from frame.core.errors import ConfigurationError
from frame.core.interfaces.build import BuildContext, Limits
from frame.core.interfaces.collective import LocalGroup
from frame.entrypoints.configuration import prepare as module
from frame.entrypoints.configuration.prepare import prepare
from frame.models.layers.rotary import Rotary, read_rope_parameters


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


LONG_ROPE = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 512, "original_max_position_embeddings": 64,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
}  # fmt: skip


@pytest.mark.parametrize("plugin", ["auto", "transformers"])
@pytest.mark.parametrize(("length", "is_warned"), [(None, True), (65, True), (64, False), (48, False)])
def test_long_factors_are_warned_of(
    length: int | None, is_warned: bool, plugin: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LONG_ROPE))
    model = {"path": str(tmp_path), "skip_tokenizer_init": True, "max_context": length, "implementation": plugin}
    with caplog.at_level(logging.WARNING):
        resolved = prepare(FrameConfig.model_validate({"model": model, "execution": {"device": "cpu"}})).resolved
    found = [record.getMessage() for record in caplog.records if "LongRoPE" in record.getMessage()]
    assert len(found) == is_warned
    assert all("--max-model-len 64 selects the short ones" in sentence for sentence in found)
    context = BuildContext(device=torch.device("cpu"), dtype=torch.float32, tp=LocalGroup(), limits=Limits(1, 8, resolved.max_context, 4))
    rotary = Rotary(context, 8, read_rope_parameters(resolved.model))
    assert rotary.scheme["exceeds_original"] is is_warned


@pytest.mark.parametrize(
    ("plugins", "sentence"),
    [
        ({"deny": ["logits_processor/penaltis"]}, "deny names 'logits_processor/penaltis', and .* mean 'logits_processor/penalties'?"),
        ({"deny": ["logits_procesor/penalties"]}, "did you mean 'logits_processor/penalties'?"),
        ({"deny": ["frame-serv"]}, "plugins.deny names 'frame-serv', and .* did you mean 'frame-serve'?"),
        ({"allow": ["frame-serv"]}, "plugins.allow names 'frame-serv', and .* did you mean 'frame-serve'?"),
        ({"allow": ["none-such"]}, "and there is no such installed package with plugins; `frame plugins list` lists them."),
    ],
)
def test_misspelt_names_of_plugins_are_refused(plugins: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence.replace("?", r"\?")):
        prepare(FrameConfig.model_validate({"plugins": plugins}))


def test_a_denied_package_need_not_be_installed(caplog: pytest.LogCaptureFixture) -> None:
    prepare(FrameConfig.model_validate({"plugins": {"deny": ["quite-another", "gemm_kernel/amx"]}}))
    assert "plugins.deny names 'quite-another', and there is no such installed package" in caplog.text and "amx" not in caplog.text
