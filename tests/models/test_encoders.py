"""Models with encoders against transformers, which gets the same arrays: the rows of media, and the
logits of prompts that hold them."""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from frame.config.resolution.media import find_cost
from frame.core.errors import CheckpointError, ConfigurationError
from frame.core.interfaces.media import DividesEncoders, HasEncoders, MediaRows, MediaSpans, RotaryPositions
from tests.models.harness import Session, open_session
from tests.models.media_checkpoints import FAMILIES, load_media_reference, make_media_checkpoint
from tests.models.media_inputs import Item, Prompt, join_items, make_items, make_prompt

SPANS = ("Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration-spans")
OCR = "DeepseekOcr2ForConditionalGeneration"
OMNI = "Qwen3OmniMoeThinkerForConditionalGeneration"
CASES = [(architecture, modality) for architecture, family in FAMILIES.items() for modality in family.placeholders]

Make = Callable[[str], Path]


@pytest.fixture(scope="session")
def media_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @cache
    def make(architecture: str) -> Path:
        return make_media_checkpoint(tmp_path_factory.mktemp("media"), architecture)

    return make


def encode(session: Session, modality: str, items: list[Item]) -> list[torch.Tensor]:
    model = session.model
    assert isinstance(model, HasEncoders)
    return model.encode(modality, items)


def run_reference(folder: Path, modality: str, items: list[Item], prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """-> (logits [tokens, vocab], inputs of the language model's layers [tokens, hidden], rotary
    positions int64 [3, tokens] or None)."""
    model = load_media_reference(folder)
    seen: list[Any] = []
    text = model.model.language_model if hasattr(model, "model") else model.language_model.model
    text.register_forward_pre_hook(lambda module, args, named: seen.append(named), with_kwargs=True)
    is_still = modality == "video" and "InternVL" in type(model).__name__  # its frames are images
    joined = {"pixel_values": torch.cat([item["pixel_values_videos"][0] for item in items])} if is_still else join_items(items)
    arguments: dict[str, Any] = {**joined, "input_ids": torch.tensor([prompt.token_ids])}
    arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
    if "video_position_ids" in joined:
        arguments["num_frames_per_video"] = torch.tensor([len(item["pixel_values_videos"]) for item in items])
    has_rope = hasattr(getattr(model, "model", None), "get_rope_index")
    if type(model).__name__.startswith("Qwen3Omni"):
        if modality == "video":
            arguments["video_second_per_grid"] = torch.ones(len(items))
    elif has_rope:
        arguments["mm_token_type_ids"] = prompt.kinds[None]
    if model.config.model_type.startswith("gemma"):
        arguments["token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"] = prompt.kinds[None]
    with torch.inference_mode():
        logits = model(**arguments).logits[0]
    positions = seen[0]["position_ids"][-3:, 0].long() if has_rope else None
    return logits, seen[0]["inputs_embeds"][0], positions


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "modality"), CASES)
def test_logits_of_prompts_with_media(media_checkpoint: Make, architecture: str, modality: str) -> None:
    folder = media_checkpoint(architecture)
    items = make_items(folder, modality)
    session = open_session(folder, encoders=True, max_tokens=1280, max_context=1280)
    rows = encode(session, modality, items)  # together, and each alone
    torch.testing.assert_close(rows, [encode(session, modality, [item])[0] for item in items], atol=1e-5, rtol=1e-5)
    assert {each.shape[1] for each in rows} == {session.model.encoder_width}  # type: ignore[attr-defined]
    frames = [int(item.get("video_grid_thw", torch.ones(1, 1))[0, 0]) for item in items]
    prompt = make_prompt(folder, modality, [len(each) for each in rows], frames)
    logits, inputs, positions = run_reference(folder, modality, items, prompt)
    table = torch.cat(rows)
    hidden = session.model_config.hidden_size
    torch.testing.assert_close(table[:, :hidden], inputs[prompt.rows >= 0], atol=1e-5, rtol=1e-5)
    assert table.std() > 0.1
    chunks = [len(prompt.token_ids)]
    if architecture not in SPANS:
        chunks = [9, chunks[0] - 9]  # splits the first item
    start = 0
    for size in chunks:
        part = slice(start, start + size)
        extensions: dict[type, Any] = {MediaRows: MediaRows(prompt.rows[part], table)}
        if positions is not None:
            extensions[RotaryPositions] = RotaryPositions(positions[:, part])
        if architecture in SPANS:
            extensions[MediaSpans] = MediaSpans(prompt.ends[part])
        (computed,) = session.step([(1, prompt.token_ids[part])], extensions)
        torch.testing.assert_close(computed, logits[part], atol=2e-4, rtol=1e-4)
        start += size


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("architecture", "modality"), [case for case in CASES if case[0] not in SPANS])
def test_bits_depend_on_no_other_item_and_row(media_checkpoint: Make, architecture: str, modality: str, dtype: torch.dtype) -> None:
    """In the batch-invariant mode: items together and alone, the prompt whole and in chunks, and
    beside a row of text."""
    folder = media_checkpoint(architecture)
    items = make_items(folder, modality)
    sizes: dict[str, Any] = {"encoders": True, "max_tokens": 1280, "max_context": 1280, "attention": "torch_native"}
    session = open_session(folder, dtype=dtype, deterministic=True, **sizes)
    rows = encode(session, modality, items)
    assert all(torch.equal(together, encode(session, modality, [item])[0]) for together, item in zip(rows, items, strict=True))
    frames = [int(item.get("video_grid_thw", torch.ones(1, 1))[0, 0]) for item in items]
    prompt, table = make_prompt(folder, modality, [len(each) for each in rows], frames), torch.cat(rows)
    count = len(prompt.token_ids)
    turns = any(getattr(module, "sections", ()) for module in session.model.modules())  # type: ignore[attr-defined]

    def run(slot: int, parts: list[slice], text: list[int]) -> torch.Tensor:
        """Logits of the prompt in these parts, each beside a row of `text`, if any."""
        found = []
        for number, part in enumerate(parts):
            extra = [(7 - number, text)] if text else []
            filled = torch.cat((prompt.rows[part], torch.full((len(text),), -1)))
            extensions: dict[type, Any] = {MediaRows: MediaRows(filled, table)}
            if turns:
                at = torch.cat((torch.arange(count)[part], torch.arange(len(text)))) + 3 * (filled >= 0)
                extensions[RotaryPositions] = RotaryPositions(torch.stack((at, at + 1, at)))
            found.append(session.step([(slot, prompt.token_ids[part]), *extra], extensions)[0])
        return torch.cat(found)

    expected = run(1, [slice(0, count)], [])
    assert torch.equal(run(2, [slice(0, 9), slice(9, count)], [7, 8, 9, 10, 11]), expected)
    assert torch.equal(run(3, [slice(0, count - 1), slice(count - 1, count)], []), expected)  # a decode at the end


