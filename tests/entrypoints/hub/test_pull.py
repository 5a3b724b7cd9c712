"""Downloads of models from a hub on this machine."""

from __future__ import annotations

import errno
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from frame.checkpoint.hub_cache import HubName, find_snapshot
from frame.config.schema import FrameConfig
from frame.core.errors import ConfigError, ConfigurationError
from frame.entrypoints.hub import download
from frame.entrypoints.hub import pull as pulling
from frame.entrypoints.hub.errors import DownloadError
from frame.entrypoints.hub.pull import FileSelection, fetch_models, pull, select_files
from tests.entrypoints.hub.hub_server import Hub, Repository
from tests.entrypoints.serving import RunningServer, wait_until

NAME = HubName("org/tiny")
COMMIT = "a" * 40
CHUNK = 10 << 20  # bytes that huggingface_hub writes at once


@pytest.fixture
def files(checkpoint: Path) -> dict[str, bytes]:
    """A repository: the files of a checkpoint, and some that frame does not read."""
    stored = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    return {**stored, "pytorch_model.bin": b"pickle", "README.md": b"# tiny", "modeling.py": b"", "onnx/config.json": b"{}"}


@pytest.fixture
def hub(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process and its children use, and an empty cache."""
    from huggingface_hub import constants

    with Hub({"org/tiny": Repository(files, {"main": COMMIT, "v1": "b" * 40})}) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield running


def run_pull(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "frame", "pull", *arguments], capture_output=True, text=True, timeout=500, check=False)


def test_what_frame_reads_is_fetched(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    done = run_pull("org/tiny")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder == tmp_path / "cache" / "models--org--tiny" / "snapshots" / COMMIT == find_snapshot(NAME)
    kept = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert kept == {name: data for name, data in files.items() if name.endswith((".json", ".safetensors", ".jinja")) and "/" not in name}
    assert f"org/tiny is commit {COMMIT}" in done.stderr
    assert not [path for _, path, _ in hub.requests if ".bin" in path or ".py" in path]
    assert hub.tokens_of_storage == {None}


def test_a_second_pull_fetches_nothing(hub: Hub) -> None:
    first = pull(NAME)
    hub.requests.clear()
    assert pull(NAME) == first
    assert [path.split("?")[0] for _, path, _ in hub.requests] == ["/api/models/org/tiny/revision/main"]


def test_what_a_snapshot_lacks_is_fetched_at_a_start(hub: Hub, files: dict[str, bytes]) -> None:
    """The first start needs the tokenizer alone, a later one the code too."""

    def fetch(**model: object) -> set[str]:
        fetch_models(FrameConfig.model_validate({"model": {"download": True, **model}}))
        folder = find_snapshot(NAME)
        assert folder is not None
        return {file.name for file in folder.iterdir()}

    files["config.json"] = json.dumps({**json.loads(files["config.json"]), "auto_map": {"AutoModel": "modeling.Model"}}).encode()
    files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}).encode()
    files["model-2.safetensors"] = files["model.safetensors"]
    assert "model.safetensors" not in fetch(path="frame-tiny", tokenizer="org/tiny")
    assert {"model.safetensors", "model-2.safetensors"} <= fetch(path="org/tiny")
    (NAME.folder / "snapshots" / COMMIT / "model-2.safetensors").unlink()
    assert "model-2.safetensors" in fetch(path="org/tiny")
    assert "modeling.py" in fetch(path="org/tiny", trust_remote_code=True)
    hub.requests.clear()
    fetch(path="org/tiny", tokenizer="org/tiny", trust_remote_code=True)
    assert not hub.requests


@pytest.mark.slow
def test_an_interrupted_download_is_continued(hub: Hub, files: dict[str, bytes], tmp_path: Path) -> None:
    files["model.safetensors"] = random.Random(0).randbytes(CHUNK * 5 // 2)
    hub.stall_after = CHUNK * 3 // 2
    process = subprocess.Popen([sys.executable, "-m", "frame", "pull", "org/tiny"], stderr=subprocess.PIPE, text=True)
    blobs = tmp_path / "cache" / "models--org--tiny" / "blobs"
    wait_until(lambda: any(file.stat().st_size >= CHUNK for file in blobs.glob("*.incomplete")), timeout=60)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 1
    assert process.stderr is not None
    process.stderr.close()
    assert find_snapshot(NAME) is None, "an interrupted download is not served"
    kept = next(blobs.glob("*.incomplete")).stat().st_size
    hub.stall_after = None
    hub.resume.set()
    done = run_pull("org/tiny")
    assert done.returncode == 0, done.stderr
    assert hub.ranges_of("/storage/org/tiny//model.safetensors") == [None, f"bytes={kept}-"]
    assert (Path(done.stdout.strip()) / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_a_server_without_ranges_sends_all_again(hub: Hub, files: dict[str, bytes]) -> None:
    import hashlib

    files["model.safetensors"] = random.Random(1).randbytes(200_000)
    blobs = NAME.folder / "blobs"
    blobs.mkdir(parents=True)
    etag = hashlib.sha256(files["model.safetensors"]).hexdigest()
    (blobs / f"{etag}.incomplete").write_bytes(files["model.safetensors"][:1000])
    hub.ignores_ranges = True
    assert (pull(NAME).folder / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_a_damaged_file_is_deleted(hub: Hub, files: dict[str, bytes]) -> None:
    files["model.safetensors"] = random.Random(2).randbytes(200_000)
    hub.repositories["org/tiny"].damaged.add("model.safetensors")
    with pytest.raises(DownloadError, match=r"model\.safetensors of org/tiny was damaged on its way from http.* and is deleted"):
        pull(NAME)
    assert find_snapshot(NAME) is None
    hub.repositories["org/tiny"].damaged.clear()
    assert (pull(NAME).folder / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_a_very_large_file_is_left_to_the_library(hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MAX_HTTP_BYTES", 100_000)
    monkeypatch.setattr(download.Download, "_download", lambda _self, _url, _blob, _file, size: pytest.fail() if size > 100_000 else None)
    files["model.safetensors"] = random.Random(4).randbytes(200_000)
    assert (pull(NAME).folder / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_revisions(hub: Hub) -> None:
    tagged = pull(HubName("org/tiny", "v1"))
    assert (tagged.commit, tagged.folder.name) == ("b" * 40, "b" * 40)
    assert find_snapshot(HubName("org/tiny", "v1")) == tagged.folder
    assert find_snapshot(NAME) is None
    by_commit = HubName("org/tiny", COMMIT)
    assert find_snapshot(by_commit) is None
    assert pull(by_commit).folder == find_snapshot(by_commit)


def test_an_update_takes_effect_when_it_is_complete(hub: Hub, files: dict[str, bytes]) -> None:
    old = pull(NAME).folder
    hub.repositories["org/tiny"].revisions["main"] = "c" * 40
    hub.wrong_commit = COMMIT
    files["config.json"] = json.dumps({"changed": True}).encode()
    with pytest.raises(DownloadError, match="of commit a+, not of c+; check HF_ENDPOINT"):
        pull(NAME)
    assert find_snapshot(NAME) == old
    for thread in threading.enumerate():  # they hold locks of their files
        if thread.name == "download":
            thread.join(10)
    hub.wrong_commit = None
    assert pull(NAME).folder == find_snapshot(NAME) != old


def test_names_and_rights_get_one_sentence(hub: Hub) -> None:
    with pytest.raises(ConfigError, match=r"has no model org/none, or it is private: check the name, or set HF_TOKEN"):
        pull(HubName("org/none"))
    with pytest.raises(ConfigError, match="org/tiny has no revision 'v9': name a branch, a tag or a commit"):
        pull(HubName("org/tiny", "v9"))
    hub.repositories["org/tiny"].gated = True
    with pytest.raises(ConfigError, match=r"org/tiny is gated: accept its conditions at http.*/org/tiny, and set HF_TOKEN"):
        pull(NAME)


def test_failures_get_one_sentence(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.status = 418
    with pytest.raises(DownloadError, match="returned status 418 for org/tiny; try again later"):
        pull(NAME)
    hub.status = 0

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
    with pytest.raises(DownloadError, match=r"org/tiny does not fit into .*: free space there, or set HF_HUB_CACHE"):
        pull(NAME)
    monkeypatch.setattr(pulling.shutil, "disk_usage", lambda _: pulling.shutil._ntuple_diskusage(1000, 990, 10))  # type: ignore[attr-defined]
    with pytest.raises(DownloadError, match=r"takes .* GB more, and 0\.0 GB are free in .*: free space there"):
        pull(NAME)


def test_without_a_network(hub: Hub) -> None:
    hub.__exit__()
    done = run_pull("org/tiny")
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: {hub.url} cannot be reached (")
    assert done.stderr.count("\n") == 1


def test_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = run_pull("org/tiny")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "HF_HUB_OFFLINE is set, and" in done.stderr
    assert hub.requests == []


def test_pickled_weights_are_refused(hub: Hub, files: dict[str, bytes]) -> None:
    del files["model.safetensors"]
    with pytest.raises(ConfigError, match=r"org/tiny has pickled weights alone \(pytorch_model\.bin\)"):
        pull(NAME)


def test_another_process_downloads_the_same(hub: Hub, files: dict[str, bytes]) -> None:
    hub.stall_after = 0
    files["model.safetensors"] = random.Random(3).randbytes(200_000)
    process = subprocess.Popen([sys.executable, "-m", "frame", "pull", "org/tiny"], stdout=subprocess.DEVNULL)
    others = len(select_files(files, FileSelection())) - 1
    wait_until(lambda: hub.ranges_of("/storage/") and len(list((NAME.folder / "snapshots" / COMMIT).glob("*"))) == others, timeout=60)
    with pytest.raises(DownloadError, match=r"another process is downloading model\.safetensors; start again when it has ended"):
        pull(NAME)
    hub.resume.set()
    assert process.wait(60) == 0


@pytest.mark.slow
def test_a_server_downloads_when_asked(hub: Hub) -> None:
    flags = ("--max-model-len", "256", "--max-total-tokens", "2048")
    with RunningServer(Path("org/tiny"), "--download", *flags, fake=False) as server:
        assert [model["id"] for model in server.get("/v1/models")["data"]] == ["org/tiny"]
        assert server.post("/v1/completions", {"model": "org/tiny", "prompt": "a", "max_tokens": 1}).status_code == 200
    assert any(f"org/tiny is commit {COMMIT}" in line for line in server.lines)


@pytest.mark.slow
@pytest.mark.exhaustive  # test_an_engine_downloads_when_asked is refused alike, test_offline finds the snapshot
def test_a_server_downloads_nothing_that_it_was_not_asked_for(hub: Hub) -> None:
    refused = subprocess.run(
        [sys.executable, "-m", "frame", "serve", "--model", "org/tiny", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert refused.returncode == 78
    assert "run `frame pull org/tiny`, or add --download" in refused.stderr
    assert hub.requests == []
    pull(NAME)
    hub.status = 500
    with RunningServer(
        Path("org/tiny"), "--max-model-len", "256", "--max-total-tokens", "2048", fake=False, env={"HF_HUB_OFFLINE": "1"}
    ) as server:
        assert server.ready()


def test_an_engine_downloads_when_asked(hub: Hub) -> None:
    from frame import Engine

    sizes = {"max_model_len": 256, "max_total_tokens": 2048}
    with pytest.raises(ConfigurationError, match="run `frame pull org/tiny`, or add --download"):
        Engine(model="org/tiny", **sizes)
    with Engine(model="org/tiny", tokenizer="org/tiny:v1", download=True, **sizes) as engine:
        assert engine.generate("a", {"max_tokens": 2}).text is not None
    weights = [path for method, path, _ in hub.requests if method == "GET" and path.startswith("/storage/")]
    assert len(weights) == 1, "a tokenizer's repository is fetched without its weights"


@pytest.mark.parametrize(
    ("selection", "selected"),
    [
        (FileSelection(), ["config.json", "tokenizer.json", "chat_template.jinja", "1_Pooling/config.json", "model.safetensors"]),
        (FileSelection(weights=False), ["config.json", "tokenizer.json", "chat_template.jinja", "1_Pooling/config.json"]),
        (
            FileSelection(code=True),
            ["config.json", "tokenizer.json", "chat_template.jinja", "code.py", "1_Pooling/config.json", "model.safetensors"],
        ),
        (FileSelection(gguf="q4_k_m"), ["config.json", "tokenizer.json", "chat_template.jinja", "1_Pooling/config.json", "m.Q4_K_M.gguf"]),
        (FileSelection(gguf="Q"), []),
    ],
)
def test_the_files_that_frame_reads(selection: FileSelection, selected: list[str]) -> None:
    names = [
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "code.py",
        "README.md",
        "pytorch_model.bin",
        "model.pt",
        "training.ckpt",
    ]
    names += ["consolidated.safetensors", "model.safetensors", "m.Q4_K_M.gguf", "m.Q8_0.gguf", "1_Pooling/config.json", "onnx/model.onnx"]
    assert select_files([*names, "original/params.json", "original/model.safetensors"], selection) == selected


def test_mirrors_with_other_etags_are_not_checked(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    assert download._has_hash(file, "d41d8cd98f00b204e9800998ecf8427e")
    assert not download._has_hash(file, "0" * 64)
