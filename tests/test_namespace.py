"""What only the namespace backend promises: isolation, layers, crash recovery, nothing left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgym.errors import BackendUnavailable, SandboxError
from agentgym.sandbox import BoxLimits, FileSpec, SandboxSpec
from agentgym.sandboxes import cgroups, state
from agentgym.sandboxes.namespace import NamespaceBackend, NamespaceSandbox
from agentgym.types import Level

pytestmark = pytest.mark.sandbox


@pytest.fixture(scope="module")
def backend() -> Iterator[NamespaceBackend]:
    made = NamespaceBackend()
    try:
        made.probe()
    except BackendUnavailable as refused:
        pytest.skip(str(refused))
    yield made
    made.close()


@pytest.fixture
def sandbox(backend: NamespaceBackend) -> Iterator[NamespaceSandbox]:
    made = backend.create(SandboxSpec())
    yield made
    made.close()


@pytest.mark.parametrize(
    ("attack", "answer"),
    [
        ("cat /etc/shadow", "No such file"),
        ("ls /home/* /root/* /var/tmp/*", "No such file"),
        ("python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 80), 2)'", "Network is unreachable"),
        ("python3 -c 'import socket; socket.socket(40, 1).connect((2, 1024))'", "not supported"),
        ("python3 -c 'import socket; socket.socket(38, 5)'", "not supported"),
        ("mount -t tmpfs none /mnt", "ermission denied|must be superuser|not permitted"),
        ("unshare -m true", "not permitted"),
        ("mknod disk b 8 0", "not permitted"),
        ("echo x > /proc/sys/kernel/hostname", "Read-only"),
        ("echo c > /proc/sysrq-trigger", "Read-only|ermission denied|No such"),
        ("cat /proc/1/environ", "ermission denied"),
        ("ls /proc/1/root/", "ermission denied"),
        ("echo x > /dev/sda", "Read-only|No such"),
        ("hostname stolen", "not permitted|must be root"),
        ("unshare -Ur true", "not permitted"),
        ("unshare -Um true", "not permitted"),
        ("nsenter -t 1 -a true", "not permitted|ermission denied"),
        (
            'python3 -c "import ctypes; l = ctypes.CDLL(None, use_errno=True); print(l.ptrace(16, 1, 0, 0)); exit(ctypes.get_errno())"',
            "-1",
        ),
        (
            'python3 -c "import ctypes; l = ctypes.CDLL(None, use_errno=True); print(l.syscall(425, 8, 0)); exit(ctypes.get_errno())"',
            "-1",
        ),
        (
            'python3 -c "import ctypes; l = ctypes.CDLL(None, use_errno=True); print(l.syscall(321, 0, 0, 0)); exit(ctypes.get_errno())"',
            "-1",
        ),
        (
            'python3 -c "import ctypes; l = ctypes.CDLL(None, use_errno=True); print(l.syscall(165, 0, 0, 0, 0, 0, 1)); exit(ctypes.get_errno())"',
            "-1",
        ),
        ("cp /bin/bash /tmp/b; chmod u+s /tmp/b; mount | grep ' / ' | grep -v nosuid", ""),
        ("chroot /proc/1/root true", "ermission denied|not permitted"),
        ("python3 -c \"import os; os.kill(1, 9); print('init', open('/proc/1/comm').read())\"; exit 1", "init"),
    ],
)
def test_attacks_are_refused(sandbox: NamespaceSandbox, attack: str, answer: str) -> None:
    result = sandbox.run(attack, timeout_s=10)
    assert result.exit_code != 0
    assert any(part in result.stdout + result.stderr for part in answer.split("|")), result
    assert sandbox.run("echo alive").stdout == "alive\n"


@pytest.fixture(scope="module")
def small() -> Iterator[NamespaceBackend]:
    """Sandboxes with little memory and few processes."""
    made = NamespaceBackend(pool=1, limits=BoxLimits(memory_bytes=128 << 20, max_pids=40))
    try:
        held = made.probe().isolation
    except BackendUnavailable as refused:
        pytest.skip(str(refused))
    if not {"memory", "max_pids"} <= held:
        made.close()
        pytest.skip("no control groups can be made here")
    yield made
    made.close()


def test_a_fork_bomb_harms_nobody(small: NamespaceBackend) -> None:
    bomb, neighbour = small.create(SandboxSpec()), small.create(SandboxSpec())
    result = bomb.run("f() { f | f & }; f; sleep 20", timeout_s=1)
    assert result.timed_out
    assert neighbour.run("/bin/echo fine").stdout == "fine\n"
    assert bomb.run("/bin/echo again; ls -d /proc/[0-9]* | wc -l").stdout.split()[0] == "again"
    bomb.close()
    neighbour.close()


def test_a_memory_bomb_ends_alone(small: NamespaceBackend) -> None:
    """C074: told from a deadline and from a kill by the kernel's own count."""
    box, neighbour = small.create(SandboxSpec()), small.create(SandboxSpec())
    result = box.run("python3 -c 'x = bytearray(400 << 20); print(len(x))'", timeout_s=20)
    assert (result.exit_code, result.oom_killed, result.timed_out, result.stdout) == (137, True, False, "")
    killed = box.run("bash -c 'kill -9 $$'")
    assert (killed.exit_code, killed.oom_killed) == (137, False)
    assert box.run("echo alive").stdout == neighbour.run("echo alive").stdout == "alive\n"
    box.close()
    neighbour.close()


