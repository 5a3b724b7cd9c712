"""`pull`: downloads the files of a repository that frame reads. `fetch_models`: those that settings
name.

Used by `frame pull`, and by commands that start an engine where `model.download` is set; nothing
else downloads. Must not know engines or commands.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from frame.checkpoint.hub_cache import HubName, find_name, is_commit, read_commit
from frame.config.schema import FrameConfig
from frame.core.errors import ConfigError
from frame.entrypoints.hub.download import Download, run_all
from frame.entrypoints.hub.errors import DownloadError, describe_full, explaining, get_endpoint
from frame.host.progress import show_progress

_WEIGHTS, _GGUF = "*.safetensors", "*.gguf"
_TEXTS = ("*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
_CODE = ("*.py",)  # which model.trust_remote_code runs
_DUPLICATES = ("consolidated*",)  # the same weights in the format of Mistral
_MODULE = re.compile(r"\d+_\w+/config\.json")  # of sentence-transformers
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileSelection:
    """What to download. `weights`: false for a tokenizer alone. `code`: Python files too. `gguf`: a
    part of the name of a GGUF file, which is downloaded in place of safetensors files."""

    weights: bool = True
    code: bool = False
    gguf: str | None = None


@dataclass(frozen=True, slots=True)
class Pulled:
    """A complete snapshot. `size`: of its files that frame reads, in bytes."""

    name: HubName
    commit: str
    folder: Path
    num_files: int
    size: int


def fetch_models(config: FrameConfig) -> None:
    """Download what the settings name on a hub and the cache lacks, if `model.download` is set.
    Raises ConfigurationError, DownloadError."""
    if not config.model.download:
        return
    code = config.model.trust_remote_code
    named = {
        config.model.tokenizer: FileSelection(weights=False, code=code),
        config.speculative.draft_model_path: FileSelection(code=code),
        config.model.path: FileSelection(code=code),
    }
    for path, selection in named.items():
        name = None if path is None else find_name(path)
        if name is None:
            continue
        commit = read_commit(name)
        if commit is None or not _has_files(name.folder / "snapshots" / commit, selection):
            commit = pull(name, selection).commit
        _log.info("%s is commit %s", name, commit)


def _has_files(snapshot: Path, selection: FileSelection) -> bool:
    """Whether a snapshot has what is needed: other programs, and starts with other settings, may
    have fetched less."""
    if selection.weights and not any(snapshot.glob(_WEIGHTS)) and not any(snapshot.glob(_GGUF)):
        return False
    try:
        index, config = (_read_object(snapshot / name) for name in ("model.safetensors.index.json", "config.json"))
        files = set(index.get("weight_map", {}).values()) if selection.weights else set()
    except (OSError, ValueError, AttributeError, TypeError):
        return False
    has_code = not (selection.code and "auto_map" in config) or any(snapshot.glob(_CODE[0]))
    return has_code and all((snapshot / str(file)).exists() for file in files)


def _read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file. Raises OSError, ValueError."""
    value = json.loads(file.read_bytes()) if file.exists() else {}
    return value if isinstance(value, dict) else {}


def pull(name: HubName, selection: FileSelection = FileSelection()) -> Pulled:
    """Download a repository's files, or what is missing of them, and show the progress. Raises
    ConfigError for a name, a revision or a repository that cannot be had, DownloadError for a
    failure."""
    with explaining(name):
        from huggingface_hub import HfApi

        info = HfApi().model_info(name.repository, revision=name.revision, files_metadata=True)
        if info.sha is None or not is_commit(info.sha) or (is_commit(name.revision) and info.sha != name.revision):
            raise DownloadError(f"{get_endpoint()} names {info.sha!r} as the commit of {name}, which cannot be right; check HF_ENDPOINT.")
        sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
        files = select_files(sizes, selection)
        if not files:
            raise ConfigError(_describe_unreadable(name, list(sizes)))
        snapshot = name.folder / "snapshots" / info.sha
        missing = [file for file in files if not (snapshot / file).exists()]
        _check_disk(name, sum(sizes[file] for file in missing))
        with show_progress(f"downloading {name}", sum(sizes[file] for file in missing), "bytes") as advance:
            download = Download(name, info.sha, advance)
            run_all([partial(download.fetch, file) for file in missing], download.stop)
        _write_ref(name, info.sha)
    return Pulled(name, info.sha, snapshot, len(files), sum(sizes[file] for file in files))


def select_files(names: Iterable[str], selection: FileSelection) -> list[str]:
    """The files that frame reads; none if the selected weights are not among them."""
    names = list(names)
    top = [name for name in names if "/" not in name and not _matches(name, _DUPLICATES)]
    weights = []
    if selection.gguf is not None:
        weights = [name for name in top if _matches(name, [_GGUF]) and selection.gguf.lower() in name.lower()]
    elif selection.weights:
        weights = [name for name in top if _matches(name, [_WEIGHTS])]
    if selection.weights and (not weights or (selection.gguf is not None and len(weights) > 1)):
        return []
    others = [name for name in top if _matches(name, (*_TEXTS, *(_CODE if selection.code else ())))]
    return [*others, *(name for name in names if _MODULE.fullmatch(name)), *weights]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _describe_unreadable(name: HubName, names: Sequence[str]) -> str:
    files = [each for each in names if _matches(each, [_GGUF])]
    if files:
        return f"{name} has the GGUF files {', '.join(files)}: choose one with `frame pull {name} --gguf PART-OF-ITS-NAME`."
    pickled = next((each for each in names if _matches(each, _PICKLED)), None)
    if pickled is not None:
        return (
            f"{name} has pickled weights alone ({pickled}), which can run code and are not downloaded: choose a repository with"
            " safetensors files."
        )
    return f"{name} has no weights that frame reads: choose a repository with safetensors files."


def _check_disk(name: HubName, size: int) -> None:
    """Raise DownloadError if so many bytes do not fit, those of partial files included."""
    folder = next(each for each in (name.folder, *name.folder.parents) if each.exists())
    partial_size = sum(file.stat().st_size for file in (name.folder / "blobs").glob("*.incomplete"))
    free = shutil.disk_usage(folder).free
    if size - partial_size > free:
        raise DownloadError(describe_full(f"{name} takes {(size - partial_size) / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free in"))


def _write_ref(name: HubName, commit: str) -> None:
    """Record the commit of a revision whose files are all there."""
    name.ref.parent.mkdir(parents=True, exist_ok=True)
    new = name.ref.with_name(f"{name.ref.name}.{os.getpid()}.new")
    new.write_text(commit, encoding="ascii")
    new.replace(name.ref)
