from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any, ClassVar

import pytest

from agentgym.branching import Budget, EveryTurn, Fork, NoForks, RandomNodes
from agentgym.chat import ByteRenderer
from agentgym.engine import SampleRequest, ScriptedEngine, derive_seed
from agentgym.env import AgentEnv
from agentgym.episode import Limits, Reply
from agentgym.errors import ConfigError, EngineError, SnapshotBusy, SnapshotError
from agentgym.play import audit
from agentgym.rollout import Settings, roll_out, roll_out_async
from agentgym.task import Task
from agentgym.tree import Node, NodeStatus, Tree, branch_return
from agentgym.types import Completion, Level, Param, StopReason, ToolCall, ToolSpec


class World:
    """An attached resource that knows how many of its kind are alive."""

    live: ClassVar[set[World]] = set()
    frozen: ClassVar[set[Frozen]] = set()
    taken: ClassVar[list[str]] = []
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, lines: Sequence[str] = ()) -> None:
        self.lines = list(lines)
        with World.lock:
            World.live.add(self)

    def snapshot(self) -> Frozen:
        return Frozen(self.lines)

    def close(self) -> None:
        with World.lock:
            World.live.discard(self)


class Frozen:
    level = Level.FILES
    losses: tuple[str, ...] = ("a cup of tea",)

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = tuple(lines)
        with World.lock:
            World.frozen.add(self)
            World.taken.append(" ".join(lines))

    def fork(self, n: int = 1) -> list[World]:
        return [World(self.lines) for _ in range(n)]

    def digest(self) -> str:
        return "/".join(self.lines)

    def release(self) -> None:
        with World.lock:
            World.frozen.remove(self)


class DiaryEnv(AgentEnv):
    """Writes lines; what a line says decides what happens."""

    tools = (ToolSpec("write", "Write a line.", (Param("line", "The line."),)), ToolSpec("submit", "Hand in."))
    gates: ClassVar[dict[str, threading.Event]] = {}

    def begin(self, task: Task) -> str:
        self.world = self.attach(World())
        return task.prompt

    def act(self, call: ToolCall) -> Reply | str:
        if call.name == "submit":
            return Reply("bye", ended=True)
        line = str(call.arguments["line"])
        word, _, rest = line.partition(" ")
        if word == "crash":
            raise RuntimeError("the disk is gone")
        if word == "exit":
            raise SystemExit(3)
        if word == "hang":
            DiaryEnv.gates[rest].wait(30)
        if word == "sleep":
            time.sleep(float(rest))
        self.world.lines.append(line)
        if word == "pay":
            return Reply("paid", rewards={"pay": float(rest)})
        return f"{len(self.world.lines)} lines, {self.np_random.integers(100)}"

    def grade(self) -> float:
        if any(line.startswith("sabotage") for line in self.world.lines):
            raise RuntimeError("the grader is gone")
        return float("good" in self.world.lines)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    World.taken.clear()
    yield
    assert not World.live, "worlds leak"
    assert not World.frozen, "snapshots leak"


def diary(task: Task) -> AgentEnv:
    return DiaryEnv([task], limits=Limits(max_turns=8))


def tasks(*names: str) -> list[Task]:
    return [Task(name, "test/Diary-v0", f"Write about {name}.") for name in names]


def script(*turns: str) -> ScriptedEngine:
    """Plays the turns by their index; the last one again."""
    return ScriptedEngine(lambda request: turns[min(request.turn_index, len(turns) - 1)])


def by_seed(request: SampleRequest) -> str:
    return f"write {random.Random(request.seed).randint(0, 9999)}"


class SlowEngine(ScriptedEngine):
    """Has to be awaited, as a model has, and takes its time at random."""

    sample_now: Any = None
    longest_s = 0.004

    async def sample(self, request: SampleRequest) -> Completion:
        await asyncio.sleep(random.random() * self.longest_s)
        return ScriptedEngine.sample_now(self, request)


class OddEngine(ScriptedEngine):
    """Changes what it sampled before it gives it."""

    def __init__(self, text: str, change: Callable[[Completion], Completion]) -> None:
        super().__init__(lambda request: text)
        self.change = change

    def sample_now(self, request: SampleRequest) -> Completion:
        return self.change(super().sample_now(request))


class Witness(ScriptedEngine):
    """Remembers every request."""

    def __init__(self, policy: Callable[[SampleRequest], str]) -> None:
        super().__init__(policy)
        self.requests: list[SampleRequest] = []

    def sample_now(self, request: SampleRequest) -> Completion:
        self.requests.append(request)
        return super().sample_now(request)


