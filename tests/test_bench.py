from __future__ import annotations

import json
import math

import pytest

from agentgym import bench
from agentgym.bench import BENCHES, Pulse, Target, percentile, row, run_bench, timed
from agentgym.errors import UnknownName

FIELDS = [
    *("bench", "case", "ours", "baseline", "baseline_name", "ratio", "ideal", "achieved_over_ideal"),
    *("p50", "p99", "n", "unit", "cores", "kernel", "throttled", "ok", "target"),
]


def test_a_row_of_times() -> None:
    made = row(
        "fork", "plain", 4.0, unit="ms", samples=[0.004, 0.003, 0.005, 0.009], scale=1000, baseline=40.0, ideal=20.0,
        targets=[Target("ours", at_most=8), Target("ratio", at_least=10)],
    )  # fmt: skip
    assert (made.ratio, made.achieved_over_ideal, made.p50, made.p99, made.n) == (10.0, 0.5, 4.0, 9.0, 4)
    assert made.ok and not made.missed and made.target == "ours <= 8, ratio >= 10"
    plain = json.loads(json.dumps(made.to_json()))
    assert list(plain) == FIELDS


def test_a_row_of_rates() -> None:
    made = row("step", "x", 300.0, unit="steps/s", n=7, baseline=100.0, more_is_better=True)
    assert (made.ratio, made.p50, made.n, made.ok, made.target) == (3.0, None, 7, True, "")


@pytest.mark.parametrize(
    ("ours", "ok", "missed"), [(8.0, True, False), (8.1, False, False), (9.6, False, False), (9.7, False, True)]
)
def test_a_miss_of_more_than_a_fifth_fails(ours: float, ok: bool, missed: bool) -> None:
    made = row("fork", "plain", ours, unit="ms", targets=[Target("ours", at_most=8)])
    assert (made.ok, made.missed) == (ok, missed)


def test_shortfalls() -> None:
    assert Target("ours", at_least=100).shortfall(79) == pytest.approx(0.21)
    assert Target("ours", at_least=100).shortfall(100) == 0
    assert Target("ratio", at_least=10).shortfall(None) == math.inf
    assert Target("ratio", at_least=10).shortfall(math.nan) == math.inf
    assert row("fork", "x", 1.0, unit="ms", targets=[Target("ratio", at_least=2)]).missed, "no baseline, no pass"


def test_percentiles_are_samples() -> None:
    samples = [float(n) for n in range(1, 101)]
    assert [percentile(samples, q) for q in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([3.0], 0.99) == 3.0
    with pytest.raises(ValueError, match="one sample or more"):
        percentile([], 0.5)


def test_timed_counts_no_warm_up() -> None:
    calls = []
    assert len(timed(lambda: calls.append(1), 5, warm_up=2)) == 5
    assert len(calls) == 7


def test_throttling_shows_in_pace_steal_or_quota() -> None:
    cores = bench.num_cores()
    calm = Pulse(0.010, 0.0, 0.0, 0)
    assert not calm.throttled(Pulse(0.011, 10.0, 0.1, 3))
    assert calm.throttled(Pulse(0.014, 10.0, 0.0, 0))
    assert calm.throttled(Pulse(0.010, 10.0, 0.6 * cores, 0))
    assert calm.throttled(Pulse(0.010, 10.0, 0.0, 20))
    assert Pulse.take().spin_s > 0


def test_unknown_bench() -> None:
    with pytest.raises(UnknownName, match="unknown bench 'forks'; did you mean 'fork'"):
        run_bench("forks")


def test_the_table_names_functions() -> None:
    assert set(BENCHES) == {"fork", "fanout", "chain", "density", "pyfork", "shell", "step", "tree", "store"}
    assert all(target.startswith("agentgym.") and ":" in target for target in BENCHES.values())


def test_bench_tree_reaches_the_ideal() -> None:
    rows = run_bench("tree")
    assert [(r.ours, r.baseline) for r in rows if r.case != "sampled tokens"] == [(82, 160)] * 2
    assert all(r.ideal == 160 / 82 and r.ok and (r.achieved_over_ideal or 0) >= 0.98 for r in rows)
