"""`MediaEncoder`: the media of one rank in each step: encodes items into a table of rows on the
device, and makes what the forward pass reads of them.

Made by the runner's builder where media are on; the runner and the input batch call it as
`StepMedia`. The scheduler says which rows of the table an item gets. Must not know a request, a
modality or a model by name.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from frame.core.errors import ConfigurationError
from frame.core.interfaces.media import DividesEncoders, HasEncoders, MediaRows, MediaSpans, RotaryPositions
from frame.core.interfaces.platform import SupportsStreams
from frame.media.files import map_features

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ForwardBatch, ScheduledBatch
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.media import EncodeOrder, MediaItem
    from frame.core.interfaces.model import Model

_HIDDEN = ("hidden_size", "embed_dim", "d_model", "vt_hidden_size")  # names of an encoder's sizes in config.json
_INNER = ("intermediate_size", "encoder_ffn_dim", "hidden_dim", "vt_intermediate_size")


def count_bytes(model: Model, context: BuildContext, config: Mapping[str, Any]) -> int:
    """Bytes of the table, and what encoding needs at most: a conservative estimate, as that of a
    step of text. config: `ModelConfig.full_config`."""
    sizes, width = context.media, find_width(model, context)
    if sizes is None or not width:
        return 0
    sections = _list_sections(config)
    hidden, inner = (max((_read_size(each, names) for each in sections), default=0) for names in (_HIDDEN, _INNER))
    numbers = sizes.table_rows * width + sizes.step_patches * (8 * hidden + 4 * max(inner, hidden) + width)
    numbers += sizes.held_patches * (4 * hidden + width // 4)  # a layer's output and rotary positions; rows of DeepStack
    return numbers * context.dtype.itemsize


def find_width(model: Model, context: BuildContext) -> int:
    """The columns of the table on this rank; 0: it encodes nothing. In a pipeline the first stage
    encodes. Raises ConfigurationError if a later stage would need the rows."""
    stage = context.pipeline
    if not isinstance(model, HasEncoders) or (stage is not None and not stage.is_first):
        return 0
    hidden_size: int = model.model_config.hidden_size  # type: ignore[attr-defined]
    num_layers = model.encoder_width // hidden_size - 1
    if stage is not None and num_layers > len(stage.layers):
        raise ConfigurationError(
            f"the model adds rows of its encoders after its first {num_layers} layers, and the first stage has {len(stage.layers)}; "
            "lower parallel.pp, or serve text alone with --language-model-only"
        )
    return model.encoder_width


class MediaEncoder:
    """Implements `StepMedia`. Calls run on the runner's stream and in inference mode, which orders
    them: a row is written after the last step that read it, and before the next one does."""

    def __init__(self, model: Model, context: BuildContext) -> None:
        """Raises ValueError for a context without media."""
        if context.media is None:
            raise ValueError("an encoder needs a context with media")
        limits, device = context.limits, context.device
        width, num_rows = find_width(model, context), context.media.table_rows
        self._model = model if isinstance(model, HasEncoders) and width else None
        self._platform = context.platform
        self._group = context.tp
        self._device = device
        self.table = torch.zeros(num_rows, width, dtype=context.dtype, device=device) if width else None
        self._offsets = np.zeros(limits.max_running_requests + 1, np.int64)  # by request slot; see `SlotSetup`
        self._device_offsets = torch.zeros(len(self._offsets), dtype=torch.int64, device=device)
        self._last_position = limits.max_context - 1
        turns = any(getattr(module, "sections", ()) for module in model.modules())  # type: ignore[attr-defined]
        self._fixed_rows = torch.full((limits.max_tokens_per_step,), -1, dtype=torch.int64, device=device)
        self._fixed_positions = torch.zeros(3, limits.max_tokens_per_step, dtype=torch.int64, device=device) if turns else None
        self._has_placed = False  # whether an entry of `_fixed_rows` is not -1
        self._layers: _Layers | None = None  # of the item that several steps encode

    def begin_step(self, batch: ScheduledBatch) -> None:
        """See `StepMedia.begin_step`."""
        if batch.setups:
            slots = [setup.slot for setup in batch.setups]
            offsets = np.array([setup.position_offset for setup in batch.setups])
            if (self._offsets[slots] != offsets).any():
                self._offsets[slots] = offsets
                self._device_offsets.copy_(torch.from_numpy(self._offsets.copy()), non_blocking=True)
        orders: dict[str, list[EncodeOrder]] = {}
        for order in batch.encodes:
            if order.first_layer or order.stop_layer:
                self._encode_layers(order)
            elif order.slot < 0:  # else the model's own pass encodes it, see `EncoderInputs`
                orders.setdefault(order.item.modality, []).append(order)
        for modality, some in orders.items():
            self._encode(modality, some)

    def _encode(self, modality: str, orders: Sequence[EncodeOrder]) -> None:
        """Ranks of tensor parallelism divide the items, and send each other the rows. A single item
        is encoded by all of them, which need not send it then."""
        if self.table is None or self._model is None:
            return
        group = self._group
        if group.size == 1 or len(orders) == 1:
            self._store(orders, self._compute(self._model, modality, orders))
            return
        shares = divide_orders(orders, group.size)
        own = self._compute(self._model, modality, shares[group.rank]) if shares[group.rank] else None
        for rank, share in enumerate(shares):
            if share:
                shape = sum(len(order.rows) for order in share), self.table.shape[1]
                rows = own if own is not None and rank == group.rank else self.table.new_empty(shape)
                self._store(share, group.broadcast(rows, rank))

    def _compute(self, model: HasEncoders, modality: str, orders: Sequence[EncodeOrder]) -> torch.Tensor:
        """The rows of all items, one after another."""
        return self._join(modality, orders, model.encode(modality, [self._load(order.item) for order in orders]))

    def _encode_layers(self, order: EncodeOrder) -> None:
        """Compute some layers of an item, from the first one on if they are not known: after a
        failed step. A model that cannot divide its encoders computes all at the last ones."""
        if not isinstance(self._model, DividesEncoders):
            if not order.stop_layer and order.first_layer >= 0:
                self._encode(order.item.modality, [order])
            return
        layers, self._layers = self._layers, None
        if layers is not None and (order.first_layer <= 0 or order.item.digest != layers.digest):
            layers.close()
            layers = None
        if order.first_layer < 0 or self.table is None:
            return
        if layers is None:
            layers = _Layers(order.item.digest, self._model.encode_by_layer(order.item.modality, self._load(order.item)))
        rows = layers.compute(order.stop_layer)
        if order.stop_layer:
            self._layers = layers
        elif rows is not None:
            self._store([order], self._join(order.item.modality, [order], [rows]))

    def _load(self, item: MediaItem) -> dict[str, torch.Tensor]:
        return {name: self._move(array) for name, array in _read(item).items()}

    def _join(self, modality: str, orders: Sequence[EncodeOrder], encoded: Sequence[torch.Tensor]) -> torch.Tensor:
        assert self.table is not None, "a rank that encodes has a table"
        for order, rows in zip(orders, encoded, strict=True):
            if rows.shape != (len(order.rows), self.table.shape[1]):
                raise RuntimeError(
                    f"{type(self._model).__name__} encodes a file of the modality {modality} to {tuple(rows.shape)}, and its prompt has "
                    f"{len(order.rows)} placeholders of width {self.table.shape[1]}"
                )
        return torch.cat(tuple(encoded)).to(self.table.dtype)

    def _store(self, orders: Sequence[EncodeOrder], rows: torch.Tensor) -> None:
        assert self.table is not None, "a rank that encodes has a table"
        places = self._move(np.concatenate([order.rows for order in orders]).astype(np.int64))
        self.table.index_copy_(0, places, rows)

    def _move(self, array: np.ndarray) -> torch.Tensor:
        """A copy of an array on the device."""
        if not isinstance(self._platform, SupportsStreams):
            return torch.from_numpy(np.array(array))  # the file is mapped read-only, which torch has no tensors for
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        pinned = self._platform.allocate_pinned(array.shape, dtype)
        pinned.numpy()[...] = array
        return pinned.to(self._device, non_blocking=True)

    def find_positions(self, slots: np.ndarray, positions: np.ndarray, batch: ScheduledBatch | None = None) -> np.ndarray:
        """See `StepMedia.find_positions`."""
        turned = positions + self._offsets[slots]
        if batch is not None and batch.rotary_positions is not None:
            first = batch.rotary_positions[0]
            if batch.num_drafts is None:
                turned[batch.num_decodes :] = first
            else:  # of drafts the rows and the depths in trees count, as of decodes
                is_prompt = np.repeat(batch.num_drafts == 0, batch.num_scheduled)[batch.num_decodes :]
                turned[batch.num_decodes :][is_prompt] = first[is_prompt]
        # drafts of a request with a long video may be ahead of its last token
        return np.minimum(turned, np.maximum(positions, self._last_position))

    def list_arrays(self, batch: ScheduledBatch) -> dict[str, np.ndarray]:
        """See `StepMedia.list_arrays`. Decodes come first, and are no placeholders."""
        arrays, decodes = dict[str, np.ndarray](), batch.num_decodes
        if batch.media_rows is not None and self.table is not None:
            arrays["rows"] = np.pad(batch.media_rows.astype(np.int64), (decodes, 0), constant_values=-1)
        if batch.rotary_positions is not None:
            bounded = np.minimum(batch.rotary_positions, self._last_position).astype(np.int64)  # like `find_positions`
            differences = bounded - bounded[:1]
            arrays["differences"] = np.pad(differences, ((0, 0), (decodes, 0)))
        if batch.media_spans is not None:
            arrays["spans"] = np.pad(batch.media_spans, (decodes, 0))
        return arrays

    def make_extensions(self, tensors: Mapping[str, torch.Tensor], positions: torch.Tensor) -> dict[type, Any]:
        """See `StepMedia.make_extensions`."""
        extensions = dict[type, Any]()
        if "rows" in tensors and self.table is not None:
            extensions[MediaRows] = MediaRows(tensors["rows"], self.table)
        if "differences" in tensors:
            components = (tensors["differences"] + positions).clamp_(max=self._last_position)
            extensions[RotaryPositions] = RotaryPositions(components)
        if "spans" in tensors:
            extensions[MediaSpans] = MediaSpans(tensors["spans"])
        return extensions

    def get_fixed(self, size: int) -> dict[type, Any]:
        """See `StepMedia.get_fixed`."""
        extensions = dict[type, Any]()
        if self.table is not None:
            extensions[MediaRows] = MediaRows(self._fixed_rows[:size], self.table)
        if self._fixed_positions is not None:
            extensions[RotaryPositions] = RotaryPositions(self._fixed_positions[:, :size])
        return extensions

    def place_tokens(self, batch: ForwardBatch) -> None:
        """See `StepMedia.place_tokens`. Later tokens keep earlier positions, and are no
        placeholders."""
        count, media, turned = batch.num_tokens, batch.get(MediaRows), batch.get(RotaryPositions)
        if self._has_placed:
            self._fixed_rows.fill_(-1)
        self._has_placed = media is not None
        if media is not None:
            self._fixed_rows[:count].copy_(media.rows)
        if self._fixed_positions is not None:
            self._fixed_positions[:, :count].copy_(batch.positions if turned is None else turned.positions)

    def shift_positions(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `StepMedia.shift_positions`."""
        turned = positions + self._device_offsets.index_select(0, slots)
        return torch.minimum(turned, positions.clamp(min=self._last_position))


