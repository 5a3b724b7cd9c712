"""`frame plugins new`: for every kind, what is written installs, is found, passes lint and its own
tests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from frame.core.errors import ConfigurationError
from frame.entrypoints.tools.scaffold import write_plugin
from frame.interfaces.kinds import KINDS
from frame.testing.conformance import run_suite
from tests.entrypoints.fork_server import run_forked
from tests.testing.generated import write_scaffold

ROOT = Path(__file__).parents[2]

# Checks that a written plugin skips: what its template does not offer.
SKIPPED = {
    "adapter": 7,  # invocations, ranks of single layers, stacked experts, one rank and scale, one kind of deltas
    "collective": 5,  # capture in a graph; sends that return at once; sums of one order
    "gemm_kernel": 3,  # gated products, in each dtype
    "grammar_backend": 1,  # two kinds of one source
    "kv_tier": 8,  # files, restarts, blocks that were removed
    "prefix_cache": 1,  # an eviction policy
    "sampler": 2,  # top_k
    "tool_call_parser": 1,  # other forms of arguments than JSON
    "weight_transfer": 4,  # trainers that join
    "model": 2,  # transformers does not have it
    "platform": 17,  # streams, events, graphs, releases of memory, the allocators of device and host; calls that wait for it
    "weight_format": 8,  # rounded weights of a checkpoint, scales in float32, scales of another form
}

# Checks that take seconds, and that the reference of each kind passes in tests/testing.
LONG = (
    *("files_above_2_gib", "long_calls", "time_is_linear", "grows_with_keys", "mha-long-extends", "time_grows_with", "time_does_not_grow"),
    *("takes_no_longer", "take_linear_time", "masks_are_filled_in_threads", "slices_are_read_alone", "process_and_memory"),
    *("mha-decodes", "agrees_with_a_dictionary", "leave_nothing_open", "leaves_nothing", "very_large_tensors"),
)

# Of the tests of each package, those that run where every `{step}`th does.
SPARSE = """
from itertools import groupby
def pytest_collection_modifyitems(items):
    items[:] = [each for _, own in groupby(items, lambda item: item.path.parents[1]) for each in [*own][::{step}]]
"""

CONFIG = {
    "architectures": ["MyModelForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 128,
}

# The build backend of each pyproject.toml, called as pip calls it, in one process for all packages.
BUILD = """
import importlib, os, sys, tomllib
for package in sys.argv[2:]:
    os.chdir(package)
    with open("pyproject.toml", "rb") as file:
        backend = importlib.import_module(tomllib.load(file)["build-system"]["build-backend"])
    backend.build_wheel(sys.argv[1])
"""

# The configuration of each README, resolved, with the plugins of the kind that it chooses.
RESOLVE = """
import json, pathlib, re, sys, yaml
from frame.config.schema import FrameConfig
from frame.entrypoints.configuration.prepare import prepare
for kind, checkpoint, readme in zip(*[iter(sys.argv[1:])] * 3):
    text = re.search("```yaml\\n(.*?)```", pathlib.Path(readme).read_text(), re.DOTALL)[1]
    config = FrameConfig.model_validate(yaml.safe_load(text.replace("/path/to/checkpoint", checkpoint)))
    print(kind, *(choice.name for choice in prepare(config, is_served=True).resolved.plugins[kind]))
