"""The tables of the trajectory store and their versions.

Owns the schema with its migrations. Leaves opening to `store_place.py` and rows to `store_rows.py`. Keys are
numbers, so that a node repeats eight bytes instead of two names; sampled data is only ever inserted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from agentgym.errors import StoreError
from agentgym.store_rows import COLUMNS, CREDIT

metadata = sa.MetaData()
meta = sa.Table("meta", metadata, sa.Column("name", sa.Text, primary_key=True), sa.Column("value", sa.Text))
_KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # SQLite numbers rows by itself only where it says INTEGER
runs = sa.Table(
    "runs",
    metadata,
    sa.Column("key", _KEY, primary_key=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("created", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("config", sa.Text, nullable=False),
    sa.Column("writer", sa.Text, nullable=False),
)
trees = sa.Table(
    "trees",
    metadata,
    sa.Column("key", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("run", sa.BigInteger, nullable=False),
    *(sa.Column(name, sa.Text, nullable=False) for name in ("id", "task_id", "task", "env_id", "env_kwargs")),
    *(sa.Column(name, sa.Text, nullable=False) for name in ("seed", "group", "status")),
    sa.UniqueConstraint("run", "id"),
)
_INTEGERS = ("tree", "id", "parent", "turn_index", "cut", "num_tool_calls", "seed", "forked", "forkable", "kept")
_BLOBS = ("tokens", "timings")
_REQUIRED = ("tree", "id", "turn_index", "action", "observation", "status", *_BLOBS)


def _column(name: str) -> sa.Column[Any]:
    if name in ("tree", "id"):
        return sa.Column(name, sa.BigInteger, primary_key=True, autoincrement=False)
    kind: Any = sa.Text
    if name in _INTEGERS:
        kind = sa.BigInteger
    elif name in _BLOBS:
        kind = sa.LargeBinary
    elif name in ("reward", "info_gain", "value", "advantage"):
        kind = sa.Double
    return sa.Column(name, kind, nullable=name not in _REQUIRED)


nodes = sa.Table("nodes", metadata, *(_column(name) for name in COLUMNS))
credit = sa.Table("credit", metadata, *(_column(name) for name in ("tree", "id", *CREDIT)))

Migration = Callable[[Connection], None]
MIGRATIONS: list[Migration] = []
"""Entry i turns schema version i + 1 into version i + 2; nothing here is ever changed or removed."""
_CREATING = 0x61676D
"""Advisory lock that keeps two processes from creating the tables of one server at once."""


def schema_version() -> int:
    """The version this package writes."""
    return len(MIGRATIONS) + 1


def prepare(connection: Connection, place: str, *, read_only: bool) -> None:
    """Create the tables of a new store, or bring an older one up to date, in the caller's transaction.

    Raises:
        StoreError: the store is newer than this package, holds something else, or may not be migrated.
    """
    if connection.dialect.name == "postgresql" and not read_only:
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_CREATING)))
    found = set(sa.inspect(connection).get_table_names())
    if "meta" not in found:
        if found & set(metadata.tables) or (found and connection.dialect.name == "sqlite"):
            raise StoreError(
                f"{place} holds other tables ({', '.join(sorted(found)[:5])}); give a new file or database"
            )
        if read_only:
            raise StoreError(
                f"{place} is empty, expected a store; check the path, or open it for writing to create one"
            )
        metadata.create_all(connection)
        connection.execute(meta.insert().values(name="schema_version", value=str(schema_version())))
        return
    version = int(connection.scalar(sa.select(meta.c.value).where(meta.c.name == "schema_version")) or 0)
    if version == 0 or version > schema_version():
        raise StoreError(
            f"{place} has schema version {version or 'unknown'}, this agentgym reads up to {schema_version()}; "
            "upgrade agentgym-tree"
        )
    if version < schema_version():
        if read_only:
            raise StoreError(
                f"{place} has schema version {version}, expected {schema_version()}; open it once for writing"
            )
        for migrate in MIGRATIONS[version - 1 :]:
            migrate(connection)
        connection.execute(meta.update().where(meta.c.name == "schema_version").values(value=str(schema_version())))
