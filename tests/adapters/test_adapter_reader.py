"""What a rank refuses to load, each with a sentence that names the fault."""

from pathlib import Path

import pytest
import torch

from frame.adapters.adapter_pool import AdapterSizes
from frame.adapters.host_adapters import HostAdapter
from frame.interfaces.adapter import AdapterError
from tests.adapters.harness import make_adapters, make_reader, write_adapter

LAYERS = {"q": (6, [4]), "embed": (9, [6])}
RIGHT = {"q.a": torch.ones(4, 6), "q.b": torch.ones(4, 4)}


def _read(folder: Path, tensors: dict[str, torch.Tensor], config: str = '{"rank": 4}', foreign: tuple[str, ...] = ()) -> HostAdapter:
    adapters = make_adapters(AdapterSizes(2, 4, 2), LAYERS, lookup="embed")
    return make_reader(adapters, foreign).read(write_adapter(folder, tensors, config))


def test_ranks_fill_pages(tmp_path: Path) -> None:
    host = _read(tmp_path, {"q.a": torch.ones(17, 6), "q.b": torch.ones(4, 17)}, '{"rank": 17}')
    assert (len(host.pages), host.counts.tolist()) == (2, [2, 0])


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"other.a": torch.ones(4, 6), "other.b": torch.ones(4, 4)}, "the adapter changes other"),
        ({"q.a": torch.ones(4, 7), "q.b": torch.ones(4, 4)}, r"delta of q is \[4, 7\], and the layer \[4, 6\]"),
        ({"q.a": torch.ones(4, 6), "q.b": torch.ones(4, 3)}, "do not fit each other"),
        ({"q.a": torch.ones(5, 6), "q.b": torch.ones(4, 5)}, "rank 5, above the adapter's own rank 4"),
        ({"q.a": torch.full((4, 6), float("nan")), "q.b": torch.ones(4, 4)}, "not finite"),
        ({"q.a": torch.ones(4, 6, dtype=torch.int8), "q.b": torch.ones(4, 4)}, "values of q"),
        ({**RIGHT, "q.norm": torch.ones(3)}, "scales 3 outputs of q, which has 4"),
        ({"embed.a": torch.ones(4, 6), "embed.b": torch.ones(9, 4), "embed.norm": torch.ones(9)}, "no linear layer"),
        ({}, "changes no layer"),
    ],
)
def test_what_does_not_fit_is_refused(tensors: dict[str, torch.Tensor], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=sentence):
        _read(tmp_path, tensors)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [('{"rank": 33}', "rank 33, above adapters.max_rank 32"), ("[1]", "no JSON object"), ("{", "cannot be read"),
     ('{"peft_type": "OTHER"}', "'OTHER' is read by no adapter format here")],
)  # fmt: skip
def test_configurations_are_checked(config: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=sentence):
        _read(tmp_path, RIGHT, config)


def test_layers_of_other_ranks_are_left_to_them(tmp_path: Path) -> None:
    tensors = {**RIGHT, "layers.7.q.a": torch.ones(4, 6), "layers.7.q.b": torch.ones(4, 4)}
    assert _read(tmp_path, tensors, foreign=(r"layers\.7\.",)).counts.tolist() == [1, 0]


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_vanished_and_truncated_files(file: str, tmp_path: Path) -> None:
    adapters = make_adapters(AdapterSizes(2, 4, 2), LAYERS)
    folder = write_adapter(tmp_path, RIGHT)
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[:-3])
    with pytest.raises(AdapterError, match="cannot be read"):
        make_reader(adapters).read(folder)
    (folder / file).unlink()
    with pytest.raises(AdapterError, match="cannot be read"):
        make_reader(adapters).read(folder)
