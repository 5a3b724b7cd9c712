"""A runner with a linear encoder over a tiny checkpoint, batches with media by hand, and
transformers' text model of Qwen3-VL or Qwen2.5-VL as the reference, which embeds by itself.

Knows no scheduler: rows, positions and chunks are what a test says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from frame.config.schema import FrameConfig
from frame.core.execution.model_runner import TorchModelRunner
from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.media import EncodeOrder, MediaItem, PlaceholderRun
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.build_engine import Place, create_platform, load_parts
from frame.entrypoints.processes.components import RunnerPlan, build_runner
from frame.entrypoints.processes.join_groups import join_groups
from frame.interfaces.modality import MediaPlan
from frame.media.files import write_features
from frame.testing.checkpoints import load_reference, make_checkpoint
from tests.core.execution.test_model_runner import Script

PLACEHOLDER = 5  # token id
CHANNELS = 6  # of a row of pixels
NUM_LAYERS = 5  # of the encoder
_PLAN = MediaPlan(table_rows=96, encode_budget=256, modalities=("image",))
LAYOUTS: dict[str, tuple[str, dict[str, Any], int]] = {  # checkpoint, rotary settings, DeepStack layers
    "interleaved": ("Qwen3ForCausalLM", {"mrope_section": [4, 4, 4], "mrope_interleaved": True}, 2),
    "blocks": ("Qwen2ForCausalLM", {"mrope_section": [2, 3, 3]}, 0),
}


def project(pixels: torch.Tensor, width: int) -> torch.Tensor:
    """What the encoder computes: float32 [rows, CHANNELS] -> [rows, width]."""
    weight = torch.randn(CHANNELS, width, generator=torch.Generator().manual_seed(3)) * CHANNELS**-0.5
    return pixels @ weight.to(pixels.device)


def add_encoder(target: Any, num_deep: int) -> Any:
    """The model class with an encoder."""

    class Vision(target):  # type: ignore[misc]
        @property
        def encoder_width(self) -> int:
            return int(self.model_config.hidden_size) * (1 + num_deep)

        def encode(self, modality: str, items: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
            self.encoded = [*getattr(self, "encoded", []), (modality, len(items))]
            return [project(item["pixels"], self.encoder_width).to(self.context.dtype) for item in items]

        def encode_by_layer(self, modality: str, item: Mapping[str, torch.Tensor]) -> Generator[None, None, torch.Tensor]:
            self.num_passed = getattr(self, "num_passed", 0)
            try:
                for _ in range(NUM_LAYERS - 1):
                    self.num_passed += 1
                    yield
                self.num_passed += 1
                return self.encode(modality, [item])[0]
            except GeneratorExit:
                self.num_closed = getattr(self, "num_closed", 0) + 1
                raise

    return Vision


@dataclass
class Prompt:
    """A prompt of text and items. `rows` [tokens]: of each token the row of its item, or -1."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    items: list[MediaItem] = field(default_factory=list)
    pixels: list[np.ndarray] = field(default_factory=list)
    next_position: int = 0

    def add_text(self, *token_ids: int) -> Prompt:
        self.token_ids += token_ids
        self.positions += [(self.next_position + n,) * 3 for n in range(len(token_ids))]
        self.next_position += len(token_ids)
        return self

    def add_image(self, folder: Path, grid: tuple[int, int, int], seed: int = 0) -> Prompt:
        count, start, base = int(np.prod(grid)), len(self.token_ids), self.next_position
        pixels = np.random.default_rng(seed).standard_normal((count, CHANNELS)).astype(np.float32)
        path, arrays = write_features(folder, {"pixels": pixels})
        digest = hashlib.sha256(pixels.tobytes()).digest()
        self.items.append(MediaItem("image", digest, [PlaceholderRun(start, count, grid)], count, path, arrays))
        self.pixels.append(pixels)
        self.token_ids += [PLACEHOLDER] * count
        places = [(base + t, base + h, base + w) for t in range(grid[0]) for h in range(grid[1]) for w in range(grid[2])]
        self.positions += places
        self.next_position = 1 + max(max(each) for each in places)
        return self

    @property
    def offset(self) -> int:
        return self.next_position - len(self.token_ids)

    def make_rows(self, first: Sequence[int]) -> np.ndarray:
        """The row of each token where item i has those from `first[i]` on, in reverse order:
        rows of an item need not follow each other."""
        rows = np.full(len(self.token_ids), -1, np.int32)
        for item, start in zip(self.items, first, strict=True):
            run = item.runs[0]
            rows[run.start : run.start + run.count] = start + np.arange(run.count)[::-1]
        return rows

    def make_orders(self, first: Sequence[int]) -> list[EncodeOrder]:
        return [
            EncodeOrder(item, np.arange(start, start + item.num_rows, dtype=np.int32)[::-1].copy())
            for item, start in zip(self.items, first, strict=True)
        ]


def divide(orders: Sequence[EncodeOrder], first: int, stop: int) -> list[EncodeOrder]:
    """Some layers of the items of these orders."""
    return [msgspec.structs.replace(order, first_layer=first, stop_layer=stop) for order in orders]


