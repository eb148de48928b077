"""Stored runs, looked at: `agentgym tree` draws them, `agentgym replay` executes them again.

Owns which trees of a run are meant and what is said of them. Leaves drawing to `draw.py` and the comparison to
`replay.py`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from agentgym.draw import print_tree, summary
from agentgym.env import AgentEnv
from agentgym.errors import ReplayError, UnknownName, UsageError
from agentgym.plan import make_env
from agentgym.replay import Difference, TreeReport, replay_tree
from agentgym.runs import DATABASE, RunRecord, find_run
from agentgym.sandbox import close_backends
from agentgym.screen import Progress, Screen
from agentgym.store import Store
from agentgym.store_read import TreeRecord
from agentgym.task import Task
from agentgym.tree import Node, Tree, branch_return, set_values

_MAX_LISTED = 20


class StoredRun:
    """A run that is open for reading."""

    def __init__(self, record: RunRecord, store: Store) -> None:
        self.record = record
        self.store = store
        runs = store.runs()
        if not runs:
            raise ReplayError(f"{record.path / DATABASE} holds no run; it ended before its start was written")
        self.id = runs[0].id
        """As stored; the folder may have been renamed since."""
        self.trees: list[TreeRecord] = store.trees(self.id)

    def chosen(self, tree_id: str | None) -> list[TreeRecord]:
        """The tree of that id, or all.

        Raises:
            UnknownName: the run has no such tree.
        """
        if tree_id is None:
            return self.trees
        found = [tree for tree in self.trees if tree.id == tree_id]
        if not found:
            known = [tree.id for tree in self.trees]
            raise UnknownName.of("tree", tree_id, known, f"`agentgym tree {self.record.path}` lists them")
        return found

    def load(self, record: TreeRecord) -> Tree:
        """A tree with its values; an interrupted one has none stored."""
        tree = self.store.load_tree(self.id, record.id)
        if tree.nodes and tree.root.value is None:
            set_values(tree)
        return tree


@contextlib.contextmanager
def open_run(name: str) -> Iterator[StoredRun]:
    """The run of a folder or id, without changing anything in it."""
    record = find_run(name)
    with Store.open(record.path / DATABASE, read_only=True) as store:
        yield StoredRun(record, store)


# tree


def draw_run(
    name: str,
    screen: Screen,
    *,
    tree_id: str | None = None,
    every: bool = False,
    full: bool = False,
    brief: bool = False,
) -> dict[str, Any]:
    """Draw trees of a run: the one asked for, all, or the most telling one with a list of the others.

    Args:
        name: The run.
        screen: Machines get the nodes of all trees, unless it is to be brief.
        tree_id: Only this tree.
        every: All trees.
        full: Nothing folded.
        brief: Only the most telling tree, and no list.
    """
    with open_run(name) as run:
        trees = [run.load(record) for record in run.chosen(tree_id)]
        if not trees:
            screen.say(f"run {run.id} has no trees yet")
        is_all = every or tree_id is not None or (screen.as_json and not brief)
        shown = trees if is_all else trees and [_most_telling(trees)]
        for tree in shown:
            for node in tree.nodes:
                screen.row(node_row(tree, node))
            if not screen.as_json:
                print_tree(tree, sys.stdout, full=full)
                screen.say()
        if len(shown) < len(trees) and not brief:
            _list_trees(trees, shown[0], screen)
        return {"ok": True, "run": run.id, "status": run.record.status, "trees": len(trees), "drawn": len(shown)}


def node_row(tree: Tree, node: Node) -> dict[str, Any]:
    """One node for machines."""
    return {
        "tree": tree.id,
        "node": node.id,
        "parent": None if node.parent is None else node.parent.id,
        "turn": node.turn_index,
        "action": node.action,
        "observation": node.observation,
        "reward": node.reward,
        "rewards": node.rewards,
        "value": node.value,
        "status": str(node.status),
        "stop_reason": None if node.stop_reason is None else str(node.stop_reason),
        "error": node.error,
        "forked": node.forked,
        "kept": node.kept,
        "children": [child.id for child in node.children],
        "level": None if node.forkable is None else str(node.forkable),
        "losses": list(node.losses),
        "tokens": node.num_sampled,
        "timings": asdict(node.timings),
    }


def _most_telling(trees: list[Tree]) -> Tree:
    """The tree with leaves that fared differently, else one that forks, else the first."""

    def rank(tree: Tree) -> tuple[bool, int]:
        return len({branch_return(leaf) for leaf in tree.scored_leaves()}) > 1, len(tree.forks())

    return max(trees, key=rank)


def _list_trees(trees: list[Tree], shown: Tree, screen: Screen) -> None:
    screen.say(f"1 of {len(trees)} trees; --tree ID draws another, --all all of them:")
    for tree in trees[:_MAX_LISTED]:
        screen.say(f"{'*' if tree is shown else ' '} {tree.id}: {summary(tree)}")
    if len(trees) > _MAX_LISTED:
        screen.say(f"  and {len(trees) - _MAX_LISTED} more")


# replay


def replay_run(
    name: str, screen: Screen, *, tree_id: str | None = None, node: int | None = None, forked: bool = False
) -> dict[str, Any]:
    """Execute stored branches again; the summary is ok when every node came out as stored.

    Raises:
        UsageError: a node is asked for, but not of which tree.
    """
    try:
        with open_run(name) as run:
            chosen = run.chosen(tree_id)
            if node is not None and len(chosen) > 1:
                raise UsageError(f"run {run.id} has {len(chosen)} trees; say with --tree ID which one has node {node}")
            return _replay(run, chosen, screen, node, forked)
    finally:
        close_backends()


def _replay(run: StoredRun, chosen: list[TreeRecord], screen: Screen, node: int | None, forked: bool) -> dict[str, Any]:
    reports: list[TreeReport] = []
    turns = 0
    with Progress("replay", len(chosen)) as progress:
        for done, record in enumerate(chosen):
            progress.update(done, f"{turns} turns")
            tree = run.load(record)
            if not tree.nodes:
                continue  # interrupted before its reset ended: nothing was played
            wanted = None if node is None else _node(tree, node)
            task = run.store.load_task(run.id, record.id)
            maker = partial(_env_of, record)
            report = replay_tree(tree, task, maker, node=wanted, forked=forked)
            reports.append(report)
            turns += report.num_turns
            screen.row(_report_row(report))
    return _replay_summary(run, reports, screen)


def _env_of(record: TreeRecord, task: Task) -> AgentEnv:
    return make_env(record.env_id, record.env_kwargs)


def _replay_summary(run: StoredRun, reports: list[TreeReport], screen: Screen) -> dict[str, Any]:
    first = next((report.differences[0] for report in reports if report.differences), None)
    compared, equal = sum(r.num_nodes for r in reports), sum(r.num_equal for r in reports)
    left_out = sum(len(r.not_replayed) for r in reports)
    seconds = sum(r.seconds for r in reports)
    found = {
        "ok": first is None and compared > 0,
        "run": run.id,
        "trees": len(reports),
        "branches": sum(r.num_branches for r in reports),
        "nodes": compared,
        "equal": equal,
        "equal_share": equal / compared if compared else None,
        "not_replayed": left_out,
        "turns": sum(r.num_turns for r in reports),
        "seconds": round(seconds, 3),
        "first_difference": None if first is None else _difference_row(first),
    }
    share = f"{100 * equal / compared:.4g} %" if compared else "none"
    screen.say(
        f"{found['trees']} trees, {found['branches']} branches, {found['turns']} turns executed in {seconds:.1f} s: "
        f"{equal} of {compared} nodes equal ({share})"
    )
    if left_out:
        screen.say(f"{left_out} nodes not replayed: our side failed there, or the replay ended before them")
    if first is not None:
        screen.say(f"first difference: {first}")
        screen.say(first.diff)
    return found


def _node(tree: Tree, node_id: int) -> Node:
    for node in tree.nodes:
        if node.id == node_id:
            return node
    last = tree.nodes[-1].id
    raise UnknownName(f"tree {tree.id!r} has no node {node_id}; nodes are 0 to {last}; `agentgym tree` shows them")


def _report_row(report: TreeReport) -> dict[str, Any]:
    return {
        "tree": report.tree_id,
        "branches": report.num_branches,
        "nodes": report.num_nodes,
        "equal": report.num_equal,
        "turns": report.num_turns,
        "not_replayed": list(report.not_replayed),
        "differences": [_difference_row(difference) for difference in report.differences[:10]],
    }


def _difference_row(difference: Difference) -> dict[str, Any]:
    return {
        "tree": difference.tree_id,
        "node": difference.node_id,
        "turn": difference.turn_index,
        "field": difference.field,
        "stored": difference.stored,
        "replayed": difference.replayed,
    }
