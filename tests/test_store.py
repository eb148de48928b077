"""The store: exact round trips, groups, crashes, two writers, versions, and what it refuses."""

from __future__ import annotations

import math
import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym import store_schema
from agentgym.errors import StoreError, UnknownName
from agentgym.store import Store
from agentgym.task import Task
from agentgym.tree import Node, NodeStatus, Timings, Tree
from agentgym.types import Level, Message, StopReason, ToolCall

TASK = Task(
    "t1", "agentgym/Terminal-v0", "do it", setup={"files": ("a", b"\0")}, gold=({"name": "submit"},), answer="x"
)

TEXT = st.text(st.characters(codec=None, categories=None), max_size=20) | st.sampled_from(
    ["", "$json:", "\ud83d\ude00"]
)
FLOATS = st.none() | st.floats()
CALLS = st.builds(
    ToolCall,
    TEXT,
    st.dictionaries(TEXT, st.integers() | TEXT | st.floats(allow_nan=False) | st.tuples(st.binary()), max_size=2),
    TEXT,
)
MESSAGES = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    TEXT,
    st.lists(CALLS, max_size=2).map(tuple),
    st.none() | TEXT,
)
INT64 = st.integers(-(2**63), 2**63 - 1)


@st.composite
def nodes(draw: st.DrawFn, node_id: int, parent: Node | None) -> Node:
    """A node with anything that its types allow in its fields."""
    sampled, given_ = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    regular = draw(st.booleans())
    mask = (True,) * sampled + (False,) * given_
    num = len(mask)
    versions: tuple[int, ...] = (draw(st.integers(0, 2**40)),) * sampled + (-1,) * given_
    logprobs = tuple(draw(st.lists(st.floats(), min_size=sampled, max_size=sampled))) + (0.0,) * given_
    if not regular:
        mask = tuple(draw(st.lists(st.booleans(), min_size=num, max_size=num)))
        logprobs = tuple(draw(st.lists(st.floats(), max_size=8)))
        versions = tuple(draw(st.lists(INT64, max_size=8)))
    node = Node(node_id, parent, 0 if parent is None else parent.turn_index + 1)
    node.action, node.observation, node.cut = draw(TEXT), draw(TEXT), draw(st.booleans())
    node.messages = tuple(draw(st.lists(MESSAGES, max_size=3)))
    if draw(st.booleans()):
        node.messages = (Message("assistant", node.action), *node.messages, Message("tool", node.observation))
    node.token_ids_T = tuple(draw(st.lists(st.integers(0, 70000) | INT64, min_size=num, max_size=num)))
    node.mask_T, node.logprobs_T, node.versions_T = mask, logprobs, versions
    node.reward, node.rewards = draw(FLOATS), draw(st.dictionaries(TEXT, st.floats(), max_size=2))
    node.num_tool_calls, node.seed = draw(st.integers(0, 100)), draw(st.integers(0, 2**64) | INT64)
    node.status, node.stop_reason = draw(st.sampled_from(NodeStatus)), draw(st.none() | st.sampled_from(StopReason))
    node.error, node.snapshot_id, node.digest = draw(st.none() | TEXT), draw(st.none() | TEXT), draw(st.none() | TEXT)
    node.forkable, node.losses = draw(st.none() | st.sampled_from(Level)), tuple(draw(st.lists(TEXT, max_size=2)))
    node.forked, node.kept = draw(st.booleans()), draw(st.booleans())
    node.timings = Timings(*draw(st.lists(st.floats(), min_size=5, max_size=5)))
    node.info_gain, node.value, node.advantage = draw(FLOATS), draw(FLOATS), draw(FLOATS)
    return node


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """A tree of any shape."""
    tree = Tree(draw(TEXT), draw(TEXT), draw(TEXT), draw(st.integers(0, 2**64)), group=draw(TEXT))
    for node_id in range(draw(st.integers(1, 5))):
        parent = tree.nodes[draw(st.integers(0, node_id - 1))] if node_id else None
        tree.add(draw(nodes(node_id, parent)))
    return tree


