"""Backend `docker`: containers of a Docker daemon, for tasks that come with an image and machines that have no more.

Owns the image and the start of a sandbox; `docker_box.py` is the sandbox and its snapshot, `docker_daemon.py` asks the
daemon, `docker_shell.py` is the way to the shell, `docker_files.py` reads archives, `docker_owner.py` removes what a
crash left. A snapshot pauses the container,
commits it and keeps the shell's state; a fork runs a container of that image and replays the state. At 100 layers an
image is exported and imported as one, since the daemon refuses the 125th. A shell that ends, or that a deadline ends,
takes the whole container with it, through the daemon; its files stay, and it is started anew.

It is the slow way: measured beside backend `namespace` on two busy cores, a snapshot takes 0.1 s, a fork 0.2 s, a
command the same 0.1 ms. `changes`, `digest` and `inspect` read archives of what was touched, or of the whole image.

Protects from: reaching any network; reading or changing files of the host; seeing or signalling its processes;
rights of root beyond nine, new privileges, and the calls that Docker's own filter refuses; exhausting memory,
process numbers and processors, where the daemon has the control groups; inheriting host variables; keeping anything
alive after a deadline or close.
Does not protect from: filling the daemon's disk; faults of the kernel or of the daemon, which is root. The container's
first process has the agent's rights, and an agent that takes it over can hide what a snapshot would name as lost.
Lost by a snapshot, and named: files in /dev/shm, changes of /etc/hosts and its like. Lost and not named: fractions of
seconds of file times, holes of sparse files, sockets in the file system, other files in /dev.
"""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from collections import OrderedDict
from dataclasses import replace

from agentgym.errors import BackendUnavailable, SandboxError
from agentgym.sandbox import BoxLimits, Capabilities, FileSpec, SandboxSpec
from agentgym.sandboxes import docker_files, shell, state
from agentgym.sandboxes.docker_box import DockerSandbox, DockerSnapshot, Frozen, Start
from agentgym.sandboxes.docker_daemon import Daemon
from agentgym.sandboxes.docker_image import host_image
from agentgym.sandboxes.docker_owner import collect_garbage
from agentgym.sandboxes.pool import ENV
from agentgym.sandboxes.seeds import hash_seed
from agentgym.sandboxes.trash import remove_tree
from agentgym.types import Level

_MAX_TEMPLATES = 32
_CONSEQUENCES = {
    "memory": ("MemoryLimit", "a command can use all memory of this machine"),
    "max_pids": ("PidsLimit", "a command can use up the process numbers of this machine"),
    "cpu": ("CpuCfsQuota", "a command can use all processors"),
}


