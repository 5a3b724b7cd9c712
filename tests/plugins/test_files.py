"""Plugins without a package: files of `plugins.paths` and classes of `Engine(plugins=[…])`."""

from __future__ import annotations

import contextlib
import py_compile
from collections.abc import Sequence
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from pydantic import BaseModel

from frame import Engine
from frame.config.schema import FrameConfig
from frame.config.server_sections import PluginsSection
from frame.core.errors import PluginError
from frame.core.interfaces.sampling import LogitsProcessor
from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy
from frame.core.scheduling.request import Request
from frame.entrypoints.offline.session import select_classes
from frame.plugins.files import load_file
from frame.plugins.loader import load_configured, observers
from frame.testing import conformance
from frame.testing.contexts import SCHEDULING

CLASS = """
from pydantic import BaseModel
from frame.core.interfaces.scheduling import SchedulingPolicy, late_first

class NotMine:
    pass

class HTTPFirst(SchedulingPolicy):
    '''Newest first.

    A second paragraph.
    '''

    class Options(BaseModel):
        share: float = 0.5

    def __init__(self, context, options=None):
        self.share = options.share

    def sort_waiting(self, waiting, view):
        return waiting[::-1]
"""
MANIFEST = """
from frame import hookimpl
from frame.core.interfaces.scheduling import SchedulingPolicy

class Unnamed(SchedulingPolicy):
    def sort_waiting(self, waiting, view):
        return waiting

@hookimpl
def register_scheduling_policies(registry):
    registry.add("mine", Unnamed, summary="From a hook.", rank=3)

@hookimpl
def on_stop():
    pass
"""


class Reversed(SchedulingPolicy):
    """Newest first."""

    calls = 0

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Sequence[Request]:
        Reversed.calls += 1
        return waiting[::-1]


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def read(*paths: str) -> PluginsSection:
    return PluginsSection(paths=paths)


def test_a_class_in_a_file_is_a_plugin(tmp_path: Path) -> None:
    path = write(tmp_path / "my file.py", CLASS)
    registry = load_configured(read(path))
    record = registry.get("scheduling_policy", "http_first")
    assert (record.distribution, record.summary, len(record.version)) == (path, "Newest first.", 12)
    policy = registry.load(record)(SCHEDULING, registry.options(record, {"share": 0.25}))
    assert policy.share == 0.25
    write(tmp_path / "my file.py", CLASS.replace("0.5", "0.75"))  # read anew by the next start
    again = load_configured(read(path))
    changed = again.get("scheduling_policy", "http_first")
    assert changed.version != record.version
    assert again.options(changed, {}).share == 0.75  # type: ignore[union-attr]


def test_a_file_with_hooks_is_a_manifest(tmp_path: Path) -> None:
    registry = load_configured(read(write(tmp_path / "manifest.py", MANIFEST)))
    assert [record.name for record in registry.records("scheduling_policy") if record.distribution != "frame-serve"] == ["mine"]
    assert registry.load(registry.get("scheduling_policy", "mine")).__name__ == "Unnamed"
    assert observers(registry).on_stop is not None


def test_a_folder_and_files_of_one_name_are_apart(tmp_path: Path) -> None:
    write(tmp_path / "pack" / "helper.py", CLASS)
    folder = str(tmp_path / "pack")
    write(tmp_path / "pack" / "__init__.py", "from .helper import HTTPFirst\nclass Second(HTTPFirst):\n    name = 'second'\n")
    one, two = (write(tmp_path / place / "same.py", CLASS.replace("HTTPFirst", name)) for place, name in (("a", "One"), ("b", "Two")))
    registry = load_configured(read(folder, one, two))
    names = {record.name for record in registry.records("scheduling_policy")}
    assert {"second", "one", "two"} <= names
    assert all(registry.load(registry.get("scheduling_policy", name)) for name in ("second", "one", "two"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "is no Python file, and no folder with an __init__.py; correct the path"),
        ("import no_such_module", "raises when it is imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(3)", "raises when it is imported: SystemExit: 3"),
        ("x = 1", "has no plugin; derive a class from an interface, or write a register_… hook"),
        (
            "from frame.core.interfaces.scheduling import SchedulingPolicy as P\nclass Old(P):\n  def order(self, waiting, view): ...",
            "does not implement sort_waiting of scheduling_policy/4; rename SchedulingPolicy.order to SchedulingPolicy.sort_waiting",
        ),
        ("from frame import hookimpl\n@hookimpl\ndef register_policies(registry): ...", "unknown hook 'register_policies'"),
        (
            "from frame import hookimpl\n@hookimpl\ndef register_quantization_methods(registry): ...",
            "unknown hook 'register_quantization_methods'; replace quantization_method by weight_format/2 (hook",
        ),
    ],
)
def test_a_file_that_cannot_be_read_stops_the_start(text: str | None, sentence: str, tmp_path: Path) -> None:
    path = str(tmp_path / "bad.py") if text is None else write(tmp_path / "bad.py", text)
    with pytest.raises(PluginError) as caught:
        load_configured(read(path))
    assert sentence in str(caught.value)


