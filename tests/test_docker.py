"""What only the docker backend promises: isolation, images as bases, long chains, nothing left behind."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgym.errors import BackendUnavailable, PathRefused, SandboxError
from agentgym.ops import collect_garbage
from agentgym.sandbox import BoxLimits, FileSpec, SandboxSpec
from agentgym.sandboxes import docker_box, docker_owner
from agentgym.sandboxes.docker import DockerBackend, DockerSandbox
from agentgym.sandboxes.docker_daemon import Daemon
from agentgym.sandboxes.docker_files import listing
from agentgym.sandboxes.docker_image import host_image
from agentgym.types import Level


@pytest.fixture(scope="module")
def backend(docker_daemon: None) -> Iterator[DockerBackend]:
    made = DockerBackend()
    try:
        made.probe()
    except BackendUnavailable as refused:
        pytest.skip(str(refused))
    yield made
    made.close()


@pytest.fixture
def sandbox(backend: DockerBackend) -> Iterator[DockerSandbox]:
    made = backend.create(SandboxSpec())
    yield made
    made.close()


def ours(daemon: Daemon, owner: str | None = None) -> list[int]:
    """How many containers, images and volumes an owner has."""
    label = {"label": f"{docker_owner.OWNER}={owner or daemon.owner}"}
    api = daemon.api
    found = (api.containers(all=True, filters=label), api.images(all=True, filters=label))
    return [*map(len, found), len(api.volumes(filters=label)["Volumes"] or [])]


# without a daemon


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'agentgym-tree\[docker\]'"):
        DockerBackend().probe()


def test_no_daemon_is_told_with_its_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(BackendUnavailable, match=r"no daemon answers at .*none\.sock"):
        DockerBackend().probe()
    assert docker_owner.collect_garbage() == []


def test_importing_the_backend_does_not_import_the_sdk() -> None:
    code = "import sys, agentgym.sandboxes.docker; sys.exit('docker' in sys.modules or 'requests' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_owner_is_dead_only_where_that_is_certain() -> None:
    me = docker_owner.owner()
    machine, boot, namespace, pid, started, token = me.split(":")
    assert not docker_owner.is_dead(me)
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    assert docker_owner.is_dead(f"{machine}:{boot}:{namespace}:{gone.pid}:1:{token}")
    assert docker_owner.is_dead(f"{machine}:{boot}:{namespace}:{pid}:{int(started) - 1}:{token}")
    assert docker_owner.is_dead(f"{machine}:another:{namespace}:{pid}:{started}:{token}")
    strangers = (f"elsewhere:{boot}:{namespace}:{gone.pid}:1:x", f"{machine}:{boot}:0:{gone.pid}:1:x", "", "nonsense")
    for other in strangers:
        assert not docker_owner.is_dead(other)


def test_the_default_image_holds_programs_and_no_secret_of_the_host() -> None:
    with tarfile.open(fileobj=io.BytesIO(host_image(("bash", "cat")))) as archive:
        names = set(archive.getnames())
        assert {"./etc/passwd", "./tmp"} <= names and not {"./etc/shadow", "./etc/ssh"} & names
        assert any(name.endswith("/bash") for name in names) and any("ld-linux" in name for name in names)
        assert {member.uid for member in archive} == {0}


# with one


@pytest.mark.docker
@pytest.mark.parametrize(
    ("attack", "answer"),
    [
        ("cat /etc/shadow", "No such file"),
        ("ls /home/* /var/tmp/* /var/run/docker.sock", "No such file"),
        ("exec 3<>/dev/tcp/1.1.1.1/80", "Network is unreachable"),
        ("ls /sys/class/net | grep -v '^lo$'", ""),
        ("mount -t tmpfs none /mnt", "not found|permitted|denied"),
        ("echo x > /proc/sys/kernel/hostname", "Read-only"),
        ("echo c > /proc/sysrq-trigger", "Read-only|denied|No such"),
        ("head -c 1 /proc/kcore | grep .", ""),
        ("echo 1 > /sys/fs/cgroup/memory/tasks", "Read-only|No such"),
        ("echo 1 > /sys/fs/cgroup/pids/pids.max", "Read-only|No such"),
        ("echo x > /run/agentgym/commands; ls -A /run/agentgym | grep .", "Read-only|No such"),
        ("grep -q 'NoNewPrivs:.0' /proc/self/status", ""),
        ("kill -9 1; kill -0 1 && echo init lives; false", "init lives"),
        ("ls /dev/sda /dev/vda /dev/mem /dev/kmsg", "No such"),
    ],
)
def test_attacks_are_refused(sandbox: DockerSandbox, attack: str, answer: str) -> None:
    result = sandbox.run(attack, timeout_s=10)
    assert result.exit_code != 0
    assert any(part in result.stdout + result.stderr for part in answer.split("|")), result
    assert sandbox.run("echo alive").stdout == "alive\n"


@pytest.mark.docker
def test_nine_rights_of_root_are_left(sandbox: DockerSandbox) -> None:
    bits = [0, 1, 3, 4, 5, 6, 7, 10, 18]
    expected = f"{sum(1 << bit for bit in bits):016x}"
    assert sandbox.run("grep CapBnd /proc/self/status").stdout.split() == ["CapBnd:", expected]


@pytest.fixture(scope="module")
def small(docker_daemon: None) -> Iterator[DockerBackend]:
    made = DockerBackend(limits=BoxLimits(memory_bytes=64 << 20, max_pids=40))
    if not {"memory", "max_pids"} <= made.probe().isolation:
        made.close()
        pytest.skip("the daemon has no control groups here")
    yield made
    made.close()


@pytest.mark.docker
def test_a_fork_bomb_ends_at_its_deadline_and_harms_nobody(small: DockerBackend) -> None:
    bomb, neighbour = small.create(SandboxSpec()), small.create(SandboxSpec())
    assert bomb.run("f() { f | f & }; f; sleep 20", timeout_s=1).timed_out
    assert neighbour.run("/bin/echo fine").stdout == "fine\n"
    assert bomb.run("/bin/echo again; ls -d /proc/[0-9]* | wc -l").stdout.split()[0] == "again"
    bomb.close()
    neighbour.close()


@pytest.mark.docker
def test_a_memory_bomb_ends_alone(small: DockerBackend) -> None:
    """C074: told from a deadline and from a kill by the kernel's own count."""
    box = small.create(SandboxSpec())
    result = box.run("head -c 200M /dev/zero | tail -c 199M | wc -c; exit ${PIPESTATUS[1]}", timeout_s=20)
    assert (result.exit_code, result.oom_killed, result.timed_out) == (137, True, False)
    killed = box.run("bash -c 'kill -9 $$'")
    assert (killed.exit_code, killed.oom_killed) == (137, False)
    assert box.run("echo alive").stdout == "alive\n"
    box.close()


