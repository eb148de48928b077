"""Benches of the core: how many no-op turns a second are played and recorded, and what a tree saves over chains.

Owns the cases of `bench step` and `bench tree` and their targets. Leaves timing and verdicts to `bench.py`.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path

from agentgym.bench import BenchRow, Target, row, timed
from agentgym.branching import EveryTurn
from agentgym.engine import SampleRequest, ScriptedEngine
from agentgym.envs.counter import CounterEnv, counter_task
from agentgym.episode import Limits, Reply
from agentgym.rollout import OnNode, Settings, roll_out
from agentgym.store import Store
from agentgym.task import Task
from agentgym.tree import Node, Tree
from agentgym.types import ToolCall

NUM_STEPS = 3000
"""Of a run; by long episodes and by short ones, whose share of starting and ending is five times as high."""
LONG, SHORT = 100, 20
NUM_RUNS = 7
TREE_TURNS = 20
FORKED_AT = (5, 10, 15)


def step() -> list[BenchRow]:
    """No-op turns through the rollout engine, recorded, and what `AgentEnv.step` costs beside the author's act."""
    # how fast turns become durable is the matter of `bench store`; here it is shown what that leaves of the rate
    cases: list[tuple[str, int, Callable[[], AbstractContextManager[OnNode]], list[Target]]] = [
        ("recorded", LONG, _in_memory, [Target("ours", at_least=20_000)]),
        ("recorded", SHORT, _in_memory, []),
        ("stored", LONG, _in_store, []),
    ]
    rows = []
    for case, num_turns, recorder, targets in cases:
        baseline = NUM_STEPS / min(timed(lambda num=num_turns: _bare(num), NUM_RUNS))  # type: ignore[misc]
        seconds_per_step = [_rollout_s(recorder, num_turns) / NUM_STEPS for _ in range(NUM_RUNS)]
        rows.append(
            row(
                "step",
                f"{case}, {num_turns} turns an episode",
                1 / min(seconds_per_step),
                unit="steps/s",
                n=NUM_RUNS * NUM_STEPS,
                baseline=baseline,
                baseline_name="a bare loop over env.step",
                more_is_better=True,
                targets=targets,
            )
        )
    return [*rows, _overhead()]