def test_bytecode_beside_a_file_does_not_run(tmp_path: Path) -> None:
    """A checkpoint's folder may hold any: this one claims to fit every source."""
    file, other = tmp_path / "plugin.py", tmp_path / "other.py"
    other.write_text("ORIGIN = 'bytecode'")
    file.write_text("ORIGIN = 'source'")
    py_compile.compile(str(other), cache_from_source(str(file)), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    assert load_file(str(file))[0].ORIGIN == "source"


def test_a_misspelt_method_is_not_taken_for_one_of_an_earlier_interface(tmp_path: Path) -> None:
    base = "from frame.core.interfaces.scheduling import SchedulingPolicy"
    path = write(tmp_path / "new.py", f"{base}\nclass New(SchedulingPolicy):\n  def sort_waitin(self, waiting, view): ...")
    with pytest.raises(PluginError, match="New does not implement sort_waiting of scheduling_policy/4$"):
        load_configured(read(path))


def test_classes_are_selected_for_the_settings_that_are_not_given() -> None:
    class Adds(LogitsProcessor):
        name = "adds"

    config = select_classes(FrameConfig.model_validate({"sampling": {"processors": ["a"]}}), [Reversed, Adds])
    assert (config.scheduler.policy, config.sampling.processors) == ("reversed", ("a", "adds"))
    config = select_classes(FrameConfig.model_validate({"scheduler": {"policy": "fcfs"}}), [Reversed])
    assert config.scheduler.policy == "fcfs"
    with pytest.raises(PluginError, match="set parallel.tp: 1 and parallel.pp: 1, or write it to a file and set plugins.paths"):
        select_classes(FrameConfig.model_validate({"parallel": {"tp": 2}}), [Reversed])
    with pytest.raises(PluginError, match="is no plugin class; derive it from one of"):
        select_classes(FrameConfig(), [BaseModel])


def test_an_engine_takes_classes() -> None:
    with Engine("frame-tiny", plugins=[Reversed], dtype="float32", threads=1, max_model_len=64, max_total_tokens=512) as engine:
        assert engine.info["plugins"]["scheduling_policy"] == ["reversed"]
        assert engine.generate("a = ", {"max_tokens": 2}).text
    assert Reversed.calls


EXAMPLES = {
    "prefix_cache:blocks": "tests/examples/packages/frame-block-cache/frame_block_cache.py",
    "weight_source:tar": "tests/examples/packages/frame-tar-weights/frame_tar_weights.py",
    "stat_logger:statsd": "tests/examples/packages/frame-statsd/frame_statsd.py",
    "collective:store": "tests/plugins/fake_collective.py",
    "adapter:mlx": "tests/plugins/adapter_example.py",
    "platform:abacus": "tests/plugins/platform_example.py",
    "launcher:reversed": "tests/plugins/fake_launcher.py",
}


@pytest.mark.parametrize("selector", EXAMPLES)
def test_each_kind_works_as_a_single_file(selector: str) -> None:
    path = str(Path(__file__).parents[2] / EXAMPLES[selector])
    subject = conformance.find(load_configured(read(path)), selector, conformance.Setting())
    first = conformance.checks(subject.record.kind, subject)[0]
    first.run()
    assert subject.record.distribution == path


EXTENSION = """
from fastapi import APIRouter
from frame.interfaces.http import HttpExtension

class Hello(HttpExtension):
    '''Greets.'''

    def make_routers(self):
        router = APIRouter()

        @router.get("/hello")
        async def hello() -> dict[str, str]:
            return {"hello": "you"}

        return [router]
"""


def test_an_http_extension_works_as_a_single_file(tmp_path: Path) -> None:
    registry = load_configured(read(write(tmp_path / "hello.py", EXTENSION)))
    subject = conformance.find(registry, "http_extension:hello", conformance.Setting())
    for check in conformance.checks("http_extension", subject):
        with contextlib.suppress(conformance.SkipCheck):
            check.run()
