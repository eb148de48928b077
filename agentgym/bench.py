"""The bench harness: what a row of figures is, how to time, and which function runs which bench.

Owns the row, the targets' arithmetic and the watch for throttling. Leaves what is measured, its baseline and
its targets to the files named in `BENCHES`, which are imported only when they run.

A bench is a function without arguments that gives rows:

    def step() -> list[BenchRow]:
        samples = timed(one_step, 200)
        return [row("step", "plain", fmean(samples) * 1e6, unit="us", samples=samples, baseline=..., ...)]
"""

from __future__ import annotations

import importlib
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from agentgym.errors import UnknownName

BENCHES: dict[str, str] = {
    "fork": "agentgym.sandboxes.bench_sandbox:fork",
    "fanout": "agentgym.sandboxes.bench_sandbox:fanout",
    "chain": "agentgym.sandboxes.bench_scale:chain",
    "density": "agentgym.sandboxes.bench_scale:density",
    "pyfork": "agentgym.sandboxes.bench_pyfork:pyfork",
    "shell": "agentgym.envs.bench_terminal:shell",
    "step": "agentgym.bench_core:step",
    "tree": "agentgym.bench_core:tree",
    "store": "agentgym.bench_store:store",
}
"""Name to "module:function"."""

TOLERANCE = 0.2
"""A target missed by more than this share fails the command."""
_SPIN = 200_000


@dataclass(frozen=True, slots=True)
class Target:
    """One bound on one field of a row, such as ours at most 8 or ratio at least 50."""

    field: str
    """"ours", "ratio", "achieved_over_ideal", "p50" or "p99"."""
    at_most: float = math.inf
    at_least: float = -math.inf

    def shortfall(self, value: float | None) -> float:
        """By which share the value misses the bound: 0 where it is met, infinite where there is no number."""
        if value is None or math.isnan(value):
            return math.inf
        over = (value - self.at_most) / abs(self.at_most or 1.0) if value > self.at_most else 0.0
        under = (self.at_least - value) / abs(self.at_least or 1.0) if value < self.at_least else 0.0
        return max(over, under)

    def __str__(self) -> str:
        bounds = [f"<= {self.at_most:g}"] if self.at_most < math.inf else []
        bounds += [f">= {self.at_least:g}"] if self.at_least > -math.inf else []
        return f"{self.field} {' and '.join(bounds)}"


@dataclass(frozen=True, slots=True)
class BenchRow:
    """The figures of one case; `row` builds it. Its fields are those of the command's JSON, and `missed`."""

    bench: str
    case: str
    ours: float
    baseline: float | None
    baseline_name: str
    ratio: float | None
    """How many times better than the baseline, whichever direction is better."""
    ideal: float | None
    """The ratio that no implementation could beat; None where there is no such bound."""
    achieved_over_ideal: float | None
    p50: float | None
    """In `unit`, as `p99`."""
    p99: float | None
    n: int
    unit: str
    cores: int
    kernel: str
    throttled: bool
    """The machine was slower or stolen from while the bench ran; figures in time are then too bad."""
    ok: bool
    """Every target is met."""
    target: str
    missed: bool
    """A target is missed by more than 20 %: the command exits with an error."""

    def to_json(self) -> dict[str, Any]:
        """The row as the command prints it."""
        plain = asdict(self)
        del plain["missed"]
        return plain


