"""The executable that is every sandbox's first process."""

from __future__ import annotations

import os
import platform
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest

from agentgym.sandboxes import first


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_it_is_a_whole_executable(machine: str) -> None:
    raw = first.program(machine)
    kind, number, _, entry, heads = struct.unpack_from("HHIQQ", raw, 16)
    _, flags, offset, base, _, size, in_memory, _ = struct.unpack_from("IIQQQQQQ", raw, heads)
    assert raw[:4] == b"\x7fELF" and kind == 2 and number == {"x86_64": 62, "aarch64": 183}[machine]
    assert (flags, offset, size, in_memory) == (5, 0, len(raw), len(raw)) and len(raw) < 300
    assert base < entry < base + size and (entry - base) % 8 == 0
    assert raw.endswith(struct.pack("QQQQ", 1, 0, 0, 0)), "SIG_IGN and nothing else"


def test_an_unknown_machine_is_named() -> None:
    with pytest.raises(OSError, match=r"sparc.*x86_64"):
        first.program("sparc")


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="not tabled")
def test_it_waits_ignores_the_dead_and_ends_with_its_input(tmp_path: Path) -> None:
    path = tmp_path / "init"
    first.place(str(path))
    with subprocess.Popen([str(path)], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"not yet")
        process.stdin.flush()
        status = Path(f"/proc/{process.pid}/status")
        deadline = time.monotonic() + 10
        while not _ignored(status) & 1 << signal.SIGCHLD - 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert _ignored(status) & 1 << signal.SIGCHLD - 1
        assert os.listdir(f"/proc/{process.pid}/task") == [str(process.pid)] and process.poll() is None
        process.stdin.close()
        assert process.wait(10) == 0


def _ignored(status: Path) -> int:
    [mask] = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigIgn")]
    return int(mask, 16)
