from __future__ import annotations

import hashlib
from typing import Any

import pytest

from agentgym.envs.world import path_outside, starting_world, world_of
from agentgym.errors import TaskError
from agentgym.sandbox import Change, FileSpec, SandboxSpec
from agentgym.task import Task, load_tasks


def _task(setup: dict[str, Any]) -> Task:
    return Task("t", "agentgym/Terminal-v0", "do it", setup=setup)


def test_setup_becomes_a_sandbox_spec() -> None:
    entries = [
        {"path": "a", "text": "hé"},
        {"path": "/b", "base64": "AAE=", "mode": "0600", "mtime": 5},
        {"path": "z", "fill": {"byte": 7, "size": 3}},
        {"path": "d", "type": "dir"},
        {"path": "l", "type": "link", "target": "a"},
    ]
    spec = world_of(_task({"files": entries, "workdir": "/w", "env": {"N": 1}}), seed=9)
    assert spec.files == (
        FileSpec("a", "file", "hé".encode()),
        FileSpec("/b", "file", b"\0\1", 0o600, 5),
        FileSpec("z", "file", b"\7\7\7"),
        FileSpec("d", "dir", mode=0o755),
        FileSpec("l", "link", b"a"),
    )
    assert (spec.workdir, spec.env, spec.seed) == ("/w", (("N", "1"),), 9)
    start = starting_world(_task({"files": entries, "workdir": "/w"}))
    assert start["/w/a"] == Change("file", 0o644, 3, hashlib.sha256("hé".encode()).hexdigest())
    assert start["/w/d"] == Change("dir", 0o755)
    assert start["/w/l"] == Change("link", target="a")
    assert start["/b"].mode == 0o600


def test_equal_fixtures_share_a_starting_layer() -> None:
    tasks = load_tasks("nl2sh")
    keys = {(task.setup["fixture"], world_of(task, seed=seed).key()) for seed in (0, 1) for task in tasks}
    assert len(keys) == len({fixture for fixture, _ in keys}) == 4


@pytest.mark.parametrize(
    ("setup", "word"),
    [
        ({"file": []}, "setup key 'file' is unknown"),
        ({"fixture": "nl2sh/fs9"}, "fixture 'nl2sh/fs9' is unknown; there are nl2sh/fs1"),
        ({"fixture": "../x/y"}, "fixture '../x/y' is unknown"),
        ({"workdir": "w"}, "workdir 'w' must begin with '/'"),
        ({"files": ["a"]}, "a file must be a table with a path"),
        ({"files": [{"path": "a", "txt": "x"}]}, "file 'a' has the unknown key 'txt'"),
        ({"files": [{"path": "a", "mode": "rw"}]}, "file 'a' is wrong"),
        ({"files": [{"path": "a", "base64": "!"}]}, "file 'a' is wrong"),
        ({"files": [{"path": "a", "type": "link"}]}, "file 'a' is wrong: 'target'"),
        ({"files": [{"path": "a", "type": "fifo"}]}, "kind 'fifo'"),
        ({"files": [{"path": "../a"}]}, "'../a'"),
        ({"files": [{"path": "a", "fill": {"byte": 0, "size": 1 << 40}}]}, "fill size"),
        ({"files": 3}, "setup is wrong"),
        ({"env": []}, "setup is wrong"),
    ],
)
def test_broken_setup_names_task_and_key(setup: dict[str, Any], word: str) -> None:
    with pytest.raises(TaskError, match="task 't'") as caught:
        world_of(_task(setup))
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("path", "workdir", "outside"),
    [("a/b", "/w", None), ("/w/a", "/w", None), ("/wx", "/w", "/wx"), ("/etc/a", "/w", "/etc/a"), ("a", "/", "/")],
)
def test_paths_outside_the_working_directory_are_found(path: str, workdir: str, outside: str | None) -> None:
    assert path_outside(SandboxSpec((FileSpec(path),), workdir)) == outside
