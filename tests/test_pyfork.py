from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentgym.errors import BackendUnavailable, SnapshotError
from agentgym.sandboxes import landlock, processes
from agentgym.sandboxes.bench_pyfork import ENV, Unwalled
from agentgym.sandboxes.interpreter import GRACE_S
from agentgym.sandboxes.pyfork import PythonTool
from agentgym.types import Level

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(os.getuid() != 0, reason="changing the root takes root's rights"),
    pytest.mark.skipif(not os.path.exists("/usr/bin/python3"), reason="no /usr/bin/python3"),
]
MARK = "AGENTGYM_TEST_PYFORK"
Make = Callable[..., PythonTool]


def _marked(mark: str) -> list[int]:
    """Processes, this one left out, that inherited a variable; zombies have none."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                environment = Path("/proc", name, "environ").read_bytes()
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in environment.split(b"\0"):
                found.append(int(name))
    return found


def _until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@pytest.fixture
def mark(tmp_path: Path) -> str:
    return tmp_path.name


@pytest.fixture
def host(tmp_path: Path, mark: str) -> Iterator[Unwalled]:
    """Box 1 on this machine's root, boxes 2 and 3 on folders of their own; afterwards nothing may be left."""
    for name in ("two", "three"):
        (tmp_path / name / "work").mkdir(parents=True)
    made = Unwalled({1: "/", 2: str(tmp_path / "two"), 3: str(tmp_path / "three")})
    yield made
    assert made.started is None, "a place is given up with the last process"
    assert _until(lambda: not _marked(mark)), f"left alive: {[processes.command(pid) for pid in _marked(mark)]}"


@pytest.fixture
def make(host: Unwalled, tmp_path: Path, mark: str) -> Iterator[Make]:
    made: list[PythonTool] = []

    def tool(**options: str) -> PythonTool:
        made.append(PythonTool(host, 1, env={**ENV, MARK: mark}, workdir=str(tmp_path), **options))
        return made[-1]

    yield tool
    for one in made:
        one.close()


def _in_box(tool: PythonTool, box: int) -> PythonTool:
    """A branch in a box where nothing could start: it holds no program."""
    tool.run("pass")
    with tool.freeze() as frozen:
        return frozen.fork(box)


def test_runs_code_as_a_notebook_does(make: Make) -> None:
    tool = make()
    result = tool.run("x = 20\nprint('printed')\nx + 22")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "printed\n42\n", "")
    assert tool.run("y = x; None").stdout == ""
    assert tool.run("_ , y, __name__").stdout == "(42, 20, '__main__')\n"
    assert tool.run("import os; os.system('echo from a program')").stdout == "from a program\n0\n"
    assert tool.run("from typing import get_type_hints as h\nclass A: b: int\nh(A), A.__annotations__").stdout == (
        "({'b': <class 'int'>}, {'b': <class 'int'>})\n"
    ), "nothing that the server imports from __future__ reaches the code"
    assert tool.run("import pickle; pickle.loads(pickle.dumps(A())).__class__ is A").stdout == "True\n"
    assert tool.run("import os; os.open('/dev/null', 0)").stdout == "3\n", "descriptors begin where they always do"
    assert tool.run("[k for k in os.environ if 'MALLOC' in k or 'TUNABLES' in k]").stdout == "[]\n"


def test_an_error_is_a_traceback_and_the_interpreter_goes_on(make: Make) -> None:
    tool = make()
    failed = tool.run("x = 1\ndef f():\n    return 1 / 0\nf()")
    assert failed.exit_code == 1
    assert failed.stderr.startswith(
        'Traceback (most recent call last):\n  File "<cell 1>", line 4, in <module>\n    f()\n'
    )
    assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "pyserver" not in failed.stderr
    assert tool.run("(").stderr.startswith('  File "<cell 2>", line 1\n    (\n')
    assert "SystemExit: 3" in tool.run("raise SystemExit(3)").stderr
    assert tool.run("a\0b").exit_code == 1
    assert tool.run("'\ud800'").stderr == "the code is not valid Unicode at character 1"
    assert "RecursionError" in tool.run("def g(): g()\ng()").stderr
    assert tool.run("print('\\udc80'); x").stdout == "\\udc80\n1\n"
    assert tool.run("import sys; out, sys.stdout = sys.stdout, None; 1/0").exit_code == 1
    tool.run("sys.stdout = out")
    assert tool.run("x == 1 or 1/0").exit_code == 0


