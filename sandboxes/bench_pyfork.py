"""`agentgym bench pyfork`: what a fork of live Python costs, against building its variables again.

Owns the cases and their targets. Those of the heap alone run on this machine's own root, which takes root's rights; the last
case forks a whole sandbox, files, shell and Python.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from statistics import median

from agentgym.bench import BenchRow, Target, row, timed
from agentgym.errors import SandboxError
from agentgym.sandbox import SandboxSpec
from agentgym.sandboxes.interpreter import TUNING
from agentgym.sandboxes.namespace import NamespaceBackend
from agentgym.sandboxes.pyfork import PythonSnapshot, PythonTool

HEAP_MB = 100
_SIZES_MB = (1, HEAP_MB, 500)
_ROUNDS, _PER_SNAPSHOT = 8, 4
_BASELINES = 3
_TUPLES_A_MB = 4400
# many small objects are the hard case: with few large ones, the same memory is fewer pages' worth of work
_BUILD = "data = [(i, float(i), str(i)) for i in range({num})]"
_SMALL_PAGES = {name: "" for name in TUNING}
_PYTHON = "/usr/bin/python3"
ENV = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}


def pyfork() -> list[BenchRow]:
    """Time fork + first command, snapshot + fork + first command, and the other ways to the same variables."""
    rows = []
    for size_mb in _SIZES_MB:
        target = [Target("ours", at_most=10.0)] if size_mb == HEAP_MB else []
        forks, with_snapshot = _forks(size_mb, {})
        again, unpickled = _run_again(size_mb), _unpickle(size_mb)
        case = f"{size_mb} MB heap"
        rows += [
            _row(f"fork + first command, {case}", forks, again, "running the code again", target),
            _row(f"fork + first command, {case}", forks, unpickled, "fresh interpreter + unpickling", []),
            _row(f"fork + first command, {case}", forks, _forks(size_mb, _SMALL_PAGES)[0], "fork in small pages", []),
            _row(f"snapshot + fork + first command, {case}", with_snapshot, again, "running the code again", []),
        ]
    whole, again = _sandboxes(HEAP_MB), _run_again(HEAP_MB)
    case = f"sandbox fork + first command, {HEAP_MB} MB heap"
    return [*rows, _row(case, whole, again, "running the code again", [Target("ours", at_most=10.0)])]


def _row(case: str, ours: list[float], theirs: list[float], name: str, targets: list[Target]) -> BenchRow:
    return row(
        "pyfork",
        case,
        median(ours) * 1e3,
        unit="ms",
        samples=ours,
        scale=1e3,
        baseline=median(theirs) * 1e3,
        baseline_name=name,
        targets=targets,
    )


def _forks(size_mb: int, tuning: Mapping[str, str]) -> tuple[list[float], list[float]]:
    tool = PythonTool(Unwalled({1: "/"}), 1, env={**ENV, **tuning}, workdir="/tmp", python=_PYTHON)
    forks, with_snapshot = [], []
    try:
        tool.run(_BUILD.format(num=size_mb * _TUPLES_A_MB))
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            with tool.freeze() as frozen:
                with_snapshot.append(_first(frozen) - started)
                for _ in range(_PER_SNAPSHOT):
                    started = time.perf_counter()
                    forks.append(_first(frozen) - started)
    finally:
        tool.close()
    return forks, with_snapshot


def _sandboxes(size_mb: int) -> list[float]:
    backend = NamespaceBackend()
    samples = []
    try:
        box = backend.create(SandboxSpec(python=True))
        box.run_python(_BUILD.format(num=size_mb * _TUPLES_A_MB))
        for turn in range(_ROUNDS * _PER_SNAPSHOT):
            box.run(f"echo {turn} > note")
            with box.snapshot() as snapshot:
                time.sleep(0.02)  # a policy's turn, in which a blank is made ready
                started = time.perf_counter()
                [child] = snapshot.fork()
                answered = child.run_python("data[7]").stdout
                samples.append(time.perf_counter() - started)
            child.close()
            _check(answered)
    finally:
        backend.close()
    return samples


def _first(frozen: PythonSnapshot) -> float:
    """Fork, ask, and give the time of the answer; the branch is ended afterwards."""
    child = frozen.fork(1)
    try:
        answered = child.run("data[7]").stdout
        at_s = time.perf_counter()
    finally:
        child.close()
    _check(answered)
    return at_s


def _check(answered: str) -> None:
    if answered != "(7, 7.0, '7')\n":
        raise RuntimeError(f"the interpreter answered {answered!r}")


def _run_again(size_mb: int) -> list[float]:
    def once() -> None:
        code = f"{_BUILD.format(num=size_mb * _TUPLES_A_MB)}; print(data[7], flush=True); import os; os._exit(0)"
        _check(subprocess.run([_PYTHON, "-c", code], env=ENV, capture_output=True, text=True, check=True).stdout)

    return timed(once, _BASELINES)


def _unpickle(size_mb: int) -> list[float]:
    with tempfile.NamedTemporaryFile() as file:
        build = f"{_BUILD.format(num=size_mb * _TUPLES_A_MB)}; import pickle"
        subprocess.run(
            [_PYTHON, "-c", f"{build}; pickle.dump(data, open({file.name!r}, 'wb'), 5)"], env=ENV, check=True
        )

        def once() -> None:
            load = f"import os, pickle; data = pickle.load(open({file.name!r}, 'rb'))"
            code = f"{load}; print(data[7], flush=True); os._exit(0)"
            _check(subprocess.run([_PYTHON, "-c", code], env=ENV, capture_output=True, text=True, check=True).stdout)

        return timed(once, _BASELINES)


class Unwalled:
    """A place without walls: programs run as processes of this machine, and boxes are directories of it."""

    def __init__(self, roots: Mapping[int, str]) -> None:
        self.roots = dict(roots)
        self.started: subprocess.Popen[bytes] | None = None

    def start(self, box: int, fds: list[int], argv: list[str], env: Mapping[str, str]) -> None:
        """See `interpreter.Host.start`."""
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 600) for fd in fds]

        def place() -> None:
            for number, fd in enumerate(high):
                os.dup2(fd, number)
            os.closerange(len(high), max(high) + 1)

        try:
            self.started = subprocess.Popen(
                argv, env=dict(env), preexec_fn=place, close_fds=False, cwd="/", start_new_session=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxError(f"{argv[0]}: {error}") from error
        finally:
            for fd in high:
                os.close(fd)

    def stop(self) -> None:
        """See `interpreter.Host.stop`."""
        if self.started is not None:
            self.started.wait(5)
            self.started = None

    def root(self, box: int) -> int:
        """See `interpreter.Host.root`."""
        return os.open(self.roots[box], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def limit(self, pid: int, box: int | None) -> None:
        """See `interpreter.Host.limit`; there are no limits."""
