"""Where a store is, how it is opened, and whether the process that writes a run still lives.

Owns engines for SQLite files and PostgreSQL servers, the writer's lock, and errors in one line. Leaves tables
to `store_schema.py`.
"""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from agentgym.errors import StoreError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a store is."""

    name: str
    """What errors call it: the path, or the URL without its password."""
    url: sa.URL | None
    path: str | None
    """Of a SQLite file, real and absolute; None for a server."""

    @classmethod
    def of(cls, where: str | os.PathLike[str]) -> Place:
        """Read a path or a URL.

        Raises:
            StoreError: neither a file nor a database that is supported.
        """
        text = os.fspath(where)
        if "://" not in text:
            return cls(text, None, os.path.realpath(text))
        try:
            url = sa.make_url(text)
        except sa.exc.ArgumentError as error:
            raise StoreError(
                f"store URL {text!r} cannot be read; write a path or postgresql://user@host/name"
            ) from error
        kind = url.get_backend_name()
        if kind == "sqlite" and url.database and url.database != ":memory:":
            return cls(url.database, None, os.path.realpath(url.database))
        if kind in ("postgresql", "postgres"):
            return cls(url.render_as_string(), url.set(drivername="postgresql+psycopg"), None)
        raise StoreError(f"store {text!r} is not supported; give a file for SQLite or a postgresql:// URL")

    def check(self, *, read_only: bool) -> None:
        """Refuse a file that can be neither opened nor made, with the reason SQLite does not give.

        Raises:
            StoreError: says which of file and folder is missing, or may not be written.
        """
        if self.path is None:
            return
        folder = os.path.dirname(self.path)
        if os.path.isdir(self.path):
            raise StoreError(f"store {self.name} is a folder; give the path of a file in it")
        if not os.path.isdir(folder):
            raise StoreError(f"store {self.name}: there is no folder {folder}; create it or give another path")
        if read_only and not os.path.exists(self.path):
            raise StoreError(f"there is no store at {self.name}; check the path, or make one with `agentgym rollout`")
        writable = os.access(folder, os.W_OK) and (not os.path.exists(self.path) or os.access(self.path, os.W_OK))
        if not read_only and not writable:
            raise StoreError(f"store {self.name} cannot be written; make file and folder writable or give another path")

    def engine(self, mode: str) -> Engine:
        """An engine for one use.

        Args:
            mode: "write", or "read" (beside a writer), or "only" (the file may not even be touched).
        """
        if self.path is None:
            try:
                # positional parameters let rows go to the driver as they are
                return sa.create_engine(self.url or "", paramstyle="format")
            except ImportError as error:
                raise StoreError("PostgreSQL needs psycopg; run: pip install 'agentgym-tree[postgres]'") from error
        uri = f"file:{quote(self.path)}?mode={'ro' if mode == 'only' else 'rw' if mode == 'read' else 'rwc'}"
        if (
            mode == "only"
            and not os.access(os.path.dirname(self.path), os.W_OK)
            and not os.path.exists(f"{self.path}-wal")
        ):
            uri += "&immutable=1"  # a WAL database wants to make files beside itself, here it neither can nor need

        def connect() -> sqlite3.Connection:
            connection = sqlite3.connect(
                uri, timeout=60, isolation_level=None, check_same_thread=False, cached_statements=256, uri=True
            )
            try:
                _set_up(connection, mode)
            except BaseException:
                connection.close()
                raise
            return connection

        engine = sa.create_engine("sqlite+pysqlite://", creator=connect, poolclass=sa.QueuePool)
        begin = "BEGIN IMMEDIATE" if mode == "write" else "BEGIN"
        # sqlite3 would begin late and as a reader, and a reader that becomes a writer is refused instead of waiting
        sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
        return engine


def _set_up(connection: sqlite3.Connection, mode: str) -> None:
    if mode == "write":
        tables, ours = connection.execute("SELECT count(*), total(name = 'meta') FROM sqlite_master").fetchone()
        if tables and not ours:
            return  # somebody else's file: it is about to be refused, and stays as it is
        # 8 KiB fit half a dozen turns, so that fewer pages are touched; FULL syncs the log at each commit
        connection.execute("PRAGMA page_size = 8192")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA wal_autocheckpoint = 8000")
    else:
        connection.execute("PRAGMA query_only = ON")


@contextmanager
def store_errors(place: str, doing: str) -> Iterator[None]:
    """Turn what the database says into one line that names the store."""
    try:
        yield
    except (sa.exc.SQLAlchemyError, sqlite3.Error, OSError) as error:
        said = str(getattr(error, "orig", None) or error).strip().split("\n")[0]
        if "malformed" in said or "not a database" in said:
            remedy = "the file is damaged or no store; restore a copy, or rescue it with `sqlite3 FILE .recover`"
        elif "locked" in said:
            remedy = "another process holds it; end that process or wait"
        elif "disk" in said or "full" in said:
            remedy = "free some space; what was committed before is safe"
        else:
            remedy = "check that the store can be reached, read and written"
        raise StoreError(f"store {place}: {doing} failed ({said}); {remedy}") from error


_HELD: dict[tuple[int, int], int] = {}
"""Lock files of this process by device and inode, with its pid: a lock asked for by its own holder would be dropped."""


class WriterLock:
    """Shows other processes that the writer of a run lives; gone with the process, however it ends.

    A POSIX record lock on a file beside the database, since it is not inherited by forks as flock is; an
    advisory lock of the session on a server.
    """

    def __init__(self, place: Place, connection: Connection) -> None:
        self.token = str(secrets.randbits(62))
        self._path: str | None = None
        if place.path is None:
            connection.execute(sa.select(sa.func.pg_advisory_lock(int(self.token))))
            return
        self._path = _lock_path(place.path, self.token)
        # locked before it has its name, so that nobody ever finds it unlocked while we live
        unnamed = f"{self._path}.new"
        self._file = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _HELD[_identity(self._file)] = os.getpid()
        os.rename(unnamed, self._path)

    def release(self) -> None:
        """Remove the file; a server's lock ends with its connection."""
        if self._path is not None:
            _HELD.pop(_identity(self._file), None)
            Path(self._path).unlink(missing_ok=True)
            os.close(self._file)