@pytest.mark.docker
def test_orphans_end_with_the_deadline(sandbox: DockerSandbox) -> None:
    """C033: also those that left their session; the kernel ends all before the container counts as ended."""
    sandbox.run("(setsid sleep 4321 &) ; (trap '' TERM HUP; sleep 4322 &)")
    assert sandbox.run("sleep 60", timeout_s=0.3).timed_out
    assert "sleep 432" not in sandbox.run("ps ax").stdout
    [container] = sandbox._daemon.api.containers(filters={"id": sandbox.container})
    assert container["State"] == "running"


@pytest.mark.docker
def test_what_is_lost_is_named(sandbox: DockerSandbox) -> None:
    sandbox.run("sleep 99 & exec 8</etc/passwd; echo x > /dev/shm/kept; echo 1.2.3.4 x >> /etc/hosts")
    with sandbox.snapshot() as snapshot:
        found = " ".join(snapshot.losses)
    assert all(name in found for name in ("(sleep 99)", "open file 8 (/etc/passwd)", "/dev/shm/kept", "/etc/hosts"))
    with pytest.raises(SandboxError, match="closed"):
        sandbox.close()
        sandbox.snapshot()


@pytest.mark.docker
def test_a_shell_that_hides_builtins_loses_its_state_and_no_file(sandbox: DockerSandbox) -> None:
    sandbox.run("echo 1 > file; enable -n declare")
    with sandbox.snapshot() as snapshot:
        assert (snapshot.level, snapshot.losses[-1][:11]) == (Level.FILES, "shell state")
        assert "/workspace/file" in snapshot.changes()
        [child] = snapshot.fork()
        assert child.run("cat file").stdout == "1\n"
        child.close()


@pytest.mark.docker
def test_a_killed_answerer_is_started_anew(sandbox: DockerSandbox) -> None:
    """The process that names what is alive is within the agent's reach."""
    assert (
        sandbox.run("for p in /proc/[0-9]*; do [[ ${p#/proc/} == $$ ]] || kill -9 ${p#/proc/}; done; x=5").stdout == ""
    )
    with sandbox.snapshot() as snapshot:
        assert snapshot.level == Level.SHELL
        [child] = snapshot.fork()
        assert child.run("echo $x").stdout == "5\n"
        child.close()


