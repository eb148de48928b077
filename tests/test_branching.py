from __future__ import annotations

from statistics import fmean

import pytest

from agentgym.branching import (
    CHOOSERS,
    Budget,
    Chooser,
    Cost,
    EveryTurn,
    Fork,
    NoForks,
    RandomNodes,
    affordable,
    get_chooser,
    mark_kept,
)
from agentgym.errors import ConfigError, UnknownName
from agentgym.tree import Node, NodeStatus, Tree, saving
from agentgym.types import Level

BROKEN = (NodeStatus.INFRA_ERROR, NodeStatus.RESTORE_FAILED, NodeStatus.TERMINATED, NodeStatus.TRUNCATED)


def extend(tree: Tree, node: Node, depth: int) -> None:
    """Roll a node on to a depth; every turn costs two sampled tokens and one call."""
    while node.turn_index < depth:
        child = Node(len(tree.nodes), node, node.turn_index + 1, forkable=Level.STATE)
        child.token_ids_T, child.mask_T, child.num_tool_calls = (7, 8, 9), (True, True, False), 1
        node = tree.add(child)
    node.status, node.reward, node.forkable = NodeStatus.TERMINATED, 1.0, None


def chains(num: int, depth: int) -> list[Tree]:
    trees = []
    for index in range(num):
        tree = Tree(f"t/{index}", "t", "e", 0)
        root = tree.add(Node(0, None, 0, forkable=Level.STATE))
        extend(tree, root, depth)
        trees.append(tree)
    return trees


def grow(chooser: Chooser, trees: list[Tree], depth: int, seed: int = 0, budget: Budget | None = None) -> int:
    """Do what the chooser says until it is silent; give the number of rounds."""
    rounds = 0
    budget = budget or Budget()
    while forks := chooser(trees, budget, seed):
        rounds += 1
        for node, width in forks:
            tree = next(t for t in trees if t.root is node.path()[0])
            for _ in range(width):
                extend(tree, node, depth)
    return rounds


def test_none_never_forks() -> None:
    assert grow(NoForks(), chains(2, 4), 4) == 0
    assert not NoForks().may_fork(chains(1, 2)[0].root, 0)


def test_every_turn_completes_a_binary_tree() -> None:
    (tree,) = trees = chains(1, 3)
    grow(EveryTurn(), trees, 3)
    assert len(tree.leaves()) == 8
    assert len(tree.nodes) - 1 == 2 + 4 + 8
    assert all(len(node.children) in (0, 2) for node in tree.nodes)


def test_every_turn_at_three_turns_has_82_unique_turns() -> None:
    (tree,) = trees = chains(1, 20)
    grow(EveryTurn(turns=(5, 10, 15)), trees, 20)
    saved = saving(trees)
    assert (len(tree.leaves()), saved.turns, saved.chain_turns) == (8, 4 + 10 + 20 + 48, 160)
    assert {node.turn_index for node in tree.forks()} == {4, 9, 14}


def test_every_turn_width_counts_the_first_branch() -> None:
    (tree,) = trees = chains(1, 4)
    grow(EveryTurn(width=3, turns=[2]), trees, 4)
    assert [len(node.children) for node in tree.forks()] == [3]
    assert tree.forks()[0].turn_index == 1


def test_every_turn_without_a_bound_refuses_to_explode() -> None:
    with pytest.raises(ConfigError, match="name the turns, or set a budget"):
        grow(EveryTurn(), chains(1, 30), 30)


@pytest.mark.parametrize(("nodes", "rounds"), [(1, 1), (2, 1), (2, 3), (5, 2)])
def test_random_grows_one_leaf_a_draw(nodes: int, rounds: int) -> None:
    trees = chains(3, 5)
    assert grow(RandomNodes(nodes=nodes, rounds=rounds), trees, 5, seed=3) == rounds
    assert [len(tree.leaves()) for tree in trees] == [1 + rounds * nodes] * 3