def test_a_disk_flood_stops_and_harms_nobody(small: NamespaceBackend) -> None:
    """One file stops at half the memory; many end the programs that write them, and never the sandbox."""
    box = small.create(SandboxSpec())
    result = box.run("head -c 1G /dev/zero > flood", timeout_s=30)
    assert result.exit_code == 128 + signal.SIGXFSZ
    assert box.run("stat -c %s flood").stdout == f"{64 << 20}\n"
    full = box.run("for i in 1 2 3 4; do head -c 60M /dev/zero > flood$i; done", timeout_s=30)
    assert full.oom_killed
    for _ in range(3):  # nothing starts any more, and that is a result
        assert box.run("/bin/echo more; exit 5", timeout_s=10).exit_code != 0
    neighbour = small.create(SandboxSpec())
    assert neighbour.run("/bin/echo fine").stdout == "fine\n"
    box.close()
    neighbour.close()


def test_processor_time_is_limited() -> None:
    """By the kernel's count of how often it made the sandbox wait, not by a clock."""
    own = NamespaceBackend(pool=0, limits=BoxLimits(cpus=0.1))
    try:
        if "cpu" not in own.probe().isolation:
            pytest.skip("no control groups for processors here")
        box = own.create(SandboxSpec())
        box.run("for ((i=0; i<60000; i++)); do :; done")
        name = os.path.basename(own.spawner().folder)
        stats = [Path(home, str(box._box), "cpu.stat") for home in cgroups.runs_with_groups()[name]]
        told = " ".join(path.read_text() for path in stats if path.exists())
        assert int(told.split("nr_throttled ")[1].split()[0]) > 0
    finally:
        own.close()