def plain(trees: Sequence[Tree]) -> list[Any]:
    """All that must repeat."""
    return [
        (t.id, t.group, t.seed, [(n.id, n.parent and n.parent.id, n.action, n.observation, n.reward, n.seed, n.status, n.value, n.kept) for n in t.nodes])
        for t in trees
    ]  # fmt: skip


# a chain


def test_a_chain_records_turns_tokens_and_the_end() -> None:
    engine = Witness(lambda request: ("write good", "submit")[request.turn_index])
    engine.policy_version = 3
    seen: list[int] = []
    (tree,) = roll_out(tasks("a"), engine, make_env=diary, on_node=lambda t, n: seen.append(n.id))
    assert [n.action for n in tree.nodes] == ["", "write good", "submit"] and seen == [0, 1, 2]
    root, first, last = tree.nodes
    assert (last.status, last.stop_reason, last.reward, last.rewards) == (
        "terminated",
        "success",
        1.0,
        {"outcome": 1.0},
    )
    assert (root.reward, first.reward, tree.root.value) == (None, 0.0, 1.0)
    renderer = ByteRenderer()
    assert root.token_ids_T == renderer.render(root.messages, open_turn=True) and not any(root.mask_T)
    said = (*b"write good", 256)
    heard = renderer.render(first.messages[1:], open_turn=True)
    assert first.token_ids_T == said + heard
    assert first.mask_T == (True,) * len(said) + (False,) * len(heard)
    assert first.versions_T == (3,) * len(said) + (-1,) * len(heard)
    assert last.token_ids_T == (*b"submit", 256, *renderer.render(last.messages[1:], open_turn=False))
    assert [m.role for m in first.messages] == ["assistant", "tool"] and first.num_tool_calls == 1
    assert [r.ids_T for r in engine.requests] == [root.path_ids(), first.path_ids()]
    assert [list(r.messages) for r in engine.requests] == [root.path_messages(), first.path_messages()]


def test_no_snapshots_without_forks() -> None:
    roll_out(tasks("a", "b"), script("write x"), make_env=diary)
    assert World.taken == []


def test_no_tasks_no_trees() -> None:
    assert roll_out([], script("submit"), make_env=diary) == []


def test_a_task_that_occurs_twice_makes_two_groups() -> None:
    trees = roll_out(tasks("a", "b", "a"), script("submit"), Settings(trees_per_task=2), make_env=diary)
    assert [t.id for t in trees] == ["a/0", "a/1", "b/0", "b/1", "a/2", "a/3"]
    assert [t.group for t in trees] == ["a", "a", "b", "b", "a#1", "a#1"]
    assert len({t.root.seed for t in trees}) == 6


def test_engines_that_must_be_awaited_give_the_same() -> None:
    settings = Settings(chooser=EveryTurn(turns=(2, 4)))
    now = roll_out(tasks("a"), ScriptedEngine(by_seed), settings, make_env=diary)
    later = roll_out(tasks("a"), SlowEngine(by_seed), settings, make_env=diary)
    assert plain(now) == plain(later)


# forks


def test_a_tree_branches_in_the_world_and_in_the_tokens() -> None:
    engine = Witness(by_seed)
    (tree,) = roll_out(tasks("a"), engine, Settings(chooser=EveryTurn(turns=(3, 6)), concurrency=1), make_env=diary)
    assert len(tree.leaves()) == 4 and len(tree.nodes) - 1 == 2 + 2 * 3 + 4 * 3
    assert [n.turn_index for n in tree.forks()] == [2, 5, 5]
    for leaf in tree.leaves():
        lines = [n.action.removeprefix("write ") for n in leaf.path()[1:]]
        assert leaf.observation.startswith(f"{len(lines)} lines")
        again = diary(tasks("a")[0])
        again.reset(seed=tree.seed, options={"task": tasks("a")[0]})
        assert [again.step(n.action)[0] for n in leaf.path()[1:]] == [n.observation for n in leaf.path()[1:]]
        again.close()
    by_ids = {request.ids_T for request in engine.requests}
    assert {n.parent.path_ids() for n in tree.nodes if n.parent} == by_ids
    assert len(engine.requests) == len(tree.nodes) - 1, "each turn is sampled once"


def test_forks_are_recorded() -> None:
    (tree,) = roll_out(tasks("a"), ScriptedEngine(by_seed), Settings(chooser=EveryTurn(turns=(3,))), make_env=diary)
    forked = [n for n in tree.nodes if n.forked]
    assert [n.parent for n in forked] == [tree.nodes[2]]
    parent, child = tree.nodes[2], forked[0]
    assert (parent.forkable, parent.losses, parent.snapshot) == (Level.FILES, ("a cup of tea",), None)
    assert parent.snapshot_id is not None and child.timings.fork_s > 0 and parent.timings.snapshot_s > 0
    assert all(n.forkable is None for n in tree.nodes if n is not parent)


