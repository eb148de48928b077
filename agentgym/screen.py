"""What commands write: rows and summaries for machines, tables and progress for people.

Owns the rule of `--json` (one object a line on standard output, the summary last) and progress with rate and
time left. People's progress goes to standard error, so that standard output can be piped.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

EVERY_S = 2.0
"""Between two plain lines of progress."""


class Screen:
    """Where a command writes; silent for people when a machine listens."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json

    def row(self, record: Mapping[str, Any]) -> None:
        """One object for machines."""
        if self.as_json:
            print(json.dumps(_finite(record), default=str), flush=True)

    def say(self, text: str = "") -> None:
        """One line for people."""
        if not self.as_json:
            print(_spelled(text, sys.stdout))

    def warn(self, text: str) -> None:
        """One loud line for people, machine or not."""
        print(_spelled(f"WARNING: {text}", sys.stderr), file=sys.stderr, flush=True)

    def error(self, text: str) -> None:
        """What went wrong, in one line."""
        print(_spelled(f"error: {text}", sys.stderr), file=sys.stderr, flush=True)

    def finish(self, summary: Mapping[str, Any]) -> int:
        """The last object for machines; gives the exit code: its own, or what "ok" means."""
        self.row(summary)
        return int(summary.get("exit_code", 0 if summary["ok"] else 1))

    def table(self, rows: Sequence[Sequence[object]], head: Sequence[str]) -> None:
        """Aligned columns for people; the last one may be long."""
        if self.as_json or not rows:
            return
        texts = [[str(cell) for cell in row] for row in (head, *rows)]
        widths = [max(len(row[i]) for row in texts) for i in range(len(head) - 1)]
        for row in texts:
            padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            self.say("  ".join([*padded, row[-1]]).rstrip())


def _finite(value: Any) -> Any:
    """The value with numbers that JSON cannot spell as texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _spelled(text: str, file: IO[str]) -> str:
    encoding = getattr(file, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


class Progress:
    """How far something is: a bar on a terminal, a plain line every two seconds elsewhere."""

    def __init__(self, what: str, total: int, *, file: IO[str] | None = None) -> None:
        self.what = what
        self.total = total
        self.file = file or sys.stderr
        self.started = time.monotonic()
        self._said = self.started
        self._bar: RichProgress | None = None

    def __enter__(self) -> Self:
        if self.file.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                TimeRemainingColumn(),
            )
            # output that others print must not be caught: machines read it
            console = Console(file=self.file)
            self._bar = Progress(
                *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._task = self._bar.add_task(self.what, total=self.total, note="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, note: str = "") -> None:
        """Say how much is done; cheap, so call it as often as there is news."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=note)
            return
        now = time.monotonic()
        if now - self._said < EVERY_S:
            return
        self._said = now
        line = ", ".join(filter(None, [f"{self.what}: {done}/{self.total}", note, self.time_left(done)]))
        print(_spelled(line, self.file), file=self.file, flush=True)

    def time_left(self, done: int) -> str:
        """A guess from the rate so far; empty before anything is done."""
        if not done:
            return ""
        left_s = (time.monotonic() - self.started) / done * (self.total - done)
        return f"{left_s:.0f} s left" if left_s < 120 else f"{left_s / 60:.0f} min left"