@pytest.mark.parametrize(
    "flood",
    ["head -c 40M /dev/zero > big; exec sleep 60", "mkdir d; for ((i = 0; ; i++)); do : > d/$i; done"],
    ids=["bytes", "files"],
)
def test_a_flood_of_files_is_ended_where_the_kernel_does_not_count_it(
    flood: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Layers on disk: what a sandbox wrote before snapshots counts too, and it may tidy up afterwards."""
    monkeypatch.setenv("AGENTGYM_STATE", str(tmp_path))
    own = NamespaceBackend(pool=0, limits=BoxLimits(disk_bytes=32 << 20, disk_files=2000))
    try:
        assert "disk" not in own.probe().isolation
        box, neighbour = own.create(SandboxSpec()), own.create(SandboxSpec())
        box.run("echo 1 > kept")
        box.snapshot().release()
        result = box.run(flood, timeout_s=30)
        assert (result.disk_exceeded, result.killed, result.timed_out, result.shell_restarted) == (
            True,
            True,
            False,
            True,
        )
        assert neighbour.run("sleep 1.5; echo fine").stdout == "fine\n"
        assert box.run("cat kept; rm -r big d").stdout == "1\n"
        after = box.run("sleep 1.5; echo again")
        assert (after.stdout, after.disk_exceeded) == ("again\n", False)
    finally:
        own.close()


@pytest.mark.parametrize(
    "flood",
    [
        "mkdir d; for ((i = 0; ; i++)); do : > d/$i; done",
        "for i in 1 2 3 4; do head -c 50M /dev/zero > /tmp/big$i; done",
    ],
)
def test_a_flood_of_files_in_memory_ends_alone(small: NamespaceBackend, flood: str) -> None:
    """Names and content both count as the sandbox's memory."""
    box, neighbour = small.create(SandboxSpec()), small.create(SandboxSpec())
    assert "disk" in box.capabilities.isolation
    result = box.run(flood, timeout_s=60)
    assert result.oom_killed, result
    assert neighbour.run("/bin/echo fine").stdout == "fine\n"
    box.close()
    neighbour.close()


def test_groups_are_removed_with_their_sandbox(small: NamespaceBackend) -> None:
    box = small.create(SandboxSpec())
    box.run("true")
    [*homes] = cgroups.runs_with_groups()[os.path.basename(small.spawner().folder)]
    assert homes and all(os.path.isdir(f"{home}/{box._box}") for home in homes)
    box.close()
    deadline = time.monotonic() + 10
    while any(os.path.isdir(f"{home}/{box._box}") for home in homes):
        assert time.monotonic() < deadline, homes
        time.sleep(0.01)


def test_ordinary_sockets_still_work_inside(sandbox: NamespaceSandbox) -> None:
    program = "import socket as s; a, b = s.socketpair(); a.send(b'x'); print(b.recv(1)); [s.socket(f, s.SOCK_STREAM) for f in (s.AF_UNIX, s.AF_INET, s.AF_INET6)]"
    assert sandbox.run(f'python3 -W ignore -c "{program}"').stdout == "b'x'\n"


def test_other_processes_of_the_host_are_out_of_sight(sandbox: NamespaceSandbox) -> None:
    listed = sandbox.run("ls /proc | grep -E '^[0-9]+$' | wc -l").stdout
    assert int(listed) <= 6
    assert str(os.getcwd()) not in sandbox.run("cat /proc/1/cmdline /proc/self/mountinfo").stdout


def test_usr_is_writable_inside_and_untouched_outside(sandbox: NamespaceSandbox) -> None:
    """Also over a rotation, and in the child."""
    name = f"/usr/bin/agentgym-test-{os.getpid()}"
    sandbox.run(f"printf '#!/bin/sh\\necho mine\\n' > {name}; chmod +x {name}; rm /usr/bin/env")
    with sandbox.snapshot() as snapshot:
        [child] = snapshot.fork()
        assert snapshot.changes()[name].mode == 0o755
        assert snapshot.changes()["/usr/bin/env"].kind == "deleted"
    for box in (sandbox, child):
        assert box.run(f"{name}; ls /usr/bin/env").stdout == "mine\n"
    child.close()
    assert not os.path.exists(name) and os.path.exists("/usr/bin/env")


def test_a_descriptor_that_writes_does_not_reach_the_sealed_layer(sandbox: NamespaceSandbox) -> None:
    """The hazard of rotating: an open file stays in the old upper; such a state is copied instead."""
    sandbox.run("exec 7>>/workspace/log; echo before >&7")
    with sandbox.snapshot() as snapshot:
        digest = snapshot.digest()
        assert snapshot.losses == ("open file 7 (/workspace/log)",)
        sandbox.run("echo after >&7")
        assert snapshot.digest() == digest
        assert sandbox.run("cat log").stdout == "before\nafter\n"


def test_a_background_writer_is_undisturbed_and_the_copy_is_consistent(sandbox: NamespaceSandbox) -> None:
    sandbox.run("(i=0; while :; do i=$((i+1)); echo $i >> count; done) & sleep 0.05")
    with sandbox.snapshot() as snapshot:
        assert len(snapshot.losses) >= 1
        [child] = snapshot.fork()
        lines = child.run("cat count").stdout.split()
        assert lines == [str(n + 1) for n in range(len(lines))] and lines
        assert child.run("sleep 0.05; wc -l < count").stdout.strip() == str(len(lines))
        child.close()
    before = int(sandbox.run("wc -l < count").stdout)
    assert int(sandbox.run("sleep 0.2; wc -l < count").stdout) > before


@pytest.mark.parametrize(
    ("make", "probe", "answer"),
    [
        ("echo 1 > /root/f; echo 2 > /tmp/f; echo 3 > /dev/shm/f", "cat /root/f /tmp/f /dev/shm/f", "1\n2\n3\n"),
        ("echo x > /var/lib/f; chown 33:33 /var/lib/f", "stat -c '%u %g' /var/lib/f", "33 33\n"),
        ("ln file linked", "stat -c %h file", "2\n"),
        (
            "python3 -c \"import os; os.setxattr('file', 'user.note', b'v')\"",
            "python3 -c \"import os; print(os.getxattr('file', 'user.note'))\"",
            "b'v'\n",
        ),
        ("export A=b; cd /var", "echo $A; pwd", "b\n/var\n"),
    ],
)
def test_kept_by_a_fork(sandbox: NamespaceSandbox, make: str, probe: str, answer: str) -> None:
    """C045: the table of what is kept; also in the parent, whose root was exchanged."""
    sandbox.run("echo > file")
    assert sandbox.run(make).stderr == ""
    with sandbox.snapshot() as snapshot:
        assert snapshot.losses == ()
        [child] = snapshot.fork()
    assert child.run(probe).stdout == sandbox.run(probe).stdout == answer
    child.close()


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        ("sleep 99 &", "process"),
        ("python3 -m http.server 8080 >/dev/null 2>&1 & sleep 0.5", "http.server"),
        ("exec 8</etc/passwd", "open file 8"),
        ("coproc cat", "process"),
    ],
)
def test_lost_by_a_fork_and_named(sandbox: NamespaceSandbox, make: str, loss: str) -> None:
    """C045: what is alive or open and will not come back."""
    sandbox.run(make)
    with sandbox.snapshot() as snapshot:
        assert any(loss in named for named in snapshot.losses), snapshot.losses


