"""A rollout from the command line: what it stores and reports, and what a signal or a crash leaves."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym.runs import find_run, list_runs
from agentgym.store import Store

COUNTER = "agentgym/Counter-v0"
Command = Callable[..., tuple[int, list[dict[str, Any]], str]]
pytestmark = pytest.mark.usefixtures("workplace")


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "agentgym.cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_rollout_stores_what_it_reports(agentgym: Command) -> None:
    code, rows, _ = agentgym("rollout", COUNTER, "--policy", "oracle", "--json")
    summary = rows[-1]
    assert code == 0 and summary["ok"] and summary["mean_outcome"] == 1.0
    assert (summary["tasks"], summary["trees"], summary["leaves"], summary["turns"]) == (1, 1, 1, 2)
    assert summary["infra_errors"] == 0 and summary["status"] == "complete"
    assert rows[0]["tree"] == "count-7/0" and rows[0]["outcomes"] == [1.0]
    folder = Path("runs") / summary["run"]
    assert json.loads((folder / "summary.json").read_text()) == summary
    with Store.open(folder / "run.db", read_only=True) as store:
        [run] = store.runs()
        tree = store.load_tree(run.id, "count-7/0")
    assert (run.id, run.status) == (summary["run"], "complete")
    assert len(tree.nodes) == 3 and sum(node.num_sampled for node in tree.nodes) == summary["tokens"]


def test_a_tree_costs_less_than_its_leaves_as_chains(agentgym: Command) -> None:
    sets = ("--set", "tree.rounds=2", "--set", "tree.forks_per_round=3", "--set", "run.seed=5")
    code, rows, _ = agentgym("rollout", COUNTER, "--tree", "random", *sets, "--json")
    summary = rows[-1]
    assert code == 0 and summary["leaves"] == 7
    assert summary["turns_saved"] > 0 and summary["tokens_saved"] > 0 and summary["calls_ratio"] > 1
    assert summary["achieved_over_ideal"] == 1.0
    assert rows[0]["chain_turns"] == summary["turns"] + summary["turns_saved"]


def test_the_resolved_settings_give_the_same_run_again(agentgym: Command) -> None:
    first = agentgym("rollout", COUNTER, "--tree", "random", "--seed", "3", "--run", "one", "--json")[1]
    second = agentgym("rollout", "--config", "one/config.toml", "--run", "two", "--json")[1]
    assert first[:-1] == second[:-1]
    assert Path("one/config.toml").read_text() == Path("two/config.toml").read_text()


def test_the_record_holds_the_settings_in_effect(agentgym: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine.toml").write_text("[run]\nseed = 1\nconcurrency = 3\n[tree]\nchooser = 'random'\n")
    monkeypatch.setenv("AGENTGYM_RUN__SEED", "2")
    code, _, _ = agentgym(
        "rollout", COUNTER, "--config", "mine.toml", "--set", "policy.skill=1", "--run", "r", "--json"
    )
    assert code == 0
    with Store.open("r/run.db", read_only=True) as store:
        stored = store.runs()[0].config
    assert stored["run"]["seed"] == 2 and stored["run"]["concurrency"] == 3
    assert stored["policy"]["skill"] == 1.0
    assert stored["tree"]["forks_per_round"] == 2 and stored["tree"]["rounds"] == 1  # the chooser's own defaults
    written = tomllib.loads(Path("r/config.toml").read_text())
    assert written["tree"]["forks_per_round"] == 2 and written["run"]["seed"] == 2


def test_the_token_limit_cuts_every_turn(agentgym: Command) -> None:
    agentgym("rollout", COUNTER, "--policy", "oracle", "--set", "policy.max_tokens=3", "--run", "r", "--json")
    rows = agentgym("tree", "r", "--json")[1]
    assert {row["tokens"] for row in rows[:-1] if row["turn"]} == {3}


def test_a_dry_run_prints_the_settings_and_starts_nothing(agentgym: Command, workplace: Path) -> None:
    code, rows, _ = agentgym("rollout", COUNTER, "--tree", "every_turn", "--dry-run")
    assert code == 0
    assert tomllib.loads(rows[0]["text"])["tree"] == {
        "chooser": "every_turn",
        "width": 2,
        "trees_per_task": 1,
        "verify_forks": False,
    }
    code, rows, _ = agentgym("rollout", COUNTER, "--dry-run", "--json")
    assert rows[-1]["ok"] and rows[-1]["config"]["env"]["id"] == COUNTER
    assert list(workplace.iterdir()) == []


def test_infra_errors_make_a_run_fail(agentgym: Command) -> None:
    Path("broken.py").write_text(
        "import agentgym\nfrom agentgym.envs.counter import CounterEnv\n"
        "class Broken(CounterEnv):\n    def act(self, call):\n        raise RuntimeError('disk on fire')\n"
        "agentgym.register('test/Broken-v0', Broken)\n"
        "from agentgym import Task\n"
        "def tasks(num, seed):\n"
        "    gold = ({'name': 'submit', 'arguments': {}},)\n"
        "    return [Task(f't{i}', 'test/Broken-v0', 'p', {'target': 1}, gold=gold) for i in range(num)]\n"
    )
    script = (
        "import sys; sys.path.insert(0, '.'); import broken; from agentgym.cli import main; "
        "sys.exit(main(['rollout', 'test/Broken-v0', '--tasks', 'broken:tasks', '--num', '2', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    summary = records(done.stdout)[-1]
    assert done.returncode == 1 and summary["ok"] is False
    assert summary["infra_errors"] == 2 and "disk on fire" in summary["first_error"]
    assert summary["mean_outcome"] is None


def test_two_runs_at_once_do_not_disturb_each_other(workplace: Path) -> None:
    both = [start("rollout", COUNTER, "--tree", "random", "--seed", "4", "--json") for _ in range(2)]
    outs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    first, second = (records(out) for out in outs)
    assert first[-1]["run"] != second[-1]["run"]
    assert first[:-1] == second[:-1]
    assert len(list((workplace / "runs").iterdir())) == 2


def test_a_weak_backend_is_warned_of_on_screen_and_in_the_record(agentgym: Command) -> None:
    code, rows, err = agentgym(
        "rollout", "--tasks", "keyhunt", "--num", "1", "--policy", "oracle", "--set", "env.backend=local", "--json"
    )
    assert code == 0 and err.count("WARNING") == 1 and "'local' isolates little" in err
    assert "isolates little" in rows[-1]["warning"] and rows[-1]["backend"]["name"] == "local"
    with Store.open(find_run(rows[-1]["run"]).path / "run.db", read_only=True) as store:
        assert "network" not in store.runs()[0].config["backend"]["isolation"]


SLOW = """
import sys, time
sys.path.insert(0, '.')
import agentgym
from agentgym import Task
from agentgym.envs.counter import CounterEnv