def test_output_is_cut_in_the_middle(make: Make) -> None:
    result = make().run("print('a' * 500_000 + 'z' * 500_000)", max_output_bytes=1000)
    assert result.truncated and result.stdout_bytes == 1_000_001
    assert result.stdout.startswith("a" * 500 + "\n[... ") and result.stdout.endswith("z" * 499 + "\n")


def test_code_that_forks_leaves_one_interpreter(make: Make, mark: str) -> None:
    tool = make()
    tool.run("import os\nif os.fork() == 0:\n    print('child')\nelse:\n    os.wait()")
    assert tool.run("'still one'").stdout == "'still one'\n"
    assert len(_marked(mark)) == 2, "the empty interpreter and the live one"


def test_the_deadline_interrupts_and_keeps_variables(make: Make) -> None:
    tool = make()
    tool.run("x = 'kept'")
    result = tool.run("import time\nwhile True: time.sleep(0.01)", timeout_s=0.2)
    assert (result.exit_code, result.timed_out, result.shell_restarted) == (1, True, False)
    assert result.stderr.endswith("KeyboardInterrupt\n") and "in interrupt" not in result.stderr
    assert tool.run("x").stdout == "'kept'\n"


def test_code_that_will_not_end_is_ended_with_all_it_started(make: Make, mark: str) -> None:
    tool = make()
    tool.run("x = 1")
    daemon = "import os, subprocess\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: os.execvp('sleep', ['sleep', '1000'])\n    os._exit(0)\n"
    deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"
    code = f"{daemon}subprocess.Popen(['sleep', '1000'])\n{deaf}"
    result = tool.run(code, timeout_s=0.3)
    assert (result.exit_code, result.timed_out, result.shell_restarted) == (None, True, True)
    assert 0.3 + GRACE_S <= result.duration_s
    assert len(_marked(mark)) == 1, "only the empty interpreter is left"
    assert "NameError" in tool.run("x").stderr


def test_an_interpreter_that_ends_itself_is_started_anew_and_leaves_nothing(make: Make, mark: str) -> None:
    tool = make()
    result = tool.run(
        "import os, subprocess; print('before', flush=True); subprocess.Popen(['sleep', '1000']); os._exit(0)"
    )
    assert (result.exit_code, result.stdout, result.killed, result.shell_restarted) == (None, "before\n", True, True)
    assert len(_marked(mark)) == 1
    assert tool.run("1").stdout == "1\n"
    assert tool.run("import os; os.write(100, b'[' * 100_000); os.write(100, b'{')").killed, "nonsense for an answer"
    assert tool.run("1").stdout == "1\n"


def test_an_interpreter_that_died_between_two_turns_is_named(make: Make) -> None:
    tool = make()
    tool.run("x = 1; import os, threading; threading.Timer(0.05, os._exit, (0,)).start()")
    time.sleep(0.3)
    with tool.freeze() as frozen:
        assert frozen.losses == ("variables of an interpreter that had ended",)
        child = frozen.fork(1)
    assert "NameError" in child.run("x").stderr
    child.close()