def test_snapshots_are_taken_only_where_forks_may_come() -> None:
    roll_out(tasks("a"), script("write x"), Settings(chooser=EveryTurn(turns=(3,))), make_env=diary)
    assert World.taken == ["x x"]
    World.taken.clear()
    settings = Settings(chooser=RandomNodes(nodes=2, rounds=1))
    roll_out(tasks("a"), script("write x"), settings, make_env=diary)
    assert len(World.taken) == 8, "the root and seven turns of the first chain, and none of the last round"


def test_random_trees_are_pruned_on_record() -> None:
    settings = Settings(chooser=RandomNodes(nodes=3, rounds=2, leaves=2), trees_per_task=2)
    trees = roll_out(tasks("a"), ScriptedEngine(by_seed), settings, make_env=diary)
    assert [len(t.leaves()) for t in trees] == [7, 7]
    assert [sum(leaf.kept for leaf in t.leaves()) for t in trees] == [2, 2]


def test_a_chooser_that_names_what_cannot_fork_is_stopped() -> None:
    class Wild(NoForks):
        def __call__(self, trees: Sequence[Tree], budget: Budget, seed: int) -> list[Fork]:
            return [Fork(trees[0].leaves()[0], 1)]

    with pytest.raises(ConfigError, match=r"named node 8 \(truncated"):
        roll_out(tasks("a"), script("write x"), Settings(chooser=Wild()), make_env=diary)


def test_snapshots_are_released_between_rounds() -> None:
    most: list[int] = []
    settings = Settings(chooser=EveryTurn(turns=(2, 4, 6)), concurrency=1)
    roll_out(
        tasks("a"),
        ScriptedEngine(by_seed),
        settings,
        make_env=diary,
        on_node=lambda t, n: most.append(len(World.frozen)),
    )
    assert 0 < max(most) <= 6, "seven nodes fork, never all at once"


def test_a_refused_snapshot_leaves_the_branch_alone() -> None:
    class Busy(DiaryEnv):
        def snapshot(self, *, require: Level | None = None) -> Any:
            if len(self.world.lines) == 3:
                raise SnapshotBusy("a file is open")
            return super().snapshot(require=require)

    settings = Settings(chooser=EveryTurn(turns=(4, 6)))
    (tree,) = roll_out(
        tasks("a"), script("write x"), settings, make_env=lambda t: Busy([t], limits=Limits(max_turns=8))
    )
    assert [n.turn_index for n in tree.forks()] == [5]
    assert tree.nodes[3].losses == ("no snapshot: a file is open",) and tree.nodes[3].status is NodeStatus.OPEN


def test_less_than_the_required_level_is_not_forked() -> None:
    settings = Settings(chooser=EveryTurn(turns=(4,)), require=Level.PROCESS)
    (tree,) = roll_out(tasks("a"), script("write x"), settings, make_env=diary)
    assert tree.forks() == [] and "level process is required" in tree.nodes[3].losses[0]


def test_a_fork_that_fails_is_our_failure_on_its_first_turn() -> None:
    class Sterile(DiaryEnv):
        def snapshot(self, *, require: Level | None = None) -> Any:
            snapshot = super().snapshot(require=require)

            def refuse(n: int = 1, **_: Any) -> list[AgentEnv]:
                raise SnapshotError("the layer is gone")

            snapshot.fork = refuse  # type: ignore[method-assign]
            return snapshot

    settings = Settings(chooser=EveryTurn(turns=(4,)))
    (tree,) = roll_out(
        tasks("a"), script("write x"), settings, make_env=lambda t: Sterile([t], limits=Limits(max_turns=8))
    )
    broken = tree.leaves()[1]
    assert (broken.status, broken.parent, broken.reward) == (NodeStatus.INFRA_ERROR, tree.nodes[3], None)
    assert broken.error == "SnapshotError: the layer is gone" and broken.forked
    assert tree.root.value == 0.0 and tree.leaves()[0].status is NodeStatus.TRUNCATED


