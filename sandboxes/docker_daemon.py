"""What backend `docker` asks of a Docker daemon, in its own words, with errors as everybody's here.

Owns the connection, the options of a container, and the count of who stands on which image. Leaves what a sandbox is
to `docker.py`. Nothing here writes to this machine's file system: archives go through memory or from the daemon to
the daemon.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agentgym.errors import BackendUnavailable, SandboxError
from agentgym.sandbox import BoxLimits
from agentgym.sandboxes import docker_owner
from agentgym.sandboxes.docker_shell import COMMAND, PLACE

KEPT = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "NET_BIND_SERVICE", "SYS_CHROOT")
"""The rights of root that programs in a sandbox have; all others are dropped."""
_TIMEOUT_S = 120
_NOT_REGULAR = 1 << 31 | 1 << 27 | 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19
_LINK = 1 << 27


@dataclass(frozen=True, slots=True)
class Stat:
    """What the daemon says of one path in a container."""

    name: str
    mode: int
    """As Go has it."""
    mtime: str
    target: str
    """Of a link, resolved inside the container."""

    @property
    def is_link(self) -> bool:
        """True for a symbolic link."""
        return bool(self.mode & _LINK)

    @property
    def is_regular(self) -> bool:
        """True for a plain file."""
        return not self.mode & _NOT_REGULAR


class Missing(SandboxError):
    """The daemon finds no such path, or will not follow it."""


class Daemon:
    """A connection to the daemon that DOCKER_HOST names, or the usual one."""

    def __init__(self) -> None:
        """Connect.

        Raises:
            BackendUnavailable: no SDK, or no daemon answers.
        """
        try:
            import docker
        except ImportError as error:
            raise BackendUnavailable(
                "backend 'docker' needs Docker's Python SDK: pip install 'agentgym-tree[docker]'"
            ) from error
        # of requests, which the SDK rests on, all errors are OSErrors; of urllib3 below it none
        broken = importlib.import_module("urllib3.exceptions").HTTPError
        self._refusals = (docker.errors.DockerException, OSError, broken)
        where = os.environ.get("DOCKER_HOST") or "/var/run/docker.sock"
        client: Any = None
        try:
            docker_owner.check_socket()
            client = docker.from_env(timeout=_TIMEOUT_S)
            client.ping()
            self.info: dict[str, Any] = client.info()
        except self._refusals as error:
            if client is not None:
                client.close()
            raise BackendUnavailable(
                f"backend 'docker': no daemon answers at {where} ({error}); start one, or set DOCKER_HOST"
            ) from error
        self.client = client
        self.api = client.api
        self.pid = os.getpid()
        self.owner = docker_owner.owner()
        self.labels = {docker_owner.OWNER: self.owner}
        self._holds: dict[str, int] = {}
        self._below: dict[str, str] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def answers(self, what: str) -> Iterator[None]:
        """Turn what the daemon refuses into our own error."""
        try:
            yield
        except self._refusals as error:
            said = getattr(error, "explanation", None) or error
            raise SandboxError(f"docker, {what}: {said}; `agentgym doctor` tries the daemon") from error

    def close(self) -> None:
        """Remove all that is ours and close the connection."""
        with contextlib.suppress(*self._refusals):
            docker_owner.remove_all(self.api, self.owner)
        self.client.close()

    # images

    def import_base(self, archive: bytes) -> str:
        """Make an image of a root file system; it is ours and goes when nothing holds it."""
        with self.answers("import"):
            return self._imported(archive)

    def _imported(self, archive: Any) -> str:
        label = f'LABEL {docker_owner.OWNER}="{self.owner}"'
        send = self.api.import_image_from_data if isinstance(archive, bytes) else self.api.import_image_from_stream
        answer = send(archive, changes=[label])
        for line in answer.splitlines():
            said = json.loads(line)
            if "error" in said:
                raise SandboxError(f"docker, import: {said['error']}")
            image = said.get("status", "")
        return str(image)

    def build(self, folder: str) -> str:
        """Build the Dockerfile of a folder."""
        with self.answers(f"build of {folder}"):
            image, _ = self.client.images.build(path=folder, rm=True, forcerm=True, labels=self.labels)
            return str(image.id)

    def find(self, name: str) -> dict[str, Any]:
        """What the daemon says of an image that is there; none is downloaded."""
        with self.answers(f"image {name!r} (pull or build it first)"):
            found: dict[str, Any] = self.api.inspect_image(name)
            return found

    def commit(self, container: str, below: str) -> str:
        """Make an image of a container's files, held once."""
        with self.answers("commit"):
            image = str(self.api.commit(container, pause=False)["Id"])
        self.hold(image, below)
        return image

    def squash(self, container: str, below: str) -> str:
        """Make an image of one layer of a container's files, held once: the daemon never takes more than 125.

        It stands on none, but what is asked of it later takes `below`, which is held as long.
        """
        with self.answers("export and import"):
            image = self._imported(self.api.export(container))
        self.hold(image, below)
        return image

    def hold(self, image: str, below: str = "") -> None:
        """Note that something stands on an image; it is ours."""
        with self._lock:
            self._holds[image] = self._holds.get(image, 0) + 1
            if below and image not in self._below:
                self._below[image] = below
                self._holds[below] = self._holds.get(below, 0) + 1

    def drop(self, image: str) -> None:
        """Take a hold back; an image that nothing holds is removed, and so is what only it stood on."""
        while image:
            with self._lock:
                self._holds[image] -= 1
                if self._holds[image]:
                    return
                del self._holds[image]
                below = self._below.pop(image, "")
            with contextlib.suppress(*self._refusals):
                # without noprune the daemon would remove what others still hold
                self.api.remove_image(image, noprune=True)
            image = below

    # containers

    def create(
        self,
        image: str,
        limits: BoxLimits | None = None,
        binds: tuple[str, ...] = (),
    ) -> str:
        """A container that is not started yet; with limits, one for an agent."""
        options: dict[str, Any] = {
            "network_mode": "none",
            "cap_drop": ["ALL"],
            "cap_add": list(KEPT),
            "security_opt": ["no-new-privileges"],
            "binds": list(binds),
            "log_config": {"type": "none"},
        }
        if limits is not None:
            options |= {
                "mem_limit": limits.memory_bytes,
                "memswap_limit": limits.memory_bytes,
                "pids_limit": limits.max_pids,
                "cpu_period": 100_000,
                "cpu_quota": int(limits.cpus * 100_000),
            }
        with self.answers("create"):
            made = self.api.create_container(
                image,
                COMMAND[1:],
                entrypoint=COMMAND[:1],
                user="0:0",
                working_dir="/",
                hostname="sandbox",
                labels=self.labels,
                healthcheck={"test": ["NONE"]},
                stop_signal="SIGKILL",
                host_config=self.api.create_host_config(**options),
            )
            return str(made["Id"])

    def start(self, container: str) -> None:
        """Start its first process."""
        with self.answers("start"):
            self.api.start(container)

    def end(self, container: str) -> dict[str, Any]:
        """End every process of a container, and give its state when none is left.

        The kernel ends all of a process namespace before its first process counts as ended.
        """
        with self.answers("kill"):
            with contextlib.suppress(self._refusals[0]):  # it has ended by itself
                self.api.kill(container)
            self.api.wait(container, timeout=_TIMEOUT_S)
            state: dict[str, Any] = self.api.inspect_container(container)["State"]
        if state["Running"]:
            raise SandboxError(f"container {container[:12]} still runs after a kill; restart the daemon")
        return state

    def remove(self, container: str) -> None:
        """End and remove a container; one that is gone is fine."""
        with contextlib.suppress(*self._refusals):
            self.api.remove_container(container, force=True, v=True)

    @contextlib.contextmanager
    def paused(self, container: str) -> Iterator[None]:
        """Stop every process for a moment."""
        with self.answers("pause"):
            self.api.pause(container)
        try:
            yield
        finally:
            with self.answers("unpause"):
                self.api.unpause(container)

    def touched(self, container: str) -> list[str]:
        """Paths that differ from the image of a container, as overlayfs sees it."""
        with self.answers("diff"):
            return [change["Path"] for change in self.api.diff(container) or []]

    @contextlib.contextmanager
    def shown(self, image: str, *binds: str) -> Iterator[str]:
        """A container of an image that never runs, to look into."""
        container = self.create(image, binds=binds)
        try:
            yield container
        finally:
            self.remove(container)

    # files

    def stat(self, container: str, path: str) -> Stat:
        """What a path is, itself not followed.

        Raises:
            Missing: there is no such path.
        """
        with self._archive("HEAD", container, path) as response:
            return _stat(response)

    @contextlib.contextmanager
    def get(self, container: str, path: str) -> Iterator[tuple[Stat, Any]]:
        """A path, and the file-like archive of it and all below."""
        with self._archive("GET", container, path) as response:
            yield _stat(response), response.raw

    def put(self, container: str, path: str, archive: Any) -> None:
        """Unpack an archive in a folder of a container; the daemon does that inside its root."""
        with self._archive("PUT", container, path, data=archive):
            pass

    @contextlib.contextmanager
    def _archive(self, verb: str, container: str, path: str, data: Any = None) -> Iterator[Any]:
        # not through the SDK: it gives no way to stop in the middle of a file without end
        url = f"{self.api.base_url}/v{self.api.api_version}/containers/{container}/archive"
        plain = {"Accept-Encoding": "identity"}  # else the daemon compresses, and `raw` does not undo it
        params = {"path": path, **({"noOverwriteDirNonDir": "1"} if verb == "PUT" else {})}
        with self.answers(f"{verb} {path}"):
            with self.api.request(
                verb, url, params=params, data=data, headers=plain, stream=True, timeout=_TIMEOUT_S
            ) as response:
                if response.status_code >= 400:
                    said = (json.loads(response.content or b"{}") or {}).get("message", response.reason)
                    gone = "no such container" in str(said).lower()
                    raise (SandboxError if gone else Missing)(str(said))
                yield response

    # volumes

    @contextlib.contextmanager
    def volume(self) -> Iterator[str]:
        """An empty volume for as long as the block runs."""
        with self.answers("volume"):
            name = str(self.api.create_volume(labels=self.labels)["Name"])
        try:
            yield name
        finally:
            with contextlib.suppress(*self._refusals):
                self.api.remove_volume(name, force=True)


def _stat(response: Any) -> Stat:
    said = json.loads(base64.b64decode(response.headers["X-Docker-Container-Path-Stat"]))
    return Stat(said["name"], said["mode"], said["mtime"], said.get("linkTarget", ""))


__all__ = ["KEPT", "PLACE", "Daemon", "Missing", "Stat"]
