"""Loading: all formats give the same model, and each broken checkpoint one sentence that names the
fault."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from frame.core.errors import CheckpointError, PluginError
from frame.core.interfaces.platform import HOST
from frame.loading import weight_stream
from frame.loading.loader import allocate_parameters, expected_shapes, load_model, process_weights_after_loading
from frame.loading.weight_reader import ReadAhead
from frame.loading.weight_stream import WeightStream
from frame.models.layers.parameter import Range, ShardedParameter, ShardRule
from frame.plugins.loader import load_registry
from frame.plugins.weight_sources.dummy import PERIOD, RandomNumbers, RandomTensor
from frame.plugins.weight_sources.safetensors import read_ranges
from frame.testing.checkpoints import make_checkpoint
from frame.testing.conformance import Setting, Subject
from frame.testing.weights.weight_source import suite
from tests.models.harness import checkpoint_of, open_session, weights_of

PROMPT = [(0, list(range(10, 40)))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint("Qwen2ForCausalLM", tmp_path / "model")


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder: Path) -> list[Path]:
    """Spread the tensors over three files with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files, index = [], {}
    for rank in range(3):
        file = folder / f"model-{rank + 1:05}-of-00003.safetensors"
        mine = names[rank::3]
        save_file({name: tensors[name] for name in mine}, file)
        index |= dict.fromkeys(mine, file.name)
        files.append(file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return files


def test_shards_with_and_without_an_index_give_the_same_model(folder: Path) -> None:
    want = open_session(folder).step(PROMPT)[0]
    shard(folder)
    assert torch.equal(open_session(folder).step(PROMPT)[0], want)
    (folder / "model.safetensors.index.json").unlink()
    assert torch.equal(open_session(folder).step(PROMPT)[0], want)


def test_only_the_slice_is_read(folder: Path) -> None:
    tensors = dict(weights_of(folder))
    assert tensors["model.norm.weight"].shape == (64,)


def test_reading_ahead_gives_the_same_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_stream, "PIECE", 1000)  # tensors have many pieces,
    monkeypatch.setattr(weight_stream, "AHEAD", 5000)  # and some are larger than what is read ahead
    want = {name: tensor[...] for name, tensor in weights_of(folder)}
    cut = slice(16, 48)
    shard(folder)
    rows = {name: cut if len(tensor.shape) > 1 else None for name, tensor in want.items() if name != "model.norm.weight"}
    for name, tensor in weights_of(folder, ahead=ReadAhead(HOST, rows)):
        assert tensor.shape == tuple(want[name].shape)
        if len(tensor.shape) > 1:
            assert torch.equal(tensor[cut, 3:], want[name][cut, 3:])
            assert torch.equal(tensor[0:5], want[name][0:5])
        else:
            assert torch.equal(tensor[...], want[name])


def test_a_file_that_shrinks_during_reading_is_an_error(folder: Path) -> None:
    file = folder / "model.safetensors"
    places = read_ranges(file)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="became shorter"), WeightStream(HOST, 2) as stream:
        list(stream.read(places.values()))


