"""Nodes to rows of plain database values, and back, exactly.

Owns the texts that a database would refuse and the numbers that SQL would change. Leaves blobs to
`store_blobs.py` and tables to `store_schema.py`. It runs once for each turn, so it is written for speed.

Axes: T tokens that a node adds.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from agentgym.encoding import dumps, dumps_lossy, loads
from agentgym.errors import StoreError
from agentgym.store_blobs import odd_tokens, pack_tokens, unpack_tokens
from agentgym.tree import Node, NodeStatus, Timings
from agentgym.types import Level, Message, StopReason, ToolCall

Row = tuple[Any, ...]

SAMPLED = (
    *("tree", "id", "parent", "turn_index", "action", "observation", "cut", "messages"),
    *("tokens", "num_tool_calls", "seed", "forked", "timings", "lost"),
)
"""Columns written once. `lost` lists, as JSON, what could not be stored."""
STATE = (
    *("status", "stop_reason", "error", "reward", "rewards"),
    *("snapshot_id", "forkable", "losses", "digest", "kept", "exact"),
)
"""Columns that may change while the tree grows. `exact` holds, as JSON, the numbers that SQL would change."""
CREDIT = ("info_gain", "value", "advantage", "exact")
"""Columns of the table `credit`, which may change at any time; `exact` as above."""
NO_CREDIT: Row = (None,) * len(CREDIT)
COLUMNS = (*SAMPLED, *STATE)

_ESCAPED = "$json:"
_MAX_SQL_INT = (1 << 63) - 1
_TIMES = struct.Struct("<5d")
_ODD = (struct.error, TypeError, ValueError, OverflowError, AttributeError)
"""What a value of another type than `Node` says can cause."""
_quote: Callable[[str], str] = json.encoder.encode_basestring_ascii


def encode_node(tree_key: int, node: Node) -> Row:
    """Spell a node as values for `COLUMNS`.

    What cannot be stored inside messages or rewards does not lose the node: a text stands in its place, and
    the column `lost` says where and why.

    Raises:
        StoreError: names the field that holds something else than its type says.
    """
    try:
        return _sampled(tree_key, node) + _state(node)
    except _ODD as error:
        raise _named(node, error) from error


def encode_state(node: Node) -> Row:
    """Values for `STATE`.

    Raises:
        StoreError: as `encode_node`.
    """
    try:
        return _state(node)
    except _ODD as error:
        raise _named(node, error) from error


def encode_credit(node: Node) -> Row | None:
    """Values for `CREDIT`; None where the node has no credit yet.

    Raises:
        StoreError: names the field that is no number.
    """
    if node.info_gain is None and node.value is None and node.advantage is None:
        return None
    try:
        credit = (_float(node.info_gain), _float(node.value), _float(node.advantage))
    except _ODD as error:
        raise _named(node, error) from error
    exact = {name: x for name, x in zip(CREDIT, credit, strict=False) if _changes(x)}
    return (*credit, dumps(exact) if exact else None)


def decode_node(row: Row, credit: Row | None, parent: Node | None) -> Node:
    """Read back a row of `COLUMNS` but the first, and the node's row of `CREDIT` where it has one."""
    values = dict(zip(COLUMNS[1:], row, strict=True))
    action, observation = decode_text(values["action"]), decode_text(values["observation"])
    tokens = unpack_tokens(values["tokens"])
    node = Node(
        id=values["id"],
        parent=parent,
        turn_index=values["turn_index"],
        action=action,
        observation=observation,
        cut=bool(values["cut"]),
        messages=_read_messages(values["messages"], action, observation),
        token_ids_T=tokens.ids_T,
        mask_T=tokens.mask_T,
        logprobs_T=tokens.logprobs_T,
        versions_T=tokens.versions_T,
        reward=values["reward"],
        rewards=loads(values["rewards"]) if values["rewards"] else {},
        num_tool_calls=values["num_tool_calls"],
        status=NodeStatus(values["status"]),
        stop_reason=None if values["stop_reason"] is None else StopReason(values["stop_reason"]),
        error=_read_optional(values["error"]),
        snapshot_id=_read_optional(values["snapshot_id"]),
        forkable=None if values["forkable"] is None else Level(values["forkable"]),
        losses=tuple(loads(values["losses"])) if values["losses"] else (),
        digest=_read_optional(values["digest"]),
        seed=values["seed"],
        forked=bool(values["forked"]),
        kept=bool(values["kept"]),
        timings=Timings(*_TIMES.unpack(values["timings"])),
    )
    for name, number in (loads(values["exact"]) if values["exact"] else {}).items():
        setattr(node, name, number)
    if credit is not None:
        node.info_gain, node.value, node.advantage, exact = credit
        for name, number in (loads(exact) if exact else {}).items():
            setattr(node, name, number)
    return node


