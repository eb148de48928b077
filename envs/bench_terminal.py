"""`agentgym bench shell`: what one action in a shell costs, against starting a shell for each.

Owns the three cases and their targets. The baseline runs on the host without any isolation, so a ratio of 1 would
already mean that the sandbox is free.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from statistics import fmean

from agentgym.bench import BenchRow, Target, percentile, row, timed
from agentgym.envs.terminal import TerminalEnv
from agentgym.episode import Limits
from agentgym.sandbox import SandboxSpec, get_backend
from agentgym.task import Task

ROUNDS = 10
"""Ours and the baseline take turns, so that a slow phase of the machine meets both."""
BUILTIN, EXTERNAL = "x=1", "/bin/true"
_MIX = ("cd /tmp", "echo hello", "ls /", "test -e note")
"""Of the actions through `env.step`: three built in, one external, as shell sessions go."""


def shell() -> list[BenchRow]:
    """Time a built-in command, an external one, and whole turns through `env.step`."""
    sandbox = get_backend("namespace").create(SandboxSpec())
    try:
        rows = [
            _command("builtin", lambda: sandbox.run(BUILTIN), BUILTIN, at_most_ms=0.1, n=200),
            _command("external", lambda: sandbox.run(EXTERNAL), EXTERNAL, at_most_ms=2.0, n=50),
        ]
    finally:
        sandbox.close()
    return [*rows, _steps()]


def _command(case: str, ours: Callable[[], object], command: str, *, at_most_ms: float, n: int) -> BenchRow:
    mine, theirs = _in_turns(ours, lambda: _one_shot(command), n)
    return row(
        "shell",
        case,
        percentile(mine, 0.5) * 1e3,
        unit="ms",
        samples=mine,
        scale=1e3,
        baseline=percentile(theirs, 0.5) * 1e3,
        baseline_name="bash -c",
        targets=[Target("ours", at_most=at_most_ms)],
    )


def _steps() -> BenchRow:
    task = Task("bench", "agentgym/Terminal-v0", "go", verifier={"kind": "answer", "answer": "1"})
    limits = Limits(max_turns=1 << 30, max_tool_calls=1 << 30, timeout_s=1e9)
    env = TerminalEnv([task], limits=limits)
    try:
        env.reset(seed=0)
        mine, theirs = _in_turns(
            lambda: [env.step(f"run {command}") for command in _MIX],
            lambda: [_one_shot(command) for command in _MIX],
            20,
        )
    finally:
        env.close()
    per_action = [seconds / len(_MIX) for seconds in mine]
    return row(
        "shell",
        "env.step",
        1 / fmean(per_action),
        unit="actions/s",
        n=len(mine) * len(_MIX),
        baseline=len(_MIX) / fmean(theirs),
        baseline_name="bash -c",
        more_is_better=True,
        targets=[Target("ours", at_least=500.0)],
    )


def _in_turns(ours: Callable[[], object], theirs: Callable[[], object], n: int) -> tuple[list[float], list[float]]:
    mine: list[float] = []
    others: list[float] = []
    for _ in range(ROUNDS):
        mine += timed(ours, n)
        others += timed(theirs, max(1, n // 10))
    return mine, others


def _one_shot(command: str) -> object:
    return subprocess.run(["bash", "-c", command], capture_output=True, check=False)