def finish(layers: Generator[None, None, torch.Tensor]) -> tuple[int, torch.Tensor]:
    """-> how often it stops, and the rows."""
    for count in itertools.count():
        try:
            next(layers)
        except StopIteration as ended:
            return count, ended.value
    raise AssertionError


def count_idle(model: Any) -> int:
    return len(model.encoders.threads.idle)


@pytest.mark.parametrize(("architecture", "modality"), CASES)
def test_layers_with_pauses_have_the_bits_of_one_call(media_checkpoint: Make, architecture: str, modality: str) -> None:
    """Also beside another item in the middle of its layers, and one that is encoded whole."""
    folder = media_checkpoint(architecture)
    items = make_items(folder, modality)
    session = open_session(folder, encoders=True)
    assert isinstance(session.model, DividesEncoders)
    expected = [encode(session, modality, [item])[0] for item in items]
    config = json.loads((folder / "config.json").read_text())
    cost = find_cost(config["audio_config" if modality == "audio" else "vision_config"], session.model_config)
    if architecture == OCR:  # two encoders follow each other, for the whole image and for its tiles: encoded in one step
        assert cost is None
        return
    assert cost is not None
    first, second = (session.model.encode_by_layer(modality, item) for item in items)
    next(first)
    next(second)
    assert torch.equal(encode(session, modality, [items[0]])[0], expected[0])
    for layers, rows in zip((first, second), expected, strict=True):
        stops, computed = finish(layers)
        assert stops + 2 == cost.num_layers == 2  # one stop was before
        assert torch.equal(computed, rows)
    assert count_idle(session.model) == 2  # for later items


