"""The read-only base of a sandbox: an allow-list of what it sees of the host; standard library only.

Owns the skeleton directory that lies at the bottom of every layer chain. `/usr` is shown through an overlay
of its own, so that a sandbox can write there; other program directories are shown read-only. Of `/etc` only
what programs need to start is copied: no key, no password, no user of the host.
"""

from __future__ import annotations

import os
import shutil

PROGRAM_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DIRECTORIES = ("dev", "etc", "home", "media", "mnt", "opt", "proc", "root", "run", "srv", "sys", "tmp", "usr")
_MORE = ("var", "var/cache", "var/lib", "var/log", "var/spool", "var/tmp", "run/lock", "run/shm")
_STICKY = ("tmp", "var/tmp", "run/lock", "run/shm")
_FROM_ETC = (
    "alternatives",
    "debian_version",
    "host.conf",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "magic",
    "magic.mime",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "protocols",
    "rpc",
    "services",
    "shells",
    "terminfo",
    "timezone",
)
_USERS = (
    "root:0:/root daemon:1:/usr/sbin bin:2:/bin sys:3:/dev games:5:/usr/games man:6:/var/cache/man mail:8:/var/mail"
)
_USERS += " news:9:/var/spool/news proxy:13:/bin www-data:33:/var/www backup:34:/var/backups nobody:65534:/nonexistent"
_GROUPS = "root:0 daemon:1 bin:2 sys:3 adm:4 tty:5 disk:6 mail:8 news:9 man:12 proxy:13 sudo:27 www-data:33 backup:34"
_GROUPS += " staff:50 games:60 users:100 nogroup:65534"
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "shm": "/run/shm"}


def make_skeleton(root: str) -> list[str]:
    """Fill an empty directory; give the names of host directories to bind read-only over it.

    On a merged-/usr host that list is empty, since /bin and its like are links into /usr.
    """
    binds = []
    os.chmod(root, 0o755)
    for name in (*_DIRECTORIES, *_MORE):
        os.mkdir(os.path.join(root, name), 0o755)
    for name in _STICKY:
        os.chmod(os.path.join(root, name), 0o1777)
    os.chmod(os.path.join(root, "root"), 0o700)
    for name in PROGRAM_LINKS:
        host = "/" + name
        if os.path.islink(host):
            os.symlink(os.readlink(host).lstrip("/"), os.path.join(root, name))
        elif os.path.isdir(host):
            os.mkdir(os.path.join(root, name), 0o755)
            binds.append(name)
    _make_etc(os.path.join(root, "etc"))
    return binds


def _make_etc(etc: str) -> None:
    for name in _FROM_ETC:
        source, target = os.path.join("/etc", name), os.path.join(etc, name)
        if os.path.isdir(source):
            shutil.copytree(source, target, symlinks=True, ignore_dangling_symlinks=True)
        elif os.path.isfile(source):
            shutil.copyfile(source, target)
    users = [entry.split(":") for entry in _USERS.split()]
    groups = [entry.split(":") for entry in _GROUPS.split()]
    shells = {"root": "/bin/bash"}
    texts = {
        "passwd": "".join(
            f"{n}:x:{i}:{i if i != '5' else '60'}:{n}:{h}:{shells.get(n, '/usr/sbin/nologin')}\n" for n, i, h in users
        ),
        "group": "".join(f"{n}:x:{i}:\n" for n, i in groups),
        "hosts": "127.0.0.1\tlocalhost\n::1\tlocalhost\n",
        "hostname": "sandbox\n",
        "profile": "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\nexport PATH\n",
    }
    for name, text in texts.items():
        with open(os.path.join(etc, name), "w", encoding="utf-8") as file:
            file.write(text)
