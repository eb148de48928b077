"""Whether CRIU, which writes whole process trees to disk and wakes them up again, could work on this machine.

Owns the probe, which asks the installed program. No backend dumps or restores with it: a dump and a restore take 100 ms
and more each, where live Python forks in 2 ms (`pyfork.py`) and a shell is replayed in 5.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass

SEEN_WORKING = (4, 2)
"""The oldest version seen to work on Linux 6.18, where 3.17 (Debian 12) fails at its start."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TIMEOUT_S = 10.0
_COST = (
    "background processes and open sockets of a shell are lost by a fork, and named; variables of live Python are kept"
)


@dataclass(frozen=True, slots=True)
class Criu:
    """What was found."""

    works: bool
    """Installed, and its own check passes."""
    version: tuple[int, ...]
    """Such as (4, 2); empty where it is not installed or does not say."""
    detail: str
    """One line: what it is, and where it does not work, why, what that costs and what to do."""


def probe(path: str | None = None) -> Criu:
    """Ask the installed CRIU.

    Args:
        path: Folders to look in, separated by colons; None: PATH and the usual ones for administrators.
    """
    program = shutil.which("criu", path=f"{os.environ.get('PATH', '')}:{_PATH}" if path is None else path)
    wanted = f"version {'.'.join(map(str, SEEN_WORKING))} or newer"
    if program is None:
        return Criu(False, (), f"not installed; {_COST}")
    try:
        _, said = _run(program, "--version")
        found = re.search(r"Version: (\d+(?:\.\d+)*)", said)
        version = tuple(map(int, found[1].split("."))) if found else ()
        code, said = _run(program, "check")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Criu(False, (), f"{program} does not answer: {error}; {_COST}")
    name = f"{program}, version {found[1] if found else 'unknown'}"
    if code == 0:
        return Criu(True, version, f"{name}: its check passes; no backend dumps with it, {_COST}")
    why = next((line for line in said.splitlines() if line.startswith("Error")), f"exit {code}")
    if version and version < SEEN_WORKING:
        remedy = f"too old for Linux {platform.release()}: take {wanted}"
    else:
        remedy = "`criu check` says what this kernel or these rights lack"
    return Criu(False, version, f"{name}: {remedy} ({why[:120]}); {_COST}")


def _run(program: str, argument: str) -> tuple[int, str]:
    done = subprocess.run(
        [program, argument], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL, cwd="/",
    )  # fmt: skip
    return done.returncode, done.stdout
