"""Plugin packages that pip installed into a fresh environment: a good one, and every way of being
broken, all at the same time."""

from __future__ import annotations

import json
import site
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.entrypoints.fork_server import run_forked
from tests.model_configs import DENSE

KIND = "scheduling_policy"

MANIFEST = """
from frame import hookimpl

@hookimpl
def {hook}(registry):
    registry.add({arguments})
"""

POLICY = """
from frame.core.interfaces.scheduling import SchedulingPolicy

class Policy(SchedulingPolicy):
    def sort_waiting(self, waiting, view):
        return waiting
"""

OBSERVER = """
from frame import hookimpl
seen = []

@hookimpl
def on_step(step, seconds):
    seen.append(step)
    if step == 2:
        raise RuntimeError("observer broke")
"""


@dataclass(frozen=True)
class Package:
    distribution: str
    manifest: str
    policy: str = POLICY

    def write(self, folder: Path) -> Path:
        """A wheel. To build it from source would take a process of hatchling for each."""
        package = self.distribution.replace("-", "_")
        info = f"{package}-1.2.dist-info"
        files = {
            f"{package}/__init__.py": self.manifest.replace("PACKAGE", package),
            f"{package}/policy.py": self.policy,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {self.distribution}\nVersion: 1.2\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/entry_points.txt": f"[frame]\n{package} = {package}\n",
        }
        files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
        wheel = folder / f"{package}-1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        return wheel


def manifest(name: str, more: str = "", hook: str = "register_scheduling_policies") -> str:
    return MANIFEST.format(hook=hook, arguments=f"{name!r}, 'PACKAGE.policy:Policy', {more}")


PACKAGES = (
    Package("frame-t-good", manifest("good", "summary='Good.'")),
    Package(
        "frame-t-import",
        manifest("needs_library"),
        "try:\n    import no_such_kernel\nexcept ImportError as e:\n    raise RuntimeError('no GPU library') from e",
    ),
    Package("frame-t-manifest", "raise OSError('libfoo.so: cannot open shared object file')"),
    Package("frame-t-exit", "import sys\nsys.exit(3)"),
    Package("frame-t-clash", manifest("good")),
    Package("frame-t-builtin", manifest("lof")),
    Package("frame-t-version", manifest("future", "api='scheduling_policy/9'")),
    Package("frame-t-hook", manifest("misspelt", hook="register_scheduling_polices")),
    Package("frame-t-bare", manifest("unmarked").replace("@hookimpl\n", "")),
    Package("frame-t-rank", manifest("ranked", "rank='high'")),
    Package("frame-t-crash", manifest("crashes"), "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"),
    Package("frame-t-observer", OBSERVER),
)


