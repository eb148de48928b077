"""The layers of a run: made, counted, copied, given up; standard library only.

Owns names and reference counts. A layer is kept for as long as a sandbox or a snapshot stands on it.
"""

from __future__ import annotations

import os
import subprocess

from agentgym.sandboxes import overlay
from agentgym.sandboxes.trash import Trash

COPY_LIMIT_BYTES = 256 << 20


class Shelf:
    """All layers of one spawner."""

    def __init__(self, layers: str, trash: Trash) -> None:
        self.layers = layers
        self.usr_layers: set[str] = set()
        """Sealed layers that change /usr; the others need not be looked at there."""
        self._trash = trash
        self._holds: dict[int, list[str]] = {}
        """Snapshot handle to chain."""
        self._references: dict[str, int] = {}
        self._short: dict[str, tuple[int, str, int]] = {}
        """Top layer of a long chain to (how many layers, the one that stands for them, its handle)."""
        self._next_id = 0

    def new_layer(self) -> str:
        """An empty layer, which nothing stands on yet."""
        self._next_id += 1
        name = f"{self._next_id:x}"
        overlay.make_layer(self.layers, name)
        return name

    def hold(self, chain: list[str]) -> int:
        """Keep a chain under a new handle."""
        self._next_id += 1
        self._holds[self._next_id] = chain
        self.refer(chain, 1)
        return self._next_id

    def release(self, handle: int) -> None:
        """Give a handle up."""
        self.refer(self._holds.pop(handle), -1)

    def refer(self, names: list[str], change: int) -> None:
        """Count who stands on layers; one that nobody stands on goes."""
        for name in names:
            count = self._references.get(name, 0) + change
            self._references[name] = count
            if count == 0:
                del self._references[name]
                self.usr_layers.discard(name)
                if name in self._short:
                    self.release(self._short.pop(name)[2])
                self.discard(name)

    def discard(self, name: str) -> None:
        """Delete a layer in the background."""
        self._trash.take(os.path.join(self.layers, name))

    def flattened(self, chain: list[str], layer: str, handle: int) -> None:
        """Let a layer stand for a chain from now on, as long as the chain's top is in use."""
        if chain[0] in self._references and chain[0] not in self._short:
            self._short[chain[0]] = (len(chain), layer, handle)
        else:
            self.release(handle)

    def shortened(self, chain: list[str]) -> list[str]:
        """The same files in fewer layers, where a flattened layer stands for some."""
        for depth, name in enumerate(chain):
            if name in self._short:
                num, layer, _ = self._short[name]
                return [*chain[:depth], layer, *chain[depth + num :]]
        return chain

    def in_usr(self, chain: list[str]) -> list[str]:
        """Those layers that change /usr."""
        return [name for name in chain if name in self.usr_layers]

    def copy(self, upper: str) -> str:
        """A copy of a layer whose processes are stopped.

        Raises:
            ValueError: it is too large to copy while they wait.
        """
        source = os.path.join(self.layers, upper)
        size = tree_size(os.path.join(source, "r")) + tree_size(os.path.join(source, "u"))
        if size > COPY_LIMIT_BYTES:
            raise ValueError(f"{size} bytes to copy while processes are alive; at most {COPY_LIMIT_BYTES}")
        name = self.new_layer()
        target = os.path.join(self.layers, name)
        for part in ("r", "u"):
            subprocess.run(
                ["cp", "-a", "--reflink=auto", f"{source}/{part}/.", f"{target}/{part}/"],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        return name


def tree_size(path: str) -> int:
    """Bytes of all files below a folder."""
    total = 0
    for _, _, files, fd in os.fwalk(path, follow_symlinks=False):
        total += sum(os.stat(name, dir_fd=fd, follow_symlinks=False).st_size for name in files)
    return total
