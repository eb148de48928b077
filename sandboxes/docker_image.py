"""The default base of backend `docker`: a small image of this machine's own programs, so that nothing is downloaded.

Owns the list of programs and the archive. Libraries are found by asking the loader of each program; `/etc` and the
folders are the skeleton that backend `namespace` shows.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence

from agentgym.sandboxes.base import make_skeleton

PROGRAMS = tuple(
    "bash sh [ awk b2sum base32 base64 basename cat chgrp chmod chown cksum cmp comm cp csplit cut date dd df diff dirname"
    " du echo egrep env expand expr factor false fgrep file find fmt fold free getopt grep groups gunzip gzip head"
    " hostname id install join kill link ln logname ls md5sum mkdir mkfifo mktemp mv nice nl nohup nproc numfmt od paste"
    " patch pathchk pgrep pkill pr printenv printf ps ptx pwd readlink realpath rev rm rmdir sed seq setsid sha1sum"
    " sha256sum sha512sum shred shuf sleep sort split stat stdbuf stty sum sync tac tail tar tee test timeout touch tr"
    " true truncate tsort tty uname unexpand uniq unlink uptime wc which who whoami xargs xxd yes zcat".split()
)
"""What the image holds, as far as this machine has it."""


def host_image(programs: Sequence[str] = PROGRAMS) -> bytes:
    """A root file system as a tar archive: programs of this machine, their libraries, a neutral `/etc`."""
    found = sorted({path for path in map(shutil.which, programs) if path})
    files = {_place(path): os.path.realpath(path) for path in found}
    listed = subprocess.run(["ldd", *found], capture_output=True, text=True, check=False).stdout
    for library in set(re.findall(r"(/\S+) \(0x", listed)):
        files[_place(library)] = os.path.realpath(library)
    archive_bytes = io.BytesIO()
    with tempfile.TemporaryDirectory() as root, tarfile.open(fileobj=archive_bytes, mode="w") as archive:
        for name in make_skeleton(root):
            os.makedirs(os.path.join(root, name), exist_ok=True)
        archive.add(root, arcname=".", filter=_as_root)
        made = set(archive.getnames())
        for path, source in sorted(files.items()):
            _add_parents(archive, path, made)
            archive.add(source, arcname="." + path, filter=_as_root)
    return archive_bytes.getvalue()


def _place(path: str) -> str:
    """Where a file lies in the image: on most machines /bin and /lib are links into /usr, and are so there too."""
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _add_parents(archive: tarfile.TarFile, path: str, made: set[str]) -> None:
    parts = path.split("/")[1:-1]
    for end in range(1, len(parts) + 1):
        name = "./" + "/".join(parts[:end])
        if name not in made:
            made.add(name)
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry
