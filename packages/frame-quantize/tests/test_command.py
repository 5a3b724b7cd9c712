"""`frame quantize`: wrong usage, and, with llmcompressor, checkpoints that frame serves."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from frame.core.kv_cache.geometry import kv_geometry
from frame.core.kv_cache.kv_pool import KVPool
from frame.host import progress
from frame.host.installation import install_command
from frame.testing.checkpoints import load_reference, make_checkpoint
from frame_quantize.command import command
from frame_quantize.schemes import METHODS
from tests.entrypoints.serving import wait_until
from tests.models.harness import open_session

TOKENS = list(range(20, 60))


def quantize(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(command, [str(each) for each in arguments])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("model"), hidden_size=128, intermediate_size=256)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw, words = random.Random(0), ["one", "two", "three", "alpha", "beta", "gamma"]
    file = tmp_path_factory.mktemp("samples") / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": " ".join(draw.choices(words, k=60))}) for _ in range(16)))
    return file


def test_a_missing_library_is_named_with_the_command_that_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llmcompressor", None)  # an import of it fails
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    monkeypatch.delitem(sys.modules, "frame_quantize.quantize", raising=False)
    code, output = quantize(tmp_path, "--method", "int8", "--out", tmp_path / "out")
    assert code == 1
    assert output == f"Error: frame quantize needs the Python module compressed_tensors: run {install_command('llmcompressor>=0.14')}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--method", "gptq"], "--method gptq needs sample texts"),
        (["--method", "fp8", "--calibration", __file__], "--method fp8 reads no sample texts"),
        (["--method", "fp8", "--kv-cache", "head"], "--method fp8 reads no sample texts, which --kv-cache needs"),
        (["--method", "int8", "--group-size", "64"], "--method int8 has a scale per output"),
        (["--method", "int5"], "'int5' is not one of"),
        (["--method", "int8", "--ignore", "("], "--ignore '(' is no regular expression"),
    ],
)
def test_wrong_usage_names_the_option(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    code, output = quantize("model", "--out", tmp_path / "out", *arguments)
    assert code == 2
    assert sentence in output


@pytest.mark.parametrize("name", ["/nope", "./nope", "a/b/nope"])
def test_a_missing_model_folder_is_named(name: str, tmp_path: Path) -> None:
    code, output = quantize(name, "--method", "int8", "--out", tmp_path / "out")
    assert (code, f"MODEL {name} is no folder" in output) == (2, True)


def test_a_folder_with_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    code, output = quantize("model", "--method", "fp8", "--out", tmp_path)
    assert (code, "is not empty" in output) == (2, True)


def test_the_folder_of_a_failure_can_be_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = ModuleType("frame_quantize.quantize")
    work.quantize_calibrated = work.read_samples = None  # type: ignore[attr-defined]
    work.check_device = work.check_model = lambda _: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, work.__name__, work)
    out = tmp_path / "out"
    failures: list[BaseException] = [KeyboardInterrupt(), RuntimeError("no memory"), ValueError("33 does not divide 256")]

    def write(_model: str, folder: Path, *_: object) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        if failures:
            raise failures.pop()

    work.quantize_weights = write  # type: ignore[attr-defined]
    while failures:
        assert quantize("model", "--method", "int8", "--out", out)[0] == 1
        assert not out.exists()
    code, output = quantize("model", "--method", "int8", "--out", out)
    assert (code, f"frame serve --model {out}" in output) == (0, True)


def test_a_line_tells_that_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    monkeypatch.setenv("TQDM_DISABLE", "")
    caplog.set_level("INFO", "frame.progress")
    work = ModuleType("frame_quantize.quantize")
    work.quantize_calibrated = work.read_samples = None  # type: ignore[attr-defined]
    work.check_device = work.check_model = lambda _: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, work.__name__, work)
    work.quantize_weights = lambda *_: wait_until(lambda: "quantizing model: 0:00 so far" in caplog.text)  # type: ignore[attr-defined]
    assert quantize("model", "--method", "int8", "--out", tmp_path / "out")[0] == 0


def test_what_cannot_be_quantized_is_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llmcompressor")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    stored = shutil.copytree(model, tmp_path / "stored")
    raw = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**raw, "quantization_config": {"quant_method": "gptq"}}))
    odd = make_checkpoint("LlamaForCausalLM", tmp_path / "odd", intermediate_size=40)
    for arguments, sentence in (
        ((stored, "--method", "int8"), "is quantized already (gptq): give the unquantized checkpoint"),
        ((model, "--method", "int8", "--device", "foo"), "--device foo is no device that PyTorch can use here"),
        (("org/none", "--method", "int8"), "couldn't connect"),
        ((odd, "--method", "int8"), "down_proj has 40 inputs, no multiple of 32: name it with --ignore, or choose --method fp8"),
        ((model, "--method", "int4", "--group-size", 48), "inputs, no multiple of 96: name it with --ignore, choose another --group-size"),
    ):
        code, output = quantize(*arguments, "--out", tmp_path / "out")
        assert (code, output.count("\n"), sentence in output) == (1, 1, True), output
        assert not (tmp_path / "out").exists()


def test_each_line_of_the_samples_is_checked(tmp_path: Path) -> None:
    pytest.importorskip("llmcompressor")
    from frame_quantize.quantize import read_samples

    file = tmp_path / "texts.jsonl"
    for text, sentence in (("{}", ":1 has no field `text`"), ('{"text": "a"}\n[', ":2 is no JSON object"), ("\n", "has no text")):
        file.write_text(text)
        with pytest.raises(ValueError, match=sentence):
            read_samples(file, 10)
    file.write_text('{"text": "a"}\n\n{"text": "b"}\n{"text": "c"}')
    assert read_samples(file, 2) == ["a", "b"]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "awq"])
def test_frame_and_transformers_load_the_result(method: str, model: Path, samples: Path, tmp_path: Path) -> None:
    """Logits stay near those of the unquantized model, and equal transformers' of the same file."""
    pytest.importorskip("llmcompressor")
    more = ["--calibration", samples, "--max-length", 48] if METHODS[method].is_calibrated else []
    groups = ["--group-size", 32] if "group_size" in METHODS[method].weights else []
    code, output = quantize(model, "--method", method, "--out", tmp_path / "out", *more, *groups, "--device", "cpu")
    assert code == 0, output
    with torch.no_grad():
        tokens = torch.tensor([TOKENS])
        plain, theirs = (load_reference(folder)(tokens).logits[0] for folder in (model, tmp_path / "out"))
    ours = open_session(tmp_path / "out", quantization="compressed-tensors").step([(0, TOKENS)])[0].float()
    drift = float((ours - plain).norm() / plain.norm())
    assert 0 < drift < {"fp8": 0.15, "int8": 0.05, "int4": 0.5, "gptq": 0.5}[method]
    if method != "fp8":  # transformers rounds the activations too
        torch.testing.assert_close(ours, theirs.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "Qwen2MoeForCausalLM"])
