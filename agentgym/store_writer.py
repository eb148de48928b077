"""The one thread that writes a store: rows are handed in one by one and committed in groups.

Owns the queue, its bound, and when a group is committed. Leaves what rows mean to `store.py`.
"""

from __future__ import annotations

import threading
import time
from itertools import chain

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from agentgym import store_schema as schema
from agentgym.errors import StoreError
from agentgym.store_place import store_errors
from agentgym.store_rows import CREDIT, STATE, Row

_CHUNKS = (1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
"""Rows of one statement. sqlite3 lets other threads run at each statement, and a busy one gives the interpreter
back only after 5 ms: row by row, 600 rows/s were written beside a busy thread; in chunks, ten times as many."""


class Statements:
    """The SQL of each kind of row, compiled once; what stands earlier is written earlier within a group."""

    KINDS = ("tree", "node", "state", "credit", "end_tree", "end_run")

    def __init__(self, engine: Engine) -> None:
        self._dialect = engine.dialect
        upsert = ", ".join(f"{name} = excluded.{name}" for name in CREDIT)
        self._inserts = {
            "tree": (*self._insert(schema.trees), ""),
            "node": (*self._insert(schema.nodes), ""),
            "credit": (*self._insert(schema.credit), f" ON CONFLICT (tree, id) DO UPDATE SET {upsert}"),
        }
        self._many: dict[tuple[str, int], str] = {}
        self._updates = {
            "state": self._update(schema.nodes, STATE, ("tree", "id")),
            "end_tree": self._update(schema.trees, ("status",), ("key",)),
            "end_run": self._update(schema.runs, ("status",), ("key",)),
        }

    def execute(self, connection: Connection, kind: str, rows: list[Row]) -> None:
        """Write rows of one kind; the values go to the driver as they are."""
        if kind in self._updates:
            connection.exec_driver_sql(self._updates[kind], rows)
            return
        if kind == "credit":
            # the last word counts, and PostgreSQL refuses a statement that has two for one node
            rows = list({row[:2]: row for row in rows}.values())
        start = 0
        for size in _CHUNKS:
            while len(rows) - start >= size:
                values = tuple(chain.from_iterable(rows[start : start + size]))
                connection.exec_driver_sql(self._insert_of(kind, size), values)
                start += size

    def _insert_of(self, kind: str, size: int) -> str:
        if (kind, size) not in self._many:
            head, values, tail = self._inserts[kind]
            self._many[kind, size] = f"{head}{', '.join([values] * size)}{tail}"
        return self._many[kind, size]

    def _insert(self, table: sa.Table) -> tuple[str, str]:
        head, _, values = str(table.insert().compile(dialect=self._dialect)).partition(" VALUES ")
        return f"{head} VALUES ", values

    def _update(self, table: sa.Table, columns: tuple[str, ...], keys: tuple[str, ...]) -> str:
        # parameters stand in the order of the columns given here, the keys last
        update = table.update().ordered_values(*((table.c[name], sa.bindparam(f"new_{name}")) for name in columns))
        for name in keys:
            update = update.where(table.c[name] == sa.bindparam(f"old_{name}"))
        return str(update.compile(dialect=self._dialect))


class Writer:
    """Takes rows from any thread and commits them in groups, in order, on a thread of its own.

    A group is committed when it has `group_rows` rows or its first row is `group_ms` old. Whoever hands in
    rows faster than they are written waits once eight groups are queued. After a failure nothing more is
    written, and every call says why.
    """

    def __init__(self, connection: Connection, place: str, *, group_rows: int, group_ms: float) -> None:
        self._connection = connection
        self._statements = Statements(connection.engine)
        self._place = place
        self._group_rows = group_rows
        self._group_s = group_ms / 1000
        self._max_rows = 8 * group_rows
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._rows: dict[str, list[Row]] = {kind: [] for kind in Statements.KINDS}
        self._queued = 0
        self._handed_in = 0
        self._durable = 0
        self._hurry = False
        self._closing = False
        self._failure: StoreError | None = None
        self._thread = threading.Thread(target=self._loop, name="agentgym-store", daemon=True)
        self._thread.start()

    def put(self, kind: str, row: Row) -> None:
        """Hand in a row.

        Raises:
            StoreError: an earlier row could not be written, or the writer was closed.
        """
        with self._lock:
            if self._failure is not None or self._closing or self._queued >= self._max_rows:
                self._wait_for_room()
            self._rows[kind].append(row)
            self._queued += 1
            self._handed_in += 1
            if self._queued == 1 or self._queued == self._group_rows:
                self._work.notify()

    def flush(self) -> None:
        """Wait until all that was handed in before is on the disk.

        Raises:
            StoreError: it could not be written.
        """
        with self._lock:
            target = self._handed_in
            self._hurry = True
            self._work.notify()
            while self._durable < target and self._failure is None:
                self._done.wait()
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """Write what is left and end the thread; twice is fine.

        Raises:
            StoreError: something could not be written.
        """
        with self._lock:
            first, self._closing = not self._closing, True
            self._work.notify()
        self._thread.join()
        self._connection.close()
        if first and self._failure is not None:
            raise self._failure

    def _wait_for_room(self) -> None:
        while self._queued >= self._max_rows and self._failure is None and not self._closing:
            self._done.wait()
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise StoreError(f"store {self._place} is closed; open it again to write")

    def _loop(self) -> None:
        while (group := self._next_group()) is not None:
            rows, last = group
            failure = self._write(rows)
            with self._lock:
                if failure is None:
                    self._durable = last
                else:
                    self._failure = failure
                self._done.notify_all()
            if failure is not None:
                return

    def _next_group(self) -> tuple[dict[str, list[Row]], int] | None:
        with self._lock:
            while not self._queued and not self._closing:
                self._work.wait()
            if not self._queued:
                return None
            deadline = time.monotonic() + self._group_s
            while self._queued < self._group_rows and not self._hurry and not self._closing:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._work.wait(left)
            rows, self._rows = self._rows, {kind: [] for kind in Statements.KINDS}
            self._queued = 0
            self._hurry = False
            self._done.notify_all()
            return rows, self._handed_in

    def _write(self, rows: dict[str, list[Row]]) -> StoreError | None:
        num = sum(map(len, rows.values()))
        try:
            with store_errors(self._place, f"writing {num} rows"), self._connection.begin():
                for kind, of_kind in rows.items():
                    if of_kind:
                        self._statements.execute(self._connection, kind, of_kind)
        except StoreError as error:
            return error
        except Exception as error:
            return StoreError(f"store {self._place}: writing {num} rows failed ({type(error).__name__}: {error})")
        return None
