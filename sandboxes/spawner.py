"""The process that makes every sandbox: started before anything heavy is imported; standard library only.

Owns the state folder of one run, its layers and their reference counts, and every sandbox; `box` makes and keeps each.
The library speaks to it over one socket. When that socket closes, for whatever reason, it ends all sandboxes, removes
the folder and exits; each sandbox in turn dies with it.

    <state>/<pid>-<random>/  lock  layers/<id>/{r,w,u,x}  layers/base/r  dev/  binds/  mnt/  old/  trash/  init

The folder lies in memory, on a tmpfs that only the spawner and its sandboxes see: an overlay mount takes
0.06 ms there and 4 ms on a journalling disk, and when the last process dies the kernel frees everything.

What it starts has no rights beyond a short list, since it has given them up for all that it executes and set a filter
on itself; it executes nothing but the first process and the programs of sandboxes.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import stat
from dataclasses import dataclass
from typing import Any

from agentgym.sandboxes import base, cgroups, first, hostfiles, inside, overlay, quota, seccomp, shelf, trash, wire
from agentgym.sandboxes import syscalls as sc
from agentgym.sandboxes.box import COMMAND_FD, Box, Kind
from agentgym.sandboxes.limiter import Limiter
from agentgym.sandboxes.pen import Pens

# chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service, sys_chroot
_KEPT_CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 10, 18})

Answer = tuple[dict[str, Any], list[int]]


@dataclass(frozen=True, slots=True)
class Order:
    """What the library says at the start."""

    socket: int
    """Inherited descriptor through which the library speaks."""
    in_memory: bool
    environment: dict[str, str]
    """Of every shell."""
    limits: dict[str, Any] | None
    """Fields of `cgroups.Limits`, where there are control groups."""


class Spawner:
    """Answers requests one at a time."""

    def __init__(self, state: str, library: socket.socket, order: Order, rootless: bool) -> None:
        self.state = state
        self.layers = os.path.join(state, "layers")
        self.caller = library
        self.order = order
        self.userxattr = rootless
        self.boxes: dict[int, Box] = {}
        self.owners: dict[int, Box] = {}
        """Number of a process that we started to its sandbox."""
        self.controls: dict[int, Box] = {}
        """Descriptor of a sandbox's control socket to it."""
        self.next_id = 0

    def open(self) -> None:
        """Enter private namespaces, make the folder, lay out base and devices, give up rights."""
        if not self.userxattr:
            sc.unshare(sc.CLONE_NEWNS)
        sc.mount(None, "/", None, sc.MS_REC | sc.MS_PRIVATE)
        if self.userxattr:
            # the numbers of our own namespace, which is not the host's
            sc.mount("proc", "/proc", "proc", sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC)
        if self.order.in_memory:
            sc.move_mount(sc.new_mount("tmpfs", [("mode", "700")]), "", sc.AT_FDCWD, self.state)
        for name in ("layers", "dev", "binds", "mnt", "old", "trash"):
            os.mkdir(os.path.join(self.state, name), 0o755)
        overlay.make_layer(self.layers, overlay.BASE)
        binds = base.make_skeleton(os.path.join(self.layers, overlay.BASE, "r"))
        for name in binds:
            point = os.path.join(self.state, "binds", name)
            os.mkdir(point)
            fd = sc.open_tree("/" + name)
            sc.set_mount_attributes(fd, sc.ATTR_RDONLY | sc.ATTR_NOSUID | sc.ATTR_NODEV)
            sc.move_mount(fd, "", sc.AT_FDCWD, point)
            os.close(fd)
        self._make_devices(os.path.join(self.state, "dev"))
        self.trash = trash.Trash(self.state)
        self.shelf = shelf.Shelf(self.layers, self.trash)
        self.home = inside.Home(self.trash.pid)
        self.cgroups = cgroups.Cgroups(os.path.basename(self.state))
        self.limiter = None
        self.disk_watch = None
        limits = cgroups.Limits(**self.order.limits) if self.order.limits else None
        if limits is not None:
            self.cgroups = cgroups.Cgroups.open(os.path.basename(self.state))
            self.limiter = Limiter(self.cgroups, limits) if self.cgroups.homes else None
            if not (self.order.in_memory and "memory" in self.cgroups.homes):
                self.disk_watch = quota.DiskWatch(self.layers, limits.disk_bytes, limits.disk_files)
        self.pens = Pens(self.limiter)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # two for each sandbox
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        lifeline, self.life = os.pipe2(os.O_CLOEXEC)
        # files count as memory: one that fills it would leave no room to delete it
        max_file_bytes = limits.memory_bytes // 2 if limits else 0
        program = os.path.join(self.state, "init")
        first.place(program)
        self.kind = Kind(
            self.state,
            binds=binds,
            userxattr=self.userxattr,
            environment=self.order.environment,
            first=program,
            lifeline=lifeline,
            max_file_bytes=max_file_bytes,
            max_files=soft,
        )
        self._give_up_rights()
        self._probe()

    def serve(self) -> None:
        """Answer until the library goes away, then clean up."""
        woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self.poller = select.epoll()
        self.poller.register(self.caller, select.EPOLLIN)
        self.poller.register(woken, select.EPOLLIN)
        with contextlib.suppress(EOFError, BrokenPipeError):
            while True:
                for fd, _ in self.poller.poll(self.disk_watch.wait_s() if self.disk_watch and self.boxes else None):
                    if fd == self.caller.fileno():
                        self._answer()
                    elif fd == woken:
                        with contextlib.suppress(BlockingIOError):
                            os.read(woken, 4096)
                        self._note_ends()
                    elif fd in self.controls and _let_go(self.controls[fd].control):
                        self._end(self.controls[fd])
                for box in self.disk_watch.look(self.boxes.values()) if self.disk_watch else ():
                    box.outgrown = True
                    self._kill_shell(box)
        self.close()

    def close(self) -> None:
        """End every sandbox, remove everything."""
        # all first, then each is waited for: the kernel takes a thousand down side by side
        for box in self.boxes.values():
            box.condemn()
        for box in list(self.boxes.values()):
            self._end(box)
        self.pens.close()
        if self.limiter is not None:
            self.limiter.close()
        self.trash.close()

    def _answer(self) -> None:
        request, fds = wire.receive(self.caller)
        given: list[int] = []
        try:
            answer, given = getattr(self, "do_" + request.pop("do"))(fds, **request)
        except (OSError, ValueError) as error:
            answer = {"error": str(error), "errno": getattr(error, "errno", None)}
        wire.send(self.caller, answer, given)
        for fd in (*fds, *given):
            with contextlib.suppress(OSError):
                os.close(fd)

    # requests about layers

    def do_layer(self, fds: list[int]) -> Answer:
        """Give an empty layer for the library to fill (`r` and `u`), held under a new handle."""
        name = self.shelf.new_layer()
        self.shelf.usr_layers.add(name)
        return {"layer": name, "handle": self.shelf.hold([name])}, []

    def do_hold(self, fds: list[int], chain: list[str]) -> Answer:
        """Keep a chain under one handle more."""
        return {"handle": self.shelf.hold(chain)}, []

    def do_flattened(self, fds: list[int], chain: list[str], layer: str, handle: int) -> Answer:
        """Let a layer stand for a chain from now on, as long as the chain's top is in use."""
        self.shelf.flattened(chain, layer, handle)
        return {}, []

    def do_release(self, fds: list[int], handle: int) -> Answer:
        """Give a snapshot up; its layers go when nothing else stands on them."""
        self.shelf.release(handle)
        return {}, []

    # requests about sandboxes

    def do_create(self, fds: list[int], chain: list[str], world: list[str] | None = None) -> Answer:
        """Make a sandbox over a chain; fds are its control socket, and those of `Box.build`."""
        chain = self.shelf.shortened(chain)
        if len(chain) >= overlay.MAX_DEPTH:
            raise ValueError(f"a chain of {len(chain)} layers; at most {overlay.MAX_DEPTH} can be stacked")
        views = [(chain, self.shelf.in_usr(chain))] + ([(world, self.shelf.in_usr(world))] if world else [])
        control = socket.socket(fileno=fds.pop(0))
        control.setblocking(False)
        self.next_id += 1
        box = Box(self.next_id, control, self.kind, self.home, self.shelf.new_layer(), [*chain, *(world or [])])
        self.shelf.refer([box.upper, *box.chain], 1)
        self.boxes[box.number] = self.controls[control.fileno()] = box
        try:
            box.build(views, fds)
        except OSError:
            self._end(box)
            raise
        self.owners[box.first] = box
        self._started(box, box.shell)
        self.poller.register(control, 0)  # only for its end
        return {"box": box.number, "pid": box.first}, []

    def do_assign(self, fds: list[int], box: int, chain: list[str]) -> Answer:
        """Put a blank sandbox on a chain."""
        chain = self.shelf.shortened(chain)
        upper = self.shelf.new_layer()
        self._exchange(self._box(box), upper, chain, self._mounts(upper, chain, with_usr=True))
        return {}, []

    def do_seal(self, fds: list[int], box: int, settle: bool, copy: bool = False) -> Answer:
        """Freeze what a sandbox wrote, if nothing but its idle shell is alive; else tell what is.

        Args:
            fds: None.
            box: Number of the sandbox.
            settle: Stop its tasks and copy, where something is alive.
            copy: Copy in any case, for what writes to its files from a pen; the caller has stopped that.

        Returns:
            "tasks", "files" and "cwd" of `Box.alive`; if it is frozen, "handle" and "chain" of the result, and
            "exchange" where the sandbox must change its root before it goes on.
        """
        one = self._box(box)
        alive = one.alive()
        if (alive["tasks"] or alive["files"]) and not settle:
            return alive, []
        if alive["tasks"]:
            one.freeze()
            try:
                alive = one.alive()
                return {**alive, **self._seal(one, copy=copy or bool(alive["tasks"] or alive["files"]))}, []
            finally:
                one.thaw()
        return {**alive, **self._seal(one, copy=copy or bool(alive["files"]))}, []

    def do_exchange(self, fds: list[int], box: int) -> Answer:
        """Go on over the layer that was sealed: after this the shell must enter its directory anew."""
        one = self._box(box)
        mounts, one.fresh = one.fresh, []
        try:
            one.exchange_root(mounts)
        except OSError:
            self._end(one)
            raise
        finally:
            for fd in mounts:
                os.close(fd)
        return {}, []

    def do_open(self, fds: list[int], box: int, path: str, write: bool, mode: int, above: int) -> Answer:
        """Open a regular file as the sandbox sees it; `above` is the mode of directories made for it."""
        root = self._box(box).root()
        try:
            fd = hostfiles.open_regular(root, path, write=write, mode=mode, above=above)
        finally:
            os.close(root)
        return {}, [fd]

    def do_kill(self, fds: list[int], box: int) -> Answer:
        """End every process of a sandbox but its first, and say how many are left."""
        one = self._box(box)
        for pid in one.programs:
            self.owners.pop(pid, None)
        return {"left": one.kill_all()}, []

    def do_shell(self, fds: list[int], box: int) -> Answer:
        """Start a shell on (commands, output, errors, status, script)."""
        one = self._box(box)
        one.start_shell(fds)
        self._started(one, one.shell)
        return {}, []

    def do_start(self, fds: list[int], box: int, argv: list[str], environment: dict[str, str]) -> Answer:
        """Start a program that sees a sandbox's files and may outlive it, on descriptors from 0 up."""
        self.next_id += 1
        self.pens.start(self.next_id, self._box(box), argv, environment, fds)
        return {"pen": self.next_id}, []

    def do_view(self, fds: list[int], box: int, pen: int) -> Answer:
        """Give a descriptor of the root that a sandbox has now, for what lives in a pen."""
        return {}, [self.pens.of(pen).view(self._box(box))]

    def do_limit(self, fds: list[int], pen: int, process: int, box: int | None = None) -> Answer:
        """Count a process of a pen among those of a sandbox; None: of the pen again, as it did at its start."""
        number = self.pens.of(pen).number if box is None else self._box(box).number
        if self.limiter is not None:
            self.limiter.join(number, process)
        return {}, []

    def do_oom(self, fds: list[int], box: int) -> Answer:
        """How many processes of a sandbox ended for want of memory."""
        return {"kills": self.cgroups.oom_kills(box)}, []

    def do_close(self, fds: list[int], box: int) -> Answer:
        """End a sandbox; its files go in the background."""
        if box in self.boxes:
            self._end(self.boxes[box])
        return {}, []

    # inside

    def _box(self, number: int) -> Box:
        if number not in self.boxes:
            raise ValueError("its first process ended")
        return self.boxes[number]

    def _started(self, box: Box, pid: int) -> None:
        self.owners[pid] = box
        if self.limiter is not None:
            self.limiter.join(box.number, pid, box.control)

    def _note_ends(self) -> None:
        """Wait for what has ended: a shell is told of, a first process takes its sandbox with it."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.pens.note_end(pid)
            box = self.owners.pop(pid, None)
            if box is None:
                continue
            box.programs.discard(pid)
            if pid == box.first:
                self._end(box)
            elif pid == box.shell:
                box.shell = 0
                self._tell_end(box, os.waitstatus_to_exitcode(status))

    def _tell_end(self, box: Box, status: int) -> None:
        event = {"event": "exit", "status": status, "outgrown": box.outgrown}
        box.outgrown = False
        with contextlib.suppress(OSError):
            wire.send(box.control, event)

    def _kill_shell(self, box: Box) -> None:
        """End everything in a sandbox as if its shell had been killed."""
        with contextlib.suppress(OSError):
            had_shell = bool(box.shell)
            self.do_kill([], box.number)
            if had_shell:
                self._tell_end(box, -signal.SIGKILL)

    def _end(self, box: Box) -> None:
        del self.boxes[box.number], self.controls[box.control.fileno()]
        for pid in (box.first, *box.programs):
            self.owners.pop(pid, None)
        with contextlib.suppress(OSError, ValueError):
            self.poller.unregister(box.control)
        if box.first:
            box.condemn()
            box.bury()
        else:
            box.control.close()
        if self.limiter is not None:
            self.limiter.leave(box.number)
        self.shelf.refer([box.upper, *box.chain], -1)

    def _seal(self, box: Box, copy: bool) -> dict[str, Any]:
        root_changed = overlay.changed(self.layers, box.upper, "r")
        usr_changed = overlay.changed(self.layers, box.upper, "u")
        if not root_changed and not usr_changed:
            return {"handle": self.shelf.hold(box.chain), "chain": box.chain}
        if len(box.chain) + 1 >= overlay.MAX_DEPTH:
            raise ValueError(f"a chain of {len(box.chain) + 1} layers; at most {overlay.MAX_DEPTH} can be stacked")
        if copy:
            sealed = [self.shelf.copy(box.upper), *box.chain]
            self.shelf.usr_layers |= {sealed[0]} if usr_changed else set()
            return {"handle": self.shelf.hold(sealed), "chain": sealed}
        sealed = [box.upper, *self.shelf.shortened(box.chain)]
        self.shelf.usr_layers |= {box.upper} if usr_changed else set()
        upper = self.shelf.new_layer()
        box.fresh = self._mounts(upper, sealed, with_usr=usr_changed or len(sealed) <= len(box.chain))
        handle = self.shelf.hold(sealed)
        self._move(box, upper, sealed)
        return {"handle": handle, "chain": sealed, "exchange": True}

    def _mounts(self, upper: str, chain: list[str], with_usr: bool) -> list[int]:
        made = [overlay.mount_root(self.layers, upper, chain, self.userxattr)]
        if with_usr:
            made.append(overlay.mount_usr(self.layers, upper, self.shelf.in_usr(chain), self.userxattr))
        return made

    def _exchange(self, box: Box, upper: str, chain: list[str], mounts: list[int]) -> None:
        self._move(box, upper, chain)
        box.fresh = mounts
        self.do_exchange([], box.number)

    def _move(self, box: Box, upper: str, chain: list[str]) -> None:
        before = [box.upper, *box.chain]
        box.upper, box.chain = upper, chain
        self.shelf.refer([upper, *chain], 1)
        self.shelf.refer(before, -1)

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
        os.symlink(f"/proc/self/fd/{COMMAND_FD}", os.path.join(point, "shell", "bash"))
        sc.mount(None, point, None, sc.MS_REMOUNT | sc.MS_BIND | sc.MS_RDONLY | sc.MS_NOSUID | sc.MS_NOEXEC)

    def _give_up_rights(self) -> None:
        os.umask(0o022)
        sc.limit_programs(_KEPT_CAPABILITIES)
        secret = int.from_bytes(os.urandom(8), "big") | 1
        sc.set_filter(seccomp.program(secret))
        sc.use_secret(secret)

    def _probe(self) -> None:
        """Mount once, to learn how this kernel takes it."""
        probe = self.shelf.new_layer()
        try:
            os.close(overlay.mount_root(self.layers, probe, [], self.userxattr))
        except OSError as error:
            if "lowerdir+" not in str(error):
                raise
            overlay.use_old_mount_call()
            os.close(overlay.mount_root(self.layers, probe, [], self.userxattr))
        self.shelf.discard(probe)


def _let_go(control: socket.socket) -> bool:
    """Whether the other end was closed."""
    try:
        return not control.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def main() -> None:
    """Run over an inherited socket; the first message says where the layers lie, or {"error": why}."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # a Ctrl-C reaches the whole process group; the library decides, by closing the socket
        signal.signal(number, signal.SIG_IGN)
    state = os.environ[first.MARK]
    order = Order(**json.loads(os.environ.pop("AGENTGYM_START")))
    library = socket.socket(fileno=order.socket)
    library.set_inheritable(False)
    lock = os.open(os.path.join(state, "lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        rootless = os.getuid() != 0
        if rootless:
            inside.enter_user_namespace()
        spawner = Spawner(state, library, order, rootless)
        spawner.open()
    except OSError as error:
        wire.send(library, {"error": str(error)})
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    # where the layers can be seen: this process itself steps into other views
    keeper = 0 if rootless else spawner.trash.pid
    limited = sorted(spawner.cgroups.homes)
    if spawner.limiter is not None and spawner.disk_watch is None and "memory" in limited:
        limited.append("disk")
    wire.send(library, {"layers": spawner.layers, "keeper": keeper, "limited": limited})
    spawner.serve()