def test_a_fork_in_another_state_is_not_played() -> None:
    class Drifting(Frozen):
        def fork(self, n: int = 1) -> list[World]:
            return [World((*self.lines, "dust")) for _ in range(n)]

    class Drifts(DiaryEnv):
        def begin(self, task: Task) -> str:
            text = super().begin(task)
            self.world.snapshot = lambda: Drifting(self.world.lines)  # type: ignore[method-assign]
            return text

    def make(task: Task) -> AgentEnv:
        return Drifts([task], limits=Limits(max_turns=4))

    settings = Settings(chooser=EveryTurn(turns=(2,)), verify_forks=True)
    (tree,) = roll_out(tasks("a"), script("write x"), settings, make_env=make)
    bad = tree.leaves()[1]
    assert (bad.status, bad.reward, bad.turn_index) == (NodeStatus.RESTORE_FAILED, None, 2)
    assert f"and the state it should be in {sha256(b'x').hexdigest()}" in str(bad.error)
    assert sha256(b"x/dust").hexdigest() in str(bad.error)
    (good,) = roll_out(tasks("a"), script("write x"), settings, make_env=diary)
    assert len(good.scored_leaves()) == 2 and good.nodes[1].digest == sha256(b"x").hexdigest()


# identity, never order of completion (C026, C027, C028)


@pytest.mark.parametrize("chooser", [NoForks(), EveryTurn(turns=(2, 5)), RandomNodes(nodes=3, rounds=2, leaves=3)])
def test_the_same_seed_gives_the_same_trees_whatever_finishes_first(chooser: Any) -> None:
    def sleepy(request: SampleRequest) -> str:
        return f"sleep {random.random() * 0.003}" if request.seed % 3 == 0 else by_seed(request)

    def run(concurrency: int) -> list[Tree]:
        settings = Settings(chooser=chooser, concurrency=concurrency, trees_per_task=2, seed=0)
        return roll_out(tasks("a", "b", "c"), SlowEngine(sleepy), settings, make_env=diary)

    def comparable(trees: list[Tree]) -> list[Any]:
        for node in (node for tree in trees for node in tree.nodes):
            node.action = "sleep" if "sleep" in node.action else node.action
        return plain(trees)

    first = comparable(run(1))
    assert first == comparable(run(8)) == comparable(run(8))


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
def test_every_seed_is_a_seed(seed: int) -> None:
    def run(seed: int) -> Any:
        return plain(roll_out(tasks("a"), ScriptedEngine(by_seed), Settings(seed=seed), make_env=diary))

    assert run(seed) == run(seed) != run(seed + 5)


def test_seeds_are_derived_as_documented() -> None:
    settings = Settings(chooser=EveryTurn(turns=(2,)), trees_per_task=2, seed=9)
    for index, tree in enumerate(roll_out(tasks("a"), ScriptedEngine(by_seed), settings, make_env=diary)):
        assert tree.seed == derive_seed(9, "a", "world")
        assert tree.root.seed == derive_seed(9, "a", index)
        for node in tree.nodes:
            for k, child in enumerate(node.children):
                assert child.seed == derive_seed(node.seed, k)


def test_replicas_explore_differently() -> None:
    class Replicas(ScriptedEngine):
        """Two engines that take turns, each sampling with a stream of its own for each request."""

        def __init__(self) -> None:
            super().__init__(by_seed)
            self.replicas = [Witness(by_seed), Witness(by_seed)]
            self.turn = 0

        def sample_now(self, request: SampleRequest) -> Completion:
            self.turn += 1
            return self.replicas[self.turn % 2].sample_now(request)

    engine = Replicas()
    trees = roll_out(
        tasks("a"),
        engine,
        Settings(trees_per_task=16, concurrency=1),
        make_env=lambda t: DiaryEnv([t], limits=Limits(max_turns=1)),
    )
    streams = [[r.seed for r in replica.requests] for replica in engine.replicas]
    assert [len(s) for s in streams] == [8, 8] and len({*streams[0], *streams[1]}) == 16
    assert len({tree.nodes[1].action for tree in trees}) >= 15
    assert {t.nodes[1].seed for t in trees} == {*streams[0], *streams[1]}, "the seed of each sample is on record"


def test_nodes_come_parents_first_and_in_order() -> None:
    told: list[tuple[str, int]] = []
    done: list[str] = []

    def on_node(tree: Tree, node: Node) -> None:
        assert node.parent is None or (tree.id, node.parent.id) in told
        assert tree.id not in done and threading.current_thread() is threading.main_thread()
        told.append((tree.id, node.id))

    def on_tree(tree: Tree) -> None:
        assert [i for name, i in told if name == tree.id] == list(range(len(tree.nodes)))
        assert tree.root.value is not None
        done.append(tree.id)

    settings = Settings(chooser=RandomNodes(nodes=4), trees_per_task=2)
    trees = roll_out(tasks("a", "b"), SlowEngine(by_seed), settings, make_env=diary, on_node=on_node, on_tree=on_tree)
    assert sorted(done) == [t.id for t in trees] and len(told) == sum(len(t.nodes) for t in trees)


