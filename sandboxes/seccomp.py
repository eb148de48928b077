"""The system calls that a sandbox refuses, as a filter in the kernel's own byte code; standard library only.

Owns the list and its assembly. The spawner sets the filter on itself, so that every sandbox has it, and yet must
mount and change namespaces: its own calls carry a secret in the sixth argument, which the kernel ignores and the filter
knows. Nobody below can read it: the spawner is out of sight, and ptrace is refused.
"""

from __future__ import annotations

import errno
import platform
import struct

# x86-64 and arm64 numbers of calls older than the shared numbering, which begins at 424
_OLD = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "unshare": (272, 97),
    "setns": (308, 268),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "userfaultfd": (323, 282),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "kcmp": (312, 272),
}
_X86_ONLY = {
    "iopl": 172,
    "ioperm": 173,
    "modify_ldt": 154,
    "uselib": 134,
    "ustat": 136,
    "sysfs": 139,
    "nfsservctl": 180,
}
# open_tree to fspick, io_uring, mount_setattr, quotactl_fd, memfd_secret, open_tree_attr
_NEW = (428, 429, 430, 431, 432, 433, 425, 426, 427, 442, 443, 447, 467)
_GUARDED = ("mount", "umount2", "pivot_root", "unshare", "setns", "sethostname")
_GUARDED_NEW = (428, 429, 430, 431, 432, 442)
"""Refused below, allowed with the secret."""
_SOCKET = (41, 198)
_FAMILIES = (1, 2, 10, 16)
"""Of sockets that can be made: unix, both internets (without an interface) and netlink. Others, such as vsock, which
reaches the hypervisor of a virtual machine, do not care for network namespaces."""
_CLONE = (56, 220)
_CLONE3 = 435
_NAMESPACE_FLAGS = 0x7E020080
"""All CLONE_NEW*, the time namespace included."""
_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_LOAD, _EQUAL, _SET, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NR, _ARCH_AT, _ARG0, _ARG5 = 0, 4, 16, 56


def program(secret: int) -> bytes:
    """The filter, as an array of kernel instructions.

    Args:
        secret: 64 bits; with it in the sixth argument, mounting and changing namespaces are allowed.

    Raises:
        OSError: the architecture is not tabled.
    """
    machine = platform.machine()
    if machine not in _ARCH:
        raise OSError(errno.ENOSYS, f"no system call numbers for {machine}; known: {', '.join(_ARCH)}")
    column = 0 if machine == "x86_64" else 1
    guarded = {_OLD[name][column] for name in _GUARDED} | set(_GUARDED_NEW)
    refused = {numbers[column] for numbers in _OLD.values()} | set(_NEW) - guarded
    refused |= set(_X86_ONLY.values()) if machine == "x86_64" else set()
    code: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, _ARCH[machine]),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),  # another architecture's numbers would mean other calls
        (_LOAD, 0, 0, _NR),
        (_AT_LEAST, 0, 1, 0x40000000),  # x32
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    for number in sorted(guarded):
        code += [(_EQUAL, 0, 6, number), *_with_secret(secret)]
    for number in sorted(refused - guarded):
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    # what is asked for with clone3 lies in memory, where a filter cannot look: libraries fall back to clone
    code += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    num = len(_FAMILIES)
    code += [(_EQUAL, 0, num + 3, _SOCKET[column]), (_LOAD, 0, 0, _ARG0)]
    code += [(_EQUAL, num - index, 0, family) for index, family in enumerate(_FAMILIES)]
    code += [(_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    code += [
        (_EQUAL, 0, 3, _CLONE[column]),
        (_LOAD, 0, 0, _ARG0),
        (_SET, 0, 1, _NAMESPACE_FLAGS),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _with_secret(secret: int) -> list[tuple[int, int, int, int]]:
    return [
        (_LOAD, 0, 0, _ARG5),
        (_EQUAL, 0, 3, secret & 0xFFFFFFFF),
        (_LOAD, 0, 0, _ARG5 + 4),
        (_EQUAL, 0, 1, secret >> 32),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
    ]
