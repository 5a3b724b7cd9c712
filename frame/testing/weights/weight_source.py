"""The conformance suite of weight sources: checkpoints with known values, read whole, in slices and
ahead; then broken and hostile ones. Must not know a plugin by name."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from frame.core.errors import CheckpointError
from frame.core.interfaces.platform import HOST
from frame.interfaces.weights import WeightSource, WeightSourceCapabilities, WeightSourceContext
from frame.loading.weight_reader import ReadAhead, read_weights
from frame.testing.conformance import Check, SkipCheck, Subject, collect
from frame.testing.generators import leaves_nothing, make_alike, require_fast, require_growth, require_unmapped

LARGE, ROOM = (1 << 31) + 4096, 10 << 30  # bytes of a tensor, and for its checkpoint, which a class may copy while it writes it
MAX_SECONDS = 1.5e-3  # of a small tensor
WRONG: tuple[Any, ...] = ({"x": [1]}, [[]], ["a"], "text", None, -1, 10**30, 0.5)  # in place of a value of a JSON file
CPU = torch.device("cpu")
DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
INDEXES: tuple[Any, ...] = (
    Ellipsis, slice(None), slice(3, 9), (slice(0, 1), slice(None)), (slice(None), slice(2, 5)), (slice(7, 12), slice(4, 7)), slice(0, 0),
)  # fmt: skip


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

    @property
    def writes_safetensors(self) -> bool:
        return getattr(self.target.write_checkpoint, "__func__", None) is WeightSource.write_checkpoint.__func__  # type: ignore[attr-defined]

    def write_files(self, folder: Path, tensors: Mapping[str, torch.Tensor], count: int) -> None:
        if "num_files" not in inspect.signature(self.target.write_checkpoint).parameters:
            raise SkipCheck("its write_checkpoint() takes no num_files: its checkpoints are single files")
        self.target.write_checkpoint(folder, tensors, num_files=count)

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
              "model.norm.weight": (8,), "rotary_emb.inv_freq": (4,), "experts": (3, 12, 7),
              "lm_head.weight": (20, 8), "conv": (2, 3, 4, 5)}  # fmt: skip
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
    odd = torch.tensor([-0.0, float("nan"), -float("inf"), 1e-40, -1e-6, 1e-3, 0.0, 0.0])  # some are subnormal
    for dtype in (each for each in DTYPES if each.is_floating_point):
        bits = torch.cat((torch.arange(256, dtype=torch.uint8), odd.to(dtype).view(torch.uint8))).view(dtype)
        tensors[f"{dtype}, bit for bit"] = bits.reshape(8, -1)
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
        if type(source).find_range is not WeightSource.find_range:
            assert any(source.find_range(name) is not None for name in tensors), "find_range finds no tensor, so that none is read ahead"
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


def check_real_sizes(maker: Maker) -> None:
    """A tensor above 16 MiB, by its ends and around the limit; integers above 2**53; a tensor
    without elements; and names that are equal in their first 128 characters."""
    large = torch.arange((1 << 22) + 3001, dtype=torch.float32).view(-1, 5)
    numbers = torch.tensor([[2**53 + 1, -(2**62) - 1], [2**63 - 1, 5]])
    tensors = {"large": large, "numbers": numbers, "empty": torch.zeros(0, 8)}
    for number, pair in enumerate(make_alike(fill="m")):
        tensors |= {name: torch.full((3, 3), 2.0 * number + which) for which, name in enumerate(pair)}
    with maker.folder(tensors) as folder, maker.open(folder) as source:
        opened, last = source.open_tensor("large"), len(large)
        for rows in (slice(0, 3), slice((1 << 22) // 5 - 3, (1 << 22) // 5 + 3), slice(last - 3, last)):
            _require_equal(opened[rows], large[rows], f"rows {rows.start} to {rows.stop} of a tensor of 16 MiB")
        _require_equal(opened[...][-3:], large[-3:], "the end of a whole tensor of 16 MiB")
        _require_equal(source.open_tensor("numbers")[...], numbers, "integers above 2**53")
        for rows in (slice(None), slice(0, 0)):
            _require_equal(source.open_tensor("empty")[rows], tensors["empty"], "a tensor without elements")
        for name in tensors.keys() - {"large", "empty"}:
            _require_equal(source.open_tensor(name)[...], tensors[name], f"{name}, which begins as another name does,")
        for name, tensor in read_weights(source, ahead=ReadAhead(HOST, {"large": None, "numbers": None})):
            if name in ("large", "numbers"):
                _require_equal(tensor[-3:], tensors[name][-3:], f"the end of {name}, read from find_range,")


def check_files_above_2_gib(maker: Maker) -> None:
    """A tensor behind more than 2**31 bytes of its file, and the end of the one before it."""
    if min(psutil.virtual_memory().available, shutil.disk_usage(tempfile.gettempdir()).free) < ROOM:
        raise SkipCheck(f"it needs {ROOM >> 30} GiB of memory and of the disk")
    with tempfile.NamedTemporaryFile() as file, maker.folder() as folder:
        file.truncate(LARGE)
        large = torch.from_file(file.name, shared=True, size=LARGE, dtype=torch.uint8).view(-1, 1 << 12)
        large[-1] = 7
        tensors = {"a.large": large, "b.behind": torch.arange(200, dtype=torch.uint8).view(10, 20)}
        maker.target.write_checkpoint(folder, tensors)
        with maker.open(folder) as source:
            _require_equal(source.open_tensor("b.behind")[...], tensors["b.behind"], "a tensor behind 2 GiB of its file")
            _require_equal(source.open_tensor("a.large")[-2:], large[-2:].clone(), "the last rows of a tensor of 2 GiB")


def check_reads_several_files(maker: Maker) -> None:
    """A large checkpoint is divided into files. Tensors of one file are read beside those of
    another, whole, in slices and ahead."""
    tensors = _tensors() | {"numbers": torch.arange(12).view(3, 4)}
    with maker.folder() as folder:
        maker.write_files(folder, tensors, 3)
        with maker.open(folder) as source:
            names = list(source.list_names())
            assert len(names) == len(set(names)) == len(tensors), f"of {len(tensors)} tensors in 3 files, {len(names)} are listed"
            opened = {name: source.open_tensor(name) for name in names}
            for name, tensor in tensors.items():
                _require_equal(opened[name][...], tensor, f"the values of {name}, in one of several files,")
            for name, read in read_weights(source, ahead=ReadAhead(HOST, dict.fromkeys(tensors))):
                _require_equal(read[...], tensors[name], f"the values of {name}, read ahead from one of several files,")


def check_long_names_of_files(maker: Maker) -> None:
    """A shard's name may have as many characters as the file system allows."""
    if not maker.writes_safetensors:
        raise SkipCheck("its checkpoints have no safetensors index")
    tensors = _tensors()
    with maker.folder() as folder:
        maker.write_files(folder, tensors, 2)
        index, old = folder / "model.safetensors.index.json", "model-00002-of-00002.safetensors"
        new = "n" * (255 - len(".safetensors")) + ".safetensors"
        (folder / old).rename(folder / new)
        index.write_text(index.read_text().replace(old, new))
        with maker.open(folder) as source:
            for name, tensor in tensors.items():
                _require_equal(source.open_tensor(name)[...], tensor, f"{name}, of files with long names,")