# tokens and limits


def without_end(completion: Completion) -> Completion:
    return replace(completion, ids_T=completion.ids_T[:-1], logprobs_T=completion.logprobs_T[:-1])


def test_c007_an_end_that_nobody_sampled_is_not_trained_on() -> None:
    (tree,) = roll_out(tasks("a"), OddEngine("submit", without_end), make_env=diary)
    node = tree.nodes[1]
    assert node.token_ids_T[:7] == (*b"submit", 256) and node.mask_T[:7] == (True,) * 6 + (False,)
    assert node.num_sampled == 6 and node.versions_T[6] == -1


def loud(completion: Completion) -> Completion:
    return replace(completion, logprobs_T=(-0.5,) * len(completion.ids_T))


def test_logprobs_stand_on_sampled_tokens_only() -> None:
    (tree,) = roll_out(tasks("a"), OddEngine("write x", loud), make_env=diary)
    for node in tree.nodes:
        assert [p == -0.5 for p in node.logprobs_T] == list(node.mask_T)


class WordyEnv(DiaryEnv):
    """Ten sampled tokens a turn are answered with 90 of the world."""

    def act(self, call: ToolCall) -> Reply | str:
        return "y" * 87  # and role, end, next header


def wordy(task: Task) -> AgentEnv:
    return WordyEnv([task], limits=Limits(max_turns=100))


def test_c011_only_sampled_tokens_count_against_their_budget() -> None:
    (tree,) = roll_out(tasks("a"), script("write xyz"), Settings(max_sampled_tokens=100), make_env=wordy)
    leaf = tree.leaves()[0]
    assert [n.num_sampled for n in tree.nodes[1:]] == [10] * 10
    assert [len(n.token_ids_T) for n in tree.nodes[1:]] == [100] * 10
    assert (leaf.status, leaf.stop_reason, leaf.reward) == (NodeStatus.TRUNCATED, StopReason.MAX_TOKENS, 0.0)


def test_c011_the_context_counts_everything() -> None:
    settings = Settings(max_sampled_tokens=100, max_context_tokens=1000)
    (tree,) = roll_out(tasks("a"), script("write xyz"), settings, make_env=wordy)
    leaf = tree.leaves()[0]
    assert leaf.stop_reason is StopReason.MAX_CONTEXT and leaf.turn_index < 10
    assert len(leaf.path_ids()) >= 1000 > len(tree.nodes[-2].path_ids())


def test_limits_hold_along_forks() -> None:
    settings = Settings(max_sampled_tokens=50, chooser=EveryTurn(turns=(3,)))
    (tree,) = roll_out(tasks("a"), script("write xyz"), settings, make_env=wordy)
    assert [sum(n.num_sampled for n in leaf.path()) for leaf in tree.leaves()] == [50, 50]


def test_a_turn_is_cut_where_its_branch_has_no_more_room() -> None:
    engine = Witness(lambda request: "write xyz")
    (tree,) = roll_out(tasks("a"), engine, Settings(max_sampled_tokens=25), make_env=wordy)
    assert [r.max_tokens for r in engine.requests] == [25, 15, 5]
    assert [n.cut for n in tree.nodes] == [False, False, False, True]
    assert tree.leaves()[0].stop_reason is StopReason.MAX_TOKENS


def test_c012_a_cut_call_is_never_executed_and_the_second_in_a_row_ends() -> None:
    (tree,) = roll_out(tasks("a"), script("write " + "z" * 50), Settings(max_tokens_per_turn=20), make_env=diary)
    assert [n.cut for n in tree.nodes[1:]] == [True, True]
    assert "was cut by the token limit" in tree.nodes[1].observation
    leaf = tree.leaves()[0]
    assert (leaf.status, leaf.stop_reason) == (NodeStatus.TRUNCATED, StopReason.MAX_TOKENS)
    assert sum(n.num_tool_calls for n in tree.nodes) == 0
    assert leaf.token_ids_T[20] == 256 and not leaf.mask_T[20]


def test_a_prompt_that_does_not_fit_is_our_failure() -> None:
    (tree,) = roll_out(tasks("a"), script("submit"), Settings(max_context_tokens=10), make_env=diary)
    assert tree.root.status is NodeStatus.INFRA_ERROR and "max_context_tokens is 10" in str(tree.root.error)