def _bare(num_turns: int) -> None:
    """The least that playing can be: the same turns without engine, tokens and records."""
    for number in range(NUM_STEPS // num_turns):
        env = CounterEnv([counter_task(number)], limits=_limits(num_turns))
        env.reset(seed=number)
        for _ in range(num_turns):
            env.step("add 1")
        env.close()


@contextmanager
def _in_memory() -> Iterator[OnNode]:
    nodes: list[Node] = []
    yield lambda tree, node: nodes.append(node)


@contextmanager
def _in_store() -> Iterator[OnNode]:
    tasks = {task.id: task for task in map(counter_task, range(NUM_STEPS))}
    with tempfile.TemporaryDirectory() as folder, Store.open(str(Path(folder) / "bench.db")) as store:
        store.add_run("bench", {})

        def record(tree: Tree, node: Node) -> None:
            if node.parent is None:
                store.add_tree("bench", tree, tasks[tree.task_id])
            store.add_node("bench", tree.id, node)

        yield record
        store.flush()


def _limits(num_turns: int) -> Limits:
    return Limits(max_turns=num_turns, max_tool_calls=num_turns + 1)


def _rollout_s(recorder: Callable[[], AbstractContextManager[OnNode]], num_turns: int) -> float:
    tasks = [counter_task(number) for number in range(NUM_STEPS // num_turns)]
    engine = ScriptedEngine(lambda request: "add 1")

    def make_env(task: Task) -> CounterEnv:
        return CounterEnv([task], limits=_limits(num_turns))

    gc.collect()
    gc.freeze()  # what the process held before is not part of the rollout's cost
    try:
        with recorder() as on_node:
            started = time.perf_counter()
            trees = roll_out(tasks, engine, Settings(concurrency=2), make_env=make_env, on_node=on_node)
        # the store's last group is on disk here
        seconds = time.perf_counter() - started
    finally:
        gc.unfreeze()
    played = sum(len(tree.nodes) - 1 for tree in trees)
    assert played == NUM_STEPS, f"{played} turns were recorded"
    return seconds


def _tree_env(task: Task) -> CounterEnv:
    return CounterEnv([task], limits=_limits(TREE_TURNS))


class _NoOp(CounterEnv):
    """Its act does nothing, so that a step is all overhead."""

    def act(self, call: ToolCall) -> Reply | str:
        return "ok"


def _overhead() -> BenchRow:
    limits = Limits(max_turns=1 << 40, max_tool_calls=1 << 40)
    env, bare = _NoOp(limits=limits), _NoOp()
    env.reset(seed=0)
    call, batch = ToolCall("add", {"n": 1}), 500

    def steps() -> None:
        for _ in range(batch):
            env.step("add 1")

    def acts() -> None:
        for _ in range(batch):
            bare.act(call)

    act_s = min(timed(acts, 50)) / batch
    samples = [seconds / batch - act_s for seconds in timed(steps, 100)]
    return row(
        "step",
        "overhead of AgentEnv.step",
        min(samples) * 1e6,
        unit="us",
        n=batch * len(samples),
        samples=samples,
        scale=1e6,
        baseline=act_s * 1e6,
        baseline_name="the author's act alone",
        targets=[Target("ours", at_most=10.0)],
    )


class _Counted:
    """A policy, and how often it was asked and how many tokens it gave."""

    def __init__(self, policy: Callable[[SampleRequest], str]) -> None:
        self.policy, self.turns, self.tokens = policy, 0, 0

    def __call__(self, request: SampleRequest) -> str:
        text = self.policy(request)
        self.turns += 1
        self.tokens += len(text) + 1  # and the end of the turn
        return text


def tree() -> list[BenchRow]:
    """A tree of 20 turns with two ways at turns 5, 10 and 15, against its eight leaves played as chains."""
    grown = _Counted(lambda request: f"add {random.Random(request.seed).randint(1, 9)}")
    settings = Settings(chooser=EveryTurn(turns=FORKED_AT), concurrency=2)
    (played,) = roll_out([counter_task(100)], ScriptedEngine(grown), settings, make_env=_tree_env)
    leaves = played.leaves()

    lines = {f"count-{number}": [node.action for node in leaf.path()[1:]] for number, leaf in enumerate(leaves)}
    chained = _Counted(lambda request: lines[request.task_id][request.turn_index])
    tasks = [counter_task(number) for number in range(len(leaves))]
    chains = roll_out(tasks, ScriptedEngine(chained), Settings(concurrency=2), make_env=_tree_env)

    ends = [_count(leaf.observation) for leaf in leaves]
    assert ends == [_count(chain.leaves()[0].observation) for chain in chains], "the chains must end as the leaves do"
    ideal = _ideal()
    num_calls = [sum(node.num_tool_calls for t in trees for node in t.nodes) for trees in ([played], chains)]
    figures = {
        "engine calls": (grown.turns, chained.turns),
        "sampled tokens": (grown.tokens, chained.tokens),
        "tool calls": (num_calls[0], num_calls[1]),
    }
    return [
        row(
            "tree",
            case,
            ours,
            unit=case,
            n=1,
            baseline=baseline,
            baseline_name=f"{len(leaves)} chains",
            ideal=ideal,
            targets=[Target("achieved_over_ideal", at_least=0.98)],
        )
        for case, (ours, baseline) in figures.items()
    ]


def _ideal() -> float:
    """Chain turns over unique turns: every turn of the tree played once, every leaf as a chain of all turns."""
    borders = [1, *FORKED_AT, TREE_TURNS + 1]
    unique = sum((end - begin) << splits for begin, end, splits in zip(borders, borders[1:], count(), strict=False))
    return (TREE_TURNS << len(FORKED_AT)) / unique


def _count(observation: str) -> str:
    return observation.split(",")[0]
