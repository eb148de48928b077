"""The command line: what it refuses, its help, and its small commands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COUNTER = "agentgym/Counter-v0"
Command = Callable[..., tuple[int, list[dict[str, Any]], str]]
pytestmark = pytest.mark.usefixtures("workplace")


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "agentgym.cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize(
    ("arguments", "value", "near", "remedy"),
    [
        (("rollout", "agentgym/Countr-v0"), "agentgym/Countr-v0", COUNTER, "agentgym list envs"),
        (("rollout", "--tasks", "keyhnt"), "keyhnt", "keyhunt", "agentgym list tasks"),
        (("rollout", "--policy", "orcle"), "orcle", "oracle", "agentgym list policies"),
        (("rollout", "--tree", "randm"), "randm", "random", "agentgym list choosers"),
        (("rollout", "--set", "env.codec=jsn"), "jsn", "json", "codecs"),
        (("rollout", "--set", "tree.widht=2"), "widht", "tree.width", "agentgym list settings"),
        (("rollout", "--set", "treee.width=2"), "treee", "tree", "agentgym list settings"),
        (("rollout", COUNTER, "--set", "env.kwargs.targt=2"), "targt", "target", "it takes"),
        (("bench", "frok"), "frok", "fork", "agentgym list benches"),
        (("list", "polices"), "polices", "policies", "agentgym list"),
        (("rolout",), "rolout", "rollout", ""),
        (("rollout", "--polcy", "oracle"), "--polcy", "--policy", ""),
    ],
)
def test_an_unknown_name_is_one_line_with_the_nearest(
    agentgym: Command, workplace: Path, arguments: tuple[str, ...], value: str, near: str, remedy: str
) -> None:
    code, rows, err = agentgym(*arguments)
    assert code == 2 and rows == [{"text": ""}]
    assert err.startswith("error: ") and err.count("\n") == 1
    assert value in err and near in err and remedy in err
    assert list(workplace.iterdir()) == []  # nothing was started


def test_an_unknown_backend_is_one_line(agentgym: Command) -> None:
    code, _, err = agentgym("rollout", "--set", "env.backend=namspace")
    assert code == 2 and "'namspace'" in err and "'namespace'" in err and "agentgym list backends" in err
    assert not Path("runs").exists()


def test_a_refusal_is_an_object_for_machines(agentgym: Command) -> None:
    code, rows, _ = agentgym("rollout", "agentgym/Nothing-v0", "--json")
    assert code == 2 and rows[-1]["ok"] is False and "agentgym/Nothing-v0" in rows[-1]["error"]


def test_list_shows_every_kind(agentgym: Command) -> None:
    rows = agentgym("list", "--json")[1]
    found = {(row["kind"], row["name"]) for row in rows[:-1]}
    expected = {("envs", COUNTER), ("tasks", "keyhunt"), ("policies", "scripted"), ("choosers", "random")}
    assert expected | {("backends", "namespace"), ("benches", "fork"), ("codecs", "json")} <= found
    settings = agentgym("list", "settings", "--json")[1]
    assert "tree.forks_per_round" in {row.get("name") for row in settings}
    assert "scripted" in agentgym("list", "policies")[1][0]["text"]


def test_tasks_check_reports_all_problems(agentgym: Command) -> None:
    good = {"id": "a", "env": COUNTER, "prompt": "p"}
    lines = [good, good | {"id": "b", "env": "agentgym/Countr-v0"}, {"id": "c", "env": COUNTER}]
    Path("mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, rows, _ = agentgym("tasks", "check", "mine.jsonl", "--json")
    assert code == 1 and rows[-1] == {"ok": False, "problems": 2}
    assert "mine.jsonl:2" in rows[0]["problem"] and COUNTER in rows[0]["problem"]
    assert "mine.jsonl:3" in rows[1]["problem"] and "prompt" in rows[1]["problem"]
    Path("mine.jsonl").write_text(json.dumps(good) + "\n")
    assert agentgym("tasks", "check", "mine.jsonl")[0] == 0
    assert agentgym("tasks", "check", "absent.jsonl")[0] == 2


def test_doctor_names_pieces_and_consequences(agentgym: Command) -> None:
    code, rows, _ = agentgym("doctor", "--json")
    checks = {(row["area"], row["name"]): row for row in rows[:-1]}
    assert code == int("failed" in {row["state"] for row in checks.values()}) and rows[-1]["ok"] == (code == 0)
    assert {("backend", "namespace"), ("backend", "local"), ("live", "criu"), ("extra", "train")} <= set(checks)
    assert "WEAK" in checks["backend", "local"]["detail"]
    assert checks["local", "network"]["state"] == "missing" and "reach" in checks["local", "network"]["detail"]
    extra = checks["extra", "vllm"]
    assert extra["state"] == "ok" or extra["detail"] == "pip install 'agentgym-tree[vllm]'"


@pytest.mark.parametrize(
    "command", ["rollout", "tree", "replay", "list", "doctor", "gc", "bench", "demo", "tasks check"]
)
def test_every_command_has_help_with_an_example(agentgym: Command, command: str) -> None:
    code, rows, _ = agentgym(*command.split(), "--help")
    assert code == 0 and f"Example:\n    agentgym {command}" in rows[0]["text"] and "--json" in rows[0]["text"]


def test_help_is_quick_and_light() -> None:
    script = (
        "import sys, time\nfrom agentgym.cli import main\nmain(['--help'])\n"
        "heavy = [m for m in ('sqlalchemy', 'pydantic', 'rich', 'asyncio') if m in sys.modules]\n"
        "print(time.process_time(), heavy, file=sys.stderr)"
    )
    runs = [subprocess.run([sys.executable, "-c", script], capture_output=True, text=True) for _ in range(3)]
    assert all(run.returncode == 0 and "rollout" in run.stdout for run in runs)
    cpu_s = min(float(run.stderr.split()[0]) for run in runs)
    assert cpu_s < 0.5
    assert "sqlalchemy" not in runs[0].stderr and "rich" not in runs[0].stderr


def test_a_closed_pipe_is_no_error() -> None:
    agentgym_list = start("list")
    assert agentgym_list.stdout is not None and agentgym_list.stderr is not None
    agentgym_list.stdout.close()
    assert "Traceback" not in agentgym_list.stderr.read()
    agentgym_list.stderr.close()
    agentgym_list.wait(20)
