"""Plays stored branches again for real, and says where the world diverged.

Owns the walk and the comparison. Leaves loading to `store.py`. Only actions are taken from the record: every
observation, reward and end comes from the environment.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from agentgym.env import AgentEnv
from agentgym.errors import AgentGymError, ConfigError, ReplayError
from agentgym.task import Task
from agentgym.tree import Node, NodeStatus, Tree
from agentgym.types import Action, StopReason

MAX_SHOWN = 400
"""Characters of a text that a difference quotes, from shortly before the place where they part."""
_OUTER_LIMITS = (StopReason.BUDGET, StopReason.MAX_TOKENS, StopReason.MAX_CONTEXT)
"""Limits that the rollout counts: they end a branch through `AgentEnv.stop`, not by a step."""
_BROKEN = (NodeStatus.INFRA_ERROR, NodeStatus.RESTORE_FAILED)


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of one node that came out otherwise."""

    tree_id: str
    node_id: int
    turn_index: int
    field: str
    """"observation", "reward", "status", "stop_reason", or "error" where the turn could not be played."""
    stored: str
    """Around the first difference, volatile parts replaced."""
    replayed: str
    diff: str
    """Unified, without its head; empty where the fields are no texts."""

    def __str__(self) -> str:
        where = f"tree {self.tree_id} node {self.node_id} turn {self.turn_index}"
        return f"{where}: {self.field} was {self.stored!r}, replayed {self.replayed!r}"


@dataclass(frozen=True, slots=True)
class TreeReport:
    """What a replay of one tree found."""

    tree_id: str
    num_branches: int
    num_nodes: int
    """Nodes that were compared; one that several branches pass counts once."""
    num_equal: int
    num_turns: int
    """Turns that were played; in a linear replay a shared beginning is played once for each branch."""
    seconds: float
    differences: tuple[Difference, ...]
    """By node id, so the first is the earliest in growth: never below another one that explains it."""
    not_replayed: tuple[int, ...]
    """Nodes in which our side had failed, so there is nothing to compare with, or that the replay ended before."""

    @property
    def equal(self) -> bool:
        """True where every node that could be compared came out as stored."""
        return not self.differences


def replay_tree(
    tree: Tree,
    task: Task,
    make_env: Callable[[Task], AgentEnv],
    *,
    node: Node | None = None,
    forked: bool = False,
    volatile: Sequence[str] = (),
) -> TreeReport:
    """Execute the branches of a tree again and compare each turn.

    Args:
        tree: As stored.
        task: As stored.
        make_env: Makes the environment of the task, as for a rollout. Its attribute `volatile`, where it has
            one, lists regular expressions for parts of observations that differ between runs.
        node: Only the branch from the root to this node; None: all.
        forked: Fork a live world where the tree forks, as the rollout did; otherwise each branch is played
            from its own reset, which shows that forks were faithful.
        volatile: Further regular expressions; the name of a group in one is how its place holder is called.

    Returns:
        The report; a divergence is a result, no exception.

    Raises:
        ReplayError: the tree is empty, or the node is not in it.
        ConfigError: a volatile pattern is no regular expression.
    """
    if not tree.nodes:
        raise ReplayError(f"tree {tree.id!r} has no nodes; it was interrupted before its reset ended")
    if node is not None and all(known is not node for known in tree.nodes):
        raise ReplayError(f"node {node.id} is not in tree {tree.id!r}; take one of tree.nodes")
    replay = _Replay(tree, task, make_env, volatile, tree.leaves() if node is None else [node])
    started = time.perf_counter()
    if forked:
        replay.forked()
    else:
        replay.linear()
    return replay.report(time.perf_counter() - started)


