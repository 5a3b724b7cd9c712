"""Draws tokens by a Gumbel race: the token with the greatest logit / temperature + G(key, token id)
wins, where G is standard Gumbel noise hashed from its arguments.

This is a draw from the softmax. Two distributions at total variation distance d that race with the
same key draw the same token with probability at least (1 - d) / (1 + d) (Daliri et al. 2024,
"Coupling without communication"). The noise of a group of tokens is made from its maximum, so a
group whose maximum cannot win is not examined. Used by the sampler; `frame.kernels.sampling` has
the same race as Triton kernels. Must not know a request.
"""

from __future__ import annotations

import math

import numpy as np
import torch

GROUP = 64  # tokens per group; part of the definition of the noise
_FIRST = 8  # groups of each row that race first; they set the score that the other groups must exceed
_CELLS = 1 << 15  # tokens per block of work, which stays in a core's cache
_WORD = 0xFFFF_FFFF
_LEADER_SHIFT = 32 - GROUP.bit_length() + 1
_INSIDE = np.arange(GROUP, dtype=np.uint32)


def draw(
    logits: torch.Tensor,
    heights: torch.Tensor,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    rows: torch.Tensor | None = None,
    limits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token per row. -> int64 [n].

    logits: float32 [rows, vocab]; -inf excludes a token. heights: `find_heights` of the logits.
    temperature: float32 [n], above 0, times ln 2. keys: int64 [n]. rows: int64 [n], the rows to
    draw from; None: all. limits: float32 [n]; excludes the tokens whose (logit - greatest logit) /
    temperature is less. A row with NaN or infinite logits gets any token of the vocabulary.
    """
    if logits.device.type != "cpu":  # the number of groups that may win would have to come to the host
        chosen = logits if rows is None else logits.index_select(0, rows)
        return _draw_from_all(chosen, temperature, keys, limits)
    if rows is not None:
        heights = heights.index_select(0, rows)
    places = np.arange(len(heights)) if rows is None else rows.numpy()
    floor = None if limits is None else limits.numpy()
    with np.errstate(invalid="ignore"):
        race = _Race(logits.contiguous(), heights.numpy(), temperature.numpy(), keys.numpy(), places, floor)
        return torch.from_numpy(race.run())


def find_heights(logits: torch.Tensor) -> torch.Tensor:
    """The greatest logit of each group, [rows, vocab] -> [rows, ceil(vocab / GROUP)]. NaN counts as
    the greatest value."""
    vocab = logits.shape[1]
    whole = vocab // GROUP * GROUP
    maxima = [logits[:, :whole].unflatten(1, (-1, GROUP)).amax(dim=-1)] if whole else []
    if whole < vocab:
        maxima.append(logits[:, whole:].amax(dim=-1, keepdim=True))
    return maxima[0] if len(maxima) == 1 else torch.cat(maxima, dim=1)


def hash_words(keys: np.ndarray, index: np.ndarray) -> np.ndarray:
    """32 random bits for each pair of a key, uint64, and an index, uint32, of shapes that
    broadcast. -> uint32. The mixer of 32 bits is one of Wellons' hash-prospector project."""
    x = (index * np.uint32(0x9E37_79B9)) ^ keys.astype(np.uint32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x21F0_AAAD)
    x ^= x >> np.uint32(15)
    x ^= (keys >> np.uint64(32)).astype(np.uint32)
    x *= np.uint32(0x735A_2D97)
    x ^= x >> np.uint32(15)
    return x


def _find_min(keys: np.ndarray, num_groups: int) -> np.ndarray:
    """The minimum E of each group (see `_Race`), float32 [n, num_groups]. keys: uint64 [n]."""
    index = ~(np.arange(num_groups, dtype=np.uint32) * np.uint32(2))
    share = (hash_words(keys[:, None], index) + 0.5) * -(2.0**-32)
    minimum: np.ndarray = (np.log1p(share) * (-1.0 / math.log(2.0) / GROUP)).astype(np.float32)
    return minimum


def _find_noise(keys: np.ndarray, groups: np.ndarray, minimum: np.ndarray) -> np.ndarray:
    """log2(E) of the tokens of groups, float32 [n, GROUP]. keys: uint64 [n]; groups: integers [n];
    minimum: float32 [n], of the groups."""
    number = groups.astype(np.uint32)
    leaders = hash_words(keys, ~(number * np.uint32(2) + np.uint32(1))) >> np.uint32(_LEADER_SHIFT)
    columns = (number * np.uint32(GROUP))[:, None] + _INSIDE
    noise = (hash_words(keys[:, None], columns) >> np.uint32(9)).astype(np.float32)
    noise += np.float32(0.5)
    noise *= np.float32(2.0**-23)
    np.log2(noise, out=noise)
    noise *= leaders[:, None] != _INSIDE
    np.subtract(minimum[:, None], noise, out=noise)
    np.log2(noise, out=noise)
    return noise


class _Race:
    """The race of some rows on the CPU.

    The noise is kept as the exponential E = exp(-G), in units of ln 2. The minimum E of n tokens is
    an exponential divided by n, and any token is equally likely to have it: the leader. Each other
    token has this minimum plus an exponential of its own, because exponentials have no memory.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        heights: np.ndarray,
        temperature: np.ndarray,
        keys: np.ndarray,
        places: np.ndarray,
        limits: np.ndarray | None,
    ) -> None:
        self._vocab = logits.shape[1]
        self._values = logits.view(-1).numpy()
        self._starts = places * self._vocab
        self._best, self._temperature, self._limits = heights.max(axis=1), temperature, limits
        self._keys = keys.view(np.uint64)
        self._minimum = _find_min(self._keys, heights.shape[1])
        distances = (heights - self._best[:, None]) / temperature[:, None]
        if limits is not None:
            distances[distances < limits[:, None]] = -np.inf
        self._bounds = distances - np.log2(self._minimum)  # no token of the group scores more

    def run(self) -> np.ndarray:
        """The winner of each row, int64."""
        rows, groups = self._bounds.shape
        every = np.arange(rows)
        count = min(groups, _FIRST)
        first = np.argpartition(self._bounds, groups - count, axis=1)[:, groups - count :] if count < groups else None
        chosen = np.broadcast_to(np.arange(groups), (rows, groups)) if first is None else first
        scores, tokens = self._run_groups(every.repeat(count), chosen.reshape(-1))
        winner = scores.reshape(rows, count).argmax(axis=1) + every * count
        score, token = scores[winner], tokens[winner]
        if first is None:
            return token
        others = self._bounds > score[:, None]
        np.put_along_axis(others, first, values=False, axis=1)
        places, left = others.nonzero()
        if len(places):
            scores, tokens = self._run_groups(places, left)
            is_better = scores > score[places]
            places, scores, tokens = places[is_better], scores[is_better], tokens[is_better]
            np.maximum.at(score, places, scores)
            has_won = scores == score[places]
            token[places[has_won]] = tokens[has_won]
        return token

    def _run_groups(self, places: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The winner of each group and its score, float32 and int64 [n]. places: int64 [n], the
        row of each group; groups: int64 [n]."""
        scores, tokens = np.empty(len(places), np.float32), np.empty(len(places), np.int64)
        step = _CELLS // GROUP
        for start in range(0, len(places), step):
            some = slice(start, start + step)
            scores[some], tokens[some] = self._run_some(places[some], groups[some])
        return scores, tokens

    def _run_some(self, places: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        columns = groups[:, None] * GROUP + _INSIDE
        noise = _find_noise(self._keys[places], groups, self._minimum[places, groups])
        scores: np.ndarray = self._values.take(self._starts[places][:, None] + np.minimum(columns, self._vocab - 1))
        scores -= self._best[places][:, None]
        scores /= self._temperature[places][:, None]
        if self._limits is not None:
            scores[scores < self._limits[places][:, None]] = -np.inf
        scores -= noise
        if self._vocab % GROUP:
            scores[columns >= self._vocab] = -np.inf
        winner = scores.argmax(axis=1)
        return scores[np.arange(len(scores)), winner], groups * GROUP + winner


def _draw_from_all(logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, limits: torch.Tensor | None) -> torch.Tensor:
    """`draw` in tensor operations, without a wait for the device, by examining every token."""
    scores = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature.unsqueeze(1))
    if limits is not None:
        scores.masked_fill_(scores < limits.unsqueeze(1), -torch.inf)
    groups = torch.arange(-(-logits.shape[1] // GROUP), device=logits.device)
    noise = _find_noise_on_device(keys, groups, _find_min_on_device(keys, len(groups)))
    return scores.sub_(noise.flatten(1)[:, : logits.shape[1]]).argmax(dim=-1)


def find_min(keys: torch.Tensor, num_groups: int) -> torch.Tensor:
    """The minimum E of each group (see `_Race`), float32 [n, num_groups]. keys: int64 [n]."""
    if keys.device.type != "cpu":
        return _find_min_on_device(keys, num_groups)
    return torch.from_numpy(_find_min(keys.numpy().view(np.uint64), num_groups))


def find_noise(keys: torch.Tensor, groups: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """log2(E) of the tokens of groups, float32 [n, m, GROUP]. keys: int64 [n]; groups: int64 [n,
    m]; minimum: float32 [n, m], of the groups."""
    if keys.device.type != "cpu":
        return _find_noise_on_device(keys, groups, minimum)
    repeated = keys.numpy().view(np.uint64).repeat(groups.shape[1])
    noise = _find_noise(repeated, groups.flatten().numpy(), minimum.flatten().numpy())
    return torch.from_numpy(noise).view(*groups.shape, GROUP)


def _find_min_on_device(keys: torch.Tensor, num_groups: int) -> torch.Tensor:
    words = _hash_on_device(keys, torch.arange(-1, -1 - 2 * num_groups, -2, device=keys.device))
    return torch.log1p((words.double() + 0.5) * -(2.0**-32)).mul_(-1.0 / math.log(2.0) / GROUP).float()


def _find_noise_on_device(keys: torch.Tensor, groups: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """See `find_noise`; groups: int64 [m] or [n, m]."""
    inside = torch.arange(GROUP, device=keys.device)
    tokens = groups.unsqueeze(-1) * GROUP + inside
    words = _hash_on_device(keys, torch.cat((tokens.flatten(-2), -2 - groups * 2), -1))  # of the tokens, then of the leaders
    leaders = (words[:, -groups.shape[-1] :] >> _LEADER_SHIFT).unsqueeze(2)
    offsets = ((words[:, : -groups.shape[-1]].unflatten(1, (-1, GROUP)) >> 9).float() + 0.5).mul_(2.0**-23).log2_()
    return (minimum.unsqueeze(2) - offsets.masked_fill_(leaders == inside, 0.0)).log2_()


def _hash_on_device(keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`hash_words` of each key and index, int64 [keys, indices]; PyTorch has no uint32
    arithmetic. index: int64 [indices] or [keys, indices]."""
    keys = keys.unsqueeze(1)
    x = ((index * 0x9E37_79B9) ^ keys).bitwise_and_(_WORD)
    x ^= x >> 16
    x.mul_(0x21F0_AAAD).bitwise_and_(_WORD)
    x ^= (x >> 15).bitwise_xor_(keys >> 32)
    x.mul_(0x735A_2D97).bitwise_and_(_WORD)
    return x ^ (x >> 15)
