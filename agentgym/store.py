"""Trees in SQL: every turn is handed in as it is played, and reads back exactly.

Owns runs, trees and nodes as records. Leaves tables and versions to `store_schema.py`, who lives to
`store_place.py`, the spelling of nodes to `store_rows.py` and committing to `store_writer.py`.

A process that is killed loses at most the last group of turns. Its run reads as "interrupted" as soon as it is
gone, whoever looks.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from agentgym import store_schema as schema
from agentgym.encoding import dumps
from agentgym.errors import StoreError
from agentgym.store_place import Place, WriterLock, cut_log, forget_dead_writers, store_errors, writer_lives
from agentgym.store_read import ENDS, RunRecord, StoreReader, TreeRecord
from agentgym.store_rows import NO_CREDIT, STATE, Row, encode_credit, encode_node, encode_state, encode_text
from agentgym.store_writer import Writer
from agentgym.task import Task
from agentgym.tree import Node, Tree

__all__ = ["RunRecord", "Store", "TreeRecord"]


class _OpenTree:
    """What the store remembers of a tree that grows: its key, and each node's state and credit as written."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.written: dict[int, tuple[Row, Row | None]] = {}


class Store(StoreReader):
    """A trajectory store on a SQLite file or a PostgreSQL server; made by `open`, written by any thread."""

    def __init__(self, place: Place, *, group_rows: int, group_ms: float, read_only: bool) -> None:
        place.check(read_only=read_only)
        self.damage = cut_log(place)
        """What a crash left half written at the end of the log, now set aside; None: nothing."""
        super().__init__(place, place.engine("only" if read_only else "read"))
        self._pid = os.getpid()
        self._open_runs: dict[str, int] = {}
        self._open_trees: dict[tuple[str, str], _OpenTree] = {}
        self._tree_keys: dict[str, dict[str, int]] = {}
        self._numbering = threading.Lock()
        self._lock: WriterLock | None = None
        self._writer: Writer | None = None
        self._closed = False
        self._writing = None if read_only else place.engine("write")
        try:
            with store_errors(self.place, "opening"):
                if self._writing is None:
                    with self._reading.connect() as connection:
                        schema.prepare(connection, self.place, read_only=True)
                else:
                    self._start_writing(self._writing.connect(), group_rows, group_ms)
        except BaseException:
            self._give_back()
            raise
        atexit.register(self.close)

    @classmethod
    def open(
        cls, where: str | os.PathLike[str], *, group_rows: int = 1000, group_ms: float = 50, read_only: bool = False
    ) -> Store:
        """Open or create a store.

        Args:
            where: A path, or a URL: "runs/store.db", "postgresql://user@host/name".
            group_rows: Commit when so many rows wait.
            group_ms: Commit when a row has waited so long, in milliseconds; a crash loses no more than that.
            read_only: Change nothing; the store must exist.

        Raises:
            StoreError: it cannot be opened, is newer than this package, or is no store.
        """
        if group_rows < 1 or group_ms < 0:
            raise StoreError(f"group_rows={group_rows}, group_ms={group_ms}; expected at least 1 row and 0 ms")
        return cls(Place.of(where), group_rows=group_rows, group_ms=group_ms, read_only=read_only)

    # writing

    def add_run(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Begin a run; it is on the disk when this returns.

        Raises:
            StoreError: the id is taken, or the config holds what cannot be stored; names the field.
        """
        self._to_write()
        assert self._writing is not None and self._lock is not None
        row = {
            "id": encode_text(run_id),
            "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "status": "running",
            "config": dumps(dict(config), "config"),
            "writer": self._lock.token,
        }
        with store_errors(self.place, f"adding run {run_id!r}"), self._writing.begin() as connection:
            if connection.scalar(sa.select(schema.runs.c.key).where(schema.runs.c.id == row["id"])) is not None:
                raise StoreError(f"run {run_id!r} is in store {self.place} already; choose another id")
            added = connection.execute(schema.runs.insert().values(row)).inserted_primary_key
        assert added is not None
        self._open_runs[run_id] = int(added[0])
        self._tree_keys[run_id] = {}

    def end_run(self, run_id: str, status: str = "complete") -> None:
        """End a run, durably; trees that still grow are interrupted."""
        writer = self._to_write()
        self._run_key(run_id)
        self._end_run(writer, run_id, _end(status))
        writer.flush()

    def add_tree(self, run_id: str, tree: Tree, task: Task, *, env_kwargs: Mapping[str, Any] | None = None) -> None:
        """Begin a tree; its nodes follow with `add_node`.

        Raises:
            StoreError: the run is not written here, it has such a tree already, or the task or the arguments
                of the environment hold what cannot be stored; names the field.
        """
        writer = self._to_write()
        run_key = self._run_key(run_id)
        spelled_task = dumps({field.name: getattr(task, field.name) for field in fields(task)}, "task")
        spelled_kwargs = dumps(dict(env_kwargs or {}), "env_kwargs")
        texts = (encode_text(tree.id), encode_text(tree.task_id), spelled_task, encode_text(tree.env_id))
        with self._numbering:
            keys = self._tree_keys[run_id]
            if tree.id in keys:
                raise StoreError(f"tree {tree.id!r} of run {run_id!r} is there already; choose another id")
            key = keys[tree.id] = (run_key << 32) + len(keys)
        row = (key, run_key, *texts, spelled_kwargs, str(int(tree.seed)), encode_text(tree.group), "running")
        self._open_trees[run_id, tree.id] = _OpenTree(key)
        writer.put("tree", row)

    def add_node(self, run_id: str, tree_id: str, node: Node) -> None:
        """Hand in a turn that was just played; its parent comes first.

        A part of its messages or rewards that cannot be stored is replaced by a text that says so; see `lost`.

        Raises:
            StoreError: the tree does not grow here, the node is there already or its parent is not, or a field
                is not of its type.
        """
        writer = self._to_write()
        tree = self._growing(run_id, tree_id)
        if node.id in tree.written:
            raise StoreError(
                f"node {node.id} of tree {tree_id!r} is there already; what was sampled is never rewritten"
            )
        if node.parent is not None and node.parent.id not in tree.written:
            raise StoreError(
                f"node {node.id} of tree {tree_id!r} comes before its parent {node.parent.id}; add that first"
            )
        row, credit = encode_node(tree.key, node), encode_credit(node)
        tree.written[node.id] = (row[-len(STATE) :], credit)
        writer.put("node", row)
        if credit is not None:
            writer.put("credit", (tree.key, node.id, *credit))

    def update_node(self, run_id: str, tree_id: str, node: Node) -> None:
        """Write what changed since `add_node`: status, reward, snapshot, credit; never what was sampled."""
        self._update(self._to_write(), self._growing(run_id, tree_id), node)

    def end_tree(self, run_id: str, tree: Tree, status: str = "complete") -> None:
        """End a tree: hand in nodes that are not there yet, and what changed of the others."""
        writer = self._to_write()
        growing = self._growing(run_id, tree.id)
        for node in tree.nodes:
            if node.id in growing.written:
                self._update(writer, growing, node)
            else:
                self.add_node(run_id, tree.id, node)
        writer.put("end_tree", (_end(status), growing.key))
        del self._open_trees[run_id, tree.id]

    def update_credit(self, run_id: str, tree: Tree) -> None:
        """Write information gain, value and advantage of every node, at any time, also of an earlier run."""
        writer = self._to_write()
        key = self._tree_keys.get(run_id, {}).get(tree.id)
        if key is None:
            with self._read(f"finding tree {tree.id!r}") as connection:
                key = int(self._find_tree(connection, run_id, tree.id).key)
        for node in tree.nodes:
            writer.put("credit", (key, node.id, *(encode_credit(node) or NO_CREDIT)))

    def flush(self) -> None:
        """Wait until all that was handed in is on the disk.

        Raises:
            StoreError: it could not be written.
        """
        self._to_write().flush()

    def close(self) -> None:
        """Write what is left, interrupt runs that were not ended, and let go of the database; twice is fine.

        Raises:
            StoreError: something handed in could not be written.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._pid != os.getpid():
            return  # a forked child: thread, lock and connections are its parent's
        try:
            if self._writer is not None:
                for run_id in list(self._open_runs):
                    self._end_run(self._writer, run_id, "interrupted")
        finally:
            self._give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # inside

    def _start_writing(self, connection: Connection, group_rows: int, group_ms: float) -> None:
        try:
            with connection.begin():
                schema.prepare(connection, self.place, read_only=False)
            with connection.begin():
                self._lock = WriterLock(self._place, connection)
                self._interrupt_dead_runs(connection)
        except BaseException:
            connection.close()
            raise
        self._writer = Writer(connection, self.place, group_rows=group_rows, group_ms=group_ms)

    def _interrupt_dead_runs(self, connection: Connection) -> None:
        runs, trees = schema.runs, schema.trees
        running = sa.select(runs.c.key, runs.c.writer).where(runs.c.status == "running")
        for key, token in connection.execute(running).all():
            if not writer_lives(self._place, connection, token):
                still = (runs.c.key == key) & (runs.c.status == "running")
                connection.execute(runs.update().where(still).values(status="interrupted"))
                growing = (trees.c.run == key) & (trees.c.status == "running")
                connection.execute(trees.update().where(growing).values(status="interrupted"))
        forget_dead_writers(self._place, connection)

    def _to_write(self) -> Writer:
        if self._closed:
            raise StoreError(f"store {self.place} is closed; open it again")
        if self._pid != os.getpid():
            raise StoreError(
                f"store {self.place} was opened by process {self._pid}, a fork cannot use it; open it anew"
            )
        if self._writer is None:
            raise StoreError(f"store {self.place} was opened read-only; open it for writing")
        return self._writer

    def _before_reading(self) -> None:
        # what was handed in here is seen here
        if self._writer is not None:
            self._to_write().flush()

    def _run_key(self, run_id: str) -> int:
        if run_id not in self._open_runs:
            raise StoreError(f"run {run_id!r} is not being written here; call add_run first, and end_run last")
        return self._open_runs[run_id]

    def _growing(self, run_id: str, tree_id: str) -> _OpenTree:
        tree = self._open_trees.get((run_id, tree_id))
        if tree is None:
            raise StoreError(
                f"tree {tree_id!r} of run {run_id!r} does not grow here; add_tree comes first, end_tree last"
            )
        return tree

    def _update(self, writer: Writer, tree: _OpenTree, node: Node) -> None:
        if node.id not in tree.written:
            raise StoreError(f"node {node.id} was not added yet; add_node comes first")
        new = encode_state(node), encode_credit(node)
        state, credit = tree.written[node.id]
        if new[0] != state:
            writer.put("state", (*new[0], tree.key, node.id))
        if new[1] != credit:
            writer.put("credit", (tree.key, node.id, *(new[1] or NO_CREDIT)))
        tree.written[node.id] = new

    def _end_run(self, writer: Writer, run_id: str, status: str) -> None:
        for of_run, tree_id in list(self._open_trees):
            if of_run == run_id:
                writer.put("end_tree", ("interrupted", self._open_trees.pop((of_run, tree_id)).key))
        writer.put("end_run", (status, self._open_runs.pop(run_id)))

    def _give_back(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            if self._writing is not None:
                self._writing.dispose()
            self._reading.dispose()
            if self._lock is not None:
                self._lock.release()


def _end(status: str) -> str:
    if status not in ENDS:
        raise StoreError(f"a run or tree ends as one of {', '.join(ENDS)}, got {status!r}")
    return status
