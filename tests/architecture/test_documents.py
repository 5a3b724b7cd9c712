"""Documents say what is so: references are fresh, links lead somewhere, README's commands exist,
its Python runs."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache, lru_cache
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest
from packaging.version import Version

import frame
from frame.core.interfaces.weight_format import FormatRequirements
from frame.entrypoints.cli.installed import GROUP
from frame.entrypoints.cli.main import cli
from frame.entrypoints.configuration.flat_settings import settings
from frame.entrypoints.configuration.sources import load_config
from frame.interfaces.cli import CommandContext
from frame.interfaces.kinds import KINDS
from frame.plugins.loader import load_registry
from tests.architecture.source import EXTENSIONS, ROOT, classes, functions, package

PLACES = ("*.md", "docs/**/*.md", "examples/**/*.md", "packages/**/*.md", "benchmarks/**/*.md", "changelog/*.md")
DOCUMENTS = sorted(path for place in PLACES for path in ROOT.glob(place))
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.+?)\s*$", re.MULTILINE)
OPENAI_FIELDS = {"text.format", "text.verbosity"}  # of /v1/responses
OTHER_OPTIONS = {  # of pytest, and of Claude Code
    "--frame-conformance", "--frame-conformance-json", "--frame-conformance-device", "--frame-conformance-options",
    "--frame-conformance-thorough", "--disallowedTools",
}  # fmt: skip
COUNTS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen"),
    *("fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
    *(f"twenty-{each}" for each in ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")),
    *("thirty", *(f"thirty-{each}" for each in ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine"))),
)
NAMES = {"frame", "make", "pip", "pytest", "python", "curl", "git", "cd", "lm_eval", "ray", "serve", "npm", "export"}
NAMES |= {"docker", "kubectl", "helm"}
NAMES |= {"claude", "codex", "aider"}  # the programs of docs/coding_agents.md


def blocks(path: Path, *languages: str) -> list[str]:
    return [text for language, text in FENCE.findall(path.read_text()) if language in languages]


def commands(text: str) -> Iterator[list[str]]:
    """The command lines of a shell block: comments cut, continued lines and open quotes joined."""
    line = ""
    for part in text.replace("\\\n", " ").splitlines():
        line += part + "\n"
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quote is open
            continue
        line = ""
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            yield words


def wrong_command(words: list[str]) -> str | None:
    """Why this command line cannot be right, or None."""
    name = words[0].rpartition("/")[2]
    if name == "frame":
        return _wrong_frame(words[1:])
    if name == "make":
        targets = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
        unknown = [target for target in targets if target not in make_targets()]
        return f"make has no target {unknown}" if unknown else None
    return None if name in NAMES else f"{name} is none of the commands that documents may use"


def _wrong_frame(words: list[str]) -> str | None:
    command: click.Command = cli
    context = click.Context(cli, info_name="frame", **cli.context_settings)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words[0]) or package_commands().get(words[0])
        if found is None:
            return f"frame has no command {words[0]!r}"
        command, words = found, words[1:]
    known = {option for parameter in command.get_params(context) for option in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [word for word in words if word.startswith("-") and word.partition("=")[0] not in known]
    return f"{command.name} has no option {unknown}" if unknown else None


@cache
def package_commands() -> dict[str, click.Command]:
    """The commands of the distributions in `packages/`, which need not be installed."""
    tables = [tomllib.loads(file.read_text())["project"].get("entry-points", {}) for file in EXTENSIONS.glob("*/pyproject.toml")]
    entries = [EntryPoint(name, value, GROUP) for table in tables for name, value in table.get(GROUP, {}).items()]
    return {entry.name: entry.load()(CommandContext()).make_command() for entry in entries}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_references_are_fresh_whatever_is_installed(tmp_path: Path) -> None:
    """In a process of its own, so that no other test changes what they are made of."""
    info = tmp_path / "frame_extra-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: frame-extra\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nextra = json:JSONDecoder\n[frame]\nextra = json\n")
    code = (
        "from frame.entrypoints.cli.main import list_help; from scripts import generate_docs; "
        "assert 'extra' in dict(list_help()); print(*generate_docs.stale())"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert made.stdout.split() == [], "run `make docs`"


@lru_cache(maxsize=256)
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a document's headings that both GitHub and the site (Python-Markdown) give."""
    heads = [re.sub(r"[`*]|\]\([^)]*\)|\[", "", head).lower() for head in HEADING.findall(FENCE.sub("", path.read_text()))]
    github = {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in heads}
    site = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip()) for head in heads}
    return frozenset(github & site)


