from __future__ import annotations

from pathlib import Path

import pytest

from agentgym.sandboxes import criu

_OLD = "Error (criu/vdso.c:381): vdso: Unexpected rt vDSO area bounds"


def _install(folder: Path, version: str, check: str) -> str:
    program = folder / "criu"
    program.write_text(f'#!/bin/sh\ncase $1 in --version) echo "Version: {version}";; check) {check};; esac\n')
    program.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("version", "check", "works", "parts"),
    [
        ("4.2", "echo Looks good.", True, ["version 4.2: its check passes", "no backend dumps with it"]),
        ("3.17.1", f"echo '{_OLD}'; exit 1", False, ["too old for Linux", "version 4.2 or newer", "vDSO"]),
        ("4.3", "echo 'Error: no rights' >&2; exit 1", False, ["`criu check` says", "no rights"]),
        ("4.3", "exit 7", False, ["(exit 7)"]),
    ],
)
def test_says_what_the_installed_one_is(
    tmp_path: Path, version: str, check: str, works: bool, parts: list[str]
) -> None:
    found = criu.probe(_install(tmp_path, version, check))
    assert (found.works, found.version) == (works, tuple(map(int, version.split("."))))
    assert all(part in found.detail for part in parts), found.detail


def test_absent_or_broken(tmp_path: Path) -> None:
    assert criu.probe(str(tmp_path)) == criu.Criu(False, (), f"not installed; {criu._COST}")
    (tmp_path / "criu").write_text("#!/nonexistent\n")
    (tmp_path / "criu").chmod(0o755)
    assert "does not answer" in criu.probe(str(tmp_path)).detail