class DockerBackend:
    """Makes sandboxes that are containers of one image."""

    name = "docker"

    def __init__(
        self,
        image: str | None = None,
        *,
        dockerfile: str | None = None,
        limits: BoxLimits = BoxLimits(),  # noqa: B008  (it is frozen)
    ) -> None:
        """Nothing starts before the first use.

        Args:
            image: Name of an image that the daemon has; it needs /bin/bash. None: a small one is made of this
                machine's own programs.
            dockerfile: A folder whose Dockerfile is built instead. The image goes at close; what the daemon caches of
                its steps stays, as after any build.
            limits: Of each sandbox.
        """
        if image is not None and dockerfile is not None:
            raise SandboxError(f"image {image!r} and dockerfile {dockerfile!r} were both given; give one of them")
        self.limits = limits
        self.defaults: frozenset[bytes] = frozenset()
        """What a shell says of itself in which nothing was typed; a replay need not repeat it."""
        self.live: weakref.WeakSet[DockerSandbox] = weakref.WeakSet()
        self.base = ""
        self.capabilities = Capabilities(Level.SHELL, frozenset())
        self._image, self._dockerfile = image, dockerfile
        self._env: list[tuple[str, str]] = list(ENV)
        self._layers = 0
        self._daemon: Daemon | None = None
        self._folder, self._lock_fd, self._numbers = "", -1, 0
        self._templates: OrderedDict[str, Start] = OrderedDict()
        self._lock = threading.RLock()

    def probe(self) -> Capabilities:
        """Connect, find or make the image, and ask a shell in a container for its state.

        Raises:
            BackendUnavailable: names what refused.
        """
        self.daemon()
        return self.capabilities

    def daemon(self) -> Daemon:
        """The connection; a forked process gets its own."""
        with self._lock:
            if self._daemon is None or self._daemon.pid != os.getpid():
                self._templates.clear()
                daemon = Daemon()
                try:
                    self._open_folder()
                    self._open_image(daemon)
                    self._daemon = daemon
                    self._open_shell()
                except SandboxError as error:
                    self._daemon = daemon
                    self.close()
                    raise BackendUnavailable(f"backend 'docker' cannot run here: {error}") from error
            return self._daemon

    def _open_folder(self) -> None:
        self._folder = state.new_folder(state.open_root(state.state_roots()[0]))
        path = os.path.join(self._folder, "lock")
        self._lock_fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)

    def _open_image(self, daemon: Daemon) -> None:
        if self._dockerfile is not None:
            name = daemon.build(self._dockerfile)
        else:
            name = self._image or daemon.import_base(host_image())
        found = daemon.find(name)
        volumes = sorted((found["Config"] or {}).get("Volumes") or {})
        if volumes:
            raise SandboxError(
                f"image {name!r} declares the volumes {', '.join(volumes)}, which no snapshot keeps; use one without"
            )
        self.base = found["Id"]
        self._layers = len(found["RootFS"].get("Layers") or ())
        given = [entry.partition("=")[::2] for entry in (found["Config"] or {}).get("Env") or ()]
        self._env = list((dict(ENV) | dict(given)).items())
        held = {"network", "pids", "readonly_host", "own_root", "capabilities"}
        held |= {name for name, (key, _) in _CONSEQUENCES.items() if daemon.info.get(key)}
        missing = {name: text for name, (_, text) in _CONSEQUENCES.items() if name not in held}
        missing["disk"] = "files can fill the disk of the daemon"
        missing["file_times"] = "a snapshot keeps the times of files in whole seconds"
        missing["sparse_files"] = "a snapshot writes the holes of files out as zeros"
        if any("name=seccomp" in option for option in daemon.info.get("SecurityOptions") or ()):
            held.add("seccomp")
        else:
            missing["seccomp"] = "all system calls are allowed"
        # the daemon's own limit is no limit here: long chains are made short
        self.capabilities = Capabilities(Level.SHELL, frozenset(held), missing)

    def _open_shell(self) -> None:
        sandbox = self.create(SandboxSpec())
        try:
            # no state replayed: what is asked for is a shell as it starts
            self.defaults = sandbox.pristine()
        finally:
            sandbox.close()

    def new_folder(self) -> str:
        """A fresh folder to show in a container."""
        with self._lock:
            self._numbers += 1
            path = os.path.join(self._folder, f"{self._numbers:08d}")
        os.mkdir(path)
        os.chmod(path, 0o755)
        return path

    def create(self, spec: SandboxSpec) -> DockerSandbox:
        """Start a sandbox from a spec; equal specs share a starting image."""
        spec.refuse_python(self.name)
        daemon = self.daemon()
        with self._lock:
            start = self._templates.get(spec.key())
            if start is None:
                start = self._templates[spec.key()] = self._template(daemon, spec)
                if len(self._templates) > _MAX_TEMPLATES:
                    daemon.drop(self._templates.popitem(last=False)[1].image)
            self._templates.move_to_end(spec.key())
            daemon.hold(start.image)
        try:
            env = [*self._env, ("PYTHONHASHSEED", str(hash_seed(spec.seed))), *spec.env]
            fresh = shell.fresh_script(env, spec.workdir)
            start = replace(start, script=fresh)
            return DockerSandbox(start, Frozen(start.image, shell.ShellState(fresh), self._layers + 1, spec.seed))
        finally:
            daemon.drop(start.image)

    def _template(self, daemon: Daemon, spec: SandboxSpec) -> Start:
        files = [
            replace(file, path=file.path if file.path.startswith("/") else f"{spec.workdir}/{file.path}")
            for file in spec.files
        ]
        if spec.workdir not in {file.path.rstrip("/") for file in files}:
            files.append(FileSpec(spec.workdir, "dir", mode=0o755))
        with daemon.shown(self.base) as container:
            docker_files.add_files(daemon, container, files)
            return Start(self, daemon, spec, daemon.commit(container, ""), b"")

    def close(self) -> None:
        """End every sandbox, remove all that is ours at the daemon, and this process's folder."""
        with self._lock:
            daemon, self._daemon = self._daemon, None
            folder, self._folder = self._folder, ""
            if daemon is None or daemon.pid != os.getpid():
                return
            for sandbox in list(self.live):
                sandbox.close()
            self._templates.clear()
            daemon.close()
            if folder:
                os.close(self._lock_fd)
                remove_tree(folder)


__all__ = ["DockerBackend", "DockerSandbox", "DockerSnapshot", "collect_garbage"]
