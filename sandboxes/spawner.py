"""The process that makes every sandbox: started before anything heavy is imported; standard library only.

Owns the state folder of one run, its layers and their reference counts, and every fork and mount. The library
speaks to it over one socket. When that socket closes, for whatever reason, it ends all sandboxes, removes
the folder and exits; each sandbox in turn dies with it.

    <state>/<pid>-<random>/  lock  layers/<id>/{r,w,u,x}  layers/base/r  dev/  binds/  mnt/  old/  trash/

The folder lies in memory, on a tmpfs that only the spawner and its sandboxes see: an overlay mount takes
0.06 ms there and 4 ms on a journalling disk, and when the last process dies the kernel frees everything.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
from typing import Any

from agentgym.sandboxes import base, box, cgroups, overlay, wire
from agentgym.sandboxes import syscalls as sc

_NAMESPACES = sc.CLONE_NEWNS | sc.CLONE_NEWPID | sc.CLONE_NEWUTS | sc.CLONE_NEWIPC | sc.CLONE_NEWNET
COPY_LIMIT_BYTES = 256 << 20


class Spawner:
    """Answers requests one at a time; a request that forks returns while the child still sets itself up."""

    def __init__(self, state: str, library: socket.socket) -> None:
        self.state = state
        self.layers = os.path.join(state, "layers")
        self.caller = library
        self.userxattr = False
        self.binds: list[str] = []
        self.boxes: dict[int, tuple[int, str, list[str]]] = {}
        """Box id to (pid, upper layer, chain)."""
        self.holds: dict[int, list[str]] = {}
        """Snapshot handle to chain."""
        self.references: dict[str, int] = {}
        self.environment: dict[str, str] = {}
        self.cgroups = cgroups.Cgroups(os.path.basename(state))
        self.memory_bytes = self.max_pids = 0
        """Of each sandbox, where it has control groups."""
        self.usr_layers: set[str] = set()
        """Sealed layers that change /usr; the others need not be looked at there."""
        self.short: dict[str, tuple[int, str, int]] = {}
        """Top layer of a long chain to (how many layers, the one that stands for them, its handle)."""
        self.next_id = 0
        self.trash_pipe = -1
        self.reaper = 0

    def open(self, in_memory: bool) -> None:
        """Enter private namespaces, make the folder, lay out base and devices."""
        user, group = os.getuid(), os.getgid()
        self.userxattr = user != 0
        sc.unshare(sc.CLONE_NEWNS | (sc.CLONE_NEWUSER if self.userxattr else 0))
        if self.userxattr:
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"0 {user} 1")
            _write("/proc/self/gid_map", f"0 {group} 1")
        sc.mount(None, "/", None, sc.MS_REC | sc.MS_PRIVATE)
        if in_memory:
            sc.move_mount(sc.new_mount("tmpfs", [("mode", "700")]), "", sc.AT_FDCWD, self.state)
        for name in ("layers", "dev", "binds", "mnt", "old", "trash"):
            os.mkdir(os.path.join(self.state, name), 0o755)
        overlay.make_layer(self.layers, overlay.BASE)
        self.binds = base.make_skeleton(os.path.join(self.layers, overlay.BASE, "r"))
        for name in self.binds:
            point = os.path.join(self.state, "binds", name)
            os.mkdir(point)
            fd = sc.open_tree("/" + name)
            sc.set_mount_attributes(fd, sc.ATTR_RDONLY | sc.ATTR_NOSUID | sc.ATTR_NODEV)
            sc.move_mount(fd, "", sc.AT_FDCWD, point)
            os.close(fd)
        self._make_devices(os.path.join(self.state, "dev"))
        self._start_reaper()
        try:
            probe = self._new_layer()
            os.close(overlay.mount_root(self.layers, probe, [], self.userxattr))
        except OSError as error:
            if "lowerdir+" not in str(error):
                raise
            overlay.use_old_mount_call()
            os.close(overlay.mount_root(self.layers, probe, [], self.userxattr))
        self._discard(probe)

    def serve(self) -> None:
        """Answer until the library goes away, then clean up."""
        woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        poller = select.poll()
        poller.register(self.caller, select.POLLIN)
        poller.register(woken, select.POLLIN)
        with contextlib.suppress(EOFError, BrokenPipeError):
            while True:
                for fd, _ in poller.poll():
                    if fd == woken:
                        with contextlib.suppress(BlockingIOError):
                            os.read(woken, 4096)
                    else:
                        self._answer()
        self.close()

    def close(self) -> None:
        """End every sandbox, remove everything."""
        for pid, _, _ in self.boxes.values():
            # all first, then each is waited for: the kernel takes a thousand down side by side
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for number in list(self.boxes):
            self.do_close([], number)
        self.cgroups.close()
        os.close(self.trash_pipe)
        os.waitpid(self.reaper, 0)

    def _answer(self) -> None:
        request, fds = wire.receive(self.caller)
        given: list[int] = []
        try:
            answer, given = getattr(self, "do_" + request.pop("do"))(fds, **request)
        except (OSError, ValueError) as error:
            answer = {"error": str(error)}
        wire.send(self.caller, answer, given)
        for fd in (*fds, *given):
            with contextlib.suppress(OSError):
                os.close(fd)

    # requests

    def do_hello(
        self, fds: list[int], environment: dict[str, str], memory_bytes: int | None, max_pids: int | None
    ) -> tuple[dict[str, Any], list[int]]:
        """Take what holds for all sandboxes; say where the layers lie and which limits hold."""
        self.environment = environment
        if memory_bytes is not None and max_pids is not None:
            self.memory_bytes, self.max_pids = memory_bytes, max_pids
            self.cgroups = cgroups.Cgroups.open(os.path.basename(self.state))
        return {"layers": self.layers, "userxattr": self.userxattr, "limited": sorted(self.cgroups.homes)}, []

    def do_layer(self, fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        """Give an empty layer for the library to fill (`r` and `u`), held under a new handle."""
        name = self._new_layer()
        self.usr_layers.add(name)
        return {"layer": name, "handle": self._hold([name])}, []

    def do_hold(self, fds: list[int], chain: list[str]) -> tuple[dict[str, Any], list[int]]:
        """Keep a chain under one handle more."""
        return {"handle": self._hold(chain)}, []

    def do_flattened(
        self, fds: list[int], chain: list[str], layer: str, handle: int
    ) -> tuple[dict[str, Any], list[int]]:
        """Let a layer stand for a chain from now on, as long as the chain's top is in use."""
        if chain[0] in self.references and chain[0] not in self.short:
            self.short[chain[0]] = (len(chain), layer, handle)
        else:
            self.do_release([], handle)
        return {}, []

    def do_create(
        self, fds: list[int], chain: list[str], world: list[str] | None = None
    ) -> tuple[dict[str, Any], list[int]]:
        """Start a sandbox over a chain; fds are those of `box.run`."""
        chain = self._shortened(chain)
        if len(chain) >= overlay.MAX_DEPTH:
            raise ValueError(f"a chain of {len(chain)} layers; at most {overlay.MAX_DEPTH} can be stacked")
        upper = self._new_layer()
        self.next_id += 1
        number = self.next_id
        views = [(chain, self._in_usr(chain))] + ([(world, self._in_usr(world))] if world else [])
        doors = self.cgroups.make(number, self.memory_bytes, self.max_pids)
        # files count as memory: one that fills it would leave no room to delete it
        max_file = self.memory_bytes // 2
        plan = box.Plan(self.layers, upper, views, self.binds, self.userxattr, self.environment, doors, max_file)
        pid = sc.clone(_NAMESPACES)
        if pid == 0:
            code = 1
            try:
                box.run(fds, plan)
                code = 0
            except BaseException as error:
                if not isinstance(error, OSError):
                    sys.excepthook(type(error), error, error.__traceback__)
            finally:
                os._exit(code)
        self._refer([upper, *chain, *(world or [])], 1)
        self.boxes[number] = (pid, upper, [*chain, *(world or [])])
        return {"box": number, "pid": pid}, []

    def do_oom(self, fds: list[int], box: int) -> tuple[dict[str, Any], list[int]]:
        """How many processes of a sandbox ended for want of memory."""
        return {"kills": self.cgroups.oom_kills(box)}, []

    def do_assign(self, fds: list[int], box: int, chain: list[str]) -> tuple[dict[str, Any], list[int]]:
        """Hand out mounts that put a blank box on a chain."""
        pid, blank, _ = self.boxes[box]
        chain = self._shortened(chain)
        fresh = self._new_layer()
        given = [
            overlay.mount_root(self.layers, fresh, chain, self.userxattr),
            overlay.mount_usr(self.layers, fresh, self._in_usr(chain), self.userxattr),
        ]
        self._refer([fresh, *chain], 1)
        self.boxes[box] = (pid, fresh, chain)
        self._refer([blank], -1)
        return {}, given

    def do_seal(self, fds: list[int], box: int, copy: bool) -> tuple[dict[str, Any], list[int]]:
        """Freeze what a box wrote: hand out the mounts for a rotation, or copy while its tasks are stopped."""
        pid, upper, chain = self.boxes[box]
        root_changed = overlay.changed(self.layers, upper, "r")
        usr_changed = overlay.changed(self.layers, upper, "u")
        if not root_changed and not usr_changed:
            return {"handle": self._hold(chain), "chain": chain}, []
        if len(chain) + 1 >= overlay.MAX_DEPTH:
            raise ValueError(f"a chain of {len(chain) + 1} layers; at most {overlay.MAX_DEPTH} can be stacked")
        if copy:
            sealed = [self._copy(upper), *chain]
            self.usr_layers |= {sealed[0]} if usr_changed else set()
            return {"handle": self._hold(sealed), "chain": sealed}, []
        sealed = [upper, *self._shortened(chain)]
        self.usr_layers |= {upper} if usr_changed else set()
        fresh = self._new_layer()
        given = [overlay.mount_root(self.layers, fresh, sealed, self.userxattr)]
        if usr_changed or len(sealed) <= len(chain):
            given.append(overlay.mount_usr(self.layers, fresh, self._in_usr(sealed), self.userxattr))
        handle = self._hold(sealed)
        self._refer([fresh, *sealed], 1)
        self.boxes[box] = (pid, fresh, sealed)
        self._refer([upper, *chain], -1)
        return {"handle": handle, "chain": sealed}, given

    def do_release(self, fds: list[int], handle: int) -> tuple[dict[str, Any], list[int]]:
        """Give a snapshot up; its layers go when nothing else stands on them."""
        self._refer(self.holds.pop(handle), -1)
        return {}, []

    def do_close(self, fds: list[int], box: int) -> tuple[dict[str, Any], list[int]]:
        """End a sandbox; its files go in the background."""
        if box in self.boxes:
            pid, upper, chain = self.boxes.pop(box)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            self.cgroups.remove(box)
            self._refer([upper, *chain], -1)
        return {}, []

    # inside

    def _shortened(self, chain: list[str]) -> list[str]:
        if chain and chain[0] in self.short:
            num, layer, _ = self.short[chain[0]]
            return [layer, *chain[num:]]
        for depth, name in enumerate(chain):
            if name in self.short:
                num, layer, _ = self.short[name]
                return [*chain[:depth], layer, *chain[depth + num :]]
        return chain

    def _in_usr(self, chain: list[str]) -> list[str]:
        return [name for name in chain if name in self.usr_layers]

    def _new_layer(self) -> str:
        self.next_id += 1
        name = f"{self.next_id:x}"
        overlay.make_layer(self.layers, name)
        return name

    def _hold(self, chain: list[str]) -> int:
        self.next_id += 1
        self.holds[self.next_id] = chain
        self._refer(chain, 1)
        return self.next_id

    def _refer(self, names: list[str], change: int) -> None:
        for name in names:
            count = self.references.get(name, 0) + change
            self.references[name] = count
            if count == 0:
                del self.references[name]
                self.usr_layers.discard(name)
                if name in self.short:
                    self.do_release([], self.short.pop(name)[2])
                self._discard(name)

    def _discard(self, name: str) -> None:
        os.rename(os.path.join(self.layers, name), os.path.join(self.state, "trash", name))
        os.write(self.trash_pipe, name.encode() + b"\n")

    def _copy(self, upper: str) -> str:
        source = os.path.join(self.layers, upper)
        size = tree_size(os.path.join(source, "r")) + tree_size(os.path.join(source, "u"))
        if size > COPY_LIMIT_BYTES:
            raise ValueError(f"{size} bytes to copy while processes are alive; at most {COPY_LIMIT_BYTES}")
        name = self._new_layer()
        target = os.path.join(self.layers, name)
        for part in ("r", "u"):
            subprocess.run(
                ["cp", "-a", "--reflink=auto", f"{source}/{part}/.", f"{target}/{part}/"],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        return name

    def _make_devices(self, point: str) -> None:
        sc.move_mount(sc.new_mount("tmpfs", [("size", "64k"), ("mode", "755")]), "", sc.AT_FDCWD, point)
        for name in base.DEVICES:
            if stat.S_ISCHR(os.stat("/dev/" + name).st_mode):
                target = os.path.join(point, name)
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o666))
                sc.mount("/dev/" + name, target, None, sc.MS_BIND)
        for name, target in base.DEVICE_LINKS.items():
            os.symlink(target, os.path.join(point, name))
        os.mkdir(os.path.join(point, "shell"))
        os.symlink(f"/proc/self/fd/{box.COMMAND_FD}", os.path.join(point, "shell", "bash"))
        sc.mount(None, point, None, sc.MS_REMOUNT | sc.MS_BIND | sc.MS_RDONLY | sc.MS_NOSUID | sc.MS_NOEXEC)

    def _start_reaper(self) -> None:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(write)
                os.setsid()
                _reap(read, self.state)
            finally:
                os._exit(0)
        os.close(read)
        os.set_inheritable(write, False)
        self.trash_pipe, self.reaper = write, pid


