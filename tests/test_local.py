"""What the rules hold on the shells of backend `local`, and that the probe tells when they hold nothing."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgym.errors import BackendUnavailable, SandboxError
from agentgym.sandbox import SandboxSpec
from agentgym.sandboxes import confine, landlock, sockets
from agentgym.sandboxes.local import LocalBackend, LocalSandbox


@pytest.fixture
def backend(workplace: Path) -> Iterator[LocalBackend]:
    made = LocalBackend()
    yield made
    made.close()


@pytest.fixture
def sandbox(backend: LocalBackend) -> Iterator[LocalSandbox]:
    made = backend.create(SandboxSpec())
    yield made
    made.close()


def need(sandbox: LocalSandbox, word: str, piece: str) -> None:
    if word not in sandbox.capabilities.isolation:
        pytest.skip(sandbox.capabilities.missing.get(piece, f"{word} does not hold on this kernel"))


def everyone(sandbox: LocalSandbox) -> Iterator[tuple[str, LocalSandbox]]:
    """The sandbox, itself with a second shell, and a fork."""
    yield "first", sandbox
    assert sandbox.run("exit 1").shell_restarted
    yield "restarted", sandbox
    with sandbox.snapshot() as snapshot:
        [child] = snapshot.fork()
    yield "fork", child
    child.close()


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    place = tmp_path / "outside"
    place.mkdir()
    (place / "file").write_text("kept")
    return place


ATTACKS = [
    "echo x > $OUT/file",
    "echo x >> $OUT/file",
    ": > $OUT/new",
    "truncate -s 0 $OUT/file",
    "rm -f $OUT/file",
    "mkdir $OUT/folder",
    "mkfifo $OUT/pipe",
    "ln -s file $OUT/link",
    "ln $OUT/file hard",
    "mv $OUT/file taken",
    "touch mine; mv mine $OUT/given",
    "ln -s $OUT away; echo x > away/file",
    "ln -s $OUT/file one; echo x > one",
    "echo x > $(printf '../%.0s' {1..40})$OUT/file",
    "cd $OUT; echo x > file",
    "echo x > /proc/self/root$OUT/file",
    "bash -c 'echo x > $OUT/file'",
    "setsid sh -c 'echo x > $OUT/file'",
]


def test_live_python_is_refused_not_ignored(backend: LocalBackend) -> None:
    with pytest.raises(BackendUnavailable, match="'local' has no live Python; use backend 'namespace'"):
        backend.create(SandboxSpec(python=True))


def test_files_outside_the_workspace_cannot_be_changed(sandbox: LocalSandbox, outside: Path) -> None:
    """Attack: each way to write, from the first shell, one that took its place, and a fork."""
    need(sandbox, "writes", "landlock")
    for name, box in everyone(sandbox):
        box.run(f"export OUT={outside}")
        for attack in ATTACKS:
            result = box.run(attack)
            assert result.exit_code != 0, (name, attack, result)
            assert [path.name for path in outside.iterdir()] == ["file"], (name, attack)
            assert (outside / "file").read_text() == "kept", (name, attack)


def test_another_sandbox_and_the_shared_folders_cannot_be_written(backend: LocalBackend, sandbox: LocalSandbox) -> None:
    need(sandbox, "writes", "landlock")
    other = backend.create(SandboxSpec())
    place = other.run("pwd").stdout.strip()
    for target in (f"{place}/planted", f"{place}-tmp/planted", "/tmp/agentgym-planted", "/dev/shm/agentgym-planted"):
        assert sandbox.run(f"echo x > {target}").exit_code != 0
        assert not os.path.exists(target)
    other.close()


def test_device_nodes_cannot_be_made_even_by_root(sandbox: LocalSandbox) -> None:
    need(sandbox, "writes", "landlock")
    if os.getuid():
        pytest.skip("only root could make one at all")
    assert sandbox.run("mknod null c 1 3").exit_code != 0
    assert sandbox.run("mknod disk b 8 0").exit_code != 0
    assert sandbox.run("ls").stdout == ""


SOCKETS = """
import socket, sys
port, passed = int(sys.argv[1]), []
def made(protocol=0):
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol)
    made.settimeout(5)
    return made
