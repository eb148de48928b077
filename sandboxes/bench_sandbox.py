"""`agentgym bench fork` and `fanout`: what a fork costs, against copying the folder and against Docker.

Owns the cases, their targets and the baselines, which take turns with ours in the same run. Docker is
measured where a daemon answers; its image is made of this machine's own bash, so that nothing is downloaded.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from statistics import median
from typing import Any

from agentgym.bench import BenchRow, Target, row
from agentgym.sandbox import FileSpec, SandboxSpec
from agentgym.sandboxes.docker_image import host_image
from agentgym.sandboxes.namespace import NamespaceBackend

FILES, FILE_BYTES = 50, 20_000
"""1 MB in 50 files."""
_SPEC = SandboxSpec(files=tuple(FileSpec(f"file{i}", data=b"line\n" * (FILE_BYTES // 5)) for i in range(FILES)))
_ROUNDS, _PER_PARENT = 6, 12
"""A parent is snapshot a dozen times, as in an episode of a dozen turns, then a fresh one is made."""
_TURN_S = 0.02
CHILDREN = 100
_FIRST = "read -r line < {}; echo $line"
"""The first command, the same everywhere: it reads a file and needs no program but the shell."""
_LABEL = "agentgym-bench"


def fork() -> list[BenchRow]:
    """Time snapshot + fork + first command: plain, from the pool, and the other ways."""
    plain, copied = _forks(NamespaceBackend(pool=0, limits=None)), _copies()
    cases = [
        ("plain", plain, 8.0),
        # joining a group waits for the kernel now and then, which a pool does beforehand
        ("with memory and process limits", _forks(NamespaceBackend(pool=0)), 15.0),
        ("from the pool, with limits", _forks(NamespaceBackend()), 5.0),
    ]
    name = "copy of the folder + bash"
    rows = [_row(case, ours, copied, name, [Target("ours", at_most=limit)]) for case, ours, limit in cases]
    with _docker() as once:
        if once is not None:
            ours, theirs = _against(once)
            targets = [Target("ratio", at_least=10.0)]
            rows.append(_row("against docker", ours, theirs, "docker commit + run + exec", targets))
    return rows


def fanout() -> list[BenchRow]:
    """Time one parent to a hundred children that each answered a command."""
    backend = NamespaceBackend(pool=0)
    backend.probe()
    try:
        parent = backend.create(_SPEC)
        parent.run("echo ready > note")
        with parent.snapshot() as snapshot:
            snapshot.fork()[0].run("true")
            started = time.perf_counter()
            children, each = [], []
            for _ in range(CHILDREN):
                before = time.perf_counter()
                [child] = snapshot.fork()
                child.run("true")
                each.append(time.perf_counter() - before)
                children.append(child)
            total_s = time.perf_counter() - started
        copied = _copies(20)
    finally:
        backend.close()
    growth = median(each[-20:]) / median(each[:20])
    return [
        row(
            "fanout",
            f"1 to {CHILDREN}",
            total_s,
            unit="s",
            n=CHILDREN,
            samples=each,
            baseline=median(copied) * CHILDREN,
            baseline_name="copy of the folder + bash",
            targets=[Target("ours", at_most=1.0)],
        ),
        row(
            "fanout",
            "last 20 over first 20",
            growth,
            unit="x",
            n=CHILDREN,
            targets=[Target("ours", at_most=1.3)],
        ),
    ]


def _row(case: str, ours: list[float], theirs: list[float], name: str, targets: list[Target]) -> BenchRow:
    return row(
        "fork",
        case,
        median(ours) * 1e3,
        unit="ms",
        samples=ours,
        scale=1e3,
        baseline=median(theirs) * 1e3,
        baseline_name=name,
        targets=targets,
    )


def _forks(backend: NamespaceBackend) -> list[float]:
    backend.probe()
    samples = []
    try:
        for _ in range(_ROUNDS):
            once, end = _forking(backend)
            once()
            for _ in range(_PER_PARENT):
                # where a blank stands ready, as after the time that a policy takes for a turn
                time.sleep(_TURN_S if backend.pool else 0.0)
                samples.append(once())
            end()
    finally:
        backend.close()
    return samples


def _forking(backend: NamespaceBackend) -> tuple[Callable[[], float], Callable[[], None]]:
    parent = backend.create(_SPEC)
    turn = 0

    def once() -> float:
        nonlocal turn
        turn += 1
        parent.run(f"echo {turn} > note")
        started = time.perf_counter()
        with parent.snapshot() as snapshot:
            [child] = snapshot.fork()
            answered = child.run(_FIRST.format("note")).stdout
            taken = time.perf_counter() - started
        child.close()
        if answered != f"{turn}\n":
            raise RuntimeError(f"the child answered {answered!r} instead of {turn}")
        return taken

    return once, parent.close


def _copies(n: int = _ROUNDS * _PER_PARENT) -> list[float]:
    """Copy the folder and run a first command in the copy with a fresh bash: what the `local` way costs at least."""
    samples = []
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "source")
        os.mkdir(source)
        for spec in _SPEC.files:
            with open(os.path.join(source, spec.path), "wb") as file:
                file.write(spec.data)
        for number in range(n):
            target = os.path.join(folder, str(number))
            started = time.perf_counter()
            subprocess.run(["cp", "-a", source, target], check=True)
            subprocess.run(["bash", "-c", _FIRST.format("file0")], cwd=target, check=True, capture_output=True)
            samples.append(time.perf_counter() - started)
            shutil.rmtree(target)
    return samples


def _against(theirs_once: Callable[[], float], rounds: int = 10) -> tuple[list[float], list[float]]:
    backend = NamespaceBackend()
    backend.probe()
    try:
        once, end = _forking(backend)
        once()
        pairs = [(once(), theirs_once()) for _ in range(rounds)]
        end()
    finally:
        backend.close()
    return [ours for ours, _ in pairs], [theirs for _, theirs in pairs]


@contextmanager
def _docker() -> Iterator[Callable[[], float] | None]:
    """One docker commit + run + exec, timed; None where no daemon answers."""
    try:
        import docker

        client: Any = docker.from_env(timeout=60)
        client.ping()
    except Exception:  # no SDK, no daemon, no right to reach it: then there is no such baseline
        yield None
        return
    options = {"network_mode": "none", "detach": True, "labels": [_LABEL]}
    client.api.import_image_from_data(host_image(("bash", "cat", "sleep")), repository=_LABEL, tag="base")
    parent = client.containers.run(f"{_LABEL}:base", ["/bin/sleep", "600"], **options)
    folder = io.BytesIO()
    with tarfile.open(fileobj=folder, mode="w") as archive:
        for spec in _SPEC.files:
            entry = tarfile.TarInfo(spec.path)
            entry.size = len(spec.data)
            archive.addfile(entry, io.BytesIO(spec.data))
    parent.put_archive("/root", folder.getvalue())

    def once() -> float:
        started = time.perf_counter()
        image = parent.commit(repository=_LABEL, tag="fork")
        child = client.containers.run(image.id, ["/bin/sleep", "600"], **options)
        code, _ = child.exec_run(["/bin/bash", "-c", _FIRST.format("/root/file0")])
        taken = time.perf_counter() - started
        child.remove(force=True)
        if code != 0:
            raise RuntimeError(f"docker exec ended with status {code}")
        return taken

    try:
        once()
        yield once
    finally:
        with suppress(Exception):
            for container in client.containers.list(all=True, filters={"label": _LABEL}):
                container.remove(force=True)
            for tag in ("fork", "base"):
                client.images.remove(f"{_LABEL}:{tag}", force=True)
        client.close()