def wrong_links(path: Path, text: str) -> list[str]:
    """Links of a document, whose text is given, to files or headings that do not exist."""
    found = []
    for target, anchor in LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))):
        place = path.parent / target if target else path
        if "://" in target:
            continue
        if not place.exists():
            found.append(target)
        elif anchor and (place.suffix != ".md" or anchor not in anchors(place)):
            found.append(f"{target}#{anchor}")
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_links_lead_somewhere(path: Path) -> None:
    assert wrong_links(path, path.read_text()) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_commands_exist(path: Path) -> None:
    lines = [words for text in blocks(path, "sh", "bash") for words in commands(text)]
    assert [f"{' '.join(words)}: {problem}" for words in lines if (problem := wrong_command(words))] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_python_parses_and_yaml_is_valid(path: Path, tmp_path: Path) -> None:
    for text in blocks(path, "python"):
        if not text.startswith("registry.add("):  # a signature
            ast.parse(text)
    for number, text in enumerate(blocks(path, "yaml")):
        if "plugins:" not in text or "attention_backend/blockwise" not in text:  # options of a plugin that is not installed here
            file = tmp_path / f"{number}.yaml"
            file.write_text(text)
            load_config(str(file), environ={})


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=ids)
def test_examples_are_valid(path: Path) -> None:
    load_config(str(path), environ={})


@lru_cache(maxsize=1)
def dotted_names() -> frozenset[str]:
    """All modules, and the classes and functions in them."""
    inside = {f"{each.name}.{node.name}" for each in package() for node in (*classes(each.tree), *functions(each.tree))}
    return frozenset({each.name for each in package()} | inside | {f"frame.{name}" for name in frame.__all__})


@lru_cache(maxsize=1)
def members() -> dict[str, set[str]]:
    """Methods and attributes by class; two classes may bear one name."""
    found: dict[str, set[str]] = {}
    for node in (node for each in package() for node in classes(each.tree)):
        parts = (getattr(part, "name", None) or ast.unparse(getattr(part, "target", part)) for part in node.body)
        found.setdefault(node.name, set()).update(parts)
    return found


def unknown_names(text: str) -> list[str]:
    """Words in backticks that look like our files, modules or methods, and are none."""
    files = {each.path for each in package()} | {each.path.removeprefix("frame/") for each in package()}
    names = members()
    found = []
    for word in re.findall(r"`([^`\n]+)`", text):
        if re.fullmatch(r"[\w/]+\.py", word) and "/" in word and word not in files and not (ROOT / word).is_file():
            found.append(word)
        elif (match := re.fullmatch(r"([A-Z]\w+)\.(_?\w+)", word)) and match[1] in names:
            if match[2] not in names[match[1]]:
                found.append(word)
        elif re.fullmatch(r"frame(\.\w+)+", word) and word not in dotted_names():
            found.append(word)
    return found


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if "examples" not in path.parts], ids=ids)
def test_code_that_is_named_exists(path: Path) -> None:
    assert unknown_names(FENCE.sub("", path.read_text())) == []


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=ids)
def test_a_page_begins_with_what_it_is_for(path: Path) -> None:
    beginning = " ".join(path.read_text().split("\n\n")[1:3])
    assert "This page" in beginning


def test_the_request_walk_names_the_files() -> None:
    text = (ROOT / "docs/request_walk.md").read_text()
    assert len(set(re.findall(r"`((?:core|entrypoints|models)/[\w/]+\.py)`", text))) >= 30  # each of which exists, by the test above


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs/adr"
    index = (folder / "README.md").read_text()
    assert [path.name for path in sorted(folder.glob("[0-9]*.md")) if f"({path.name})" not in index] == []
    assert len(list(folder.glob("[0-9]*.md"))) >= 20


