"""Reading a trajectory store: runs, trees, nodes and tasks as they were handed in.

Owns the records and the queries. Leaves writing to `store.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from agentgym import store_schema as schema
from agentgym.encoding import loads
from agentgym.errors import StoreError, UnknownName
from agentgym.store_place import Place, store_errors, writer_lives
from agentgym.store_rows import COLUMNS, CREDIT, decode_node, decode_text, encode_text
from agentgym.task import Task
from agentgym.tree import Node, Tree

ENDS = ("complete", "interrupted", "failed")
"""How a run or a tree may end; until then it is "running"."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run as stored."""

    id: str
    created: str
    """UTC, ISO 8601."""
    status: str
    """"running" while its writer lives, else one of `ENDS`."""
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TreeRecord:
    """One tree as stored, without its nodes."""

    id: str
    task_id: str
    env_id: str
    env_kwargs: dict[str, Any]
    seed: int
    group: str
    status: str
    """"running" while the run's writer lives, else one of `ENDS`."""
    num_nodes: int


class StoreReader:
    """The reading half of a store; each call sees a consistent state, also beside writers."""

    def __init__(self, place: Place, engine: Engine) -> None:
        self.place = place.name
        """The path, or the URL without its password."""
        self._place = place
        self._reading = engine

    def runs(self) -> list[RunRecord]:
        """All runs, oldest first."""
        with self._read("listing runs") as connection:
            rows = connection.execute(sa.select(schema.runs).order_by(schema.runs.c.key)).all()
            return [
                RunRecord(decode_text(row.id), row.created, self._status(connection, row), loads(row.config))
                for row in rows
            ]

    def trees(self, run_id: str) -> list[TreeRecord]:
        """The trees of a run, in the order they were begun.

        Raises:
            UnknownName: there is no such run.
        """
        trees, nodes = schema.trees, schema.nodes
        counted = sa.select(sa.func.count()).where(nodes.c.tree == trees.c.key).scalar_subquery()
        with self._read("listing trees") as connection:
            run = self._find_run(connection, run_id)
            status = self._status(connection, run)
            found = sa.select(trees, counted.label("num_nodes")).where(trees.c.run == run.key).order_by(trees.c.key)
            return [_tree_record(row, status) for row in connection.execute(found)]

    def load_tree(self, run_id: str, tree_id: str) -> Tree:
        """A tree as it was handed in; of an interrupted one, the nodes that reached the disk.

        Raises:
            UnknownName: there is no such run or tree.
            StoreError: a record is damaged.
        """
        nodes, credit = schema.nodes, schema.credit
        with self._read(f"loading tree {tree_id!r}") as connection:
            row = self._find_tree(connection, run_id, tree_id)
            columns = [nodes.c[name] for name in COLUMNS[1:]]
            of_tree = sa.select(*columns).where(nodes.c.tree == row.key).order_by(nodes.c.id)
            rows = connection.execute(of_tree).all()
            gains = sa.select(credit.c.id, *(credit.c[name] for name in CREDIT)).where(credit.c.tree == row.key)
            credits = {gain[0]: tuple(gain[1:]) for gain in connection.execute(gains)}
        tree = Tree(
            decode_text(row.id),
            decode_text(row.task_id),
            decode_text(row.env_id),
            int(row.seed),
            group=decode_text(row.group),
        )
        by_id: dict[int, Node] = {}
        for values in rows:
            node_id, parent_id = values[0], values[1]
            if parent_id is not None and parent_id not in by_id:
                raise StoreError(
                    f"node {node_id} of tree {tree_id!r} has no parent {parent_id} in {self.place}; it is damaged"
                )
            parent = None if parent_id is None else by_id[parent_id]
            node = by_id[node_id] = decode_node(tuple(values), credits.get(node_id), parent)
            # not Tree.add: a crash may leave gaps between ids
            tree.nodes.append(node)
            if parent is not None:
                parent.children.append(node)
        return tree

    def load_task(self, run_id: str, tree_id: str) -> Task:
        """The task of a tree, whole, so that a replay needs no task file.

        Raises:
            UnknownName: there is no such run or tree.
        """
        with self._read(f"loading the task of tree {tree_id!r}") as connection:
            return Task(**loads(self._find_tree(connection, run_id, tree_id).task))

    def lost(self, run_id: str, tree_id: str) -> dict[int, list[str]]:
        """For each node id, the parts that could not be stored and why; empty: all is there."""
        nodes = schema.nodes
        with self._read(f"reading tree {tree_id!r}") as connection:
            key = self._find_tree(connection, run_id, tree_id).key
            found = sa.select(nodes.c.id, nodes.c.lost).where(nodes.c.tree == key, nodes.c.lost.is_not(None))
            return {node_id: loads(lost) for node_id, lost in connection.execute(found.order_by(nodes.c.id))}

    @contextmanager
    def _read(self, doing: str) -> Iterator[Connection]:
        self._before_reading()
        with store_errors(self.place, doing), self._reading.connect() as connection:
            yield connection

    def _before_reading(self) -> None:
        """For the writing half."""

    def _status(self, connection: Connection, run: sa.Row[Any]) -> str:
        if run.status != "running" or writer_lives(self._place, connection, run.writer):
            return str(run.status)
        # the writer may have ended its run between our look at the row and our look at its lock
        with self._reading.connect() as later:
            status = later.scalar(sa.select(schema.runs.c.status).where(schema.runs.c.key == run.key))
        return "interrupted" if status == "running" else str(status)

    def _find_run(self, connection: Connection, run_id: str) -> sa.Row[Any]:
        row = connection.execute(sa.select(schema.runs).where(schema.runs.c.id == encode_text(run_id))).one_or_none()
        if row is None:
            known = [decode_text(name) for name in connection.scalars(sa.select(schema.runs.c.id))]
            raise UnknownName.of("run", run_id, known, "`agentgym list runs` lists them")
        return row

    def _find_tree(self, connection: Connection, run_id: str, tree_id: str) -> sa.Row[Any]:
        trees = schema.trees
        of_run = trees.c.run == self._find_run(connection, run_id).key
        row = connection.execute(sa.select(trees).where(of_run, trees.c.id == encode_text(tree_id))).one_or_none()
        if row is None:
            known = [decode_text(name) for name in connection.scalars(sa.select(trees.c.id).where(of_run))]
            raise UnknownName.of("tree", tree_id, known, f"`agentgym tree {run_id}` shows them")
        return row


def _tree_record(row: sa.Row[Any], run_status: str) -> TreeRecord:
    return TreeRecord(
        decode_text(row.id),
        decode_text(row.task_id),
        decode_text(row.env_id),
        loads(row.env_kwargs),
        int(row.seed),
        decode_text(row.group),
        "interrupted" if row.status == "running" and run_status != "running" else row.status,
        row.num_nodes,
    )
