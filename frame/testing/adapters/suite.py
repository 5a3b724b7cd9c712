"""The conformance suite of adapter formats: generated adapters come back as they were written, and
what is hostile, broken or unknown is refused. Must not know a plugin by name.

The suite sees `read_config` and `read_deltas`. Its adapters have random factors for the layers
`frame.testing.adapters.files.LAYERS`: ranks from 1 to 300, one for all layers or one for each;
scales of their own; float32, float16 and bfloat16; experts one by one and stacked (12); names
with 64 equal letters. The class's `write_conformance_adapter(config, deltas)` writes them in the
format: it returns the content of adapter_config.json and the tensors, and raises
NotImplementedError for what the format cannot store. For a class without it, the suite writes
PEFT's files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch

from frame.interfaces.adapter import AdapterCapabilities, AdapterConfig, AdapterError, LowRankDelta
from frame.testing.adapters.files import ATTENTION, LAYERS, MLP, Maker, StoredTensor, Written
from frame.testing.conformance import Check, SkipCheck, Subject, collect
from frame.testing.generators import require_bounded, require_fast

ONE = {"model.layers.0.self_attn.q_proj": (24, 24)}
EXPERTS = {f"model.layers.3.mlp.experts.{expert}.{name}": sizes for expert in range(12) for name, sizes in MLP.items()}
STACKED = {"model.layers.3.mlp.experts.gate_up_proj": (24, 80), "model.layers.3.mlp.experts.down_proj": (40, 24)}
NEUTRAL = {"task_type": "CAUSAL_LM", "peft_version": "0.19.0", "inference_mode": True, "revision": None}  # which PEFT writes too
LARGEST = torch.finfo(torch.float32).max
MAX_SECONDS = 0.015  # of an adapter of one layer
NUMBERS = (-1, 0, 10**400, 0.5, 1e300, float("inf"), float("nan"), True, False)
HOSTILE: tuple[Any, ...] = ({"x": [1]}, {"": None}, [[]], ["a"], "text", "", None, *NUMBERS)


def suite(subject: Subject) -> Iterator[Check]:
    """`adapter/1`."""
    yield from collect(__name__, Maker(subject))


def _compare(got: Mapping[str, LowRankDelta], written: Written, what: str = "") -> None:
    """Raise AssertionError unless the deltas are those that were written."""
    expected = written.deltas
    assert got.keys() == expected.keys(), f"{what}the deltas of {min(got.keys() ^ expected.keys())} are missing or surplus"
    for name, delta in expected.items():
        _check_form(f"{what}{name}", got[name], delta, written.config.rank)
        products = [one.scale * one.b.double() @ one.a.double() for one in (got[name], delta)]
        error = float((products[0] - products[1]).abs().max() / products[1].abs().max().clamp(min=1e-30))
        assert error < 1e-5, f"{what}{name}: the product differs by {error:.1e} of its largest value"  # False for NaN
        for field in ("output_scale", "output_norm"):
            rows = [getattr(one, field) for one in (got[name], delta)]
            assert (rows[0] is None) == (rows[1] is None), f"{what}{name}: {field} is missing or surplus"
            assert rows[1] is None or torch.allclose(rows[0].float(), rows[1].float()), f"{what}{name}: {field} differs"


def _compare_config(maker: Maker, written: Written) -> None:
    got = maker.create().read_config(written.stored)
    assert isinstance(got, AdapterConfig), f"read_config returns {type(got).__name__}"
    assert got == written.config, f"the configuration is {got}, not {written.config}"


def _check_form(where: str, got: LowRankDelta, expected: LowRankDelta, rank: int) -> None:
    assert got.a.shape[-2] == got.b.shape[-1] <= rank, f"{where}: a has {got.a.shape[-2]} ranks, b {got.b.shape[-1]}, the adapter {rank}"
    for side in ("a", "b"):
        one, other = getattr(got, side), getattr(expected, side)
        assert one.dtype in (other.dtype, torch.float32), f"{where}: {side} has the dtype {one.dtype}, and {other.dtype} is stored"
        assert one.dim() == other.dim(), f"{where}: {side} has {one.dim()} dimensions"
    sizes = [(one.b.shape[-2], one.a.shape[-1]) for one in (got, expected)]
    assert sizes[0] == sizes[1], f"{where}: outputs and inputs are {sizes[0]}, not {sizes[1]}"


def _refuse(maker: Maker, stored: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], what: str) -> str:
    """The sentence of the AdapterError that reading raises."""
    try:
        maker.create().read_config(stored)
        maker.read(stored, tensors)
    except AdapterError as error:
        sentence = str(error)
        assert 10 < len(sentence) < 1000, f"{what}: the error is no sentence: {sentence!r:.200}"
        assert "\n" not in sentence, f"{what}: the error has several lines"
        return sentence
    raise AssertionError(f"{what} is read without an AdapterError")


def check_capabilities_select_the_format(maker: Maker) -> None:
    if not maker.selects:
        raise SkipCheck("the record has no AdapterCapabilities")
    can = AdapterCapabilities(tuple(maker.selects.items()))
    assert can.reads(maker.make(ONE).stored), "the record's capabilities do not select the adapters of the format"
    assert not can.reads({}), "the record's capabilities select any adapter"


def check_configuration_is_read(maker: Maker) -> None:
    for base_model in ("org/base", "", "/folder/ö"):
        _compare_config(maker, maker.make(ranks=(9,), base_model=base_model))


def check_invocation_is_read(maker: Maker) -> None:
    """Of two adapters that are equal otherwise."""
    target = maker.create()
    for tokens in ((7,), (5, 0, 5, 100_000)):
        written = maker.make(ONE, invocation=tokens)
        assert target.read_config(written.stored).invocation == tokens, f"the invocation {tokens} is not read"


def check_deltas_are_those_written(maker: Maker) -> None:
    for rank in (1, 4, 17, 300):
        written = maker.make(ranks=(rank,))
        _compare_config(maker, written)
        _compare(maker.read(written.stored, written.tensors), written, f"rank {rank}: ")


def check_layers_have_ranks_and_scales_of_their_own(maker: Maker) -> None:
    similar = {f"model.layers.1.mlp.{name}": MLP["up_proj"] for name in ("shared.up_proj", "fused_up_proj", "up_proj.up_proj")}
    written = maker.make(similar | LAYERS, ranks=(2, 5, 1), scales=(2.0, 0.5, 0.3, -3.0))
    _compare_config(maker, written)
    _compare(maker.read(written.stored, written.tensors), written)


def check_layers_that_are_off(maker: Maker) -> None:
    """A scale of 0, first, last and alone."""
    for scales in ((0.0, 2.0), (2.0, 0.0), (0.0,)):
        written = maker.make(ranks=(3, 4), scales=scales)
        _compare(maker.read(written.stored, written.tensors), written, f"scales {scales}: ")


def check_options_that_are_absent(maker: Maker) -> None:
    """Of PEFT's files: an option that is absent has PEFT's default, and one that is null is not
    used."""
    if not maker.is_peft:
        raise SkipCheck("the format has a configuration of its own")
    nulls: tuple[dict[str, Any], ...] = ({}, {"rank_pattern": None}, {"alpha_pattern": None}, {"rank_pattern": {}, "alpha_pattern": {}})
    for rank in (4, 8, 12):
        written = maker.make(ranks=(rank,), scales=(8 / rank,))
        plain = {key: value for key, value in written.stored.items() if not key.endswith("_pattern")} | {"r": rank, "lora_alpha": 8}
        defaults = {"lora_alpha", "lora_dropout", "bias", "use_rslora", "fan_in_fan_out"} | ({"r"} if rank == 8 else set())
        for absent in (set(), {"lora_alpha"}, defaults):
            stored = {key: value for key, value in plain.items() if key not in absent}
            for null in nulls:
                _compare(maker.read(stored | null, written.tensors), written, f"rank {rank} with {null} and without {sorted(absent)}: ")
                assert maker.create().read_config(stored | null) == written.config, f"without {sorted(absent)} the configuration is another"


def check_factors_of_rows(maker: Maker) -> None:
    """Norms or factors of the rows, where the format has them besides plain deltas."""
    others = maker.row_factors[1:]
    if not others:
        raise SkipCheck("the format has one kind of deltas")
    for rows in others:
        written = maker.make(ranks=(3, 5), rows=rows)
        _compare(maker.read(written.stored, written.tensors), written, f"with {rows}: ")


def check_heads(maker: Maker) -> None:
    written = maker.make({"lm_head": (24, 50), **ONE})
    _compare(maker.read(written.stored, written.tensors), written)


def check_embeddings(maker: Maker) -> None:
    written = maker.make({"model.embed_tokens": (24, 50), **ONE})
    _compare(maker.read(written.stored, written.tensors), written)


def check_experts_one_by_one(maker: Maker) -> None:
    written = maker.make(EXPERTS)
    _compare(maker.read(written.stored, written.tensors), written)


def check_stacked_experts(maker: Maker) -> None:
    other_first = {name: STACKED[name] for name in reversed(STACKED)}
    for layers in (STACKED, other_first, dict(list(STACKED.items())[1:])):
        for ranks in ((3, 2), (12,)):  # 12: as many as there are experts
            written = maker.make(layers, ranks=ranks, scales=(0.5, 2.0), experts=12)
            _compare(maker.read(written.stored, written.tensors), written, f"experts of ranks {ranks}: ")


def check_many_experts(maker: Maker) -> None:
    written = maker.make(STACKED, ranks=(2,), experts=130)
    _compare(maker.read(written.stored, written.tensors), written, "130 experts: ")


def check_reading_keeps_nothing(maker: Maker) -> None:
    """A server reads adapters of many users, at once and one after the other."""
    written, one = maker.make(ONE), maker.create()

    def work(number: int) -> None:
        one.read_config(maker.make(ONE, base_model=f"user-{number}").stored if number % 50 == 0 else written.stored)
        list(one.read_deltas(written.stored, {name: StoredTensor(tensor) for name, tensor in written.tensors.items()}))

    require_bounded(one, work, 600, "adapters that were read")


def check_reading_is_fast(maker: Maker) -> None:
    written, one = maker.make(ONE), maker.create()
    tensors = {name: StoredTensor(tensor) for name, tensor in written.tensors.items()}
    require_fast(lambda: list(one.read_deltas(written.stored, tensors)), MAX_SECONDS, "reading an adapter of one layer")


def check_long_names_are_apart(maker: Maker) -> None:
    middle = f"model.{'language_' * 8}.layers"
    names = [f"{start}.{middle}.{layer}.self_attn" for start in ("encoder", "decoder") for layer in (1, 11, 111)]
    written = maker.make({f"{start}.{name}": sizes for start in names for name, sizes in ATTENTION.items()})
    _compare(maker.read(written.stored, written.tensors), written)


def check_values_are_those_stored(maker: Maker) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for model in (torch.bfloat16, torch.float16, torch.float32):
            written = maker.make(dtype=dtype)
            _compare(maker.read(written.stored, written.tensors, maker.create(model)), written, f"{dtype} for a model in {model}: ")
        written = maker.make(ONE, dtype=dtype, rows_dtype=torch.float32)
        _compare(maker.read(written.stored, written.tensors, maker.create(dtype)), written, f"{dtype} with rows in float32: ")


def check_large_values_are_kept(maker: Maker) -> None:
    """Factors of a million, and of a millionth."""
    for size in (1e6, 1e-6):
        written = maker.make(ONE, size=size)
        _compare(maker.read(written.stored, written.tensors), written, f"factors of {size:g}: ")


def check_order_does_not_matter(maker: Maker) -> None:
    written = maker.make(LAYERS | EXPERTS)
    names = list(written.tensors)
    for seed in range(3):
        order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist()
        stored = dict(reversed(written.stored.items()))
        _compare(maker.read(stored, {names[place]: written.tensors[names[place]] for place in order}), written, "in another order: ")


def check_adapters_are_apart(maker: Maker) -> None:
    first, second, third = maker.make(seed=1), maker.make(seed=2, ranks=(6,), scales=(0.3,)), maker.make(seed=3)
    target = maker.create()
    readers = [
        target.read_deltas(one.stored, {name: StoredTensor(value) for name, value in one.tensors.items()}) for one in (first, second)
    ]
    in_turn = [list(pair) for pair in zip(*readers, strict=True)]
    for place, written in enumerate((first, second)):
        _compare(dict(pair[place] for pair in in_turn), written, "of two adapters that are read in turn: ")
    for written in (third, second, first):
        assert target.read_config(written.stored) == written.config, "the configuration is another after those of other adapters"
    for written in (third, first):
        target.read_config(second.stored)
        _compare(maker.read(written.stored, written.tensors, target), written, "read after others: ")


def check_a_configuration_that_changes(maker: Maker) -> None:
    """What the caller changes in place, or frees, counts no more."""
    target, stored, tensors = maker.create(), dict[str, Any](), dict[str, torch.Tensor]()
    for seed, rank in enumerate((4, 6, 4)):
        written = maker.make(ONE, seed=seed, ranks=(rank,), scales=(0.5 + seed,))
        for kept, new in ((stored, written.stored), (tensors, written.tensors)):
            kept.clear()
            kept.update(new)
        assert target.read_config(stored) == written.config, "a configuration that has changed in place is read as it was before"
        _compare(maker.read(stored, tensors, target), written, "after the arguments have changed in place: ")


def check_arguments_stay_as_they_are(maker: Maker) -> None:
    written = maker.make()
    before = {**written.stored, **(NEUTRAL if maker.is_peft else {})}
    stored, tensors = deepcopy(before), {name: value.clone() for name, value in written.tensors.items()}
    maker.create().read_config(stored)
    maker.read(stored, tensors)
    assert stored == before, "the configuration is changed"
    assert list(stored) == list(before), "the order of the configuration is changed"
    for name, value in tensors.items():
        assert torch.equal(value, written.tensors[name]), f"{name} is changed"


def check_unknown_options_are_refused(maker: Maker) -> None:
    written = maker.make(ONE)
    for value in (3, "text", True, {"a": 1}, [1]):
        sentence = _refuse(maker, written.stored | {"conformance_option": value}, written.tensors, f"an unknown option of value {value!r}")
        assert "conformance_option" in sentence, f"the error does not name the option: {sentence}"


def check_unknown_tensors_are_refused(maker: Maker) -> None:
    written = maker.make(ONE)
    first = next(iter(written.tensors))
    for name in ("conformance", f"{first}.conformance", f"{first}_conformance", "model.layers.7.mlp.up_proj.weight", "model.norm.bias"):
        sentence = _refuse(maker, written.stored, {**written.tensors, name: torch.ones(24, 24)}, f"the unknown tensor {name}")
        assert name in sentence, f"the error does not name the tensor {name}: {sentence}"


def check_missing_tensors_are_refused(maker: Maker) -> None:
    written = maker.make(ONE)
    _refuse(maker, written.stored, {}, "an adapter without tensors")
    if len(written.tensors) == 1:
        raise SkipCheck("the format has one tensor for each layer")
    for name in written.tensors:
        _refuse(maker, written.stored, {other: value for other, value in written.tensors.items() if other != name}, f"without {name}, it")


def check_wrong_shapes_are_refused(maker: Maker) -> None:
    """A shorter tensor is refused, or is that of a smaller layer."""
    written = maker.make(ONE, ranks=(5,))
    for name, value in written.tensors.items():
        shorter = [value.narrow(dim, 0, size - 1) for dim, size in enumerate(value.shape)]
        for other in (*shorter, value[None], value.flatten()[0], value.flatten()[:0]):
            try:
                deltas = maker.read(written.stored, written.tensors | {name: other})
            except AdapterError:
                continue
            for delta in deltas.values():
                where = f"{name} of shape {list(other.shape)}"
                assert delta.a.dim() == delta.b.dim() == 2, f"{where} gives deltas of other dimensions"
                assert delta.a.shape[0] == delta.b.shape[1] == 5, f"{where} gives {delta.a.shape[0]} and {delta.b.shape[1]} ranks, not 5"
                rows = [row for row in (delta.output_scale, delta.output_norm) if row is not None]
                assert all(row.shape == delta.b.shape[:1] for row in rows), f"{where} gives rows of other sizes"


def check_wrong_ranks_are_refused(maker: Maker) -> None:
    small, large = maker.make(ONE, ranks=(3,)), maker.make(ONE, ranks=(6,))
    _refuse(maker, small.stored, large.tensors, "an adapter of rank 6 whose configuration says 3")


def check_values_that_are_not_finite_are_refused(maker: Maker) -> None:
    written = maker.make(ONE)
    for name, value in written.tensors.items():
        for wrong, place in ((float("nan"), 0), (float("nan"), -1), (float("inf"), 0), (-float("inf"), -1)):
            broken = value.clone()
            broken.view(-1)[place] = wrong
            sentence = _refuse(maker, written.stored, written.tensors | {name: broken}, f"{name} with {wrong}")
            assert name in sentence, f"the error does not name the tensor {name}: {sentence}"


def check_wrong_types_raise_adapter_errors(maker: Maker) -> None:
    """A value of another type is read, or refused with AdapterError; each scale is a float32."""
    written = maker.make(ONE)
    inner = {key: next(iter(value)) for key, value in written.stored.items() if isinstance(value, dict) and value}
    cases = [(key, wrong) for key in written.stored for wrong in HOSTILE]
    cases += [(key, written.stored[key] | {first: wrong}) for key, first in inner.items() for wrong in HOSTILE]
    for key, wrong in cases:
        try:
            maker.create().read_config(written.stored | {key: wrong})
            scales = [delta.scale for delta in maker.read(written.stored | {key: wrong}, written.tensors).values()]
        except AdapterError as error:
            assert "\n" not in str(error), f"{key}: {wrong!r:.50} raises an error of several lines"
        except Exception as error:
            raise AssertionError(f"{key}: {wrong!r:.50} raises {type(error).__name__}: {error}") from error
        else:
            assert all(abs(scale) <= LARGEST for scale in scales), f"{key}: {wrong!r:.50} gives the scale {scales[0]}, which is no float32"
