"""The trees of drafted tokens of one step: ancestors and depths of their nodes.

Node 0 of a row is its last token before the draft, node j its drafted token j. A token is stored at
the place of its node, and has the position of its depth. Used by the layout of a batch, the
verification and the input batch. Imports no torch. Must not know a drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class DraftTrees:
    """The trees of the sampling rows; `width` is the most nodes of a row. Chains are trees too."""

    parents: np.ndarray  # int64 [rows, width]; 0 for node 0 and beyond the row's nodes
    depths: np.ndarray  # int64 [rows, width]; 0 for node 0 and beyond the row's nodes
    tokens: np.ndarray  # int64 [rows, width]; the drafted token of each node; -2 for node 0 and beyond the row's nodes
    branches: np.ndarray  # bool [rows, width, width]; [r, j, k]: node k > 0 is in the branch of node j; True beyond the row's nodes
    paths: np.ndarray  # int32 [rows, width, width]; [r, j, d]: the node of depth d in node j's branch; d beyond its depth
    bits: np.ndarray  # int32 [rows, width]; see `TreeMask`

    @property
    def shifts(self) -> np.ndarray:
        """int64 [rows, width]: the place of each node less its depth."""
        return np.arange(self.parents.shape[1]) - self.depths


def build_trees(parents: np.ndarray, token_ids: np.ndarray, num_samples: np.ndarray, offsets: np.ndarray) -> DraftTrees:
    """parents, token_ids: those of all drafts, row by row. num_samples, offsets: as in
    `DraftLayout`."""
    rows, width = len(num_samples), int(num_samples.max(initial=1))
    cells = (np.repeat(np.arange(rows), num_samples) * width + offsets)[offsets > 0]
    trees = DraftTrees(
        parents=np.zeros((rows, width), np.int64),
        depths=np.zeros((rows, width), np.int64),
        tokens=np.full((rows, width), -2, np.int64),
        branches=np.zeros((rows, width, width), bool),
        paths=np.tile(np.arange(width, dtype=np.int32), (rows, width, 1)),
        bits=np.full((rows, width), -1, np.int32),
    )
    trees.parents.reshape(-1)[cells] = parents
    trees.tokens.reshape(-1)[cells] = token_ids
    every = np.arange(rows)
    for node in range(1, width):  # a parent comes before its children
        parent = trees.parents[:, node]
        trees.depths[:, node] = depths = trees.depths[every, parent] + 1
        for each in (trees.branches, trees.paths):
            each[:, node] = each[every, parent]
        trees.branches[:, node, node] = True
        trees.paths[every, node, depths] = node
        # a token sees what its parent sees, the parent at a greater distance, and itself
        trees.bits[:, node] = (trees.bits[every, parent] << (node - parent)) | 1
    beyond = np.arange(width) >= num_samples[:, None]
    trees.depths[beyond] = 0
    trees.branches[beyond] = True
    return trees