@pytest.mark.parametrize(
    ("depth", "nodes", "rounds", "gain"),
    [(1, 2, 1, 1.0), (2, 2, 1, 1.2), (4, 2, 1, 4 / 3), (10, 2, 1, 1.429), (4, 2, 2, 1.50), (10, 2, 3, 1.80)],
)
def test_tv43_sampling_cost(depth: int, nodes: int, rounds: int, gain: float) -> None:
    """TV-43: leaves per turn against chains; for one round E[turns] = T + N (T + 1) / 2."""
    turns = []
    for seed in range(1500):
        (tree,) = trees = chains(1, depth)
        grow(RandomNodes(nodes=nodes, rounds=rounds), trees, depth, seed)
        turns.append(len(tree.nodes) - 1)
    num_leaves = 1 + nodes * rounds
    assert num_leaves * depth / fmean(turns) == pytest.approx(gain, rel=0.02)
    if rounds == 1:
        assert fmean(turns) == pytest.approx(depth + nodes * (depth + 1) / 2, rel=0.02)


def test_random_draws_the_root_and_inner_nodes_alike() -> None:
    drawn = [0] * 4
    for seed in range(2000):
        for node, width in RandomNodes(nodes=2)(chains(1, 4), Budget(), seed):
            drawn[node.id] += width
    assert sum(drawn) == 4000
    assert all(900 < times < 1100 for times in drawn)


@pytest.mark.parametrize("chooser", [EveryTurn(turns=(2,)), RandomNodes(nodes=3)])
def test_choosers_are_pure(chooser: Chooser) -> None:
    trees = chains(2, 6)
    first = chooser(trees, Budget(), 5)
    assert [len(tree.nodes) for tree in trees] == [7, 7]
    again = chooser(trees, Budget(), 5)
    assert [(n.id, w) for n, w in first] == [(n.id, w) for n, w in again]
    assert [fork.node for fork in first] == [fork.node for fork in again]


def test_random_depends_on_seed_and_tree() -> None:
    trees = chains(2, 30)
    by_seed = {tuple(n.id for n, _ in RandomNodes(nodes=4)(trees, Budget(), seed)) for seed in range(5)}
    assert len(by_seed) == 5
    forks = RandomNodes(nodes=4)(trees, Budget(), 0)
    per_tree = [[n.id for n, _ in forks if n.path()[0] is tree.root] for tree in trees]
    assert per_tree[0] != per_tree[1]


@pytest.mark.parametrize("status", BROKEN)
@pytest.mark.parametrize("chooser", [EveryTurn(), RandomNodes(nodes=4)])
def test_broken_and_ended_nodes_are_never_named(chooser: Chooser, status: NodeStatus) -> None:
    (tree,) = trees = chains(1, 4)
    tree.nodes[2].status = status
    for seed in range(30):
        assert all(node.status is NodeStatus.OPEN and node.children for node, _ in chooser(trees, Budget(), seed))


def test_nodes_without_a_snapshot_are_never_named() -> None:
    (tree,) = trees = chains(1, 4)
    for node in tree.nodes:
        node.forkable = None
    assert EveryTurn()(trees, Budget(), 0) == RandomNodes()(trees, Budget(), 0) == []


def test_a_tree_that_never_began_is_left_alone() -> None:
    tree = Tree("t/0", "t", "e", 0)
    tree.add(Node(0, None, 0, status=NodeStatus.INFRA_ERROR))
    assert EveryTurn()([tree], Budget(), 0) == RandomNodes()([tree], Budget(), 0) == []


def test_keep_is_a_cap_and_marks_whole_paths() -> None:
    (tree,) = trees = chains(1, 6)
    chooser = RandomNodes(nodes=4, leaves=2)
    grow(chooser, trees, 6, seed=1)
    kept = chooser.keep(tree, 1)
    assert kept is not None and len(kept) == 2 and len(tree.leaves()) == 5
    mark_kept(tree, kept)
    assert [leaf.kept for leaf in tree.leaves()].count(True) == 2
    assert all(node.kept == any(leaf.kept for leaf in tree.leaves() if node in leaf.path()) for node in tree.nodes)
    many = RandomNodes(nodes=4, leaves=99).keep(tree, 1)
    assert many is not None and len(many) == 5
    mark_kept(tree, None)
    assert all(node.kept for node in tree.nodes)


