"""Grows trees by playing environments; a linear rollout is a tree that nobody forked.

Owns the settings, the event loop's side of playing (who plays when, on which thread, until when), the growth of a
task's trees in rounds, and the order in which nodes get their ids. Leaves the walk along one branch to `play.py`
and the choice of forks to `branching.py`.

Each branch is a synchronous walk on a worker thread, since environments are synchronous. An engine with
`sample_now` is called on that thread, so a turn costs no change of thread; any other engine samples on the event
loop while the thread waits. Finished nodes come back through a queue that never makes the walk wait.

Ids, seeds and results depend on positions in the trees and never on what finishes first: the nodes of a round are
taken in the order of its branches, and what a later branch has played waits until the ones before are over.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from agentgym.branching import Budget, Chooser, Fork, NoForks, mark_kept
from agentgym.engine import Engine, SampleRequest, derive_seed
from agentgym.errors import ConfigError
from agentgym.play import MakeEnv, Order, Walk, release
from agentgym.task import Task
from agentgym.tree import Node, Tree, set_values
from agentgym.types import Completion, Level, StopReason

OnNode = Callable[[Tree, Node], None]
OnTree = Callable[[Tree], None]

LOOK_S = 0.01
"""How often nodes of running branches are taken. A walk that woke the loop at each node would halve its own speed."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How tasks are rolled out."""

    trees_per_task: int = 1
    """M: trees grown of each task, each from its own reset."""
    chooser: Chooser = field(default_factory=NoForks)
    budget: Budget = field(default_factory=Budget)
    """Of all trees of one task together."""
    concurrency: int = 8
    """Episodes that live at once; also tasks that are open at once."""
    seed: int = 0
    temperature: float = 1.0
    max_tokens_per_turn: int = 1024
    max_sampled_tokens: int | None = None
    """Of one branch from the root on: only what the policy sampled. None: no limit."""
    max_context_tokens: int | None = None
    """Of one branch: everything the engine reads, observations and prompt included. None: no limit."""
    timeout_s: float = 600.0
    """Wall time of playing one branch, from the moment it has a thread."""
    grace_s: float = 10.0
    """How long a cancelled rollout waits for turns in progress before it leaves them to themselves."""
    require: Level | None = None
    """Fork level that snapshots must keep; None: what the environment needs."""
    verify_forks: bool = False
    """Compare the digest of each fork with its snapshot's; costs one more snapshot a fork."""

    def __post_init__(self) -> None:
        """Refuse limits under which nothing could be played."""
        limits = {"max_sampled_tokens": self.max_sampled_tokens, "max_context_tokens": self.max_context_tokens}
        for name in ("trees_per_task", "concurrency", "max_tokens_per_turn", "timeout_s"):
            limits[name] = getattr(self, name)
        for name, value in limits.items():
            if value is not None and not value > 0:
                raise ConfigError(f"rollout setting {name} is {value!r}; it must be above 0")
        for name in ("temperature", "grace_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"rollout setting {name} is {getattr(self, name)!r}; it must be 0 or more")


def roll_out(
    tasks: Sequence[Task],
    engine: Engine,
    settings: Settings | None = None,
    *,
    make_env: MakeEnv,
    on_node: OnNode | None = None,
    on_tree: OnTree | None = None,
) -> list[Tree]:
    """Grow trees of tasks; see `roll_out_async`, which is for callers with an event loop of their own.

    Ctrl-C cancels it: turns in progress end, their nodes are delivered, every world is closed, and
    KeyboardInterrupt is raised. For other signals, cancel `roll_out_async` from `loop.add_signal_handler`.
    """
    return asyncio.run(roll_out_async(tasks, engine, settings, make_env=make_env, on_node=on_node, on_tree=on_tree))


async def roll_out_async(
    tasks: Sequence[Task],
    engine: Engine,
    settings: Settings | None = None,
    *,
    make_env: MakeEnv,
    on_node: OnNode | None = None,
    on_tree: OnTree | None = None,
) -> list[Tree]:
    """Grow trees of tasks: chains first, then forks in rounds where the chooser wants them.

    What breaks in a branch is written on its last node (status, error, reward None) and harms no other branch. A
    branch that is not over after `timeout_s` counts as broken, with stop reason "timeout": whether a world hangs
    or the machine is slow, it is not the policy's failure, so no reward is made up.

    Args:
        tasks: What to play; a task that occurs twice makes two groups of trees.
        engine: Samples the turns.
        settings: How; defaults when absent.
        make_env: Makes an environment for a task; called on a worker thread, once a tree.
        on_node: Told of each node once it has its id, on the event loop's thread, one at a time. `value`, `kept`
            and `children` may still change.
        on_tree: Told of each finished tree, with values set.

    Returns:
        The trees, M for each task, in the order of tasks.

    Raises:
        Exception: what the chooser or a listener raised; the rollout is cancelled then.
    """
    rollout = _Rollout(settings or Settings(), engine, make_env, on_node, on_tree)
    seen: Counter[str] = Counter()
    looking = asyncio.create_task(rollout.look())
    try:
        async with asyncio.TaskGroup() as group:
            running = []
            for task in tasks:
                running.append(group.create_task(rollout.grow(task, seen[task.id])))
                seen[task.id] += 1
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    finally:
        looking.cancel()
        rollout.workers.close()
        _release_all(rollout.frozen)
    return [tree for task_trees in running for tree in task_trees.result()]


class _Rollout:
    """What the trees of one call share: threads, slots, listeners."""

    def __init__(
        self, settings: Settings, engine: Engine, make_env: MakeEnv, on_node: OnNode | None, on_tree: OnTree | None
    ) -> None:
        self.settings, self.engine, self.make_env = settings, engine, make_env
        self.on_node, self.on_tree = on_node, on_tree
        self.workers = _Workers()
        self.live: set[_Play] = set()
        self.frozen: list[Node] = []
        """Every node that ever had a snapshot; a signal handler may raise where a node is in nobody's hands."""
        self.episodes = asyncio.Semaphore(settings.concurrency)
        # or the first chains of all tasks would come before the forks of any, and all their snapshots would wait
        self.open_tasks = asyncio.Semaphore(settings.concurrency)

    async def grow(self, task: Task, occurrence: int) -> list[Tree]:
        """Grow all trees of one task."""
        settings, num = self.settings, self.settings.trees_per_task
        world_seed = derive_seed(settings.seed, task.id, "world")
        choose_seed = derive_seed(settings.seed, task.id, "choose")
        group = f"{task.id}#{occurrence}" if occurrence else task.id
        indices = range(occurrence * num, (occurrence + 1) * num)
        trees = [Tree(f"{task.id}/{index}", task.id, task.env, world_seed, group=group) for index in indices]
        async with self.open_tasks:
            try:
                orders = [
                    Order(task, world_seed, derive_seed(settings.seed, task.id, index), settings.budget.share(i, num))
                    for i, index in enumerate(indices)
                ]
                await self._round([(tree, [order]) for tree, order in zip(trees, orders, strict=True)])
                round_ = 0
                while forks := settings.chooser(trees, settings.budget, choose_seed):
                    round_ += 1
                    await self._round(self._orders(task, trees, forks, round_))
                    spent = [n for tree in trees for n in tree.nodes if not settings.chooser.may_fork(n, round_)]
                    await self._release(spent)
                await self._release([node for tree in trees for node in tree.nodes])
            finally:
                for node in (node for tree in trees for node in tree.nodes):
                    release(node)
            for tree in trees:
                mark_kept(tree, settings.chooser.keep(tree, choose_seed))
                set_values(tree)
                if self.on_tree is not None:
                    self.on_tree(tree)
        return trees

    def _orders(
        self, task: Task, trees: Sequence[Tree], forks: Sequence[Fork], round_: int
    ) -> list[tuple[Tree, list[Order]]]:
        """One order for each new branch, under the tree it belongs to; shares of what is left of the budget."""
        left, num = self.settings.budget.left(trees), sum(fork.width for fork in forks)
        orders: dict[int, list[Order]] = {id(tree.root): [] for tree in trees}
        grown: Counter[int] = Counter()
        index = 0
        for node, width in forks:
            root = node.path()[0]
            if node.ended or node.snapshot is None or id(root) not in orders:
                raise ConfigError(
                    f"the chooser named node {node.id} ({node.status}, forkable {node.forkable}) of task {task.id!r}; "
                    "it may name only open nodes with a snapshot, of the trees it was given"
                )
            for _ in range(width):
                seed = derive_seed(node.seed, len(node.children) + grown[id(node)])
                share = left.share(index, num)
                orders[id(root)].append(Order(task, trees[0].seed, seed, share, round_, node))
                grown[id(node)] += 1
                index += 1
        return [(tree, orders[id(tree.root)]) for tree in trees]

    async def _round(self, work: Sequence[tuple[Tree, Sequence[Order]]]) -> None:
        """Play branches side by side until all are over; on a cancel, what they have played is still taken."""
        plays = [(tree, [_Play(order, self) for order in orders]) for tree, orders in work]
        try:
            async with asyncio.TaskGroup() as group:
                for tree, branches in plays:
                    for play in branches:
                        group.create_task(self._run(play))
                    group.create_task(self._collect(tree, branches))
        finally:
            for tree, branches in plays:
                for play in branches:
                    play.abandon()
                    for node in play.rest():
                        self._take(tree, node)

    async def _run(self, play: _Play) -> None:
        async with self.episodes:
            self.live.add(play)
            self.workers.run(play.run, play.end)
            late = asyncio.get_running_loop().call_later(self.settings.timeout_s, play.time_out)
            try:
                await play.ended.wait()
            except asyncio.CancelledError:
                play.stop()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(play.ended.wait(), self.settings.grace_s)
                raise
            finally:
                late.cancel()
                self.live.discard(play)

    async def look(self) -> None:
        """Look again and again for nodes of branches that are not over."""
        while True:
            await asyncio.sleep(LOOK_S)
            for play in self.live:
                play.look()

    async def _collect(self, tree: Tree, branches: Sequence[_Play]) -> None:
        for play in branches:
            taken_all = False
            while not taken_all:
                await play.news.wait()
                play.news.clear()
                taken_all = play.ended.is_set()  # before the look at the queue, so that nothing is left in it
                for node in play.rest():
                    self._take(tree, node)

    def _take(self, tree: Tree, node: Node) -> None:
        node.id = len(tree.nodes)
        tree.add(node)
        if self.on_node is None:
            return
        try:
            self.on_node(tree, node)
        except BaseException:
            self.on_node = None  # it is broken, and the clean-up still has nodes to take
            raise

    async def _release(self, nodes: Sequence[Node]) -> None:
        """Give snapshots up on a worker thread, since that may take the file system a while."""
        held = [node for node in nodes if node.snapshot is not None]
        if held:
            released = asyncio.Event()
            self.workers.run(lambda: _release_all(held), released.set)
            await released.wait()


class _Play:
    """Hands a walk's nodes from its worker thread to the event loop, and the loop's wishes to the walk."""

    def __init__(self, order: Order, rollout: _Rollout) -> None:
        self.order = order
        self.stopped = False
        """The walk ends before its next turn."""
        self._settings = rollout.settings
        self._engine = rollout.engine
        self._frozen = rollout.frozen
        self._sample_now: Callable[[SampleRequest], Completion] | None = getattr(rollout.engine, "sample_now", None)
        self._loop = asyncio.get_running_loop()
        self._walk = Walk(order, rollout.settings, rollout.engine.renderer, rollout.make_env, self)
        self._sampling: concurrent.futures.Future[Completion] | None = None
        self._lock = threading.Lock()
        self._ready: deque[Node] = deque()
        self._tail = order.start
        self._over = False
        self.news = asyncio.Event()
        self.ended = asyncio.Event()
        """The walk is over, or given up."""

    # the worker's side

    def run(self) -> None:
        """Play the branch."""
        self._walk.run()
        with self._lock:
            self._over = True

    def sample(self, request: SampleRequest) -> Completion:
        """Sample a turn: right here where the engine can, else on the event loop."""
        if self._sample_now is not None:
            return self._sample_now(request)
        sampling = self._sampling = asyncio.run_coroutine_threadsafe(self._engine.sample(request), self._loop)
        if self.stopped:
            sampling.cancel()
        return sampling.result()

    def emit(self, node: Node) -> bool:
        """Hand a node over; False where the branch was given up meanwhile."""
        with self._lock:
            if self._over:
                return False
            if node.snapshot is not None:
                self._frozen.append(node)
            self._ready.append(node)
            self._tail = node
        return True

    # the event loop's side

    def look(self) -> None:
        """Wake whoever takes the nodes, if there are any."""
        if self._ready:
            self.news.set()

    def end(self) -> None:
        """Say that nothing more will come."""
        self.ended.set()
        self.news.set()

    def rest(self) -> Iterator[Node]:
        """What was played and not taken yet."""
        while self._ready:
            yield self._ready.popleft()

    def stop(self) -> None:
        """Let a turn in progress come to its end, but wait for no engine."""
        self.stopped = True
        if self._sampling is not None:
            self._sampling.cancel()

    def time_out(self) -> None:
        """Give the branch up as one that hangs."""
        limit_s = self._settings.timeout_s
        self.abandon(
            f"the branch was not over after {limit_s:g} s; its world closes when the call that holds it returns"
        )
        self.end()

    def abandon(self, error: str | None = None) -> None:
        """Take nothing more from the walk. With an error, it is recorded after the last turn that came to its end."""
        with self._lock:
            if self._over:
                return
            self._over = True
            if error is not None:
                self._ready.append(self.order.broken(self._tail, error, StopReason.TIMEOUT))
        self.stop()


class _Workers:
    """Threads that each run one call at a time; one more starts where all are busy.

    They are daemons, unlike those of an executor: a world that hangs must not keep the interpreter from ending.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_busy = 0

    def run(self, call: Callable[[], None], then: Callable[[], None]) -> None:
        """Run a call that raises nothing, and after it `then`, on the event loop's thread."""
        self._num_busy += 1
        if self._num_busy > len(self._threads):
            self._threads.append(threading.Thread(target=self._work, name="agentgym-rollout", daemon=True))
            self._threads[-1].start()
        self._calls.put((call, then))

    def close(self) -> None:
        """End the threads; one that hangs is left behind after a second."""
        for _ in self._threads:
            self._calls.put(None)
        deadline = time.monotonic() + 1.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, then = item
            call()
            try:
                self._loop.call_soon_threadsafe(self._finished, then)
            except RuntimeError:  # the loop ended before a call that hung
                return

    def _finished(self, then: Callable[[], None]) -> None:
        self._num_busy -= 1
        then()


def _release_all(nodes: Sequence[Node]) -> None:
    for node in nodes:
        release(node)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
