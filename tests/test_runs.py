"""Run folders: names, finding, and telling a living run from a killed one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.runs import LOCK, RunFolder, find_run

COUNTER = "agentgym/Counter-v0"
Command = Callable[..., tuple[int, list[dict[str, Any]], str]]
pytestmark = pytest.mark.usefixtures("workplace")


def test_a_run_is_found_by_folder_id_and_beginning(agentgym: Command) -> None:
    run = agentgym("rollout", COUNTER, "--set", "run.name=first", "--json")[1][-1]["run"]
    assert find_run(run).id == find_run(f"runs/{run}").id == find_run(run[:-1]).id == run
    code, _, err = agentgym("tree", "nothing-like-it")
    assert code == 2 and "agentgym list runs" in err
    agentgym("rollout", COUNTER, "--set", "run.name=second", "--json")
    assert agentgym("tree", "2")[0] == 2  # both begin so
    assert agentgym("list", "runs", "--json")[1][-1]["listed"] == 2
    for arguments in (("tree", run, "--tree", "count-7/9"), ("replay", run, "--node", "99")):
        code, _, err = agentgym(*arguments)
        assert code == 2 and err.count("\n") == 1


def test_a_folder_of_an_unstarted_run_is_told_from_a_stranger(workplace: Path, agentgym: Command) -> None:
    with RunFolder("r", "r") as run:
        run.write_summary({"status": "running"})
        assert (workplace / "r" / LOCK).exists()
    assert agentgym("tree", "r")[0] == 1  # a run, but without a store
    (workplace / "empty").mkdir()
    assert agentgym("tree", "empty")[0] == 2


def test_run_ids_differ_within_a_second() -> None:
    with RunFolder(None, "x/y z") as first, RunFolder(None, "x/y z") as second:
        assert first.id != second.id and first.path.parent == second.path.parent == Path("runs")
        assert "x-y-z" in first.id


def test_a_run_folder_in_use_is_refused(agentgym: Command) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("do not lose me")
    code, _, err = agentgym("rollout", COUNTER, "--run", "mine")
    assert code == 2 and "holds something already" in err and os.listdir("mine") == ["thesis.tex"]
