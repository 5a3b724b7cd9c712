"""`VideoModality`: videos for the models of Qwen-VL (arXiv 2409.12191, arXiv 2502.13923), GLM-V
(arXiv 2507.01006), InternVL (arXiv 2504.10479), LLaVA-OneVision (arXiv 2408.03326) and Gemma 4.

The video processors of transformers exist for torchvision alone; here are their rules: which frames
are sampled, and how large they become. Must not know a container.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from frame.core.errors import ConfigurationError
from frame.interfaces.modality import MediaError, MediaLayout, MediaSize, ModalityContext
from frame.plugins.modalities.frames import decode_frames, read_video_size
from frame.plugins.modalities.processor import (
    MAX_RATIO,
    ProcessorModality,
    build_processor,
    check_names,
    find_row_token,
    load_image_processor,
    load_tokenizer,
    number,
    read_settings,
    refuse_unknown,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

_PIXELS = "pixel_values_videos"
_FILES = ("video_preprocessor_config.json", "preprocessor_config.json")
_OMNI = "qwen3_omni_moe_thinker"
_SAMPLED = ("qwen2_vl", "qwen2_5_vl", _OMNI)  # frames at equal steps; others: from the first to the last
_EVEN = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_GLM = ("glm4v", "glm4v_moe")  # frames at equal times, of which each has a text; their tokens are those of images
_GLM46 = "glm46v"  # as these, at a rate by the length of the video
_INTERNVL = "internvl"  # frames from the middles of equal intervals, of which each has a text; their tokens are those of images
_STILLS = (_INTERNVL, "llava_onevision")  # frames are pictures of one size; of the second from the starts of intervals
_GEMMA = "gemma4"  # as these, but a frame keeps its ratio, and is padded to the patches of the largest one; each has its time
_KINDS = (*_SAMPLED, *_EVEN, *_GLM, _GLM46, *_STILLS, _GEMMA)
_GLM_PROCESSORS = {"Glm4vVideoProcessor": "glm4v", "Glm46VVideoProcessor": _GLM46}  # checkpoints of one model type have either
_GLM46_RATES = ((30, 3.0), (300, 1.0), (2400, 0.5))  # longest video in seconds, temporal patches a second
_GLM46_FRAMES = 640
_GLM_PIXELS = (112 * 112, 28 * 28 * 2 * 30_000)
_STILL_FRAMES, _STILL_SIDE = 32, 384  # where the checkpoint's files do not say; vLLM's number, and the processors' size in pixels
_GEMMA_ROWS = 70  # of a frame at most
_OMNI_SIZE = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}  # `Qwen3OmniMoeProcessor.videos_kwargs`
_OMNI_POSITIONS = 25  # a second, where config.json does not say; the default of transformers


@dataclass(frozen=True, slots=True)
class _Stills:
    """Frames that are pictures of one size."""

    height: int  # pixels
    width: int
    shift: float | None  # frames before the first one that is read; None: half of the step between two


class VideoModality(ProcessorModality):
    """Videos for one checkpoint. Raises ConfigurationError for an architecture whose rules it does
    not know."""

    def __init__(self, context: ModalityContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        full = context.model_config.full_config
        self._kind = str(full.get("model_type"))
        if self._kind not in _KINDS:
            sentence = f"video of the model type {self._kind} is not supported, only of {' and '.join(_KINDS)}"
            raise ConfigurationError(f"{sentence}; leave video out of media.modalities.")
        stored = self._read_settings()
        if self._is_glm:
            named = stored.get("video_processor_type") or str(stored.get("image_processor_type")).replace("Image", "Video")
            self._kind = _GLM_PROCESSORS.get(named, self._kind)
        elif self._kind == _OMNI:  # whose processor class sets the size, whatever the file says
            stored = {**stored, "min_pixels": None, "max_pixels": None, "size": _OMNI_SIZE}
        is_fixed = self._is_still or self._kind == _GEMMA
        known = {*self._part_options} | (set() if is_fixed else {"min_pixels", "max_pixels"})
        known |= set() if is_fixed or self._is_glm else {"min_frames"}
        check_names(context.processor_options, known, "video processor")
        images = load_image_processor(context.folder)
        settings = {**stored, **context.processor_options}
        self._read_sides(settings, images)
        # frames a second, and for GLM the longest video that has them
        self._pace = float(settings.get("fps") or (0 if is_fixed else 2)), float(settings.get("max_duration") or 300)
        frames = settings.get("max_frames") or (settings.get("num_frames") or _STILL_FRAMES if is_fixed else 768)
        self._min_frames, self._max_frames = int(settings.get("min_frames") or 4), int(frames)
        self._max_frames = min(self._max_frames, context.limits.max_frames)
        if self._max_frames < self._min_max_frames:
            raise ConfigurationError(f"media.processor_options: max_frames of video must be at least {self._min_max_frames}.")
        self._scaling = _find_scaling(settings, images)
        if self._kind == _GEMMA:  # its patches have no axis of channels alone, and those behind the last one are zero
            if any(len(set(values.tolist())) > 1 for values in self._scaling.values()) or self._scaling[f"{_PIXELS}.offset"].any():
                raise ConfigurationError("the video processor of Gemma 4 has an image_mean, which is not implemented; leave it at zero.")
            self._scaling = {name: values[:1] for name, values in self._scaling.items()}
        tokenizer = load_tokenizer(context.folder)
        sizes = SimpleNamespace(merge_size=self._merge, temporal_patch_size=self._frames, patch_size=self._patch)
        self._processor = build_processor(context.folder, context.model_config, tokenizer, image_processor=images, video_processor=sizes)
        if self._is_still:
            self._check_still_size()
        self._placeholder = self._processor.video_token
        rows = "image" if self._is_glm or self._kind == _INTERNVL else "video"
        self._row_token = find_row_token(context.model_config, tokenizer, rows, self._placeholder)
        self._has_grids = context.model_config.has_mrope
        vision = full.get("vision_config") or {}  # that of Qwen3-Omni has the key too, which nothing reads
        per_second = full.get("position_id_per_seconds", _OMNI_POSITIONS) if self._kind == _OMNI else vision.get("tokens_per_second")
        self._per_second = float(per_second or 0)

    def _read_sides(self, settings: Mapping[str, Any], images: Any) -> None:
        """The sides of patches, and the bounds of a frame or its size, in pixels."""
        size = settings.get("size") or {}
        if self._is_still:
            side = (self.context.model_config.full_config.get("vision_config") or {}).get("patch_size") or 14
            self._patch, self._merge, self._frames = side if isinstance(side, int) else int(side[0]), 1, 1
            shift = settings.get("initial_shift") if self._kind == _INTERNVL else False
            height, width = (int(size.get(name) or _STILL_SIDE) for name in ("height", "width"))
            self._stills = _Stills(height, width, None if shift in (None, True) else float(shift))
            return
        self._patch = int(settings.get("patch_size", images.patch_size))
        if self._kind == _GEMMA:
            self._merge, self._frames = int(settings.get("pooling_kernel_size", images.pooling_kernel_size)), 1
            self._bounds = 0, int(settings.get("max_soft_tokens") or _GEMMA_ROWS) * (self._patch * self._merge) ** 2
            self._stills = _Stills(0, 0, 0.0)
            return
        self._merge = int(settings.get("merge_size", images.merge_size))
        self._frames = int(settings.get("temporal_patch_size", images.temporal_patch_size))
        factor = self._patch * self._merge
        bounds = _GLM_PIXELS if self._is_glm else (128 * factor**2, 768 * factor**2)
        names = (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
        pixels = [settings.get(name) or size.get(edge) or bound for (name, edge), bound in zip(names, bounds, strict=True)]
        self._bounds = int(pixels[0]), int(pixels[1])

    def _check_still_size(self) -> None:
        """Raises ConfigurationError unless a frame has as many patches as the processor writes
        tokens for."""
        height, width = self._stills.height, self._stills.width
        patches = (height // self._patch) * (width // self._patch)
        if self._kind == _INTERNVL:  # which merges patches
            ratio = float(self.context.model_config.full_config.get("downsample_ratio") or 0.5)
            written = self._processor.image_seq_length / ratio**2
        else:
            written = self._processor.num_image_tokens
        if patches != written:
            raise ConfigurationError(
                f"frames of {width} x {height} pixels have {patches} patches, and the video processor writes tokens for {written:g}; "
                f"correct `size` in {_FILES[0]}, or leave video out of media.modalities."
            )

    @property
    def _is_still(self) -> bool:
        return self._kind in _STILLS

    @property
    def _is_glm(self) -> bool:
        return self._kind in (*_GLM, _GLM46)

    @property
    def _part_options(self) -> tuple[str, ...]:
        return ("max_frames",) if self._kind == _GLM46 else ("fps", "max_frames")

    @property
    def _min_max_frames(self) -> int:
        """The smallest `max_frames`."""
        return self._frames if self._is_glm else 1

    def read_size(self, data: bytes) -> MediaSize:
        return read_video_size(data, self.context.limits)

    def lay_out(self, size: MediaSize, options: Mapping[str, Any]) -> MediaLayout:
        indices = self.sample(size, options)
        height, width = self.resize(size, len(indices))
        grid = (-(-len(indices) // self._frames), height // self._patch, width // self._patch)
        fps = size.frames / size.seconds
        metadata = SimpleNamespace(fps=fps, frames_indices=indices, total_num_frames=size.frames, timestamps=(indices / fps).tolist())
        pixels = [SimpleNamespace(shape=(len(indices), 3, height, width))]  # what the processors of stills count
        rows, columns = grid[1] // self._merge, grid[2] // self._merge
        inputs = {"video_grid_thw": np.array([grid]), "video_metadata": [metadata], _PIXELS: pixels}
        inputs["num_soft_tokens_per_video"] = [rows * columns]
        expansion: str = self._processor.replace_video_token(inputs, 0, load_audio_from_video=False)
        runs = len(re.findall(f"(?:{re.escape(self._row_token)})+", expansion))
        each = (grid[0], rows, columns) if runs == 1 else (1, rows, columns)
        seconds = self._frames * size.seconds / len(indices)  # of a temporal patch
        step = self._per_second * seconds if self._per_second and runs == 1 else 1.0
        patches = len(indices) * self._bounds[1] // self._patch**2 if self._kind == _GEMMA else math.prod(grid)
        return MediaLayout(expansion, (each,) * runs if self._has_grids else (), step, patches)

    def compute_features(self, data: bytes, size: MediaSize, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        from PIL.Image import Resampling

        indices = self.sample(size, options)
        height, width = self.resize(size, len(indices))
        frames = [
            np.asarray(picture.resize((width, height), Resampling.BICUBIC))
            for picture in decode_frames(data, indices.tolist(), size, self.context.limits)
        ]
        if len(frames) != len(indices):
            raise MediaError("the video has fewer frames than its header says; send it again as MP4")
        frames += frames[-1:] * (-len(frames) % self._frames)
        video = np.stack(frames)  # [frames, height, width, channels]
        grid = (len(video) // self._frames, height // self._patch, width // self._patch)
        if self._is_still:
            return {_PIXELS: np.ascontiguousarray(video.transpose(0, 3, 1, 2)), **self._scaling}
        if self._kind == _GEMMA:
            return {**self._pad(video, *grid[1:]), **self._scaling}
        return {_PIXELS: self._cut(video, grid), "video_grid_thw": np.array([grid], np.int64), **self._scaling}

    def sample(self, size: MediaSize, options: Mapping[str, Any]) -> np.ndarray:
        """The numbers of the frames that the model gets, int64 [n], ascending. Raises MediaError
        for options that cannot be used."""
        refuse_unknown(options, self._part_options)
        fps = number(options, "fps", 0.01, 240) or self._pace[0]
        maximum = int(number(options, "max_frames", self._min_max_frames, self._max_frames) or self._max_frames)
        if self._is_glm:
            chosen = _sample_glm46(size, self._frames) if self._kind == _GLM46 else _sample_glm(size, fps, self._pace[1])
            chosen = np.unique(np.minimum(chosen, size.frames - 1))
            maximum = maximum // self._frames * self._frames
            if len(chosen) > maximum:
                chosen = chosen[np.linspace(0, len(chosen) - 1, maximum).astype(np.int64)]
            return np.append(chosen, chosen[-1:]) if len(chosen) % 2 else chosen
        if self._is_still or self._kind == _GEMMA:
            count = min(maximum, size.frames, max(int(size.seconds * fps), 1) if fps else maximum)
            shift = size.frames / count / 2 if self._stills.shift is None else self._stills.shift
            chosen = (np.arange(count) * size.frames / count + shift).astype(np.int64)
            return np.minimum(chosen, size.frames - 1)
        total, minimum = size.frames, min(self._min_frames, maximum)
        target = size.seconds * fps
        if self._kind in _SAMPLED:
            maximum = min(maximum, total) // self._frames * self._frames
            count = math.floor(min(max(target, minimum), maximum, total) / self._frames) * self._frames
            count = count or 1  # a single frame
            return np.minimum((np.arange(count) * (total / count)).astype(np.int64), total - 1)
        count = min(max(int(target), minimum), maximum, total)
        return np.linspace(0, total - 1, count).round().astype(np.int64)

    def resize(self, size: MediaSize, count: int) -> tuple[int, int]:
        """Height and width of `count` frames for the encoder. Raises MediaError for a shape that it
        does not take."""
        height, width, factor = size.height, size.width, self._patch * self._merge
        if max(height, width) > MAX_RATIO * min(height, width):
            raise MediaError("the video is too narrow or too flat for the model; send one nearer to a square")
        if self._is_still:
            return self._stills.height, self._stills.width
        if self._kind == _GEMMA:
            return self._keep_ratio(height, width)
        frames = rounded = 1  # the bounds are those of a frame, or else of all frames
        if self._kind not in _SAMPLED:
            frames, rounded = count, max(1, round(count / self._frames)) * self._frames
            if height < factor or width < factor:
                scale = max(factor / height, factor / width)
                height, width = int(height * scale), int(width * scale)
        rows, columns = round(height / factor) * factor, round(width / factor) * factor
        if rounded * rows * columns > self._bounds[1]:
            ratio = math.sqrt(frames * height * width / self._bounds[1])
            return tuple(max(factor, math.floor(each / ratio / factor) * factor) for each in (height, width))  # type: ignore[return-value]
        if rounded * rows * columns < self._bounds[0]:
            ratio = math.sqrt(self._bounds[0] / (frames * height * width))
            return tuple(math.ceil(each * ratio / factor) * factor for each in (height, width))  # type: ignore[return-value]
        return rows, columns

    def _keep_ratio(self, height: int, width: int) -> tuple[int, int]:
        """The largest size of whole rows within the bound, of about this ratio."""
        unit, scale = self._patch * self._merge, math.sqrt(self._bounds[1] / (height * width))
        rows, columns = math.floor(height * scale / unit), math.floor(width * scale / unit)
        max_rows = self._bounds[1] // unit**2
        if not rows:
            rows, columns = 1, min(width // height, max_rows)
        elif not columns:
            rows, columns = min(height // width, max_rows), 1
        return rows * unit, columns * unit

    def _pad(self, video: np.ndarray, rows: int, columns: int) -> dict[str, np.ndarray]:
        """Frames as bytes of patches, [frames, patches, side * side * channels], and the place of
        each, [frames, patches, 2]; -1 behind the last one."""
        count, side = len(video), self._patch
        patches = video.reshape(count, rows, side, columns, side, 3).transpose(0, 1, 3, 2, 4, 5).reshape(count, rows * columns, -1)
        places = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1).reshape(1, -1, 2).repeat(count, 0)
        padding = ((0, 0), (0, self._bounds[1] // side**2 - rows * columns), (0, 0))
        return {_PIXELS: np.pad(patches, padding), "video_position_ids": np.pad(places, padding, constant_values=-1)}

    def _cut(self, video: np.ndarray, grid: tuple[int, int, int]) -> np.ndarray:
        """Frames as bytes of patches, [patches, channels, frames, side, side], merged ones
        together."""
        merge, side = self._merge, self._patch
        cut = video.reshape(grid[0], self._frames, grid[1] // merge, merge, side, grid[2] // merge, merge, side, 3)
        return cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3, self._frames, side, side)

    def _read_settings(self) -> dict[str, Any]:
        """From the file that transformers prefers: since version 5 it saves one for all parts."""
        folder = self.context.folder
        nested = read_settings(folder / "processor_config.json").get("video_processor")
        files = _FILES[:1] if self._kind == _GEMMA else _FILES  # images have other numbers of rows
        return nested if isinstance(nested, dict) else next(filter(None, (read_settings(folder / name) for name in files)), {})


def _sample_glm(size: MediaSize, fps: float, max_seconds: float) -> np.ndarray:
    """The frames that follow equal times, of a long video over its whole length."""
    rate = _find_rate(size)
    if size.seconds <= max_seconds:
        return np.ceil(np.arange(max(math.floor(size.seconds * fps), 1)) * rate / fps).astype(np.int64)
    count = int(max_seconds * fps)
    if count >= size.frames:
        return np.arange(size.frames)
    return np.ceil(np.linspace(0, size.seconds, count) * rate).astype(np.int64)


def _find_rate(size: MediaSize) -> float:
    """Frames a second, without the rounding of the length: a frame at a whole second is one."""
    return round(size.frames / size.seconds, 9)


def _sample_glm46(size: MediaSize, frames: int) -> np.ndarray:
    """The first frame of each interval, or frames at equal steps where these are not as many as
    expected. frames: of a temporal patch."""
    seconds = min(size.seconds, _GLM46_RATES[-1][0])
    rate = next(rate for max_seconds, rate in _GLM46_RATES if seconds <= max_seconds)
    count, first, last = min(int(seconds * rate * frames), _GLM46_FRAMES), 0, size.frames - 1
    if size.frames >= count:
        chosen, following, duration = list[int](), 0.0, 1 / _find_rate(size)
        for place in range(size.frames):
            if place * duration >= following:
                following += 1 / (frames * rate)
                chosen.append(place)
                if following >= int(size.seconds):
                    break
        if len(chosen) == count:
            return np.array(chosen)
        if len(chosen) < count:
            first, last = chosen[0], chosen[-1]
    return np.linspace(first, last, max(count, 1), dtype=np.int64)


def _find_scaling(settings: Mapping[str, Any], images: Any) -> dict[str, np.ndarray]:
    factor = float(settings.get("rescale_factor") or 1 / 255)
    mean = np.asarray(settings.get("image_mean") or images.image_mean, np.float64)
    deviation = np.asarray(settings.get("image_std") or images.image_std, np.float64)
    return {
        f"{_PIXELS}.scale": (factor / deviation).astype(np.float32),
        f"{_PIXELS}.offset": (-mean / deviation).astype(np.float32),
    }
