"""What the README shows runs, and names commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentgym import cli
from agentgym.testing import check_env, check_fork


def blocks(checkout: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (checkout / "README.md").read_text("utf-8"), re.DOTALL)


@pytest.mark.sandbox
def test_the_quick_start_runs(checkout: Path, workplace: Path) -> None:
    exec(blocks(checkout, "python")[0], {})


def test_the_example_environment_passes_the_checks_for_authors(checkout: Path) -> None:
    names: dict[str, object] = {"__name__": "readme"}
    exec(blocks(checkout, "python")[1], names)
    task = names["Task"]("guess", "my_ns/Guess-v0", "Guess.")  # type: ignore[operator]
    make = lambda **options: names["GuessEnv"]([task], **options)  # type: ignore[operator]  # noqa: E731
    actions = ["guess 1", "guess 9", "guess 2"]
    assert check_env(make, task=task).checks
    assert check_fork(make, task=task, actions=actions).checks


def test_every_command_of_the_readme_exists(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = set(re.findall(r"^\| `agentgym (\w+)", (checkout / "README.md").read_text("utf-8"), re.MULTILINE))
    cli.main(["--help"])
    offered = set(re.findall(r"^  ([a-z]+) ", capsys.readouterr().out, re.MULTILINE))
    assert named <= offered and offered - named == {"tasks"}
