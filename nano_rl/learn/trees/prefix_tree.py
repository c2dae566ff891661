"""Token trees: the rows of a batch merged so that every shared prefix stands once.

Rows are sorted, and each row adds only the tokens that follow what it shares with the row before it. Nodes
are numbered in that order (depth first), so that a row's own nodes, and all that descends from a stretch of
it, are contiguous. That makes attention along the tree a few dense rectangles and triangles, without a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cross:
    """The nodes [query_start, query_end) all descend from all the nodes [key_start, key_end)."""

    query_start: int
    query_end: int
    key_start: int
    key_end: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenTree:
    """N nodes of one or several trees; a node is a token at the end of a path."""

    ids_N: Tensor
    """int64 token of each node"""
    positions_N: Tensor
    """int64 depth of each node: its position in every row that passes through it"""
    node_BT: Tensor
    """int64 node of each token of the rows; 0 in the padding"""
    runs: tuple[tuple[int, int], ...]
    """[start, end) of chains in which each node follows the one before it; every node is in exactly one"""
    crosses: tuple[Cross, ...]
    """what nodes see of other runs; with the causal triangles of the runs, exactly the ancestors"""

    @property
    def num_nodes(self) -> int:
        return self.ids_N.numel()

    def to(self, device: torch.device | str) -> TokenTree:
        """The same tree on another device."""
        return TokenTree(
            ids_N=self.ids_N.to(device),
            positions_N=self.positions_N.to(device),
            node_BT=self.node_BT.to(device),
            runs=self.runs,
            crosses=self.crosses,
        )


def build_tree(ids_BT: Tensor, lengths: Sequence[int]) -> TokenTree:
    """The tree of B rows, row b being `ids_BT[b, :lengths[b]]`; without a common first token, several."""
    rows = [row[:length] for row, length in zip(ids_BT.tolist(), lengths, strict=True)]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    nodes = torch.zeros(ids_BT.shape, dtype=torch.int64)
    ids: list[int] = []
    positions: list[int] = []
    runs: list[tuple[int, int]] = []
    walk = _Walk()
    previous: int | None = None
    for b in order:
        row, start = rows[b], len(ids)
        shared = 0 if previous is None else common_prefix(rows[previous], row)
        if shared:
            nodes[b, :shared] = nodes[previous, :shared]
        if shared < len(row):
            nodes[b, shared : len(row)] = torch.arange(start, start + len(row) - shared)
            walk.leave(shared, start)
            walk.enter(shared, len(row), start)
            ids += row[shared:]
            positions += range(shared, len(row))
            runs.append((start, len(ids)))
        previous = b
    walk.leave(0, len(ids))
    tree = TokenTree(
        ids_N=torch.tensor(ids, dtype=torch.int64),
        positions_N=torch.tensor(positions, dtype=torch.int64),
        node_BT=nodes,
        runs=tuple(runs),
        crosses=tuple(walk.crosses),
    )
    return tree.to(ids_BT.device)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] is shared, a[:high] is not
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


@dataclass(slots=True)
class _Piece:
    """What of a run is still on the path to the present row: its first tokens."""

    depth: int
    end_depth: int
    start: int
    run_end: int


class _Walk:
    """The path to the present row, as pieces of runs; whatever falls off it is seen by no later node."""

    def __init__(self) -> None:
        self.crosses: list[Cross] = []
        self._path: list[_Piece] = []

    def enter(self, depth: int, end_depth: int, start: int) -> None:
        self._path.append(_Piece(depth, end_depth, start, start + end_depth - depth))

    def leave(self, depth: int, now: int) -> None:
        """Cut the path at `depth`. All nodes from a cut piece's run to `now` descend from that piece."""
        while self._path and self._path[-1].end_depth > depth:
            piece = self._path[-1]
            kept = max(depth, piece.depth)
            if now > piece.run_end:
                key = piece.start + kept - piece.depth, piece.start + piece.end_depth - piece.depth
                self.crosses.append(Cross(piece.run_end, now, *key))
            piece.end_depth = kept
            if kept == piece.depth:
                self._path.pop()
