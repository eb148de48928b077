"""What several test modules share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from agentgym import cli

# a slow machine is no failure, and a run that failed must fail again
settings.register_profile("agentgym", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("agentgym")


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The folder with README.md and pyproject.toml."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def workplace(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, sandboxes apart from those of others, and no settings from outside."""
    monkeypatch.setenv("AGENTGYM_STATE", str(tmp_path_factory.mktemp("state")))
    for name in [name for name in os.environ if name.startswith("AGENTGYM_") and "__" in name]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def agentgym(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, list[dict[str, Any]], str]]:
    """Run a command here: exit code, JSON objects (the text as one where there are none), standard error."""

    def run(*arguments: str) -> tuple[int, list[dict[str, Any]], str]:
        code = cli.main(arguments)
        out, err = capsys.readouterr()
        rows = [json.loads(line) for line in out.splitlines()] if "--json" in arguments else [{"text": out}]
        return code, rows, err

    return run
