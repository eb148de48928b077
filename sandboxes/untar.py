"""Members of an archive that a stranger made, put into a folder that they cannot lead out of; standard library only.

Owns what is refused and what is kept, as `rootfs.py` tells, and the limits on what an archive may unpack to. Every
path is opened below the root's descriptor, without following links, whatever the checks of names say.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import lzma
import os
import shutil
import stat
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, NoReturn, cast

from agentgym.errors import PathRefused, SandboxError
from agentgym.sandboxes import syscalls as sc

MAX_PATH_BYTES = 3072
"""Of a member's path: the kernel takes 4096, and a folder comes in front."""
MAX_NAME_BYTES = 255
MAX_FOLDERS = 200
"""Of folders in folders."""
MAX_RATIO = 200
"""Of unpacked bytes to the bytes of the archive; systems pack to a third or a fifth."""
RATIO_FROM_BYTES = 16 << 20
"""Below this, a ratio says nothing."""
MAX_HEADER_BYTES = 16 << 20
CHUNK = 1 << 20
_BLOCK = 512
_MAX_ID = 2**32 - 2
_RESOLVE_NO_SYMLINKS = 0x04
_SET_IDS = stat.S_ISUID | stat.S_ISGID
_OPENERS: dict[bytes, Callable[[IO[bytes]], IO[bytes]]] = {
    b"\x1f\x8b": lambda file: cast(IO[bytes], gzip.GzipFile(fileobj=file)),
    b"BZh": lambda file: cast(IO[bytes], bz2.BZ2File(file)),
    b"\xfd7zXZ\0": lambda file: cast(IO[bytes], lzma.LZMAFile(file)),
}
_WHITEOUT, _OPAQUE, _AUFS = ".wh.", ".wh..wh..opq", ".wh..wh."


@dataclass(slots=True)
class Meter:
    """What was unpacked so far, against both limits."""

    archive: str
    packed_bytes: int
    max_bytes: int
    total: int = 0
    member: str = ""

    def add(self, size_bytes: int) -> None:
        """Count the next bytes before they are written."""
        self.total += size_bytes
        if size_bytes < 0 or self.total > self.max_bytes:
            self.refuse(f"makes it more than {self.max_bytes} bytes unpacked", "raise max_bytes if you trust it")
        if self.total > max(RATIO_FROM_BYTES, MAX_RATIO * self.packed_bytes):
            self.refuse(f"makes it more than {MAX_RATIO} times its packed size", "unpack it by hand if you trust it")

    def refuse(self, reason: str, remedy: str = "make the archive without it") -> NoReturn:
        """Raise, naming the member."""
        raise PathRefused(f"{self.archive}: member {self.member!r} {reason}; nothing was unpacked, {remedy}")


class _Bounded(io.RawIOBase):
    """A stream that no header can make us read into memory, or unpack for ever."""

    def __init__(self, file: IO[bytes], meter: Meter) -> None:
        self._file, self._meter = file, meter
        self._end = file.tell() + meter.max_bytes + MAX_HEADER_BYTES
        """No position is further than what may be unpacked, and one header."""

    def read(self, size: int = -1) -> bytes:
        """At most what a header may have."""
        if not 0 <= size <= MAX_HEADER_BYTES:
            self._meter.refuse(f"is followed by a header of {size} bytes")
        data = self._file.read(size)
        if self._file.tell() > self._end:
            self._meter.refuse(f"is followed by more than {self._meter.max_bytes} bytes", "raise max_bytes")
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to an offset; forwards in a packed file that unpacks, so not further than allowed."""
        if whence == os.SEEK_SET and offset > self._end:
            self._meter.refuse(f"says it ends at byte {offset}")
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Where it stands."""
        return self._file.tell()

    def seekable(self) -> bool:
        """Yes; backwards in a packed file by unpacking again."""
        return True


def unpacked(file: IO[bytes], meter: Meter) -> IO[bytes]:
    """The archive itself, of a file that may be packed with gzip, bzip2 or xz."""
    start = file.read(6)
    file.seek(0)
    if start.startswith(b"\x28\xb5\x2f\xfd"):
        raise SandboxError(f"{meter.archive} is, or holds, something packed with zstd; pack it with gzip or not at all")
    for magic, opener in _OPENERS.items():
        if start.startswith(magic):
            file = opener(file)
    return cast(IO[bytes], _Bounded(file, meter))


