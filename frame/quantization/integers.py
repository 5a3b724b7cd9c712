"""From stored integers to canonical quantized values: packed words, act-order, and compact scales.

Used by the formats of integer weights. Depends on no configuration of a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from frame.core.errors import CheckpointError
from frame.core.interfaces.weight_format import BLOCK, Axis, CanonicalWeight, WeightScheme, pack_nibbles

_WORD = 32  # bits of a packed word


def word_axis(of: str, bits: int) -> Axis:
    """The axis of values packed into 32-bit words."""
    if _WORD % bits == 0:
        return Axis("output" if of == "output" else "input", _WORD // bits)
    return Axis("output" if of == "output" else "input", _WORD, bits)


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., n] -> uint8 [..., 32 n / bits]: a stream of bits, the lowest first. `bits` is at
    most 8; for others than 2, 4 and 8, n is a multiple of `bits`."""
    if _WORD % bits == 0:
        octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)  # `contiguous` keeps the stride of one word
        if bits == 8:
            return octets
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
        return (octets.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1).flatten(-2)
    groups = words.long().bitwise_and_(0xFFFFFFFF).unflatten(-1, (-1, bits))
    starts = torch.arange(0, _WORD * bits, bits, device=words.device)
    first, offset = starts // _WORD, starts % _WORD
    low = groups[..., first] >> offset
    high = groups[..., (first + 1).clamp_max(bits - 1)] << (_WORD - offset)
    return (low | high).bitwise_and_((1 << bits) - 1).to(torch.uint8).flatten(-2)


def pack_words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `unpack_words` for 2, 4 and 8 bits."""
    shifted = values.long().unflatten(-1, (-1, _WORD // bits)) << torch.arange(0, _WORD, bits)
    return shifted.sum(-1).to(torch.int32)


def unpack_pairs(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] -> [..., 2 n]: the nibbles, the lower first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


@dataclass(slots=True)
class Integers:
    """Unsigned quantized values uint8 [..., outputs, inputs], scales and, if there are any,
    unsigned zero points uint8 [..., outputs, groups]. `owners`: int32 [..., inputs], the group of
    each input (act-order); None: groups follow one another."""

    bits: int
    quantized: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    owners: torch.Tensor | None = None

    def to_canonical(self, dtype: torch.dtype) -> CanonicalWeight:
        """The canonical form. `dtype`: of the model, preferred for scales if it represents them."""
        inputs, ordered, order = self.quantized.shape[-1], self, None
        if self.owners is not None and self.scales.shape[-1] > 1:
            ordered, order = self._sort()
        group = ordered.quantized.shape[-1] // ordered.scales.shape[-1]
        scheme = WeightScheme("int4" if self.bits <= 4 else "int8", (1, group), self.zeros is not None, order is not None)
        shift = (8 if self.bits <= 4 else 0) - (1 << self.bits - 1)  # from unsigned quantized values to the canonical ones
        zeros = ordered.zeros.to(torch.int16).add_(shift).to(torch.int8) if ordered.zeros is not None else None
        quantized = ordered.quantized.to(torch.int16).add_(shift).to(torch.uint8 if self.bits <= 4 else torch.int8)
        if self.bits <= 4:
            quantized = pack_nibbles(F.pad(quantized, (0, -quantized.shape[-1] % BLOCK)))
        return CanonicalWeight(scheme, inputs, quantized.contiguous(), compact(ordered.scales, dtype), zeros, order=order)

    def _sort(self) -> tuple[Integers, torch.Tensor | None]:
        """The same weights with the inputs sorted by group, and the order; None: sorted before."""
        assert self.owners is not None
        groups = self.scales.shape[-1]
        size = self.quantized.shape[-1] // groups
        flat = self.owners.reshape(-1, self.owners.shape[-1])
        if bool(((flat < 0) | (flat >= groups)).any()):
            raise CheckpointError(f"g_idx names groups outside 0 to {groups - 1}: download the checkpoint again.")
        counts = torch.stack([torch.bincount(each.long(), minlength=groups) for each in flat])
        is_whole = bool((counts == size).all())
        if is_whole and bool((flat.diff() >= 0).all()):
            return Integers(self.bits, self.quantized, self.scales, self.zeros), None
        if self.quantized.dim() == 2:
            return self._sort_inputs(counts[0], None if is_whole else int((-(-counts // BLOCK)).sum()))
        blocks = None if is_whole else int((-(-counts // BLOCK)).sum(1).max())
        sorted_experts = [self._select(expert)._sort_inputs(count, blocks) for expert, count in enumerate(counts)]  # noqa: SLF001 - own class
        zeros = [sorted_expert.zeros for sorted_expert, _ in sorted_experts if sorted_expert.zeros is not None]
        joined = Integers(
            self.bits,
            torch.stack([sorted_expert.quantized for sorted_expert, _ in sorted_experts]),
            torch.stack([sorted_expert.scales for sorted_expert, _ in sorted_experts]),
            torch.stack(zeros) if zeros else None,
        )
        return joined, torch.stack([order for _, order in sorted_experts])

    def _select(self, expert: int) -> Integers:
        zeros, owners = (None if each is None else each[expert] for each in (self.zeros, self.owners))
        return Integers(self.bits, self.quantized[expert], self.scales[expert], zeros, owners)

    def _sort_inputs(self, counts: torch.Tensor, blocks: int | None) -> tuple[Integers, torch.Tensor]:
        """Sort the inputs of one matrix. A rank's share of a group may have any size: it is then
        padded to blocks of 32 quantized values whose weight is zero, `blocks` in all."""
        assert self.owners is not None
        owners = self.owners.long()
        order = owners.argsort(stable=True)
        if blocks is None:
            return Integers(self.bits, self.quantized[:, order], self.scales, self.zeros), order.to(torch.int32)
        needed = -(-counts // BLOCK)
        of_block = torch.arange(len(counts), device=owners.device).repeat_interleave(needed)
        of_block = F.pad(of_block, (0, blocks - len(of_block)))
        sorted_owners = owners[order]
        place = torch.arange(len(order), device=owners.device) - (counts.cumsum(0) - counts)[sorted_owners]
        place += (needed.cumsum(0) - needed)[sorted_owners] * BLOCK
        scales, zeros = self.scales[:, of_block], None if self.zeros is None else self.zeros[:, of_block]
        if zeros is None:
            quantized = self.quantized.new_full((len(self.quantized), blocks * BLOCK), 1 << self.bits - 1)
        else:
            quantized = zeros.repeat_interleave(BLOCK, 1)
        quantized[:, place] = self.quantized[:, order]
        padded = order.new_zeros(blocks * BLOCK)
        padded[place] = order
        return Integers(self.bits, quantized, scales, zeros), padded.to(torch.int32)


def compact(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scales in a dtype of 16 bits that represents all of them, `dtype` first; else float32."""
    for kind in (dtype, torch.float16, torch.bfloat16):
        # the meta device has no values, and the memory plan counts the usual case
        if kind.itemsize == 2 and (scales.is_meta or torch.equal(scales.to(kind).float(), scales.float())):
            return scales.to(kind).contiguous()
    return scales.float().contiguous()


def check_owners(owners: torch.Tensor, name: str) -> None:
    """Raise CheckpointError if the inputs are not sorted by group."""
    if not bool((owners.diff() >= 0).all()):
        raise CheckpointError(f"{name} permutes the inputs, but quantization_config does not say so (desc_act): correct config.json.")