def check_refuses_an_incomplete_checkpoint(maker: Maker) -> None:
    """Of three files one is missing, or damaged; of the tensors of an index one is in no file; the
    index is damaged, or names a file elsewhere."""
    tensors = _tensors()
    for what in ("a checkpoint of which a file is missing", "a checkpoint of which a file is damaged"):
        with maker.folder() as folder:
            maker.write_files(folder, tensors, 3)
            last = max(path for path in folder.iterdir() if path.suffix != ".json")
            if what.endswith("missing"):
                last.unlink()
            else:
                last.write_bytes(last.read_bytes()[:60])
            _require_refused(maker, folder, what)
    if not maker.writes_safetensors:
        return  # there is no safetensors index
    with maker.folder({"a": torch.ones(2), "b": torch.ones(2)}) as folder:
        (file,) = folder.iterdir()
        file.write_bytes(file.read_bytes().replace(b'"F32"', b'"Q32"', 1))
        _require_refused(maker, folder, "a checkpoint with a tensor of an unknown type")
    with maker.folder(tensors) as other, maker.folder() as folder:
        maker.write_files(folder, tensors, 2)
        index = folder / "model.safetensors.index.json"
        right = json.loads(index.read_text())
        for what, wrong in _list_wrong_indexes(right, other):
            index.write_text(wrong)
            _require_refused(maker, folder, what)


