"""`attention.backend`: a name, a pair, or `auto` by rank and by measured speed; each refusal says
why."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pydantic import ValidationError

from frame.config.resolve import ResolveError, pinned, resolve
from frame.config.schema import FrameConfig
from frame.core.interfaces.attention import AttentionCapabilities, Measured
from frame.core.interfaces.plugin import PluginRecord
from frame.plugins.loader import load_registry
from tests.config.test_resolve import H200, LAPTOP, LLAMA, config, names, record, records

CARD = ("NVIDIA H200", (9, 0))


def backend(name: str, rank: int = 0, **can: Any) -> PluginRecord:
    return record("attention_backend", name, AttentionCapabilities(("cpu", "cuda"), **can), rank=rank)


def speeds(extend: float, decode: float) -> tuple[Measured, ...]:
    return Measured(*CARD, "mha", "extend", extend), Measured(*CARD, "mha", "decode", decode)


def chosen(*backends: PluginRecord, wanted: object = None, hardware: Any = H200) -> Any:
    return resolve(config(attention={"backend": wanted}), hardware, LLAMA, records(attention_backend=list(backends)))


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("auto", None),
        ("a", "a"),
        ({"prefill": "a", "decode": "b"}, "prefill=a,decode=b"),
        ("decode=b, prefill=a", "prefill=a,decode=b"),
        ({"prefill": "a", "decode": "a"}, "a"),
        ({"decode": "b"}, "decode=b"),
        ({"prefill": "auto", "decode": "b"}, "decode=b"),
        ({"prefill": None}, None),
    ],
)
def test_accepted_values(value: object, kept: str | None) -> None:
    assert FrameConfig.model_validate({"attention": {"backend": value}}).attention.backend == kept


@pytest.mark.parametrize("value", ["prefill=", "verify=a", "prefill=a,prefill=b", {"extend": "a"}, 7])
def test_rejected_values(value: object) -> None:
    with pytest.raises(ValidationError):
        FrameConfig.model_validate({"attention": {"backend": value}})


def test_a_pair_lists_prefill_first_and_survives_pinning() -> None:
    known = [backend("a", page_sizes=(16, 64)), backend("b", page_sizes=(64, 128)), backend("c", rank=9)]
    resolved = chosen(*known, wanted={"prefill": "a", "decode": "b"})
    assert names(resolved)["attention_backend"] == ["a", "b"]
    assert resolved.page_size == 64
    assert "attention.backend" not in resolved.reasons
    again = pinned(resolved)
    assert again.attention.backend == "prefill=a,decode=b"
    assert resolve(again, H200, LLAMA, records(attention_backend=known)).plugins == resolved.plugins


def test_an_open_phase_is_chosen() -> None:
    resolved = chosen(backend("a"), backend("b", rank=5), wanted={"decode": "a"})
    assert names(resolved)["attention_backend"] == ["b", "a"]
    assert resolved.reasons["attention.backend"] == "prefill: b is the best-ranked of 2 that fit; decode: a is set by the user"


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"layout": "paged_nhd"}, {"layout": "paged_hnd"}, "their caches differ: paged_nhd and paged_hnd"),
        ({"stores_kv": True}, {}, "one of them writes K and V itself"),
        ({"page_sizes": (16,)}, {"page_sizes": (64,)}, "they support no common page size"),
    ],
)
def test_a_pair_that_cannot_share_a_cache_is_refused(one: dict[str, Any], other: dict[str, Any], words: str) -> None:
    with pytest.raises(ResolveError, match=words):
        chosen(backend("a", **one), backend("b", **other), wanted={"prefill": "a", "decode": "b"})


def test_a_backend_for_one_phase_needs_a_second_one() -> None:
    decodes = backend("latent_decode", rank=9, phases=("decode",))
    with pytest.raises(ResolveError, match="does not compute prompts; name another backend for them as well"):
        chosen(decodes, backend("plain"), wanted="latent_decode")
    resolved = chosen(decodes, backend("plain"))
    assert names(resolved)["attention_backend"] == ["plain", "latent_decode"]


def test_a_pair_records_rejected_backends() -> None:
    can = {"a": speeds(300, 4.1), "b": speeds(550, 3.6)}
    others = backend("old", compute_capability=((7, 0), (8, 0)))
    resolved = chosen(*(backend(name, rank=9, measured=measured) for name, measured in can.items()), others)
    assert names(resolved)["attention_backend"] == ["b", "a"]
    assert list(resolved.rejected["attention.backend"]) == ["old"]


def test_an_unknown_name_in_a_pair_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ResolveError, match="names an unknown attention_backend 'tritn'; did you mean 'triton'"):
        chosen(backend("triton"), wanted={"prefill": "triton", "decode": "tritn"})


def test_auto_takes_the_faster_measured_backend_of_each_phase() -> None:
    known = [backend("a", rank=9, measured=speeds(300, 4.1)), backend("b", measured=speeds(550, 3.6))]
    resolved = chosen(*known)
    assert names(resolved)["attention_backend"] == ["b", "a"]
    said = resolved.reasons["attention.backend"]
    assert "prefill: b is the fastest as measured on this card (NVIDIA H200), in TFLOP/s: b 550, a 300" in said
    assert "decode: a is the fastest as measured on this card (NVIDIA H200), in TB/s: a 4.1, b 3.6" in said


def test_auto_uses_ranks_without_measurements() -> None:
    known = [backend("a", rank=9, measured=speeds(300, 4.1)), backend("b", measured=speeds(550, 3.6))]
    assert names(chosen(*known, hardware=LAPTOP))["attention_backend"] == ["a"]
    new = backend("new", rank=10)
    assert names(chosen(*known, new))["attention_backend"] == ["new"]
    low = dataclasses.replace(new, rank=1)
    assert names(chosen(*known, low))["attention_backend"] == ["b", "a"]


def test_measurements_with_the_models_head_group_are_preferred() -> None:
    """LLAMA has 2 query heads for each KV head."""
    of_group = (Measured(*CARD, "mha", "decode", 9.0, group=2), *speeds(300, 1.0))
    resolved = chosen(backend("a", measured=of_group), backend("b", measured=speeds(200, 2.0)))
    assert names(resolved)["attention_backend"] == ["a"]
    of_another = (Measured(*CARD, "mha", "decode", 9.0, group=5), *speeds(300, 1.0))
    resolved = chosen(backend("a", measured=of_another), backend("b", measured=speeds(200, 2.0)))
    assert names(resolved)["attention_backend"] == ["a", "b"]


def test_measurements_apply_to_their_cache_dtype_only() -> None:
    known = [
        backend("a", rank=9, measured=speeds(300, 4.1), kv_dtypes=("fp8_e4m3",)),
        backend("b", measured=speeds(550, 3.6), kv_dtypes=("fp8_e4m3",)),
    ]
    resolved = resolve(config(cache={"kv_dtype": "fp8_e4m3"}), H200, LLAMA, records(attention_backend=known))
    assert names(resolved)["attention_backend"] == ["a"]


def test_auto_is_one_backend_if_it_is_the_fastest_for_both_phases() -> None:
    resolved = chosen(backend("a", rank=9, measured=speeds(300, 3)), backend("b", measured=speeds(550, 4)))
    assert names(resolved)["attention_backend"] == ["b"]
    assert resolved.reasons["attention.backend"].startswith("b is the fastest")


def test_measurements_of_another_card_with_the_same_capability_are_named_as_such() -> None:
    h100 = dataclasses.replace(H200, accelerators=tuple(dataclasses.replace(a, name="NVIDIA H100 80GB HBM3") for a in H200.accelerators))
    known = [backend("a", rank=9, measured=speeds(300, 4.1)), backend("b", measured=speeds(550, 3.6))]
    said = chosen(*known, hardware=h100).reasons["attention.backend"]
    assert "as measured on NVIDIA H200, a card of the same compute capability, in TFLOP/s: b 550, a 300" in said
    other_card = Measured("NVIDIA H100 80GB HBM3", (9, 0), "mha", "extend", 700)
    alone = [backend("a", rank=9, measured=(other_card, *speeds(300, 4.1))), known[1]]
    assert names(chosen(*alone, hardware=h100))["attention_backend"] == ["b", "a"], "a figure that has no other beside it decides nothing"
    both = [alone[0], backend("b", measured=(dataclasses.replace(other_card, speed=600), *speeds(550, 3.6)))]
    assert names(chosen(*both, hardware=h100))["attention_backend"] == ["a"]


def test_auto_prefers_measured_backends() -> None:
    """No in-tree backend without a measurement on any card outranks one with a measurement."""
    registered = load_registry(installed=False).records("attention_backend")
    measured = [record for record in registered if record.capabilities.measured]
    blackwell = [r for r in registered if r.name.startswith("trtllm")]
    assert measured and blackwell
    assert max(record.rank for record in blackwell) < min(record.rank for record in measured)