def test_layers_that_are_not_wanted_any_more(media_checkpoint: Make) -> None:
    folder = media_checkpoint("Qwen3VLForConditionalGeneration")
    item = make_items(folder, "image")[0]
    model: Any = open_session(folder, encoders=True).model
    model.encode_by_layer("image", item).close()
    layers = model.encode_by_layer("image", item)
    next(layers)
    assert not count_idle(model)
    layers.close()
    assert count_idle(model) == 1
    assert not any(block._forward_pre_hooks for block in model.encoders.model.visual.blocks)


def test_one_thread_computes_one_item_after_another(media_checkpoint: Make) -> None:
    """cuDNN keeps plans of attention for each thread."""
    folder = media_checkpoint("Qwen3VLForConditionalGeneration")
    item = make_items(folder, "image")[0]
    model: Any = open_session(folder, encoders=True).model
    threads = []
    model.encoders.model.visual.blocks[0].register_forward_pre_hook(lambda *_: threads.append(threading.current_thread()))
    for _ in range(3):
        finish(model.encode_by_layer("image", item))
    assert len(threads) == 3 and len(set(threads)) == 1
    del model
    gc.collect()
    threads[0].join(30)
    assert not threads[0].is_alive()


def test_an_error_in_a_layer_is_raised_to_the_caller(media_checkpoint: Make) -> None:
    folder = media_checkpoint("Qwen3VLForConditionalGeneration")
    model: Any = open_session(folder, encoders=True).model
    layers = model.encode_by_layer("image", make_items(folder, "image")[0])
    next(layers)
    model.encoders.model.visual.blocks[1].mlp = None
    with pytest.raises(TypeError, match="NoneType"):
        next(layers)
    assert count_idle(model) == 1


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_text_alone_needs_no_encoder(media_checkpoint: Make, architecture: str) -> None:
    folder = media_checkpoint(architecture)
    session = open_session(folder)
    reference = load_media_reference(folder)
    ids = torch.randint(20, 380, (1, 30), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(input_ids=ids).logits[0]
    (computed,) = session.step([(1, ids[0].tolist())])
    torch.testing.assert_close(computed, expected, atol=2e-4, rtol=1e-4)
    assert not [name for name, _ in session.model.named_parameters() if name.startswith("encoders.")]  # type: ignore[attr-defined]


def test_arrays_for_the_text_do_not_divide_items(media_checkpoint: Make) -> None:
    folder = media_checkpoint("InternVLForConditionalGeneration")
    items = make_items(folder, "image")
    session = open_session(folder, encoders=True)
    counted = [{**item, "num_patches": torch.tensor([len(item["pixel_values"])])} for item in items]
    assert [len(rows) for rows in encode(session, "image", counted)] == [4, 12]
    torch.testing.assert_close(encode(session, "image", counted), encode(session, "image", items), atol=0, rtol=0)


def test_an_image_of_one_row(media_checkpoint: Make) -> None:
    session = open_session(media_checkpoint("Mistral3ForConditionalGeneration"), encoders=True)
    draw = torch.Generator().manual_seed(5)
    sizes = ((28, 28), (56, 28))
    items = [{"pixel_values": torch.randn(1, 3, *size, generator=draw), "image_sizes": torch.tensor([size])} for size in sizes]
    single, double = encode(session, "image", items)
    assert (len(single), len(double)) == (1, 2)
    torch.testing.assert_close(encode(session, "image", items[:1])[0], single, atol=1e-5, rtol=1e-5)


def test_layers_that_qwen3_5_does_not_have_are_left_out(media_checkpoint: Make, tmp_path: Path) -> None:
    folder = media_checkpoint("Qwen3_5ForConditionalGeneration")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["deepstack_visual_indexes"] = [0, 1]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    sessions = [open_session(each, encoders=True) for each in (folder, tmp_path)]
    rows = [encode(session, "image", make_items(folder, "image")) for session in sessions]
    torch.testing.assert_close(*rows, atol=0, rtol=0)


def test_gemma_3_with_images_has_no_cap_of_logits(media_checkpoint: Make, tmp_path: Path) -> None:
    folder = media_checkpoint("Gemma3ForConditionalGeneration")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["final_logit_softcapping"] = 1.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    logits = [open_session(each).step([(1, [5, 6, 7])])[0] for each in (folder, tmp_path)]
    torch.testing.assert_close(*logits, atol=0, rtol=0)


@pytest.mark.parametrize("architecture", ["Qwen2_5_VLForConditionalGeneration", "Gemma3ForConditionalGeneration"])
def test_bytes_are_rescaled_by_channel(media_checkpoint: Make, architecture: str) -> None:
    session = open_session(media_checkpoint(architecture), encoders=True)
    draw = torch.Generator().manual_seed(5)
    scale, offset = torch.tensor([0.011, 0.013, 0.017]), torch.tensor([-1.0, -1.3, -0.8])
    if architecture.startswith("Qwen"):
        stored = torch.randint(0, 256, (24, 3, 1, 14, 14), generator=draw, dtype=torch.uint8)
        grid = {"image_grid_thw": torch.tensor([[1, 4, 6]])}
        values = (stored.float() * scale.view(-1, 1, 1, 1) + offset.view(-1, 1, 1, 1)).expand(-1, -1, 2, -1, -1).flatten(1)
    else:
        stored, grid = torch.randint(0, 256, (1, 3, 56, 56), generator=draw, dtype=torch.uint8), {}
        values = stored.float() * scale.view(-1, 1, 1) + offset.view(-1, 1, 1)
    packed = {"pixel_values": stored, "pixel_values.scale": scale, "pixel_values.offset": offset, **grid}
    (computed,) = encode(session, "image", [packed])
    (expected,) = encode(session, "image", [{"pixel_values": values, **grid}])
    torch.testing.assert_close(computed, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "prefixes"),
    [
        ("Qwen2_5_VLForConditionalGeneration", {"visual.": "model.visual.", "model.": "model.language_model."}),
        ("Qwen3VLForConditionalGeneration", {"model.visual.": "visual.", "model.language_model.": "language_model.model."}),
        (
            "Gemma3ForConditionalGeneration",
            {"vision_tower.": "model.vision_tower.vision_model.", "language_model.model.": "model.language_model."},
        ),
    ],
)
def test_names_of_both_versions_of_transformers(
    media_checkpoint: Make, tmp_path: Path, architecture: str, prefixes: dict[str, str]
) -> None:
    from safetensors.torch import load_file, save_file

    folder = media_checkpoint(architecture)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        tensors[prefixes.get(old, "") + name.removeprefix(old)] = tensor
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    items = make_items(folder, "image")
    expected, renamed = (encode(open_session(each, encoders=True), "image", items) for each in (folder, tmp_path))
    torch.testing.assert_close(renamed, expected, atol=0, rtol=0)


