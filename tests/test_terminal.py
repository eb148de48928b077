from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest

from agentgym.engine import SampleRequest
from agentgym.envs.keyhunt import generate
from agentgym.envs.terminal import TerminalEnv, describe
from agentgym.episode import Limits
from agentgym.errors import AgentGymError, BackendUnavailable, EnvError, SnapshotBusy, TaskError, UnknownName
from agentgym.policies import make_policy
from agentgym.sandbox import ExecResult, get_backend
from agentgym.task import Task, load_tasks
from agentgym.types import Level, Message

sandboxed = pytest.mark.sandbox
ANSWER = {"kind": "answer", "answer": "yes"}


def _task(setup: dict[str, Any] | None = None, **more: Any) -> Task:
    return Task("t", "agentgym/Terminal-v0", "do it", setup=setup or {}, verifier=more.pop("verifier", ANSWER), **more)


@pytest.fixture
def env() -> Iterator[TerminalEnv]:
    environment = TerminalEnv()
    yield environment
    environment.close()


def _begin(env: TerminalEnv, task: Task) -> TerminalEnv:
    env.reset(seed=0, options={"task": task})
    return env


def _play(env: TerminalEnv, name: str, task: Task, seed: int) -> tuple[float, dict[str, Any], list[str]]:
    policy = make_policy(name, tasks=[task], tools=env.tools)
    _, info = env.reset(seed=seed, options={"task": task})
    messages = [Message.from_openai(m) for m in info["messages"]]
    texts: list[str] = []
    while True:
        turn = len(texts)
        text = policy(SampleRequest((), tuple(messages), 1000 * seed + turn, task.id, turn))
        observation, reward, terminated, truncated, info = env.step(text)
        messages += [Message.from_openai(m) for m in info["messages"]]
        texts.append(observation)
        if terminated or truncated:
            return reward, info, texts


# without a sandbox


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (ExecResult(0, "a\nb\n", ""), "a\nb"),
        (ExecResult(0, "", ""), "[no output]"),
        (ExecResult(0, "a\n\n", ""), "a\n"),
        (ExecResult(2, "out\n", "err\n"), "out\nerr\n[exit 2]"),
        (ExecResult(1, "", ""), "[exit 1]"),
        (ExecResult(None, "x", "", timed_out=True, shell_restarted=True), "x\n[timed out after 3 s; the shell was restarted]"),
        (ExecResult(3, "", "", shell_restarted=True), "[the shell ended; a new one was started]"),
        (ExecResult(None, "", "", killed=True, shell_restarted=True), "[the shell ended; a new one was started]"),
        (ExecResult(0, "ab", "", truncated=True, stdout_bytes=9000), "ab\n[9000 bytes of output, its middle left out]"),
    ],
)  # fmt: skip
def test_what_the_policy_reads_of_a_command(result: ExecResult, text: str) -> None:
    assert describe(result, "3 s") == text


def test_unknown_backend_is_named_and_nothing_falls_back() -> None:
    env = TerminalEnv(backend="namespase")
    with pytest.raises(UnknownName, match="did you mean 'namespace'"):
        env.reset(seed=0)
    env.close()


def test_broken_verifier_is_found_before_a_sandbox_is_opened() -> None:
    env = TerminalEnv([_task(verifier={"kind": "vibes"})], backend="none such")
    with pytest.raises(TaskError, match="kind 'vibes' is unknown"):
        env.reset(seed=0)
    env.close()


# the portable backend


@pytest.fixture
def local() -> Iterator[TerminalEnv]:
    try:
        get_backend("local")
    except (ImportError, BackendUnavailable) as error:
        pytest.skip(f"backend local: {error}")
    environment = TerminalEnv(backend="local")
    yield environment
    environment.close()


def test_keyhunt_is_played_on_the_local_backend(local: TerminalEnv) -> None:
    for seed, task in enumerate(generate(3)):
        assert _play(local, "oracle", task, seed)[0] == 1.0
        assert _play(local, "noop", task, seed)[0] == 0.0


@pytest.mark.parametrize("setup", [{"fixture": "nl2sh/fs2"}, {"files": [{"path": "/etc/x"}]}, {"workdir": "/"}])
def test_local_refuses_tasks_that_need_a_root_of_their_own(local: TerminalEnv, setup: dict[str, Any]) -> None:
    with pytest.raises(BackendUnavailable, match="no root of its own; use backend 'namespace'"):
        local.reset(seed=0, options={"task": _task(setup)})


@pytest.mark.parametrize("python", [False, True])
def test_python_is_offered_only_where_it_is_asked_for(python: bool) -> None:
    env = TerminalEnv(python=python)
    assert ("python code: Run Python" in env.system_prompt(), env.needs) == (
        (True, Level.PROCESS) if python else (False, Level.SHELL)
    )
    assert env.tools[-1].name == "submit" and "python" not in {tool.name for tool in TerminalEnv.tools}