@pytest.mark.docker
def test_lies_to_the_host_end_only_their_own_shell(sandbox: DockerSandbox) -> None:
    """The first process has the agent's rights, so its pipes are within reach; nothing that must hold rests on them."""
    result = sandbox.run("(while :; do echo status 0 0; done) > /proc/1/fd/5", timeout_s=20)
    assert result.shell_restarted and not result.timed_out  # a status is never more than what the agent says
    assert sandbox.run("printf 'open file 9 (none)\\0end\\0' > /proc/1/fd/4; echo on").stdout == "on\n"
    with sandbox.snapshot() as snapshot:
        [child] = snapshot.fork()
        assert child.run("echo forked").stdout == "forked\n"
        child.close()


@pytest.mark.docker
def test_the_working_directory_may_be_renamed_or_deleted(sandbox: DockerSandbox) -> None:
    sandbox.run("mkdir here; cd here; mv ../here ../there; mkdir ../here")
    with sandbox.snapshot() as snapshot:
        [child] = snapshot.fork()
        assert child.run("pwd -P").stdout == "/workspace/there\n"
        child.close()
    sandbox.run("rmdir ../there")
    with sandbox.snapshot() as snapshot:
        assert snapshot.losses == ("working directory /workspace/there (deleted)",)


@pytest.mark.docker
def test_changes_reach_over_generations_and_whole_directories(backend: DockerBackend) -> None:
    files = (FileSpec("d/old", data=b"1"), FileSpec("d/keep", data=b"2"), FileSpec("e/f", data=b"3"))
    first = backend.create(SandboxSpec(files=files))
    first.run("echo x > one; rm /usr/bin/tac; ln one two")
    with first.snapshot() as snapshot:
        [second] = snapshot.fork()
    second.run("rm -r d e; mkdir d; echo 3 > d/new; echo y > /tmp/unseen; echo x > /file")
    with second.snapshot() as snapshot:
        found = {path: change.kind for path, change in snapshot.changes().items()}
    names = {path.removeprefix("/workspace/"): kind for path, kind in found.items()}
    assert names == {
        "one": "file",
        "two": "file",
        "/usr/bin/tac": "deleted",
        "d/old": "deleted",
        "d/keep": "deleted",
        "d/new": "file",
        "e": "deleted",
        "e/f": "deleted",
        "/file": "file",
    }
    first.close()
    second.close()


@pytest.mark.docker
def test_a_grader_sees_the_world_read_only_and_runs_on_the_pristine_base(sandbox: DockerSandbox) -> None:
    sandbox.run("echo 42 > answer; chmod 600 answer; printf '#!/bin/sh\\necho fake\\n' > /bin/cat; mkdir /grader")
    files = {"check.sh": b'[ "$(cat /world/workspace/answer)" = 42 ] && ! [ -e /workspace/answer ]'}
    with sandbox.snapshot() as snapshot:
        assert snapshot.inspect(files, "sh check.sh", timeout_s=10).exit_code == 0
        refused = snapshot.inspect(files, "echo x > /world/workspace/answer", timeout_s=10)
        assert refused.exit_code != 0 and "Read-only" in refused.stderr
        assert sandbox.run("ls -A /grader /world 2>/dev/null").stdout == "/grader:\n"
        assert ours(sandbox._daemon)[2] == 0


