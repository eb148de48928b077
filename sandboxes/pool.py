"""What stands ready so that a sandbox starts soon: blanks, and the starting layers of tasks.

Owns both stocks and their limits. A blank is a sandbox with namespaces and a shell in which nothing was
typed; it is used once. A starting layer is sealed, so any number of sandboxes stand on it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict

from agentgym.errors import SandboxError
from agentgym.sandbox import FileSpec, SandboxSpec
from agentgym.sandboxes import layers
from agentgym.sandboxes.body import Body
from agentgym.sandboxes.client import Spawner
from agentgym.sandboxes.seeds import hash_seed

MAX_TEMPLATES = 256
REFILL_PAUSE_S = 0.006
"""So that the fork that took a blank answers before the next blank is made."""
ENV = [
    ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
    ("HOME", "/root"),
    ("USER", "root"),
    ("SHELL", "/bin/bash"),
    ("LANG", "C.UTF-8"),
    ("TERM", "dumb"),
]
"""Variables of every sandbox; nothing is inherited."""


def environment(spec: SandboxSpec) -> list[tuple[str, str]]:
    """Variables of a sandbox."""
    return [*ENV, ("PYTHONHASHSEED", str(hash_seed(spec.seed))), *spec.env]


class Blanks:
    """A few blank sandboxes of one spawner, made anew by a thread as they are taken."""

    def __init__(self, spawner: Spawner, num: int) -> None:
        """Begin to make `num` blanks."""
        self.spawner = spawner
        self._ready: list[Body] = []
        self._lock = threading.Lock()
        self._stopped = False
        self._wanted = threading.Semaphore(num)
        self._filler = threading.Thread(target=self._fill, daemon=True, name="sandbox-pool")
        if num:
            self._filler.start()

    def take(self, chain: list[str]) -> Body | None:
        """A blank that now stands on a chain, or None where none is ready.

        Raises:
            SandboxError: the blank broke.
        """
        with self._lock:
            blank = self._ready.pop() if self._ready else None
        if blank is None:
            return None
        try:
            self.spawner.ask("assign", box=blank.box, chain=chain)
        except SandboxError as error:
            blank.discard(self.spawner)
            raise SandboxError(f"a ready sandbox could not take its layers: {error}") from error
        finally:
            self._wanted.release()
        return blank

    def stop(self) -> None:
        """Give up all blanks; the spawner still lives."""
        with self._lock:
            self._stopped = True
            blanks, self._ready = self._ready, []
        self._wanted.release()
        for blank in blanks:
            blank.discard(None)

    def join(self) -> None:
        """Wait for the thread, which may hold a blank half-made; after the spawner was closed."""
        if self._filler.is_alive() and self.spawner.pid == os.getpid():
            self._filler.join(10.0)

    def _fill(self) -> None:
        while True:
            self._wanted.acquire()
            time.sleep(REFILL_PAUSE_S)
            blank = None
            try:
                if not self._stopped:
                    blank = Body.start(self.spawner, [])
                    blank.wait_ready()
            except SandboxError:
                self._stopped = True  # whoever needs a sandbox next is told why
            with self._lock:
                if blank is not None and not self._stopped:
                    self._ready.append(blank)
                    continue
            if blank is not None:
                blank.discard(self.spawner)
            return


class Templates:
    """Starting layers of one spawner, the last used ones kept."""

    def __init__(self) -> None:
        self._handles: OrderedDict[str, tuple[int, list[str]]] = OrderedDict()
        self._lock = threading.Lock()

    def hold(self, spawner: Spawner, spec: SandboxSpec) -> tuple[int, list[str]]:
        """The chain that a spec starts on, under a new handle for the caller to release."""
        key = spec.key()
        with self._lock:
            if key not in self._handles:
                self._handles[key] = self._make(spawner, spec)
                if len(self._handles) > MAX_TEMPLATES:
                    _, (oldest, _) = self._handles.popitem(last=False)
                    spawner.ask("release", handle=oldest)
            self._handles.move_to_end(key)
            _, chain = self._handles[key]
            return spawner.ask("hold", chain=chain)[0]["handle"], chain

    def _make(self, spawner: Spawner, spec: SandboxSpec) -> tuple[int, list[str]]:
        made, _ = spawner.ask("layer")
        files = [_absolute(file, spec.workdir) for file in spec.files]
        if spec.workdir not in {file.path.rstrip("/") for file in files}:
            files.insert(0, FileSpec(spec.workdir, "dir", mode=0o755))
        layers.write_layer(os.path.join(spawner.layers, made["layer"]), files)
        return made["handle"], [made["layer"]]


def _absolute(file: FileSpec, workdir: str) -> FileSpec:
    path = file.path if file.path.startswith("/") else f"{workdir}/{file.path}"
    return FileSpec(path, file.kind, file.data, file.mode, file.mtime_s)