def test_a_tree_over_a_large_workspace_stores_what_differs(backend: NamespaceBackend) -> None:
    """C036: 40 nodes over 50 MB, each with 10 KB of its own."""

    def used() -> int:
        found = os.statvfs(backend.spawner().layers)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    before = used()
    box = backend.create(SandboxSpec())
    box.run("head -c 50M /dev/zero > big")
    snapshots = []
    for turn in range(40):
        box.run(f"head -c 10K /dev/urandom > own{turn}")
        snapshots.append(box.snapshot())
    assert used() - before < 60 << 20
    box.close()
    for snapshot in snapshots:
        snapshot.release()
    deadline = time.monotonic() + 10
    while used() - before > 1 << 20 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert used() - before <= 1 << 20


def test_a_directory_deleted_and_made_again_is_opaque(sandbox: NamespaceSandbox) -> None:
    box = sandbox
    box.run("mkdir d; echo 1 > d/old; echo 2 > d/keep")
    box.snapshot().release()
    box.run("rm -r d; mkdir d; echo 3 > d/new")
    with box.snapshot() as snapshot:
        assert sorted(p for p in snapshot.changes() if "/d" in p) == ["/workspace/d", "/workspace/d/new"]
        [child] = snapshot.fork()
        assert child.run("ls d").stdout == "new\n"
        child.close()


def test_the_working_directory_may_be_renamed_or_deleted(sandbox: NamespaceSandbox) -> None:
    sandbox.run("mkdir here; cd here; mv ../here ../there; mkdir ../here")
    with sandbox.snapshot() as snapshot:
        [child] = snapshot.fork()
        assert child.run("pwd -P").stdout == sandbox.run("pwd -P").stdout == "/workspace/there\n"
        child.close()
    sandbox.run("rmdir ../there")
    with sandbox.snapshot() as snapshot:
        assert snapshot.losses == ("working directory /workspace/there (deleted)",)