def test_python_is_refused_where_its_variables_would_not_be_kept(local: TerminalEnv) -> None:
    with (
        closing(TerminalEnv(backend="local", python=True)) as env,
        pytest.raises(
            BackendUnavailable, match="keeps level shell here and Terminal-v0 needs process for the tool python"
        ),
    ):
        env.reset(seed=0)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (ExecResult(1, "", "Traceback ...\nValueError\n"), "Traceback ...\nValueError"),
        (ExecResult(1, "", "KeyboardInterrupt\n", timed_out=True), "KeyboardInterrupt\n[timed out after 3 s; variables are kept]"),
        (ExecResult(None, "", "", timed_out=True, shell_restarted=True), "[timed out after 3 s; Python was restarted, its variables are gone]"),
        (ExecResult(None, "x\n", "", killed=True, shell_restarted=True), "x\n[Python ended; a new one was started, its variables are gone]"),
        (ExecResult(0, "", ""), "[no output]"),
    ],
)  # fmt: skip
def test_what_is_read_of_python(result: ExecResult, text: str) -> None:
    assert describe(result, "3 s", python=True) == text


# the real thing


@sandboxed
def test_oracle_solves_all_packaged_tasks_and_noop_none(env: TerminalEnv) -> None:
    wrong = []
    for seed, task in enumerate(load_tasks("nl2sh")):
        for name, expected in (("oracle", 1.0), ("noop", 0.0)):
            reward, info, _ = _play(env, name, task, seed)
            if reward != expected:
                wrong.append((task.id, name, info["verdict"]))
    assert wrong == []


@sandboxed
def test_the_other_reference_commands_are_right_too(env: TerminalEnv) -> None:
    absent = ("cpio", "tree")
    wrong = []
    for task in load_tasks("nl2sh"):
        for command in task.meta["commands"][1:]:
            if not any(word in command.split() for word in absent):
                _begin(env, task).step(f"run {command}")
                if env.step("submit")[1] != 1.0:
                    wrong.append(task.id)
    assert wrong == ["nl2sh-fs2-009"], "its second command is about another folder; every other must be right"


@sandboxed
def test_scripted_has_mixed_outcomes_on_both_families(env: TerminalEnv) -> None:
    for tasks in (generate(16), load_tasks("nl2sh", num=24)):
        rewards = [_play(env, "scripted", task, seed)[0] for seed, task in enumerate(tasks)]
        assert 2 <= sum(rewards) <= len(rewards) - 2
        assert rewards == [_play(env, "scripted", task, seed)[0] for seed, task in enumerate(tasks)]


@sandboxed
def test_random_does_no_harm(env: TerminalEnv) -> None:
    for seed, task in enumerate(generate(4)):
        assert _play(env, "random", task, seed)[1]["stop_reason"] is not None


@sandboxed
def test_gymnasium_makes_it_and_it_forks() -> None:
    from gymnasium.utils.env_checker import check_env

    made = gymnasium.make("agentgym/Terminal-v0")
    check_env(made.unwrapped, skip_render_check=True)
    made.reset(seed=0)
    made.step("run x=1")
    inner = made.unwrapped
    assert isinstance(inner, TerminalEnv)
    with inner.snapshot(require=Level.SHELL) as snapshot:
        left, right = snapshot.fork(2)
    assert left.step("run x=2; echo $x")[0] == "2"
    assert right.step("run echo $x")[0] == "1"
    assert made.step("run echo $x")[0] == "1"
    for child in (left, right, made):
        child.close()


@sandboxed
def test_a_fork_carries_what_a_bare_submit_hands_in(env: TerminalEnv) -> None:
    _begin(env, _task()).step("run echo yes")
    right, wrong = env.fork(2)
    wrong.step("run echo no")
    assert wrong.step("submit")[1] == 0.0
    assert right.step("submit")[1] == 1.0
    assert env.step("submit")[1] == 1.0
    right.close()
    wrong.close()


@sandboxed
def test_files_are_written_and_read_and_mistakes_are_told(env: TerminalEnv) -> None:
    _begin(env, _task({"files": [{"path": "empty"}]}))
    assert env.step("write_file d/e.txt\nhé\nllo")[0] == "wrote 7 bytes to d/e.txt"
    assert env.step("run cat /workspace/d/e.txt")[0] == "hé\nllo"
    assert env.step("read_file d/e.txt")[0] == "hé\nllo"
    assert env.step("write_file z\na\0b")[0] == "wrote 3 bytes to z"
    assert env.step("run wc -c <z")[0] == "3"
    assert env.step("read_file empty")[0] == "[empty file]"
    for bad in ("nope", "/", "d", "/dev/zero", "/proc/self/status", "/proc/1/root/etc/passwd", "x" * 5000, "a/" * 3000):
        observation, reward, terminated, truncated, _ = env.step(f"read_file {bad}")
        assert observation.startswith("error: "), bad
        assert not terminated and not truncated and reward == 0.0
    for bad in ("/", "d", "/dev/null", "/proc/version", "empty/x", "x" * 5000):
        assert env.step(f"write_file {bad}\ntext")[0].startswith("error: "), bad