attacks = {
    "connect": lambda: made().connect(("127.0.0.1", port)),
    "mptcp": lambda: made(262).connect(("127.0.0.1", port)),
    "fast open": lambda: made().sendto(b"x", 0x20000000, ("127.0.0.1", port)),
    "bind": lambda: made().bind(("127.0.0.1", 0)),
    "listen": lambda: made().listen(),
    "ipv6": lambda: socket.socket(socket.AF_INET6, socket.SOCK_STREAM).listen(),
}
for name, attack in attacks.items():
    try:
        attack()
        passed.append(name)
    except OSError:
        pass
print(passed)
"""


def test_tcp_is_refused_by_every_way_round(sandbox: LocalSandbox) -> None:
    """Attack: Landlock alone lets multipath TCP, fast open and an unbound listen through."""
    need(sandbox, "tcp", "socket_filter")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        port = server.getsockname()[1]
        for name, box in everyone(sandbox):
            box.write("attack.py", SOCKETS.encode())
            assert box.run(f"echo x > /dev/tcp/127.0.0.1/{port}").exit_code != 0, name
            assert box.run(f"{sys.executable} -W ignore -S attack.py {port}").stdout == "[]\n", name
        with pytest.raises(BlockingIOError):
            server.accept()


def test_processes_outside_cannot_be_signalled(sandbox: LocalSandbox) -> None:
    need(sandbox, "writes", "landlock")
    if landlock.abi() < landlock.SCOPE_ABI:
        pytest.skip(f"signals need Landlock ABI {landlock.SCOPE_ABI}, this kernel has {landlock.abi()}")
    with subprocess.Popen(["sleep", "60"]) as stranger:
        try:
            for name, box in everyone(sandbox):
                assert box.run(f"kill -KILL {stranger.pid}").exit_code != 0, name
                assert box.run("sleep 60 & kill -KILL $!; wait $!").exit_code == 137, name
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_honest_work_goes_on_under_the_rules(sandbox: LocalSandbox) -> None:
    work = r"""
        mkdir -p a b && echo x > a/f && mv a/f b/g && ln b/g b/h && rm b/g && mkfifo p && cat b/h
        echo null > /dev/null && echo out > /dev/stdout && f=$(mktemp) && echo tmp > "$f" && cat "$f"
        head -c 200000 /dev/zero | tr '\0' x > big && wc -c <<< "$(cat big)" && sort -S 32K big | wc -l
    """
    result = sandbox.run(work)
    assert (result.stderr, result.stdout.split()) == ("", ["x", "out", "tmp", "200001", "1"])


def test_temporary_files_are_the_sandboxes_own_and_fork_with_it(sandbox: LocalSandbox) -> None:
    sandbox.run('f=$(mktemp); echo one > "$f"')
    with sandbox.snapshot() as snapshot:
        digest = snapshot.digest()
        [child] = snapshot.fork()
    assert child.run('cat "$f"; echo two > "$f"').stdout == "one\n"
    assert sandbox.run('cat "$f"').stdout == "one\n"
    places = [box.run('echo "$TMPDIR"').stdout.strip() for box in (sandbox, child)]
    assert len(set(places)) == 2 and all(os.path.isdir(place) for place in places)
    with child.snapshot() as changed:
        assert changed.digest() != digest and changed.changes() == {}
    child.close()
    sandbox.close()
    assert not any(os.path.exists(place) for place in places)


def test_the_rules_bind_the_sandbox_and_not_us(backend: LocalBackend, outside: Path) -> None:
    backend.create(SandboxSpec()).close()
    (outside / "file").write_text("ours")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        pass
    assert subprocess.run(["sh", "-c", f"echo child > {outside}/file"]).returncode == 0
    assert (outside / "file").read_text() == "child\n" and gc.isenabled()


def refuse(*_: object) -> int:
    raise OSError(errno.ENOSYS, "landlock: masked off")


def test_the_probe_tells_when_there_is_no_landlock(
    backend: LocalBackend, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landlock, "_syscall", refuse)
    found = backend.probe()
    assert "writes" not in found.isolation
    assert "change every file" in found.missing["readonly_host"] and "signal" in found.missing["pids"]
    assert "ABI 0" in found.missing["landlock"]
    box = backend.create(SandboxSpec())
    assert box.capabilities == found
    assert box.run(f"echo x > {outside}/file").exit_code == 0  # so it is true
    box.close()


def test_the_probe_tells_when_there_is_no_filter(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "program", refuse)
    found = backend.probe()
    assert "masked off" in found.missing["socket_filter"]
    assert ("tcp" in found.isolation) == (not backend.rules().passed & confine._TCP)
    box = backend.create(SandboxSpec())
    udp = f"{sys.executable} -S -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()'"
    assert "UDP" in found.missing["network"] or "tcp" not in found.isolation
    assert box.run(udp).exit_code == 0
    box.close()


def test_without_either_nothing_is_promised(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "_syscall", refuse)
    monkeypatch.setattr(sockets, "program", refuse)
    found = backend.probe()
    assert found.isolation == frozenset() and {"landlock", "socket_filter"} <= set(found.missing)


@pytest.mark.parametrize(
    ("version", "word", "told"),
    [
        (1, "writes", "ABI 1"),
        (2, "writes", None),  # truncate(2) is not among its rules, and the trial finds that out
    ],
)
def test_an_old_interface_is_seen_through(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, version: int, word: str, told: str | None
) -> None:
    if landlock.abi() < version:
        pytest.skip(f"this kernel has Landlock ABI {landlock.abi()}")
    monkeypatch.setattr(landlock, "abi", lambda: version)
    found = backend.probe()
    assert word not in found.isolation and "change every file" in found.missing["readonly_host"]
    if told is None:
        assert backend.rules().passed & confine._WRITES == {"truncate"}
    else:
        assert told in found.missing["landlock"]


def test_rules_that_cannot_be_set_are_an_error_and_start_nothing(tmp_path: Path) -> None:
    if landlock.abi() < landlock.MIN_ABI:
        pytest.skip(f"this kernel has Landlock ABI {landlock.abi()}")
    with pytest.raises(SandboxError, match="rules cannot be set"):
        confine.Rules(writes=True).start(["touch", str(tmp_path / "ran")], [str(tmp_path / "absent")])
    assert list(tmp_path.iterdir()) == []


def test_a_trial_that_cannot_run_promises_nothing(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    found = backend.probe()
    assert found.isolation == frozenset() and "No such file" in found.missing["landlock"]


UNPRIVILEGED = """
from agentgym.sandbox import SandboxSpec
from agentgym.sandboxes.local import LocalBackend
backend = LocalBackend()
print(sorted(backend.probe().isolation), backend.rules().passed)
box = backend.create(SandboxSpec())
with box.snapshot() as snapshot:
    [child] = snapshot.fork()
    print(child.run("echo x > here && cat here; echo x > $AGENTGYM_STATE/there").stdout)
