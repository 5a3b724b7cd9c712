"""Names of models on a hub, and the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from frame.checkpoint.hub_cache import HubName, find_cache, find_name, find_snapshot, parse_hub_name
from frame.checkpoint.model_config import find_model, name_model

COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name")),
        ("org/name-1.5_B:v1", HubName("org/name-1.5_B", "v1")),
        ("org/name:refs/pr/3", HubName("org/name", "refs/pr/3")),
        (f"org/name:{COMMIT}", HubName("org/name", COMMIT)),
        *(
            (text, None)
            for text in ("name", "/org/name", "./org/name", "~/name", "a/b/c", "org/../x", "org/name:../../x", "org/a--b", "org/", "")
        ),
    ],
)
def test_names(text: str, name: HubName | None) -> None:
    assert parse_hub_name(text) == name
    if name is not None and name.revision != "refs/pr/3":
        assert str(name) == text


def test_the_folder_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "/home/one")
    assert find_cache() == Path("/home/one/.cache/huggingface/hub")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert find_cache() == Path("/x/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "~/hf")
    assert find_cache() == Path("/home/one/hf/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "$HOME/cache")
    assert find_cache() == Path("/home/one/cache")
    monkeypatch.undo()
    assert find_cache() == Path(constants.HF_HUB_CACHE).absolute()  # of the library, in this environment


def test_a_snapshot_is_found_by_its_ref(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    name = HubName("org/name")
    assert find_model("org/name") == tmp_path / "org/name"
    snapshot = tmp_path / "models--org--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    assert find_snapshot(name) is None, "nothing says that it is complete"
    assert find_snapshot(HubName("org/name", COMMIT)) == snapshot
    name.ref.parent.mkdir()
    for text in ("not a commit", "../../../etc", COMMIT[:-1]):
        name.ref.write_text(text)
        assert find_snapshot(name) is None
    name.ref.write_text(f"{COMMIT}\n")
    assert find_snapshot(name) == snapshot == find_model("org/name")
    assert name_model("org/name:main") == "org/name"
    (tmp_path / "org/name").mkdir(parents=True)
    assert find_name("org/name") is None
    assert find_model("org/name") == tmp_path / "org/name"
    assert name_model("org/name") == "name"