@lru_cache(maxsize=1)
def cli_options() -> frozenset[str]:
    """The options of all commands."""

    def walk(command: click.Command, context: click.Context) -> Iterator[str]:
        for parameter in command.get_params(context):
            yield from (*parameter.opts, *parameter.secondary_opts)
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                if (found := command.get_command(context, name)) is not None:
                    yield from walk(found, click.Context(found, info_name=name, parent=context))

    return frozenset(walk(cli, click.Context(cli, info_name="frame", **cli.context_settings)))


def unknown_settings(text: str) -> list[str]:
    """Words in backticks that look like a setting or an option of a command, and are none."""
    keys = {setting.key for setting in settings()}
    sections = {key.partition(".")[0] for key in keys}
    words = re.findall(r"`([^`\n]+)`", text)
    named = [match[1] for word in words if (match := re.match(r"(\w+\.\w+)(?::.*)?$", word))]
    options = [option for word in words for option in re.findall(r"(?<![\w-])--[a-z][\w-]+", word)]
    wrong = [key for key in named if key.partition(".")[0] in sections and key not in keys | OPENAI_FIELDS]
    return wrong + [option for option in options if option not in cli_options() and option not in OTHER_OPTIONS]


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.parent.name in ("docs", "adr")], ids=ids)
def test_settings_that_are_named_exist(path: Path) -> None:
    assert unknown_settings(FENCE.sub("", path.read_text())) == []


def test_documents_name_no_machine() -> None:
    found = [ids(path) for path in DOCUMENTS if re.search(r"/(home|root|work|Users)/\w", path.read_text())]
    assert found == []


def test_make_prints_its_targets() -> None:
    done = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, timeout=500, check=True)
    assert {"serve", "test", "check", "docs", "bench"} <= {line.split()[0] for line in done.stdout.splitlines()}


def test_the_weights_of_the_deepseek_example_have_a_format() -> None:
    text = (ROOT / "examples/deepseek.yaml").read_text()
    assert "the format `fp8` reads them" in text
    fp8 = load_registry(installed=False).get("weight_format", "fp8")
    assert fp8.capabilities.unsupported(FormatRequirements("fp8")) == []


def test_the_readme_fits_on_a_screen_or_two() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make serve" in text
    assert "make test" in text
    assert len(text.splitlines()) <= 80


def test_checks_find() -> None:
    wrong = ["core/no_such.py", "Scheduler.no_such", "frame.core.no_such"]
    assert unknown_names(" ".join(f"`{word}`" for word in wrong)) == wrong
    assert unknown_names("`core/scheduling/scheduler.py` `Scheduler.schedule_batch` `frame.core.engine` `frame.SamplingParams`") == []
    links = "[a](docs/no_such.md) [b](docs/index.md#no-such) [c](#start)"
    assert wrong_links(ROOT / "README.md", links) == ["docs/no_such.md", "docs/index.md#no-such"]
    settings_named = "`cache.page_sizes` `--no-such-flag 3` `cache.page_size: 4` `--page-size 4`"
    assert unknown_settings(settings_named) == ["cache.page_sizes", "--no-such-flag"]
    assert wrong_command(["frame", "serv"])
    assert wrong_command(["frame", "plugins", "lst"])
    assert wrong_command(["frame", "config", "check", "--no-such-flag"])
    assert wrong_command(["make", "tset"])
    assert wrong_command(["rm", "-rf", "x"])
    assert wrong_command(["frame", "config", "check", "--tp", "2"]) is None
    assert list(commands("# only a comment\nA=1 frame serve \\\n --tp 2 # why")) == [["frame", "serve", "--tp", "2"]]


def test_the_stated_number_of_kinds_of_plugins_is_the_registrys() -> None:
    """In documents, and in the notes of the version in pyproject.toml and of unreleased changes."""
    version = re.escape(Version(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]).base_version)
    notes = re.findall(rf"^## (?:Unreleased|{version})$(.*?)(?=^## |\Z)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE | re.DOTALL)
    texts = [*notes, *(path.read_text() for path in DOCUMENTS if path.name != "CHANGELOG.md")]
    count = re.compile(rf"(?<![\w-])({'|'.join(COUNTS)})\s+kinds\s+of\s+plugins", re.IGNORECASE)
    stated = [found.lower() for text in texts for found in count.findall(text)]
    assert set(stated) <= {COUNTS[len(KINDS)]}, f"there are {len(KINDS)} kinds"
