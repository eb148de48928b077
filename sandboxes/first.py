"""The first process of a sandbox, as an executable of some 300 bytes; standard library only.

Owns the program. It leaves the dead to the kernel (SIGCHLD ignored), waits for the end of its standard input, and
ends; with it, the kernel ends its PID namespace. No shell will do: one that ignores SIGCHLD still wakes by it, and a
tenth of the memory and of the time to start a sandbox would go into its start.
"""

from __future__ import annotations

import errno
import os
import platform
import struct

MARK = "AGENTGYM_STATE_FOLDER"
"""In its environment: the folder of the run, so that strays can be told from strangers."""
# rt_sigaction(SIGCHLD, {SIG_IGN}, NULL, 8); while (read(0, below the stack, 1) > 0); exit_group(0)
_CODE = {
    "x86_64": "b80d000000 bf11000000 488d3527000000 31d2 41ba08000000 0f05"
    "31c0 31ff 488d742480 ba01000000 0f05 85c0 7fec b8e7000000 31ff 0f05",
    "aarch64": "c81080d2 200280d2 c1010010 020080d2 030180d2 010000d4"
    "e80780d2 000080d2 e14300d1 220080d2 010000d4 1f0000f1 4cffff54 c80b80d2 000080d2 010000d4",
}
_MACHINE = {"x86_64": 62, "aarch64": 183}
_IGNORE = struct.pack("QQQQ", 1, 0, 0, 0)
"""A struct sigaction, right behind the code, which is 8 bytes aligned."""
_BASE = 0x400000


def program(machine: str = "") -> bytes:
    """The executable, for this machine unless another is named.

    Raises:
        OSError: the architecture is not tabled.
    """
    machine = machine or platform.machine()
    if machine not in _CODE:
        raise OSError(errno.ENOSYS, f"no first process for {machine}; known: {', '.join(_CODE)}")
    text = bytes.fromhex(_CODE[machine]) + _IGNORE
    start = 64 + 2 * 56
    size = start + len(text)
    identity = b"\x7fELF" + bytes((2, 1, 1)) + bytes(9)
    head = struct.pack("HHIQQQIHHHHHH", 2, _MACHINE[machine], 1, _BASE + start, 64, 0, 0, 64, 56, 2, 64, 0, 0)
    load = struct.pack("IIQQQQQQ", 1, 5, 0, _BASE, _BASE, size, size, 0x1000)
    stack = struct.pack("IIQQQQQQ", 0x6474E551, 6, 0, 0, 0, 0, 0, 16)
    return identity + head + load + stack + text


def place(path: str) -> None:
    """Write the executable."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o500)
    with open(fd, "wb") as file:
        file.write(program())
