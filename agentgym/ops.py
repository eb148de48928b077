"""What an operator asks: what this machine gives, what is registered, what a crash left behind.

Owns `doctor`, `gc` and `list` as data, which `cli.py` prints, and the running of benches.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentgym.errors import AgentGymError, BackendUnavailable, UnknownName
from agentgym.runs import DATABASE, list_runs, mark_interrupted
from agentgym.sandbox import Capabilities, backend_names, get_backend
from agentgym.screen import Screen

if TYPE_CHECKING:
    from agentgym.bench import BenchRow

DISTRIBUTION = "agentgym-tree"
ISOLATION = ("network", "pids", "readonly_host", "own_root", "capabilities", "memory", "cpu", "disk", "seccomp")
"""What a backend can keep apart, in the order that doctor prints."""
WALLS = frozenset({"network", "pids", "readonly_host", "own_root"})
"""Without all of these a backend is weak: what runs in it can reach the host or the net."""
_DEFAULT_BACKEND = "namespace"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's report."""

    area: str
    name: str
    state: str
    """"ok", "missing" where one can do without, or "failed"."""
    detail: str
    """What was found; where not ok, the consequence and what to do."""


def doctor() -> Iterator[Check]:
    """Try everything, one check after the other; the backends by making a sandbox."""
    version = platform.python_version()
    yield Check("python", version, _ok(sys.version_info >= (3, 11)), f"{platform.system()} {platform.release()}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Check("machine", "cores", "ok", f"{cores} ({platform.machine()})")
    for name in backend_names():
        yield from _backend_checks(name)
    yield from _criu_check()
    yield from _folder_checks()
    yield from _extra_checks()


def is_weak(capabilities: Capabilities) -> bool:
    """True where what runs in the backend can reach the host or the net."""
    return not capabilities.isolation >= WALLS


def collect_garbage(*, dry_run: bool = False) -> list[str]:
    """Free what crashed runs left in sandboxes, and write down in `runs/` which were interrupted."""
    done = []
    for name in ("docker_owner", "namespace"):
        # by name: sandboxes lie further out than what the core may import
        collect: Callable[..., list[str]] = importlib.import_module(f"agentgym.sandboxes.{name}").collect_garbage
        done += collect(dry_run=dry_run)
    for run in list_runs():
        if run.status == "interrupted" and run.summary.get("status") == "running":
            done.append(f"run {run.id} was killed; marked interrupted")
            if not dry_run:
                _settle(run.path / DATABASE)
                mark_interrupted(run)
    return done


def listing(kind: str) -> Mapping[str, str]:
    """What is registered of a kind: name to one line.

    Raises:
        UnknownName: there is no such kind.
    """
    if kind not in KINDS:
        raise UnknownName.of("kind", kind, KINDS, f"`agentgym list` takes: {', '.join(KINDS)}")
    return KINDS[kind]()


# doctor


def _ok(is_well: bool) -> str:
    return "ok" if is_well else "failed"


def _backend_checks(name: str) -> Iterator[Check]:
    needed = name == _DEFAULT_BACKEND
    try:
        capabilities = get_backend(name).probe()
    except BackendUnavailable as error:
        yield Check("backend", name, "failed" if needed else "missing", f"not available: {error}")
        return
    except AgentGymError as error:
        yield Check("backend", name, "failed", f"broken: {error}")
        return
    weak = "; WEAK: only by name" if is_weak(capabilities) else ""
    yield Check("backend", name, "ok", f"works; snapshots keep level {capabilities.level}{weak}")
    for piece in ISOLATION:
        if piece in capabilities.isolation:
            yield Check(name, piece, "ok", "kept apart")
        else:
            yield Check(name, piece, "missing", capabilities.missing.get(piece, "not kept apart"))
    for piece in sorted(capabilities.isolation - set(ISOLATION)):
        yield Check(name, piece, "ok", "kept apart")
    for piece, consequence in capabilities.missing.items():
        if piece not in ISOLATION:
            yield Check(name, piece, "missing", consequence)


def _criu_check() -> Iterator[Check]:
    found = importlib.import_module("agentgym.sandboxes.criu").probe()
    yield Check("live", "criu", "ok" if found.works else "missing", found.detail)


def _folder_checks() -> Iterator[Check]:
    state = importlib.import_module("agentgym.sandboxes.state")
    for root in state.state_roots():
        if os.path.isdir(root):
            free_bytes = shutil.disk_usage(root).free
            yield Check("state", root, _ok(os.access(root, os.W_OK)), f"{free_bytes >> 20} MiB free")
    dead = state.dead_folders()
    remedy = "; `agentgym gc` removes them" if dead else ""
    yield Check("state", "left by crashes", _ok(not dead), f"{len(dead)} folders{remedy}")
    runs = Path("runs") if Path("runs").exists() else Path()
    writable = os.access(runs, os.W_OK)
    yield Check("state", "runs/", _ok(writable), "writable" if writable else "not writable; name folders with --run")


def _extra_checks() -> Iterator[Check]:
    for extra, packages in _extras().items():
        missing = [name for name in packages if not _installed(name)]
        if missing:
            yield Check("extra", extra, "missing", f"pip install '{DISTRIBUTION}[{extra}]'")
        else:
            yield Check("extra", extra, "ok", f"installed ({', '.join(packages)})")


def _extras() -> dict[str, list[str]]:
    """Extra to its packages, as the installed metadata says; those for developers left out."""
    found: dict[str, list[str]] = {}
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return found
    for requirement in requirements:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        if name and extra and extra[1] not in ("dev", "all"):
            found.setdefault(extra[1], []).append(name[0])
    return found


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# gc


def _settle(database: Path) -> None:
    """Open the store of a killed run once for writing, so that it writes down what it finds half done."""
    from agentgym.store import Store

    if database.is_file():
        Store.open(database).close()


# list


def _envs() -> Mapping[str, str]:
    from agentgym import registry

    return {env_id: str(registry.spec(env_id).entry_point) for env_id in registry.list_envs()}


def _tasks() -> Mapping[str, str]:
    from agentgym.task import task_families

    return task_families()


def _policies() -> Mapping[str, str]:
    from agentgym.policies import policy_names

    return policy_names()


def _choosers() -> Mapping[str, str]:
    from agentgym.branching import CHOOSERS

    return {name: (make.__doc__ or "").split("\n")[0] for name, make in CHOOSERS.items()}


def _backends() -> Mapping[str, str]:
    notes = {_DEFAULT_BACKEND: "the default; `agentgym doctor` tries it", "local": "weak isolation, only by name"}
    notes["docker"] = "containers of a Docker daemon; slow forks, for tasks with their own image"
    return {name: notes.get(name, "") for name in backend_names()}


def _benches() -> Mapping[str, str]:
    from agentgym.bench import BENCHES

    return dict(BENCHES)


def _runs() -> Mapping[str, str]:
    return {run.id: run.status for run in list_runs()}


def _codecs() -> Mapping[str, str]:
    from agentgym.parsing import CODECS

    return {name: (codec.__doc__ or "").split("\n")[0] for name, codec in CODECS.items()}


def _settings() -> Mapping[str, str]:
    from agentgym.config import settings

    return {key: f"{kind}, {default!r} by default: {meaning}" for key, kind, default, meaning in settings()}


KINDS: dict[str, Callable[[], Mapping[str, str]]] = {
    "envs": _envs,
    "tasks": _tasks,
    "policies": _policies,
    "choosers": _choosers,
    "backends": _backends,
    "benches": _benches,
    "codecs": _codecs,
    "runs": _runs,
    "settings": _settings,
}


# bench


def bench_names(names: Sequence[str]) -> list[str]:
    """The benches that are meant; "all" means every one.

    Raises:
        UnknownName: there is no such bench.
    """
    from agentgym.bench import BENCHES

    for name in names:
        if name not in BENCHES and name != "all":
            raise UnknownName.of("bench", name, [*BENCHES, "all"], "`agentgym list benches` lists them")
    return list(BENCHES) if "all" in names else list(dict.fromkeys(names))


def run_benches(names: Sequence[str], screen: Screen) -> Iterator[BenchRow]:
    """Run benches one after the other, each row printed as soon as it is there."""
    from agentgym.bench import run_bench

    for name in names:
        for row in run_bench(name):
            screen.row(row.to_json())
            screen.say(_bench_line(row))
            yield row


def _bench_line(row: BenchRow) -> str:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    verdict = "ok" if row.ok else "MISSED" if row.missed else "short"
    ideal = "" if row.achieved_over_ideal is None else f", achieved/ideal {row.achieved_over_ideal:.3f}"
    against = (
        f" against {number(row.baseline)} ({row.baseline_name}): {number(row.ratio)}x" if row.baseline_name else ""
    )
    spread = f", p50 {number(row.p50)}, p99 {number(row.p99)}" if row.p50 is not None else ""
    target = f" [{row.target}]" if row.target else ""
    slow = " (the machine was throttled)" if row.throttled else ""
    return f"{verdict:6} {row.bench}/{row.case}: {number(row.ours)} {row.unit}{against}{ideal}{spread}, n {row.n}{target}{slow}"