def test_the_audit_names_the_first_difference() -> None:
    (tree,) = roll_out(tasks("a"), script("write x", "submit"), make_env=diary)
    leaf, read = tree.leaves()[0], tree.nodes[1].path_ids()
    lengths = [len(tree.root.path_ids()), len(read)]
    audit(leaf, read, lengths)
    with pytest.raises(EngineError, match=f"turn 2 was sampled after {len(read) - 1} tokens"):
        audit(leaf, read[:-1], [lengths[0], len(read) - 1])
    at = lengths[0] + 2
    odd = (*read[:at], 9, *read[at + 1 :])
    with pytest.raises(
        EngineError, match=f"position {at} of the branch, in turn 1: the engine read token 9, on record is 105"
    ):
        audit(leaf, odd, lengths)


def test_a_branch_that_fails_the_audit_is_kept_out() -> None:
    class Forgetful(DiaryEnv):
        nodes: ClassVar[list[Node]] = []

        def grade(self) -> float:
            for node in Forgetful.nodes:
                node.token_ids_T = (*node.token_ids_T[:-1], 7)
            return 1.0

    engine = Witness(lambda request: "write x" if request.turn_index < 2 else "submit")
    settings = Settings(concurrency=1)

    def slowly(request: SampleRequest) -> str:
        if request.turn_index == 2:
            time.sleep(0.1)  # until the loop has told of the nodes before
        return "write x" if request.turn_index < 2 else "submit"

    engine = Witness(slowly)
    (tree,) = roll_out(
        tasks("a"), engine, settings, make_env=lambda t: Forgetful([t]), on_node=lambda t, n: Forgetful.nodes.append(n)
    )
    leaf = tree.leaves()[0]
    assert (leaf.status, leaf.reward, tree.root.value) == (NodeStatus.INFRA_ERROR, None, None)
    assert "the engine read token" in str(leaf.error)


# rewards and ends (C017, C024, C025)


def test_c025_turn_rewards_stay_with_their_turns() -> None:
    (tree,) = roll_out(tasks("a"), script("write pay 0.2", "write dry", "write pay 0.5", "submit"), make_env=diary)
    assert [n.reward for n in tree.nodes] == [None, 0.2, 0.0, 0.5, 0.0]
    assert tree.nodes[3].rewards == {"pay": 0.5}
    assert branch_return(tree.leaves()[0]) == pytest.approx(0.7) == tree.root.value


@pytest.mark.parametrize(
    ("turns", "status", "reason", "reward"),
    [
        (("write good", "submit"), "terminated", "success", 1.0),
        (("submit",), "terminated", "failure", 0.0),
        (("write x",), "truncated", "max_turns", 0.0),
        (("write good",) * 7 + ("submit",), "terminated", "success", 1.0),
        (("write crash",), "infra_error", None, None),
        (("write exit",), "infra_error", None, None),
        (("write sabotage", "submit"), "infra_error", None, None),
        (("nonsense",), "truncated", "bad_calls", 0.0),
    ],
)
def test_c024_ends(turns: tuple[str, ...], status: str, reason: str | None, reward: float | None) -> None:
    (tree,) = roll_out(tasks("a"), script(*turns), make_env=diary)
    leaf = tree.leaves()[0]
    assert (leaf.status, leaf.stop_reason, leaf.reward) == (status, reason, reward)


def test_c017_a_broken_branch_has_no_reward_and_harms_no_sibling() -> None:
    def policy(request: SampleRequest) -> str:
        rng = random.Random(request.seed)
        return "write crash" if rng.random() < 0.25 else rng.choice(["write good", "write x", "submit"])

    settings = Settings(trees_per_task=12, chooser=RandomNodes(nodes=2))
    trees = roll_out(tasks("a"), ScriptedEngine(policy), settings, make_env=diary)
    leaves = [leaf for tree in trees for leaf in tree.leaves()]
    broken = [leaf for leaf in leaves if leaf.status is NodeStatus.INFRA_ERROR]
    assert 3 < len(broken) < len(leaves) - 3
    for leaf in broken:
        assert (leaf.reward, leaf.rewards, leaf.action) == (None, {}, "write crash")
        assert leaf.error is not None and leaf.error.startswith("EnvError: DiaryEnv failed in turn")
        assert leaf.num_sampled == len("write crash") + 1, "what was sampled is on record"
        assert branch_return(leaf) is None and leaf.value is None
    assert all(leaf.reward in (0.0, 1.0) for leaf in leaves if leaf not in broken)
    for tree in trees:
        scored = [branch_return(leaf) for leaf in tree.scored_leaves()]
        assert tree.root.value == (sum(r or 0 for r in scored) / len(scored) if scored else None)