def test_a_missing_tensor_of_an_encoder_is_named(media_checkpoint: Make, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = media_checkpoint("Qwen2_5_VLForConditionalGeneration")
    tensors = load_file(folder / "model.safetensors")
    lost = next(name for name in tensors if name.startswith("visual.blocks.1"))
    del tensors[lost]
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=lost.replace(".", r"\.")):
        open_session(tmp_path, encoders=True)
    tensors["visual.unknown.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="unknown"):
        open_session(tmp_path, encoders=True)


@pytest.mark.slow
def test_text_alone_imports_no_modelling_code(media_checkpoint: Make) -> None:
    folder = media_checkpoint("Qwen3VLForConditionalGeneration")
    code = f"""
import sys
from pathlib import Path
from tests.models.harness import open_session
open_session(Path({str(folder)!r}))
assert "transformers.modeling_utils" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=500)


def test_keys_of_the_config_choose_no_code(media_checkpoint: Make, tmp_path: Path) -> None:
    folder = media_checkpoint("Qwen3VLForConditionalGeneration")
    config = json.loads((folder / "config.json").read_text())
    hostile = {"_attn_implementation": "someone/kernels", "attn_implementation": "someone/kernels", "auto_map": {"AutoModel": "x.Y"}}
    config |= hostile
    config["vision_config"] |= hostile
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    session = open_session(tmp_path, encoders=True)
    assert session.model.encoders.model.visual.config._attn_implementation == "sdpa"  # type: ignore[attr-defined]


def test_an_unknown_family_is_refused_with_a_sentence(media_checkpoint: Make, tmp_path: Path) -> None:
    folder = media_checkpoint("Qwen3VLForConditionalGeneration")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "other"}))
    with pytest.raises(ConfigurationError, match="no encoders for model_type 'other'"):
        open_session(tmp_path, encoders=True)


def test_a_checkpoint_that_also_speaks(media_checkpoint: Make, tmp_path: Path) -> None:
    """Qwen3-Omni as it is published: one of three models, whose tensors have a prefix."""
    from safetensors.torch import load_file, save_file

    folder = media_checkpoint(OMNI)
    tensors = {f"thinker.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    others = {name: torch.zeros(3) for name in ("talker.model.norm.weight", "code2wav.code_offset")}
    save_file(tensors | others, tmp_path / "model.safetensors")
    thinker = json.loads((folder / "config.json").read_text())
    del thinker["architectures"], thinker["dtype"]
    whole = {"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "model_type": "qwen3_omni_moe", "dtype": "float32"}
    talker = {"text_config": {"hidden_size": 8}, "vision_config": {"depth": 1}}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "thinker_config": thinker, "talker_config": talker, "code2wav_config": {}}))
    for has_encoders in (True, False):
        alone, nested = (open_session(each, encoders=has_encoders) for each in (folder, tmp_path))
        (logits,), (expected,) = (each.step([(1, [7, 30, 40, 50])]) for each in (nested, alone))
        assert torch.equal(logits, expected)
        for modality in ("image", "audio") if has_encoders else ():
            items = make_items(folder, modality)
            assert all(map(torch.equal, encode(nested, modality, items), encode(alone, modality, items)))


def test_short_sounds_beside_long_ones(media_checkpoint: Make) -> None:
    """Rows are those that transformers computes of each alone; of several, it pads the chunks."""
    folder = media_checkpoint(OMNI)
    session, reference = open_session(folder, encoders=True), load_media_reference(folder)
    items = make_items(folder, "audio")
    items[1]["feature_attention_mask"][:, 37:] = 0
    rows = encode(session, "audio", items)
    with torch.inference_mode():
        expected = [reference.get_audio_features(**item).last_hidden_state for item in items]
        joined = reference.get_audio_features(**join_items(items)).last_hidden_state
    hidden = session.model_config.hidden_size
    torch.testing.assert_close([each[:, :hidden] for each in rows], expected, atol=1e-5, rtol=1e-5)
    assert not torch.cat(rows)[:, hidden:].any()
    assert len(rows[1]) == 5 and not torch.allclose(joined[-5:], expected[1], atol=1e-3)
    tower = session.model.encoders.model.audio_tower  # type: ignore[attr-defined]
    assert tower.conv_chunksize == 32
    tower.conv_chunksize = 1
    torch.testing.assert_close(encode(session, "audio", items), rows, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("architecture", "kind"), [("LlavaNext", "granite"), ("Mistral3", "granite"), ("LlavaOnevision", "llama")])
def test_text_models_of_other_families_are_refused(media_checkpoint: Make, tmp_path: Path, architecture: str, kind: str) -> None:
    """Their layers are computed otherwise, although they may have the same tensors."""
    folder = media_checkpoint(f"{architecture}ForConditionalGeneration")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["model_type"] = kind
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match=rf"text_config\.model_type '{kind}' .* model\.implementation: transformers"):
        open_session(tmp_path)


def test_some_layers_of_a_text_model_have_windows(tmp_path: Path) -> None:
    """InternVL over Qwen3, whose first layers have full attention."""
    folder = make_media_checkpoint(
        tmp_path / "model", "InternVLForConditionalGeneration", use_sliding_window=True, sliding_window=4, max_window_layers=1
    )
    ids = list(range(20, 50))
    with torch.inference_mode():
        expected = load_media_reference(folder)(input_ids=torch.tensor([ids])).logits[0]
    (computed,) = open_session(folder).step([(1, ids)], {})
    torch.testing.assert_close(computed, expected, atol=2e-4, rtol=1e-4)
