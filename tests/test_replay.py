"""Replay: a stored branch is executed again, and a divergence is told where it begins."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentgym.env import AgentEnv
from agentgym.episode import Limits, Reply
from agentgym.errors import ConfigError, EnvError, ReplayError
from agentgym.replay import MAX_SHOWN, Normaliser, TreeReport, replay_tree
from agentgym.store import Store
from agentgym.task import Task
from agentgym.tree import Node, NodeStatus, Tree
from agentgym.types import Action, Level, Param, StopReason, ToolCall, ToolSpec

TASK = Task("sum/1", "test/Sum-v0", "add up to 5", {"target": 5})
CLOCK = itertools.count(1)
LIVE: list[World] = []
"""Worlds that nobody closed; replays must leave none."""


class World:
    """A part of an environment that must be closed, as a sandbox."""

    def __init__(self) -> None:
        LIVE.append(self)

    def snapshot(self) -> FrozenWorld:
        return FrozenWorld()

    def close(self) -> None:
        LIVE.remove(self)


class FrozenWorld:
    level: Level = Level.STATE
    losses: tuple[str, ...] = ()

    def fork(self, n: int = 1) -> list[World]:
        return [World() for _ in range(n)]

    def digest(self) -> str:
        return ""

    def release(self) -> None:
        pass


class SumEnv(AgentEnv):
    """Adds numbers. Each answer holds what differs from run to run, and a draw that must not."""

    tools: tuple[ToolSpec, ...] = (
        ToolSpec("add", "Add.", (Param("n", "A number."),)),
        ToolSpec("submit", "Hand in."),
        ToolSpec("crash", "Break the world."),
    )
    volatile: ClassVar[tuple[str, ...]] = (r"(?P<date>\d{4}-\d\d-\d\d)", r"took \d+\.\d+ s", r"pid \d+", r"/tmp/\w+")

    def begin(self, task: Task) -> str:
        self.total, self.calls = 0, 0
        self.world = self.attach(World())
        return f"{task.prompt}, pid {next(CLOCK)}"

    def act(self, call: ToolCall) -> Reply | str:
        if call.name == "submit":
            return Reply("thanks", ended=True)
        if call.name == "crash":
            raise EnvError("the world broke")
        self.total += int(call.arguments["n"])
        self.calls += 1
        now = next(CLOCK)
        seen = f"on 2024-01-{now % 28 + 1:02} pid {now} took {now}.5 s in /tmp/x{now}"
        return Reply(f"{seen}: total {self.total}\ndraw {self.np_random.integers(10**9)}", rewards={"step": 0.1})

    def grade(self) -> float:
        return float(self.total == self.episode.task.setup["target"])


def make_env(task: Task) -> SumEnv:
    return SumEnv([task], limits=Limits(max_turns=6))


def record(tree: Tree, parent: Node, env: AgentEnv, *actions: str | Action, forked: bool = False) -> Node:
    """Play turns and store them, as a rollout would."""
    for given in actions:
        act = given if isinstance(given, Action) else Action(given)
        result = env.play(act)
        node = Node(len(tree.nodes), parent, parent.turn_index + 1, act.text, result.observation, act.cut)
        node.messages, node.reward, node.rewards = env.turn_messages, result.reward, result.info["rewards"]
        node.forked, forked = forked, False
        if env.episode.stop is not None:
            node.status = NodeStatus.TERMINATED if result.terminated else NodeStatus.TRUNCATED
            node.stop_reason = env.episode.stop
        parent = tree.add(node)
    return parent


def grown() -> Tree:
    """Three branches: two fork after turn 1, the third forks from the second after turn 2."""
    tree = Tree("sum/1/0", TASK.id, TASK.env, seed=11)
    env = make_env(TASK)
    observation, _ = env.reset(seed=11, options={"task": TASK})
    root = tree.add(Node(0, None, 0, observation=observation))
    first = record(tree, root, env, "add 1")
    left = env.fork()[0]
    record(tree, first, env, "add 4", "add 0", "submit")
    second = record(tree, first, left, "add 2", forked=True)
    right = left.fork()[0]
    record(tree, second, left, "sub 1", Action("add 9", cut=True), "add 1")
    record(tree, second, right, "add 2", "submit", forked=True)
    for each in (env, left, right):
        each.close()
    return tree


@pytest.fixture(autouse=True)
def no_world_left() -> None:
    LIVE.clear()


@pytest.fixture
def tree() -> Tree:
    return grown()


BOTH = pytest.mark.parametrize("forked", [False, True], ids=["linear", "forked"])


def replay(tree: Tree, forked: bool = False, **options: Any) -> TreeReport:
    report = replay_tree(tree, TASK, make_env, forked=forked, **options)
    assert not LIVE, "a replay left a world open"
    return report


@BOTH
def test_every_branch_is_played_and_equal(tree: Tree, forked: bool) -> None:
    report = replay(tree, forked)
    assert report.differences == () and report.equal
    assert (report.num_branches, report.num_nodes, report.num_equal) == (3, 11, 11)
    assert report.num_turns == (10 if forked else 4 + 5 + 4)
    assert report.seconds > 0 and report.not_replayed == ()
    assert [leaf.stop_reason for leaf in tree.leaves()] == [StopReason.SUCCESS, None, StopReason.SUCCESS]


@BOTH
def test_a_tree_from_the_store_is_played_and_equal(tree: Tree, forked: bool, tmp_path: Path) -> None:
    with Store.open(tmp_path / "run.db") as store:
        store.add_run("r", {})
        store.add_tree("r", tree, TASK)
        store.end_tree("r", tree)
        loaded, task = store.load_tree("r", tree.id), store.load_task("r", tree.id)
    report = replay_tree(loaded, task, make_env, forked=forked)
    assert report.equal and report.num_nodes == 11


@BOTH
def test_only_one_branch(tree: Tree, forked: bool) -> None:
    report = replay(tree, forked, node=tree.nodes[5])
    assert report.equal and (report.num_branches, report.num_nodes, report.num_turns) == (1, 3, 2)


@BOTH
def test_a_real_difference_is_told_where_it_begins(tree: Tree, forked: bool) -> None:
    """C085: dates, durations, pids and temporary names differ; only the total of turn 3 counts."""
    odd = tree.nodes[3]
    assert odd.turn_index == 3
    odd.observation = odd.observation.replace("total 5", "total 6")
    report = replay(tree, forked)
    (found,) = report.differences
    assert (found.tree_id, found.node_id, found.turn_index, found.field) == ("sum/1/0", 3, 3, "observation")
    assert found.stored.startswith(r"on <date> <pid \d+> <took \d+\.\d+ s> in </tmp/\w+>: total 6")
    assert "total 5" in found.replayed
    lines = found.diff.split("\n")
    assert [line[0] for line in lines if "total" in line] == ["-", "+"] and " draw" in lines[-1]
    assert not report.equal and (report.num_nodes, report.num_equal) == (11, 10)


@BOTH
def test_what_is_not_declared_volatile_is_a_difference(
    tree: Tree, forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SumEnv, "volatile", ())
    report = replay(tree, forked)
    # the refusals of a bad and of a cut reply hold nothing volatile, and neither does the end
    assert [found.node_id for found in report.differences] == [0, 1, 2, 3, 5, 8, 9]
    declared = (r"\d{4}-\d\d-\d\d", r"took \d+\.\d+ s", r"pid \d+", r"/tmp/\w+")
    assert replay(tree, forked, volatile=declared).equal


@BOTH
@pytest.mark.parametrize(
    ("change", "field", "texts"),
    [
        (lambda node: setattr(node, "reward", 0.5), "reward", ("0.5", "0.1")),
        (lambda node: setattr(node, "reward", None), "reward", ("None", "0.1")),
        (lambda node: setattr(node, "status", NodeStatus.TRUNCATED), "status", ("truncated", "open")),
        (lambda node: setattr(node, "stop_reason", StopReason.MAX_TURNS), "stop_reason", ("max_turns", "None")),
    ],
)
def test_reward_status_and_stop_reason_are_compared(
    tree: Tree, forked: bool, change: Callable[[Node], None], field: str, texts: tuple[str, str]
) -> None:
    change(tree.nodes[2])
    report = replay(tree, forked)
    assert [(d.node_id, d.field, d.stored, d.replayed) for d in report.differences] == [(2, field, *texts)]


@BOTH
def test_a_changed_action_shows_at_its_turn_first(tree: Tree, forked: bool) -> None:
    tree.nodes[5].action = "add 3"
    report = replay(tree, forked)
    assert report.differences[0].node_id == 5 and report.differences[0].turn_index == 2
    assert {found.node_id for found in report.differences} == {5, 8, 9, 10}
    assert [d.field for d in report.differences if d.node_id == 10] == ["reward", "stop_reason"]


@BOTH
def test_a_replay_that_ends_early_says_what_it_did_not_reach(tree: Tree, forked: bool) -> None:
    tree.nodes[5].action = "submit"
    report = replay(tree, forked)
    assert [d.field for d in report.differences] == ["observation", "reward", "status", "stop_reason"]
    assert {d.node_id for d in report.differences} == {5}
    assert report.not_replayed == (6, 7, 8, 9, 10) and report.num_nodes == 6


@BOTH
def test_a_branch_that_broke_is_played_up_to_there(tree: Tree, forked: bool) -> None:
    tree.nodes[7].status, tree.nodes[7].reward, tree.nodes[7].error = NodeStatus.INFRA_ERROR, None, "EngineError: gone"
    tree.nodes[9].status = NodeStatus.RESTORE_FAILED
    report = replay(tree, forked)
    assert report.equal and report.not_replayed == (7, 8, 9, 10)
    assert (report.num_branches, report.num_nodes) == (3, 7)
    tree.root.status = NodeStatus.INFRA_ERROR
    assert replay(tree, forked).num_nodes == 0


@BOTH
def test_a_world_that_breaks_now_is_a_difference(tree: Tree, forked: bool) -> None:
    tree.nodes[2].action = "crash"
    report = replay(tree, forked)
    assert [(d.node_id, d.field, d.replayed) for d in report.differences] == [(2, "error", "EnvError: the world broke")]
    assert report.not_replayed == (3, 4)


def test_a_reset_that_breaks_now_is_a_difference(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: SumEnv, task: Task) -> str:
        raise EnvError("no world")

    monkeypatch.setattr(SumEnv, "begin", broken)
    (found,) = replay(tree).differences
    assert (found.node_id, found.field, found.replayed) == (0, "error", "EnvError: no world")


@BOTH
def test_an_end_that_the_rollout_made_is_made_again(forked: bool) -> None:
    tree = Tree("sum/1/1", TASK.id, TASK.env, seed=3)
    env = make_env(TASK)
    tree.add(Node(0, None, 0, observation=env.reset(seed=3)[0]))
    leaf = record(tree, tree.root, env, "add 2", "add 3")
    rewards = env.stop(StopReason.BUDGET)
    leaf.status, leaf.stop_reason, leaf.reward = (
        NodeStatus.TRUNCATED,
        StopReason.BUDGET,
        (leaf.reward or 0) + rewards["outcome"],
    )
    env.close()
    assert leaf.reward == 1.1
    assert replay(tree, forked).differences == ()


def test_long_texts_are_shown_from_where_they_part(tree: Tree) -> None:
    tree.nodes[2].observation = "x" * 5000 + "a" + "y" * 5000
    (found,) = replay(tree).differences
    assert (
        len(found.stored) < MAX_SHOWN + 10 and len(found.replayed) < MAX_SHOWN + 10 and len(found.diff) < 3 * MAX_SHOWN
    )
    normalise = Normaliser([])
    assert normalise("same") == "same"
    tree = grown()
    tree.nodes[2].observation = tree.nodes[2].observation + "\n" + "z" * 5000
    (found,) = replay(tree).differences
    assert "zzz" in found.stored and found.stored.endswith("...")


def test_bad_questions_are_refused(tree: Tree) -> None:
    with pytest.raises(ReplayError, match="has no nodes"):
        replay_tree(Tree("empty", "t", "e", 0), TASK, make_env)
    with pytest.raises(ReplayError, match="node 2 is not in tree"):
        replay_tree(tree, TASK, make_env, node=grown().nodes[2])
    with pytest.raises(ConfigError, match=r"volatile pattern '\(' is no regular expression"):
        replay_tree(tree, TASK, make_env, volatile=["("])
