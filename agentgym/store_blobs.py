"""The per-token values of a node to one compact blob, and back, exactly.

Owns the binary format, little endian behind letters that name what follows. Nearly every node holds the tokens of
one sampling first and the world's after them; that shape is stored without its blanks, any other in full.

Axes: T tokens that a node adds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

_HEAD = "<cIIq"
"""Of the usual shape: the letter of the ids' width, counts of sampled and other tokens, the version."""
_LENGTHS = struct.Struct("<cIII")
_TO_DIGITS = bytes(48 + byte if byte < 2 else 33 for byte in range(256))


class Tokens(NamedTuple):
    """The four fields of a node that hold one value a token."""

    ids_T: tuple[int, ...]
    mask_T: tuple[bool, ...]
    logprobs_T: tuple[float, ...]
    versions_T: tuple[int, ...]


def pack_tokens(
    ids_T: Sequence[int], mask_T: Sequence[bool], logprobs_T: Sequence[float], versions_T: Sequence[int]
) -> bytes:
    """Spell the four fields; they may differ in length.

    Raises:
        struct.error, TypeError, ValueError: one holds something that is none of its kind.
    """
    flags = bytes(mask_T)
    num, num_first = len(flags), flags.count(1)
    version = versions_T[0] if num_first and versions_T else -1
    if (
        flags.find(1, num_first) < 0
        and flags.count(0) == num - num_first
        and len(ids_T) == len(logprobs_T) == len(versions_T) == num
        and versions_T[:num_first].count(version) == num_first
        and versions_T[num_first:].count(-1) == num - num_first
        # by their bytes, since -0.0 equals 0.0
        and not pack_floats(logprobs_T[num_first:]).strip(b"\0")
    ):
        for code in "Hi":
            try:
                head = (code.encode(), num_first, num - num_first, version)
                return _usual(code, num, num_first).pack(*head, *ids_T, *logprobs_T[:num_first])
            except struct.error:
                pass  # an id needs more room
    ids, mask, logprobs = pack_ints(ids_T), _pack_mask(flags), pack_floats(logprobs_T)
    return _LENGTHS.pack(b"=", len(ids), len(mask), len(logprobs)) + ids + mask + logprobs + pack_ints(versions_T)


def unpack_tokens(blob: bytes) -> Tokens:
    """Undo `pack_tokens`."""
    if blob[:1] != b"=":
        code, num_first, num_rest, version = struct.unpack_from(_HEAD, blob)
        num = num_first + num_rest
        values = _usual(code.decode(), num, num_first).unpack(blob)[4:]
        logprobs = values[num:] + (0.0,) * num_rest
        versions = (version,) * num_first + (-1,) * num_rest
        return Tokens(values[:num], (True,) * num_first + (False,) * num_rest, logprobs, versions)
    _, num_ids, num_mask, num_logprobs = _LENGTHS.unpack_from(blob)
    start = _LENGTHS.size
    sections = []
    for length in (num_ids, num_mask, num_logprobs, len(blob)):
        sections.append(blob[start : start + length])
        start += length
    ids, mask, floats, ints = sections
    return Tokens(
        unpack_ints(ids), _unpack_mask(mask), struct.unpack(f"<{len(floats) // 8}d", floats), unpack_ints(ints)
    )


def pack_floats(values: Sequence[float]) -> bytes:
    """Doubles."""
    return _packer("d", len(values))(*values)


def pack_ints(values: Sequence[int]) -> bytes:
    """A letter for the width and the integers in the narrowest of one, two, four and eight bytes that fits."""
    count = len(values)
    for code in "bHi":
        try:
            return code.encode() + _packer(code, count)(*values)
        except struct.error:
            pass
    return b"q" + _packer("q", count)(*values)


def unpack_ints(blob: bytes) -> tuple[int, ...]:
    """Undo `pack_ints`."""
    code = blob[:1].decode()
    return struct.unpack_from(f"<{(len(blob) - 1) // struct.calcsize(f'<{code}')}{code}", blob, 1)


def _pack_mask(flags: bytes) -> bytes:
    """Bits behind a 1 that marks where they begin; flags are bytes of 0 and 1."""
    return int(b"1" + flags.translate(_TO_DIGITS), 2).to_bytes(len(flags) // 8 + 1, "big")


def _unpack_mask(blob: bytes) -> tuple[bool, ...]:
    return tuple([digit == "1" for digit in bin(int.from_bytes(blob, "big"))[3:]])


# struct's own cache holds 100 formats, and here every length is a format


@lru_cache(maxsize=8192)
def _packer(code: str, count: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{count}{code}").pack


@lru_cache(maxsize=8192)
def _usual(code: str, num: int, num_first: int) -> struct.Struct:
    return struct.Struct(f"{_HEAD}{num}{code}{num_first}d")


def odd_tokens(values: dict[str, Any]) -> str | None:
    """Which of the four fields cannot be packed; None: all can."""
    checks: dict[str, Callable[[Any], object]] = {
        "token_ids_T": pack_ints,
        "mask_T": lambda mask: _pack_mask(bytes(mask)),
        "logprobs_T": pack_floats,
        "versions_T": pack_ints,
    }
    for name, check in checks.items():
        try:
            check(values[name])
        except (struct.error, TypeError, ValueError):
            return name
    return None
