"""Whose containers, images and volumes those of backend `docker` are, and what of them a crash left behind.

Owns the labels and `collect_garbage`. An owner is a process: machine, boot, process namespace, number and start
time, and a token for each backend in it. Only what is certainly dead is removed: another machine's, or another namespace's, is left alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from typing import Any

OWNER = "agentgym.owner"
"""The label of everything that this backend makes."""


def owner() -> str:
    """A backend of this process, as no other will ever be called."""
    machine, boot, namespace = _here()
    return ":".join((machine, boot, namespace, str(os.getpid()), _started(os.getpid()), secrets.token_hex(4)))


def is_dead(name: str) -> bool:
    """True where the owner has certainly ended."""
    parts = name.split(":")
    machine, boot, namespace = _here()
    if len(parts) != 6 or parts[0] != machine:
        return False
    if parts[1] != boot:
        return True
    if parts[2] != namespace or not parts[3].isdigit():
        return False
    return _started(int(parts[3])) != parts[4]


def _here() -> tuple[str, str, str]:
    machine = _read("/etc/machine-id") or socket.gethostname().replace(":", "-")
    return machine, _read("/proc/sys/kernel/random/boot_id"), str(os.stat("/proc/self/ns/pid").st_ino)


def _started(pid: int) -> str:
    """Start time in clock ticks since boot; empty where there is no such process."""
    return (_read(f"/proc/{pid}/stat").rpartition(")")[2].split() or [""] * 20)[19]


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def collect_garbage(*, dry_run: bool = False) -> list[str]:
    """Remove containers, images and volumes of owners that are dead; one line for each.

    Where no daemon answers there is nothing to remove.
    """
    try:
        check_socket()
        import docker

        client: Any = docker.from_env(timeout=60)
    except Exception:  # no SDK, or an address that means nothing to it
        return []
    with contextlib.closing(client):
        try:
            client.ping()
        except Exception:  # no daemon, or no right to reach it
            return []
        return _remove(client.api, is_dead, dry_run)


def check_socket() -> None:
    """Knock at the daemon's door where that is a socket of this machine; cheap, and the SDK leaks one that refuses.

    Raises:
        OSError: nobody answers.
    """
    address = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if address.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as door:
            door.connect(address.removeprefix("unix://"))


def remove_all(api: Any, name: str) -> list[str]:
    """Remove everything of one owner."""
    return _remove(api, lambda found: found == name, False)


def _remove(api: Any, is_garbage: Any, dry_run: bool) -> list[str]:
    wanted = {"label": OWNER}
    volumes = (api.volumes(filters=wanted) or {}).get("Volumes") or []
    found = [("container", each["Id"], each) for each in api.containers(all=True, filters=wanted)]
    images = [each for each in api.images(all=True, filters=wanted)]
    # the newest first: an image can only go when none stands on it
    found += [("image", each["Id"], each) for each in sorted(images, key=lambda each: -each["Created"])]
    found += [("volume", each["Name"], each) for each in volumes]
    garbage = [each for each in found if is_garbage((each[2].get("Labels") or {}).get(OWNER, ""))]
    if dry_run:
        return [_line(*each) for each in garbage]
    done: list[str] = []
    while True:
        gone = [each for each in garbage if _removed(api, each[0], each[1])]
        done += [_line(*each) for each in gone]
        garbage = [each for each in garbage if each not in gone]
        # once more for images made in the same second
        if not gone or not garbage:
            return done


def _removed(api: Any, kind: str, name: str) -> bool:
    try:
        if kind == "container":
            api.remove_container(name, force=True, v=True)
        elif kind == "image":
            api.remove_image(name, noprune=True)
        else:
            api.remove_volume(name, force=True)
    except Exception:  # somebody else removed it, or something stands on it
        return False
    return True


def _line(kind: str, name: str, found: dict[str, Any]) -> str:
    of = (found.get("Labels") or {}).get(OWNER, "").split(":")
    return f"docker {kind} {name.removeprefix('sha256:')[:12]} of process {of[3] if len(of) == 6 else '?'}"
