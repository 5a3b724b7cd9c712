"""`frame config check` gives the verdict of `frame serve`, in the same sentence, for all that a
start refuses. One table: broken folders, and settings.

Each case runs the check; the start of its engine runs in this process, as `frame.Engine`. The slow
tests run `frame serve` as a process, and one `frame config check`."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from frame import Engine
from frame.core.errors import ConfigurationError
from frame.entrypoints.cli.main import cli
from frame.host.authenticated_link import KEY_VARIABLE
from tests.entrypoints.fork_server import run_forked

Break = Callable[[Path], object]
FIGURES = re.compile(r"\d+\.\d+ GiB|\d+ tokens of|try cache\.\w+: [\d.]+")  # of the memory that is free at the moment


def change_config(**values: Any) -> Break:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def change_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Break:
    def save(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": "pt"})

    return save


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def make_gguf(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.gguf").write_bytes(b"GGUF\3\0\0\0" + bytes(16))


def only_gguf(folder: Path) -> None:
    make_gguf(folder)
    (folder / "config.json").unlink()


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def name_a_missing_shard(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def remove_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


def write(name: str, text: str) -> Break:
    return lambda folder: (folder / name).write_text(text)


def widen(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if name.endswith("mlp.down_proj.weight"))
    tensors[name] = tensors[name].repeat(2, 1)


QUANTIZED = {"quantization_config": {"quant_method": "hqq", "bits": 4}}

FOLDERS: Mapping[str, tuple[Break, str]] = {
    "unknown architecture": (change_config(architectures=["NoSuchForCausalLM"]), "NoSuchForCausalLM"),
    "no architecture": (change_config(architectures=[]), "names no architecture"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no safetensors weights"),
    "a GGUF file in place of the weights": (make_gguf, "model.gguf|no safetensors weights|weight_format 'gguf' is not installed"),
    "a GGUF folder": (only_gguf, "config.json"),
    "pickled weights": (pickle_weights, "pickled weights"),
    "a truncated shard": (truncate, "truncated or damaged"),
    "a missing shard": (name_a_missing_shard, "is not there"),
    "a missing tensor": (change_weights(lambda tensors: tensors.pop("model.norm.weight")), "lacks model.norm.weight"),
    "a tensor of another shape": (change_weights(widen), "down_proj"),
    "an unknown tensor": (change_weights(lambda tensors: tensors.update(extra=torch.zeros(2))), "extra"),
    "sizes of another model": (change_config(hidden_size=96), r"lm_head.weight has the shape \[384, 64\]"),
    "no tokenizer": (remove_tokenizer, "tokenizer"),
    "a damaged tokenizer": (write("tokenizer.json", "{"), "tokenizer"),
    "a damaged configuration": (write("config.json", "{"), "config.json"),
    "a damaged chat template": (write("chat_template.jinja", "{% if"), "template"),
    "an unknown quantization": (change_config(**QUANTIZED), "hqq"),
}


@dataclass(frozen=True)
class Setting:
    """Flags that a start refuses; `{folder}`, `{model}` and `{port}` are filled in."""

    flags: tuple[str, ...]
    words: str
    files: Mapping[str, str] = field(default_factory=dict)
    engine: bool = False  # the engine refuses it, after the slow part of the start


SETTINGS: Mapping[str, Setting] = {
    "more KV cache than memory": Setting(("--max-total-tokens", "1000000000000"), "KV cache does not fit", engine=True),
    "policy without its cache": Setting(("--schedule-policy", "lpm", "--prefix-cache", "none"), "stores none", engine=True),
    "a longer context than the model's": Setting(("--max-model-len", "99999999"), "99999999"),
    "a port in use": Setting(("--port", "{port}"), "cannot listen on"),
    "an admin port in use": Setting(("--admin-port", "{port}"), "cannot listen on"),
    "a gRPC port in use": Setting(("--grpc-port", "{port}"), "cannot listen on"),
    "one port twice": Setting(("--port", "4567", "--admin-port", "4567"), "choose another port"),
    "no certificate": Setting(("--ssl-certfile", "{folder}/none.pem"), "cannot serve TLS"),
    "a damaged certificate": Setting(("--ssl-certfile", "{folder}/a.pem"), "cannot serve TLS", {"a.pem": "no PEM"}),
    "no file of keys": Setting(("--api-keys", "{folder}/none"), "api_keys"),
    "an address without a key": Setting(("--host", "0.0.0.0"), "key"),
    "a folder of batches that is a file": Setting(("--batches-folder", "{folder}/file"), "batches.folder", {"file": ""}),
    "an unknown plugin": Setting(("--schedule-policy", "fcsf"), "did you mean"),
    "a plugin file that fails": Setting(("--plugin", "{folder}/bad.py"), "bad.py", {"bad.py": "import no_such_module_here"}),
    "an unknown parser": Setting(("--tool-call-parser", "nope"), "nope"),
    "no file of a template": Setting(("--chat-template", "{folder}/none.jinja"), "none.jinja"),
    "no draft model": Setting(("--speculative-algorithm", "draft_model", "--speculative-draft-model-path", "{folder}/none"), "none"),
    "a drafter without its model": Setting(("--speculative-algorithm", "draft_model"), "draft"),
    "more ranks than heads": Setting(("--tp", "64"), "64"),
    "a device that is not there": Setting(("--device", "cuda"), "cuda"),
    "an unknown flag": Setting(("--swap-space", "4"), "No such option"),
    "a flag of another type": Setting(("--max-running-requests", "many"), "many"),
    "no tokenizer folder": Setting(("--tokenizer", "{folder}/none"), "tokenizer"),
}


def say(text: str) -> str:
    """The sentences of a refusal, which come last, without the command's name and the figures of
    the moment."""
    last = re.split(r"^(?:frame|Error): ", text, flags=re.MULTILINE)[-1].strip()
    return FIGURES.sub("#", re.sub(r"^(the start (would fail|failed): )?(engine: )?", "", last))


def run_check(*flags: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["config", "check", *flags], prog_name="frame")
    return result.exit_code, say(result.output)


@contextmanager
def filled(setting: Setting, checkpoint: Path, folder: Path) -> Iterator[list[str]]:
    for name, text in setting.files.items():
        (folder / name).write_text(text)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        first = [] if "--port" in setting.flags else ["--port", "0"]
        flags = [flag.format(folder=folder, model=checkpoint, port=port) for flag in setting.flags]
        yield ["--model", str(checkpoint), "--device", "cpu", *first, *flags]


@pytest.fixture
def broken(checkpoint: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    FOLDERS[request.param][0](folder)
    return folder


@pytest.mark.parametrize("broken", FOLDERS, indirect=True)
def test_the_check_refuses_what_the_engine_refuses(broken: Path, request: pytest.FixtureRequest) -> None:
    words = FOLDERS[request.node.callspec.params["broken"]][1]
    with pytest.raises(ConfigurationError, match=words) as refused:
        Engine(model=str(broken), device="cpu", threads=1).close()
    assert run_check("--model", str(broken), "--device", "cpu", "--port", "0") == (78, say(str(refused.value)))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_check_refuses_settings_that_a_start_refuses(name: str, checkpoint: Path, tmp_path: Path) -> None:
    with filled(SETTINGS[name], checkpoint, tmp_path) as flags:
        code, sentence = run_check(*flags)
    assert code in (2, 78)
    assert re.search(SETTINGS[name].words, sentence), sentence


def test_the_check_prints_what_it_checked(checkpoint: Path) -> None:
    result = CliRunner().invoke(cli, ["config", "check", "--model", str(checkpoint), "--device", "cpu", "--port", "0"])
    assert result.exit_code == 0, result.output
    for words in ("tokenizer: ", "weights: names and shapes", "tokens of KV cache", "not checked: values of weights"):
        assert words in result.output


def test_the_check_says_that_no_blocks_are_transferred(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl_cu13")
    monkeypatch.setenv(KEY_VARIABLE, "0123456789abcdef")
    flags = ["--disaggregation-mode", "decode", "--set", "plugins.options.kv_tier/nixl.size_gib=0.01"]
    result = CliRunner().invoke(cli, ["config", "check", "--model", str(checkpoint), "--device", "cpu", "--port", "0", *flags])
    assert result.exit_code == 0, result.output
    for words in ("memory as on cpu", "what a step computes, and transfers of blocks between two servers"):
        assert words in result.output


def test_the_check_reads_no_values(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from frame.plugins.weight_sources.safetensors import FileTensor

    def read(*_: object) -> None:
        raise AssertionError("the check reads a weight")

    monkeypatch.setattr(FileTensor, "__getitem__", read)
    code, sentence = run_check("--model", str(checkpoint), "--device", "cpu", "--port", "0")
    assert code == 0, sentence


def run_command(command: str, flags: list[str]) -> tuple[int, str]:
    arguments = [sys.executable, "-m", "frame", *command.split(), *flags]
    done = run_forked(arguments)
    assert "Traceback" not in done.stderr
    return done.returncode, say(done.stderr)


def sample(names: Iterable[str]) -> list[Any]:
    """Each sixth name; `make soak` runs the others. Each case starts a server."""
    return [pytest.param(name, marks=[pytest.mark.soak] if index % 6 else [pytest.mark.slow]) for index, name in enumerate(names)]


@pytest.mark.parametrize("name", sample(SETTINGS))
def test_both_commands_refuse_settings_alike(name: str, checkpoint: Path, tmp_path: Path) -> None:
    with filled(SETTINGS[name], checkpoint, tmp_path) as flags:
        assert run_check(*flags) == run_command("serve", flags)


@pytest.mark.parametrize("broken", sample(FOLDERS), indirect=True)
def test_both_commands_refuse_folders_alike(broken: Path) -> None:
    flags = ["--model", str(broken), "--device", "cpu", "--port", "0"]
    checked = run_check(*flags)
    assert checked[0] == 78
    assert checked == run_command("serve", flags)


@pytest.mark.slow
def test_a_process_of_the_check_says_what_it_says_here(checkpoint: Path) -> None:
    flags = ["--model", str(checkpoint), "--device", "cpu", "--port", "4567", "--admin-port", "4567"]
    checked = run_check(*flags)
    assert checked[0] in (2, 78)
    assert checked == run_command("config check", flags)