def _reap(pipe: int, state: str) -> None:
    """Delete what is put into the trash; when the pipe closes, delete the whole folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sc.close_range(pipe + 1)
    with open(pipe, encoding="ascii") as names:
        for name in names:
            remove_tree(os.path.join(state, "trash", name.strip()))
    for name in ("dev", *(f"binds/{bind}" for bind in os.listdir(os.path.join(state, "binds")))):
        with contextlib.suppress(OSError):
            sc.umount(os.path.join(state, name))
    with contextlib.suppress(OSError):
        sc.umount(state)
    remove_tree(state)


def remove_tree(path: str) -> None:
    """Delete a folder of layers: links are not followed, and work folders of mode 000 are opened first."""
    # a work folder that cannot be listed is the only thing that a plain removal stumbles over
    for folder, names, _, fd in os.fwalk(path, onerror=None, follow_symlinks=False):
        for name in names:
            with contextlib.suppress(OSError):
                if os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode & 0o700 != 0o700:
                    os.chmod(os.path.join(folder, name), 0o700)
    shutil.rmtree(path, ignore_errors=True)


def tree_size(path: str) -> int:
    """Bytes of all files below a folder."""
    total = 0
    for _, _, files, fd in os.fwalk(path, follow_symlinks=False):
        total += sum(os.stat(name, dir_fd=fd, follow_symlinks=False).st_size for name in files)
    return total


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def main(state: str, socket_fd: int, in_memory: bool) -> None:
    """Run over an inherited socket; the first message is {} or {"error": why}."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # a Ctrl-C reaches the whole process group; the library decides, by closing the socket
        signal.signal(number, signal.SIG_IGN)
    library = socket.socket(fileno=socket_fd)
    library.set_inheritable(False)
    lock = os.open(os.path.join(state, "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    spawner = Spawner(state, library)
    try:
        spawner.open(in_memory)
    except OSError as error:
        wire.send(library, {"error": str(error)})
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    wire.send(library, {})
    spawner.serve()
