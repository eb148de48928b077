"""What lies in sealed layers, read from outside: starting files, the merged view, changes, digests.

Owns the file formats of overlayfs as they appear on disk (whiteouts, opaque marks). Everything is read with
directory descriptors and without following links: names in a layer were chosen by an agent.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from agentgym.errors import SnapshotError
from agentgym.sandbox import Change, FileSpec
from agentgym.sandboxes.overlay import BASE

MAX_FOLDERS = 200
"""Of folders in folders that are looked into: an agent can nest them for ever."""
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
    """Every path below a folder, each directory before what is in it; not below the depth that paths can name."""
    try:
        with os.scandir(root) as found:
            entries = sorted(found, key=lambda e: e.name)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return
    for found_entry in entries:
        info = found_entry.stat(follow_symlinks=False)
        path = f"{prefix}/{found_entry.name}"
        deleted = stat.S_ISCHR(info.st_mode) and info.st_rdev == 0
        is_dir = stat.S_ISDIR(info.st_mode)
        target = os.readlink(found_entry.path) if stat.S_ISLNK(info.st_mode) else ""
        opaque = is_dir and _opaque(found_entry.path)
        yield path, Entry(info.st_mode, info.st_size, info.st_mtime_ns, found_entry.path, target, deleted, opaque)
        if is_dir and path.count("/") < MAX_FOLDERS:
            yield from walk(found_entry.path, path)


def _opaque(path: str) -> bool:
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError:
        return False
    return any(name in names and os.getxattr(path, name, follow_symlinks=False) == b"y" for name in _OPAQUE)


def merged(layers: str, chain: Sequence[str]) -> dict[str, Entry]:
    """The topmost entry of every path that a chain names, whiteouts of the base included.

    A directory is opaque where any of its entries is: it hides what lies below the whole chain.
    """
    seen: dict[str, Entry] = {}
    hidden: set[str] = set()
    for name in chain:
        hides = set()
        for part, prefix in (("r", ""), ("u", "/usr")):
            for path, entry in walk(os.path.join(layers, name, part), prefix):
                if _below(path, hidden) or path in hidden:
                    continue
                if path not in seen:
                    seen[path] = entry
                elif entry.opaque:
                    seen[path] = replace(seen[path], opaque=True)
                if entry.opaque or not stat.S_ISDIR(entry.mode):
                    hides.add(path)
        # only from the next layer on: what lies in an opaque directory of this one is seen
        hidden |= hides
    return seen


def flatten(layers: str, chain: Sequence[str], target: str) -> None:
    """Fill an empty layer so that it stands for a whole chain: its files are hard links, its directories new.

    Args:
        layers: The folder of all layers.
        chain: Sealed layers, top to bottom.
        target: Name of the empty layer.
    """
    entries = merged(layers, chain)
    folders = []
    for path, entry in entries.items():
        part, inside = ("u", path[5:]) if path.startswith("/usr/") else ("r", path)
        if path == "/usr":
            part, inside = "r", path
        place = os.path.join(layers, target, part, inside.lstrip("/"))
        if not stat.S_ISDIR(entry.mode):
            os.link(entry.host_path, place, follow_symlinks=False)
            continue
        os.mkdir(place)
        folders.append((place, entry))
    for place, entry in reversed(folders):
        info = os.stat(entry.host_path, follow_symlinks=False)
        os.chown(place, info.st_uid, info.st_gid)
        for name in os.listxattr(entry.host_path, follow_symlinks=False):
            if name not in _OPAQUE:
                os.setxattr(
                    place, name, os.getxattr(entry.host_path, name, follow_symlinks=False), follow_symlinks=False
                )
        if entry.opaque:
            os.setxattr(place, _OPAQUE[0] if os.getuid() == 0 else _OPAQUE[1], b"y", follow_symlinks=False)
        os.chmod(place, stat.S_IMODE(info.st_mode))
        os.utime(place, ns=(info.st_atime_ns, info.st_mtime_ns))


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
