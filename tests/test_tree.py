from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.tree import Node, NodeStatus, Tree, branch_return, saving, set_values


def tree_of(parents: list[int], rewards: list[float | None] | None = None) -> Tree:
    """A tree whose node i + 1 hangs under node parents[i]; leaves are terminated."""
    tree = Tree("t/0", "t", "e", 0)
    tree.add(Node(0, None, 0, token_ids_T=(1, 2), mask_T=(False, False)))
    for index, parent in enumerate(parents):
        above = tree.nodes[parent]
        node = tree.add(Node(index + 1, above, above.turn_index + 1))
        node.token_ids_T, node.mask_T, node.num_tool_calls = (10 + node.id, 0), (True, False), 1
        node.reward = 0.0 if rewards is None else rewards[index]
    for leaf in tree.leaves():
        leaf.status = NodeStatus.TERMINATED
    return tree


#        0 - 1 - 2
#             \- 3 - 4
#              \- 5
PARENTS = [0, 1, 1, 3, 1]


def test_walks() -> None:
    tree = tree_of(PARENTS)
    assert [n.id for n in tree.leaves()] == [2, 4, 5]
    assert [n.id for n in tree.forks()] == [1]
    assert [n.id for n in tree.walk()] == [0, 1, 2, 3, 4, 5]
    assert [n.id for n in tree.nodes[4].path()] == [0, 1, 3, 4]
    assert tree.nodes[4].path_ids() == (1, 2, 11, 0, 13, 0, 14, 0)
    assert tree.nodes[4].turn_index == 3


def test_nodes_are_added_in_order() -> None:
    tree = tree_of(PARENTS)
    with pytest.raises(ValueError, match="the next is 6"):
        tree.add(Node(9, tree.root, 1))


def test_values_are_mean_returns_of_scored_leaves() -> None:
    tree = tree_of(PARENTS, [0.5, 1.0, 0.0, 0.0, None])
    tree.nodes[5].status = NodeStatus.INFRA_ERROR
    set_values(tree)
    assert [n.value for n in tree.nodes] == [1.0, 1.0, 1.5, 0.5, 0.5, None]


def test_open_leaves_and_broken_paths_have_no_return() -> None:
    tree = tree_of(PARENTS, [None, 1.0, 0.0, 1.0, 1.0])
    set_values(tree)
    assert {n.value for n in tree.nodes} == {None}
    assert branch_return(tree.nodes[4]) is None
    tree = tree_of([0, 1])
    tree.nodes[2].status = NodeStatus.OPEN
    set_values(tree)
    assert tree.root.value is None and tree.scored_leaves() == []


def test_saving_counts_shared_turns_once() -> None:
    saved = saving([tree_of(PARENTS), tree_of([0])])
    assert (saved.turns, saved.chain_turns) == (6, 2 + 3 + 2 + 1)
    assert (saved.tokens, saved.chain_tokens, saved.tool_calls, saved.chain_tool_calls) == (6, 8, 6, 8)
    assert saved.calls_ratio == saved.tokens_ratio == pytest.approx(8 / 6)
    assert saving([]).calls_ratio == 1.0


def test_a_node_prints_without_its_relatives() -> None:
    tree = tree_of(list(range(3000)))
    assert len(repr(tree.nodes[3000])) < 2000 and len({*tree.nodes}) == 3001


@given(st.data())
def test_laws_of_any_tree(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 20))
    parents = [data.draw(st.integers(0, index)) for index in range(size)]
    rewards: list[float | None] = [data.draw(st.sampled_from([0.0, 0.25, 1.0])) for _ in range(size)]
    tree = tree_of(parents, rewards)
    set_values(tree)
    assert sorted(n.id for n in tree.walk()) == list(range(size + 1))
    for node in tree.nodes:
        below = [leaf for leaf in tree.scored_leaves() if node in leaf.path()]
        returns = [branch_return(leaf) or 0.0 for leaf in below]
        assert node.value == pytest.approx(sum(returns) / len(returns))
        if node.parent is not None:
            assert node.path_ids() == node.parent.path_ids() + node.token_ids_T
