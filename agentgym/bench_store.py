"""`agentgym bench store`: durable turns a second with group commit, against one commit a turn.

Owns the cases and their targets. All ways write the same rows with the same settings to a file under the working
directory, where runs are written too, and count only what is synced to the disk. There are two baselines: the same
store flushed after each turn, and the least that a commit a turn can cost, a bare loop without thread and queue.
"""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path
from statistics import median

from agentgym.bench import BenchRow, Target, row
from agentgym.store import Store
from agentgym.store_place import Place
from agentgym.store_rows import encode_node
from agentgym.store_schema import prepare
from agentgym.store_writer import Statements
from agentgym.task import Task
from agentgym.tree import Node, Tree
from agentgym.types import Level, Message, ToolCall

ROUNDS = 3
"""Ours and the baseline take turns, so that a slow phase of the machine meets both."""
NUM_TREES, NUM_TURNS = 32, 1250
"""Trees that grow at once, and turns of each."""
NUM_SINGLE = 400
"""Turns of a round that are committed one by one."""
_TASK = Task("bench", "agentgym/Counter-v0", "go")


def store() -> list[BenchRow]:
    """Time writing trees turn by turn until all is durable, and loading them."""
    trees = [_tree(index) for index in range(NUM_TREES)]
    grouped, flushed, bare, loaded = [], [], [], []
    with tempfile.TemporaryDirectory(prefix=".bench-store-", dir=".") as folder:
        for index in range(ROUNDS):
            flushed.append(_flush_each(Path(folder) / f"flushed{index}.db", trees[0]))
            rate, read = _write_and_load(Path(folder) / f"grouped{index}.db", trees)
            grouped.append(rate)
            loaded.append(read)
            bare.append(_commit_each(Path(folder) / f"bare{index}.db", trees[0]))
    num_written = ROUNDS * NUM_TREES * NUM_TURNS
    targets = [Target("ours", at_least=30_000), Target("ratio", at_least=20)]
    return [
        _row("group commit", grouped, num_written, flushed, "the same store, a commit per turn", targets),
        _row("group commit, bare", grouped, num_written, bare, "a bare loop, a commit per turn", []),
        _row("load", loaded, ROUNDS * NUM_TURNS, [], "", []),
    ]


def _row(
    case: str, rates: list[float], n: int, baseline: list[float], baseline_name: str, targets: list[Target]
) -> BenchRow:
    return row(
        "store",
        case,
        median(rates),
        unit="turns/s",
        n=n,
        samples=rates,
        baseline=median(baseline) if baseline else None,
        baseline_name=baseline_name,
        more_is_better=True,
        targets=targets,
    )


def _write_and_load(path: Path, trees: list[Tree]) -> tuple[float, float]:
    """Durable turns a second, opening and closing not counted, and loaded turns a second."""
    with Store.open(path) as opened:
        opened.add_run("bench", {})
        for tree in trees:
            opened.add_tree("bench", tree, _TASK)
        opened.flush()
        gc.collect()
        started = time.perf_counter()
        for turn in range(NUM_TURNS):
            for tree in trees:
                opened.add_node("bench", tree.id, tree.nodes[turn])
        opened.flush()
        written_s = time.perf_counter() - started
        started = time.perf_counter()
        loaded = opened.load_tree("bench", trees[-1].id)
        read_s = time.perf_counter() - started
        if len(loaded.nodes) != NUM_TURNS or loaded.nodes[-1].action != trees[-1].nodes[-1].action:
            raise AssertionError("the store did not give back what was written")
    return len(trees) * NUM_TURNS / written_s, NUM_TURNS / read_s


def _flush_each(path: Path, tree: Tree) -> float:
    """Turns a second where each is flushed before the next is handed in."""
    with Store.open(path) as opened:
        opened.add_run("bench", {})
        opened.add_tree("bench", tree, _TASK)
        opened.flush()
        started = time.perf_counter()
        for node in tree.nodes[:NUM_SINGLE]:
            opened.add_node("bench", tree.id, node)
            opened.flush()
        return NUM_SINGLE / (time.perf_counter() - started)


def _commit_each(path: Path, tree: Tree) -> float:
    """Turns a second where each is a transaction of its own, on the caller's thread, without a queue."""
    engine = Place.of(path).engine("write")
    with engine.connect() as connection:
        with connection.begin():
            prepare(connection, str(path), read_only=False)
        statements = Statements(engine)
        started = time.perf_counter()
        for node in tree.nodes[:NUM_SINGLE]:
            with connection.begin():
                statements.execute(connection, "node", [encode_node(1, node)])
        seconds = time.perf_counter() - started
    engine.dispose()
    return NUM_SINGLE / seconds


def _tree(index: int) -> Tree:
    """One branch of realistic turns: 20 sampled tokens, 40 of the world, an observation of 300 bytes."""
    tree = Tree(f"bench/{index}", _TASK.id, _TASK.env, seed=index)
    parent = None
    for turn in range(NUM_TURNS):
        action = f"run ls -la /workspace/project-{index} | head -n {turn}"
        observation = "".join(f"-rw-r--r-- 1 agent agent {turn * 7 + line:5} notes-{line}.txt\n" for line in range(6))
        call = ToolCall("run", {"command": action[4:]})
        node = Node(turn, parent, turn, action, observation, seed=index * NUM_TURNS + turn, num_tool_calls=1)
        node.messages = (Message("assistant", action, (call,)), Message("tool", observation, tool_call_id=call.id))
        node.token_ids_T = tuple((turn * 31 + position * 977) % 150_000 for position in range(60))
        node.mask_T = (True,) * 20 + (False,) * 40
        node.logprobs_T = tuple(-0.01 * position for position in range(1, 21)) + (0.0,) * 40
        node.versions_T = (3,) * 20 + (-1,) * 40
        node.reward, node.snapshot_id, node.forkable = 0.0, f"s{turn}", Level.SHELL
        parent = tree.add(node)
    return tree
