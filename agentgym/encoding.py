r"""Plain data to ASCII JSON and back, exactly, or an error that names the field.

Owns what JSON cannot say: NaN and infinities, integers beyond 2**53, lone surrogates, bytes, tuples beside
lists, sets, numpy scalars with their dtype, numpy arrays. Leaves records and tables to `store.py`.

A value that JSON says exactly is written plainly. Any other becomes an object with one key that starts with
"$"; a dict with such a key of its own, or with a key that JSON would change, becomes {"$dict": [[key, value], ...]}:

    float nan, inf, -inf       {"$float": "nan"}
    int beyond 2**53           {"$int": "0x20000000000001"}
    str "\ud83d" + "\ude00"    {"$str": base64}, since JSON would join the two into one character
    bytes, bytearray           {"$bytes": base64}, {"$bytearray": base64}
    tuple, set, frozenset      {"$tuple": [...]}, {"$set": [...]}, {"$frozenset": [...]}
    MappingProxyType           {"$proxy": {...}}
    numpy scalar               {"$np": [dtype, base64]}, texts {"$np_str": base64}, {"$np_bytes": base64}
    numpy array                {"$array": [dtype, shape, base64]}

Only exact types count: a subclass (an enum, a named tuple) would come back as something else and is refused.
Not kept: the payload bits of a NaN, the memory order of an array, and that two fields were one object.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np

from agentgym.errors import StoreError

MAX_DEPTH = 200
MAX_ARRAY_BYTES = 1 << 20
_MAX_PLAIN_INT = 1 << 53
"""Readers that hold numbers as doubles change integers beyond it."""
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_ARRAY_KINDS = "biufcSUmM"
_write = json.JSONEncoder(ensure_ascii=True, allow_nan=False, check_circular=False, separators=(",", ":")).encode

Refusal = Callable[[str, str], Any]
"""Given the path and the reason, raises or gives what is written instead."""


def dumps(value: Any, field: str = "value") -> str:
    """Spell a value as ASCII JSON that `loads` reads back exactly.

    Args:
        value: Plain data.
        field: What the value is called in errors, such as "info".

    Raises:
        StoreError: something in it cannot be spelled; names its path, such as info.extra[3].
    """

    def refuse(path: str, reason: str) -> Any:
        raise StoreError(f"{path} cannot be stored: {reason}")

    return _spell(value, field, refuse)


def dumps_lossy(value: Any, field: str = "value") -> tuple[str, list[str]]:
    """Spell a value, putting a text in the place of each part that cannot be spelled.

    Returns:
        The JSON and one line for each part left out; no lines: `loads` gives the value back exactly.
    """
    lost: list[str] = []

    def refuse(path: str, reason: str) -> Any:
        lost.append(f"{path} cannot be stored: {reason}")
        return f"<not stored: {lost[-1]}>"

    return _spell(value, field, refuse), lost


def loads(text: str) -> Any:
    """Read back what `dumps` wrote.

    Raises:
        StoreError: the text is not such JSON; nothing is guessed.
    """
    try:
        return json.loads(text, object_hook=_untag, parse_constant=_no_constant)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise StoreError(f"stored JSON cannot be read ({error}): {text[:80]!r}; the record is damaged") from error


def _spell(value: Any, field: str, refuse: Refusal) -> str:
    try:
        return _write(_tree(value, field, 0, refuse))
    except RecursionError:
        return _write(refuse(field, "Python's stack is too full to walk it; store it from a shallower call"))


def _tree(value: Any, path: str, depth: int, refuse: Refusal) -> Any:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return value if value.isascii() or not _PAIR.search(value) else _tag("str", _base64(_utf8(value)))
    if kind is int:
        return value if -_MAX_PLAIN_INT <= value <= _MAX_PLAIN_INT else _tag("int", hex(value))
    if kind is float:
        return value if math.isfinite(value) else _tag("float", str(value))
    if depth >= MAX_DEPTH:
        return refuse(path, f"it is nested deeper than {MAX_DEPTH} levels (or contains itself); store it flatter")
    if kind is dict:
        return _dict(value, path, depth, refuse)
    if kind is list:
        return [_tree(item, f"{path}[{i}]", depth + 1, refuse) for i, item in enumerate(value)]
    return _special(value, path, depth, refuse)


def _dict(value: dict[Any, Any], path: str, depth: int, refuse: Refusal) -> Any:
    plain: dict[str, Any] = {}
    escape = False
    for key, item in value.items():
        if type(key) is not str:
            place = f"{path}[{key!r:.40}]"
            plain[place] = refuse(place, f"its key is of type {type(key).__name__}; keys must be texts")
            continue
        escape = escape or key.startswith("$") or (not key.isascii() and _PAIR.search(key) is not None)
        plain[key] = _tree(item, f"{path}.{key:.40}", depth + 1, refuse)
    if escape:
        return _tag("dict", [[_tree(key, path, depth, refuse), item] for key, item in plain.items()])
    return plain


def _special(value: Any, path: str, depth: int, refuse: Refusal) -> Any:
    kind = type(value)
    if kind is tuple:
        return _tag("tuple", [_tree(item, f"{path}[{i}]", depth + 1, refuse) for i, item in enumerate(value)])
    if kind is set or kind is frozenset:
        # sorted by their spelling, so that equal sets are equal texts whatever the hash seed
        items = [_tree(item, f"{path}{{{item!r:.40}}}", depth + 1, refuse) for item in value]
        return _tag(kind.__name__, sorted(items, key=_write))
    if kind is bytes or kind is bytearray:
        return _tag(kind.__name__, _base64(bytes(value)))
    if kind is MappingProxyType:
        return _tag("proxy", _tree(dict(value), path, depth, refuse))
    if kind is np.ndarray or (isinstance(value, np.generic) and kind.__module__ == "numpy"):
        return _numpy(value, path, refuse)
    return refuse(
        path,
        f"it is of type {kind.__module__}.{kind.__qualname__}; convert it to None, bool, int, float, str, bytes, "
        "list, tuple, set, dict or a numpy value",
    )


def _numpy(value: Any, path: str, refuse: Refusal) -> Any:
    kind = type(value)
    # str() and bytes() of them would drop NULs at the end
    if kind is np.str_:
        return _tag("np_str", _base64(_utf8(value)))
    if kind is np.bytes_:
        return _tag("np_bytes", _base64(value[:]))
    dtype = value.dtype
    if dtype.kind not in _ARRAY_KINDS or dtype.itemsize == 0:
        return refuse(path, f"its dtype is {dtype}; numbers, booleans, times and fixed-length texts can be")
    if value.nbytes > MAX_ARRAY_BYTES:
        return refuse(
            path, f"the array has {value.nbytes} bytes, at most {MAX_ARRAY_BYTES} are kept; save it in a file"
        )
    data = _base64(value.tobytes())
    if kind is not np.ndarray:
        return _tag("np", [dtype.str, data])
    return _tag("array", [dtype.str, list(value.shape), data])


def _tag(name: str, content: Any) -> dict[str, Any]:
    return {f"${name}": content}


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _unbase64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _scalar(content: list[Any]) -> Any:
    return np.frombuffer(_unbase64(content[1]), np.dtype(content[0]))[0]


def _array(content: list[Any]) -> Any:
    # a copy, since frombuffer gives a view that cannot be written
    return np.frombuffer(_unbase64(content[2]), np.dtype(content[0])).reshape(content[1]).copy()


_READERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$int": lambda text: int(text, 16),
    "$str": lambda text: _unbase64(text).decode("utf-8", "surrogatepass"),
    "$bytes": _unbase64,
    "$bytearray": lambda text: bytearray(_unbase64(text)),
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$proxy": MappingProxyType,
    "$dict": lambda pairs: {key: item for key, item in pairs},
    "$np": _scalar,
    "$np_str": lambda text: np.str_(_unbase64(text).decode("utf-8", "surrogatepass")),
    "$np_bytes": lambda text: np.bytes_(_unbase64(text)),
    "$array": _array,
}


def _untag(found: dict[str, Any]) -> Any:
    if len(found) == 1:
        ((key, content),) = found.items()
        if key.startswith("$"):
            return _READERS[key](content)
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not written by dumps")