def broken(folder: Path, *words: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_session(folder)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text
    return text


def test_missing_shard(folder: Path) -> None:
    shard(folder)[1].unlink()
    broken(folder, "model-00002-of-00003.safetensors is named in", "download the checkpoint again")


def test_truncated_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    broken(folder, str(file), "truncated or damaged", "download it again")


@pytest.mark.parametrize("content", [b"", b"\x10", b"nonsense" * 100])
def test_file_that_is_no_safetensors(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    broken(folder, "model.safetensors is truncated or damaged")


def test_a_gguf_file_is_named_with_its_package(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.gguf")
    broken(folder, "holds a GGUF file and no safetensors weights", "leave model.load_format open")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt"])
def test_pickled_weights_are_refused_without_reading(folder: Path, tmp_path: Path, name: str) -> None:
    class Bad:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    want = open_session(folder).step(PROMPT)[0]
    torch.save({"model.norm.weight": Bad()}, folder / name)
    assert torch.equal(open_session(folder).step(PROMPT)[0], want)  # beside safetensors files it is ignored
    (folder / "model.safetensors").unlink()
    broken(folder, str(folder / name), "pickled weights", "convert them to safetensors", "docs/security.md")
    assert not (tmp_path / "ran").exists()


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    broken(folder, str(folder), "holds no safetensors weights", "set model.load_format to a source", "or to dummy")


def test_wrong_shape(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(48, 64)

    rewrite(folder, change)
    broken(folder, "model.layers.1.self_attn.k_proj.weight has the shape [48, 64], but [32, 64] is expected")


def test_integers_where_numbers_are_expected(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 64, dtype=torch.int8)

    rewrite(folder, change)
    broken(folder, "model.layers.0.mlp.up_proj.weight is stored as int8, but float32 is expected", "weight format")


def retype(file: Path, tensor: str, dtype: str, bits: int) -> None:
    """Give a tensor another dtype, with zeros as values."""
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header, body, data = json.loads(raw[8:start]), raw[start:], b""
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        part = body[slice(*entry["data_offsets"])]
        if name == tensor:
            entry["dtype"], part = dtype, bytes(math.prod(entry["shape"]) * bits // 8)
        entry["data_offsets"] = [len(data), len(data) + len(part)]
        data += part
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(("dtype", "bits"), [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6), ("I2", 2)])
def test_a_dtype_that_nothing_reads_is_named(folder: Path, dtype: str, bits: int) -> None:
    retype(folder / "model.safetensors", "model.layers.0.mlp.up_proj.weight", dtype, bits)
    broken(folder, "model.layers.0.mlp.up_proj.weight", f"is stored as {dtype}, which no weight format reads: use a checkpoint")


@pytest.mark.parametrize("dtype", ["F8_E4M3FNUZ", "F8_E5M2FNUZ"])
def test_values_that_need_a_scale_are_not_taken_as_numbers(folder: Path, dtype: str) -> None:
    retype(folder / "model.safetensors", "model.layers.0.mlp.up_proj.weight", dtype, 8)
    broken(folder, "model.layers.0.mlp.up_proj.weight is stored as float8", "but float32 is expected")


def test_missing_parameters_are_named_and_counted(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.__delitem__("model.layers.1.self_attn.v_proj.bias"))
    text = broken(folder, "lacks model.layers.1.self_attn.v_proj.bias:")
    assert "q_proj" not in text  # the merged parameter's other tensors exist

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".mlp." in name]:
            del tensors[name]

    rewrite(folder, drop)
    broken(folder, "lacks ", "and 3 more", "model.layers.0.mlp.gate_proj.weight")


def test_unexpected_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.adapter.weight": torch.zeros(2)}))
    broken(folder, "model.layers.0.adapter.weight, which the model does not have")


def test_tensor_of_the_index_that_no_file_has(folder: Path) -> None:
    shard(folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))
    broken(folder, "names model.extra, which no file holds")


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "not an index"), ("[" * 100_000, "not an index"), ('{"weight_map": {"a": "../x"}}', "outside of its folder"),
     (json.dumps({"weight_map": {"a": "x" * 5000}}), "outside of its folder")],
)  # fmt: skip
def test_bad_index(folder: Path, content: str, words: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    broken(folder, words)


def test_multi_token_prediction_layers_are_ignored(tmp_path: Path) -> None:
    folder = make_checkpoint("DeepseekV3ForCausalLM", tmp_path)
    want = open_session(folder).step(PROMPT)[0]
    rewrite(folder, lambda tensors: tensors.update({"model.layers.2.eh_proj.weight": torch.zeros(64, 128)}))
    assert torch.equal(open_session(folder).step(PROMPT)[0], want)


def test_the_former_name_of_the_hook_is_refused_before_anything_is_loaded(folder: Path) -> None:
    class Old(nn.Module):
        def finish(self) -> None: ...

    class Both(Old):
        def process_weights_after_loading(self) -> None: ...

    def load(module: nn.Module) -> None:
        made: Any = nn.Sequential(module)
        load_model(lambda: made, cast(Any, None), checkpoint_of(folder), lambda _: pytest.fail("it was taken", pytrace=False))

    with pytest.raises(PluginError, match=r"Old was written for an earlier .* rename its finish\(\) to process_weights_after_loading\(\)"):
        load(Old())
    with pytest.raises(pytest.fail.Exception, match="it was taken"):
        load(Both())


def test_second_load_updates_the_model(folder: Path) -> None:
    """The derived weights of DeepSeek follow the new weights."""
    from frame.loading.loader import load_weights

    first = make_checkpoint("DeepseekV3ForCausalLM", folder / "a", seed=1)
    second = make_checkpoint("DeepseekV3ForCausalLM", folder / "b", seed=2)
    want = open_session(second).step(PROMPT)[0]
    session = open_session(first)
    assert not torch.allclose(session.step(PROMPT)[0], want)
    assert isinstance(session.model, nn.Module)
    load_weights(session.model, checkpoint_of(second))
    process_weights_after_loading(session.model)
    session.computed.clear()
    assert torch.equal(session.step(PROMPT)[0], want)
    process_weights_after_loading(session.model)  # without new weights: no change
    session.computed.clear()
    assert torch.equal(session.step(PROMPT)[0], want)


def test_allocation_keeps_shared_parameters_and_their_attributes() -> None:
    with torch.device("meta"):
        first, second = nn.Linear(3, 2, bias=False), nn.Linear(3, 2)
        first.weight = second.weight = ShardedParameter(torch.empty(2, 3))
        second.weight.bind("here")
    both = nn.ModuleList((first, second))
    allocate_parameters(both, torch.device("cpu"))
    assert first.weight is second.weight
    assert not first.weight.is_meta
    assert isinstance(second.bias, nn.Parameter)
    assert expected_shapes(both) == {"here": (2, 3), "1.bias": (2,)}


def test_parts_that_a_checkpoint_lacks_are_zero() -> None:
    with torch.device("meta"):
        module = nn.Module()
        module.padded = ShardedParameter(torch.empty(4, 3), ShardRule(output=0))
        module.padded.bind("a", output=Range.whole(3))
    allocate_parameters(module, torch.device("cpu"))
    module.padded.load("a", torch.ones(3, 3))
    assert module.padded.tolist() == [[1.0] * 3] * 3 + [[0.0] * 3]


def test_random_tensors_depend_only_on_seed_name_and_shape() -> None:
    shape, zero, one = (1100, 1000), *(RandomNumbers(seed, torch.device("cpu"), torch.float32) for seed in (0, 1))
    assert shape[0] * shape[1] > PERIOD
    whole = RandomTensor("a", shape, zero)[...]
    assert torch.equal(RandomTensor("a", shape, zero)[100:200, 5:], whole[100:200, 5:])
    assert not torch.equal(RandomTensor("b", shape, zero)[...], whole)
    assert not torch.equal(RandomTensor("a", shape, one)[...], whole)
    assert abs(whole.std().item() * 1000**0.5 - 1) < 0.01
    assert torch.linalg.matrix_rank(whole[:100] @ whole[-100:].t()) == 100
    numbers = RandomNumbers(0, torch.device("cpu"), torch.bfloat16)
    assert torch.equal(RandomTensor("a", shape, numbers)[...], whole.bfloat16())
    assert RandomTensor("norm", (5,), numbers)[...].tolist() == [1.0] * 5
    assert RandomTensor("bias", (5,), numbers)[...].tolist() == [0.0] * 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["safetensors", "dummy"])
def test_weight_sources_pass_their_suite(name: str) -> None:
    registry = load_registry(installed=False)
    record = registry.get("weight_source", name)
    for check in suite(Subject(record, registry.load(record), None, Setting())):
        check.run()