class Slow(CounterEnv):
    def act(self, call):
        time.sleep(0.05)
        return super().act(call)

    def close(self):
        if self._episode is not None:
            open(f'closed-{id(self)}', 'w').close()
        super().close()

    def begin(self, task):
        open(f'opened-{id(self)}', 'w').close()
        return super().begin(task)


agentgym.register('test/Slow-v0', Slow)


def tasks(num, seed):
    gold = ({'name': 'add', 'arguments': {'n': 1}},) * 20
    return [Task(f't{i}', 'test/Slow-v0', 'p', {'target': 3}, gold=gold) for i in range(num)]


if __name__ == '__main__':
    from agentgym.cli import main
    sys.modules['slow'] = sys.modules['__main__']
    sys.exit(main(['rollout', 'test/Slow-v0', '--tasks', 'slow:tasks', '--num', '300', '--policy', 'oracle', '--json']))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_what_was_played(workplace: Path, number: signal.Signals, code: int) -> None:
    (workplace / "slow.py").write_text(SLOW)
    process = subprocess.Popen([sys.executable, "slow.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: stored_turns(workplace) > 20)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == code
    summary = records(out)[-1]
    assert summary["ok"] is False and summary["status"] == "interrupted" and number.name in summary["error"]
    assert "Traceback" not in err
    assert [run.status for run in list_runs()] == ["interrupted"]
    with Store.open(workplace / "runs" / summary["run"] / "run.db", read_only=True) as store:
        assert store.runs()[0].status == "interrupted"
        trees = [store.load_tree(summary["run"], record.id) for record in store.trees(summary["run"])]
    assert sum(len(tree.nodes) - 1 for tree in trees) == summary["turns"] > 20
    opened = {path.name.partition("-")[2] for path in workplace.glob("opened-*")}
    assert opened == {path.name.partition("-")[2] for path in workplace.glob("closed-*")}


def test_a_killed_run_reads_as_interrupted_and_gc_marks_it(workplace: Path, agentgym: Command) -> None:
    (workplace / "slow.py").write_text(SLOW)
    process = subprocess.Popen([sys.executable, "slow.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: stored_turns(workplace) > 20)
    process.kill()
    process.communicate(timeout=20)
    [run] = list_runs()
    assert run.status == "interrupted" and run.summary["status"] == "running"
    code, rows, _ = agentgym("gc", "--dry-run", "--json")
    assert any(run.id in row.get("left_behind", "") for row in rows) and list_runs()[0].summary["status"] == "running"
    code, rows, _ = agentgym("gc", "--json")
    assert code == 0 and any(run.id in row.get("left_behind", "") for row in rows)
    assert list_runs()[0].summary["status"] == "interrupted"
    assert not any(run.id in row.get("left_behind", "") for row in agentgym("gc", "--json")[1])
    rows = agentgym("tree", run.id, "--json")[1]
    assert rows[-1]["ok"] and len(rows) > 20


def stored_turns(workplace: Path) -> int:
    for database in workplace.glob("runs/*/run.db"):
        try:
            connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
            try:
                return int(connection.execute("select count(*) from nodes where turn_index > 0").fetchone()[0])
            finally:
                connection.close()
        except sqlite3.OperationalError:
            return 0
    return 0


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the run made no progress"
        time.sleep(0.02)


@pytest.mark.sandbox
def test_a_killed_rollout_leaves_nothing_after_gc(workplace: Path) -> None:
    state = workplace / "state"
    environ = os.environ | {"AGENTGYM_STATE": str(state)}
    process = start("rollout", "--tasks", "keyhunt", "--num", "500", "--tree", "random", env=environ)
    wait_for(lambda: stored_turns(workplace) > 20)
    process.kill()
    process.communicate(timeout=20)
    done = start("gc", "--json", env=environ)
    out, err = done.communicate(timeout=30)
    assert done.returncode == 0, err
    [run] = list_runs()
    assert any(run.id in row.get("left_behind", "") for row in records(out))
    wait_for(lambda: not list(state.iterdir()), 10)
    assert processes_that_mention(str(state)) == []
    assert str(state) not in Path("/proc/self/mounts").read_text()
    with Store.open(run.path / "run.db", read_only=True) as store:
        [stored] = store.runs()
        assert stored.status == "interrupted"
        assert sum(record.num_nodes for record in store.trees(stored.id)) > 20


def processes_that_mention(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            about = (path / "environ").read_bytes() + (path / "cmdline").read_bytes()
        except OSError:
            continue
        if text.encode() in about and path.name != str(os.getpid()):
            found.append(f"{path.name}: {about[:200]!r}")
    return found


@pytest.mark.sandbox
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_rollout_closes_its_sandboxes(workplace: Path, number: signal.Signals, code: int) -> None:
    state = workplace / "state"
    environ = os.environ | {"AGENTGYM_STATE": str(state)}
    process = start("rollout", "--tasks", "keyhunt", "--num", "500", "--tree", "random", "--json", env=environ)
    wait_for(lambda: stored_turns(workplace) > 20)
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == code and records(out)[-1]["status"] == "interrupted"
    wait_for(lambda: not list(state.iterdir()), 10)
    assert processes_that_mention(str(state)) == []


@pytest.mark.sandbox
def test_the_demo_shows_what_trees_save(workplace: Path) -> None:
    demo = start("demo")
    out, err = demo.communicate(timeout=110)
    assert demo.returncode == 0, out[-3000:] + err[-1000:]
    assert "keeps shell" in out and "(100 %)" in out and "achieved/ideal 1.00" in out
    assert len(list_runs()) == 1