@sandboxed
@pytest.mark.parametrize("text", ["run echo a\0b", "run echo \ud800", "read_file a\0b", "write_file f\n\udfff"])
def test_text_that_no_shell_can_take_is_the_policys_mistake(env: TerminalEnv, text: str) -> None:
    observation = _begin(env, _task()).step(text)[0]
    assert re.match("error: (command|path|content) (has a NUL|is not valid Unicode)", observation)
    assert env.step("run echo fine")[0] == "fine"


@sandboxed
def test_long_output_loses_its_middle_and_is_handed_in_whole(env: TerminalEnv) -> None:
    text = "".join(f"{n}\n" for n in range(20_000))
    verifier = {"kind": "nl2sh", "goal": "read", "stdout": text, "changes": {}}
    observation = _begin(env, _task(verifier=verifier)).step("run seq 0 19999")[0]
    assert len(observation) < 10_200
    assert f"[... {len(text) - 1 - 10_000} bytes cut ...]" in observation
    assert observation.startswith("0\n1\n") and observation.endswith("\n19999")
    assert env.step("submit")[1] == 1.0


@sandboxed
def test_a_hung_command_ends_and_the_episode_goes_on(env: TerminalEnv) -> None:
    _begin(env, _task(limits={"turn_timeout_s": 0.3}))
    assert env.step("run echo before; sleep 60")[0] == "before\n[timed out after 0.3 s; the shell was restarted]"
    assert env.step("run exit 3")[0] == "[the shell ended; a new one was started]"
    assert env.step("run false")[0] == "[exit 1]"
    assert env.step("run pwd")[0] == "/workspace"


@sandboxed
def test_an_episode_without_time_ends_and_says_so(env: TerminalEnv) -> None:
    _begin(env, _task(limits={"timeout_s": 0.3}))
    observation, _, terminated, truncated, info = env.step("run sleep 60")
    assert observation == "[timed out after all the time left; the shell was restarted]"
    assert (terminated, truncated, info["stop_reason"]) == (False, True, "timeout")


@sandboxed
def test_submit_without_a_run_hands_in_nothing(env: TerminalEnv) -> None:
    _, reward, terminated, _, info = _begin(env, _task()).step("submit")
    assert (reward, terminated, info["stop_reason"]) == (0.0, True, "failure")
    assert "the answer '' is not 'yes'" in info["verdict"]["reason"]


@sandboxed
def test_the_verdict_is_told_to_the_caller_only(env: TerminalEnv) -> None:
    _, _, _, _, info = _begin(env, _task()).step("run true")
    assert "verdict" not in info
    observation, _, _, _, info = env.step("submit no")
    assert info["verdict"] == {"outcome": 0.0, "reason": "the answer 'no' is not 'yes' (exact)", "partial": 0.0}
    assert "yes" not in observation + str(info["messages"])


@sandboxed
def test_a_limit_scores_the_world_as_it_stands(env: TerminalEnv) -> None:
    done = {"kind": "nl2sh", "goal": "state", "changes": {"/workspace/f": ["file", "0o644", "", 0]}}
    _, reward, terminated, truncated, _ = _begin(env, _task(verifier=done, limits={"max_turns": 1})).step("run >f")
    assert (reward, terminated, truncated) == (1.0, False, True)
    _, reward, _, truncated, info = _begin(env, _task(limits={"max_turns": 1})).step("run echo yes")
    assert (reward, truncated) == (0.0, True)
    assert info["verdict"]["reason"] == "nothing was submitted"


@sandboxed
def test_missing_programs_are_named_before_the_episode(env: TerminalEnv) -> None:
    task = _task({"programs": {"sh": "dash", "no-such-program": "no-such-package"}})
    with pytest.raises(TaskError, match=r"needs no-such-program \(package no-such-package\)"):
        _begin(env, task)
    with pytest.raises(EnvError, match="call reset"):
        env.step("run true")
    with pytest.raises(TaskError, match="is no program's name"):
        _begin(env, _task({"programs": {"x; rm -rf /": "x"}}))
    _begin(env, _task({"programs": {"sh": "dash"}}))


