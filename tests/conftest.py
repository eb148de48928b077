"""What several test modules share."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from agentgym import cli
from agentgym.errors import BackendUnavailable
from agentgym.sandbox import close_backends

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


@pytest.fixture(scope="session")
def docker_daemon() -> Iterator[None]:
    """A Docker daemon: the one that answers, else one of our own, started by hand where that is possible."""
    from agentgym.sandboxes.docker_daemon import Daemon

    try:
        Daemon().close()
        yield
        return
    except BackendUnavailable as refused:
        if "pip install" in str(refused) or os.environ.get("DOCKER_HOST"):
            pytest.skip(str(refused))
        if os.getuid() or not shutil.which("dockerd", path=f"{os.environ.get('PATH')}:/usr/sbin:/sbin"):
            pytest.skip(f"{refused}; and starting one takes root and dockerd")
    # short: the path of a socket may have 107 bytes
    folder = tempfile.mkdtemp(prefix="dockerd-", dir="/var/tmp")
    process = subprocess.Popen([str(Path(__file__).parent / "dockerd.sh"), folder], stdin=subprocess.DEVNULL)
    os.environ["DOCKER_HOST"] = f"unix://{folder}/sock"
    try:
        if not _comes_up(process, Daemon):
            pytest.skip(f"dockerd does not start here: {Path(folder, 'log').read_text().splitlines()[-1:]}")
        yield
    finally:
        close_backends()
        del os.environ["DOCKER_HOST"]
        process.terminate()
        process.wait(60)
        shutil.rmtree(folder)


def _comes_up(process: subprocess.Popen[bytes], connect: Callable[[], Any]) -> bool:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            connect().close()
            return True
        except BackendUnavailable:
            time.sleep(0.2)
    return False
