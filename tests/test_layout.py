"""The rooms, their map and links, the budgets of files and functions, and what an import costs."""

from __future__ import annotations

import ast
import fnmatch
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentgym

ROOMS = ("envs", "sandboxes", "trainers", "tasks")
TOP_FILES = {"CHANGELOG.md", "LICENSE", "Makefile", "README.md", "compose.yaml", "pyproject.toml"}
TOP_FOLDERS = {"agentgym", "docs", "tests", *ROOMS}
HEAVY = ("docker", "playwright", "ray", "torch", "transformers", "vllm")
MAX_IMPORT_S = 0.5
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80


@pytest.fixture(scope="module")
def setuptools_config(checkout: Path) -> dict[str, Any]:
    config: dict[str, Any] = tomllib.loads((checkout / "pyproject.toml").read_text())["tool"]["setuptools"]
    return config


def sources(checkout: Path) -> Iterator[Path]:
    """Our modules; the links are not followed, and what lies below a family in tasks/ is data."""
    for room in ("agentgym", *ROOMS):
        yield from sorted((checkout / room).glob("*.py"))


def test_map_packages_and_folders_agree(checkout: Path, setuptools_config: dict[str, Any]) -> None:
    assert setuptools_config["package-dir"] == {f"agentgym.{room}": room for room in ROOMS}
    assert setuptools_config["packages"] == ["agentgym", *(f"agentgym.{room}" for room in ROOMS)]
    assert all((checkout / room / "__init__.py").is_file() for room in ("agentgym", *ROOMS))


@pytest.mark.parametrize("room", ROOMS)
def test_the_link_leads_to_the_room(checkout: Path, room: str) -> None:
    link = checkout / "agentgym" / room
    # a checkout without symbolic links holds their targets as text
    assert (os.readlink(link) if link.is_symlink() else link.read_text().strip()) == f"../{room}"


@pytest.mark.parametrize("room", ROOMS)
def test_what_is_imported_is_what_is_in_the_room(checkout: Path, room: str) -> None:
    spec = importlib.util.find_spec(f"agentgym.{room}")
    assert spec is not None and spec.origin is not None
    imported = {path.name for path in Path(spec.origin).parent.glob("*.py")}
    assert imported == {path.name for path in (checkout / room).glob("*.py")}


@pytest.mark.parametrize("room", ["agentgym", "envs", "sandboxes", "trainers"])
def test_rooms_are_flat(checkout: Path, room: str) -> None:
    folders = {path.name for path in (checkout / room).iterdir() if path.is_dir() and not path.is_symlink()}
    assert folders <= {"__pycache__"}


def test_task_families_are_data_and_no_packages(checkout: Path) -> None:
    assert list((checkout / "tasks").glob("*/**/__init__.py")) == []


def test_nothing_else_lies_at_the_top(checkout: Path) -> None:
    ignored = [line.strip("/") for line in (checkout / ".gitignore").read_text().splitlines()]
    names = {path.name for path in checkout.iterdir() if not path.name.startswith(".")}
    extra = names - TOP_FILES - TOP_FOLDERS
    assert {name for name in extra if not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)} == set()


def test_files_are_short(checkout: Path) -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in sources(checkout)}
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_functions_are_short(checkout: Path) -> None:
    assert [
        long for path in sources(checkout) for long in long_functions(path.read_text(), path.name, MAX_FUNCTION_LINES)
    ] == []


def test_a_long_function_would_be_found() -> None:
    source = "class C:\n    async def f(self):\n" + "        pass\n" * MAX_FUNCTION_LINES
    assert long_functions(source, "m.py", MAX_FUNCTION_LINES) == ["m.py:2 f has 81 lines"]
    assert long_functions(source, "m.py", MAX_FUNCTION_LINES + 1) == []


def long_functions(source: str, name: str, limit: int) -> list[str]:
    """Which functions are longer than `limit` lines, from `def` to their last line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > limit:
                found.append(f"{name}:{node.lineno} {node.name} has {lines} lines")
    return found


def test_import_is_quick_and_light() -> None:
    # process_time counts work, not waiting; the least of three leaves out a cold disk
    code = (
        "import json, sys, time; t = time.process_time(); import agentgym; "
        f"print(json.dumps([time.process_time() - t, [m for m in {HEAVY!r} if m in sys.modules]]))"
    )
    where = Path(agentgym.__file__).parents[1]  # the copy under test, installed or not
    runs = [
        json.loads(subprocess.run([sys.executable, "-c", code], cwd=where, check=True, capture_output=True).stdout)
        for _ in range(3)
    ]
    assert [heavy for _, heavy in runs] == [[], [], []]
    assert min(cpu_s for cpu_s, _ in runs) < MAX_IMPORT_S
