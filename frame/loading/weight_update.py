"""Replaces the weights of a loaded model by those of another checkpoint, at the same addresses.

`WeightUpdater` is one rank's side; `UpdatingRunner` gives it to the runner that steps call. The
checkpoint is read through the weight source of the start, so that slices of ranks, merged layers
and formats are those of a start. `WeightCommands`, rank 0's side, gives the orders.
Names and shapes are checked on every rank before the first write; an update that fails later ends
the engine, which is started again with the weights that it had before. Must not know requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from frame.checkpoint.model_config import find_model, read_model_config
from frame.core.blame import explain
from frame.core.errors import CheckpointError, ConfigurationError
from frame.core.interfaces.platform import Platform, SupportsStreams
from frame.core.interfaces.runner import ModelRunner, TransferOrder, WeightOrder, WrappedRunner
from frame.interfaces.weights import WeightSource, WeightSourceContext
from frame.loading.loader import Checkpoint, UpdatedModel, beat_for_each, load_weights, process_weights_after_loading, record_form

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UpdateSource:
    """How checkpoints are read. `architecture`: the one that they must have."""

    architecture: str
    open_source: Callable[[WeightSourceContext], WeightSource]
    seed: int = 0


class WeightUpdater:
    """The models of one rank. `open_models`: makes the list of them, the target first, at the first
    update; drafters that have a checkpoint of their own are not among them."""

    def __init__(self, open_models: Callable[[], Sequence[UpdatedModel]], source: UpdateSource, platform: Platform) -> None:
        self._open_models = open_models
        self._models: Sequence[UpdatedModel] | None = None
        self._source = source
        self._platform = platform

    @property
    def models(self) -> Sequence[UpdatedModel]:
        if self._models is None:
            self._models = self._open_models()
        return self._models

    def check(self, folder: str) -> None:
        """Compare names, shapes and types of a checkpoint with the models, without a write. Raises
        CheckpointError, one sentence."""
        config = read_model_config(find_model(folder), "model_path")
        if config.architecture != self._source.architecture:
            raise CheckpointError(
                f"model_path {folder!r} has the architecture {config.architecture}, and this engine runs {self._source.architecture}: "
                "name a checkpoint of the same model."
            )
        for each in self.models:
            with torch.device("meta"):
                empty = each.make()
            try:
                load_weights(empty, self._checkpoint(folder), is_dry=True)
            except ConfigurationError:
                raise
            except Exception as error:
                log.warning("a checkpoint could not be checked", exc_info=True)
                raise CheckpointError(
                    f"{folder} cannot be checked before it is loaded ({explain(error)}): restart the server with this checkpoint."
                ) from error

    @torch.no_grad()
    def load(self, folder: str, beat: Callable[[], object]) -> None:
        """Load a checkpoint that was checked. Raises an error after which the weights are a
        mixture: of a file that changed, or of values of another form than captured graphs read."""
        self._platform.activate()
        streams = self._platform if isinstance(self._platform, SupportsStreams) else None
        if streams is not None:
            streams.synchronize()  # steps run on another stream
        for each in self.models:
            before = record_form(each.model)
            watched: Any = BeatingModel(each.model, beat)
            load_weights(watched, self._checkpoint(folder), platform=self._platform)
            process_weights_after_loading(each.model)
            beat()
            if streams is not None and record_form(each.model) != before:
                raise CheckpointError(f"{folder} changes tensors or scales that captured graphs have read: restart with this checkpoint.")
        if streams is not None:
            streams.synchronize()
        self._platform.release_memory()

    def _checkpoint(self, folder: str) -> Checkpoint:
        return Checkpoint(find_model(folder), self._source.open_source, self._source.seed)


class BeatingModel:
    """A model for `load_weights`, which calls `beat` for each tensor that is read."""

    def __init__(self, model: Any, beat: Callable[[], object]) -> None:
        self._model, self._beat = model, beat

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> Any:
        return self._model.load_weights(beat_for_each(weights, self._beat))


class TensorOrders(Protocol):
    """Updates by a trainer's tensors. `frame.loading.tensor_update` documents the methods."""

    def run(self, order: TransferOrder, beat: Callable[[], object]) -> str: ...
    def close(self) -> None: ...


class UpdatingRunner(WrappedRunner):
    """A rank's runner whose weights may change between two steps. tensors: updates by a trainer's
    tensors; None: there are none."""

    def __init__(self, runner: ModelRunner, updater: WeightUpdater, tensors: TensorOrders | None = None) -> None:
        super().__init__(runner)
        self._updater = updater
        self._tensors = tensors

    def update_weights(self, order: WeightOrder | TransferOrder, beat: Callable[[], object]) -> str:
        try:
            if isinstance(order, TransferOrder):
                return "this rank has no weight transfers" if self._tensors is None else self._tensors.run(order, beat)
            if order.is_check:
                self._updater.check(order.folder)
            else:
                self._updater.load(order.folder, beat)
        except ConfigurationError as error:
            return str(error)
        except Exception as error:
            log.exception("an update of the weights failed")
            return f"the weights could not be loaded: {explain(error)}"
        return ""

    def close(self) -> None:
        if self._tensors is not None:
            self._tensors.close()
        super().close()
