"""Files of a container, through the daemon: one in and out, a starting set, and how two images differ.

Owns what is read from archives. They come from an agent's file system, so nothing of them is unpacked here: regular
members are read in memory, names are only names, and everything else is refused or only described.
"""

from __future__ import annotations

import hashlib
import io
import posixpath
import stat
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentgym.errors import PathRefused
from agentgym.sandbox import Change, FileSpec
from agentgym.sandboxes.docker_daemon import PLACE, Daemon, Missing

_OURS = frozenset({"/.dockerenv", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/etc/mtab", PLACE})
"""What the daemon puts into every container."""
_UNSEEN = frozenset({"dev", "proc", "sys"})
_MAX_LINKS = 40
_TYPES = {
    tarfile.REGTYPE: stat.S_IFREG,
    tarfile.AREGTYPE: stat.S_IFREG,
    tarfile.DIRTYPE: stat.S_IFDIR,
    tarfile.SYMTYPE: stat.S_IFLNK,
    tarfile.FIFOTYPE: stat.S_IFIFO,
    tarfile.CHRTYPE: stat.S_IFCHR,
    tarfile.BLKTYPE: stat.S_IFBLK,
}
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One path of an image."""

    mode: int
    size_bytes: int = 0
    mtime_s: int = 0
    sha256: str = ""
    target: str = ""

    def change(self) -> Change:
        """The entry as something new."""
        kind = _KINDS.get(stat.S_IFMT(self.mode), "other")
        return Change(kind, stat.S_IMODE(self.mode), self.size_bytes, self.sha256, self.target)

    def content(self) -> Entry:
        """Without the time."""
        return replace(self, mtime_s=0)


def read_file(daemon: Daemon, container: str, path: str, max_bytes: int) -> bytes:
    """The beginning of a regular file; links are followed inside the container's root.

    Raises:
        PathRefused: it is missing, or no regular file.
    """
    try:
        for _ in range(_MAX_LINKS):
            with daemon.get(container, path) as (found, raw):
                if found.is_link and found.target != path:
                    path = found.target
                    continue
                if not found.is_regular:
                    raise PathRefused(f"{path!r} cannot be read: not a regular file")
                with tarfile.open(fileobj=raw, mode="r|") as archive:
                    member = archive.next()
                    file = archive.extractfile(member) if member is not None and member.isreg() else None
                    if file is None:
                        raise PathRefused(f"{path!r} cannot be read: not a regular file")
                    return file.read(max_bytes)
    except Missing as error:
        raise PathRefused(f"{path!r} cannot be read: {error}") from error
    except tarfile.TarError as error:
        raise PathRefused(f"{path!r} cannot be read: it changed meanwhile ({error})") from error
    raise PathRefused(f"{path!r} cannot be read: too many links")


def write_file(daemon: Daemon, container: str, path: str, data: bytes, mode: int) -> None:
    """Put a regular file in the place of what is there, making its folders.

    Raises:
        PathRefused: the path leads through something that is no folder, or to something that is no file.
    """
    path = posixpath.normpath("/" + path.lstrip("/"))
    try:
        for _ in range(_MAX_LINKS):
            try:
                found = daemon.stat(container, path)
            except Missing:
                break
            if found.is_link and found.target != path:
                path = found.target
            elif found.is_regular:
                break
            else:
                raise PathRefused(f"{path!r} cannot be written: not a regular file")
        else:
            raise PathRefused(f"{path!r} cannot be written: too many links")
        add_files(daemon, container, [FileSpec(path, "file", data, mode)])
    except Missing as error:
        raise PathRefused(f"{path!r} cannot be written: {error}") from error


def add_files(daemon: Daemon, container: str, files: Sequence[FileSpec]) -> None:
    """Put files, folders and links into a container; folders that are missing are made."""
    archive_bytes = io.BytesIO()
    known: set[str] = set()
    now = int(time.time())
    with tarfile.open(fileobj=archive_bytes, mode="w", format=tarfile.PAX_FORMAT) as archive:
        # folders first and again last: what is put into them changes their times
        for spec in sorted(files, key=lambda spec: spec.path):
            path = spec.path.rstrip("/")
            for folder in reversed(_parents(path)):
                if folder not in known and not _exists(daemon, container, folder):
                    archive.addfile(_member(folder, "dir", 0o755, now, b""))
                known.add(folder)
            known.add(path)
            member = _member(path, spec.kind, spec.mode, spec.mtime_s if spec.mtime_s is not None else now, spec.data)
            archive.addfile(member, io.BytesIO(spec.data) if spec.kind == "file" else None)
    daemon.put(container, "/", archive_bytes.getvalue())


def _parents(path: str) -> list[str]:
    """Folders above a path, the nearest first, without the root."""
    found = []
    while len(path := posixpath.dirname(path)) > 1:
        found.append(path)
    return found


def _exists(daemon: Daemon, container: str, path: str) -> bool:
    try:
        daemon.stat(container, path)
    except Missing:
        return False
    return True


def _member(path: str, kind: str, mode: int, mtime_s: int, data: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(path.lstrip("/"))
    member.mode, member.mtime = mode, mtime_s
    if kind == "file":
        member.size = len(data)
    elif kind == "dir":
        member.type = tarfile.DIRTYPE
    else:
        member.type, member.linkname, member.mode = tarfile.SYMTYPE, data.decode("utf-8", "surrogateescape"), 0o777
    return member


def listing(daemon: Daemon, container: str, top: str) -> dict[str, Entry]:
    """Every path of one directory at the top of a container; empty where it is missing."""
    found: dict[str, Entry] = {}
    try:
        with daemon.get(container, f"/{top}") as (_, raw), tarfile.open(fileobj=raw, mode="r|") as archive:
            for member in archive:
                path = posixpath.normpath("/" + member.name)
                if member.islnk():
                    entry = found.get(posixpath.normpath("/" + member.linkname))
                else:
                    entry = _entry(archive, member)
                if entry is not None and path not in _OURS:
                    found[path] = entry
    except Missing:
        pass
    return found


def _entry(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Entry | None:
    kind = _TYPES.get(member.type)
    if kind is None:
        return None
    mode, mtime_s = kind | stat.S_IMODE(member.mode), int(member.mtime)
    if kind == stat.S_IFDIR:
        return Entry(mode)
    if kind != stat.S_IFREG:
        return Entry(mode, 0, mtime_s, "", member.linkname)
    digest = hashlib.sha256()
    file: Any = archive.extractfile(member)
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return Entry(mode, member.size, mtime_s, digest.hexdigest())


def differences(
    daemon: Daemon, before: str, after: str, touched: Iterable[str], known: dict[str, dict[str, Entry]]
) -> dict[str, tuple[Change, bool]]:
    """Every path that differs between two images, and whether more than its time does.

    Args:
        daemon: The daemon.
        before: The starting image.
        after: The other one.
        touched: Paths that may differ: only the directories at the top that hold one of them are read.
        known: What was listed of the starting image, by top directory; added to.
    """
    paths = {path for path in touched if path not in _OURS}
    found: dict[str, tuple[Change, bool]] = {}
    with daemon.shown(before) as old_box, daemon.shown(after) as new_box:
        for top in sorted({path.split("/")[1] for path in paths} - _UNSEEN - {""}):
            if top not in known:
                known[top] = listing(daemon, old_box, top)
            old, new = known[top], listing(daemon, new_box, top)
            for path, entry in new.items():
                was = old.get(path)
                if was is None or was.content() != entry.content():
                    found[path] = entry.change(), True
                elif was != entry:
                    found[path] = entry.change(), False
            found |= {path: (Change("deleted"), True) for path in old if path not in new}
    return found


def digest(found: Mapping[str, tuple[Change, bool]]) -> str:
    """A hash of differences but for times."""
    total = hashlib.sha256()
    for path, (change, in_content) in sorted(found.items()):
        if in_content:
            parts = (path, change.kind, str(change.mode), str(change.size_bytes), change.sha256, change.target)
            total.update("\0".join(parts).encode("utf-8", "surrogateescape") + b"\n")
    return total.hexdigest()