def test_keep_draws_every_leaf_alike_and_no_broken_one() -> None:
    (tree,) = trees = chains(1, 3)
    grow(RandomNodes(nodes=3), trees, 3)
    tree.leaves()[0].status = NodeStatus.INFRA_ERROR
    drawn = [0] * 4
    for seed in range(900):
        (leaf,) = RandomNodes(leaves=1).keep(tree, seed) or []
        drawn[tree.leaves().index(leaf)] += 1
    assert drawn[0] == 0
    assert all(250 < times < 350 for times in drawn[1:])


def test_budget_left_counts_unique_turns_sampled_tokens_and_calls() -> None:
    trees = chains(2, 5)
    assert Budget(12, 25, None).left(trees) == Budget(2, 5, None)
    assert Budget(3, None, 10).left(trees) == Budget(0, None, 0)
    assert Budget().left(trees) == Budget()


def test_shares_add_up() -> None:
    shares = [Budget(7, 3, None).share(index, 4) for index in range(4)]
    assert [s.max_turns for s in shares] == [2, 2, 2, 1]
    assert [s.max_tokens for s in shares] == [1, 1, 1, 0]
    assert {s.max_tool_calls for s in shares} == {None}


@pytest.mark.parametrize("budget", [Budget(max_turns=23), Budget(max_tokens=46), Budget(max_tool_calls=23)])
@pytest.mark.parametrize("chooser", [EveryTurn(), RandomNodes(nodes=4, rounds=5)])
def test_choosers_begin_only_what_the_budget_can_end(chooser: Chooser, budget: Budget) -> None:
    trees = chains(2, 5)
    grow(chooser, trees, 5, budget=budget)
    turns = sum(len(tree.nodes) - 1 for tree in trees)
    assert 10 < turns <= 23


def test_affordable_is_a_beginning_of_the_list() -> None:
    (tree,) = trees = chains(1, 6)
    forks = [Fork(tree.nodes[3], 2), Fork(tree.nodes[5], 3), Fork(tree.root, 1)]
    assert affordable(forks, trees, Budget()) == forks
    assert affordable(forks, trees, Budget(max_turns=6 + 12)) == [Fork(tree.nodes[3], 2), Fork(tree.nodes[5], 2)]
    assert affordable(forks, trees, Budget(max_turns=6 + 2)) == []
    assert affordable(forks, trees, Budget(max_turns=6)) == []


def test_covers_needs_a_share_for_each() -> None:
    assert Budget(max_turns=4).covers(Cost(2), 2)
    assert not Budget(max_turns=3).covers(Cost(2), 2)
    assert not Budget(max_tool_calls=1).covers(Cost(), 2)


def test_get_chooser() -> None:
    assert set(CHOOSERS) == {"none", "every_turn", "random"}
    assert get_chooser("none") == NoForks()
    assert get_chooser("every_turn", turns=[5, 10]) == EveryTurn(turns=(5, 10))
    assert get_chooser("random", nodes=3, rounds=2, leaves=4) == RandomNodes(3, 2, 4)


def test_errors_name_the_nearest() -> None:
    with pytest.raises(UnknownName, match="unknown chooser 'randon'; did you mean 'random'"):
        get_chooser("randon")
    with pytest.raises(ConfigError, match="no option 'widht'; did you mean 'width'"):
        get_chooser("every_turn", widht=2)
    with pytest.raises(ConfigError, match="no option 'width'"):
        get_chooser("none", width=2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("every_turn", {"width": 1}),
        ("every_turn", {"width": "2"}),
        ("every_turn", {"turns": []}),
        ("every_turn", {"turns": [0]}),
        ("every_turn", {"turns": "5,10"}),
        ("random", {"nodes": 0}),
        ("random", {"rounds": True}),
        ("random", {"leaves": 0}),
    ],
)
def test_options_that_make_no_sense_are_refused(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        get_chooser(name, **options)


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_tokens is -1"):
        Budget(max_tokens=-1)
