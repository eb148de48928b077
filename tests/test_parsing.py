from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import ParseError, UnknownName
from agentgym.parsing import MAX_ACTION_BYTES, check_calls, format_call, get_codec, parse
from agentgym.types import Param, ToolCall, ToolSpec

TOOLS = (
    ToolSpec("run", "Run.", (Param("command", "The command."),)),
    ToolSpec("write_file", "Write.", (Param("path", "Where."), Param("content", "What."))),
    ToolSpec("add", "Add.", (Param("n", "A number.", kind="integer"),)),
    ToolSpec(
        "scale",
        "Scale.",
        (Param("x", "A factor.", kind="number"), Param("loud", "Say so.", kind="boolean", required=False)),
    ),
    ToolSpec("submit", "Submit.", (Param("answer", "The answer.", required=False),)),
)


def compact(text: str) -> tuple[str, dict[str, object]]:
    (call,) = parse(text, TOOLS, get_codec("compact"))
    return call.name, dict(call.arguments)


def from_json(text: str) -> list[tuple[str, dict[str, object], str]]:
    return [(c.name, dict(c.arguments), c.id) for c in parse(text, TOOLS, get_codec("json"))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run ls -l | wc", ("run", {"command": "ls -l | wc"})),
        ("  run   ls  ", ("run", {"command": "ls"})),
        ("run cat <<E\nx\nE\n", ("run", {"command": "cat <<E\nx\nE\n"})),
        ("\n\nrun ls\n", ("run", {"command": "ls"})),
        ("write_file a.txt\n  two\n  spaces\n", ("write_file", {"path": "a.txt", "content": "  two\n  spaces\n"})),
        ("write_file a.txt\n  indented", ("write_file", {"path": "a.txt", "content": "  indented"})),
        ("write_file empty", ("write_file", {"path": "empty", "content": ""})),
        ("add 7", ("add", {"n": 7})),
        ("add -3 ", ("add", {"n": -3})),
        ("scale 0.5", ("scale", {"x": 0.5})),
        ("scale 2\nTrue", ("scale", {"x": 2.0, "loud": True})),
        ("submit", ("submit", {})),
        ("submit 42 apples", ("submit", {"answer": "42 apples"})),
    ],
)
def test_compact(text: str, expected: tuple[str, dict[str, object]]) -> None:
    assert compact(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the reply is empty; call one of: run"),
        ("fly away", "no tool 'fly'; tools: run, write_file"),
        ("run", "run needs command: The command."),
        ("run   ", "run needs command"),
        ("add x", "add: n must be of type integer, got 'x'"),
        ("add 1.5", "must be of type integer"),
        ("add " + "9" * 5000, "must be of type integer"),
        ("scale much", "must be of type number"),
        ("scale 1\nmaybe", "loud must be of type boolean"),
        ("run " + "a" * MAX_ACTION_BYTES, "more than 262144 bytes"),
    ],
)
def test_compact_mistakes(text: str, message: str) -> None:
    with pytest.raises(ParseError) as caught:
        compact(text)
    assert message in str(caught.value) and len(str(caught.value)) < 400


def test_json_forms() -> None:
    call = {"name": "run", "arguments": {"command": "ls"}}
    assert from_json(json.dumps(call)) == [("run", {"command": "ls"}, "call_0")]
    assert from_json(f"Let me look. <tool_call>{json.dumps(call)}</tool_call> Done.") == [
        ("run", {"command": "ls"}, "call_0")
    ]
    openai: list[dict[str, object]] = [
        {"id": "x1", "type": "function", "function": {"name": "add", "arguments": '{"n": 2}'}},
        {"name": "submit"},
    ]
    with pytest.raises(ParseError, match="arguments of submit must be a JSON object"):
        from_json(json.dumps(openai))
    openai[1]["arguments"] = {}
    assert from_json(json.dumps(openai)) == [("add", {"n": 2}, "x1"), ("submit", {}, "call_1")]


