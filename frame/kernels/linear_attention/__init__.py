"""The kernels of layers whose past is one state a sequence: gated delta networks, Kimi Delta
Attention and Mamba-2.

`convolution` computes the short causal convolution, `scan` a few tokens of each row one by one, and
`chunks` prompts in the chunked parallel form. All read a layer's inputs by its `MixLayout`. The
caller, `frame.models.layers.linear_attention.mixer`, has the same computation in PyTorch. Importing
this package does not import Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

CHUNK = 64  # tokens that the chunked form computes together


@dataclass(frozen=True, slots=True)
class MixLayout:
    """The sizes of one layer on one rank, and where q, k and v begin in the channels of its
    convolution. Heads share key heads in order.

    by_key: the decay differs between key entries. delta: the state changes by the delta rule.
    normalized: q and k are divided by their lengths, and q by the root of the key size; they are
    the first channels then.
    """

    heads: int
    key_heads: int
    key: int  # entries of a head of q and k
    value: int
    places: tuple[int, int, int]
    by_key: bool = False
    delta: bool = True
    normalized: bool = True

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key + self.heads * self.value

    @property
    def constants(self) -> dict[str, Any]:
        """The constants that the kernels of `scan` and `chunks` share."""
        q, k, v = self.places
        sizes = {"HEADS": self.heads, "KEY_HEADS": self.key_heads, "KEYS": self.key, "VALUES": self.value}
        return sizes | {"CHANNELS": self.channels, "Q": q, "K": k, "V": v, "BY_KEY": self.by_key, "DELTA": self.delta}


class Gates(NamedTuple):
    """The gates of some tokens before their activations, and the parameters of the layer.

    log decay = -exp(log_decay) * softplus(decay + bias). With the delta rule, the write strength is
    sigmoid(beta); without it, max(softplus(decay + bias), least), which replaces the softplus of
    the decay too, and `skip` * v is added to the results.
    """

    decay: torch.Tensor  # [tokens, heads], or [tokens, heads * key size] for a decay of each key entry
    beta: torch.Tensor  # [tokens, heads]; not read without the delta rule
    log_decay: torch.Tensor  # float32 [heads]
    bias: torch.Tensor  # float32, of the width of `decay`
    skip: torch.Tensor | None = None  # float32 [heads]
    minimum: float = 0.0


class StatePages(NamedTuple):
    """Rows of a step, int64 [rows]: the page of each row's state before its first token, and the
    page that the state after its last token is written to."""

    sources: torch.Tensor
    targets: torch.Tensor
