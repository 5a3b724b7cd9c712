"""A server with tiers whose follower is killed under load: its texts are those of a server of one
rank without tiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from frame.testing.checkpoints import make_checkpoint
from tests.entrypoints.chaos.storm import Storm, restarts
from tests.entrypoints.serving import RunningServer, list_children, wait_until

FLAGS = ("--dtype", "float32", "--page-size", "4", "--chunked-prefill-size", "64", "--max-running-requests", "4")
TIERS = ("--cache-tiers", "host", "--set", "plugins.options.kv_tier/host.size_gib=0.05", "--min-load-tokens", "8")


class Texts:
    """A storm at temperature 0, and its replies by a server of one rank without tiers."""

    def __init__(self, folder: Path) -> None:
        self.folder = make_checkpoint("LlamaForCausalLM", folder)
        self.storm = Storm(12, 20)
        for body in self.storm.bodies:
            body["temperature"] = 0.0
        with RunningServer(self.folder, *FLAGS, "--max-total-tokens", "8192", fake=False) as server:
            self.expected = self.storm(server)
        assert not any(reply.error for reply in self.expected)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return Texts(tmp_path_factory.mktemp("model"))


# tp: tests/entrypoints/offline/test_engine.py kills such a rank
@pytest.mark.slow
@pytest.mark.parametrize("parallel", [pytest.param(("--tp", "2"), marks=pytest.mark.exhaustive), ("--pp", "2")], ids=["tp", "pp"])
def test_texts_are_equal_when_a_follower_is_killed(parallel: tuple[str, str], texts: Texts) -> None:
    storm, expected = texts.storm, texts.expected
    flags = (*FLAGS, *TIERS, *parallel, "--max-total-tokens", "512")
    with RunningServer(texts.folder, *flags, fake=False, forks_children=False) as server:  # each rank has its own hash seed
        assert storm(server) == expected
        follower = next(child for child in list_children(server.process.pid) if "follower" in child.cmdline())
        assert storm(server, storm.progress // 3, follower.kill) == expected
        assert restarts(server) == 1
        assert storm(server) == expected
        wait_until(lambda: (info := server.get("/server_info"))["running"] + info["waiting"] == 0)
        (tier,) = server.get("/server_info")["tiers"]
        assert tier["loaded_tokens"] > 0
        assert server.post("/check_integrity", {}).status_code == 200
        assert server.post("/flush_cache", {}).status_code == 200
        wait_until(lambda: server.get("/server_info")["used_pages"] == 0)