def test_routers_and_ignored_layers_stay_unquantized(architecture: str, tmp_path: Path) -> None:
    """Also of Mixtral, whose routers have another name; --ignore finds a part of a name."""
    pytest.importorskip("llmcompressor")
    model = make_checkpoint(architecture, tmp_path / "model", moe_intermediate_size=64, shared_expert_intermediate_size=64)
    ignored = ["--ignore", "o_proj$", "--ignore", r"layers\.0\.self_attn"]
    code, output = quantize(model, "--method", "int8", "--out", tmp_path / "out", "--device", "cpu", *ignored)
    assert code == 0, output
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    quantized = {name.removesuffix(".weight_packed") for name in names if name.endswith(".weight_packed")}
    assert "model.layers.1.self_attn.q_proj" in quantized
    assert not [name for name in quantized if name.endswith(("gate", "o_proj")) or "layers.0.self_attn" in name]
    plain, ours = (
        open_session(folder, quantization=quantization).step([(0, TOKENS)])[0].float()
        for folder, quantization in ((model, "none"), (tmp_path / "out", "compressed-tensors"))
    )
    assert 0 < float((ours - plain).norm() / plain.norm()) < 0.2


@pytest.mark.parametrize(("scales", "shape"), [("layer", (1,)), ("head", (2, 1, 1))])
def test_scales_of_the_cache_are_calibrated(scales: str, shape: tuple[int, ...], model: Path, samples: Path, tmp_path: Path) -> None:
    """The scales stand in the checkpoint, and the model with an fp8 cache that uses them stays
    close."""
    pytest.importorskip("llmcompressor")
    options = ["--calibration", samples, "--max-length", 48, "--group-size", 32, "--device", "cpu"]
    code, output = quantize(model, "--method", "gptq", "--kv-cache", scales, "--out", tmp_path / "out", *options)
    assert code == 0, output
    found = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.self_attn.k_scale"]
    assert tuple(found.shape) == shape
    plain = open_session(tmp_path / "out", quantization="compressed-tensors", attention="torch_native").step([(0, TOKENS)])[0].float()
    keys = {"attention": "torch_native", "kv_dtype": torch.float8_e4m3fn, "quantization": "compressed-tensors"}
    session = open_session(tmp_path / "out", **keys)
    geometry = kv_geometry(session.model_config, 1, session.page_size, "fp8_e4m3")
    session.pool = KVPool(geometry, session.slots * 64 + 1, torch.device("cpu"))  # type: ignore[assignment]
    got = session.step([(0, TOKENS)])[0].float()
    assert 0 < (got - plain).norm() / plain.norm() < 0.1


def test_awq_without_a_gpu_says_so(model: Path, samples: Path, tmp_path: Path) -> None:
    pytest.importorskip("llmcompressor")
    if torch.accelerator.is_available():
        pytest.skip("there is a GPU")
    code, output = quantize(model, "--method", "awq", "--calibration", samples, "--out", tmp_path / "out")
    assert (code, "awq needs a GPU" in output) == (1, True)
