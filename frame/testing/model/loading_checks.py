"""Checks of models: weights in any order and in several calls, as an update by a trainer has
them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from frame.core.errors import CheckpointError
from frame.loading.loader import forget_loaded, process_weights_after_loading
from frame.testing.conformance import SkipCheck
from frame.testing.model.session import Session, Weights, build, read
from frame.testing.model.tools import Tools

PARTS = 3


def lend(weights: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in one buffer, which each overwrites. It is NaN in the end."""
    values = [(name, value[...]) for name, value in weights]
    buffer = torch.empty(max(value.nbytes for _, value in values), dtype=torch.uint8)
    for name, value in values:
        buffer.fill_(0xFF)
        yield name, buffer[: value.nbytes].view(value.dtype).view(value.shape).copy_(value)
    buffer.fill_(0xFF)


def _compute(tools: Tools, model: Any, tokens: list[int]) -> torch.Tensor:
    return Session(tools.subject, tools.checkpoint, model.eval().requires_grad_(False)).step((0, tokens))[0]


@torch.no_grad()
def _load(tools: Tools, parts: Sequence[Weights]) -> tuple[Any, set[str]]:
    """A model that gets its weights in these calls, and the parameters that they name."""
    model, loaded = build(tools.subject, tools.checkpoint), set()
    for part in parts:
        loaded |= set(model.load_weights(lend(part)))
    process_weights_after_loading(model)
    return model, loaded


@torch.no_grad()
def _read_parts(tools: Tools) -> Weights:
    """The tensors for a model that takes some of them. Raises SkipCheck for one that refuses a
    checkpoint which is not complete, and so every update by a trainer."""
    model = build(tools.subject, tools.checkpoint)
    weights = read(model, tools.checkpoint)
    try:
        model.load_weights(lend(weights[:1]))
    except CheckpointError as error:
        raise SkipCheck(f"it takes all tensors in one call: {error}") from error
    return weights


def check_weights_in_any_order(tools: Tools) -> None:
    """Tensors in the reverse order, each valid until the next one is requested."""
    tokens, weights = tools.prompt(20, seed=3), _read_parts(tools)
    model, _ = _load(tools, [weights[::-1]])
    tools.compare(_compute(tools, model, tokens), tools.expected(tokens), "weights in reverse order, each valid until the next")


def check_weights_in_parts(tools: Tools) -> None:
    """Tensors of one layer in several calls of `load_weights`."""
    tokens, weights = tools.prompt(20, seed=3), _read_parts(tools)
    model, loaded = _load(tools, [weights[part::PARTS] for part in range(PARTS)])
    tools.compare(_compute(tools, model, tokens), tools.expected(tokens), f"weights in {PARTS} calls of load_weights")
    unnamed = sorted(set(dict(model.named_parameters())) - loaded)
    assert not unnamed, f"none of {PARTS} calls of load_weights returns {', '.join(unnamed[:4])}"


@torch.no_grad()
def check_names_are_those_of_the_call(tools: Tools) -> None:
    """A second loading returns the names that it set, not those of the first one too."""
    model, weights = build(tools.subject, tools.checkpoint), _read_parts(tools)
    model.load_weights(iter(weights))
    process_weights_after_loading(model)
    forget_loaded(model)
    first = weights[:1]
    loaded = set(model.load_weights(iter(first)))
    surplus = set(dict(model.named_parameters())) - loaded
    assert surplus or len(weights) == 1, f"`load_weights` of {first[0][0]} alone returns all parameters: those of an earlier call count"


def check_processed_twice(tools: Tools) -> None:
    """`process_weights_after_loading` is called for a layer whose last tensor came, and for the
    whole model at the end of an update."""
    tokens, session = tools.prompt(20, seed=3), tools.open()
    model: Any = session.model
    process_weights_after_loading(model)
    what = "a prompt after a second process_weights_after_loading"
    tools.compare(session.step((0, tokens))[0], tools.expected(tokens), what)
