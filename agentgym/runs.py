"""Run folders: one for each rollout, with its settings, its trees and its summary.

Owns names, the lock that tells a living run from one that was killed, and finding a run again. Leaves what is
in `run.db` to `store.py`.

    runs/<time>-<name>/   config.toml   run.db   summary.json   lock
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentgym.errors import StoreError, UnknownName, UsageError

ROOT = Path("runs")
"""Under the working directory."""
DATABASE, CONFIG, SUMMARY, LOCK = "run.db", "config.toml", "summary.json", "lock"


class RunFolder:
    """The folder of a run that is being made; locked while the process lives, by the kernel."""

    def __init__(self, folder: str | Path | None, name: str) -> None:
        """Make the folder.

        Args:
            folder: Where; None: a new one under `runs/`.
            name: Last part of the id, where the folder is ours to name.

        Raises:
            UsageError: the folder holds something, or cannot be made.
        """
        self.path = _fresh(name) if folder is None else _given(Path(folder))
        self.id = self.path.name
        self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    @property
    def database(self) -> Path:
        """The store of the run."""
        return self.path / DATABASE

    def write_config(self, text: str) -> None:
        """Save the settings in effect."""
        _replace(self.path / CONFIG, text)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Save the summary; it is there whole or not at all."""
        _replace(self.path / SUMMARY, json.dumps(summary, indent=2) + "\n")

    def close(self) -> None:
        """Let go of the lock; twice is fine."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run on disk."""

    path: Path
    status: str
    """"running", "complete", "interrupted" or "failed"; "interrupted" also where a running one was killed."""
    summary: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The name of the folder."""
        return self.path.name


def find_run(name: str) -> RunRecord:
    """The run in a folder, or under `runs/` by its id or the only beginning that fits.

    Raises:
        UnknownName: there is no such run.
        UsageError: several ids begin so.
        StoreError: the folder is no run.
    """
    path = Path(name)
    if path.is_dir() and not (path / DATABASE).is_file() and (path / SUMMARY).is_file():
        raise StoreError(f"{name} has no {DATABASE}; the run ended before its first turn, make it again")
    if (path / DATABASE).is_file():
        return read_run(path)
    known = {run.id: run for run in list_runs()}
    fitting = [run_id for run_id in known if run_id.startswith(name)] if name else []
    if name in known or len(fitting) == 1:
        return known[name if name in known else fitting[0]]
    if fitting:
        raise UsageError(f"run {name!r} is not clear: {', '.join(fitting[:5])}; write more of the id")
    raise UnknownName.of("run", name, known, "`agentgym list runs` lists them; a folder with a run.db works too")


def list_runs(root: Path = ROOT) -> list[RunRecord]:
    """All runs under a folder, oldest first."""
    if not root.is_dir():
        return []
    return [read_run(path) for path in sorted(root.iterdir()) if (path / SUMMARY).is_file()]


def read_run(path: Path) -> RunRecord:
    """What is known of the run in a folder."""
    summary: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        loaded = json.loads((path / SUMMARY).read_text("utf-8"))
        summary = loaded if isinstance(loaded, dict) else {}
    status = str(summary.get("status", "interrupted"))
    if status == "running" and not _alive(path):
        status = "interrupted"
    return RunRecord(path, status, summary)


def mark_interrupted(run: RunRecord) -> bool:
    """Write down that a run was killed; False where its summary says how it ended already."""
    if run.status != "interrupted" or run.summary.get("status") != "running":
        return False
    _replace(run.path / SUMMARY, json.dumps({**run.summary, "status": "interrupted", "ok": False}, indent=2) + "\n")
    return True


def _alive(path: Path) -> bool:
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _fresh(name: str) -> Path:
    """A new folder under `runs/`; two runs that start in one second get different ones."""
    base = f"{time.strftime('%Y%m%d-%H%M%S')}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name).strip('-.')[:60] or 'run'}"
    for number in range(1, 1000):
        path = ROOT / (base if number == 1 else f"{base}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"run folder {path} cannot be made: {error.strerror}; name another with --run") from error
        return path
    raise UsageError(f"a thousand runs are called {base}; name a folder with --run")


def _given(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise UsageError(f"run folder {path} holds something already; name a new one")
    except OSError as error:
        raise UsageError(f"run folder {path} cannot be made: {error.strerror}; name another") from error
    return path


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, "utf-8")
    os.replace(part, path)
