"""Token trees: every row is a path, every shared prefix stands once, and each node sees its ancestors."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from nano_rl.learn.prefix_tree import TokenTree, build_tree, common_prefix

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8)


def tree_of(rows: list[list[int]]) -> TokenTree:
    width = max(map(len, rows))
    ids_BT = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    return build_tree(ids_BT, [len(row) for row in rows])


def seen(tree: TokenTree) -> set[tuple[int, int]]:
    """(node, node that it sees), as the attention computes them; each pair at most once."""
    pairs = [(q, k) for start, end in tree.runs for q in range(start, end) for k in range(start, q + 1)]
    for c in tree.crosses:
        pairs += [(q, k) for q in range(c.query_start, c.query_end) for k in range(c.key_start, c.key_end)]
    assert len(pairs) == len(set(pairs))
    return set(pairs)


@given(rows=ROWS)
def test_every_row_is_a_path_with_its_tokens_and_positions(rows: list[list[int]]) -> None:
    tree = tree_of(rows)
    for row, nodes in zip(rows, tree.node_BT.tolist(), strict=True):
        path = nodes[: len(row)]
        assert tree.ids_N[path].tolist() == row
        assert tree.positions_N[path].tolist() == list(range(len(row)))


@given(rows=ROWS)
def test_there_is_one_node_for_each_distinct_prefix(rows: list[list[int]]) -> None:
    prefixes = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    assert tree_of(rows).num_nodes == len(prefixes)


@given(rows=ROWS)
def test_nodes_see_their_ancestors_and_themselves_and_nothing_else(rows: list[list[int]]) -> None:
    tree = tree_of(rows)
    paths = [nodes[: len(row)] for row, nodes in zip(rows, tree.node_BT.tolist(), strict=True)]
    expected = {(path[i], path[j]) for path in paths for i in range(len(path)) for j in range(i + 1)}
    assert seen(tree) == expected


def test_a_group_costs_its_prompt_once() -> None:
    prompt = list(range(10))
    tree = tree_of([[*prompt, 20 + g, 30, 31] for g in range(4)])
    assert tree.num_nodes == 10 + 4 * 3
    # the first branch goes on from the prompt, the others attend to it in one rectangle
    assert tree.runs == ((0, 13), (13, 16), (16, 19), (19, 22))
    assert [(c.query_start, c.query_end, c.key_start, c.key_end) for c in tree.crosses] == [(13, 22, 0, 10)]


@given(a=st.lists(st.integers(0, 1), max_size=12), b=st.lists(st.integers(0, 1), max_size=12))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    shared = common_prefix(a, b)
    assert a[:shared] == b[:shared]
    assert shared == min(len(a), len(b)) or a[shared] != b[shared]