@dataclass(frozen=True)
class Environment:
    """A virtual environment that sees this one's packages and has PACKAGES of its own."""

    python: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_forked([str(self.python), *arguments], cwd=self.python.parent)

    def frame(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "frame.entrypoints.cli.main", *arguments)

    def python_code(self, code: str) -> str:
        done = self.run("-c", "from frame.plugins.loader import *; from frame.plugins.registry import *\n" + code)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=False, system_site_packages=True)
    python = folder / "venv" / "bin" / "python"
    (own,) = (folder / "venv" / "lib").glob("python*/site-packages")
    outer = [path for path in sys.path if path.endswith("site-packages")] or site.getsitepackages()
    (own / "outer.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in outer))
    wheels = [package.write(folder) for package in PACKAGES]
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index"]
    done = subprocess.run([*pip, *wheels], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return Environment(python)


@pytest.mark.slow
def test_the_good_parts_of_a_bad_installation_work(environment: Environment) -> None:
    code = "r = load_registry(deny=['frame-t-clash']); print(r.load(r.get('scheduling_policy', 'good')).__module__)"
    assert environment.python_code(code).strip() == "frame_t_good.policy"
    done = environment.frame("config", "show", "--schedule-policy", "fcfs")
    assert done.returncode == 0, done.stderr


def test_all_of_them_are_listed_with_their_state(environment: Environment) -> None:
    done = environment.frame("plugins", "list", "--json")
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)
    state = {(each["name"], each["distribution"]): each["problems"] for each in listed["plugins"]}
    assert state["fcfs", "frame-serve"] == []
    assert "registered by frame-t-clash 1.2 and by frame-t-good 1.2" in state["good", "frame-t-good"][0]
    assert "written for interface scheduling_policy/9" in state["future", "frame-t-version"][0]
    assert {each["distribution"] for each in listed["broken"]} == {
        "frame-t-manifest", "frame-t-exit", "frame-t-hook", "frame-t-bare", "frame-t-rank",
    }  # fmt: skip


@pytest.mark.slow
def test_broken_on_import_is_fatal_when_selected_with_the_cause_chain(environment: Environment) -> None:
    done = environment.frame("plugins", "check", "needs_library")
    assert done.returncode == 78
    assert "scheduling_policy 'needs_library' (frame-t-import 1.2) was selected but does not load" in done.stderr
    assert "RuntimeError: no GPU library" in done.stderr
    assert "caused by ModuleNotFoundError: No module named 'no_such_kernel'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_manifest_that_is_broken_is_harmless_until_an_unknown_name_is_asked_for(environment: Environment, tmp_path: Path) -> None:
    done = environment.frame("plugins", "check", f"{KIND}/hers")
    assert done.returncode == 78
    assert "Unknown scheduling_policy 'hers'" in done.stderr
    assert "may contain it" in done.stderr
    assert "frame-t-manifest 1.2" in done.stderr
    assert "OSError: libfoo.so: cannot open shared object file" in done.stderr
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    resolving = environment.frame("config", "check", "--model", str(tmp_path), "--schedule-policy", "hers")
    assert resolving.returncode == 78
    assert "may contain it" in resolving.stderr


@pytest.mark.slow
def test_a_name_clash_is_fatal_when_selected_and_denying_one_helps(environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    check = ("config", "check", "--model", str(tmp_path), "--schedule-policy", "lof", "--skip-tokenizer-init", "--load-format", "dummy")
    done = environment.frame(*check)
    assert done.returncode == 78
    assert "registered by frame-serve" in done.stderr
    assert "plugins.deny: [frame-t-builtin]" in done.stderr
    denied = environment.frame(*check, "--plugins-deny", "frame-t-builtin")
    assert denied.returncode == 0, denied.stderr
    assert "scheduling_policy: lof" in denied.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("future", "it was written for interface scheduling_policy/9, this frame supports scheduling_policy/4"),
        ("crashes", "kills its process with SIGSEGV"),
    ],
)
def test_a_plugin_that_cannot_run_is_refused_when_selected(environment: Environment, name: str, sentence: str) -> None:
    done = environment.frame("plugins", "check", name)
    assert done.returncode == 78
    assert sentence in done.stderr


def test_a_misspelt_hook_is_reported(environment: Environment) -> None:
    done = environment.frame("plugins", "list")
    assert "unknown hook 'register_scheduling_polices'; did you mean 'register_scheduling_policies'?" in done.stderr
    assert "frame_t_bare has no hook; write @hookimpl before its register_… function" in done.stderr
    assert "scheduling_policy 'ranked': rank is 'high'; give a whole number." in done.stderr


def test_allow_and_deny_name_distributions(environment: Environment) -> None:
    code = """
own = {r.distribution for records in load_registry(installed=False).all_records().values() for r in records}
few = {r.distribution for records in load_registry(allow=['frame_t_good']).all_records().values() for r in records}
less = {r.distribution for records in load_registry(deny=['Frame-T-Good']).all_records().values() for r in records}
assert own == {'frame-serve'}, own
assert few == {'frame-serve', 'frame-t-good'}, few
assert 'frame-t-good' not in less and 'frame-t-clash' in less, less
assert not load_registry(allow=[]).broken
assert load_registry(allow=['frame-t-good', 'no-such'], deny=['Nor.this']).unmatched == ['Nor.this', 'no-such']
"""
    environment.python_code(code)


def test_an_observer_is_called_and_switched_off_when_it_raises(environment: Environment) -> None:
    code = """
import frame_t_observer
listening = observers(load_registry())
assert listening.on_stop is None and listening.on_request_finished is None
for step in range(5):
    listening.on_step(step=step, num_running=1, num_waiting=0, num_tokens=1, seconds=0.1)
assert frame_t_observer.seen == [0, 1, 2], frame_t_observer.seen
assert observers(load_registry(installed=False)).on_step is None
"""
    environment.python_code(code)
