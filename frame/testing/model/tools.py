"""`Tools`: the model of one tiny checkpoint, and what it must compute. For the checks of models."""

from __future__ import annotations

from typing import Any

import torch

from frame.testing.conformance import Subject
from frame.testing.model.session import Checkpoint, Session, load

TOLERANCE = 2e-4  # absolute and relative, in float32


class Tools:
    """The model of one checkpoint, and what it must compute."""

    def __init__(self, subject: Subject, checkpoint: Checkpoint) -> None:
        self.subject, self.checkpoint = subject, checkpoint

    def open(self, page_size: int = 16, dtype: torch.dtype = torch.float32, **changes: Any) -> Session:
        """A session of a new model. changes: fields of the model's context."""
        return Session(self.subject, self.checkpoint, load(self.subject, self.checkpoint, dtype, **changes), page_size)

    def expected(self, tokens: list[int]) -> torch.Tensor:
        """The result for a prompt. Without a reference it is the model's own, which must differ by
        token: a constant shows no mistake."""
        result = self.checkpoint.reference(tokens)
        if result is None:
            result = self.open().step((0, tokens))[0]
            is_constant = len(set(tokens)) > 1 and torch.equal(result, result[:1].expand_as(result))
            assert not is_constant, "all tokens of a prompt have the same result, which shows no mistake"
        return result

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        vocab = self.checkpoint.model_config.vocab_size
        return torch.randint(6, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()

    def compare(self, result: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        assert result.shape == expected.shape, f"{what}: the result's shape is {tuple(result.shape)}, not {tuple(expected.shape)}"
        assert torch.isfinite(result).all(), f"{what}: the result is not finite; a weight or a page was read that is not set"
        error = (result - expected).abs() / (1 + expected.abs())
        worst = int(error.amax(-1).argmax())
        assert float(error.max()) <= TOLERANCE, f"{what}: largest error {float(error.max()):.2e} at token {worst} of {len(error)}"