class Normaliser:
    """Replaces what differs from run to run by a place holder that names the pattern."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._rules: list[tuple[re.Pattern[str], str]] = []
        for pattern in patterns:
            try:
                rule = re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"volatile pattern {pattern!r} is no regular expression: {error}; correct it"
                ) from error
            self._rules.append((rule, f"<{next(iter(rule.groupindex), pattern)}>"))

    def __call__(self, text: str) -> str:
        """The text with every match replaced."""
        for rule, holder in self._rules:
            text = rule.sub(lambda _, holder=holder: holder, text)  # type: ignore[misc]
        return text


class _Replay:
    """What one replay has seen so far."""

    def __init__(
        self, tree: Tree, task: Task, make_env: Callable[[Task], AgentEnv], volatile: Sequence[str], ends: list[Node]
    ) -> None:
        self._tree, self._task, self._make_env, self._volatile = tree, task, make_env, tuple(volatile)
        self._ends = ends
        self._wanted = {node.id for end in ends for node in end.path()}
        self._normalise = Normaliser(self._volatile)
        self._num_turns = 0
        self._compared: set[int] = set()
        self._found: dict[tuple[int, str], Difference] = {}

    def linear(self) -> None:
        """Play each branch from a reset of its own."""
        for end in self._ends:
            path = end.path()
            env = self._reset(path[0])
            if env is None:
                continue
            with closing(env):
                for node in path[1:]:
                    if node.status in _BROKEN or not self._play(env, node):
                        break

    def forked(self) -> None:
        """Play each turn once, in forks where the tree has them."""
        env = self._reset(self._tree.root)
        if env is not None:
            with closing(env):
                self._grow(env, self._tree.root)

    def report(self, seconds: float) -> TreeReport:
        """What was found."""
        return TreeReport(
            tree_id=self._tree.id,
            num_branches=len(self._ends),
            num_nodes=len(self._compared),
            num_equal=len(self._compared - {node_id for node_id, _ in self._found}),
            num_turns=self._num_turns,
            seconds=seconds,
            differences=tuple(sorted(self._found.values(), key=lambda found: found.node_id)),
            not_replayed=tuple(sorted(self._wanted - self._compared)),
        )

    def _grow(self, env: AgentEnv, node: Node) -> None:
        """Play everything below a node in whose state the environment is."""
        while True:
            children = [c for c in node.children if c.id in self._wanted and c.status not in _BROKEN]
            # the first child that was no fork went on in the world its parent left
            own = next((child for child in children if not child.forked), None)
            self._fork(env, [child for child in children if child is not own])
            if own is None or not self._play(env, own):
                return
            node = own

    def _fork(self, env: AgentEnv, children: list[Node]) -> None:
        if not children:
            return
        try:
            snapshot = env.snapshot()
        except AgentGymError as error:
            for child in children:
                self._broke(child, error)
            return
        with snapshot:
            for child in children:
                try:
                    fork = snapshot.fork()[0]
                except AgentGymError as error:
                    self._broke(child, error)
                    continue
                with closing(fork):
                    if self._play(fork, child):
                        self._grow(fork, child)

    def _reset(self, root: Node) -> AgentEnv | None:
        if root.status in _BROKEN:
            return None
        env = self._make_env(self._task)
        try:
            observation, _ = env.reset(seed=self._tree.seed, options={"task": self._task})
        except AgentGymError as error:
            env.close()
            self._broke(root, error)
            return None
        except BaseException:
            env.close()
            raise
        self._normalise = Normaliser((*getattr(env, "volatile", ()), *self._volatile))
        self._compared.add(root.id)
        self._compare_texts(root, "observation", root.observation, observation)
        return env

    def _play(self, env: AgentEnv, node: Node) -> bool:
        """Play and compare one turn; True where the episode goes on."""
        self._num_turns += 1
        try:
            result = env.play(Action(node.action, cut=node.cut))
            reward, stop = result.reward, env.episode.stop
            if stop is None and node.stop_reason in _OUTER_LIMITS and node.status is NodeStatus.TRUNCATED:
                stop = node.stop_reason
                reward += sum(env.stop(stop).values())
        except AgentGymError as error:
            self._broke(node, error)
            return False
        status = NodeStatus.OPEN
        if stop is not None:
            status = NodeStatus.TERMINATED if stop.terminated else NodeStatus.TRUNCATED
        self._compared.add(node.id)
        self._compare_texts(node, "observation", node.observation, result.observation)
        both_nan = node.reward != node.reward and reward != reward
        if node.reward != reward and not both_nan:
            self._differ(node, "reward", repr(node.reward), repr(reward))
        if node.status is not status:
            self._differ(node, "status", str(node.status), str(status))
        if node.stop_reason != stop:
            self._differ(node, "stop_reason", str(node.stop_reason), str(stop))
        return stop is None

    def _broke(self, node: Node, error: AgentGymError) -> None:
        self._compared.add(node.id)
        self._differ(node, "error", str(node.error), f"{type(error).__name__}: {error}"[:MAX_SHOWN])

    def _compare_texts(self, node: Node, name: str, stored: str, replayed: str) -> None:
        if stored == replayed:
            return
        stored, replayed = self._normalise(stored), self._normalise(replayed)
        if stored == replayed:
            return
        # line by line from where they part, since a common beginning may be longer than what is shown
        start = max(0, _parting(stored, replayed) - MAX_SHOWN // 4)
        old, new = _excerpt(stored, start), _excerpt(replayed, start)
        lines = list(difflib.unified_diff(old.split("\n"), new.split("\n"), n=2, lineterm=""))
        self._differ(node, name, old, new, "\n".join(lines[2:]))

    def _differ(self, node: Node, name: str, stored: str, replayed: str, diff: str = "") -> None:
        found = Difference(self._tree.id, node.id, node.turn_index, name, stored, replayed, diff)
        self._found.setdefault((node.id, name), found)


def _parting(left: str, right: str) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def _excerpt(text: str, start: int) -> str:
    end = start + MAX_SHOWN
    return f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"