@pytest.mark.docker
def test_long_chains_become_short(sandbox: DockerSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon refuses the 125th layer; the limit is lowered so that the test is short."""
    monkeypatch.setattr(docker_box, "MAX_LAYERS", 5)
    box, depths = sandbox, []
    for turn in range(7):
        box.run(f"echo {turn} >> log; rm -f t{turn - 1}; touch t{turn}; x=${{x}}{turn}")
        with box.snapshot() as snapshot:
            [child] = snapshot.fork()
            depths.append(snapshot.num_layers)
            changed = snapshot.changes()
        if box is not sandbox:
            box.close()
        box = child
    assert max(depths) == 4 and depths.count(1) == 2
    assert box.run("cat log; ls; echo $x").stdout == "0\n1\n2\n3\n4\n5\n6\nlog\nt6\n0123456\n"
    assert sorted(changed) == ["/workspace/log", "/workspace/t6"]
    box.close()


@pytest.mark.docker
def test_a_tarball_of_a_link_is_never_followed(sandbox: DockerSandbox, tmp_path: Path) -> None:
    """What an archive of the sandbox names stays a name: nothing is unpacked here."""
    sandbox.run(f"ln -s {tmp_path} out; mkfifo pipe; ln -s /etc etc; cp /bin/true suid; chmod u+s suid")
    found = listing(sandbox._daemon, sandbox.container, "workspace")
    assert found["/workspace/out"].target == str(tmp_path)
    assert found["/workspace/suid"].mode & 0o7777 == 0o4755
    assert os.listdir(tmp_path) == []


@pytest.mark.docker
def test_a_file_that_changes_while_it_is_read_breaks_nothing(sandbox: DockerSandbox) -> None:
    sandbox.run("(while :; do head -c 3M /dev/zero > f; : > f; done) & sleep 0.1")
    for _ in range(8):
        with contextlib.suppress(PathRefused):
            assert not sandbox.read("f", max_bytes=2 << 20).strip(b"\0")
    sandbox.run("truncate -s 100G endless")
    assert sandbox.read("endless", max_bytes=10) == bytes(10)
    assert sandbox.run("echo fine").stdout == "fine\n"


@pytest.mark.docker
def test_dockerfiles_and_images_are_bases(backend: DockerBackend, tmp_path: Path) -> None:
    daemon = backend.daemon()
    daemon.api.tag(backend.base, "agentgym-test", "base")
    lines = ["FROM agentgym-test:base", "ENV COLOUR='deep blue' PATH=/opt/bin:/usr/bin:/bin", "COPY tool /opt/bin/"]
    (tmp_path / "Dockerfile").write_text("\n".join(lines))
    (tmp_path / "tool").write_text("#!/bin/sh\necho tool\n")
    (tmp_path / "tool").chmod(0o755)
    built = DockerBackend(dockerfile=str(tmp_path))
    named = DockerBackend("agentgym-test:base")
    try:
        box = built.create(SandboxSpec())
        assert box.run("tool; echo $COLOUR").stdout == "tool\ndeep blue\n"
        with box.snapshot() as snapshot:
            assert snapshot.changes() == {}
            [child] = snapshot.fork()
        assert child.run("tool; echo $COLOUR").stdout == "tool\ndeep blue\n"
        assert named.create(SandboxSpec()).run("tool").exit_code == 127
    finally:
        built.close()
        named.close()
        daemon.api.remove_image("agentgym-test:base", noprune=True)
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY tool /\nVOLUME /data\n")
    with pytest.raises(BackendUnavailable, match="volumes /data"):
        DockerBackend(dockerfile=str(tmp_path)).probe()
    with pytest.raises(BackendUnavailable, match="no-such-image"):
        DockerBackend("no-such-image:1").probe()


@pytest.mark.docker
def test_nothing_is_left_after_close(docker_daemon: None) -> None:
    backend, watcher = DockerBackend(), Daemon()
    box = backend.create(SandboxSpec(files=(FileSpec("a", data=b"1"),)))
    box.run("sleep 500 & echo b > b")
    snapshot = box.snapshot()
    [child] = snapshot.fork()
    folder, owner = Path(backend._folder), backend.daemon().owner
    assert ours(watcher, owner)[0] == 2 and folder.is_dir()
    child.snapshot().release()
    backend.close()
    backend.close()
    assert ours(watcher, owner) == [0, 0, 0] and not folder.exists()
    watcher.close()


@pytest.mark.docker
def test_images_go_as_soon_as_nothing_stands_on_them(backend: DockerBackend) -> None:
    daemon = backend.daemon()
    box = backend.create(SandboxSpec())
    before = ours(daemon)
    first = box.snapshot()
    [child] = first.fork()
    second = child.snapshot()
    first.release()
    child.close()
    [grandchild] = second.fork()
    assert ours(daemon)[1] == before[1] + 2
    second.release()
    assert grandchild.run("echo on").stdout == "on\n"
    grandchild.close()
    assert ours(daemon) == before
    box.close()


_CRASH = """
import os, signal
from agentgym.sandbox import SandboxSpec
from agentgym.sandboxes.docker import DockerBackend
backend = DockerBackend()
box = backend.create(SandboxSpec())
snapshot = box.snapshot()
[child] = snapshot.fork()
child.run("sleep 1000 &")
[last] = child.snapshot().fork()
last._daemon.api.pause(last.container)
print(last._daemon.owner, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.docker
def test_gc_removes_what_a_killed_process_left_and_nothing_else(sandbox: DockerSandbox, workplace: Path) -> None:
    """Also a container that was paused for a snapshot at that moment."""
    killed = subprocess.run([sys.executable, "-c", _CRASH], capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    owner = killed.stdout.strip()
    daemon = sandbox._daemon
    before = ours(daemon)
    assert ours(daemon, owner)[0] >= 2
    told = [line for line in collect_garbage(dry_run=True) if line.startswith("docker")]
    assert len(told) == sum(ours(daemon, owner))
    assert len([line for line in collect_garbage() if line.startswith("docker")]) == len(told)
    assert ours(daemon, owner) == [0, 0, 0]
    assert ours(daemon) == before
    assert sandbox.run("echo mine").stdout == "mine\n"
    assert not list(Path(os.environ["AGENTGYM_STATE"]).iterdir())