def test_a_shell_that_hides_builtins_loses_its_state_and_no_file(sandbox: NamespaceSandbox) -> None:
    """A policy cannot get out of being scored by breaking its shell, and the loss is named."""
    sandbox.run("declare() { :; }; set() { :; }; x=kept")
    with sandbox.snapshot() as snapshot:
        assert (snapshot.level, snapshot.losses) == (Level.SHELL, ())
        [child] = snapshot.fork()
        assert child.run("echo $x").stdout == "kept\n"
        child.close()
    sandbox.run("echo 1 > file; enable -n declare")
    with sandbox.snapshot() as snapshot:
        assert (snapshot.level, snapshot.losses[-1][:11]) == (Level.FILES, "shell state")
        assert "/workspace/file" in snapshot.changes()
        [child] = snapshot.fork()
        assert child.run("cat file").stdout == "1\n"
        child.close()
    assert sandbox.run("builtin() { :; }", timeout_s=1).timed_out
    assert sandbox.run("echo again").stdout == "again\n"


def test_a_chain_of_snapshots_keeps_every_turn(sandbox: NamespaceSandbox) -> None:
    snapshots = []
    for turn in range(40):
        sandbox.run(f"echo {turn} >> log; mkdir t{turn}")
        snapshots.append(sandbox.snapshot())
    for turn in (0, 17, 39):
        [child] = snapshots[turn].fork()
        assert child.run("wc -l < log; ls -d t* | wc -l").stdout.split() == [str(turn + 1)] * 2
        child.close()
    for snapshot in snapshots:
        snapshot.release()


def test_long_chains_become_short_and_nothing_changes(backend: NamespaceBackend) -> None:
    """Whiteouts, opaque folders, links, modes and owners come through; so do files of the first layers."""
    box = backend.create(SandboxSpec(files=(FileSpec("given/a", data=b"1"), FileSpec("given/b", data=b"2"))))
    depths, snapshots = [], []
    for turn in range(120):
        box.run(
            f"echo {turn} >> log; mkdir -p d{turn % 7}/x; echo {turn} > d{turn % 7}/x/f{turn}; rm -rf d{(turn + 3) % 7}"
        )
        if turn == 20:
            box.run(
                "rm given/a; rm -r /usr/share/doc/bash; mkdir /usr/share/doc/bash; ln -s log link; chmod 2770 given"
            )
        if turn == 60:
            box.run("rm -r given; mkdir given; echo 3 > given/c; echo x > /usr/local/mine; chown 33:33 log")
        snapshots.append(box.snapshot())
        depths.append(len(snapshots[-1].chain))
        time.sleep(0.002)
    probe = "find . /usr/local /usr/share/doc/bash -printf '%p %y %m %U %G %l\\n' | sort; cat log d*/x/f* given/*"
    expected = box.run(probe).stdout
    time.sleep(0.3)
    box.run("echo last > more")
    with box.snapshot() as after:
        assert len(after.chain) < 40 and max(depths) < 110, depths
        [child] = after.fork()
        assert child.run("rm more; " + probe).stdout == expected == box.run("rm more; " + probe).stdout
        child.close()
    [old] = snapshots[30].fork()
    assert old.run("wc -l < log; ls given").stdout.split() == ["31", "b"]
    assert "/workspace/given/a" in snapshots[30].changes()
    old.close()
    box.close()
    for snapshot in snapshots:
        snapshot.release()


def test_a_snapshot_of_nothing_new_makes_no_layer(sandbox: NamespaceSandbox) -> None:
    with sandbox.snapshot() as first:
        sandbox.run("ls; x=1")
        with sandbox.snapshot() as second:
            assert first.chain == second.chain
            assert first.digest() != second.digest()


def test_a_grader_sees_the_frozen_world_and_the_agent_never_sees_the_grader(sandbox: NamespaceSandbox) -> None:
    """C062: planted programs, hooks and links of the agent have no part in the verdict."""
    sandbox.run(
        "echo 42 > answer; printf '#!/bin/sh\\nexit 0\\n' > /usr/bin/cmp; chmod +x /usr/bin/cmp; ln -s /tmp /grader"
    )
    files = {"gold4711": b"43\n", "check.sh": b"cmp /world/workspace/answer /grader/gold4711\n"}
    with sandbox.snapshot() as snapshot:
        assert snapshot.inspect(files, "sh check.sh", timeout_s=10).exit_code == 1
        good = files | {"gold4711": b"42\n"}
        assert snapshot.inspect(good, "sh check.sh", timeout_s=10).exit_code == 0
        assert snapshot.inspect(files, "echo x > /world/workspace/answer", timeout_s=10).exit_code != 0
        [child] = snapshot.fork()
        found = child.run("find / -name gold4711 -not -path '/proc/*' 2>/dev/null; ls -d /world")
        assert found.stdout == ""
        child.close()