class Root:
    """A folder that members are put into; none of them can lead out of it."""

    def __init__(self, path: str, meter: Meter, clear_setuid: bool) -> None:
        self._meter, self._clear_setuid = meter, clear_setuid
        self._fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._folders: dict[str, tarfile.TarInfo] = {}
        """What directories get at the end, when nothing more is put into them."""
        self._named: set[str] = set()
        """Paths of this layer's members."""
        self._made: set[str] = set()
        """And of all directories above them."""

    def __enter__(self) -> Root:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._finish_folders()
        finally:
            os.close(self._fd)

    def add_layer(self, file: IO[bytes], *, whiteouts: bool) -> None:
        """Put the members of an archive over what is there."""
        self._named, self._made = set(), set()
        stream = unpacked(file, self._meter)
        with tarfile.open(fileobj=stream, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # else all stay in memory
                self._meter.member = member.name
                self._meter.add(_BLOCK)
                self._add(archive, member, whiteouts)
            # a broken header looks like the end to the library; the end is a block of zeros
            stream.seek(archive.offset)
            if stream.read(_BLOCK) != bytes(_BLOCK):
                raise SandboxError(f"{self._meter.archive} is cut short or broken after member {self._meter.member!r}")

    def _add(self, archive: tarfile.TarFile, member: tarfile.TarInfo, whiteouts: bool) -> None:
        path = self._checked(member.name)
        folder, _, name = path.rpartition("/")
        if whiteouts and name.startswith(_WHITEOUT):
            self._white_out(folder, name)
            return
        if path in self._named:
            self._meter.refuse("is there twice")
        if not (0 <= member.uid <= _MAX_ID and 0 <= member.gid <= _MAX_ID):
            self._meter.refuse(f"belongs to {member.uid}:{member.gid}, which nobody can be")
        self._named.add(path)
        if not path:
            if not member.isdir():
                self._meter.refuse("stands for the root and is no directory")
            self._folders[path] = member
            return
        parent = self._open_folder(folder, make=True)
        try:
            if not self._cleared(parent, path, name, member.isdir()):
                self._put(archive, member, parent, path, name)
        finally:
            os.close(parent)
        above = path
        while above and above not in self._made:
            self._made.add(above)
            above = above.rpartition("/")[0]
        if member.isdir():
            self._folders[path] = member

    def _put(self, archive: tarfile.TarFile, member: tarfile.TarInfo, parent: int, path: str, name: str) -> None:
        if member.isdir():
            os.mkdir(name, 0o700, dir_fd=parent)
        elif member.isreg():
            self._put_file(archive, member, parent, name)
        elif member.issym():
            self._check_target(path, member.linkname)
            os.symlink(member.linkname, name, dir_fd=parent)
            if os.geteuid() == 0:
                os.chown(name, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
            os.utime(name, (member.mtime, member.mtime), dir_fd=parent, follow_symlinks=False)
        elif member.islnk():
            self._put_hard_link(member, parent, name)
        else:
            kind = "a device node" if member.isdev() and not member.isfifo() else f"of kind {member.type!r}"
            self._meter.refuse(f"is {kind}")

    def _put_file(self, archive: tarfile.TarFile, member: tarfile.TarInfo, parent: int, name: str) -> None:
        if member.mode & _SET_IDS and not self._clear_setuid:
            self._meter.refuse(f"has mode {member.mode & 0o7777:o}, setuid or setgid", "or pass clear_setuid=True")
        self._meter.add(member.size)
        content = archive.extractfile(member)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, 0o600, dir_fd=parent), "wb", buffering=0) as file:
            while content is not None and (chunk := content.read(CHUNK)):
                file.write(chunk)
            _own(member, file.fileno())
            os.fchmod(file.fileno(), member.mode & 0o7777 & ~_SET_IDS)
            os.utime(file.fileno(), (member.mtime, member.mtime))

    def _put_hard_link(self, member: tarfile.TarInfo, parent: int, name: str) -> None:
        folder, _, target = self._checked(member.linkname).rpartition("/")
        reason = f"is a hard link to {member.linkname!r}, which is no file of the archive so far"
        try:
            source = self._open_folder(folder, make=False)
        except FileNotFoundError:
            self._meter.refuse(reason)
        try:
            kind = _kind(source, target) if target else None
            if kind is None or stat.S_ISDIR(kind):
                self._meter.refuse(reason)
            os.link(target, name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(source)

    def _checked(self, name: str) -> str:
        """The path without what means nothing; "" is the root."""
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or ".." in parts or "\0" in name or not name:
            self._meter.refuse("is or names a path that is absolute, empty, or has a NUL or a '..'")
        path = "/".join(parts)
        if len(parts) > MAX_FOLDERS:
            self._meter.refuse(f"has or names a path of over {MAX_FOLDERS} folders in folders")
        longest = max((len(os.fsencode(part)) for part in parts), default=0)
        if len(os.fsencode(path)) > MAX_PATH_BYTES or longest > MAX_NAME_BYTES:
            self._meter.refuse(f"has or names a path of over {MAX_PATH_BYTES} bytes, or {MAX_NAME_BYTES} for one name")
        return path

    def _check_target(self, path: str, target: str) -> None:
        depth = path.count("/")
        for part in target.split("/") if not target.startswith("/") else ():
            depth += {"..": -1, ".": 0, "": 0}.get(part, 1)
            if depth < 0:
                self._meter.refuse(f"is a link to {target!r}, outside the root")
        if not target or "\0" in target or len(os.fsencode(target)) > MAX_PATH_BYTES:
            self._meter.refuse("is a link to nothing, or to a path that is too long")

    def _open_folder(self, path: str, *, make: bool) -> int:
        try:
            return sc.open_in_root(self._fd, path or ".", os.O_PATH | os.O_DIRECTORY, extra=_RESOLVE_NO_SYMLINKS)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                self._meter.refuse(f"goes through {path!r}, which is or is below a link or a file")
            if error.errno != errno.ENOENT or not make:
                raise
        above, _, name = path.rpartition("/")
        parent = self._open_folder(above, make=True)
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
        finally:
            os.close(parent)
        return self._open_folder(path, make=False)

    def _cleared(self, parent: int, path: str, name: str, is_dir: bool) -> bool:
        """Make room for a member; True where a directory stands already that stays."""
        kind = _kind(parent, name)
        if kind is None:
            return False
        if is_dir and stat.S_ISDIR(kind):
            return True
        if path in self._made:
            self._meter.refuse("takes the place of what the same archive has put there")
        self._remove(parent, path, name)
        return False

    def _white_out(self, folder: str, name: str) -> None:
        """Hide what lower layers have, and nothing of this one."""
        target = name.removeprefix(_WHITEOUT)
        if target in ("", ".", ".."):
            self._meter.refuse(f"would delete {target!r}")
        if name.startswith(_AUFS) and name != _OPAQUE:
            return  # notes of an old driver to itself
        try:
            parent = self._open_folder(folder, make=False)
        except FileNotFoundError:
            return
        try:
            for hidden in _names(parent) if name == _OPAQUE else [target]:
                self._hide(parent, f"{folder}/{hidden}".lstrip("/"), hidden)
        finally:
            os.close(parent)

    def _hide(self, parent: int, path: str, name: str) -> None:
        kind = _kind(parent, name)
        if kind is None:
            return
        if path not in self._made:
            self._remove(parent, path, name)
        elif stat.S_ISDIR(kind):
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            try:
                for child in _names(below):
                    self._hide(below, f"{path}/{child}", child)
            finally:
                os.close(below)

    def _remove(self, parent: int, path: str, name: str) -> None:
        kind = _kind(parent, name)
        if kind is None or not stat.S_ISDIR(kind):
            os.unlink(name, dir_fd=parent)
            return
        shutil.rmtree(name, dir_fd=parent)
        for gone in [folder for folder in self._folders if folder == path or folder.startswith(path + "/")]:
            del self._folders[gone]

    def _finish_folders(self) -> None:
        for path, member in sorted(self._folders.items(), reverse=True):
            fd = sc.open_in_root(self._fd, path or ".", os.O_RDONLY | os.O_DIRECTORY, extra=_RESOLVE_NO_SYMLINKS)
            try:
                _own(member, fd)
                os.fchmod(fd, member.mode & 0o7777 & ~stat.S_ISUID)
                os.utime(fd, (member.mtime, member.mtime))
            finally:
                os.close(fd)
        if "" not in self._folders:
            os.chmod(f"/proc/self/fd/{self._fd}", 0o755)


def _kind(parent: int, name: str) -> int | None:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None


def _names(folder: int) -> list[str]:
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def _own(member: tarfile.TarInfo, fd: int) -> None:
    if os.geteuid() == 0:
        os.chown(fd, member.uid, member.gid)
