"""Plain data to JSON and back: exactly, or an error that names the field."""

from __future__ import annotations

import json
import math
import struct
import threading
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.encoding import MAX_ARRAY_BYTES, MAX_DEPTH, dumps, dumps_lossy, loads
from agentgym.errors import StoreError
from agentgym.types import StopReason

TEXT = st.text(st.characters(codec=None, categories=None))  # lone surrogates and NUL included
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.binary()
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5)
VALUES = st.recursive(
    SCALARS | HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(TEXT | st.sampled_from(["$dict", "$float", "$"]), inner, max_size=4)
        | st.sets(HASHABLE, max_size=3)
    ),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    """Equal in value and in type, everywhere; NaN equals NaN and -0.0 does not equal 0.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return (math.isnan(left) and math.isnan(right)) or struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, dict | MappingProxyType):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, set | frozenset):
        return len(left) == len(right) and all(any(same(a, b) for b in right) for a in left)
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and left.shape == right.shape and bool(left.tobytes() == right.tobytes())
    return bool(left == right)


@given(VALUES)
def test_any_plain_value_comes_back_exactly(value: Any) -> None:
    text = dumps(value)
    assert text.isascii()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert same(loads(text), value)


@pytest.mark.parametrize(
    "value",
    [
        *(float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 0.1),
        *(2**53, 2**53 + 1, -(2**64), 10**5000, True, 1, 1.0),
        *("\ud800", "\ud83d\ude00", "\U0001f600", "a\0b", b"\0\xff", bytearray(b"x"), (), (1,), [1], set(), {1, "a"}),
        *({"$float": "nan"}, {"$dict": []}, {"\ud83d\ude00": 1}, MappingProxyType({"a": (1,)})),
        *(np.float32(0.1), np.float64("nan"), np.int64(-1), np.bool_(True), np.uint8(255), np.complex64(1 + 2j)),
        *(np.str_("a\0"), np.str_(""), np.bytes_(b"a\0"), np.datetime64("2020-01-01"), np.longdouble(1) / 3),
        *(np.arange(6).reshape(2, 3), np.zeros((0, 3)), np.array(3), np.array(["a", "bc"]), np.array([1], ">i4")),
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_json_cannot_say_comes_back_exactly(value: Any) -> None:
    assert same(loads(dumps(value)), value)
    assert same(loads(dumps({"deep": [(value,)]})), {"deep": [(value,)]})


def test_arrays_come_back_writable() -> None:
    array = loads(dumps(np.zeros(3)))
    array[0] = 1
    assert array.tolist() == [1, 0, 0]


def test_equal_sets_have_equal_texts() -> None:
    assert dumps(set("abcdefgh")) == dumps(set("hgfedcba"))


class Named(tuple[int, ...]):
    pass


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"extra": [0, 1, 2, threading.Lock()]}, "info.extra[3] cannot be stored: it is of type _thread.lock"),
        ({"a": {1: 2}}, "info.a[1] cannot be stored: its key is of type int"),
        ({"stop": StopReason.SUCCESS}, "info.stop cannot be stored: it is of type agentgym.types.StopReason"),
        ({"named": Named((1, 2))}, "info.named cannot be stored"),
        ({"ordered": OrderedDict()}, "info.ordered cannot be stored"),
        ({"objects": np.array([object()])}, "info.objects cannot be stored: its dtype is object"),
        ({"record": np.zeros(1, [("a", "i4")])}, "info.record cannot be stored: its dtype is"),
        (
            {"big": np.zeros(MAX_ARRAY_BYTES + 1, np.uint8)},
            f"info.big cannot be stored: the array has {MAX_ARRAY_BYTES + 1}",
        ),
        ({"deep": nested(MAX_DEPTH + 1)}, f"nested deeper than {MAX_DEPTH} levels"),
        ({"loop": LOOP}, "or contains itself"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_spelled_names_its_field(value: dict[str, Any], says: str) -> None:
    with pytest.raises(StoreError, match="info") as caught:
        dumps(value, "info")
    assert says in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_the_deepest_that_is_allowed_comes_back() -> None:
    for inner in (nested(MAX_DEPTH), {"a": nested(MAX_DEPTH - 1)}):
        assert same(loads(dumps(inner)), inner)
    value: Any = ()
    for _ in range(MAX_DEPTH - 1):
        value = (value,)
    assert same(loads(dumps(value)), value)


def test_a_bad_part_costs_only_itself() -> None:
    text, lost = dumps_lossy({"good": (1, float("inf")), "bad": [threading.Lock(), 2]}, "info")
    assert lost == [
        line for line in lost if line.startswith("info.bad[0] cannot be stored: it is of type _thread.lock")
    ]
    assert len(lost) == 1
    value = loads(text)
    assert value["good"] == (1, float("inf")) and value["bad"][1] == 2
    assert value["bad"][0] == f"<not stored: {lost[0]}>"
    assert dumps_lossy([1, 2]) == ("[1,2]", [])


def test_a_full_stack_is_an_error_of_ours() -> None:
    def dig(depth: int) -> str:
        return dumps(nested(150), "info") if depth == 0 else dig(depth - 1)

    assert dig(10)
    with pytest.raises(StoreError, match="info cannot be stored: Python's stack is too full"):
        dig(700)


@pytest.mark.parametrize(
    "text", ["", "{", "NaN", '{"$nothing":1}', '{"$int":"x"}', '{"$bytes":"?"}', '{"$np":[]}', "[" * 5000]
)
def test_damaged_text_is_refused(text: str) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        loads(text)