def test_the_pool_gives_what_a_cold_start_gives(backend: NamespaceBackend) -> None:
    """C046: a blank is used once, so nothing of another episode can be in it."""
    cold = NamespaceBackend(pool=0)
    cold.probe()
    try:
        spec = SandboxSpec(files=(FileSpec("f", data=b"1"),), env=(("A", "b"),))
        probe = "find / -xdev -newermt 2000-01-01 -printf '%p %m %s\\n' 2>/dev/null | grep -v '^/proc' | sort; set; env; ulimit -a; ls -l /proc/self/fd | wc -l; umask; trap -p; cat /proc/self/status | grep -E 'Cap|NoNew|Sig[^Q]'"
        seen = []
        for which in (backend, backend, cold):
            box = which.create(spec)
            seen.append(box.run(probe).stdout)
            box.run("echo dirt > /tmp/dirt; git config --global a.b c; export DIRT=1; sleep 100 &")
            box.close()
        assert seen[0] == seen[1] == seen[2]
    finally:
        cold.close()


def test_random_operations_leave_nothing(backend: NamespaceBackend) -> None:
    draw = random.Random(7)
    own = NamespaceBackend(pool=0)
    own.probe()
    spawner = own.spawner()
    own.create(SandboxSpec()).close()
    time.sleep(0.2)

    def counted() -> tuple[int, int, int]:
        return (
            len(state.strays(spawner.folder)),
            len(os.listdir(spawner.layers)),
            len(os.listdir("/proc/self/fd")),
        )

    before = counted()
    boxes = [own.create(SandboxSpec())]
    snapshots = []
    for step in range(150):
        what = draw.choice(["fork", "run", "snap", "close", "kill", "release"])
        box = draw.choice(boxes)
        try:
            if what == "run":
                box.run(f"echo {step} >> f{draw.randrange(5)}; x{step}=1")
            elif what == "snap":
                snapshots.append(box.snapshot())
            elif what == "fork" and snapshots:
                boxes += draw.choice(snapshots).fork()
            elif what == "close" and len(boxes) > 1:
                boxes.remove(box)
                box.close()
            elif what == "kill" and len(boxes) > 1:
                boxes.remove(box)
                os.kill(box.pid, signal.SIGKILL)
                with pytest.raises(SandboxError):
                    for _ in range(1000):  # the kernel may let a command or two through
                        box.run("true")
                box.close()
            elif what == "release" and snapshots:
                snapshots.pop(draw.randrange(len(snapshots))).release()
        finally:
            if step % 50 == 49:
                boxes.append(own.create(SandboxSpec()))
    for box in boxes:
        box.close()
    for snapshot in snapshots:
        snapshot.release()
    deadline = time.monotonic() + 5
    while counted() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert counted() == before
    folder = spawner.folder
    own.close()
    assert not os.path.exists(folder) and not state.strays(folder)


SCRIPT = """
import os, sys, time
from agentgym.sandbox import SandboxSpec
from agentgym.sandboxes.namespace import NamespaceBackend
backend = NamespaceBackend()
box = backend.create(SandboxSpec())
box.run("sleep 1000 & echo x > f")
with box.snapshot() as snapshot:
    children = snapshot.fork(3)
    [child.run("sleep 1000 &") for child in children]
    print(backend.spawner().folder, backend.spawner().process.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("victim", ["library", "spawner", "both"])
def test_a_killed_run_leaves_nothing(victim: str, backend: NamespaceBackend, tmp_path: Path) -> None:
    """SIGKILL of the program, of the spawner, or of both; then `gc`."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    folder, _, spawner = process.stdout.readline().strip().partition(" ")
    assert len(state.strays(folder)) > 5
    if victim != "library":
        os.kill(int(spawner), signal.SIGKILL)
    if victim != "spawner":
        process.kill()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and len(state.strays(folder)) > 0:
        time.sleep(0.05)
    process.kill()
    process.wait()
    process.stdout.close()
    mine = backend.spawner().folder
    removed = state.collect_garbage()
    assert not os.path.exists(folder) and not state.strays(folder)
    assert os.path.exists(mine), removed
    assert folder not in Path("/proc/self/mounts").read_text()
    assert os.path.basename(folder) not in cgroups.runs_with_groups()
    other = backend.create(SandboxSpec())
    assert other.run("echo other run undisturbed").exit_code == 0
    other.close()