backend.close()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
def test_an_unprivileged_user_gets_the_same_rules(checkout: Path, backend: LocalBackend) -> None:
    if not shutil.which("setpriv"):
        pytest.skip("no setpriv here to become another user with")
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]
    asked = subprocess.run(
        [*become, "/usr/bin/python3", "-c", "import sys; print(sys.version_info[:2])"], capture_output=True
    )
    if asked.stdout.decode().strip() != str(sys.version_info[:2]):
        pytest.skip(f"no /usr/bin/python3 {sys.version_info[:2]} here that user 65534 may run")
    paths = [str(checkout), *(path for path in sys.path if path.endswith("site-packages"))]
    with tempfile.TemporaryDirectory(prefix="agentgym-test-", dir="/var/tmp") as state:
        os.chown(state, 65534, 65534)
        done = subprocess.run(
            [*become, "/usr/bin/python3", "-c", UNPRIVILEGED],
            env={"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(paths), "AGENTGYM_STATE": state},
            capture_output=True,
            text=True,
            cwd="/",
        )
    assert done.returncode == 0, done.stderr
    rules, output = done.stdout.splitlines()[:2]
    assert rules.startswith(str(sorted(backend.probe().isolation))) and output == "x"
    # its processes' environment is out of reach too, which root's rights would read
    assert "environ" not in rules or landlock.abi() < landlock.MIN_ABI
