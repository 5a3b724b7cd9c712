"""Names of models on a hub (`ORG/NAME`, `ORG/NAME:REVISION`), and their snapshots in the cache that
huggingface_hub keeps on this machine.

Used by `model_config`, and by `entrypoints.hub`, which downloads. Connects to nothing, and must not
import huggingface_hub, which takes 0.4 s.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

DEFAULT_REVISION = "main"
_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?::(\w[\w./-]*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of a hub and a revision of it: a branch, a tag or a commit."""

    repository: str  # ORG/NAME
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        return self.repository if self.revision == DEFAULT_REVISION else f"{self.repository}:{self.revision}"

    @property
    def folder(self) -> Path:
        """The repository's folder in the cache."""
        return find_cache() / f"models--{self.repository.replace('/', '--')}"

    @property
    def ref(self) -> Path:
        """The file with the commit that the revision was downloaded as. `frame pull` writes it when
        all files are there."""
        return self.folder / "refs" / self.revision


def parse_hub_name(text: str) -> HubName | None:
    """The name that `text` has the form of; None for a path."""
    match = _NAME.fullmatch(text)
    if match is None or ".." in text or "--" in match[1]:
        return None
    return HubName(match[1], match[2] or DEFAULT_REVISION)


def find_name(path: str) -> HubName | None:
    """The hub's name that a model path is; None if it is that of a file or folder."""
    name = parse_hub_name(path)
    return None if name is None or Path(path).exists() else name


def find_cache() -> Path:
    """The cache's folder, by the variables of huggingface_hub."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    folder = folder or str(Path(os.environ.get("HF_HOME") or home) / "hub")
    return Path(os.path.expandvars(folder)).expanduser().absolute()


def find_snapshot(name: HubName) -> Path | None:
    """The folder of a snapshot in the cache; None if there is none. That of a commit may be
    incomplete if another program downloads it."""
    commit = read_commit(name) or (name.revision if is_commit(name.revision) else None)
    folder = None if commit is None else name.folder / "snapshots" / commit
    return folder if folder is not None and folder.is_dir() else None


def read_commit(name: HubName) -> str | None:
    """The commit that the cache has for a revision; None if it has none."""
    try:
        text = name.ref.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return text if is_commit(text) else None


def is_commit(text: str) -> bool:
    """Whether a revision is a commit's hash."""
    return _COMMIT.fullmatch(text) is not None