def test_a_reset_that_fails_is_a_root_without_reward() -> None:
    def make(task: Task) -> AgentEnv:
        if task.id == "b":
            raise RuntimeError("no room")
        return diary(task)

    a, b, c = roll_out(tasks("a", "b", "c"), script("submit"), make_env=make)
    assert (b.root.status, b.root.error, len(b.nodes)) == (NodeStatus.INFRA_ERROR, "RuntimeError: no room", 1)
    assert a.leaves()[0].reward == c.leaves()[0].reward == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: replace(c, logprobs_T=()), "7 tokens and 0 log-probabilities"),
        (lambda c: replace(c, ids_T=c.ids_T * 400, logprobs_T=c.logprobs_T * 400), "where 1024 were allowed"),
    ],
)
def test_an_engine_that_breaks_its_promise_is_our_failure(change: Any, message: str) -> None:
    (tree,) = roll_out(tasks("a"), OddEngine("submit", change), make_env=diary)
    leaf = tree.leaves()[0]
    assert leaf.status is NodeStatus.INFRA_ERROR and message in str(leaf.error)


@pytest.mark.parametrize("awaited", [False, True])
def test_an_engine_that_fails_is_our_failure(awaited: bool) -> None:
    def policy(request: SampleRequest) -> str:
        if request.turn_index == 2:
            raise EngineError("the server is gone")
        return "write x"

    engine = SlowEngine(policy) if awaited else ScriptedEngine(policy)
    (tree,) = roll_out(tasks("a"), engine, make_env=diary)
    assert [n.status for n in tree.nodes] == ["open", "open", "open", "infra_error"]
    assert tree.nodes[3].error == "EngineError: the server is gone"


# budgets


@pytest.mark.parametrize("chooser", [NoForks(), EveryTurn(), RandomNodes(nodes=3, rounds=4)])
@pytest.mark.parametrize(
    "budget",
    [Budget(max_turns=30), Budget(max_tokens=260), Budget(max_tool_calls=30), Budget(max_turns=5), Budget(3, 20, 9)],
)
def test_budgets_are_never_exceeded(chooser: Any, budget: Budget) -> None:
    settings = Settings(chooser=chooser, budget=budget, trees_per_task=2)
    trees = roll_out(tasks("a"), ScriptedEngine(by_seed), settings, make_env=diary)
    nodes = [n for t in trees for n in t.nodes[1:]]
    spent = (len(nodes), sum(n.num_sampled for n in nodes), sum(n.num_tool_calls for n in nodes))
    limits = (budget.max_turns, budget.max_tokens, budget.max_tool_calls)
    assert all(limit is None or used <= limit for limit, used in zip(limits, spent, strict=True))
    assert len(nodes) >= 2


def test_a_branch_cut_by_the_budget_is_scored_as_it_stands() -> None:
    (tree,) = roll_out(tasks("a"), script("write good"), Settings(budget=Budget(max_turns=3)), make_env=diary)
    leaf = tree.leaves()[0]
    assert (leaf.turn_index, leaf.status, leaf.stop_reason) == (3, NodeStatus.TRUNCATED, StopReason.BUDGET)
    assert leaf.rewards == {"outcome": 1.0}


def test_a_tree_without_a_share_is_not_played_and_not_scored() -> None:
    settings = Settings(budget=Budget(max_turns=1), trees_per_task=2)
    first, second = roll_out(tasks("a"), script("write x"), settings, make_env=diary)
    assert len(first.nodes) == 2 and len(second.nodes) == 1
    assert (second.root.status, second.root.stop_reason, second.root.value) == ("open", "budget", None)


# hangs, cancels, leaks (C031, C068)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    DiaryEnv.gates["g"] = threading.Event()
    yield DiaryEnv.gates["g"]
    DiaryEnv.gates["g"].set()
    deadline = time.monotonic() + 10
    while World.live and time.monotonic() < deadline:
        time.sleep(0.01)


def test_c031_a_branch_that_hangs_is_recorded_and_the_others_go_on(gate: threading.Event) -> None:
    def policy(request: SampleRequest) -> str:
        hangs = request.task_id == "stuck" and request.turn_index == 1
        return "write hang g" if hangs else ("write x", "write x", "submit")[min(request.turn_index, 2)]

    names = ("a", "stuck", "b", "c")
    trees = roll_out(tasks(*names), ScriptedEngine(policy), Settings(timeout_s=0.3, concurrency=2), make_env=diary)
    a, stuck, b, c = trees
    assert [t.leaves()[0].status for t in (a, b, c)] == ["terminated"] * 3
    leaf = stuck.leaves()[0]
    assert (leaf.turn_index, leaf.status, leaf.stop_reason) == (2, NodeStatus.INFRA_ERROR, StopReason.TIMEOUT)
    assert leaf.reward is None and "not over after 0.3 s" in str(leaf.error)
    assert len(World.live) == 1, "the hung world is left to its thread"
    gate.set()


