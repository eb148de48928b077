"""Model text to tool calls: two codecs, `compact` and `json`.

Owns the grammars and their error messages, which the policy reads. Leaves what a call does to the environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from agentgym.errors import ParseError, UnknownName
from agentgym.types import Param, ToolCall, ToolSpec

MAX_ECHO = 80
"""Characters of a bad reply that are quoted back; a reply of 1 MB must not become an observation of 1 MB."""
MAX_ACTION_BYTES = 256 * 1024
MAX_CALLS = 16

Codec = Callable[[str, Sequence[ToolSpec]], tuple[ToolCall, ...]]


def parse_compact(text: str, tools: Sequence[ToolSpec]) -> tuple[ToolCall, ...]:
    r"""Read one call in the compact grammar, which costs a small model few tokens.

    The first word is the tool. One parameter takes all that follows; of two, the first takes the rest of the
    line and the second all following lines, as they are: "write_file notes.txt\nhello" or "run ls -l | wc".

    Raises:
        ParseError: no such tool, a required parameter is empty, or a number is none.
    """
    head, _, body = text.lstrip("\n").partition("\n")
    name, _, rest = head.strip().partition(" ")
    tool = _tool(name, tools)
    if len(tool.params) <= 1:
        values = [rest + ("\n" + body if body else "")]
    else:
        values = [rest, body]
    arguments: dict[str, Any] = {}
    for param, value in zip(tool.params, values, strict=False):
        if param is not tool.params[0]:
            if value or param.required:
                arguments[param.name] = _typed(tool, param, value)
        elif value.strip():
            arguments[param.name] = _typed(tool, param, value.strip() if "\n" not in value.strip() else value)
    return (ToolCall(tool.name, _checked(tool, arguments)),)


def parse_json(text: str, tools: Sequence[ToolSpec]) -> tuple[ToolCall, ...]:
    """Read calls as JSON: `<tool_call>{...}</tool_call>` blocks, or an object or list in the OpenAI form.

    An object is {"name": ..., "arguments": {...}} or {"id": ..., "function": {"name": ..., "arguments":
    "..."}}; arguments may be an object or its JSON text. Duplicate keys, lists, numbers and null are refused.

    Raises:
        ParseError: the text is not such a call.
    """
    blocks = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL) or [text]
    raw: list[Any] = []
    for block in blocks:
        value = _loads(block)
        raw.extend(value if isinstance(value, list) else [value])
    if not raw:
        raise ParseError('no tool call; write {"name": TOOL, "arguments": {...}}')
    if len(raw) > MAX_CALLS:
        raise ParseError(f"{len(raw)} calls in one reply; at most {MAX_CALLS}")
    calls = tuple(_call(item, index, tools) for index, item in enumerate(raw))
    if len({call.id for call in calls}) < len(calls):
        raise ParseError("two calls of one reply have the same id")
    return calls


CODECS: dict[str, Codec] = {"compact": parse_compact, "json": parse_json}


def get_codec(name: str) -> Codec:
    """The codec of that name.

    Raises:
        UnknownName: there is none.
    """
    if name not in CODECS:
        raise UnknownName.of("codec", name, CODECS, f"codecs: {', '.join(CODECS)}")
    return CODECS[name]


def parse(text: str, tools: Sequence[ToolSpec], codec: Codec) -> tuple[ToolCall, ...]:
    """Parse a reply under the limits that hold for every codec.

    Raises:
        ParseError: empty, too long, or refused by the codec.
    """
    if not text.strip():
        raise ParseError(f"the reply is empty; call one of: {', '.join(t.name for t in tools)}")
    if len(text.encode("utf-8", "surrogatepass")) > MAX_ACTION_BYTES:
        raise ParseError(f"the reply has more than {MAX_ACTION_BYTES} bytes: {echo(text)}")
    try:
        return codec(text, tools)
    except RecursionError:
        raise ParseError(f"the JSON is nested too deeply: {echo(text)}") from None


def check_calls(calls: Sequence[ToolCall], tools: Sequence[ToolSpec]) -> tuple[ToolCall, ...]:
    """Hold calls that somebody else has parsed to the rules of the codecs.

    Raises:
        ParseError: no calls, too many, an unknown tool, or arguments that it does not take.
    """
    if not calls:
        raise ParseError(f"the reply has no call; call one of: {', '.join(t.name for t in tools)}")
    if len(calls) > MAX_CALLS:
        raise ParseError(f"{len(calls)} calls in one reply; at most {MAX_CALLS}")
    for call in calls:
        _checked(_tool(call.name, tools), dict(call.arguments))
    if len({call.id for call in calls}) < len(calls):
        raise ParseError("two calls of one reply have the same id")
    return tuple(calls)


def format_call(call: ToolCall, codec: str) -> str:
    """The text that the codec reads back as this call."""
    if codec == "json":
        return json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
    values = [str(value) for value in call.arguments.values()]
    if len(values) == 2:
        return f"{call.name} {values[0]}\n{values[1]}"
    return " ".join([call.name, *values]) if values else call.name


def echo(text: str) -> str:
    """A bounded, printable quotation of what the policy wrote."""
    short = text[:MAX_ECHO].encode("utf-8", "replace").decode()
    return repr(short) + (f" and {len(text) - MAX_ECHO} characters more" if len(text) > MAX_ECHO else "")


def _tool(name: Any, tools: Sequence[ToolSpec]) -> ToolSpec:
    for tool in tools:
        if tool.name == name:
            return tool
    raise ParseError(f"no tool {echo(str(name))}; tools: {', '.join(t.name for t in tools)}")


def _loads(block: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            raise ParseError(f"a key occurs twice in {echo(block)}")
        return found

    try:
        return json.loads(block.strip(), object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise ParseError(f"not valid JSON ({error.msg} at character {error.pos}): {echo(block)}") from None
    except ParseError:
        raise
    except ValueError as error:  # an integer with thousands of digits
        raise ParseError(f"not valid JSON ({error}): {echo(block)}") from None


def _call(item: Any, index: int, tools: Sequence[ToolSpec]) -> ToolCall:
    if not isinstance(item, dict):
        raise ParseError(f"a call must be a JSON object, got {echo(json.dumps(item))}")
    function = item.get("function", item)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ParseError(f"a call needs a name and arguments, got {echo(json.dumps(item))}")
    tool = _tool(function["name"], tools)
    arguments = function.get("arguments", {} if not tool.params else None)
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    if not isinstance(arguments, dict):
        raise ParseError(f"the arguments of {tool.name} must be a JSON object, got {echo(json.dumps(arguments))}")
    call_id = item.get("id", f"call_{index}")
    if not isinstance(call_id, str) or not call_id or len(call_id) > 128:
        raise ParseError(f"the id of a call must be a short text, got {echo(json.dumps(call_id))}")
    return ToolCall(tool.name, _checked(tool, arguments), call_id)


_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


_SPELT: dict[str, Callable[[str], Any]] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": {"true": True, "false": False}.__getitem__,
}


def _typed(tool: ToolSpec, param: Param, text: str) -> Any:
    """A word of the compact grammar as the type that the parameter has."""
    try:
        return _SPELT[param.kind](text if param.kind == "string" else text.strip().lower())
    except (ValueError, KeyError):
        raise ParseError(f"{tool.name}: {param.name} must be of type {param.kind}, got {echo(text)}") from None


def _checked(tool: ToolSpec, arguments: dict[str, Any]) -> dict[str, Any]:
    names = [p.name for p in tool.params]
    for name in arguments:
        if name not in names:
            raise ParseError(f"{tool.name} has no parameter {echo(name)}; it takes: {', '.join(names) or 'none'}")
    for param in tool.params:
        if param.name not in arguments:
            if param.required:
                raise ParseError(f"{tool.name} needs {param.name}: {param.description}")
            continue
        value = arguments[param.name]
        is_bool_for_number = isinstance(value, bool) and param.kind != "boolean"
        if not isinstance(value, _KINDS[param.kind]) or is_bool_for_number:
            raise ParseError(f"{tool.name}: {param.name} must be of type {param.kind}, got {echo(repr(value))}")
    return arguments
