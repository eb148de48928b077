"""Stored runs drawn and executed again."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

import pytest

COUNTER = "agentgym/Counter-v0"
Command = Callable[..., tuple[int, list[dict[str, Any]], str]]
pytestmark = pytest.mark.usefixtures("workplace")


def test_tree_draws_the_run(agentgym: Command) -> None:
    agentgym("rollout", COUNTER, "--tree", "random", "--set", "tree.trees_per_task=2", "--run", "r", "--json")
    code, rows, _ = agentgym("tree", "r")
    assert code == 0 and "fork \N{MULTIPLICATION SIGN}" in rows[0]["text"] and "keeps state" in rows[0]["text"]
    assert "1 of 2 trees" in rows[0]["text"]
    rows = agentgym("tree", "r", "--tree", "count-7/1", "--json")[1]
    assert {row["tree"] for row in rows[:-1]} == {"count-7/1"} and rows[-1]["drawn"] == 1
    assert agentgym("tree", "r", "--all")[1][0]["text"].count("tree count-7/") == 2


def test_replay_finds_everything_equal(agentgym: Command) -> None:
    agentgym("rollout", COUNTER, "--tree", "random", "--run", "r", "--json")
    for extra in ((), ("--forked",)):
        code, rows, _ = agentgym("replay", "r", "--json", *extra)
        summary = rows[-1]
        assert code == 0 and summary["ok"] and summary["equal"] == summary["nodes"] > 3
        assert summary["equal_share"] == 1.0 and summary["branches"] == 3 and summary["first_difference"] is None


def test_replay_names_the_first_node_that_differs(agentgym: Command) -> None:
    agentgym("rollout", COUNTER, "--tree", "random", "--run", "r", "--json")
    change_observation("r", node=2)
    code, rows, _ = agentgym("replay", "r", "--json")
    assert code == 1 and rows[-1]["ok"] is False
    assert rows[-1]["first_difference"]["node"] == 2 and rows[-1]["first_difference"]["field"] == "observation"
    assert rows[-1]["equal"] == rows[-1]["nodes"] - 1
    code, rows, _ = agentgym("replay", "r")
    assert code == 1 and "node 2" in rows[0]["text"]
    assert agentgym("replay", "r", "--node", "1", "--json")[0] == 0


def change_observation(folder: str, node: int) -> None:
    connection = sqlite3.connect(f"{folder}/run.db")
    try:
        found = connection.execute("update nodes set observation = 'altered' where id = ?", (node,))
        assert found.rowcount == 1
        connection.commit()
    finally:
        connection.close()


@pytest.mark.sandbox
def test_forked_shells_replay_equal_until_an_observation_is_altered(agentgym: Command) -> None:
    arguments = ("--tasks", "keyhunt", "--num", "6", "--policy", "scripted", "--tree", "random")
    code, rows, err = agentgym("rollout", "agentgym/Terminal-v0", *arguments, "--run", "r", "--json")
    assert code == 0, (rows[-1], err)
    assert rows[-1]["leaves"] == 18 and rows[-1]["warning"] is None
    text = agentgym("tree", "r", "--all")[1][0]["text"]
    assert "fork \N{MULTIPLICATION SIGN}" in text and "keeps shell" in text
    code, rows, _ = agentgym("replay", "r", "--json")
    assert code == 0 and rows[-1]["equal_share"] == 1.0 and rows[-1]["branches"] == 18
    connection = sqlite3.connect("r/run.db")
    try:
        key, node, tree = connection.execute(
            "select trees.key, max(nodes.id), trees.id from nodes join trees on nodes.tree = trees.key"
        ).fetchone()
        connection.execute("update nodes set observation = 'altered' where tree = ? and id = ?", (key, node))
        connection.commit()
    finally:
        connection.close()
    code, rows, _ = agentgym("replay", "r", "--json")
    first = rows[-1]["first_difference"]
    assert code == 1 and (first["tree"], first["node"], first["field"]) == (tree, node, "observation")
    assert rows[-1]["equal"] == rows[-1]["nodes"] - 1
