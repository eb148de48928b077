"""Plays one branch: a plain synchronous walk from a reset or a fork to its end.

Owns the walk, token accounting, the limits that are counted over a branch, and what becomes of failures. Leaves
settings, threads, choosing and the naming of nodes to `rollout.py`.

Axes: T tokens that a node adds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from agentgym.branching import Budget, Cost
from agentgym.chat import Renderer
from agentgym.engine import SampleRequest, derive_seed
from agentgym.env import AgentEnv
from agentgym.errors import ConfigError, EngineError, SnapshotError
from agentgym.task import Task
from agentgym.tree import Node, NodeStatus
from agentgym.types import Action, Completion, Message, StopReason

if TYPE_CHECKING:
    from agentgym.rollout import Settings

MakeEnv = Callable[[Task], AgentEnv]
_log = logging.getLogger("agentgym.rollout")
_now = time.perf_counter


@dataclass(frozen=True, slots=True)
class Order:
    """What to play: a task from its reset, or on from a node."""

    task: Task
    world_seed: int
    seed: int
    """Of the root, or of the first turn after the fork."""
    share: Budget
    """Of the task's budget, for the turns of this branch alone."""
    round_: int = 0
    """Rounds of forks so far."""
    start: Node | None = None
    """The node to fork; None: reset."""
    queued_s: float = field(default_factory=_now)

    def broken(self, tail: Node | None, error: str, reason: StopReason | None = None) -> Node:
        """The node that records our failure after `tail`, the last node that came to its end."""
        node = Node(-1, tail, 0, seed=self.seed)
        if tail is not None:
            node = Node(-1, tail, tail.turn_index + 1, seed=self.turn_seed(tail))
        node.status, node.stop_reason, node.error = NodeStatus.INFRA_ERROR, reason, error
        return node

    def turn_seed(self, parent: Node) -> int:
        """What the turn after a node is seeded with; see `derive_seed`."""
        return self.seed if parent is self.start else derive_seed(parent.seed, 0)


class Door(Protocol):
    """What a walk needs from whoever started it."""

    stopped: bool
    """Nobody wants another turn."""

    def sample(self, request: SampleRequest) -> Completion:
        """Sample a turn, and give it when it is there."""

    def emit(self, node: Node) -> bool:
        """Take a node that came to its end; False: nobody wanted it."""