def nested(depth: int) -> str:
    return '{"name": "run", "arguments": ' + '{"a": ' * depth + "1" + "}" * depth + "}"


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "run", "arguments": {"command": "ls',
        '{"name": "run", "arguments": {"command": "ls",}}',
        '{"name": "run", "arguments": ["ls"]}',
        '{"name": "run", "arguments": null}',
        '{"name": "run", "arguments": 3}',
        '{"name": "run", "arguments": "ls"}',
        '{"name": "run", "arguments": {"command": "a", "command": "b"}}',
        '{"name": "run", "arguments": {"command": null}}',
        '{"name": "run", "arguments": {"command": "ls", "cwd": "/"}}',
        '{"name": "run", "arguments": {}}',
        '{"name": "run"}',
        '{"name": "fly", "arguments": {}}',
        '{"name": "add", "arguments": {"n": true}}',
        '{"name": "add", "arguments": {"n": 1.0}}',
        '{"name": "add", "arguments": {"n": ' + "9" * 5000 + "}}",
        '{"id": 7, "name": "submit", "arguments": {}}',
        '{"id": "", "name": "submit", "arguments": {}}',
        '[{"id": "a", "name": "add", "arguments": {"n": 1}}, {"id": "a", "name": "add", "arguments": {"n": 2}}]',
        json.dumps([{"name": "add", "arguments": {"n": 1}}] * 17),
        "[]",
        "null",
        "17",
        '"run"',
        "<tool_call></tool_call>",
        nested(5000),
        nested(900),
        nested(300),
        "[" * 5000 + "]" * 5000,
        "[" * 300 + "]" * 300,
        '{"name": "run", "arguments": {"command": "' + "x" * 1_000_000 + '"}}',
        "plain words",
    ],
)
def test_c070_malformed_calls_are_mistakes_with_a_short_echo(text: str) -> None:
    with pytest.raises(ParseError) as caught:
        from_json(text)
    assert 10 < len(str(caught.value)) < 500


@given(st.text())
def test_no_text_breaks_a_codec(text: str) -> None:
    for codec in ("compact", "json"):
        try:
            parse(text, TOOLS, get_codec(codec))
        except ParseError as mistake:
            assert len(str(mistake)) < 1000


TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]))


@given(TEXTS, TEXTS, st.integers(-(10**9), 10**9), st.floats(allow_nan=False), st.booleans())
def test_json_reads_back_what_format_call_writes(path: str, content: str, n: int, x: float, loud: bool) -> None:
    for call in (
        ToolCall("write_file", {"path": path, "content": content}),
        ToolCall("add", {"n": n}),
        ToolCall("scale", {"x": x, "loud": loud}),
        ToolCall("submit", {}),
    ):
        (found,) = parse(format_call(call, "json"), TOOLS, get_codec("json"))
        assert (found.name, found.arguments) == (call.name, call.arguments)


WORDS = st.text(alphabet="abc./-_ \u00e9", min_size=1).map(str.strip).filter(bool)


@given(WORDS, TEXTS, st.integers(-(10**9), 10**9), st.floats(allow_nan=False), st.booleans())
def test_compact_reads_back_what_format_call_writes(word: str, content: str, n: int, x: float, loud: bool) -> None:
    for call in (
        ToolCall("write_file", {"path": word, "content": content}),
        ToolCall("run", {"command": word}),
        ToolCall("run", {"command": f"{word}\n{word}\n"}),
        ToolCall("add", {"n": n}),
        ToolCall("scale", {"x": x, "loud": loud}),
        ToolCall("submit", {}),
    ):
        assert compact(format_call(call, "compact")) == (call.name, dict(call.arguments))


def test_calls_parsed_elsewhere_are_held_to_the_same_rules() -> None:
    good = (ToolCall("add", {"n": 1}, "a"), ToolCall("submit", {}, "b"))
    assert check_calls(good, TOOLS) == good
    for bad in ((), (ToolCall("fly", {}),), (ToolCall("add", {"n": "1"}),), (good[0], good[0]), good * 9):
        with pytest.raises(ParseError):
            check_calls(bad, TOOLS)


def test_unknown_codec() -> None:
    with pytest.raises(UnknownName, match="unknown codec 'jsn'; did you mean 'json'"):
        get_codec("jsn")
