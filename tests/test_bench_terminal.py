from __future__ import annotations

import math

import pytest

from agentgym.bench import run_bench
from agentgym.envs import bench_terminal


@pytest.mark.sandbox
def test_shell_bench_gives_its_three_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_terminal, "ROUNDS", 1)
    rows = run_bench("shell")
    assert [(row.bench, row.case, row.unit) for row in rows] == [
        ("shell", "builtin", "ms"),
        ("shell", "external", "ms"),
        ("shell", "env.step", "actions/s"),
    ]
    for row in rows:
        assert row.ours > 0 and row.baseline is not None and math.isfinite(row.baseline)
        assert row.baseline_name == "bash -c" and row.target
