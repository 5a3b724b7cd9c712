"""Loads a head that `config.json` ties to the embedding, from checkpoints that store both.

As in transformers, equal matrices share one parameter, and a stored head that differs from the
embedding is used. Called by the models that have a tied `Head`. Depends on no architecture.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import nn

from frame.models.layers.parameter import load_parameters

if TYPE_CHECKING:
    from frame.core.interfaces.model import LazyTensor
    from frame.models.layers.embedding import Head, VocabEmbedding

_log = logging.getLogger("frame.models")


def load_tied(
    model: nn.Module,
    head: Head | None,
    embedding: VocabEmbedding,
    weights: Iterable[tuple[str, LazyTensor]],
    ignored: Iterable[str] = (),
) -> set[str]:
    """As `load_parameters`, for a model whose `head` shares the parameter of `embedding`; None: the
    head is on another rank. A matrix that is stored under the head's name alone is the embedding's
    too."""
    name = "lm_head" if head is None else head.name
    plain, stored = f"{name}.weight", dict[str, "LazyTensor"]()
    loaded = load_parameters(model, _set_aside(weights, f"{name}.", stored), ignored)
    shared = embedding.weight
    if plain in stored and shared.pending and (head is None or head.is_tied):
        for source in shared.pending:
            shared.load(source, stored[plain])
        loaded |= {key for key, parameter in model.named_parameters(remove_duplicate=False) if parameter is shared}
        return loaded
    if head is None or not stored:
        return loaded
    if head.is_tied:  # weights that are loaded again stay where captured graphs read them
        if list(stored) == [plain] and embedding.is_equal(stored[plain]):
            return loaded
        _log.warning("config.json ties %s to the embedding, but the checkpoint stores another matrix, which is used", name)
        head.untie()
    path = next(key for key, module in model.named_modules() if module is head)
    loaded -= {key for key in loaded if key.startswith(f"{path}.")}
    return loaded | {f"{path}.{key}" for key in load_parameters(head, stored.items())}


def _set_aside(weights: Iterable[tuple[str, LazyTensor]], prefix: str, stored: dict[str, LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors without those of the head, which are put into `stored`."""
    for name, tensor in weights:
        if name.startswith(prefix):
            stored[name] = tensor
        else:
            yield name, tensor
