"""The conformance suite of weight sources: checkpoints with known values, read whole, in slices and
ahead; then broken and hostile ones. Must not know a plugin by name."""

from __future__ import annotations

import contextlib
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from frame.core.errors import CheckpointError
from frame.core.interfaces.platform import HOST
from frame.interfaces.weights import WeightSource, WeightSourceCapabilities, WeightSourceContext
from frame.loading.weight_reader import ReadAhead, read_weights
from frame.testing.conformance import Check, Subject, collect

CPU = torch.device("cpu")
DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
INDEXES: tuple[Any, ...] = (
    Ellipsis,
    slice(None),
    slice(3, 9),
    (slice(0, 1), slice(None)),
    (slice(None), slice(2, 5)),
    (slice(7, 12), slice(4, 7)),
    slice(0, 0),
)


class Maker:
    """Writes checkpoints for the plugin under test and opens them."""

    def __init__(self, subject: Subject) -> None:
        capabilities = subject.record.capabilities
        self.target: type[WeightSource] = subject.target
        self.options = subject.options
        self.capabilities = capabilities if isinstance(capabilities, WeightSourceCapabilities) else WeightSourceCapabilities()

    @contextlib.contextmanager
    def folder(self, tensors: Mapping[str, torch.Tensor] | None = None) -> Iterator[Path]:
        """A new folder, with a checkpoint of these tensors if there are any."""
        with tempfile.TemporaryDirectory() as name:
            if tensors is not None:
                self.target.write_checkpoint(Path(name), tensors)
            yield Path(name)

    @contextlib.contextmanager
    def open(self, folder: Path, seed: int = 0, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Iterator[WeightSource]:
        context = WeightSourceContext(folder, CPU, torch.float32, seed, lambda: shapes or {}, lambda: INTEGERS)
        with contextlib.closing(self.target(context, self.options)) as source:
            yield source


def suite(subject: Subject) -> Iterator[Check]:
    """The checks of a weight source; one that makes weights up has others."""
    maker = Maker(subject)
    if maker.capabilities.reads_checkpoint:
        yield from collect(__name__, maker)
        return
    for function in (_has_expected_shapes, _agrees_between_ranks, _depends_on_the_seed, _makes_finite_values, _makes_integers):
        yield Check(function.__name__.strip("_"), partial(function, maker))


def _tensors() -> dict[str, torch.Tensor]:
    """Tensors of several ranks, each with values of its own."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed.weight": (20, 8), "model.layers.0.up.weight": (16, 8), "model.layers.0.down.weight": (16, 8),
              "model.norm.weight": (8,), "experts": (3, 12, 7), "lm_head.weight": (20, 8), "conv": (2, 3, 4, 5)}  # fmt: skip
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} | {"scale": torch.tensor(2.5)}


# sources that read a checkpoint -------------------------------------------------------------------


def check_has_every_tensor(maker: Maker) -> None:
    tensors = _tensors()
    with maker.folder(tensors) as folder, maker.open(folder, shapes={"other": (3, 3)}) as source:
        names = list(source.list_names())
        assert len(set(names)) == len(names), "list_names names a tensor twice"
        assert set(names) == set(tensors), f"list_names differs from the checkpoint in {sorted(set(names) ^ set(tensors))[:4]}"
        for name, tensor in tensors.items():
            opened = source.open_tensor(name)
            assert tuple(opened.shape) == tuple(tensor.shape), f"{name} has the shape {tuple(opened.shape)}, not {tuple(tensor.shape)}"
            _require_equal(opened[...], tensor, f"the values of {name}")


def check_keeps_every_dtype(maker: Maker) -> None:
    base = torch.arange(-60, 60).reshape(12, 10)
    tensors = {str(dtype): base.to(torch.float32).to(dtype) if dtype.is_floating_point else base.to(dtype) for dtype in DTYPES}
    with maker.folder(tensors) as folder, maker.open(folder) as source:
        for name, tensor in tensors.items():
            _require_equal(source.open_tensor(name)[...], tensor, f"a tensor of {name}")
            _require_equal(source.open_tensor(name)[4:7], tensor[4:7], f"rows of a tensor of {name}")


def check_reads_slices(maker: Maker) -> None:
    tensors = _tensors()
    with maker.folder(tensors) as folder, maker.open(folder) as source:
        for name in ("model.embed.weight", "model.layers.0.down.weight", "experts", "conv"):
            for index in INDEXES:
                _require_equal(source.open_tensor(name)[index], tensors[name][index], f"{name}[{index}]")
        _require_equal(source.open_tensor("model.norm.weight")[2:5], tensors["model.norm.weight"][2:5], "a slice of a vector")
        opened = source.open_tensor("experts")
        for expert in range(3):  # one tensor, opened once and read in parts
            index = (slice(expert, expert + 1), slice(2, 9), slice(1, 6))
            _require_equal(opened[index], tensors["experts"][index], f"experts[{index}]")


def check_reads_in_any_order(maker: Maker) -> None:
    tensors = _tensors()
    with maker.folder(tensors) as folder, maker.open(folder) as source:
        for _ in range(2):
            for name in reversed(source.list_names()):
                _require_equal(source.open_tensor(name)[...], tensors[name], f"{name}, read again or in another order,")


def check_opens_two_checkpoints(maker: Maker) -> None:
    one = {"a": torch.ones(4, 4), "only.one": torch.ones(2)}
    other = {"a": torch.full((4, 4), 2.0)}
    with maker.folder(one) as first, maker.folder(other) as second, maker.open(first) as source, maker.open(second) as update:
        _require_equal(update.open_tensor("a")[...], other["a"], "the tensor of the second checkpoint")
        _require_equal(source.open_tensor("a")[...], one["a"], "the tensor of the first checkpoint")
        assert list(update.list_names()) == ["a"], "the second checkpoint has tensors of the first"
        if maker.capabilities.several_ranks:
            with maker.open(first) as rank:
                _require_equal(rank.open_tensor("a")[1:3], one["a"][1:3], "the tensor of a second rank")
            _require_equal(source.open_tensor("a")[...], one["a"], "a tensor after another rank's source was closed")


def check_reads_ahead(maker: Maker) -> None:
    tensors = _tensors() | {"half": torch.randn(9, 6).to(torch.bfloat16), "bytes": torch.arange(60).reshape(6, 10).to(torch.uint8)}
    rows: dict[str, slice | None] = {name: None for name in tensors if name != "model.norm.weight"}
    rows |= {"model.embed.weight": slice(4, 12), "experts": slice(1, 3)}
    with maker.folder(tensors) as folder, maker.open(folder) as source:
        for name, tensor in read_weights(source, ahead=ReadAhead(HOST, rows)):
            cut = rows.get(name)
            index: Any = Ellipsis if cut is None else (cut, slice(1, 4))
            _require_equal(tensor[index], tensors[name][index], f"{name}, read from find_range,")
            assert tuple(tensor.shape) == tuple(tensors[name].shape), f"the shape of {name}, read from find_range, differs"


def check_takes_many_tensors(maker: Maker) -> None:
    tensors = {f"model.layers.{number}.weight": torch.full((2, 2), float(number)) for number in range(1500)}
    with maker.folder(tensors) as folder, maker.open(folder) as source:
        values = {name: float(tensor[...].sum()) / 4 for name, tensor in read_weights(source)}
    wrong = [name for name, tensor in tensors.items() if values.get(name) != float(tensor[0, 0])]
    assert not wrong, f"{len(wrong)} of {len(tensors)} tensors are missing or wrong, such as {wrong[:1]}"


def check_refuses_an_empty_folder(maker: Maker) -> None:
    with maker.folder() as folder:
        _require_refused(maker, folder, "a folder without weights")


def check_refuses_a_damaged_checkpoint(maker: Maker) -> None:
    tensors = {"a": torch.randn(300, 100), "b": torch.randn(300, 100)}
    for keep in (0.9, 0.5, 0.0):
        with maker.folder(tensors) as folder:
            largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
            content = largest.read_bytes()
            largest.write_bytes(content[: int(len(content) * keep)])
            _require_refused(maker, folder, f"a checkpoint of which {keep:.0%} are there")


class _Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


def check_runs_no_pickle(maker: Maker) -> None:
    with maker.folder() as folder, maker.folder() as elsewhere:
        proof = elsewhere / "executed"
        for name in ("pytorch_model.bin", "weights.pt", "weights.pkl"):
            (folder / name).write_bytes(pickle.dumps({"a": _Payload(proof)}))
        torch.save({"a": _Payload(proof)}, folder / "consolidated.pth")
        with contextlib.suppress(CheckpointError), maker.open(folder) as source:
            _read_all(source)
        assert not proof.exists(), "the source unpickles a file of the checkpoint, which runs code"


# sources that make weights up ---------------------------------------------------------------------

SHAPES: Mapping[str, tuple[int, ...]] = {"model.embed.weight": (50, 40), "model.norm.weight": (40,), "experts": (3, 24, 40), "scale": ()}
INTEGERS: Mapping[str, torch.dtype] = {"quantized": torch.int32, "bytes": torch.uint8}


def _has_expected_shapes(maker: Maker) -> None:
    with maker.folder() as folder, maker.open(folder, shapes=SHAPES) as source:
        shapes = {name: tuple(source.open_tensor(name).shape) for name in source.list_names()}
        assert shapes == dict(SHAPES), "the names or shapes differ from those that the model expects"
        for name, shape in SHAPES.items():
            assert tuple(source.open_tensor(name)[...].shape) == shape, f"the values of {name} have another shape than it says"


def _agrees_between_ranks(maker: Maker) -> None:
    few = {"experts": SHAPES["experts"], "model.embed.weight": SHAPES["model.embed.weight"]}
    with maker.folder() as folder, maker.open(folder, shapes=SHAPES) as one, maker.open(folder, shapes=few) as other:
        for name in few:
            whole = one.open_tensor(name)[...].clone()
            _require_equal(other.open_tensor(name)[...], whole, f"{name} on another rank")
            _require_equal(other.open_tensor(name)[1:2], whole[1:2], f"a slice of {name} on another rank")
        assert not torch.equal(one.open_tensor("experts")[0:1], one.open_tensor("experts")[1:2]), "all rows of a tensor are equal"


def _depends_on_the_seed(maker: Maker) -> None:
    with maker.folder() as folder, maker.open(folder, 0, SHAPES) as one, maker.open(folder, 1, SHAPES) as other:
        name = "model.embed.weight"
        assert not torch.equal(one.open_tensor(name)[...], other.open_tensor(name)[...]), "two seeds have the same values"


def _makes_finite_values(maker: Maker) -> None:
    with maker.folder() as folder, maker.open(folder, shapes=SHAPES) as source:
        for name in source.list_names():
            value = source.open_tensor(name)[...].float()
            is_small = bool(torch.isfinite(value).all()) and float(value.abs().max()) < 1e3
            assert is_small, f"{name} has values that are large or not finite"


def _makes_integers(maker: Maker) -> None:
    shapes = dict.fromkeys(INTEGERS, (30, 40))
    with maker.folder() as folder, maker.open(folder, shapes=shapes) as one, maker.open(folder, shapes=shapes) as other:
        for name, dtype in INTEGERS.items():
            value = one.open_tensor(name)[...]
            assert value.dtype == dtype, f"a tensor of {dtype} has the dtype {value.dtype}"
            _require_equal(other.open_tensor(name)[...], value, f"{name} on another rank")


# helpers ------------------------------------------------------------------------------------------


def _read_all(source: WeightSource) -> None:
    for name in source.list_names():
        source.open_tensor(name)[...]


def _require_refused(maker: Maker, folder: Path, what: str) -> None:
    try:
        with maker.open(folder) as source:
            _read_all(source)
    except CheckpointError as error:
        assert "\n" not in str(error), f"the error for {what} has several lines"
        assert folder.name in str(error), f"the error for {what} does not name the folder or file: {error}"
        return
    raise AssertionError(f"{what} is not refused")


def _require_equal(result: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert result.dtype == expected.dtype, f"{what} have the dtype {result.dtype}, not {expected.dtype}"
    assert result.shape == expected.shape, f"{what} have the shape {tuple(result.shape)}, not {tuple(expected.shape)}"
    same = torch.equal(result.contiguous().reshape(-1).view(torch.uint8), expected.contiguous().reshape(-1).view(torch.uint8))
    assert same, f"{what} differ from what was written"
