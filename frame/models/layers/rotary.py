"""Rotary position embedding: frequencies of the supported scaling schemes, and one cosine and sine
table for all layers.

Reads both spellings of config.json: `rope_parameters` (transformers 5), and `rope_theta` with
`rope_scaling` (transformers 4). Depends on no layer: a model gathers a batch's rows once, or the
layers pass the table to a kernel (`fused`). With positions of three components (M-RoPE, arXiv
2409.12191) each pair of a head turns by one of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from frame import kernels
from frame.core.errors import ConfigurationError
from frame.core.interfaces.media import RotaryPositions

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.model import ModelConfig

SPARE_POSITIONS = 8  # positions past the limit: a request that has just ended may run one more step


def read_rope_parameters(model_config: ModelConfig, kind: str | None = None, theta_key: str = "rope_theta") -> dict[str, Any]:
    """The rotary settings of a checkpoint in one spelling: rope_type, rope_theta,
    partial_rotary_factor and the scheme's own keys.

    `kind`: "full_attention" or "sliding_attention", for models whose layers differ. A config of
    transformers 4 scales the positions of full attention only, and may have a `theta_key` for the
    base of the other.
    """
    config = model_config.config
    stored = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in stored.values()):  # one entry for each kind of layer
        stored = stored.get(kind or "full_attention") or {}
    elif kind == "sliding_attention":
        stored = {}
    stored = dict(stored)
    stored["rope_type"] = stored.get("rope_type") or stored.get("type") or "default"
    if stored["rope_type"] == "mrope":  # of transformers 4: the plain frequencies, by `mrope_section`
        stored["rope_type"] = "default"
    if "long_factor" in stored:  # early Phi-3 checkpoints call it "su" or "yarn"
        stored["rope_type"] = "longrope"
    stored.setdefault("rope_theta", config.get(theta_key) or 10000.0)
    stored.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    original = config.get("original_max_position_embeddings")
    if original is not None:
        stored["original_max_position_embeddings"] = original
    stored.setdefault("original_max_position_embeddings", config.get("max_position_embeddings", model_config.max_context))
    stored["max_position_embeddings"] = config.get("max_position_embeddings", model_config.max_context)
    return stored


def compute_yarn_scale(parameters: Mapping[str, Any]) -> float:
    """The factor by which DeepSeek's YaRN multiplies the attention scale: the square of its
    `mscale_all_dim` factor."""
    weight = parameters.get("mscale_all_dim") or 0
    if parameters["rope_type"] == "default" or not weight:
        return 1.0
    return _mscale(_yarn_factor(parameters), weight) ** 2


class Rotary(nn.Module):
    """Rotates the first `dim` entries of a head, for positions up to the context limit.

    `interleaved`: pairs are neighbours; otherwise halves. `gather_rows(positions)` returns [tokens,
    2, 1, dim] (cosine and signed sine) for `rotate`; call it once per batch.
    """

    table: torch.Tensor
    components: torch.Tensor  # int64 [dim]; which component of a position each entry turns by
    places: torch.Tensor  # int64 [tokens of a step]; 0, 1, 2 ...

    def __init__(self, context: BuildContext, dim: int, parameters: Mapping[str, Any], interleaved: bool = False) -> None:
        super().__init__()
        self.dim = dim + dim % 2  # a share of a head may be odd: its last pair is whole
        self.interleaved = interleaved
        # LongRoPE's factors follow the context limit, not a sequence's length, so that cached keys
        # stay valid
        exceeds = context.limits.max_context > parameters["original_max_position_embeddings"]
        self.scheme = {**parameters, "exceeds_original": exceeds, "dim": dim}
        self.length = context.limits.max_context + SPARE_POSITIONS
        self.device = context.device
        self.dtype = context.dtype
        self.max_tokens = context.limits.max_tokens_per_step
        self.sections: tuple[int, ...] = tuple(parameters.get("mrope_section") or ())  # pairs of each component; empty: one component
        if self.sections and 2 * sum(self.sections) != self.dim:
            raise ConfigurationError(
                f"config.json: mrope_section {list(self.sections)} has {sum(self.sections)} pairs, and heads turn {self.dim // 2}"
            )
        self.fused = kernels.can_use_triton(context.device)
        # The size of the model is counted before `process_weights_after_loading`.
        self.register_buffer("table", torch.empty(self.length, 2, 1, self.dim, dtype=self.dtype, device="meta"), persistent=False)
        with torch.device("cpu"):  # on the meta device, torch would import its compiler for this
            compute_frequencies(self.scheme, dim)  # refuse an unknown scheme before weights are read

    def process_weights_after_loading(self) -> None:
        """Compute the table in float32, like the reference, then convert it to the model's dtype.
        It depends on no weight: a second call does nothing."""
        if not self.table.is_meta:
            return
        angles = _angles(self.scheme, self.scheme["dim"], self.length)
        factor = compute_attention_factor(self.scheme)
        cos, sin = angles.cos() * factor, angles.sin() * factor  # [positions, dim / 2]
        if self.interleaved:
            cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
        else:
            cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        table = torch.stack((cos, sin), 1).unsqueeze(2)
        self.register_buffer("table", table.to(device=self.device, dtype=self.dtype), persistent=False)
        if self.sections:
            pairs = find_components(self.sections, bool(self.scheme.get("mrope_interleaved")))
            components = pairs.repeat_interleave(2) if self.interleaved else pairs.repeat(2)
            self.register_buffer("components", components.to(self.device), persistent=False)
            self.register_buffer("places", torch.arange(self.max_tokens, device=self.device), persistent=False)

    def prepare_rows(self, batch: ForwardBatch) -> torch.Tensor | None:
        """The batch's rows of the table, [tokens, 2, 1, dim]; None where kernels read it by
        position."""
        turned = batch.get(RotaryPositions) if self.sections else None
        if turned is not None:
            rows = self.gather_rows(turned.positions.reshape(-1)).unflatten(0, (3, -1))
            return rows.gather(0, self.components.expand(1, *rows.shape[1:])).squeeze(0)
        return None if self.fused and not torch.compiler.is_compiling() else self.gather_rows(batch.positions)

    def choose_table(self, batch: ForwardBatch, rows: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """What a kernel that reads a table by position gets: int64 [tokens], and the table. rows:
        those of `prepare_rows`."""
        if rows is None or not self.sections or batch.get(RotaryPositions) is None:
            return batch.positions, self.table
        return self.places[: len(rows)], rows

    def gather_rows(self, positions: torch.Tensor) -> torch.Tensor:
        """positions int64 [tokens] -> [tokens, 2, 1, dim]."""
        return self.table.index_select(0, positions)

    def rotate(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """x [tokens, heads, at least dim] -> a new tensor of the same shape."""
        cos, sin = rows.unbind(1)
        if x.shape[-1] > self.dim:
            head, tail = x[..., : self.dim], x[..., self.dim :]
            return torch.cat((self._rotate(head, cos, sin), tail), -1)
        return self._rotate(x, cos, sin)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if self.interleaved:
            swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            swapped = x.roll(self.dim // 2, -1)
        return torch.addcmul(x * cos, swapped, sin)  # the sign is in the table


def find_components(sections: Sequence[int], interleaved: bool) -> torch.Tensor:
    """The component of a position that each pair of a head turns by: 0 frame, 1 height, 2 width;
    int64 [pairs]. interleaved: the components take turns, as long as height and width have
    sections; else one section follows another."""
    if not interleaved:
        return torch.arange(len(sections)).repeat_interleave(torch.tensor(sections))
    components = torch.zeros(sum(sections), dtype=torch.int64)
    for component in (1, 2):
        components[component : 3 * sections[component] : 3] = component
    return components


def compute_attention_factor(parameters: Mapping[str, Any]) -> float:
    """The factor of cosines and sines (the attention factor of YaRN and LongRoPE)."""
    if parameters["rope_type"] not in ("yarn", "longrope"):
        return 1.0
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    if parameters["rope_type"] == "longrope":
        factor = _yarn_factor(parameters)
        return math.sqrt(1 + math.log(factor) / math.log(parameters["original_max_position_embeddings"])) if factor > 1 else 1.0
    factor = _yarn_factor(parameters)
    some, every = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return _mscale(factor, some) / _mscale(factor, every) if some and every else _mscale(factor)


def compute_frequencies(parameters: Mapping[str, Any], dim: int) -> torch.Tensor:
    """Radians per position for each pair, float32 [dim / 2]. Raises ConfigurationError for an
    unknown scheme."""
    kind = parameters["rope_type"]
    base = float(parameters["rope_theta"])
    if kind == "none":  # no rotation
        return torch.zeros(dim // 2)
    if kind in ("default", "dynamic"):
        return _plain(base, dim)
    if kind == "proportional":  # the first part of the pairs rotates, at the frequencies of the whole head
        turning = int(parameters["partial_rotary_factor"] * dim // 2)
        return _plain(base, dim) * (torch.arange(dim // 2) < turning) / parameters.get("factor", 1.0)
    if kind == "linear":
        return _plain(base, dim) / parameters["factor"]
    if kind == "llama3":
        return _llama3(_plain(base, dim), parameters)
    if kind == "yarn":
        return _yarn(base, dim, parameters)
    if kind == "longrope":
        factors = parameters["long_factor" if parameters["exceeds_original"] else "short_factor"]
        return _plain(base, dim) / torch.tensor(factors, dtype=torch.float32)
    known = "default, linear, dynamic, llama3, yarn, longrope and proportional"
    raise ConfigurationError(f"rope_type {kind!r} is not implemented here, only {known}: set model.implementation: transformers.")


def _angles(parameters: Mapping[str, Any], dim: int, positions: int) -> torch.Tensor:
    """Angles float32 [positions, dim / 2]."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * compute_frequencies(parameters, dim)
    if parameters["rope_type"] == "dynamic" and positions > parameters["max_position_embeddings"]:
        # A position beyond the trained length uses the frequencies of a sequence that ends there.
        # That is what token-by-token decoding does, and unlike frequencies of the whole batch it is
        # the same for every request, so cached keys stay valid.
        trained, factor = parameters["max_position_embeddings"], parameters["factor"]
        beyond = torch.arange(trained, positions, dtype=torch.float64)[:, None]
        base = parameters["rope_theta"] * (factor * (beyond + 1) / trained - (factor - 1)) ** (dim / (dim - 2))
        angles[trained:] = (beyond / base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)).float()
    return angles


def _plain(base: float, dim: int) -> torch.Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _llama3(plain: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: divide low frequencies by `factor`, keep high ones, interpolate between."""
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    trained = parameters["original_max_position_embeddings"]
    waves = 2 * math.pi / plain
    blend = (trained / waves - low) / (high - low)
    between = (1 - blend) * plain / factor + blend * plain
    scaled = torch.where(waves > trained / low, plain / factor, plain)
    return torch.where((waves <= trained / low) & (waves >= trained / high), between, scaled)


def _yarn(base: float, dim: int, parameters: Mapping[str, Any]) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): interpolate low frequencies, keep high ones, ramp between."""
    factor, trained = _yarn_factor(parameters), parameters["original_max_position_embeddings"]

    def pair_of(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_of(parameters.get("beta_fast") or 32), pair_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    waves = base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return 1.0 / (factor * waves) * (1 - keep) + 1.0 / waves * keep


def _yarn_factor(parameters: Mapping[str, Any]) -> float:
    factor = parameters.get("factor")
    return float(factor) if factor is not None else parameters["max_position_embeddings"] / parameters["original_max_position_embeddings"]


def _mscale(scale: float, weight: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0
