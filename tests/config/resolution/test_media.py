"""Which media are served, why not, and how they are placed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from frame.config.hardware import Hardware
from frame.config.resolve import pinned, resolve
from frame.config.resolved import Resolved
from frame.config.schema import FrameConfig
from frame.config.selection import ResolveError
from frame.core.errors import ConfigurationError
from frame.core.interfaces.model import ModelConfig
from frame.core.interfaces.plugin import PluginRecord, Reason
from frame.entrypoints.media.media_process import load_modalities
from frame.plugins.loader import load_registry
from frame.testing.modality.folders import write_folder

RECORDS = load_registry(installed=False).all_records()
MACHINE = Hardware(cpu_cores=4, memory_bytes=16 << 30)


def make_records(modalities: tuple[str, ...] = ("image", "video"), missing: str = "", **changes: Any) -> dict[str, list[PluginRecord]]:
    """The built-in plugins with a model that reads these modalities. missing: one that lacks a
    package."""
    models = [
        replace(each, capabilities=replace(each.capabilities, architectures=("TestVL",), modalities=modalities, **changes))  # type: ignore[type-var]
        for each in RECORDS["model"]
        if each.name == "llama"
    ]
    lacking = (Reason("it needs pillow, which is not installed"),)
    plugins = [replace(each, problems=lacking) if each.name == missing else each for each in RECORDS["modality"]]
    return {**RECORDS, "model": models, "modality": plugins}


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return replace(write_folder(tmp_path / "model", "qwen2_5_vl"), architecture="TestVL")


def run(model: ModelConfig, records: dict[str, list[PluginRecord]] | None = None, /, **sections: Any) -> Resolved:
    return resolve(FrameConfig.model_validate(sections), MACHINE, model, records or make_records())


def test_what_the_model_reads_is_served(model: ModelConfig) -> None:
    resolved = run(model)
    assert resolved.media is not None
    assert resolved.media.modalities == ("image", "video") and resolved.media.rotary_positions and not resolved.media.whole_items
    assert [choice.name for choice in resolved.plugins["modality"]] == ["image", "video"]
    assert resolved.media.table_rows >= 4096 <= resolved.media.encode_budget
    assert "reads image and video" in resolved.reasons["media.enabled"]
    again = resolve(pinned(resolved), MACHINE, model, make_records())
    assert again.media == resolved.media and again.plugins == resolved.plugins
    assert run(model, make_records(media_spans=True)).media.whole_items  # type: ignore[union-attr]


def test_the_batch_invariant_mode_takes_media_whose_tokens_attend_to_earlier_ones(model: ModelConfig) -> None:
    mode = {"execution": {"deterministic": True, "device": "cpu"}}
    assert run(model, **mode).media is not None
    with pytest.raises(ResolveError, match="tokens of images attend to later ones"):
        run(model, make_records(media_spans=True), **mode)
    assert run(model, make_records(media_spans=True), **mode, media={"enabled": False}).media is None


def test_sizes_that_the_user_sets(model: ModelConfig) -> None:
    resolved = run(model, media={"table_rows": 100, "encode_budget": 7, "modalities": ["image"]})
    assert resolved.media is not None
    assert (resolved.media.table_rows, resolved.media.encode_budget, resolved.media.modalities) == (100, 7, ("image",))


@pytest.mark.parametrize(("cores", "expected"), [(1, 2), (11, 2), (16, 4), (256, 8)])
def test_processes_follow_the_cores(model: ModelConfig, cores: int, expected: int) -> None:
    machine = replace(MACHINE, cpu_cores=cores)
    resolved = resolve(FrameConfig(), machine, model, make_records())
    assert resolved.media is not None and resolved.media.processes == expected
    assert f"{cores} cores" in resolved.reasons["media.processes"]
    explicit = resolve(FrameConfig.model_validate({"media": {"processes": 5}}), machine, model, make_records())
    assert explicit.media is not None and explicit.media.processes == 5 and "media.processes" not in explicit.reasons


def test_images_in_both_directions_need_a_plugin_that_has_them(model: ModelConfig) -> None:
    both = replace(model, config={**model.config, "use_bidirectional_attention": "vision"})
    resolved = run(both)
    assert resolved.media is None and "use_bidirectional_attention is vision" in resolved.reasons["media.enabled"]
    assert run(both, make_records(media_spans=True)).media is not None
    named = make_records(media_spans="vision")
    for one, is_whole in ((both, True), (model, False)):
        media = run(one, named).media
        assert media is not None and media.whole_items == is_whole
    assert run(replace(both, config={**both.config, "use_bidirectional_attention": None})).media is not None
    with pytest.raises(ResolveError, match=r"media.enabled is true, but use_bidirectional_attention is vision"):
        run(both, media={"enabled": True})


def test_encoders_that_steps_divide(model: ModelConfig) -> None:
    tower = {"depth": 3, "hidden_size": 32, "intermediate_size": 48}
    resolved = run(replace(model, full_config={**model.full_config, "vision_config": tower}))
    assert resolved.media is not None
    assert resolved.media.costs["image"] == resolved.media.costs["video"]
    assert resolved.media.costs["image"].num_layers == 3
    assert Resolved.model_validate_json(resolved.model_dump_json()).media == resolved.media
    without = run(replace(model, full_config={**model.full_config, "vision_config": {"patch_size": 14}}))
    assert without.media is not None and not without.media.costs


def test_text_alone(model: ModelConfig) -> None:
    assert run(model, media={"enabled": False}).media is None
    assert run(model, make_records(())).media is None
    assert run(replace(model, full_config={})).media is None
    resolved = run(replace(model, has_processor=False))
    assert resolved.media is None and "preprocessor_config.json" in resolved.reasons["media.enabled"]
    assert pinned(resolved).media.enabled is False


def test_a_missing_package(model: ModelConfig) -> None:
    resolved = run(model, make_records(missing="video"))
    assert resolved.media is not None and resolved.media.modalities == ("image",)
    assert "not video" in resolved.reasons["media.enabled"]
    alone = run(model, make_records(("image",), missing="image"))
    assert alone.media is None and "no plugin for image" in alone.reasons["media.enabled"]
    assert "pillow" in alone.lacking_media["image"] and list(resolved.lacking_media) == ["video"]
    assert not run(model).lacking_media
    with pytest.raises(ResolveError, match="pillow"):
        run(model, make_records(("image",), missing="image"), media={"enabled": True})
    with pytest.raises(ResolveError, match="pillow"):
        run(model, make_records(missing="video"), media={"modalities": ["video"]})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"model": {"skip_tokenizer_init": True}}, "skip_tokenizer_init"),
        ({"model": {"task": "embed", "pooling": "last"}}, "model.task is embed"),
    ],
)
def test_what_is_not_built(model: ModelConfig, sections: dict[str, Any], words: str) -> None:
    tasks = ("generate", "embed", "classify")
    resolved = run(model, make_records(tasks=tasks), **sections)
    assert resolved.media is None and words in resolved.reasons["media.enabled"]
    with pytest.raises(ResolveError, match=words):
        run(model, make_records(tasks=tasks), **sections, media={"enabled": True})


def test_further_rows_need_layers_in_the_first_stage(model: ModelConfig) -> None:
    vision = {**model.full_config["vision_config"], "deepstack_visual_indexes": [0, 1]}
    model = replace(model, full_config={**model.full_config, "vision_config": vision}, num_layers=4)
    assert run(model, parallel={"pp": 2}).media is not None
    resolved = run(model, parallel={"pp": 4})
    assert resolved.media is None and "goes to 2 layers, and the first of 4 stages has 1" in resolved.reasons["media.enabled"]


def test_names_that_do_not_fit(model: ModelConfig) -> None:
    for names, words in ((["audio"], "for audio"), (["image", "nothing"], "nothing"), (["image", "image"], "image")):
        if names == ["image", "image"]:
            assert run(model, media={"modalities": names}).media.modalities == ("image",)  # type: ignore[union-attr]
            continue
        with pytest.raises(ResolveError, match=words):
            run(model, media={"modalities": names})


def test_texts_of_settings() -> None:
    config = FrameConfig.model_validate({"media": {"limits": "image=4, video=0", "processor_options": '{"max_pixels": 5}'}})
    assert (config.media.limits, config.media.processor_options) == ({"image": 4, "video": 0}, {"max_pixels": 5})
    for wrong in ({"limits": "image"}, {"limits": "image=-1"}, {"processor_options": "{"}, {"processor_options": "[1]"}):
        with pytest.raises(ValueError, match="media"):
            FrameConfig.model_validate({"media": wrong})


def test_wrong_options_of_a_processor_end_the_start(model: ModelConfig, tmp_path: Path) -> None:
    registry = load_registry(installed=False)
    sections = {"model": {"path": str(tmp_path / "model")}}
    assert set(load_modalities(run(model, **sections), registry)) == {"image", "video"}
    with pytest.raises(ConfigurationError, match="bogus is no option"):
        load_modalities(run(model, media={"processor_options": {"bogus": 1}}, **sections), registry)