def test_branches_have_the_variables_and_are_independent(make: Make) -> None:
    tool = make()
    tool.run("x = [1]; import random; random.seed(7)")
    with tool.freeze() as frozen:
        assert (frozen.level, frozen.losses) == (Level.PROCESS, ())
        tool.run("x.append('parent')")
        left, right = frozen.fork(1), frozen.fork(1)
        left.run("x.append('left')")
        right.run("x.append('right')")
        assert [t.run("x").stdout for t in (tool, left, right)] == [
            "[1, 'parent']\n",
            "[1, 'left']\n",
            "[1, 'right']\n",
        ]
        drawn = [t.run("random.random()").stdout for t in (left, right, tool)]
        assert len(set(drawn)) == 1, "the random state is a part of the state"
        seeded = [frozen.fork(1, seed=seed) for seed in (1, 1, 2)]
        first, again, other = (t.run("random.random(), x").stdout for t in seeded)
        assert first == again != other and first.endswith("[1])\n"), "a snapshot does not change"
        for one in (left, right, *seeded):
            one.close()
    with pytest.raises(SnapshotError, match="was released"):
        frozen.fork(1)


def test_a_snapshot_outlives_its_tool_and_branches_their_snapshot(make: Make, mark: str) -> None:
    tool = make()
    tool.run("x = 1")
    frozen = tool.freeze()
    tool.close()
    child = frozen.fork(1)
    frozen.release()
    frozen.release()
    child.run("x += 1")
    with child.freeze() as again:
        grandchild = again.fork(1)
    child.close()
    assert grandchild.run("x").stdout == "2\n"
    assert grandchild.run("import os; os._exit(1)").killed
    assert "NameError" in grandchild.run("x").stderr
    grandchild.close()
    assert _until(lambda: not _marked(mark))


def test_a_tool_that_ran_nothing_forks_into_one_that_ran_nothing(make: Make, mark: str) -> None:
    with make().freeze() as frozen:
        child = frozen.fork(1)
    assert _marked(mark) == []
    assert child.run("1").stdout == "1\n"
    child.close()


def test_open_files_come_along_each_with_an_offset_of_its_own(make: Make, host: Unwalled, tmp_path: Path) -> None:
    for box in ("two", "three"):
        (tmp_path / box / "work" / "log").write_text("0123456789")
    two = _in_box(make(), 2)
    two.run("import os; os.chdir('/work'); f = open('log', 'r+'); f.read(4); g = open('log', 'a')")
    with two.freeze() as frozen:
        assert frozen.losses == ()
        two.run("f.seek(9); f.close(); g.write('two'); g.close()")
        three = frozen.fork(3)
        assert three.lost == ()
    assert three.run("os.getcwd(), f.read(2), f.read()").stdout == "('/work', '45', '6789')\n"
    three.run("g.write('three'); g.flush()")
    assert (tmp_path / "two/work/log").read_text() == "0123456789two"
    assert (tmp_path / "three/work/log").read_text() == "0123456789three"
    two.close()
    three.close()


def test_what_does_not_come_along_is_named(make: Make) -> None:
    tool = make()
    tool.run(
        "import mmap, os, socket, subprocess, threading, time\n"
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True, name='ticker').start()\n"
        "sleeper = subprocess.Popen(['sleep', '1000'])\n"
        "r, w = os.pipe()\ns = socket.socket()\nm = mmap.mmap(-1, 4096)\ngone = open('gone', 'w')\nos.unlink('gone')\n"
        "os.dup2(gone.fileno(), 2)"
    )
    with tool.freeze() as frozen:
        told = "\n".join(frozen.losses)
        child = frozen.fork(1)
    for part in (
        "thread ticker",
        "(sleep 1000)",
        "open file 3 (pipe:[",
        "(socket:[",
        "gone (deleted))",
        "shared memory",
    ):
        assert part in told, told
    assert "output 2 sent to " in told
    assert len(child.lost) == 4
    assert "OSError" in child.run("os.write(w, b'x')").stderr, "dead, and its number is not given to another"
    assert child.run("threading.active_count()").stdout == "1\n"
    assert tool.run("sleeper.poll() is None").stdout == "True\n"
    child.close()


def test_a_branch_lives_in_its_own_root_or_is_refused(make: Make, tmp_path: Path) -> None:
    (tmp_path / "two" / "note").write_text("of two")
    tool = make()
    tool.run("import os")
    with tool.freeze() as frozen:
        child = frozen.fork(2)
    assert child.run("sorted(os.listdir('/')), open('/note').read()").stdout == "(['note', 'work'], 'of two')\n"
    assert child.lost == (-1,), "its directory is not there"
    child.close()
    tool.run("os.chroot = lambda path: None")
    with tool.freeze() as frozen, pytest.raises(SnapshotError, match="did not move"):
        frozen.fork(2)