class _Layers:
    """What several steps compute of one item."""

    def __init__(self, digest: bytes, computing: Generator[None, None, torch.Tensor]) -> None:
        self.digest = digest
        self._computing = computing
        self._done = 0  # layers
        self._rows: torch.Tensor | None = None

    def compute(self, stop: int) -> torch.Tensor | None:
        """Compute the layers before `stop`; 0: all of them. -> the rows, once they are known."""
        try:
            while self._rows is None and (not stop or self._done < stop):
                next(self._computing)
                self._done += 1
        except StopIteration as ended:
            self._rows = ended.value
        return self._rows

    def close(self) -> None:
        """Free what has been computed."""
        self._computing.close()


def divide_orders(orders: Sequence[EncodeOrder], count: int) -> list[list[EncodeOrder]]:
    """The items by rank, of nearly as many positions each: the largest first, to the rank that has
    least. All ranks divide equal orders equally."""
    shares: list[list[EncodeOrder]] = [[] for _ in range(count)]
    loads = [0] * count
    for order in sorted(orders, key=lambda order: -order.item.patches):
        rank = loads.index(min(loads))
        shares[rank].append(order)
        loads[rank] += order.item.patches
    return shares


def _read(item: MediaItem) -> dict[str, np.ndarray]:
    try:
        return map_features(item)
    except (OSError, ValueError) as error:  # the client gets the sentence, without the path
        raise RuntimeError(f"the prepared {item.modality} is not readable any more; send the request again") from error


def _list_sections(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The sections of config.json besides the text model's, those in a section too."""
    sections = [each for name, each in config.items() if isinstance(each, Mapping) and name != "text_config"]
    return sections + [inner for each in sections for inner in _list_sections(each)]


def _read_size(section: Mapping[str, Any], names: Sequence[str]) -> int:
    return max((value for name in names if isinstance(value := section.get(name), int)), default=0)