def encode_text(text: str) -> str:
    """The text itself, or escaped where UTF-8 or PostgreSQL cannot hold it (lone surrogates, NUL)."""
    if "\0" not in text and not text.startswith(_ESCAPED):
        if text.isascii():
            return text
        try:
            text.encode()
            return text
        except UnicodeEncodeError:
            pass
    return _ESCAPED + dumps(text)


def decode_text(text: str) -> str:
    """Undo `encode_text`."""
    return loads(text[len(_ESCAPED) :]) if text.startswith(_ESCAPED) else text


def _sampled(tree_key: int, node: Node) -> Row:
    messages, lost = _messages(node)
    if node.rewards:
        lost = lost + dumps_lossy(node.rewards, "rewards")[1]
    seed = int(node.seed)
    times = node.timings
    return (
        tree_key,
        node.id,
        None if node.parent is None else node.parent.id,
        int(node.turn_index),
        encode_text(node.action),
        encode_text(node.observation),
        int(node.cut),
        messages,
        pack_tokens(node.token_ids_T, node.mask_T, node.logprobs_T, node.versions_T),
        int(node.num_tool_calls),
        seed if -_MAX_SQL_INT <= seed <= _MAX_SQL_INT else 0,
        int(node.forked),
        _TIMES.pack(times.queue_s, times.generate_s, times.act_s, times.snapshot_s, times.fork_s),
        dumps(lost) if lost else None,
    )


def _state(node: Node) -> Row:
    return (
        node.status._value_,
        None if node.stop_reason is None else node.stop_reason._value_,
        None if node.error is None else encode_text(node.error),
        _float(node.reward),
        dumps_lossy(node.rewards, "rewards")[0] if node.rewards else None,
        None if node.snapshot_id is None else encode_text(node.snapshot_id),
        None if node.forkable is None else int(node.forkable),
        dumps(list(node.losses), "losses") if node.losses else None,
        None if node.digest is None else encode_text(node.digest),
        int(node.kept),
        _exact(node),
    )


def _float(value: float | None) -> float | None:
    if value is None or type(value) is float:
        return value
    number = float(value + 0.0)  # float() alone would also read texts
    if number != value and value == value:
        raise ValueError(f"{value!r} is no double")
    return number


def _changes(number: float | None) -> bool:
    """SQLite turns NaN into NULL and -0.0 into 0.0."""
    return number is not None and (number != number or (number == 0.0 and math.copysign(1.0, number) < 0))


def _exact(node: Node) -> str | None:
    big = not -_MAX_SQL_INT <= node.seed <= _MAX_SQL_INT
    if not big and not _changes(node.reward):
        return None
    exact: dict[str, Any] = {"reward": _float(node.reward)}
    if big:
        exact["seed"] = int(node.seed)  # no database has integers beyond 64 bits
    return dumps(exact)