def test_a_late_snapshot_of_a_branch_given_up_is_released(gate: threading.Event) -> None:
    settings = Settings(timeout_s=0.3, chooser=EveryTurn(turns=(1, 2, 3)))
    (tree,) = roll_out(tasks("a"), script("write hang g"), settings, make_env=diary)
    assert tree.leaves()[0].stop_reason is StopReason.TIMEOUT
    gate.set()


def test_an_engine_that_hangs_is_cut_off() -> None:
    engine = SlowEngine(by_seed)
    engine.longest_s = 1e6
    (tree,) = roll_out(tasks("a"), engine, Settings(timeout_s=0.2), make_env=diary)
    assert tree.leaves()[0].stop_reason is StopReason.TIMEOUT


def test_c068_a_cancel_keeps_finished_turns_and_leaves_nothing() -> None:
    told: list[Node] = []

    async def main() -> None:
        enough = asyncio.Event()

        def on_node(tree: Tree, node: Node) -> None:
            told.append(node)
            if len(told) > 30:
                enough.set()

        settings = Settings(chooser=RandomNodes(nodes=4), trees_per_task=3, concurrency=6)
        rollout = asyncio.create_task(
            roll_out_async(tasks(*"abcdefgh"), SlowEngine(by_seed), settings, make_env=diary, on_node=on_node)
        )
        await enough.wait()
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout

    asyncio.run(main())
    assert len(told) > 30 and all(n.status is not NodeStatus.INFRA_ERROR for n in told)
    assert not [t for t in threading.enumerate() if t.name == "agentgym-rollout"]


def test_c068_a_cancel_waits_for_turns_in_progress() -> None:
    told: list[str] = []

    async def main() -> None:
        rollout = asyncio.create_task(
            roll_out_async(
                tasks("a"), script("write sleep 0.3"), make_env=diary, on_node=lambda t, n: told.append(n.action)
            )
        )
        while not told:
            await asyncio.sleep(0.01)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout

    asyncio.run(main())
    assert told == ["", "write sleep 0.3"]


def interrupting(told: list[Node], number: int) -> Callable[[Tree, Node], None]:
    def on_node(tree: Tree, node: Node) -> None:
        told.append(node)
        if len(told) == 20:
            os.kill(os.getpid(), number)

    return on_node


def test_c068_ctrl_c() -> None:
    told: list[Node] = []
    settings = Settings(chooser=EveryTurn(turns=(2, 4)), concurrency=4)
    # a shell without job control starts what runs in the background with SIGINT ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            roll_out(
                tasks(*"abcdefgh"),
                SlowEngine(by_seed),
                settings,
                make_env=diary,
                on_node=interrupting(told, signal.SIGINT),
            )
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(told) >= 20


def test_c068_sigterm_as_a_command_handles_it() -> None:
    told: list[Node] = []

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        settings = Settings(chooser=RandomNodes(nodes=3), concurrency=4)
        await roll_out_async(
            tasks(*"abcdefgh"),
            SlowEngine(by_seed),
            settings,
            make_env=diary,
            on_node=interrupting(told, signal.SIGTERM),
        )

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert len(told) >= 20


@pytest.mark.parametrize("where", ["on_node", "on_tree", "chooser"])
def test_what_a_listener_raises_ends_the_rollout_cleanly(where: str) -> None:
    calls = 0

    def fail(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError(f"{where} is broken")

    class Broken(EveryTurn):
        def __call__(self, trees: Sequence[Tree], budget: Budget, seed: int) -> list[Fork]:
            if where == "chooser":
                fail()
            return super().__call__(trees, budget, seed)

    settings = Settings(chooser=Broken(turns=(2, 3)), concurrency=3)
    with pytest.raises(ValueError, match=f"{where} is broken"):
        roll_out(
            tasks(*"abcdef"),
            SlowEngine(by_seed),
            settings,
            make_env=diary,
            on_node=fail if where == "on_node" else None,
            on_tree=fail if where == "on_tree" else None,
        )


def test_concurrency_bounds_live_worlds() -> None:
    most = []

    def policy(request: SampleRequest) -> str:
        most.append(len(World.live))
        return by_seed(request)

    roll_out(tasks(*"abcdefgh"), SlowEngine(policy), Settings(concurrency=3), make_env=diary)
    assert max(most) == 3


@pytest.mark.parametrize(
    "setting",
    [{"trees_per_task": 0}, {"concurrency": 0}, {"timeout_s": 0}, {"max_sampled_tokens": 0}, {"temperature": -1.0}],
)
def test_settings_under_which_nothing_plays_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        Settings(**setting)
