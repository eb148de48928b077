"""Overlay mounts over chains of layers; standard library only.

Owns the layout of a layer folder and the mount options. A layer is `r` (upper of the root), `w` (its work
folder), `u` and `x` (the same for /usr). A chain lists layers from top to bottom and never names the base.
"""

from __future__ import annotations

import os

from agentgym.sandboxes import syscalls as sc

BASE = "base"
MAX_DEPTH = 450
"""The kernel stops at 500 lower layers; we refuse earlier, with a message."""


def make_layer(layers: str, name: str) -> None:
    """Make the four empty folders of a layer."""
    path = os.path.join(layers, name)
    os.mkdir(path, 0o755)
    for part in ("r", "w", "u", "x"):
        os.mkdir(os.path.join(path, part), 0o755)


def changed(layers: str, name: str, part: str) -> bool:
    """True where anything was written into that part of a layer; a changed mode of its top counts."""
    path = os.path.join(layers, name, part)
    if os.stat(path).st_mode & 0o7777 != 0o755:
        return True
    with os.scandir(path) as entries:
        return any(True for _ in entries)


def mount_root(layers: str, upper: str | None, chain: list[str], userxattr: bool) -> int:
    """A detached mount of base, chain and upper; without an upper it is read-only."""
    lowers = [f"{name}/r" for name in chain] + [f"{BASE}/r"]
    return _mount(layers, (f"{upper}/r", f"{upper}/w") if upper else None, lowers, userxattr)


def mount_usr(layers: str, upper: str | None, chain: list[str], userxattr: bool) -> int:
    """A detached mount of /usr with what the given layers changed in it."""
    lowers = [f"{name}/u" for name in chain] + ["/usr"]
    if upper is None and len(lowers) == 1:
        fd = sc.open_tree("/usr")
        sc.set_mount_attributes(fd, sc.ATTR_RDONLY | sc.ATTR_NOSUID | sc.ATTR_NODEV)
        return fd
    return _mount(layers, (f"{upper}/u", f"{upper}/x") if upper else None, lowers, userxattr)


def _mount(layers: str, upper: tuple[str, str] | None, lowers: list[str], userxattr: bool) -> int:
    # relative names keep every option under the kernel's 256 bytes, wherever the state folder lies
    os.chdir(layers)
    attributes = sc.ATTR_NOSUID | sc.ATTR_NODEV
    if _lowers_one_by_one:
        options: list[tuple[str, str | None]] = [("lowerdir+", name) for name in lowers]
    else:
        return _mount_by_string(upper, lowers, userxattr)
    if userxattr:
        options.append(("userxattr", None))
    options += [("index", "off"), ("metacopy", "off")]
    if upper is not None:
        # volatile: without it each unmount waits for the disk
        options += [("upperdir", upper[0]), ("workdir", upper[1]), ("volatile", None)]
    else:
        attributes |= sc.ATTR_RDONLY
    return sc.new_mount("overlay", options, attributes)


_lowers_one_by_one = True


def use_old_mount_call() -> None:
    """For kernels before 6.8, which take all lower layers in one string of at most a page."""
    global _lowers_one_by_one
    _lowers_one_by_one = False


def _mount_by_string(upper: tuple[str, str] | None, lowers: list[str], userxattr: bool) -> int:
    options = "lowerdir=" + ":".join(lowers) + ",index=off,metacopy=off"
    options += ",userxattr" if userxattr else ""
    options += f",upperdir={upper[0]},workdir={upper[1]},volatile" if upper else ",ro"
    point = os.path.abspath("../old")
    sc.mount("overlay", point, "overlay", sc.MS_NOSUID | sc.MS_NODEV | (0 if upper else sc.MS_RDONLY), options)
    try:
        return sc.open_tree(point)
    finally:
        sc.umount(point)
