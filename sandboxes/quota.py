"""Watching what sandboxes write, where nothing stops them while they do it; standard library only.

Owns the count and its pace. Files in memory below a memory limit need no watch: the kernel counts them there. Elsewhere
(on a disk, or without control groups) they are counted about once a second, and a sandbox that outgrew its limit is
ended a moment too late: what it can write in a second, it can have too much.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from agentgym.sandboxes.box import Box

PAUSE_S = 1.0
_SHARE = 0.05
"""Of the spawner's time that counting may take."""
_SPARE_BYTES = 1 << 20
"""More than it had when it was ended, so that it can tidy up."""


class DiskWatch:
    """Counts for the sandboxes of one spawner."""

    def __init__(self, layers: str, max_bytes: int, max_files: int) -> None:
        self._layers = layers
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._sealed: dict[str, tuple[int, int]] = {}
        """Layer that nobody writes to any more, to its bytes and files."""
        self._next = time.monotonic() + PAUSE_S

    def wait_s(self) -> float:
        """Seconds until it should look again."""
        return max(0.0, self._next - time.monotonic())

    def look(self, boxes: Iterable[Box]) -> list[Box]:
        """Those that have written more than they may, unless it is not time yet."""
        started = time.monotonic()
        if started < self._next:
            return []
        seen: set[str] = set()
        found = []
        for box in boxes:
            total, num = _count(os.path.join(self._layers, box.upper), self._max_files)
            for name in box.chain:
                if name not in self._sealed:
                    self._sealed[name] = _count(os.path.join(self._layers, name), self._max_files)
                total, num = total + self._sealed[name][0], num + self._sealed[name][1]
            seen |= set(box.chain)
            if box.was_ended:  # what it wrote between the count and its end is known only now
                box.was_ended = False
                box.had_bytes, box.had_files = total + _SPARE_BYTES, num + self._max_files // 100
            elif total > max(self._max_bytes, box.had_bytes) or num > max(self._max_files, box.had_files):
                box.was_ended = True
                found.append(box)
        self._sealed = {name: counted for name, counted in self._sealed.items() if name in seen}
        now = time.monotonic()
        self._next = now + max(PAUSE_S, (now - started) / _SHARE)
        return found


def _count(layer: str, enough: int) -> tuple[int, int]:
    """Bytes that the files of a layer take, and how many files and directories there are, until there are enough."""
    total, num = 0, 0
    for part in ("r", "u"):
        for _, folders, files, fd in os.fwalk(os.path.join(layer, part), follow_symlinks=False):
            num += len(folders) + len(files)
            for name in files:
                try:
                    total += os.stat(name, dir_fd=fd, follow_symlinks=False).st_blocks * 512
                except FileNotFoundError:
                    continue
            if num > enough:
                return total, num
    return total, num
