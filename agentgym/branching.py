"""Where to fork next: pure functions of trees, a budget and a seed.

Owns the choosers, their names, and the arithmetic of a budget. Leaves taking snapshots and playing branches to
`rollout.py`. A chooser keeps no state: how far it has come it reads from the trees, so the same trees give the
same choice, and a stored tree can be asked again.

    none          no forks: chains
    every_turn    siblings at given turns, or at all
    random        Tree-GRPO: N nodes a tree and round, uniformly; then K leaves are kept
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import NamedTuple, Protocol

from agentgym.engine import derive_seed
from agentgym.errors import ConfigError, UnknownName
from agentgym.tree import Node, NodeStatus, Tree

MAX_LEAVES = 4096
"""Of one tree that no budget bounds: forking at every turn doubles the leaves each time."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What all trees of one task may cost together; shared turns count once. None: no limit."""

    max_turns: int | None = None
    max_tokens: int | None = None
    """Sampled by the policy; observations are free."""
    max_tool_calls: int | None = None

    def __post_init__(self) -> None:
        """Refuse negative limits."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and value < 0:
                raise ConfigError(f"budget {field.name} is {value}; it must be 0 or more, or None for no limit")

    @property
    def unlimited(self) -> bool:
        """True where nothing is limited."""
        return self.max_turns is None and self.max_tokens is None and self.max_tool_calls is None

    def left(self, trees: Sequence[Tree]) -> Budget:
        """What remains after these trees, never below 0; broken turns have cost too."""
        if self.unlimited:
            return self
        nodes = [node for tree in trees for node in tree.nodes[1:]]
        return Budget(
            _minus(self.max_turns, len(nodes)),
            _minus(self.max_tokens, sum(node.num_sampled for node in nodes)),
            _minus(self.max_tool_calls, sum(node.num_tool_calls for node in nodes)),
        )

    def covers(self, cost: Cost, times: int = 1) -> bool:
        """True where an even share of `times` is enough for a branch of this cost; any branch costs something."""
        limits = ((self.max_turns, cost.turns), (self.max_tokens, cost.tokens), (self.max_tool_calls, cost.tool_calls))
        return all(limit is None or (limit >= times and limit // times >= need) for limit, need in limits)

    def share(self, index: int, num: int) -> Budget:
        """The part of one of `num` branches, as even as can be; the first ones get what is left over."""

        def part(limit: int | None) -> int | None:
            return None if limit is None else limit // num + (index < limit % num)

        return Budget(part(self.max_turns), part(self.max_tokens), part(self.max_tool_calls))


class Cost(NamedTuple):
    """What a branch costs from some node on."""

    turns: int = 0
    tokens: int = 0
    tool_calls: int = 0


class Fork(NamedTuple):
    """Grow `width` new branches from a node, each to its end."""

    node: Node
    width: int


class Chooser(Protocol):
    """Says where to fork, in rounds, until it has nothing more to say. Pure: all it knows are its arguments."""

    def __call__(self, trees: Sequence[Tree], budget: Budget, seed: int) -> list[Fork]:
        """The next round of forks over all trees of one task; empty: the trees are finished.

        Args:
            trees: All trees of the task, as grown so far.
            budget: Of all trees together; not what is left of it.
            seed: Of the task.
        """

    def may_fork(self, node: Node, round_: int) -> bool:
        """Whether a node grown in a round (0: the first chains) may be chosen later; if not, no snapshot is kept."""

    def keep(self, tree: Tree, seed: int) -> list[Node] | None:
        """The leaves of a finished tree that are kept; None: all."""


@dataclass(frozen=True, slots=True)
class NoForks:
    """Chains only."""

    def __call__(self, trees: Sequence[Tree], budget: Budget, seed: int) -> list[Fork]:
        """No forks."""
        return []

    def may_fork(self, node: Node, round_: int) -> bool:
        """Never."""
        return False

    def keep(self, tree: Tree, seed: int) -> list[Node] | None:
        """All leaves."""
        return None


@dataclass(frozen=True, slots=True)
class EveryTurn:
    """Siblings at given turns: every branch that passes such a turn becomes `width` branches there."""

    width: int = 2
    """Children of each node that is forked, the first branch included."""
    turns: Sequence[int] | None = None
    """1-based turns at which siblings differ: turn t forks the state after turn t - 1. None: all turns."""

    def __post_init__(self) -> None:
        """Refuse what would fork nothing."""
        _at_least("every_turn", "width", self.width, 2)
        if self.turns is None:
            return
        if isinstance(self.turns, str) or not all(isinstance(t, int) and t >= 1 for t in self.turns) or not self.turns:
            raise ConfigError(
                f"option turns of chooser 'every_turn' is {self.turns!r}; give turns from 1 on, such as 5, 10"
            )
        object.__setattr__(self, "turns", tuple(self.turns))

    def __call__(self, trees: Sequence[Tree], budget: Budget, seed: int) -> list[Fork]:
        """All nodes before such a turn that lack siblings below them."""
        forks = []
        for tree in trees:
            chosen = [Fork(n, self.width - len(n.children)) for n in _candidates(tree) if self.may_fork(n, 0)]
            num_leaves = len(tree.leaves()) + sum(fork.width for fork in chosen)
            if budget.unlimited and num_leaves > MAX_LEAVES:
                raise ConfigError(
                    f"every_turn would grow tree {tree.id!r} to {num_leaves} leaves, more than {MAX_LEAVES}; "
                    "name the turns, or set a budget"
                )
            forks += chosen
        return affordable(forks, trees, budget)

    def may_fork(self, node: Node, round_: int) -> bool:
        """Whether the next turn is one of those, and siblings are still missing."""
        here = self.turns is None or node.turn_index + 1 in self.turns
        return here and len(node.children) < self.width

    def keep(self, tree: Tree, seed: int) -> list[Node] | None:
        """All leaves."""
        return None


@dataclass(frozen=True, slots=True)
class RandomNodes:
    """Tree-GRPO's expansion: in each round, each tree forks N nodes drawn uniformly with replacement.

    Drawn from the root and all nodes that are no leaves; a tree ends with 1 + L * N leaves, of which K are kept.
    M, the number of trees, is the rollout's `trees_per_task`.

    Source: Tree-GRPO (2025), expansion of `generation_ts.py`; K is a cap here rather than a demand.
    """

    nodes: int = 2
    """N: nodes a tree and round."""
    rounds: int = 1
    """L."""
    leaves: int | None = None
    """K: scored leaves kept in a tree, drawn uniformly; None keeps all."""

    def __post_init__(self) -> None:
        """Refuse what would fork nothing or keep nothing."""
        _at_least("random", "nodes", self.nodes, 1)
        _at_least("random", "rounds", self.rounds, 1)
        if self.leaves is not None:
            _at_least("random", "leaves", self.leaves, 1)

    def __call__(self, trees: Sequence[Tree], budget: Budget, seed: int) -> list[Fork]:
        """The next round of each tree; how many rounds it had is read from its leaves."""
        forks = []
        for index, tree in enumerate(trees):
            round_, cut_short = divmod(len(tree.leaves()) - 1, self.nodes)
            candidates = _candidates(tree)
            # a round that the budget cut short was the last
            if round_ >= self.rounds or cut_short or not candidates:
                continue
            rng = random.Random(derive_seed(seed, index, round_))
            drawn = [node.id for node in rng.choices(candidates, k=self.nodes)]
            forks += [Fork(node, drawn.count(node.id)) for node in candidates if node.id in drawn]
        return affordable(forks, trees, budget)

    def may_fork(self, node: Node, round_: int) -> bool:
        """Any node, until the last round."""
        return round_ < self.rounds

    def keep(self, tree: Tree, seed: int) -> list[Node] | None:
        """K of the scored leaves."""
        if self.leaves is None:
            return None
        scored = tree.scored_leaves()
        rng = random.Random(derive_seed(seed, "keep", tree.id))
        return rng.sample(scored, min(self.leaves, len(scored)))


def affordable(forks: Sequence[Fork], trees: Sequence[Tree], budget: Budget) -> list[Fork]:
    """The longest beginning of a list of forks for which the budget is enough.

    A branch is expected to cost as much as the dearest one that is known below its node, and the budget is
    shared evenly, so a branch that is begun can usually end by itself.
    """
    left = budget.left(trees)
    if left.unlimited:
        return list(forks)
    costs: dict[int, Cost] = {}
    for tree in trees:
        costs |= _dearest(tree)
    branches = [fork.node for fork in forks for _ in range(fork.width)]
    num, dearest = 0, Cost(1)
    for index, node in enumerate(branches):
        dearest = Cost(*map(max, dearest, costs[id(node)]))
        if left.covers(dearest, index + 1):
            num = index + 1
    chosen = []
    for fork in forks:
        width = min(fork.width, num)
        num -= width
        if width:
            chosen.append(Fork(fork.node, width))
    return chosen


def mark_kept(tree: Tree, leaves: Sequence[Node] | None) -> None:
    """Mark what lies on no path to a kept leaf; None keeps all."""
    kept = None if leaves is None else {id(node) for leaf in leaves for node in leaf.path()}
    for node in tree.nodes:
        node.kept = kept is None or id(node) in kept


CHOOSERS: dict[str, Callable[..., Chooser]] = {"none": NoForks, "every_turn": EveryTurn, "random": RandomNodes}


def get_chooser(name: str, **options: object) -> Chooser:
    """Make a chooser by name.

    Raises:
        UnknownName: there is no such chooser.
        ConfigError: the chooser has no such option, or its value makes no sense.
    """
    if name not in CHOOSERS:
        raise UnknownName.of("chooser", name, CHOOSERS, "`agentgym list choosers` lists them")
    known = list(inspect.signature(CHOOSERS[name]).parameters)
    for option in options:
        if option not in known:
            close = get_close_matches(option, known, n=1, cutoff=0.4)
            hint = f"; did you mean {close[0]!r}?" if close else ";"
            raise ConfigError(f"chooser {name!r} has no option {option!r}{hint} options: {', '.join(known) or 'none'}")
    return CHOOSERS[name](**options)


def _candidates(tree: Tree) -> list[Node]:
    """Nodes that can be forked: alive, with a snapshot of theirs, and no leaf."""
    return [n for n in tree.nodes if n.children and n.status is NodeStatus.OPEN and n.forkable is not None]


def _dearest(tree: Tree) -> dict[int, Cost]:
    """For each node, what the dearest branch below it cost from there, part by part."""
    costs: dict[int, Cost] = {}
    for node in reversed(tree.nodes):  # children come after their parents
        below = [
            Cost(
                costs[id(c)].turns + 1, costs[id(c)].tokens + c.num_sampled, costs[id(c)].tool_calls + c.num_tool_calls
            )
            for c in node.children
        ]
        costs[id(node)] = Cost(*(max(part) for part in zip(*below, strict=True))) if below else Cost()
    return costs


def _minus(limit: int | None, spent: int) -> int | None:
    return None if limit is None else max(0, limit - spent)


def _at_least(chooser: str, option: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(
            f"option {option} of chooser {chooser!r} is {value!r}; it must be a whole number of {least} or more"
        )