class Walk:
    """One branch while it is played; used by one thread."""

    def __init__(self, order: Order, settings: Settings, renderer: Renderer, make_env: MakeEnv, door: Door) -> None:
        """Prepare; the renderer is the engine's."""
        self.order, self.settings = order, settings
        self._renderer, self._make_env, self._door = renderer, make_env, door
        self._env: AgentEnv | None = None
        self._last = order.start
        """The last node that came to its end."""
        self._turn: Node | None = None
        """The node that is being made."""
        self._completion: Completion | None = None
        """What was sampled for it."""
        self._ids: tuple[int, ...] = ()
        self._messages: tuple[Message, ...] = ()
        self._read: list[int] = []
        """How many tokens the engine read before each turn of this branch."""
        self._num_sampled = 0
        self._spent = Cost()
        """By this branch alone."""
        self._last_read: tuple[int, ...] = ()
        self._fork_s = 0.0

    def run(self) -> None:
        """Play to the end. Whatever fails is written on a node; nothing is raised."""
        try:
            env = self._reset() if self.order.start is None else self._fork(self.order.start)
            while env is not None and self._last is not None and self._take_turn(env, self._last):
                pass
        except BaseException as error:  # also SystemExit in an author's code: it must not end the thread in silence
            self._fail(error, NodeStatus.INFRA_ERROR)
        finally:
            try:
                if self._env is not None:
                    self._env.close()
            except Exception:
                _log.exception("closing the environment of task %s failed", self.order.task.id)

    # where a branch begins

    def _reset(self) -> AgentEnv | None:
        order = self.order
        root = self._turn = Node(-1, None, 0, seed=order.seed)
        started = _now()
        root.timings.queue_s = started - order.queued_s
        env = self._env = self._make_env(order.task)
        root.observation, _ = env.reset(seed=order.world_seed, options={"task": order.task})
        root.timings.act_s = _now() - started
        root.messages = env.turn_messages
        self._own(root, None, self._renderer.render(root.messages, open_turn=True))
        limit = self.settings.max_context_tokens
        if limit is not None and len(self._ids) >= limit:
            raise ConfigError(
                f"the prompt of task {order.task.id!r} has {len(self._ids)} tokens and max_context_tokens is {limit}; "
                "allow more, or shorten the prompt"
            )
        if not order.share.covers(Cost(1)):
            root.stop_reason = StopReason.BUDGET  # never played, so without a score
            self._finish(root)
            return None
        self._freeze(env, root)
        return env if self._finish(root) else None

    def _fork(self, start: Node) -> AgentEnv | None:
        if start.snapshot is None:
            raise SnapshotError(f"node {start.id} has no snapshot to fork; a chooser may name only forkable nodes")
        started = _now()
        env = self._env = start.snapshot.fork(1)[0]
        self._fork_s = _now() - started
        if self.settings.verify_forks:
            with env.snapshot() as copy:
                digest = copy.digest()
            if digest != start.digest:
                odd = SnapshotError(f"the fork has digest {digest} and the state it should be in {start.digest}")
                self._fail(odd, NodeStatus.RESTORE_FAILED)
                return None
        path = start.path()
        self._ids, self._messages = start.path_ids(), tuple(start.path_messages())
        self._num_sampled = sum(node.num_sampled for node in path)
        return env

    # one turn

    def _take_turn(self, env: AgentEnv, parent: Node) -> bool:
        order, num_calls = self.order, env.episode.tool_calls
        node = self._turn = Node(-1, parent, parent.turn_index + 1, seed=order.turn_seed(parent))
        started = _now()
        if parent is order.start:
            node.forked, node.timings.fork_s = True, self._fork_s
            node.timings.queue_s = started - self._fork_s - order.queued_s
        request = SampleRequest(
            self._ids,
            self._messages,
            node.seed,
            order.task.id,
            parent.turn_index,
            self._room(),
            self.settings.temperature,
        )
        self._read.append(len(request.ids_T))
        self._last_read = request.ids_T
        completion = self._door.sample(request)
        sampled_at = _now()
        node.timings.generate_s = sampled_at - started
        _check(completion, request)
        self._completion = completion
        node.action, node.cut = completion.text, completion.finish_reason == "length"
        node.observation, reward, terminated, truncated, info = env.step(Action(completion.text, cut=node.cut))
        node.timings.act_s = _now() - sampled_at
        node.reward, node.rewards, node.messages = reward, info["rewards"], env.turn_messages
        node.num_tool_calls = env.episode.tool_calls - num_calls
        if terminated or truncated:
            node.status = NodeStatus.TERMINATED if terminated else NodeStatus.TRUNCATED
            node.stop_reason = env.episode.stop
        self._own(node, completion, self._renderer.render(node.messages[1:], open_turn=not node.ended))
        if not node.ended:
            self._cut(env, node)
        if not node.ended:
            self._freeze(env, node)
        return self._finish(node) and not node.ended and not self._door.stopped

    def _room(self) -> int:
        """Tokens that the next turn may have; at least 1, or the branch would have been cut."""
        settings, share, room = self.settings, self.order.share, self.settings.max_tokens_per_turn
        if settings.max_sampled_tokens is not None:
            room = min(room, settings.max_sampled_tokens - self._num_sampled)
        if settings.max_context_tokens is not None:
            room = min(room, settings.max_context_tokens - len(self._ids))
        if share.max_tokens is not None:
            room = min(room, share.max_tokens - self._spent.tokens)
        return room

    def _own(self, node: Node, completion: Completion | None, world: tuple[int, ...]) -> None:
        """Give a node the tokens it adds: sampled ones with mask 1, the world's with mask 0. Nothing is rendered twice."""
        sampled: tuple[int, ...] = ()
        logprobs: tuple[float, ...] = ()
        version = -1
        if completion is not None:
            sampled, logprobs, version = completion.ids_T, completion.logprobs_T, completion.policy_version
            if not sampled or sampled[-1] != self._renderer.end_id:
                world = (self._renderer.end_id, *world)  # a cut reply, or a stop string: nobody sampled this end
        num, more = len(sampled), len(world)
        node.token_ids_T = sampled + world
        node.mask_T, node.versions_T = _marks(num, more, version)
        node.logprobs_T = logprobs + (0.0,) * more
        self._ids += node.token_ids_T
        self._messages += node.messages
        self._num_sampled += num
        spent = self._spent
        if completion is not None:
            self._spent = Cost(spent.turns + 1, spent.tokens + num, spent.tool_calls + node.num_tool_calls)

    def _cut(self, env: AgentEnv, node: Node) -> None:
        """End the episode where a limit on the whole branch is reached, and score what exists."""
        settings, spent, share = self.settings, self._spent, self.order.share
        if settings.max_sampled_tokens is not None and self._num_sampled >= settings.max_sampled_tokens:
            reason = StopReason.MAX_TOKENS
        elif settings.max_context_tokens is not None and len(self._ids) >= settings.max_context_tokens:
            reason = StopReason.MAX_CONTEXT
        elif not share.unlimited and not share.covers(Cost(*(part + 1 for part in spent))):
            reason = StopReason.BUDGET
        else:
            return
        rewards = env.stop(reason)
        node.rewards = node.rewards | rewards
        node.reward = (node.reward or 0.0) + sum(rewards.values())
        node.status, node.stop_reason = NodeStatus.TRUNCATED, reason

    def _freeze(self, env: AgentEnv, node: Node) -> None:
        """Take a snapshot where a fork may come."""
        if not self.settings.chooser.may_fork(node, self.order.round_):
            return
        started = _now()
        try:
            snapshot = env.snapshot(require=self.settings.require if self.settings.require is not None else env.needs)
        except SnapshotError as error:  # the turn itself is sound: the branch goes on, and nothing forks here
            node.losses = (f"no snapshot: {error}",)
        else:
            node.snapshot, node.snapshot_id = snapshot, snapshot.id
            node.forkable, node.losses = snapshot.level, snapshot.losses
            node.digest = snapshot.digest() if self.settings.verify_forks else None
        node.timings.snapshot_s = _now() - started

    def _finish(self, node: Node) -> bool:
        if node.ended:
            audit(node, self._last_read, self._read)
        self._last, self._turn, self._completion = node, None, None
        if self._door.emit(node):
            return True
        release(node)
        return False

    def _fail(self, error: BaseException, status: NodeStatus) -> None:
        """Write our failure on the turn it befell: no reward, and the branch ends."""
        text = f"{type(error).__name__}: {error}"
        node = self._turn if self._turn is not None else self.order.broken(self._last, text)
        if self._completion is not None and not node.token_ids_T:
            self._own(node, self._completion, ())
        node.forked = node.parent is not None and node.parent is self.order.start
        node.status, node.error, node.stop_reason = status, text, None
        node.reward, node.rewards = None, {}
        release(node)
        if not self._door.stopped:  # else it is the cancel itself that failed here
            self._door.emit(node)