def test_garbage_of_one_state_root_is_no_run_of_another(
    small: NamespaceBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two runs at once: the one that collects garbage does not know where the other keeps its folder."""
    homes = cgroups.runs_with_groups()[os.path.basename(small.spawner().folder)]
    monkeypatch.setenv("AGENTGYM_STATE", str(tmp_path))
    assert state.collect_garbage() == []
    assert all(os.path.isdir(home) for home in homes)
    box = small.create(SandboxSpec())
    assert box.run("/bin/echo fine").stdout == "fine\n"
    box.close()


def test_a_refused_machine_says_which_check_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AGENTGYM_STATE", str(tmp_path / "file" / "below"))
    with pytest.raises(BackendUnavailable, match=r"cannot run here.*below.*local"):
        NamespaceBackend().probe()


def test_layers_on_disk_work_as_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AGENTGYM_STATE", str(tmp_path))
    own = NamespaceBackend(pool=1)
    own.probe()
    box = own.create(SandboxSpec())
    box.run("echo x > f")
    with box.snapshot() as snapshot:
        [child] = snapshot.fork()
        assert child.run("cat f").stdout == "x\n"
    assert len(list(tmp_path.iterdir())) == 1
    own.close()
    assert list(tmp_path.iterdir()) == []


ROOTLESS = """
from agentgym.sandbox import SandboxSpec, FileSpec
from agentgym.sandboxes.namespace import NamespaceBackend
backend = NamespaceBackend()
box = backend.create(SandboxSpec(files=(FileSpec("a", data=b"1"),)))
box.run("rm a; mkdir d; echo x > d/f; y=5; echo hi > /usr/mine")
with box.snapshot() as snapshot:
    digest = snapshot.digest()
    [child] = snapshot.fork()
    print(child.run("cat d/f /usr/mine; ls; echo $y; id -u").stdout.split(), sorted(snapshot.changes()))
    box.run("rm -r d")
    child.run("echo z >> d/f")
    assert snapshot.digest() == digest
    print(child.read("d/f"), box.run("cat /etc/shadow").exit_code)
    print(snapshot.inspect({"c": b"cat /world/workspace/d/f"}, "sh c", timeout_s=5).stdout)
box = backend.create(SandboxSpec(python=True))
box.run_python("x = [1]; f = open('log', 'w')")
with box.snapshot() as snapshot:
    [child] = snapshot.fork()
    child.run_python("x.append(2); f.write('child'); f.flush()")
    print("python", snapshot.level, box.run_python("x").stdout + child.run_python("x").stdout + child.run("cat log").stdout)
backend.close()
"""


def other_users_python(become: list[str]) -> str:
    """An interpreter of our version that the other user may run."""
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        asked = subprocess.run(
            [*become, "/bin/sh", "-c", f"exec {python} -c 'import sys; print(sys.version_info[:2])'"],
            capture_output=True,
            text=True,
        )
        if asked.stdout.strip() == str(sys.version_info[:2]):
            return python
    pytest.skip(f"no Python {sys.version_info[:2]} here that user 65534 may run")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
def test_an_unprivileged_user_can_use_it(checkout: Path) -> None:
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]
    paths = [str(checkout), *(path for path in sys.path if path.endswith("site-packages"))]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(paths), "HOME": "/nonexistent"}
    command = [*become, other_users_python(become), "-c", ROOTLESS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr
    first, second, third, *_ = done.stdout.splitlines()
    assert first == "['x', 'hi', 'd', '5', '0'] ['/usr/mine', '/workspace/a', '/workspace/d', '/workspace/d/f']"
    assert second == "b'x\\nz\\n' 1" and third == "x"
    assert done.stdout.endswith("python process [1]\n[1, 2]\nchild\n")
    assert not [n for n in os.listdir("/var/tmp") if n == "agentgym-65534" and os.listdir(f"/var/tmp/{n}")]
