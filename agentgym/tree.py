"""Node and Tree: plain data, and walks over it.

Owns the node record and what can be computed from links alone. Leaves growing to `rollout.py`, choosing to
`branching.py`, credit to the trainers and storage to `store.py`. Knows nothing of torch and of sandboxes.

Axes: T tokens that a node adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING

from agentgym.types import Level, Message, StopReason

if TYPE_CHECKING:
    from agentgym.snapshot import EnvSnapshot


class NodeStatus(StrEnum):
    """Where a node stands."""

    OPEN = "open"
    """The episode can go on from here."""
    TERMINATED = "terminated"
    TRUNCATED = "truncated"
    INFRA_ERROR = "infra_error"
    """Our side failed while this turn ran: reward None, kept out of baselines and losses."""
    RESTORE_FAILED = "restore_failed"
    """The fork did not give the frozen state back; its children are not trained on."""


@dataclass(slots=True)
class Timings:
    """Seconds one turn spent: waiting, sampling, acting in the world, freezing it."""

    queue_s: float = 0.0
    generate_s: float = 0.0
    act_s: float = 0.0
    snapshot_s: float = 0.0
    fork_s: float = 0.0
    """Only on the first node after a fork."""


@dataclass(slots=True, eq=False)
class Node:
    """The state after one turn, owning only the tokens that the turn added.

    Example: the policy sampled ids 7 8 and the world answered with 1 2 ->
    token_ids_T (7, 8, 1, 2), mask_T (1, 1, 0, 0), logprobs_T (-0.1, -2.3, 0.0, 0.0),
    versions_T (3, 3, -1, -1). The root has turn_index 0 and owns the prompt, mask 0.
    """

    id: int
    """Within the tree, in order of growth; the root is 0. Same seed, same ids, whatever finishes first."""
    parent: Node | None = field(repr=False)
    turn_index: int
    """Turns since the root; the root has 0, and the first turn 1."""
    action: str = ""
    """The policy's text as sampled; empty at the root."""
    observation: str = ""
    cut: bool = False
    """True when the token limit cut the action, so it was never executed; a replay must cut it too."""
    messages: tuple[Message, ...] = ()
    """The messages this turn added: the policy's, then the world's."""
    token_ids_T: tuple[int, ...] = ()
    mask_T: tuple[bool, ...] = ()
    """True where the policy sampled the token; only these are trained."""
    logprobs_T: tuple[float, ...] = ()
    """Under the behaviour policy, in nats; 0.0 where the mask is False."""
    versions_T: tuple[int, ...] = ()
    """Policy version that sampled the token; -1 where the mask is False."""
    reward: float | None = None
    """Sum of `rewards`; None at the root and where the world broke."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Named parts, such as "outcome"."""
    num_tool_calls: int = 0
    status: NodeStatus = NodeStatus.OPEN
    stop_reason: StopReason | None = None
    error: str | None = None
    """What broke, where status is infra_error."""
    snapshot: EnvSnapshot | None = None
    """Live only while the tree grows."""
    snapshot_id: str | None = None
    forkable: Level | None = None
    """Level of the snapshot; None where none was taken."""
    losses: tuple[str, ...] = ()
    """What a fork from here does not bring back."""
    digest: str | None = None
    """Of the frozen state, where it was asked for."""
    seed: int = 0
    """What sampling of this turn was seeded with."""
    forked: bool = False
    """True where this turn began in a fresh fork rather than in the world that its parent left."""
    kept: bool = True
    """False where a chooser pruned the branch afterwards; it stays on record and out of training."""
    timings: Timings = field(default_factory=Timings)
    info_gain: float | None = None
    value: float | None = None
    advantage: float | None = None
    children: list[Node] = field(default_factory=list, repr=False)

    @property
    def ended(self) -> bool:
        """True where no turn can follow."""
        return self.status is not NodeStatus.OPEN

    @property
    def num_sampled(self) -> int:
        """Tokens the policy sampled in this turn."""
        return sum(self.mask_T)

    def path(self) -> list[Node]:
        """From the root to this node."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def path_ids(self) -> tuple[int, ...]:
        """The tokens of the branch from the root to here: what the engine reads next."""
        return tuple(chain.from_iterable(node.token_ids_T for node in self.path()))

    def path_messages(self) -> list[Message]:
        """The chat from the root to here."""
        return [message for node in self.path() for message in node.messages]


@dataclass(slots=True)
class Tree:
    """All that was played of one task from one reset."""

    id: str
    task_id: str
    env_id: str
    seed: int
    nodes: list[Node] = field(default_factory=list)
    group: str = ""
    """Trees of one task in one batch share it; never guessed from the prompt."""

    @property
    def root(self) -> Node:
        """The state after reset."""
        return self.nodes[0]

    def add(self, node: Node) -> Node:
        """Append a node under its parent."""
        if node.id != len(self.nodes):
            raise ValueError(f"node id {node.id} out of order; the next is {len(self.nodes)}")
        self.nodes.append(node)
        if node.parent is not None:
            node.parent.children.append(node)
        return node

    def leaves(self) -> list[Node]:
        """Nodes without children, in order of id."""
        return [node for node in self.nodes if not node.children]

    def scored_leaves(self) -> list[Node]:
        """Leaves whose episode ended by itself or at a limit; the others have no return."""
        return [n for n in self.leaves() if n.status in (NodeStatus.TERMINATED, NodeStatus.TRUNCATED)]

    def forks(self) -> list[Node]:
        """Nodes with two children or more."""
        return [node for node in self.nodes if len(node.children) > 1]

    def walk(self) -> Iterator[Node]:
        """Depth first, children in order of growth."""
        stack = [self.root] if self.nodes else []
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))


def branch_return(leaf: Node) -> float | None:
    """Sum of rewards from the root to the leaf; None where a node of the path has none for our failure."""
    total = 0.0
    for node in leaf.path()[1:]:
        if node.reward is None:
            return None
        total += node.reward
    return total


def set_values(tree: Tree) -> None:
    """Set each node's value: the mean return of the scored leaves below it.

    Source: Monte-Carlo value of TreeRL (2025); unfinished and broken branches stay out.
    """
    sums, counts = [0.0] * len(tree.nodes), [0] * len(tree.nodes)
    for leaf in tree.scored_leaves():
        returned = branch_return(leaf)
        if returned is not None:
            sums[leaf.id], counts[leaf.id] = returned, 1
    for node in reversed(tree.nodes):  # children come after their parents
        total, count = sums[node.id], counts[node.id]
        node.value = total / count if count else None
        if node.parent is not None:
            sums[node.parent.id] += total
            counts[node.parent.id] += count


@dataclass(frozen=True, slots=True)
class Saving:
    """What a forest cost against its leaves played as separate chains."""

    turns: int
    chain_turns: int
    tokens: int
    """Sampled by the policy."""
    chain_tokens: int
    tool_calls: int
    chain_tool_calls: int

    @property
    def calls_ratio(self) -> float:
        """Chain turns over tree turns: how often each turn would have been played without forks."""
        return self.chain_turns / self.turns if self.turns else 1.0

    @property
    def tokens_ratio(self) -> float:
        """Chain tokens over tree tokens."""
        return self.chain_tokens / self.tokens if self.tokens else 1.0


def saving(trees: list[Tree]) -> Saving:
    """Count unique turns, sampled tokens and tool calls, and what chains to the same leaves would have cost."""

    def total(of: Callable[[Node], int]) -> tuple[int, int]:
        unique = sum(of(node) for tree in trees for node in tree.nodes[1:])
        chains = sum(of(node) for tree in trees for leaf in tree.leaves() for node in leaf.path()[1:])
        return unique, chains

    turns, chain_turns = total(lambda node: 1)
    tokens, chain_tokens = total(lambda node: node.num_sampled)
    calls, chain_calls = total(lambda node: node.num_tool_calls)
    return Saving(turns, chain_turns, tokens, chain_tokens, calls, chain_calls)