@sandboxed
def test_equal_seeds_give_equal_worlds(env: TerminalEnv) -> None:
    def roll(seed: int) -> str:
        env.reset(seed=seed, options={"task": _task()})
        return env.step("run echo $RANDOM $RANDOM")[0]

    assert roll(1) == roll(1) != roll(2)


# graders on the frozen world


def _graded(command: str, **more: Any) -> Task:
    files = more.pop("files", {"check.sh": command})
    return _task(verifier={"kind": "script", "files": files, "command": "sh /grader/check.sh", **more})


@sandboxed
def test_script_sees_the_frozen_world_and_nothing_of_the_shell(env: TerminalEnv) -> None:
    check = "grep -q done /world/workspace/report || exit 1; test ! -e /workspace/report && echo PASS report"
    task = _graded(check, required=["PASS report"])
    _begin(env, task).step("run grep() { return 0; }; export -f grep; PATH=/workspace:$PATH")
    assert env.step("submit")[1] == 0.0
    _begin(env, task).step("run echo done > report")
    assert env.step("submit")[1] == 1.0


@sandboxed
def test_the_agent_finds_and_plants_nothing_of_the_grader(env: TerminalEnv) -> None:
    task = _graded("secret=s3cr3t; test -e /world/workspace/never")
    _begin(env, task)
    assert env.step(
        "run ls -A /grader /world 2>/dev/null; grep -rl s3cr3t /workspace /root /tmp /etc /proc/self/environ"
    )[0].endswith("[exit 1]")
    plant = "mkdir -p /grader /world/workspace; echo exit 0 >/grader/check.sh; touch /world/workspace/never; ln -sfn / /tmp/r"
    env.step(f"run {plant}; printf '#!/bin/bash\\nexit 0\\n' >/usr/bin/test; printf '#!/bin/bash\\nexit 0\\n' >/bin/sh")
    _, reward, _, _, info = env.step("submit")
    assert reward == 0.0, info["verdict"]


@sandboxed
@pytest.mark.parametrize(
    ("check", "more", "word"),
    [
        ("sleep 30", {"timeout_s": 0.3}, "did not end in 0.3 s"),
        ("exit 9", {}, "status 9"),
        ("no-such-program", {}, "status 127"),
        ("kill -9 $$", {}, "status"),
    ],
)
def test_a_grader_that_fails_is_never_a_zero(env: TerminalEnv, check: str, more: dict[str, Any], word: str) -> None:
    _begin(env, _graded(check, **more))
    with pytest.raises(EnvError, match=word):
        env.step("submit")
    with pytest.raises(EnvError, match="the world broke"):
        env.step("submit")


@sandboxed
def test_a_lost_sandbox_is_never_a_zero(env: TerminalEnv) -> None:
    _begin(env, load_tasks("nl2sh", num=1)[0])
    assert env.sandbox is not None
    env.sandbox.close()
    with pytest.raises(AgentGymError):
        env.step("submit")


@sandboxed
def test_background_processes_do_not_keep_a_world_from_being_scored(env: TerminalEnv) -> None:
    done = {"kind": "nl2sh", "goal": "state", "changes": {"/workspace/f": ["file", "0o644", "", 0]}}
    _begin(env, _task(verifier=done)).step("run >f; sleep 100 & disown; while :; do :; done & exec 7>>/tmp/log")
    assert env.step("submit")[1] == 1.0


@sandboxed
def test_processes_that_cannot_be_sealed_end_when_the_work_is_handed_in(env: TerminalEnv) -> None:
    done = {"kind": "nl2sh", "goal": "state", "changes": {"/workspace/f": ["file", "0o644", "", 0]}}
    _begin(env, _task(verifier=done)).step("run kill() { :; }; >f; truncate -s 900M /tmp/big; sleep 100 &")
    with pytest.raises(SnapshotBusy, match="bytes to copy"):
        env.snapshot()
    assert env.step("submit")[1] == 1.0


@sandboxed
def test_limits_of_a_task_reach_the_shell() -> None:
    env = TerminalEnv([_task(limits={"max_output_bytes": 100})], limits=Limits(turn_timeout_s=5.0))
    env.reset(seed=0)
    assert len(env.step("run seq 1000")[0]) < 160
    env.close()


@sandboxed
def test_episodes_leave_no_descriptor_behind(env: TerminalEnv) -> None:
    import os

    task = generate(1)[0]
    for seed in range(3):
        _play(env, "oracle", task, seed)
    before = len(os.listdir("/proc/self/fd"))
    rng = np.random.default_rng(0)
    for seed in range(10):
        _play(env, "scripted", task, int(rng.integers(100)) + seed)
    assert len(os.listdir("/proc/self/fd")) <= before + 20  # the blanks that stand ready come and go
