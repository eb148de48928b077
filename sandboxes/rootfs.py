"""A root file system out of a tar archive, or out of an image that `docker save` wrote, without a daemon.

Owns what is refused. Archives come from strangers: each one is unpacked as a whole or not at all, into a folder that
nobody sees before it is complete.

Refused, with the member's name: absolute paths and `..`; paths through a link or a file; links that climb above the
root; hard links to what is not in the archive; device nodes, pipes and unknown kinds; two members of one name; paths
that are too long; setuid and setgid files, unless their bits are to be cleared; more bytes than allowed, or than any
honest archive of that size holds. An absolute link is kept: it means the new root.
Kept: content, modes, modification times, links, and as root the owners. Left out: extended attributes.
"""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import posixpath
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from typing import IO

from agentgym.errors import SandboxError
from agentgym.sandboxes.trash import remove_tree
from agentgym.sandboxes.untar import CHUNK, Meter, Root, unpacked

_MAX_OUTER_MEMBERS = 100_000
_BROKEN = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError, OverflowError, RecursionError, OSError)


def unpack(tar_path: str, folder: str, *, max_bytes: int, clear_setuid: bool = False) -> None:
    """Make a folder out of a tar archive, plain or packed with gzip, bzip2 or xz.

    Args:
        tar_path: The archive.
        folder: Must be missing, or empty.
        max_bytes: Of all that is unpacked, headers and holes of sparse files included.
        clear_setuid: Take setuid and setgid files without these bits, instead of refusing them.

    Raises:
        PathRefused: names the member that is refused; nothing was unpacked.
        SandboxError: the archive is broken, or the folder cannot be filled.
    """
    with _staged(tar_path, folder) as root_path, _source(tar_path) as file:
        meter = Meter(tar_path, os.fstat(file.fileno()).st_size, max_bytes)
        with Root(root_path, meter, clear_setuid) as root:
            root.add_layer(file, whiteouts=False)


def unpack_image(tar_path: str, folder: str, *, max_bytes: int, clear_setuid: bool = True) -> None:
    """Make a folder out of the layers of one image, as `docker save` writes it.

    Args:
        tar_path: The archive, with one image in it.
        folder: Must be missing, or empty.
        max_bytes: As for `unpack`, of all layers together, what later ones delete included.
        clear_setuid: As for `unpack`; nearly every image has `su`, and sandboxes ignore the bits.

    Raises:
        PathRefused: names the member that is refused; nothing was unpacked.
        SandboxError: the archive is broken or no image, or the folder cannot be filled.
    """
    with _staged(tar_path, folder) as root_path, _source(tar_path) as file:
        meter = Meter(tar_path, os.fstat(file.fileno()).st_size, max_bytes)
        with (
            Root(root_path, meter, clear_setuid) as root,
            tarfile.open(fileobj=unpacked(file, meter), mode="r:") as outer,
        ):
            for layer in _layers(outer, meter):
                content = outer.extractfile(layer)
                if content is None:
                    raise SandboxError(f"{tar_path}: layer {layer.name!r} cannot be read; save the image again")
                root.add_layer(content, whiteouts=True)


@contextlib.contextmanager
def _staged(tar_path: str, folder: str) -> Iterator[str]:
    """A place to fill that becomes the folder at the end, or is removed."""
    folder = os.path.abspath(folder)
    if os.path.lexists(folder) and (os.path.islink(folder) or not os.path.isdir(folder) or os.listdir(folder)):
        raise SandboxError(f"{folder} is there and not an empty folder; name one that is missing")
    try:
        # for this user only, until it is complete
        root = tempfile.mkdtemp(prefix=".agentgym-unpack-", dir=os.path.dirname(folder))
    except OSError as error:
        raise SandboxError(f"{folder} cannot be filled: {error}") from error
    try:
        yield root
        os.rename(root, folder)
    except _BROKEN as error:
        raise SandboxError(f"{tar_path} cannot be unpacked to {folder}: {error or type(error).__name__}") from error
    finally:
        if os.path.lexists(root):
            remove_tree(root)


@contextlib.contextmanager
def _source(tar_path: str) -> Iterator[IO[bytes]]:
    if os.path.lexists(tar_path) and not os.path.isfile(tar_path):
        raise SandboxError(f"{tar_path} is no regular file; write the archive to one")
    with open(tar_path, "rb") as file:
        yield file


def _layers(outer: tarfile.TarFile, meter: Meter) -> list[tarfile.TarInfo]:
    """The layers that the manifest names, lowest first."""
    tar_path = meter.archive
    found: dict[str, tarfile.TarInfo] = {}
    for member in outer:
        meter.member = member.name
        name = posixpath.normpath(member.name)
        if name in found and not member.isdir():
            meter.refuse("is there twice")
        if len(found) > _MAX_OUTER_MEMBERS:
            meter.refuse("is one more than an image has")
        found[name] = member
    manifest = found.get("manifest.json")
    content = outer.extractfile(manifest) if manifest is not None and manifest.isreg() else None
    if content is None:
        raise SandboxError(f"{tar_path} has no manifest.json; write the image with docker save")
    images = json.loads(content.read(CHUNK))
    if not isinstance(images, list) or len(images) != 1:
        raise SandboxError(f"{tar_path} does not hold exactly one image; docker save one NAME:TAG at a time")
    layers = images[0].get("Layers") if isinstance(images[0], dict) else None
    if not isinstance(layers, list) or not all(isinstance(name, str) for name in layers):
        raise SandboxError(f"{tar_path} names no layers in manifest.json; write the image with docker save")
    return [_layer(found, name, tar_path) for name in layers]


def _layer(found: dict[str, tarfile.TarInfo], name: str, tar_path: str) -> tarfile.TarInfo:
    wanted = posixpath.normpath(name)
    for _ in range(3):  # a layer that an image has twice is a link to the first
        member = found.get(wanted)
        if member is None or not member.issym():
            break
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(wanted), member.linkname))
    if member is None or not member.isreg():
        raise SandboxError(f"{tar_path}: layer {name!r} of its manifest is not in it; save the image again")
    return member