def _messages(node: Node) -> tuple[str | None, list[str]]:
    """Messages as JSON lists; a content that is the action or the observation is 0 or 1 instead of a second copy."""
    if not node.messages:
        return None, []
    action, observation = node.action, node.observation
    parts: list[str] = []
    try:
        for message in node.messages:
            content = message.content
            spelled = "0" if content == action else "1" if content == observation else _quote(content)
            calls = ",".join([_call(call) for call in message.tool_calls]) if message.tool_calls else ""
            call_id = "null" if message.tool_call_id is None else _quote(message.tool_call_id)
            parts.append(f"[{_quote(message.role)},{spelled},[{calls}],{call_id}]")
        text = f"[{','.join(parts)}]"
        # a pair of lone surrogates is spelled like the one character that it would become
        if "\\ud" not in text:
            return text, []
    except TypeError:
        pass  # something is no plain text
    return _odd_messages(node)


def _call(call: ToolCall) -> str:
    """A call whose arguments are plain texts.

    Raises:
        TypeError: they are not.
    """
    pairs = []
    for key, value in call.arguments.items():
        if type(value) is not str or key[:1] == "$":
            raise TypeError
        pairs.append(f"{_quote(key)}:{_quote(value)}")
    return f"[{_quote(call.name)},{{{','.join(pairs)}}},{_quote(call.id)}]"


def _odd_messages(node: Node) -> tuple[str, list[str]]:
    """As `_messages`, for anything that may stand in them."""
    lost: list[str] = []

    def spell(value: Any, field: str) -> str:
        text, reasons = dumps_lossy(value, field)
        lost.extend(reasons)
        return text

    parts = []
    for index, message in enumerate(node.messages):
        name = f"messages[{index}]"
        known = 0 if message.content == node.action else 1 if message.content == node.observation else None
        content = spell(message.content, f"{name}.content") if known is None else str(known)
        calls = [
            f"[{spell(call.name, f'{name}.tool_calls[{i}].name')},"
            f"{spell(dict(call.arguments), f'{name}.tool_calls[{i}].arguments')},"
            f"{spell(call.id, f'{name}.tool_calls[{i}].id')}]"
            for i, call in enumerate(message.tool_calls)
        ]
        role, call_id = spell(message.role, f"{name}.role"), spell(message.tool_call_id, f"{name}.tool_call_id")
        parts.append(f"[{role},{content},[{','.join(calls)}],{call_id}]")
    return f"[{','.join(parts)}]", lost


def _read_messages(text: str | None, action: str, observation: str) -> tuple[Message, ...]:
    known = (action, observation)
    return tuple(
        Message(role, known[content] if type(content) is int else content, tuple(ToolCall(*c) for c in calls), call_id)
        for role, content, calls, call_id in (loads(text) if text else ())
    )


def _read_optional(text: str | None) -> str | None:
    return None if text is None else decode_text(text)


def _named(node: Node, error: Exception) -> StoreError:
    """An error that names the field which cannot be stored."""
    checks: dict[str, Callable[[], object]] = {
        "status": lambda: node.status._value_,
        "stop_reason": lambda: node.stop_reason and node.stop_reason._value_,
        "forkable": lambda: node.forkable is None or Level(node.forkable),
        "messages": lambda: _messages(node),
        "timings": lambda: _TIMES.pack(*astuple(node.timings)),
    }
    checks |= {
        name: lambda name=name: encode_text(getattr(node, name) or "")  # type: ignore[misc]
        for name in ("action", "observation", "error", "snapshot_id", "digest")
    }
    checks |= {
        name: lambda name=name: _float(getattr(node, name))  # type: ignore[misc]
        for name in ("reward", "info_gain", "value", "advantage", "seed", "num_tool_calls", "turn_index")
    }
    tokens = odd_tokens({name: getattr(node, name) for name in ("token_ids_T", "mask_T", "logprobs_T", "versions_T")})
    name = tokens or next((name for name, check in checks.items() if _fails(check)), "a field")
    return StoreError(f"{name} of node {node.id} cannot be stored ({error}); give it the type of agentgym.tree.Node")


def _fails(check: Callable[[], object]) -> bool:
    try:
        check()
    except _ODD:
        return True
    return False