def exact(value: Any) -> Any:
    """A form in which NaN equals NaN and 0.0 does not equal -0.0."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("d", value)
    if isinstance(value, list | tuple):
        return type(value), [exact(item) for item in value]
    if isinstance(value, dict):
        return [(key, exact(item)) for key, item in value.items()]
    if isinstance(value, Timings | Message | ToolCall):
        return [exact(getattr(value, field.name)) for field in fields(value)]
    return type(value), value


def assert_same(left: Tree, right: Tree) -> None:
    for name in ("id", "task_id", "env_id", "seed", "group"):
        assert getattr(left, name) == getattr(right, name)
    assert [node.id for node in left.nodes] == [node.id for node in right.nodes]
    for ours, theirs in zip(left.nodes, right.nodes, strict=True):
        assert (ours.parent.id if ours.parent else None) == (theirs.parent.id if theirs.parent else None)
        assert [child.id for child in ours.children] == [child.id for child in theirs.children]
        for field in fields(Node):
            if field.name not in ("parent", "children", "snapshot"):
                assert exact(getattr(ours, field.name)) == exact(getattr(theirs, field.name)), field.name


def small_tree(tree_id: str = "tree", *, branches: int = 2, turns: int = 3) -> Tree:
    tree = Tree(tree_id, "t1", "agentgym/Terminal-v0", 7)
    root = tree.add(
        Node(0, None, 0, observation="hello", messages=(Message("user", "hello"),), token_ids_T=(1,), mask_T=(False,))
    )
    for _ in range(branches):
        node = root
        for turn in range(1, turns + 1):
            node = tree.add(
                Node(len(tree.nodes), node, turn, action=f"run {turn}", observation=f"out {turn}", reward=0.0)
            )
    return tree


def write(store: Store, run_id: str, *grown: Tree) -> None:
    for tree in grown:
        store.add_tree(run_id, tree, TASK)
        for node in tree.nodes:
            store.add_node(run_id, tree.id, node)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "run.db") as opened:
        opened.add_run("r", {"seed": 1})
        yield opened


# what comes back


@pytest.fixture(scope="module")
def shared_store() -> Iterator[Store]:
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "s.db", group_ms=0) as opened:
        yield opened


@settings(max_examples=80, deadline=None)
@given(tree=trees(), whole=st.booleans())
def test_any_tree_comes_back_exactly(shared_store: Store, tree: Tree, whole: bool) -> None:
    run_id = f"run {time.monotonic_ns()}"
    shared_store.add_run(run_id, {})
    if whole:
        shared_store.add_tree(run_id, tree, TASK)
    else:
        write(shared_store, run_id, tree)
    shared_store.end_tree(run_id, tree)
    assert_same(shared_store.load_tree(run_id, tree.id), tree)
    assert shared_store.lost(run_id, tree.id) == {}
    shared_store.end_run(run_id)


def test_run_tree_and_task_come_back(tmp_path: Path) -> None:
    task = Task(
        "t9", "my/Env-v0", "p", {"a": (1, float("inf"))}, MappingProxyType({"kind": "x"}), limits={"max_turns": 3}
    )
    with Store.open(tmp_path / "run.db") as store:
        store.add_run("r", {"run": {"seed": 1}})
        store.add_tree("r", Tree("x", "t9", "my/Env-v0", 5, group="g"), task, env_kwargs={"codec": "json"})
        assert [(run.id, run.status, run.config) for run in store.runs()] == [("r", "running", {"run": {"seed": 1}})]
        (record,) = store.trees("r")
        assert (record.status, record.num_nodes) == ("running", 0)
        store.end_tree("r", Tree("x", "t9", "my/Env-v0", 5, group="g"))
        store.end_run("r")
    with Store.open(tmp_path / "run.db", read_only=True) as store:
        assert store.load_task("r", "x") == task
        (record,) = store.trees("r")
        assert (record.id, record.task_id, record.env_id, record.seed) == ("x", "t9", "my/Env-v0", 5)
        assert (record.group, record.status, record.env_kwargs) == ("g", "complete", {"codec": "json"})
        assert [run.status for run in store.runs()] == ["complete"]


def test_late_changes_are_written_and_samples_are_not(store: Store) -> None:
    tree = small_tree()
    write(store, "r", tree)
    leaf = tree.nodes[3]
    leaf.status, leaf.stop_reason, leaf.reward, leaf.rewards = (
        NodeStatus.TRUNCATED,
        StopReason.BUDGET,
        1.5,
        {"outcome": 1.5},
    )
    store.update_node("r", "tree", leaf)
    assert store.load_tree("r", "tree").nodes[3].stop_reason is StopReason.BUDGET
    tree.nodes[1].action, tree.nodes[2].kept, tree.nodes[2].value = "rewritten", False, 0.25
    store.end_tree("r", tree)
    loaded = store.load_tree("r", "tree")
    assert (loaded.nodes[2].kept, loaded.nodes[2].value, loaded.nodes[1].action) == (False, 0.25, "run 1")


def test_credit_can_be_written_at_any_time(store: Store, tmp_path: Path) -> None:
    tree = small_tree()
    write(store, "r", tree)
    store.end_tree("r", tree)
    store.end_run("r")
    store.close()
    with Store.open(tmp_path / "run.db") as later:
        for credit in (0.5, float("nan"), None, float("-inf")):
            for node in tree.nodes:
                node.advantage, node.info_gain = credit, None if credit is None else 1.0
            later.update_credit("r", tree)
            assert_same(later.load_tree("r", "tree"), tree)


def test_a_bad_value_does_not_lose_the_turn(store: Store) -> None:
    """C084: what cannot be stored is named, and everything around it is kept."""
    tree = small_tree()
    call = ToolCall("run", {"command": "ls", "extra": [1, 2, 3, threading.Lock()]}, "c1")
    tree.nodes[1].messages = (Message("assistant", "run 1", (call,)), Message("tool", "out 1", tool_call_id="c1"))
    tree.nodes[1].rewards = {"outcome": 1.0, "note": "no number"}  # type: ignore[dict-item]
    tree.nodes[2].rewards = {"bad": threading.Lock()}  # type: ignore[dict-item]
    write(store, "r", tree)
    lost = store.lost("r", "tree")
    assert list(lost) == [1, 2]
    assert lost[1][0].startswith(
        "messages[0].tool_calls[0].arguments.extra[3] cannot be stored: it is of type _thread.lock"
    )
    assert lost[2][0].startswith("rewards.bad cannot be stored")
    node = store.load_tree("r", "tree").nodes[1]
    assert node.messages[1] == tree.nodes[1].messages[1] and node.rewards == tree.nodes[1].rewards
    arguments = node.messages[0].tool_calls[0].arguments
    assert arguments["command"] == "ls" and arguments["extra"][:3] == [1, 2, 3]
    assert arguments["extra"][3] == f"<not stored: {lost[1][0]}>"


@pytest.mark.parametrize(
    ("name", "value"),
    [("token_ids_T", ("a",)), ("token_ids_T", (2**70,)), ("mask_T", (2,)), ("logprobs_T", (None,)), ("reward", "high"),
     ("status", "open"), ("stop_reason", "success"), ("reward", "1.5"), ("action", 3), ("versions_T", (1.5,)), ("value", "x"), ("losses", (threading.Lock(),))],
)  # fmt: skip
def test_a_field_of_another_type_is_named(store: Store, name: str, value: Any) -> None:
    tree = small_tree()
    setattr(tree.nodes[0], name, value)
    store.add_tree("r", tree, TASK)
    with pytest.raises(StoreError, match=name):
        store.add_node("r", "tree", tree.nodes[0])
    setattr(tree.nodes[0], name, getattr(Node(0, None, 0), name))
    store.add_node("r", "tree", tree.nodes[0])
    assert len(store.load_tree("r", "tree").nodes) == 1


def test_task_and_config_name_what_cannot_be_stored(store: Store) -> None:
    with pytest.raises(StoreError, match=r"task\.setup\.files\[0\] cannot be stored"):
        store.add_tree("r", small_tree(), Task("t", "e", "p", {"files": [threading.Lock()]}))
    with pytest.raises(StoreError, match=r"config\.a cannot be stored"):
        store.add_run("s", {"a": threading.Lock()})
    write(store, "r", small_tree())


# what is refused


def test_unknown_names_give_the_nearest(store: Store) -> None:
    write(store, "r", small_tree("first"))
    with pytest.raises(UnknownName, match=r"unknown run 'rr'; did you mean 'r'\? `agentgym list runs`"):
        store.trees("rr")
    with pytest.raises(UnknownName, match=r"unknown tree 'frist'; did you mean 'first'\?"):
        store.load_tree("r", "frist")


def test_order_and_uniqueness_are_kept(store: Store) -> None:
    tree = small_tree()
    with pytest.raises(StoreError, match="does not grow here"):
        store.add_node("r", "tree", tree.root)
    store.add_tree("r", tree, TASK)
    with pytest.raises(StoreError, match="before its parent 0"):
        store.add_node("r", "tree", tree.nodes[1])
    store.add_node("r", "tree", tree.root)
    with pytest.raises(StoreError, match="is there already"):
        store.add_node("r", "tree", tree.root)
    with pytest.raises(StoreError, match="is there already"):
        store.add_tree("r", tree, TASK)
    with pytest.raises(StoreError, match="is in store"):
        store.add_run("r", {})
    with pytest.raises(StoreError, match="add_run"):
        store.add_tree("nobody", small_tree("other"), TASK)
    with pytest.raises(StoreError, match="complete, interrupted, failed"):
        store.end_run("r", "done")
    store.end_tree("r", tree)
    assert_same(store.load_tree("r", "tree"), tree)


def test_places_that_cannot_hold_a_store(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("these are notes, no database; " * 200)
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as connection:
        connection.execute("create table stamps (id)")
    connection.close()
    cases = {
        str(tmp_path / "missing" / "x.db"): "there is no folder",
        str(tmp_path): "is a folder",
        str(text): "no store",
        str(other): r"other tables \(stamps\)",
        "mysql://u@h/d": "postgresql://",
        "sqlite:///:memory:": "give a file",
        "://": "cannot be read",
    }
    for where, says in cases.items():
        with pytest.raises(StoreError, match=says) as caught:
            Store.open(where)
        assert "\n" not in str(caught.value)
    with pytest.raises(StoreError, match="there is no store"):
        Store.open(tmp_path / "none.db", read_only=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "other.db"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that nobody can write, here /proc")
def test_a_folder_that_cannot_be_written() -> None:
    with pytest.raises(StoreError, match=r"/proc/x\.db") as caught:
        Store.open("/proc/x.db")
    assert "\n" not in str(caught.value)


def test_a_closed_or_read_only_store_refuses_to_write(store: Store, tmp_path: Path) -> None:
    write(store, "r", small_tree())
    with Store.open(tmp_path / "run.db", read_only=True) as reader, pytest.raises(StoreError, match="read-only"):
        reader.add_run("s", {})
    store.close()
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.flush()


# groups, crashes, two writers


def test_flush_makes_everything_visible_to_others(store: Store, tmp_path: Path) -> None:
    tree = small_tree(turns=20)
    write(store, "r", tree)
    store.flush()
    with sqlite3.connect(tmp_path / "run.db") as other:
        assert other.execute("select count(*) from nodes").fetchone() == (len(tree.nodes),)
        assert other.execute("pragma journal_mode").fetchone() == ("wal",)
    other.close()


def test_a_group_is_written_without_a_flush(tmp_path: Path) -> None:
    with Store.open(tmp_path / "x.db", group_rows=4, group_ms=3_600_000) as store:
        store.add_run("r", {})
        write(store, "r", small_tree(turns=40))
        with Store.open(tmp_path / "x.db", read_only=True) as reader:
            wait_for(lambda: num_nodes(reader, "r") > 70)
    with Store.open(tmp_path / "y.db", group_rows=10_000, group_ms=5) as store:
        store.add_run("r", {})
        write(store, "r", small_tree())
        with Store.open(tmp_path / "y.db", read_only=True) as reader:
            wait_for(lambda: num_nodes(reader, "r") == 7)


def test_more_rows_than_the_queue_holds_from_several_threads(tmp_path: Path) -> None:
    with Store.open(tmp_path / "x.db", group_rows=3, group_ms=1) as store:
        store.add_run("r", {})
        grown = [small_tree(f"tree {i}", turns=50) for i in range(4)]
        threads = [threading.Thread(target=write, args=(store, "r", tree)) for tree in grown]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for tree in grown:
            assert_same(store.load_tree("r", tree.id), tree)


def test_a_failure_to_write_is_told_at_the_next_call_and_at_the_end(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "x.db", group_ms=1)
    store.add_run("r", {})
    with sqlite3.connect(tmp_path / "x.db") as other:
        other.execute("drop table nodes")
    other.close()
    write(store, "r", small_tree())
    with pytest.raises(StoreError, match=r"writing .* failed .*nodes"):
        store.flush()
    with pytest.raises(StoreError, match="failed"):
        store.add_tree("r", small_tree("another"), TASK)
    with pytest.raises(StoreError, match="failed"):
        store.close()
    store.close()
    assert not list(tmp_path.glob("*-writer-*"))


CRASHING = """
import sys, time
sys.path.insert(0, {tests!r})
from test_store import TASK
from agentgym.store import Store
from agentgym.tree import Node, Tree
store = Store.open({path!r}, group_rows=10_000, group_ms=10)
store.add_run({run!r}, {{}})
tree = Tree("tree", "t1", "env", 0)
store.add_tree({run!r}, tree, TASK)
store.add_node({run!r}, "tree", tree.add(Node(0, None, 0, observation="begin")))
tips = [tree.root] * 3
for turn in range(1, 7):
    for branch in range(3):
        tips[branch] = tree.add(Node(len(tree.nodes), tips[branch], turn, action=f"b{{branch}} t{{turn}}"))
        store.add_node({run!r}, "tree", tips[branch])
