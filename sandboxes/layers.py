"""What lies in sealed layers, read from outside: starting files, the merged view, changes, digests.

Owns the file formats of overlayfs as they appear on disk (whiteouts, opaque marks). Everything is read with
directory descriptors and without following links: names in a layer were chosen by an agent.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from agentgym.errors import SnapshotError
from agentgym.sandbox import Change, FileSpec
from agentgym.sandboxes.overlay import BASE

_IGNORED = ("tmp", "dev", "proc", "sys")
_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")


@dataclass(frozen=True, slots=True)
class Entry:
    """One path as the topmost layer that names it has it."""

    mode: int
    size_bytes: int
    mtime_ns: int
    host_path: str
    target: str = ""
    deleted: bool = False
    opaque: bool = False
    """A directory that hides what lower layers hold below it."""

    def sha256(self) -> str:
        """Of the content of a regular file, read without following a link."""
        if not stat.S_ISREG(self.mode):
            return ""
        digest = hashlib.sha256()
        fd = os.open(self.host_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        return digest.hexdigest()

    def change(self) -> Change:
        """The entry as something new."""
        size = self.size_bytes if self.kind() == "file" else 0
        return Change(self.kind(), self.mode & 0o7777, size, self.sha256(), self.target)

    def kind(self) -> str:
        """As in `Change`; "other" for sockets and pipes."""
        if self.deleted:
            return "deleted"
        kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}
        return kinds.get(stat.S_IFMT(self.mode), "other")


def write_layer(layer: str, files: Sequence[FileSpec]) -> None:
    """Fill an empty layer with starting files; parents are made, times are set last."""

    def place(spec: FileSpec) -> str:
        part, path = ("u", spec.path[5:]) if spec.path.startswith("/usr/") else ("r", spec.path)
        return os.path.join(layer, part, path.lstrip("/"))

    for spec in files:
        path = place(spec)
        if spec.kind == "dir":
            os.makedirs(path, exist_ok=True)
            os.chmod(path, spec.mode)
            continue
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if spec.kind == "link":
            os.symlink(os.fsdecode(spec.data), path)
            continue
        with open(path, "xb") as file:
            file.write(spec.data)
        os.chmod(path, spec.mode)
    for spec in reversed(sorted(files, key=lambda spec: spec.path)):
        if spec.mtime_s is not None:
            path = place(spec)
            os.utime(path, (spec.mtime_s, spec.mtime_s), follow_symlinks=False)


def walk(root: str, prefix: str = "") -> Iterator[tuple[str, Entry]]:
    """Every path below a folder, each directory before what is in it."""
    with os.scandir(root) as found:
        entries = sorted(found, key=lambda e: e.name)
    for found_entry in entries:
        info = found_entry.stat(follow_symlinks=False)
        path = f"{prefix}/{found_entry.name}"
        deleted = stat.S_ISCHR(info.st_mode) and info.st_rdev == 0
        is_dir = stat.S_ISDIR(info.st_mode)
        target = os.readlink(found_entry.path) if stat.S_ISLNK(info.st_mode) else ""
        entry = Entry(
            info.st_mode,
            info.st_size,
            info.st_mtime_ns,
            found_entry.path,
            target,
            deleted,
            is_dir and _opaque(found_entry.path),
        )
        yield path, entry
        if is_dir:
            yield from walk(found_entry.path, path)


def _opaque(path: str) -> bool:
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError:
        return False
    return any(name in names and os.getxattr(path, name, follow_symlinks=False) == b"y" for name in _OPAQUE)


def merged(layers: str, chain: Sequence[str]) -> dict[str, Entry]:
    """The topmost entry of every path that a chain names, whiteouts of the base included."""
    seen: dict[str, Entry] = {}
    hidden: set[str] = set()
    for name in chain:
        fresh: dict[str, Entry] = {}
        for part, prefix in (("r", ""), ("u", "/usr")):
            for path, entry in walk(os.path.join(layers, name, part), prefix):
                if path not in seen and not _below(path, hidden):
                    fresh[path] = entry
        seen |= fresh
        hidden |= {path for path, entry in fresh.items() if entry.opaque or not stat.S_ISDIR(entry.mode)}
    return seen


def _below(path: str, hidden: set[str]) -> bool:
    """True where a directory above the path hides what lower layers hold."""
    while (cut := path.rfind("/")) > 0:
        path = path[:cut]
        if path in hidden:
            return True
    return False


def digest(entries: Mapping[str, Entry]) -> str:
    """A hash over path, type, mode, size, content, link target and whiteouts.

    Modification times are left out: equal content made at different moments is an equal state.
    """
    total = hashlib.sha256()
    for path, entry in sorted(entries.items()):
        parts = (path, str(entry.mode), str(entry.size_bytes if stat.S_ISREG(entry.mode) else 0), entry.sha256())
        total.update("\0".join((*parts, entry.target, str(entry.opaque))).encode("utf-8", "surrogateescape") + b"\n")
    return total.hexdigest()


def changes(layers: str, chain: Sequence[str], start: Sequence[str]) -> dict[str, Change]:
    """How the merged view of a chain differs from its starting layers over the base.

    Args:
        layers: The folder of all layers.
        chain: Top to bottom; ends with `start`.
        start: The layers that were there when the sandbox was created.
    """
    if list(chain[len(chain) - len(start) :]) != list(start):
        raise SnapshotError("the chain does not end with its starting layers")
    before = merged(layers, [*start, BASE])
    found: dict[str, Change] = {}
    above = merged(layers, chain[: len(chain) - len(start)])
    for path, entry in above.items():
        if path.split("/")[1] in _IGNORED:
            continue
        old = before.get(path) or _in_host_usr(path)
        if entry.opaque and old is not None:
            for lower, gone in before.items():
                if lower.startswith(path + "/") and lower not in above and not gone.deleted:
                    found[lower] = Change("deleted")
        if entry.deleted:
            _delete(path, old, before, found)
        elif not same(entry, old):
            found[path] = entry.change()
    return found


def _delete(path: str, old: Entry | None, before: dict[str, Entry], found: dict[str, Change]) -> None:
    if old is None or old.deleted:
        return
    found[path] = Change("deleted")
    for lower, gone in before.items():
        if lower.startswith(path + "/") and not gone.deleted:
            found[lower] = Change("deleted")


def _in_host_usr(path: str) -> Entry | None:
    if not path.startswith("/usr/"):
        return None
    try:
        info = os.lstat(path)
    except OSError:
        return None
    target = os.readlink(path) if stat.S_ISLNK(info.st_mode) else ""
    return Entry(info.st_mode, info.st_size, info.st_mtime_ns, path, target)


def same(new: Entry, old: Entry | None) -> bool:
    """True for a copied-up entry that nobody changed: overlayfs copies parents, and files opened for writing."""
    if old is None or old.deleted or new.mode != old.mode or new.target != old.target:
        return False
    if stat.S_ISDIR(new.mode):
        return not new.opaque
    return new.size_bytes == old.size_bytes and new.mtime_ns == old.mtime_ns and new.sha256() == old.sha256()
