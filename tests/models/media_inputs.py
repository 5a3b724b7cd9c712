"""Inputs of encoders as processors of transformers write them, and prompts with their
placeholders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

Item = dict[str, torch.Tensor]

_GRIDS = {"image": ((1, 4, 6), (1, 2, 4)), "video": ((2, 4, 4), (3, 2, 4))}  # in patches
_FRAMED = ("qwen3_vl", "qwen3_5", "glm4")  # the prompt has a text before each frame of a video


def make_items(folder: Path, modality: str) -> list[Item]:
    """Two items of unequal size."""
    config = json.loads((folder / "config.json").read_text())
    family, vision = config["model_type"], config.get("vision_config") or {}
    draw = torch.Generator().manual_seed(3)
    if modality == "audio" and family == "gemma4":
        masks = [(torch.arange(310) < length)[None] for length in (300, 124)]
        sounds = [torch.randn(1, 310, 16, generator=draw) * mask[..., None] for mask in masks]
        return [{"input_features": sound, "input_features_mask": mask} for sound, mask in zip(sounds, masks, strict=True)]
    if modality == "audio":
        sounds = [torch.randn(count, 16, 3000, generator=draw) for count in ((1, 2) if family == "voxtral" else (1, 1))]
        if family == "voxtral":
            return [{"input_features": sound} for sound in sounds]
        masks = [(torch.arange(3000) < length).long()[None] for length in (300, 124)]
        return [{"input_features": sound, "feature_attention_mask": mask} for sound, mask in zip(sounds, masks, strict=True)]
    if family.startswith(("qwen", "glm")):
        width = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
        name = "pixel_values" if modality == "image" else "pixel_values_videos"
        grids = [torch.tensor([grid]) for grid in _GRIDS[modality]]
        return [{name: torch.randn(int(grid.prod()), width, generator=draw), f"{modality}_grid_thw": grid} for grid in grids]
    if family == "deepseek_ocr2":  # in tiles, and as a whole alone
        whole = [torch.randn(1, 3, 768, 768, generator=draw) for _ in range(2)]
        tiles = torch.randn(2, 3, 768, 768, generator=draw)
        return [
            {"pixel_values": whole[0], "num_local_patches": torch.tensor([2]), "pixel_values_local": tiles},
            {"pixel_values": whole[1], "num_local_patches": torch.tensor([0])},
        ]
    if family == "kimi_k25":
        grids = [torch.tensor([grid]) for grid in _GRIDS[modality]]
        return [{"pixel_values": torch.randn(int(grid.prod()), 3, 14, 14, generator=draw), "image_grid_thw": grid} for grid in grids]
    if modality == "video" and family != "gemma4":
        frames = (2, 3) if family == "internvl" else (2, 2)
        return [{"pixel_values_videos": torch.randn(1, count, 3, 56, 56, generator=draw)} for count in frames]
    if family == "minicpmv4_6":
        slices = (((4, 8),), ((4, 4), (8, 4), (8, 4)))
        return [
            {"pixel_values": torch.randn(1, 3, 14, 14 * sum(h * w for h, w in sizes), generator=draw), "target_sizes": torch.tensor(sizes)}
            for sizes in slices
        ]
    if family == "mistral3":
        sizes = ((56, 84), (112, 28))
        return [{"pixel_values": torch.randn(1, 3, *size, generator=draw), "image_sizes": torch.tensor([size])} for size in sizes]
    if family in ("llava_onevision", "llava_next"):
        tiles = ((3, (100, 50)), (5, (100, 90)))  # one of the whole picture, and those of its parts
        return [
            {"pixel_values": torch.randn(count, 3, 56, 56, generator=draw), "image_sizes": torch.tensor([size])} for count, size in tiles
        ]
    if family == "gemma4":  # padded to as many patches as the processor's largest picture
        side, patches = vision["patch_size"], 72
        items = []
        for width, height in ((6, 3), (3, 9)):
            grid = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(1)
            padding = patches - len(grid)
            positions = torch.cat([grid, torch.full((padding, 2), -1)])[None]
            pixels = torch.rand(len(grid), 3 * side**2, generator=draw)
            items.append({"pixel_values": F.pad(pixels, (0, 0, 0, padding))[None], "image_position_ids": positions})
        if modality == "video":  # of two and three equal frames
            names = {"pixel_values_videos": "pixel_values", "video_position_ids": "image_position_ids"}
            return [{new: item[old].repeat(2 + n, 1, 1) for new, old in names.items()} for n, item in enumerate(items)]
        return items
    counts = (1, 3) if family in ("internvl", "llama4") else (1, 1)
    return [{"pixel_values": torch.randn(count, 3, 56, 56, generator=draw)} for count in counts]


def join_items(items: Sequence[Item]) -> Item:
    """The items as transformers gets them at once."""
    joined = {}
    for name in items[0]:
        arrays = [item[name] for item in items if name in item]
        if name == "pixel_values" and "target_sizes" in items[0]:
            joined[name] = torch.cat(arrays, -1)
            continue
        if arrays[0].dim() == 1:
            joined[name] = torch.cat(arrays)
            continue
        height, width = (max(array.shape[axis] for array in arrays) for axis in (-2, -1))
        if name == "pixel_values" and arrays[0].dim() == 4:
            arrays = [torch.nn.functional.pad(each, (0, width - each.shape[-1], 0, height - each.shape[-2])) for each in arrays]
        joined[name] = torch.cat(arrays)
    return joined


@dataclass(frozen=True)
class Prompt:
    """A prompt with the placeholders of items."""

    token_ids: list[int]
    kinds: torch.Tensor  # int64 [tokens]; 0: text, 1: an image, 2: a video
    rows: torch.Tensor  # int64 [tokens]; of the items' joined rows; -1: text
    ends: torch.Tensor  # int32 [tokens]; see `MediaSpans`


def make_prompt(folder: Path, modality: str, counts: Sequence[int], frames: Sequence[int]) -> Prompt:
    """Texts and items by turns. counts: rows of each item; frames: of each, of a video."""
    config: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
    written = "image" if config["model_type"].startswith(("glm", "internvl")) else modality  # these write frames as images
    names = (f"{written}_token_id", f"{written}_token_index")
    placeholder = next(config[name] for name in names if name in config)
    start = config.get("audio_start_token_id" if modality == "audio" else "vision_start_token_id")
    is_framed = modality == "video" and config["model_type"].startswith(_FRAMED)
    ids, rows, ends, row = [20, 31, 42, 53, 64], [-1] * 5, [0] * 5, 0
    for number, (count, frame_count) in enumerate(zip(counts, frames, strict=True)):
        pieces = frame_count if is_framed else 1
        for _ in range(pieces):
            size = count // pieces
            before = [] if start is None else [start]
            ids += [*before, *[placeholder] * size, 70 + number, 81]
            rows += [-1] * len(before) + list(range(row, row + size)) + [-1, -1]
            end = 0 if modality == "audio" else len(ends) + len(before) + size
            ends += [0] * len(before) + [end] * size + [0, 0]
            row += size
    kind = {"image": 1, "video": 2, "audio": 3}[modality]
    placed = torch.tensor(rows)
    return Prompt(ids, torch.where(placed >= 0, kind, 0), placed, torch.tensor(ends, dtype=torch.int32))