class VisionRig:
    """A runner of one of `LAYOUTS`, and its reference."""

    def __init__(
        self, layout: str, folder: Path, *, attention: Any = None, has_media: bool = True, groups: Any = None, **sections: Any
    ) -> None:
        """attention: the class of a backend; None: the one that is chosen. groups: those of a rank,
        or what makes them of the configuration and the registry."""
        architecture, turns, self.num_deep = LAYOUTS[layout]
        rope = {"rope_type": "default", "rope_theta": 10000.0, **turns}
        self.folder = folder / architecture
        if not self.folder.exists():
            make_checkpoint(architecture, self.folder, rope_parameters=rope)
        config = {
            "model": {"path": str(self.folder), "dtype": "float32"},
            "cache": {"page_size": 4, "max_total_tokens": 1600},
            "scheduler": {"max_running_requests": 8, "chunked_prefill_size": 128},
            "execution": {"device": "cpu", "threads": 1},
            "attention": {"backend": None if attention is None else attention.name},
            **sections,
        }
        prepared = prepare(FrameConfig.model_validate(config), classes=[] if attention is None else [attention])
        resolved = prepared.resolved.model_copy(update={"media": _PLAN if has_media else None})
        parts = load_parts(resolved, prepared.registry)
        if has_media:
            parts = replace(parts, model=replace(parts.model, target=add_encoder(parts.model.target, self.num_deep)))
        place = Place()
        platform = create_platform(resolved, prepared.registry, place)
        if groups is None:
            groups = join_groups(resolved, prepared.registry, place, platform)
        elif callable(groups):
            groups = groups(resolved, prepared.registry)
        self.runner: TorchModelRunner = build_runner(RunnerPlan(resolved, parts, platform, groups))
        self.script = Script(self.runner, 4, 400)
        self._layout = layout
        self._reference: Any = None

    @property
    def reference(self) -> Any:
        """Transformers' text model with the weights of the checkpoint."""
        if self._reference is None:
            whole = load_reference(self.folder)
            settings = {name: value for name, value in whole.config.to_dict().items() if name not in ("model_type", "architectures")}
            if self._layout == "interleaved":
                from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextConfig, Qwen3VLTextModel

                text = Qwen3VLTextModel(Qwen3VLTextConfig(**settings))
            else:
                from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

                text = Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**settings))
            text.load_state_dict(whole.model.state_dict())
            text.set_attn_implementation("eager")
            self._reference = text.eval(), whole.lm_head
        return self._reference

    @torch.no_grad()
    def expect(self, prompt: Prompt, output: Sequence[int]) -> list[int]:
        """The likeliest token after the prompt, and after each token of the output."""
        text, head = self.reference
        token_ids = torch.tensor([prompt.token_ids + list(output)])
        embedded = text.embed_tokens(token_ids)
        hidden, count = embedded.shape[-1], len(prompt.token_ids)
        encoded = project(
            torch.from_numpy(np.concatenate([*prompt.pixels, np.empty((0, CHANNELS), np.float32)])), hidden * (1 + self.num_deep)
        )
        is_item = torch.tensor([[token == PLACEHOLDER for token in prompt.token_ids] + [False] * len(output)])
        embedded[is_item] = encoded[:, :hidden]
        later = [(prompt.next_position + n,) * 3 for n in range(len(output))]
        positions = torch.tensor(prompt.positions + later).t()[:, None]
        more: dict[str, Any] = {}
        if self.num_deep:
            more = {"visual_pos_masks": is_item, "deepstack_visual_embeds": list(encoded[:, hidden:].split(hidden, 1))}
        states = text(inputs_embeds=embedded, position_ids=positions, use_cache=False, **more).last_hidden_state
        likeliest: list[int] = head(states[0, count - 1 :]).argmax(-1).tolist()
        return likeliest

    def setup(self, slot: int, prompt: Prompt) -> SlotSetup:
        ids = np.array(prompt.token_ids, np.int32)
        return SlotSetup(slot, SamplingParams(temperature=0.0), 0, len(ids), ids, position_offset=prompt.offset)

    def run_chunk(
        self, slot: int, prompt: Prompt, span: slice, rows: np.ndarray, decodes: Sequence[int] = (), orders: Sequence[EncodeOrder] = ()
    ) -> list[int]:
        """Compute some tokens of a prompt, behind decodes. -> the tokens drawn."""
        chunk_rows, is_last = rows[span], span.stop == len(prompt.token_ids)
        result = self.script.run(
            decodes=list(decodes),
            extends=[(slot, prompt.token_ids[span])],
            setups=[self.setup(slot, prompt)] if span.start == 0 else [],
            samples=[True] * len(decodes) + [is_last],
            encodes=list(orders),
            media_rows=chunk_rows if (chunk_rows >= 0).any() else None,
            rotary_positions=np.array(prompt.positions[span], np.int32).T.copy() if prompt.items else None,
        )
        tokens: list[int] = result.token_ids.tolist()
        return tokens

    def decode(self, slots: Sequence[int], orders: Sequence[EncodeOrder] = ()) -> list[int]:
        tokens: list[int] = self.script.run(decodes=list(slots), encodes=list(orders)).token_ids.tolist()
        return tokens