"""


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def run_with(installed: Path, *arguments: str) -> str:
    """Run Python with the packages of a folder. -> its output."""
    done = run_forked([sys.executable, *arguments], paths=[str(installed)], with_frame=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Kinds whose whole suite takes a few seconds.
QUICK = (
    *("cli_command", "drafter", "key_store", "launcher", "logits_processor"),
    *("modality", "pooler", "stat_logger", "weight_format", "weight_transfer"),
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", QUICK)
def test_what_is_written_passes_its_whole_suite(kind: str) -> None:
    """A check that is added to a suite holds for the template of its kind too."""
    outcomes = run_suite(write_scaffold(kind))
    assert outcomes
    assert [outcome for outcome in outcomes if outcome.result == "failed"] == []


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One package of each kind."""
    folder = tmp_path_factory.mktemp("scaffold")
    for kind in KINDS:
        write_plugin(kind, f"my_{kind}", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left_out", "step"),
    [(LONG, 12), pytest.param(LONG, 1, marks=pytest.mark.exhaustive), pytest.param((), 1, marks=pytest.mark.soak)],
    ids=["few", "short", "whole"],
)
def test_every_kind_installs_is_found_and_passes_its_tests(written: Path, tmp_path: Path, left_out: tuple[str, ...], step: int) -> None:
    """`few`: each package runs some of its tests; tests/testing runs all checks of each kind."""
    packages = sorted(map(str, written.iterdir()))
    wheels, installed = tmp_path / "wheels", tmp_path / "installed"
    run(sys.executable, "-c", BUILD, str(wheels), *packages)
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--target", str(installed), *map(str, wheels.glob("*.whl")))
    listed = "import json; from frame.plugins.loader import load_registry; r = load_registry(); "
    listed += "assert not r.broken, r.broken; every = [x for kind in r.all_records().values() for x in kind]; "
    listed += "print(*[x.name for x in every if x.distribution.startswith('frame-my-')])"
    found = run_with(installed, "-c", listed).split()
    assert sorted(found) == sorted(f"my_{kind}" for kind in KINDS)
    tests = [f"{package}/tests" for package in packages]
    plain = ("-p", "no:cacheprovider", "-p", "no:xdist", "-q", "--import-mode=importlib", "-c", os.devnull, "--rootdir", str(written))
    chosen = " and ".join(f"not {name}" for name in left_out)
    (written / "conftest.py").write_text(SPARSE.format(step=step))
    result = run_with(installed, "-m", "pytest", "-rs", "-k", chosen, *plain, *tests)
    (written / "conftest.py").unlink()
    assert " passed" in result
    skipped: Counter[str] = Counter()
    for number, package in re.findall(r"^SKIPPED \[(\d+)\] \S*frame-my-([a-z-]+)/tests", result, re.MULTILINE):
        skipped[package.replace("-", "_")] += int(number)
    assert skipped == SKIPPED if step == 1 else skipped <= Counter(SKIPPED), result
    suite = "--frame-conformance=logits_processor:my_logits_processor"
    assert " passed" in run_with(installed, "-m", "pytest", *plain, suite)
    (written / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "--unknown"')  # as of a clone with more plugins of pytest
    one = (str(written / "frame-my-eviction-policy"), "-p", "no:cacheprovider", "-p", "no:xdist", "-q")
    assert " passed" in run_with(installed, "-m", "pytest", *one)
    (written / "pyproject.toml").unlink()
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(CONFIG))
    kinds = [kind for kind in KINDS if KINDS[kind].key and kind != "modality"]  # the checkpoint reads text alone
    readmes = {kind: written / f"frame-my-{kind.replace('_', '-')}" / "README.md" for kind in kinds}
    arguments = [part for kind, readme in readmes.items() for part in (kind, str(checkpoint), str(readme))]
    resolved = run_with(installed, "-c", RESOLVE, *arguments).splitlines()
    assert {kind for kind, *names in map(str.split, resolved) if f"my_{kind}" in names} == set(kinds)


def test_what_is_written_is_clean(written: Path) -> None:
    ignore = "I001,S101"  # the import order depends on what is installed; tests assert
    run(sys.executable, "-m", "ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml"), "--ignore", ignore, str(written))


def test_a_package_may_have_a_name_of_its_own(tmp_path: Path) -> None:
    written = write_plugin("eviction_policy", "mine", tmp_path, "acme-frame_cache")
    assert written.distribution == "acme-frame-cache" and (written.folder / "acme_frame_cache" / "plugin.py").is_file()
    assert 'name = "acme-frame-cache"' in (written.folder / "pyproject.toml").read_text()
    assert '"acme_frame_cache.plugin:Mine"' in (written.folder / "acme_frame_cache" / "__init__.py").read_text()
    assert "frame-serve[test-kit]" in (written.folder / "pyproject.toml").read_text()
    for name in ("Acme", "../acme", "a b", "1st"):
        with pytest.raises(ConfigurationError, match="--package"):
            write_plugin("eviction_policy", "mine", tmp_path, name)


def test_an_existing_folder_stays(tmp_path: Path) -> None:
    first = write_plugin("eviction_policy", "mine", tmp_path)
    before = (first.folder / "pyproject.toml").read_text()
    with pytest.raises(ConfigurationError, match="exists"):
        write_plugin("grammar_backend", "mine", tmp_path)
    assert (first.folder / "pyproject.toml").read_text() == before


@pytest.mark.parametrize("name", ["", "Upper", "1st", "a b", "a/b", "../x", "class"])
def test_bad_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot name a plugin"):
        write_plugin("grammar_backend", name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="attention_backend"):
        write_plugin("attention", "mine", tmp_path)


def test_the_readme_says_how_to_choose_it(tmp_path: Path) -> None:
    folder = write_plugin("attention_backend", "my-fast_one", tmp_path).folder
    assert folder.name == "frame-my-fast-one"
    assert "backend: my-fast_one" in (folder / "README.md").read_text()
    assert "class MyFastOne(" in (folder / "frame_my_fast_one" / "plugin.py").read_text()
