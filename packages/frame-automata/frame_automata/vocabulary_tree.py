"""A vocabulary as a byte tree in arrays: an automaton runs over all tokens at once, level by level.
Knows no grammar.

Only the nodes that the automaton reaches are visited. Within a run (letters, characters of a
string), whole subtrees are known to be allowed by how often they repeat its part, which is computed
once for each kind of run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

MAX_LENGTH = 250  # bytes; longer tokens are never allowed
NEVER = 1 << 14  # more than any token's repetitions
NOT_AT_ALL = 255  # a cost above that of any token
FEW, MANY = 4, 24  # nodes are visited one by one from `FEW` down, until they become `MANY`


_KINDS = (np.intp, np.intp, np.uint8, np.bool_)  # of nodes, states, costs, and whether the run has ended


class Automaton(Protocol):
    """An automaton with numbered states; 0 is the dead state."""

    def step(self, pairs: np.ndarray) -> np.ndarray:
        """Return the states after pairs of state and byte (256 * state + byte), intp [n] -> intp
        [n]."""
        ...

    def covers(self, nodes: np.ndarray, states: np.ndarray) -> np.ndarray:
        """Return whether a state is known to accept the whole subtree of a node, intp [n] twice ->
        bool [n]."""
        ...

    def covers_one(self, node: int, state: int) -> bool: ...


class VocabularyTree:
    """`texts[i]`: bytes of token i; empty tokens are never allowed. Nodes are numbered level by
    level; 0 is the root."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        self.words = -(-len(texts) // 32)
        tokens = np.array(sorted((i for i, text in enumerate(texts) if 0 < len(text) <= MAX_LENGTH), key=texts.__getitem__), np.intp)
        lengths = np.array([len(texts[i]) for i in tokens.tolist()], np.intp)
        self.max_length = int(lengths.max(initial=0))
        flat = np.frombuffer(b"".join(texts[i] for i in tokens.tolist()), np.uint8)
        starts = np.cumsum(lengths) - lengths
        places = np.arange(len(tokens))
        above = np.zeros(len(tokens), np.intp)  # each token's node of the previous level
        self._rank = np.full(len(texts), len(tokens), np.intp)  # each token's sorted index; empty tokens come last
        self._rank[tokens] = places
        node_of = np.zeros(len(texts), np.intp)  # 0: none
        levels = [(np.zeros(1, np.intp), np.zeros(1, np.intp), np.zeros(1, np.intp), np.array([len(tokens)]))]
        self._levels = [0, 1]  # first node of each level, and the end
        for depth in range(self.max_length):
            goes_on = lengths > depth
            tokens, lengths, starts, places, above = (each[goes_on] for each in (tokens, lengths, starts, places, above))
            byte = flat[starts + depth].astype(np.intp)
            is_new = np.ones(len(tokens), np.bool_)  # sorted, so tokens of one node are adjacent
            is_new[1:] = (above[1:] != above[:-1]) | (byte[1:] != byte[:-1])
            nodes, ends = np.cumsum(is_new) - 1, lengths == depth + 1
            levels.append((byte[is_new], above[is_new], places[is_new], places[is_new] + np.bincount(nodes)))
            above = nodes + self._levels[-1]
            node_of[tokens[ends]] = above[ends]
            self._levels.append(self._levels[-1] + len(levels[-1][0]))
        self.num_nodes = self._levels[-1]
        self._byte, parent, self._first_token, self._last_token = (np.concatenate(each) for each in zip(*levels, strict=True))
        self._num_children = np.bincount(parent[1:], minlength=len(parent))
        self._first_child = np.cumsum(self._num_children) - self._num_children + 1
        self._node_of = node_of
        self._token, self._twins = self._tokens_of_nodes(node_of)

    def mask(self, start: int, automaton: Automaton, also: Sequence[int] = ()) -> np.ndarray:
        """Return the bits of the tokens that an automaton accepts from `start`, and of the tokens
        `also`, int32 [words]."""
        reached, covered = self._walk(start, automaton)
        allowed = np.zeros(32 * self.words + 1, np.uint8)  # the last entry is for nodes where no token ends
        if covered.size:
            below = self._in_order(covered, np.ones(len(covered), np.uint8))
            below.take(self._rank, out=allowed[: len(self._rank)], mode="clip")
        allowed[self._token.take(reached)] = 1
        for token, same in self._twins:
            allowed[token] = allowed[same]
        allowed[list(also)] = 1
        return np.packbits(allowed[:-1], bitorder="little").view(np.int32)

    def costs(self, start: int, automaton: Automaton, first: np.ndarray, alone: np.ndarray) -> np.ndarray:
        """Return how many repetitions of the run at `start` each token begins, uint8 [tokens];
        NOT_AT_ALL: the token is not accepted. first bool [256]: the first bytes of the run's part,
        which start nothing else there; `alone`: from `costs_alone`."""
        found = alone.copy()
        known = [(np.zeros(0, np.intp), np.zeros(0, np.uint8))]  # nodes whose whole subtree is accepted, and their cost
        nodes, states, costs = np.zeros(1, np.intp), np.array([start], np.intp), np.zeros(1, np.uint8)
        left = np.zeros(1, np.bool_)  # whether the run has ended
        few = _Few(self, automaton, start, first)
        while True:
            if len(nodes) <= FEW:
                rest = few.walk(zip(nodes.tolist(), states.tolist(), costs.tolist(), left.tolist(), strict=True))
                if not rest:
                    break
                nodes, states, costs, left = (np.array(each, kind) for each, kind in zip(rest, _KINDS, strict=True))
            whole = automaton.covers(nodes, states)
            done = (whole & left).nonzero()[0]
            known.append((nodes.take(done), costs.take(done)))
            going = (~whole).nonzero()[0]
            nodes, states, costs, left = nodes.take(going), states.take(going), costs.take(going), left.take(going)
            others = left.nonzero()[0]
            few.reached.extend(zip(nodes.take(others).tolist(), costs.take(others).tolist(), strict=True))
            children, counts = self._below(nodes)
            if not children.size:
                break
            bytes_ = self._byte.take(children)
            is_start = (states == start).repeat(counts) & ~left.repeat(counts)
            begins = is_start & first.take(bytes_)
            after = automaton.step((256 * states).repeat(counts) + bytes_)
            alive = after.nonzero()[0]
            costs, left = (costs.repeat(counts) + begins).take(alive), (left.repeat(counts) | (is_start & ~begins)).take(alive)
            nodes, states = children.take(alive), after.take(alive)
        known.append(_columns(few.covered))
        ends, paid = _columns(few.reached)
        tokens = self._token.take(ends)
        is_token = (tokens < len(found)).nonzero()[0]
        found[tokens.take(is_token)] = paid.take(is_token)
        whole, price = (np.concatenate(each) for each in zip(*known, strict=True))
        if whole.size:
            below = self._in_order(whole, price + 1).take(self._rank)
            np.copyto(found, below - 1, where=below > 0)
        for token, same in self._twins:
            found[token] = found[same]
        return found

    def costs_alone(self, table: np.ndarray) -> np.ndarray:
        """Return how many repetitions each token begins, uint8 [tokens]; NOT_AT_ALL: other bytes.
        `table`: see `repetitions`."""
        states, found = np.zeros(len(self._byte), np.intp), np.full(len(self._byte), NEVER, np.uint16)
        states[0], found[0] = 1, 0
        for depth in range(self.max_length):
            first, middle, last = self._levels[depth : depth + 3]
            counts = self._num_children[first:middle]
            above = states[first:middle].repeat(counts)
            states[middle:last] = table[above, self._byte[middle:last]]
            found[middle:last] = np.where(states[middle:last] > 0, found[first:middle].repeat(counts) + (above == 1), NEVER)
        found[0] = NEVER
        return np.minimum(found, NOT_AT_ALL).astype(np.uint8)[self._node_of]

    def repetitions(self, table: np.ndarray) -> np.ndarray:
        """Return the maximum number of repetitions that start below each node, if one starts after
        the node, uint16 [nodes]. NEVER or more: the subtree has other bytes. table intp [states,
        256]: the states after each byte; 1 is the state between repetitions."""
        count = len(table)
        found = np.zeros((len(self._byte), count), np.uint16)
        begun = (np.arange(count) == 1).astype(np.uint16)
        for depth in reversed(range(self.max_length)):
            first, middle, last = self._levels[depth : depth + 3]
            after = table[:, self._byte[middle:last]].T  # [nodes, states]
            needs = np.take_along_axis(found[middle:last], after, 1)
            needs += begun
            needs[after == 0] = NEVER
            inner = np.flatnonzero(self._num_children[first:middle]) + first
            found[inner] = np.maximum.reduceat(needs, self._first_child[inner] - middle, axis=0)
        return np.ascontiguousarray(found[:, 1])

    def _walk(self, start: int, automaton: Automaton) -> tuple[np.ndarray, np.ndarray]:
        """The nodes that an automaton reaches, and the nodes whose whole subtree it covers, which
        the first do not include."""
        nodes, states = np.zeros(1, np.intp), np.array([start], np.intp)
        reached, covered = [nodes[:0]], [nodes[:0]]
        few = _Few(self, automaton)
        while True:  # array methods: numpy's functions have twice the overhead
            if len(nodes) <= FEW:
                some = few.walk((node, state, 0, True) for node, state in zip(nodes.tolist(), states.tolist(), strict=True))
                if not some:
                    break
                nodes, states = np.array(some[0]), np.array(some[1])
            whole = automaton.covers(nodes, states)
            if whole.any():
                covered.append(nodes[whole])
                rest = (~whole).nonzero()[0]
                nodes, states = nodes.take(rest), states.take(rest)
            reached.append(nodes)
            children, counts = self._below(nodes)
            if not children.size:
                break
            after = automaton.step((256 * states).repeat(counts) + self._byte.take(children))
            alive = after.nonzero()[0]
            nodes, states = children.take(alive), after.take(alive)
        return np.concatenate((*reached, _columns(few.reached)[0])), np.concatenate((*covered, _columns(few.covered)[0]))

    def below(self, node: int) -> tuple[int, np.ndarray]:
        """Return the first child of a node, and the bytes of all children."""
        first = self._first_child.item(node)
        return first, self._byte[first : first + self._num_children.item(node)]

    def _below(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The children of nodes, in the order of the nodes, and the number of each node's
        children."""
        counts = self._num_children.take(nodes)
        ends = counts.cumsum()
        if not ends.size or not ends[-1]:
            return nodes[:0], counts
        return (self._first_child.take(nodes) - ends + counts).repeat(counts) + np.arange(ends[-1]), counts

    def _in_order(self, nodes: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Each node's value for all tokens below it, in sorted order, else 0, [tokens + 1]. No node
        is below another."""
        edges = np.empty(2 * len(nodes) + 2, np.intp)
        edges[0], edges[-1] = 0, self._last_token[0] + 1
        starts = self._first_token.take(nodes)
        order = starts.argsort()
        edges[1:-1:2], edges[2:-1:2] = starts.take(order), self._last_token.take(nodes).take(order)
        found = np.zeros(len(edges) - 1, values.dtype)
        found[1::2] = values.take(order)
        return found.repeat(edges[1:] - edges[:-1])

    def _tokens_of_nodes(self, node_of: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """The token that ends at each node, and pairs of further tokens with the same text and that
        token."""
        found = np.full(len(self._byte), 32 * self.words, np.intp)
        tokens = np.flatnonzero(node_of)
        found[node_of[tokens]] = tokens
        twins = tokens[found[node_of[tokens]] != tokens]
        return found, [(int(token), int(found[node_of[token]])) for token in twins]


class _Few:
    """Visits few nodes one by one, which takes less time than array operations. `reached` and
    `covered`: nodes after the end of the run, with their costs; see `VocabularyTree.costs`. Without
    a run, `start` is -1."""

    def __init__(self, tree: VocabularyTree, automaton: Automaton, start: int = -1, first: np.ndarray | None = None) -> None:
        self.reached: list[tuple[int, int]] = []
        self.covered: list[tuple[int, int]] = []
        self._tree = tree
        self._automaton = automaton
        self._start = start
        self._first = [] if first is None else first.tolist()

    def walk(self, some: Iterable[tuple[int, int, int, bool]]) -> list[tuple[Any, ...]]:
        """Continue from (node, state, cost, whether the run has ended). Returns the same as columns
        once they are many; empty at the end."""
        waiting = list(some)
        while waiting and len(waiting) <= MANY:
            node, state, cost, left = waiting.pop()
            if self._automaton.covers_one(node, state):
                if left:
                    self.covered.append((node, cost))
                continue
            if left:
                self.reached.append((node, cost))
            child, bytes_ = self._tree.below(node)
            if not bytes_.size:
                continue
            after = self._automaton.step(bytes_ + 256 * state)
            is_start = state == self._start and not left
            for i in after.nonzero()[0].tolist():
                begins = is_start and self._first[bytes_.item(i)]
                waiting.append((child + i, after.item(i), cost + begins, left or (is_start and not begins)))
        return list(zip(*waiting, strict=True))


def _columns(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    both = np.array(pairs, np.intp).reshape(-1, 2)
    return both[:, 0], both[:, 1].astype(np.uint8)