print("turn 7", flush=True)
time.sleep(600)
"""


def start(path: Path, run: str) -> subprocess.Popen[str]:
    code = CRASHING.format(tests=str(Path(__file__).parent), path=str(path), run=run)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "turn 7\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert process.stdout is not None
    process.stdout.close()


def wait_for(claim: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


def num_nodes(store: Store, run_id: str) -> int:
    return sum(tree.num_nodes for tree in store.trees(run_id))


def test_a_killed_run_keeps_its_turns_and_reads_as_interrupted(tmp_path: Path) -> None:
    """C086: SIGKILL in turn 7 of 10 of a tree with three branches."""
    path = tmp_path / "run.db"
    process = start(path, "killed")
    try:
        with Store.open(path, read_only=True) as reader:
            wait_for(lambda: num_nodes(reader, "killed") == 19)
            assert reader.runs()[0].status == reader.trees("killed")[0].status == "running"
        with Store.open(path) as second:
            assert second.runs()[0].status == "running"  # another writer does not take it for dead
    finally:
        kill(process)
    with Store.open(path, read_only=True) as reader:
        assert reader.runs()[0].status == reader.trees("killed")[0].status == "interrupted"
    assert len(list(tmp_path.glob("*-writer-*"))) == 1
    with Store.open(path) as store:
        tree = store.load_tree("killed", "tree")
        paths = [[node.action for node in leaf.path()[1:]] for leaf in tree.leaves()]
        assert paths == [[f"b{branch} t{turn}" for turn in range(1, 7)] for branch in range(3)]
        assert store.load_task("killed", "tree") == TASK
    with sqlite3.connect(path) as connection:
        assert connection.execute("select status from runs union all select status from trees").fetchall() == [
            ("interrupted",),
            ("interrupted",),
        ]
    connection.close()
    assert not list(tmp_path.glob("*-writer-*"))


def test_two_processes_write_two_runs_into_one_file(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with Store.open(path, group_rows=5, group_ms=1) as store:
        store.add_run("ours", {})
        process = start(path, "theirs")
        try:
            grown = [small_tree(f"tree {i}", turns=30) for i in range(5)]
            write(store, "ours", *grown)
            wait_for(lambda: num_nodes(store, "theirs") == 19)
            for tree in grown:
                assert_same(store.load_tree("ours", tree.id), tree)
        finally:
            kill(process)
        assert {run.id: run.status for run in store.runs()} == {"ours": "running", "theirs": "interrupted"}


def test_a_run_that_was_not_ended_is_interrupted_by_closing(tmp_path: Path) -> None:
    with Store.open(tmp_path / "x.db") as store:
        store.add_run("r", {})
        write(store, "r", small_tree())
    with Store.open(tmp_path / "x.db", read_only=True) as store:
        assert store.runs()[0].status == store.trees("r")[0].status == "interrupted"
        assert_same(store.load_tree("r", "tree"), small_tree())


def test_a_store_that_nobody_closes_is_closed_at_exit(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_store import small_tree, write
from agentgym.store import Store
store = Store.open({str(tmp_path / "x.db")!r}, group_rows=10_000, group_ms=3_600_000)
store.add_run("r", {{}})
write(store, "r", small_tree())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with Store.open(tmp_path / "x.db", read_only=True) as reader:
        assert len(reader.load_tree("r", "tree").nodes) == 7


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # the fork beside a thread is what is tested
def test_a_fork_of_the_process_cannot_harm_the_store(store: Store) -> None:
    child = os.fork()
    if child == 0:
        try:
            store.add_run("child", {})
        except StoreError as error:
            store.close()
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    write(store, "r", small_tree())
    assert_same(store.load_tree("r", "tree"), small_tree())
    assert store.runs()[0].status == "running"


def test_a_log_cut_anywhere_loses_only_its_last_group(tmp_path: Path) -> None:
    """C083: cut at each of the last 300 bytes, append two records, load."""
    origin = tmp_path / "origin.db"
    with Store.open(origin, group_ms=0) as store:
        store.add_run("r", {})
        write(store, "r", small_tree("early"))
        store.flush()
        early = (tmp_path / "origin.db-wal").stat().st_size
        write(store, "r", small_tree("late", branches=1, turns=1))
        store.flush()
        # the copy is what a crash leaves: closing would move the log into the file
        database, log = origin.read_bytes(), (tmp_path / "origin.db-wal").read_bytes()
    assert len(log) > early
    cut_dir = tmp_path / "cut"
    for missing in range(1, 301):
        cut_dir.mkdir()
        path = cut_dir / "run.db"
        path.write_bytes(database)
        (cut_dir / "run.db-wal").write_bytes(log[:-missing])
        with Store.open(path) as store:
            assert store.damage is not None and "half a record" in store.damage
            store.add_run("again", {})
            write(store, "again", small_tree("new 1"), small_tree("new 2"))
        with sqlite3.connect(path) as connection:
            kept = connection.execute("select id, (select count(*) from nodes where tree = key) from trees").fetchall()
        connection.close()
        # whether "late" is there depends on which part of its group the cut took
        assert {("early", 7), ("new 1", 7), ("new 2", 7)} == set(kept) - {("late", 0), ("late", 1), ("late", 2)}
        if missing % 20 == 0:
            with Store.open(path, read_only=True) as store:
                assert store.damage is None
                assert [run.status for run in store.runs()] == ["interrupted", "interrupted"]
                for run, name in (("r", "early"), ("again", "new 1"), ("again", "new 2")):
                    assert_same(store.load_tree(run, name), small_tree(name))
        shutil.rmtree(cut_dir)


def test_a_damaged_file_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with Store.open(path) as store:
        store.add_run("r", {})
        write(store, "r", small_tree(turns=200))
    raw = bytearray(path.read_bytes())
    raw[8192:] = os.urandom(len(raw) - 8192)
    path.write_bytes(raw)
    with pytest.raises(StoreError, match=r"damaged") as caught, Store.open(path, read_only=True) as store:
        store.load_tree("r", "tree")
    assert "\n" not in str(caught.value)


# versions


def add_colour(connection: sa.Connection) -> None:
    connection.execute(sa.text("ALTER TABLE runs ADD COLUMN colour TEXT DEFAULT 'blue'"))


def test_an_older_store_is_migrated_and_a_newer_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.db"
    with Store.open(path) as store:
        store.add_run("r", {})
        write(store, "r", small_tree())
    version = store_schema.schema_version()
    with monkeypatch.context() as newer:
        newer.setattr(store_schema, "MIGRATIONS", [*store_schema.MIGRATIONS, add_colour])
        with pytest.raises(
            StoreError, match=f"schema version {version}, expected {version + 1}; open it once for writing"
        ):
            Store.open(path, read_only=True)
        for _ in range(2):
            with Store.open(path) as store:
                assert_same(store.load_tree("r", "tree"), small_tree())
    with sqlite3.connect(path) as connection:
        assert connection.execute("select colour from runs").fetchall() == [("blue",)]
    connection.close()
    with pytest.raises(StoreError, match=f"schema version {version + 1}, this agentgym reads up to {version}; upgrade"):
        Store.open(path)


def test_two_processes_may_create_one_store_at_once(tmp_path: Path) -> None:
    code = f"from agentgym.store import Store\nfor i in range(20): Store.open({str(tmp_path)!r} + f'/{{i}}.db').close()"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]


# a server


@pytest.mark.skipif(
    "AGENTGYM_TEST_POSTGRES" not in os.environ,
    reason="AGENTGYM_TEST_POSTGRES holds no URL of an empty PostgreSQL database",
)
def test_postgresql_holds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    url = os.environ["AGENTGYM_TEST_POSTGRES"]
    run_id = f"run {time.time_ns()}"

    @settings(max_examples=40, deadline=None)
    @given(trees())
    def comes_back(tree: Tree) -> None:
        inner = f"{run_id} {time.monotonic_ns()}"
        server.add_run(inner, {})
        write(server, inner, tree)
        server.end_tree(inner, tree)
        assert_same(server.load_tree(inner, tree.id), tree)
        server.end_run(inner)

    with Store.open(url, group_ms=1) as server:
        comes_back()
        server.add_run(run_id, {"a": 1})
        tree = small_tree(turns=200)
        write(server, run_id, tree)
        with Store.open(url, read_only=True) as reader, Store.open(url) as second:
            assert {run.id: run.status for run in reader.runs()}[run_id] == "running"
            second.add_run(run_id + " second", {})
            write(second, run_id + " second", tree)
            tree.nodes[5].value, tree.nodes[6].kept = 0.5, False
            server.end_tree(run_id, tree)
            server.update_credit(run_id, tree)
            assert_same(server.load_tree(run_id, "tree"), tree)
            server.end_run(run_id)
            assert {run.id: run.status for run in reader.runs()}[run_id] == "complete"
        assert {run.id: run.status for run in server.runs()}[run_id + " second"] == "interrupted"
    with monkeypatch.context() as newer:
        newer.setattr(store_schema, "MIGRATIONS", [lambda connection: None])
        Store.open(url).close()
    with pytest.raises(StoreError, match="schema version 2"):
        Store.open(url)
    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE meta SET value = '1' WHERE name = 'schema_version'"))
    engine.dispose()