def writer_lives(place: Place, connection: Connection, token: str) -> bool:
    """True while the process that took the lock runs."""
    if place.path is None:
        held = sa.text(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
            "AND (classid::bigint << 32) | objid::bigint = :token "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        return bool(connection.scalar(held, {"token": int(token)}))
    try:
        path = _lock_path(place.path, token)
        found = os.stat(path)
        if _HELD.get((found.st_dev, found.st_ino)) == os.getpid():
            return True
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def forget_dead_writers(place: Place, connection: Connection) -> None:
    """Remove the lock files that killed writers left."""
    if place.path is None:
        return
    start = _lock_path(place.path, "")
    for path in glob.glob(glob.escape(start) + "*"):
        if path[len(start) :].isdecimal() and not writer_lives(place, connection, path[len(start) :]):
            Path(path).unlink(missing_ok=True)


def cut_log(place: Place) -> str | None:
    """Say whether the write-ahead log ends in half a record, as after a power cut; None where it does not."""
    log = Path(f"{place.path}-wal")
    if place.path is None or not log.exists() or log.stat().st_size < 32:
        return None
    with log.open("rb") as file:
        page_size = int.from_bytes(file.read(12)[8:], "big")
    extra = (log.stat().st_size - 32) % (page_size + 24)
    return f"the last {extra} bytes of {log} are half a record and were set aside" if extra else None


def _lock_path(database: str, token: str) -> str:
    return f"{database}-writer-{token}"


def _identity(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_dev, found.st_ino
