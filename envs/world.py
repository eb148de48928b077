"""How a task's `setup` becomes the world that a shell starts in.

Owns the keys of `setup` and the packaged fixtures. Leaves making the world to the sandbox backend.

Keys of a task's `setup`, all optional:

    fixture     a packaged file tree, "nl2sh/fs1"; brings its own files, workdir and env
    files       [{path, type: file | dir | link, text | base64 | fill: {byte, size} | target, mode: "0644", mtime}]
    workdir     where the shell starts and relative paths begin; "/workspace"
    env         variables of the shell
    programs    {program: package that has it}; checked before the episode starts
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any

from agentgym.errors import TaskError
from agentgym.sandbox import Change, FileSpec, SandboxSpec
from agentgym.task import Task

MAX_FILE_BYTES = 1 << 26
"""Of one file of a task, so that a misspelt `fill` cannot eat the memory."""


def world_of(task: Task, *, seed: int = 0) -> SandboxSpec:
    """The sandbox a task starts in; equal fixtures give equal files, and so share one starting layer.

    Raises:
        TaskError: names the task and the key of `setup` that is wrong.
    """
    setup = task.setup
    unknown = sorted(set(setup) - {"fixture", "files", "workdir", "env", "programs"})
    if unknown:
        raise TaskError(
            f"task {task.id!r}: setup key {unknown[0]!r} is unknown; keys: fixture, files, workdir, env, programs"
        )
    try:
        base = _fixture(setup["fixture"]) if "fixture" in setup else SandboxSpec()
        entries = tuple(_file(entry) for entry in setup.get("files", ()))
        env = {**dict(base.env), **{str(k): str(v) for k, v in setup.get("env", {}).items()}}
        workdir = str(setup.get("workdir", base.workdir))
    except (TaskError, TypeError, AttributeError) as error:
        raise TaskError(f"task {task.id!r}: setup is wrong: {error}") from error
    if not workdir.startswith("/"):
        raise TaskError(f"task {task.id!r}: setup workdir {workdir!r} must begin with '/'")
    return SandboxSpec((*base.files, *entries), workdir, tuple(sorted(env.items())), seed)


def starting_world(task: Task) -> dict[str, Change]:
    """What a task's world has when it starts, path by path."""
    spec = world_of(task)
    return {str(PurePosixPath(spec.workdir, file.path)): _as_change(file) for file in spec.files}


def _as_change(file: FileSpec) -> Change:
    if file.kind == "link":
        return Change("link", target=file.data.decode())
    if file.kind == "dir":
        return Change("dir", file.mode)
    return Change("file", file.mode, len(file.data), hashlib.sha256(file.data).hexdigest())


@lru_cache(maxsize=64)
def _fixture(name: str) -> SandboxSpec:
    family, _, part = str(name).partition("/")
    source = files("agentgym.tasks").joinpath("terminal", f"{family}_fixtures.json")
    fixtures = json.loads(source.read_text("utf-8")) if source.is_file() else {}
    if part not in fixtures:
        known = ", ".join(f"{family}/{k}" for k in fixtures) or "nl2sh/fs1 and others of nl2sh"
        raise TaskError(f"fixture {name!r} is unknown; there are {known}")
    raw = fixtures[part]
    return SandboxSpec(tuple(_file(e) for e in raw["files"]), raw["workdir"], tuple(sorted(raw["env"].items())))


_FILE_KEYS = {"path", "type", "mode", "mtime", "text", "base64", "fill", "target"}


def _file(raw: Any) -> FileSpec:
    if not isinstance(raw, Mapping) or not isinstance(raw.get("path"), str):
        raise TaskError(f"a file must be a table with a path, got {str(raw)[:80]}")
    path, kind = raw["path"], raw.get("type", "file")
    unknown = sorted(set(raw) - _FILE_KEYS)
    if unknown:
        raise TaskError(f"file {path!r} has the unknown key {unknown[0]!r}; keys: {', '.join(sorted(_FILE_KEYS))}")
    try:
        mode = int(str(raw.get("mode", "0755" if kind == "dir" else "0644")), 8)
        mtime = None if raw.get("mtime") is None else int(raw["mtime"])
        data = _content(raw)
    except (ValueError, TypeError, KeyError, binascii.Error) as error:
        raise TaskError(f"file {path!r} is wrong: {error}; mode is octal text such as '0644'") from error
    return FileSpec(path, kind, data, mode, mtime)


def _content(raw: Mapping[str, Any]) -> bytes:
    if raw.get("type") == "link":
        return str(raw["target"]).encode()
    if "fill" in raw:
        size = int(raw["fill"]["size"])
        if not 0 <= size <= MAX_FILE_BYTES:
            raise ValueError(f"fill size {size} is outside 0 to {MAX_FILE_BYTES}")
        return bytes([int(raw["fill"]["byte"])]) * size
    if "base64" in raw:
        return base64.b64decode(raw["base64"], validate=True)
    return str(raw.get("text", "")).encode()


def path_outside(spec: SandboxSpec) -> str | None:
    """The first path of a spec that does not lie in its working directory, or a working directory that is no own one."""
    if spec.workdir == "/":
        return "/"
    home = PurePosixPath(spec.workdir)
    return next((f.path for f in spec.files if not PurePosixPath(home, f.path).is_relative_to(home)), None)