def row(
    bench: str,
    case: str,
    ours: float,
    *,
    unit: str,
    n: int | None = None,
    samples: Sequence[float] = (),
    scale: float = 1.0,
    baseline: float | None = None,
    baseline_name: str = "",
    more_is_better: bool = False,
    ideal: float | None = None,
    targets: Sequence[Target] = (),
) -> BenchRow:
    """Build a row: ratio, percentiles, machine and verdict are computed here.

    Args:
        bench: A key of `BENCHES`.
        case: What of it.
        ours: The figure, in `unit`.
        unit: Such as "ms" or "steps/s".
        n: How many measurements; the number of samples when absent.
        samples: Single measurements, for p50 and p99.
        scale: Units per sample: 1000 where samples are seconds and the unit is ms.
        baseline: The other way's figure from the same run, in `unit`; None where none could be run.
        baseline_name: What the other way is.
        more_is_better: True for rates and counts that should be high.
        ideal: The best possible ratio.
        targets: What `ok` means; none: always ok.
    """
    ratio = None
    if baseline is not None:
        better, worse = (ours, baseline) if more_is_better else (baseline, ours)
        ratio = better / worse if worse else math.inf
    achieved = ratio / ideal if ratio is not None and ideal else None
    p50, p99 = (percentile(samples, q) * scale if samples else None for q in (0.5, 0.99))
    values = {"ours": ours, "ratio": ratio, "achieved_over_ideal": achieved, "p50": p50, "p99": p99}
    shortfalls = [target.shortfall(values[target.field]) for target in targets]
    return BenchRow(
        bench=bench,
        case=case,
        ours=ours,
        baseline=baseline,
        baseline_name=baseline_name,
        ratio=ratio,
        ideal=ideal,
        achieved_over_ideal=achieved,
        p50=p50,
        p99=p99,
        n=len(samples) if n is None else n,
        unit=unit,
        cores=num_cores(),
        kernel=platform.release(),
        throttled=False,
        ok=all(short == 0 for short in shortfalls),
        target=", ".join(map(str, targets)),
        missed=any(short > TOLERANCE for short in shortfalls),
    )


def run_bench(name: str) -> list[BenchRow]:
    """Run a bench and say on each row whether the machine was throttled meanwhile.

    Raises:
        UnknownName: there is no such bench.
    """
    if name not in BENCHES:
        raise UnknownName.of("bench", name, BENCHES, f"benches: {', '.join(BENCHES)}")
    module, _, function = BENCHES[name].partition(":")
    bench: Callable[[], list[BenchRow]] = getattr(importlib.import_module(module), function)
    before = Pulse.take()
    rows = bench()
    throttled = before.throttled(Pulse.take())
    return [replace(measured, throttled=measured.throttled or throttled) for measured in rows]


def timed(function: Callable[[], object], n: int, *, warm_up: int = 1) -> list[float]:
    """Seconds of each of n calls, after some that do not count."""
    for _ in range(warm_up):
        function()
    samples = []
    for _ in range(n):
        started = time.perf_counter()
        function()
        samples.append(time.perf_counter() - started)
    return samples


def percentile(samples: Sequence[float], q: float) -> float:
    """The sample that a share q of all do not exceed (nearest rank)."""
    if not samples:
        raise ValueError("a percentile needs one sample or more")
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Pulse:
    """How fast the machine was at a moment, and what had been withheld from it until then."""

    spin_s: float
    """Best of five runs of a fixed loop."""
    at_s: float
    stolen_s: float
    """CPU time the hypervisor gave to others (steal of /proc/stat), over all cores."""
    capped: int
    """Periods in which the control group ran out of its CPU quota."""

    @classmethod
    def take(cls) -> Pulse:
        """Measure now; some tens of milliseconds."""
        return cls(min(timed(_spin, 5)), time.monotonic(), _stolen_s(), _capped())

    def throttled(self, later: Pulse) -> bool:
        """True where the loop got a quarter slower, 5 % of the cores were stolen, or the quota ran out often."""
        passed_s = max(later.at_s - self.at_s, 1e-9)
        slower = max(later.spin_s, self.spin_s) > 1.25 * min(later.spin_s, self.spin_s)
        stolen = (later.stolen_s - self.stolen_s) / (passed_s * num_cores()) > 0.05
        # a period is 100 ms, so this is one in ten
        return slower or stolen or (later.capped - self.capped) / passed_s > 1.0


def _spin() -> int:
    total = 0
    for number in range(_SPIN):
        total += number
    return total


def _stolen_s() -> float:
    try:
        fields = Path("/proc/stat").read_text("ascii").split("\n", 1)[0].split()
        return int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):  # no Linux: nothing is known to be stolen
        return 0.0


def _capped() -> int:
    try:
        lines = Path("/sys/fs/cgroup/cpu.stat").read_text("ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("nr_throttled ")), 0)
    except (OSError, IndexError, ValueError):
        return 0
