"""`agentgym bench chain` and `density`: whether forks stay cheap after a thousand turns, and a thousand at once.

Owns the cases and their targets. The baseline of a long chain is its own beginning; that of many sandboxes is a
bash for each, started by the library without any isolation.
"""

from __future__ import annotations

import subprocess
import time
from statistics import median

from agentgym.bench import BenchRow, Target, row
from agentgym.sandbox import FileSpec, SandboxSpec
from agentgym.sandboxes.namespace import NamespaceBackend, NamespaceSandbox

TURNS = 1000
LIVE = 1000
_SPEC = SandboxSpec(files=tuple(FileSpec(f"file{i}", data=b"line\n" * 4000) for i in range(50)))
_ROUNDS = 9


def chain() -> list[BenchRow]:
    """A thousand turns, each with a change and a snapshot; forks at the beginning and at the end."""
    backend = NamespaceBackend()
    backend.probe()
    try:
        box = backend.create(_SPEC)
        _turn(box, 0)
        first = _forks(box)
        for turn in range(1, TURNS):
            _turn(box, turn)
        time.sleep(0.5)
        _turn(box, TURNS)
        last = _forks(box)
        if box.run("wc -l < log").stdout != f"{TURNS + 1}\n":
            raise RuntimeError("the last turn does not see all the turns before it")
    finally:
        backend.close()
    growth = median(last) / median(first)
    return [
        row(
            "chain",
            f"fork after {TURNS} turns",
            median(last) * 1e3,
            unit="ms",
            samples=last,
            scale=1e3,
            baseline=median(first) * 1e3,
            baseline_name="fork after 1 turn",
        ),
        row("chain", "last fork over first", growth, unit="x", n=_ROUNDS, targets=[Target("ours", at_most=2.0)]),
    ]


def density() -> list[BenchRow]:
    """A thousand live forks of one snapshot, each of which answered; what they weigh; how fast they end."""
    backend = NamespaceBackend(pool=0)
    backend.probe()
    try:
        parent = backend.create(_SPEC)
        parent.run("x=1; echo ready > note")
        with parent.snapshot() as snapshot:
            free = _available_bytes()
            started = time.perf_counter()
            children = snapshot.fork(LIVE)
            answers = {child.run("echo $x").stdout for child in children}
            forked_s = time.perf_counter() - started
            each_bytes = (free - _available_bytes()) / LIVE
        if answers != {"1\n"}:
            raise RuntimeError(f"the forks answered {answers}")
    finally:
        started = time.perf_counter()
        backend.close()
        ended_s = time.perf_counter() - started
    bare_s = _bare_shells(100) * LIVE / 100
    many = f"{LIVE} live forks"
    return [
        row("density", many, forked_s, unit="s", n=LIVE, baseline=bare_s, baseline_name="a bash each, no isolation",
            targets=[Target("ours", at_most=5.0)]),
        row("density", "memory of each", each_bytes / 2**20, unit="MiB", n=LIVE, targets=[Target("ours", at_most=1.0)]),
        row("density", "all ended, folder removed", ended_s, unit="s", n=LIVE, targets=[Target("ours", at_most=1.0)]),
    ]  # fmt: skip


def _turn(box: NamespaceSandbox, turn: int) -> None:
    box.run(f"echo {turn} >> log; echo {turn} > own{turn % 40}")
    box.snapshot().release()


def _forks(box: NamespaceSandbox) -> list[float]:
    samples = []
    for _ in range(_ROUNDS):
        with box.snapshot() as snapshot:
            time.sleep(0.02)
            started = time.perf_counter()
            [child] = snapshot.fork()
            child.run("read -r line < log")
            samples.append(time.perf_counter() - started)
        child.close()
    return samples


def _bare_shells(num: int) -> float:
    started = time.perf_counter()
    shells = [
        subprocess.Popen(["bash", "--norc"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(num)
    ]
    for shell in shells:
        assert shell.stdin is not None and shell.stdout is not None
        shell.stdin.write("echo 1\n")
        shell.stdin.flush()
        shell.stdout.readline()
    taken = time.perf_counter() - started
    for shell in shells:
        shell.communicate("exit\n")
    return taken


def _available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")