@lru_cache(maxsize=4096)
def _marks(num_sampled: int, num_world: int, version: int) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    """Mask and versions of a node; most nodes of a run share a few of them."""
    return (True,) * num_sampled + (False,) * num_world, (version,) * num_sampled + (-1,) * num_world


def release(node: Node) -> None:
    """Give up a node's snapshot, if it has one; the record of what could be forked stays."""
    snapshot, node.snapshot = node.snapshot, None
    if snapshot is None or snapshot.released:
        return
    try:
        snapshot.release()
    except Exception:
        _log.exception("releasing snapshot %s of node %d failed", snapshot.id, node.id)


def audit(leaf: Node, read_T: tuple[int, ...], lengths: Sequence[int]) -> None:
    """Compare what the engine read with what the nodes on record say it read.

    The ids of each turn are a beginning of the next turn's (they are only ever appended to), so the last ones
    and the lengths of all say everything.

    Args:
        leaf: The end of a branch.
        read_T: What the engine read before it sampled the leaf.
        lengths: How many tokens it read before each of the last turns, the leaf's last.

    Raises:
        EngineError: they differ; names the turn and the first token. Such a branch must not be trained on.
    """
    path = leaf.path()
    begins = list(accumulate((len(node.token_ids_T) for node in path), initial=0))[:-1]
    for node, begin, length in zip(path[::-1], begins[::-1], lengths[::-1], strict=False):
        if begin != length:
            raise EngineError(
                f"turn {node.turn_index} was sampled after {length} tokens, and its branch has {begin} before it; "
                "the branch is kept out of training"
            )
    recorded = leaf.path_ids()[: len(read_T)]
    if recorded != read_T:
        at = next(i for i in range(len(read_T)) if recorded[i : i + 1] != read_T[i : i + 1])
        owner = next(node for node, begin in zip(path[::-1], begins[::-1], strict=True) if begin <= at)
        raise EngineError(
            f"position {at} of the branch, in turn {owner.turn_index}: the engine read token {read_T[at]}, on record "
            f"is {recorded[at] if at < len(recorded) else 'nothing'}; the branch is kept out of training"
        )


def _check(completion: Completion, request: SampleRequest) -> None:
    num = len(completion.ids_T)
    if len(completion.logprobs_T) != num:
        raise EngineError(
            f"the engine gave {num} tokens and {len(completion.logprobs_T)} log-probabilities; it must give one each"
        )
    if num > request.max_tokens:
        raise EngineError(
            f"the engine gave {num} tokens where {request.max_tokens} were allowed; it must keep to max_tokens"
        )
