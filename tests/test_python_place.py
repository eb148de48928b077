"""Live Python in namespace sandboxes: that it forks with them, and that it is held by the same walls."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

import pytest

from agentgym.envs.terminal import TerminalEnv
from agentgym.errors import BackendUnavailable, SandboxError, SnapshotUnsupported
from agentgym.sandbox import FileSpec, SandboxSpec
from agentgym.sandboxes import landlock, processes
from agentgym.sandboxes.namespace import NamespaceBackend, NamespaceSandbox
from agentgym.sandboxes.python_place import has_python
from agentgym.task import Task
from agentgym.types import Level

pytestmark = [pytest.mark.sandbox, pytest.mark.skipif(not has_python(), reason="no Python in the base")]
SPEC = SandboxSpec(files=(FileSpec("note", data=b"of the start\n"),), python=True)


@pytest.fixture(scope="module")
def backend() -> Iterator[NamespaceBackend]:
    made = NamespaceBackend()
    try:
        made.probe()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture
def box(backend: NamespaceBackend) -> Iterator[NamespaceSandbox]:
    made = backend.create(SPEC)
    yield made
    made.close()


def _say(box: NamespaceSandbox, code: str) -> str:
    result = box.run_python(code)
    assert result.exit_code == 0, result
    return result.stdout.removesuffix("\n")


def test_python_and_shell_see_the_same_files(box: NamespaceSandbox) -> None:
    assert _say(box, "import os; os.getcwd(), open('note').read()") == "('/workspace', 'of the start\\n')"
    box.run("echo shell > by; cd /tmp")
    assert _say(box, "open('by').read()") == "'shell\\n'"
    _say(box, "open('py', 'w').write('python')")
    assert box.run("cat /workspace/py").stdout == "python"


def test_a_fork_has_variables_files_and_shell(box: NamespaceSandbox) -> None:
    box.run("s=1")
    _say(box, "x = [1]; f = open('log', 'w'); f.write('a'); f.flush()")
    with box.snapshot(require=Level.PROCESS) as snapshot:
        assert (snapshot.level, snapshot.losses) == (Level.PROCESS, ())
        left, right = snapshot.fork(2)
        for one, name in ((box, "B"), (left, "L"), (right, "R")):
            assert _say(one, f"x.append('{name}'); f.write('{name}'); f.flush(); x") == f"[1, '{name}']"
            assert one.run("cat log; echo $s").stdout == f"a{name}1\n"
        [again] = snapshot.fork()
        assert _say(again, "x, open('log').read()") == "([1], 'a')", "neither heap nor files of a snapshot change"
    box.close()
    assert _say(left, "x") == "[1, 'L']", "branches outlive the sandbox where their tree began"
    with left.snapshot() as snapshot:
        left.close()
        [child] = snapshot.fork()
    assert _say(child, "x, open('log').read()") == "([1, 'L'], 'aL')"
    for one in (right, again, child):
        one.close()


def test_a_chain_of_turns_goes_on(box: NamespaceSandbox) -> None:
    _say(box, "x = 0")
    for turn in range(12):
        _say(box, f"x += 1; open('t{turn}', 'w').write(str(x))")
        with box.snapshot() as snapshot:
            if turn % 4 == 3:
                [child] = snapshot.fork()
                box.close()
                box = child
    assert _say(box, "import glob; x, len(glob.glob('t*'))") == "(12, 12)"
    box.close()


def test_what_is_alive_in_python_is_named_and_its_files_are_copied(box: NamespaceSandbox) -> None:
    _say(box, "import subprocess; p = subprocess.Popen('while :; do echo x >> out; done', shell=True)")
    _say(box, "import time; time.sleep(0.05)")
    with box.snapshot() as snapshot:
        assert snapshot.level == Level.SHELL and re.match(r"python: process \d+ \(/bin/sh -c while", snapshot.losses[0])
        before = snapshot.digest()
        time.sleep(0.05)
        assert snapshot.digest() == before, "nothing goes on writing to what is sealed"
    with pytest.raises(SnapshotUnsupported, match="would not be kept of: python: process"):
        box.snapshot(require=Level.PROCESS)
    assert _say(box, "p.poll() is None") == "True"


def test_the_walls_hold(box: NamespaceSandbox) -> None:
    told = _say(box, "print(open('/proc/self/status').read())")
    assert "NoNewPrivs:\t1\n" in told and "Seccomp:\t2\n" in told
    effective = re.search(r"CapEff:\t(\w+)", told)
    in_shell = re.search(r"CapEff:\t(\w+)", box.run("cat /proc/self/status").stdout)
    assert effective and in_shell and effective[1] == in_shell[1]
    refused = "import ctypes, os\nl = ctypes.CDLL(None, use_errno=True)\n"
    assert (
        _say(box, refused + "l.unshare(0x20000), os.strerror(ctypes.get_errno())") == "(-1, 'Operation not permitted')"
    )
    assert (
        "Network is unreachable"
        in box.run_python("import socket; socket.create_connection(('192.0.2.1', 80), 1)").stderr
    )
    assert _say(box, "len([n for n in os.listdir('/proc') if n.isdigit()])") == "3", "its place and nothing of the host"
    assert _say(box, "import subprocess; subprocess.check_output(['bash', '-c', 'cat <(echo fd)'])") == "b'fd\\n'"


def test_changing_the_root_leads_nowhere_else(box: NamespaceSandbox) -> None:
    _say(box, "pass")
    with box.snapshot() as snapshot:
        [child] = snapshot.fork()
    child.run("touch /of-the-child")
    escape = "import os\nfd = os.open('/', 0)\nos.mkdir('/tmp/j')\nos.chroot('/tmp/j')\nos.fchdir(fd)\n"
    escape += "for _ in range(64): os.chdir('..')\nos.chroot('.')\nsorted(os.listdir('/'))"
    told = _say(child, escape)
    assert "'of-the-child'" in told and _say(child, "os.listdir('/mnt')") == "[]"
    child.close()


def test_branches_cannot_reach_each_other(box: NamespaceSandbox) -> None:
    if landlock.abi() < landlock.SCOPE_ABI:
        pytest.skip("no Landlock with ABI 6")
    _say(box, "import os")
    with box.snapshot() as snapshot:
        left, right = snapshot.fork(2)
        pid = int(_say(left, "os.getpid()"))
        kid = "open(f'/proc/self/task/{os.getpid()}/children').read().split()[0]"
        for one, code in (
            (right, f"os.kill({pid}, 9)"),
            (right, f"os.listdir('/proc/{pid}/root/')"),
            (box, f"os.listdir('/proc/{pid}/root/')"),
            (box, f"open('/proc/' + {kid} + '/mem', 'r+b')"),
        ):
            assert "PermissionError" in one.run_python(code).stderr, code
        assert _say(left, "'alive'") == "'alive'"
    left.close()
    right.close()


def test_limits_and_deadlines_hold(box: NamespaceSandbox) -> None:
    _say(box, "x = 1")
    with box.snapshot() as snapshot:
        [child] = snapshot.fork()
    if "memory" in box.capabilities.isolation:
        result = child.run_python("a = [bytearray(10**8) for _ in range(60)]", timeout_s=60)
        assert result.exit_code != 0, "6 GB where 2 are allowed"
    deaf = "import signal, subprocess; signal.signal(2, signal.SIG_IGN); subprocess.Popen(['sleep', '999'])\nwhile True: pass"
    result = child.run_python(deaf, timeout_s=0.2)
    assert result.timed_out and result.shell_restarted
    assert _say(child, "import subprocess; 'sleep' in subprocess.check_output(['ps', 'ax'], text=True)") == "False"
    assert _say(box, "x") == "1"
    child.close()


def test_without_being_asked_for_there_is_none(backend: NamespaceBackend) -> None:
    box = backend.create(SandboxSpec())
    with pytest.raises(SandboxError, match=r"create it with SandboxSpec\(python=True\)"):
        box.run_python("1")
    with pytest.raises(SnapshotUnsupported, match="keeps level shell; level process"):
        box.snapshot(require=Level.PROCESS)
    box.close()


def test_closing_a_tree_leaves_nothing() -> None:
    backend = NamespaceBackend(pool=0)
    backend.create(SandboxSpec()).close()
    before = len(os.listdir("/proc/self/fd"))
    box = backend.create(SPEC)
    _say(box, "x = 1")
    with box.snapshot() as snapshot:
        children = snapshot.fork(3)
    for one in (*children, box):
        one.close()
    assert len(os.listdir("/proc/self/fd")) == before
    spawner = backend.spawner().process.pid
    assert [name for pid in processes.children(spawner) if "agentgym" not in (name := processes.command(pid))] == []
    backend.close()


def test_the_terminal_plays_python_and_forks_it() -> None:
    task = Task("t", "agentgym/Terminal-v0", "do it", verifier={"kind": "answer", "answer": "3"})
    env = TerminalEnv([task], python=True)
    env.reset(seed=0, options={"task": task})
    assert env.step("python x = 1\nx + 1")[0] == "2"
    assert env.step("python 1/0")[0].endswith("ZeroDivisionError: division by zero")
    with env.snapshot(require=env.needs) as snapshot:
        [child] = snapshot.fork()
    assert env.step("python x = 5")[0] == "[no output]"
    assert child.step("python x + 2")[0] == "3"
    assert child.step("submit")[1] == 1.0
    child.close()
    env.close()
