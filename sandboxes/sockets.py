"""A filter that lets a process make no socket that leads out of the machine; standard library only.

Owns the kernel's byte code for it. Landlock's rules for TCP have ways round: multipath TCP, fast open, listening
without a bind, and UDP is not among them. What cannot be made cannot be used.

Protects from: every network, virtual machine sockets (vsock) and other exotic families; io_uring, which would make
sockets past the filter.
Does not protect from: Unix sockets with a path, such as a container daemon's; sockets that another program hands over.
"""

from __future__ import annotations

import errno
import platform
import struct

_ARCH = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
"""The kernel's word for the architecture, and its number of `socket`."""
_IO_URING_SETUP = 425
_FAMILIES = (1, 16)
"""Unix and netlink, which lists interfaces and reaches nobody."""
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NR_AT, _ARCH_AT, _ARG0_AT = 0, 4, 16


def program() -> bytes:
    """The filter, as an array of kernel instructions.

    Raises:
        OSError: the architecture is not tabled.
    """
    machine = platform.machine()
    if machine not in _ARCH:
        raise OSError(errno.ENOSYS, f"no system call numbers for {machine}; known: {', '.join(_ARCH)}")
    architecture, socket_number = _ARCH[machine]
    code = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),  # another architecture's numbers would mean other calls
        (_LOAD, 0, 0, _NR_AT),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_EQUAL, 0, 1, _IO_URING_SETUP),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_EQUAL, 1, 0, socket_number),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _ARG0_AT),
        (_EQUAL, 2, 0, _FAMILIES[0]),
        (_EQUAL, 1, 0, _FAMILIES[1]),
        (_RETURN, 0, 0, _ERRNO | errno.EACCES),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)