def test_follows_a_root_that_was_exchanged(make: Make, host: Unwalled, tmp_path: Path) -> None:
    for box in ("two", "three"):
        (tmp_path / box / "work" / "log").write_text("line\n")
    tool = _in_box(make(), 2)
    tool.run("import os; os.chdir('/work'); log = open('log', 'a'); x = 1")
    host.roots[2] = host.roots[3]
    tool.follow()
    assert tool.run("print('new', file=log, flush=True); os.getcwd(), x").stdout == "('/work', 1)\n"
    assert (tmp_path / "two/work/log").read_text() == "line\n", "the old root is sealed"
    assert (tmp_path / "three/work/log").read_text() == "line\nnew\n"
    tool.close()


def test_siblings_cannot_signal_each_other(make: Make) -> None:
    if landlock.abi() < landlock.SCOPE_ABI:
        pytest.skip("no Landlock with ABI 6")
    tool = make()
    tool.run("import os")
    with tool.freeze() as frozen:
        left, right = frozen.fork(1), frozen.fork(1)
    pid = int(left.run("os.getpid()").stdout)
    assert "PermissionError" in right.run(f"os.kill({pid}, 9)").stderr
    assert "PermissionError" in right.run("os.kill(os.getppid(), 9)").stderr, "what it was frozen as neither"
    assert "PermissionError" in right.run(f"os.listdir('/proc/{pid}/root/')").stderr
    assert left.run("'alive'").stdout == "'alive'\n"
    left.close()
    right.close()


def test_a_frozen_copy_that_was_killed_is_reported(make: Make) -> None:
    tool = make()
    tool.run("import os, signal")
    with tool.freeze() as frozen:
        below = "open(f'/proc/self/task/{os.getpid()}/children').read().split()"
        tool.run(f"[os.kill(int(pid), signal.SIGKILL) for pid in {below}]")
        with pytest.raises(SnapshotError, match="cannot be forked"):
            frozen.fork(1)


def test_a_pause_keeps_what_it_started_from_writing(make: Make, tmp_path: Path) -> None:
    tool = make()
    tool.run("import subprocess; subprocess.Popen('while :; do echo x >> out; done', shell=True)")
    log = tmp_path / "out"
    assert _until(log.exists)
    with tool.paused():
        size = log.stat().st_size
        time.sleep(0.05)
        assert log.stat().st_size == size
    assert _until(lambda: log.stat().st_size > size)
    assert tool.run("1").stdout == "1\n"


def test_a_long_chain_of_snapshots_keeps_few_processes(make: Make, mark: str) -> None:
    tool = make()
    tool.run("x = 0")
    for _ in range(20):
        with tool.freeze() as frozen:
            child = frozen.fork(1)
        tool.close()
        child.run("x += 1")
        tool = child
    assert tool.run("x").stdout == "20\n"
    assert len(_marked(mark)) <= 3
    tool.close()


def test_no_python_is_said_plainly(make: Make) -> None:
    with pytest.raises(BackendUnavailable, match=r"no live Python in the sandbox.*python3"):
        make(python="/nonexistent").run("1")
    with pytest.raises(BackendUnavailable, match="needs /bin/false of version"):
        make(python="/bin/false").run("1")


def test_a_look_from_outside() -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(read, 1)
        os._exit(0)
    pidfd = os.pidfd_open(pid)
    look = processes.Look.at(os.getpid())
    assert pid in look.children and look.cwd == os.getcwd()
    assert next(file for file in look.files if file.number == read).path is None
    assert not processes.has_ended(pidfd, 0)
    assert processes.end(pidfd, pid) == 0 and processes.has_ended(pidfd, 0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert not processes.send(pidfd, signal.SIGKILL)
    for fd in (read, write, pidfd):
        os.close(fd)