def _list_wrong_indexes(right: dict[str, Any], other: Path) -> Iterator[tuple[str, str]]:
    files = right["weight_map"]
    for extra in (
        {"more": "model-00002-of-00002.safetensors"},
        {"more": "model-00002-of-00002.safetensors", "most": "model-00001-of-00002.safetensors"},
    ):
        yield f"an index of {len(extra)} tensor(s) that no file has", json.dumps({**right, "weight_map": files | extra})
    outside = (f"../{other.name}/model.safetensors", str(other / "model.safetensors"), "n" * 300, "..", "")
    for name in outside:
        yield f"an index of a file {name:.40}", json.dumps({**right, "weight_map": files | {"model.norm.weight": name}})
    for text in ("", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": null}}', "[" * 100_000):
        yield f"an index with the text {text:.20}", text


def check_a_folder_with_another_checkpoint(maker: Maker) -> None:
    """A source reads what is in the folder when it opens it."""
    with maker.folder({"a": torch.zeros(3, 4), "old": torch.ones(2)}) as folder:
        with maker.open(folder) as source:
            _read_all(source)
        for path in folder.iterdir():
            path.unlink()
        new = {"new": torch.ones(5), "a": torch.full((4, 4), 7.0)}
        maker.target.write_checkpoint(folder, new)
        with maker.open(folder) as source:
            assert set(source.list_names()) == set(new), "a folder that has another checkpoint now has the tensors of the old one"
            _require_equal(source.open_tensor("a")[...], new["a"], "a tensor of a folder that has another checkpoint now")


def check_descriptions_are_not_trusted(maker: Maker) -> None:
    """JSON files of a checkpoint with wrong values are read, or refused with a sentence. A name of
    a file does not lead out of the folder."""
    tensors = {"a": torch.ones(3, 4), "b": torch.ones(2)}
    with maker.folder(tensors) as folder, maker.folder(tensors) as other:
        for path in (path for path in folder.rglob("*.json") if path.is_file()):
            text = path.read_text()
            names = {each.name for each in folder.iterdir()}
            for place, value in _list_leaves(json.loads(text)):
                outside = [f"../{other.name}/{value}", str(other / value)] if isinstance(value, str) and value in names else []
                for wrong in (*outside, *WRONG):
                    path.write_text(json.dumps(_replace(json.loads(text), place, wrong)))
                    try:
                        with maker.open(folder) as source:
                            _read_all(source)
                    except CheckpointError:
                        continue
                    except Exception as error:
                        where = f"{path.name} with {wrong!r:.40} at {'.'.join(map(str, place))}"
                        raise AssertionError(f"{where} raises {type(error).__name__}, not CheckpointError: {error}") from error
                    assert wrong not in outside, f"{path.name} names the file {wrong}, which is read"
            path.write_text(text)


def _list_leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(keys, value) of each value of a JSON document, its lists and objects included."""
    if place:
        yield place, value
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _list_leaves(part, (*place, key))


def _replace(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return document


def check_slices_are_read_alone(maker: Maker) -> None:
    """A rank reads its rows of a tensor of 64 MiB, and not the whole of it."""
    with maker.folder({"small": torch.zeros(1 << 10, 16), "large": torch.zeros(1 << 20, 16)}) as folder, maker.open(folder) as source:

        def make(rows: int) -> Callable[[], object]:
            return lambda: source.open_tensor("large" if rows > 1 << 10 else "small")[5:8]

        require_growth(make, 1 << 10, 1 << 20, "three rows of a tensor, whose size is its rows", factor=20.0)


def check_values_are_kept(maker: Maker) -> None:
    """What was read stays as it is when other tensors and slices of the same form are read."""
    tensors = _tensors()
    up, down = "model.layers.0.up.weight", "model.layers.0.down.weight"
    with maker.folder(tensors) as folder, maker.open(folder) as source:
        first = source.open_tensor(up)
        kept = [first[2:6], first[8:12], source.open_tensor(down)[2:6]]
        for result, expected in zip(kept, (tensors[up][2:6], tensors[up][8:12], tensors[down][2:6]), strict=True):
            _require_equal(result, expected, "values that were read before others of the same form")


def check_folders_of_one_name(maker: Maker) -> None:
    """Two checkpoints whose folders have one name in different places."""
    with maker.folder() as first, maker.folder() as second:
        for number, parent in enumerate((first, second)):
            folder = parent / "model"
            folder.mkdir()
            maker.target.write_checkpoint(folder, {"a": torch.full((2, 2), float(number))})
            with maker.open(folder) as source:
                _require_equal(
                    source.open_tensor("a")[...], torch.full((2, 2), float(number)), "a tensor of the second of two folders 'model'"
                )


def check_leaves_nothing(maker: Maker) -> None:
    with maker.folder(_tensors()) as folder:
        with maker.open(folder) as source:  # what a source loads once
            _read_all(source)
        with leaves_nothing("a source that was closed"), maker.open(folder) as source:
            _read_all(source)
        require_unmapped(folder, "a source that was closed")
        del source
        gc.collect()


def check_opening_is_fast(maker: Maker) -> None:
    """A checkpoint has thousands of tensors."""
    with maker.folder({"a": torch.ones(2, 2)}) as folder, maker.open(folder) as source:
        source.open_tensor("a")[...]
        require_fast(lambda: source.open_tensor("a")[...], MAX_SECONDS, "a tensor of 2 x 2", calls=40)


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
