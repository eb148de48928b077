"""What every backend promises, run on each one that this machine has."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentgym.errors import BackendUnavailable, PathRefused, SandboxError, SnapshotError, SnapshotUnsupported
from agentgym.sandbox import Backend, FileSpec, Sandbox, SandboxSpec, get_backend
from agentgym.types import Level

BACKENDS = [
    "local",
    pytest.param("namespace", marks=pytest.mark.sandbox),
    pytest.param("docker", marks=pytest.mark.docker),
]


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "docker":
        request.getfixturevalue("docker_daemon")
    try:
        return get_backend(request.param)
    except BackendUnavailable as refused:
        pytest.skip(str(refused))


@pytest.fixture
def sandbox(backend: Backend) -> Iterator[Sandbox]:
    made = backend.create(SandboxSpec(files=(FileSpec("note.txt", data=b"first\n"),), env=(("GREETING", "hi there"),)))
    yield made
    made.close()


def fork(sandbox: Sandbox) -> Sandbox:
    with sandbox.snapshot() as snapshot:
        return snapshot.fork()[0]


def out(sandbox: Sandbox, command: str) -> str:
    return sandbox.run(command).stdout


def test_starts_in_its_folder_with_its_files_and_variables(sandbox: Sandbox) -> None:
    assert out(sandbox, 'cat note.txt; echo "$GREETING"; ls') == "first\nhi there\nnote.txt\n"


def test_nothing_of_the_host_environment_is_inherited(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """C088."""
    monkeypatch.setenv("MY_API_KEY", "secret-4711")
    sandbox = backend.create(SandboxSpec())
    try:
        assert "secret-4711" not in out(sandbox, "env; set; cat /proc/self/environ /proc/$$/environ /proc/1/environ")
    finally:
        sandbox.close()


def test_status_and_both_streams_are_told_apart(sandbox: Sandbox) -> None:
    result = sandbox.run("echo out; echo err >&2; exit_with() { return 7; }; exit_with")
    assert (result.exit_code, result.stdout, result.stderr) == (7, "out\n", "err\n")
    assert not result.shell_restarted


def test_shell_state_lives_from_one_command_to_the_next(sandbox: Sandbox) -> None:
    sandbox.run("mkdir -p a/b; cd a/b; x=5; f() { echo f$1; }; alias hello='echo aliased'")
    assert out(sandbox, "basename $PWD; echo $x; f 1; hello") == "b\n5\nf1\naliased\n"


def test_prompt_variables_mean_nothing(sandbox: Sandbox) -> None:
    """C040: end of command is not guessed from a prompt."""
    assert sandbox.run("PS1=weird; PS2=; PROMPT_COMMAND='echo x'").stdout == ""
    assert sandbox.run("echo ok").stdout == "ok\n"


def test_errexit_does_not_leak_into_the_next_command(sandbox: Sandbox) -> None:
    """C041."""
    assert sandbox.run("set -euo pipefail; true").exit_code == 0
    result = sandbox.run("grep nothing nofile; echo still")
    assert result.stdout == "still\n" and not result.shell_restarted


def test_errexit_ends_its_own_command_and_a_fresh_shell_answers(sandbox: Sandbox) -> None:
    result = sandbox.run("x=1; set -e; false; echo never")
    assert (result.exit_code, result.stdout, result.shell_restarted) == (1, "", True)
    assert out(sandbox, 'echo "[$x]"; cat note.txt') == "[]\nfirst\n"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("cd a b", 1),
        ("echo 'unterminated", 2),
        ("(((", 2),
        ("printf no-newline", 0),
        ("break; continue", 0),
        ("f() {", 2),
        ("cat <<EOF\nno end", 0),
        ("return 3", 2),
        ("\x01\x02", 127),
        ("exit 9", 9),
    ],
)
def test_odd_commands_end_and_the_next_one_works(sandbox: Sandbox, command: str, code: int) -> None:
    """C042."""
    result = sandbox.run(command, timeout_s=5)
    assert (result.exit_code, result.timed_out) == (code, False)
    assert sandbox.run("echo next").stdout == "next\n"


def test_a_trace_shows_the_command_and_nothing_of_ours(sandbox: Sandbox) -> None:
    assert sandbox.run("set -x; x=1; echo $x").stderr == "+++ x=1\n+++ echo 1\n"
    assert sandbox.run("echo quiet").stderr == ""


def test_a_shell_holds_no_descriptor_of_ours(sandbox: Sandbox) -> None:
    """Neither the first one, nor one that took the place of another, nor a child's."""
    listed = (
        "for fd in /proc/self/fd/*; do echo ${fd##*/}; done | sort -n | tr '\\n' ' '; readlink /proc/$$/fd/[3-9]; true"
    )
    expected = sandbox.run(listed).stdout
    assert sandbox.run("exit 1").shell_restarted
    child = fork(sandbox)
    assert sandbox.run(listed).stdout == child.run(listed).stdout == expected
    child.close()


def test_output_without_a_final_newline_is_kept_as_it_is(sandbox: Sandbox) -> None:
    assert out(sandbox, "printf no-newline") == "no-newline"


def test_messages_count_lines_as_bash_does_whatever_came_before(sandbox: Sandbox) -> None:
    before = sandbox.run("true\nnosuchprogram").stderr
    child = fork(sandbox)
    try:
        assert before == "bash: line 2: nosuchprogram: command not found\n"
        assert child.run("true\nnosuchprogram").stderr == sandbox.run("true\nnosuchprogram").stderr == before
    finally:
        child.close()


def test_a_background_job_does_not_hold_the_call(sandbox: Sandbox) -> None:
    """C030."""
    result = sandbox.run("sleep 300 & echo up", timeout_s=20)
    assert (result.exit_code, result.stdout, result.timed_out) == (0, "up\n", False)
    assert result.duration_s < 5
    assert out(sandbox, "kill -0 $! && echo alive") == "alive\n"


def test_a_deadline_ends_the_whole_tree_and_keeps_the_output(sandbox: Sandbox) -> None:
    """C033, C039."""
    result = sandbox.run("echo step1; trap '' TERM; sleep 1000 & sleep 1001", timeout_s=0.5)
    assert (result.timed_out, result.exit_code, result.stdout) == (True, None, "step1\n")
    assert "sleep 100" not in out(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").replace("cat", "")
    assert sandbox.run("echo usable").stdout == "usable\n"


def test_a_killed_shell_is_told_from_a_deadline(sandbox: Sandbox) -> None:
    """C074, but for memory kills: there is no memory limit yet that could make one."""
    result = sandbox.run("kill -9 $$")
    assert (result.killed, result.timed_out, result.exit_code) == (True, False, None)
    assert sandbox.run("echo usable").stdout == "usable\n"


@pytest.mark.parametrize(("size", "truncated"), [(9999, False), (10000, False), (10001, True), (5_000_000, True)])
def test_output_is_cut_in_the_middle_and_counted(sandbox: Sandbox, size: int, truncated: bool) -> None:
    """C037."""
    result = sandbox.run(f"head -c {size} /dev/zero | tr '\\0' x; exit 3 2>/dev/null", max_output_bytes=10_000)
    assert (result.truncated, result.stdout_bytes) == (truncated, size)
    if truncated:
        assert f"[... {size - 10_000} bytes cut ...]" in result.stdout
        assert result.stdout.startswith("xxxx") and result.stdout.endswith("xxxx")
        assert result.stdout.count("x") == 10_000


def test_characters_split_across_writes_arrive_whole(sandbox: Sandbox) -> None:
    """C038."""
    text = "日本語é"
    octal = " ".join(f"\\\\{byte:03o}" for byte in text.encode())
    assert out(sandbox, f"for b in {octal}; do printf $b; done") == text
    assert sandbox.run(r"printf 'a\377b'").stdout == "a�b"


def test_many_commands_leak_no_descriptors(sandbox: Sandbox) -> None:
    """C034: also above descriptor 1023, where select would break."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        sandbox.run(":")
    assert len(os.listdir("/proc/self/fd")) <= before + 20  # the pool's blanks come and go
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        assert fork_runs(sandbox) == "above\n"
    finally:
        for fd in held:
            os.close(fd)


def fork_runs(sandbox: Sandbox) -> str:
    child = fork(sandbox)
    try:
        return child.run("echo above").stdout
    finally:
        child.close()


STATE = r"""
cd sub; cd inner; umask 027
x=$'two\nlines'; declare -i n=41; declare -a list=(a "b c" $'d\ne'); declare -A map=([k]="v 1" [q]='$HOME')
export shown=1; readonly fixed=7; declare -n ref=x; unset GREETING
f() { local y=$1; echo "f $y"; }; g() { [[ $1 == @(a|b) ]] && echo ext; }; export -f f
alias ll='ls -l'; shopt -s nullglob extglob; set -o noclobber; set +o braceexpand
trap 'echo usr' USR1; ulimit -n 123; set -- one "two three"
"""
PROBE = r"""
basename $PWD; basename "$OLDPWD"; umask; echo "$x|$((n+1))|${list[2]}|${map[k]}|${map[q]}|$ref|${GREETING-unset}|$fixed"
env | grep shown; f 1; g a; bash -c 'f 2'; alias ll; shopt nullglob extglob; set -o | grep -E 'noclobber|braceexp'
trap -p USR1; ulimit -n; echo "$# $2"; echo {a,b}; cat ../../note.txt
"""


def test_a_fork_keeps_the_whole_shell(sandbox: Sandbox) -> None:
    sandbox.run("mkdir -p sub/inner")
    sandbox.run("shopt -s extglob\n" + STATE)
    child = fork(sandbox)
    try:
        expected, found = sandbox.run(PROBE), child.run(PROBE)
        assert "two\nlines|42|d\ne|v 1|$HOME|two\nlines|unset|7" in expected.stdout
        assert (found.stdout, found.stderr) == (expected.stdout, expected.stderr)
    finally:
        child.close()


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plain=TEXT, items=st.lists(TEXT, max_size=4), body=TEXT)
def test_any_value_survives_a_fork(sandbox: Sandbox, plain: str, items: list[str], body: str) -> None:
    def quoted(text: str) -> str:
        return "'" + text.replace("'", "'\\''") + "'"

    listed = " ".join(map(quoted, items))
    sandbox.run(f"p={quoted(plain)}; l=({listed}); alias odd={quoted(body)}; trap {quoted(body)} USR2; set -- {listed}")
    child = fork(sandbox)
    try:
        probe = 'printf "<%s>" "$p" "${l[@]}" "$@"; alias odd; trap -p USR2'
        assert child.run(probe).stdout == sandbox.run(probe).stdout
    finally:
        child.close()


MANIFEST = "find . -mindepth 1 -printf '%p %y %m %T@ %l ' -type f -printf '%s ' -exec sha256sum {} \\; -o -mindepth 1 -printf '\\n' | sort"


def test_a_fork_keeps_every_file_with_its_mode_and_time(sandbox: Sandbox) -> None:
    """C043, C044: also what was written a moment ago and never synced."""
    sandbox.run("for i in $(seq 200); do echo $i > file$i; chmod 6$((i % 8))4 file$i; done; mkdir -m 1777 d; ln -s d l")
    sandbox.run("touch -d '2001-02-03 04:05:06.789' file7; printf tail >> file8; truncate -s 1M sparse; mkfifo pipe")
    expected = sandbox.run(MANIFEST).stdout
    child = fork(sandbox)
    again = fork(child)
    try:
        assert len(expected.splitlines()) == 205
        assert sandbox.run(MANIFEST).stdout == expected
        missing = sandbox.capabilities.missing
        if "file_times" in missing:  # whole seconds are kept, and that is said
            expected = re.sub(r" (\d+)\.\d+ ", r" \1.0000000000 ", expected)
        assert child.run(MANIFEST).stdout == again.run(MANIFEST).stdout == expected
        if "sparse_files" not in missing:
            assert out(child, "stat -c %b sparse") == "0\n"
    finally:
        child.close()
        again.close()


def test_siblings_and_parent_do_not_see_each_other(sandbox: Sandbox) -> None:
    """C044, C048: also in place, on what is the same inode at the fork."""
    sandbox.run("echo marker > shared")
    with sandbox.snapshot() as snapshot:
        boxes = [sandbox, *snapshot.fork(3)]
        for number, box in enumerate(boxes):
            seen = box.run("cat shared; pwd; ls -la")
            assert seen.stdout.startswith("marker\n"), (number, seen)
            box.run(f"echo {number} >> shared; printf {number} | dd of=note.txt conv=notrunc 2>/dev/null")
        for number, box in enumerate(boxes):
            assert out(box, "cat shared note.txt") == f"marker\n{number}\n{number}irst\n"
        for box in boxes[1:]:
            box.close()


def test_parallel_children_write_the_same_paths(sandbox: Sandbox) -> None:
    """C048."""
    with sandbox.snapshot() as snapshot:
        children = snapshot.fork(4)
    seen: dict[int, set[str]] = {}

    def work(number: int) -> None:
        for _ in range(3):
            children[number].run(f"for i in $(seq 30); do echo {number} > file$i; done")
            seen.setdefault(number, set()).add(children[number].run("cat file* | sort -u").stdout)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for child in children:
        child.close()
    assert seen == {number: {f"{number}\n"} for number in range(4)}
    assert sandbox.run("ls").stdout == "note.txt\n"


def test_a_sealed_snapshot_never_changes(sandbox: Sandbox) -> None:
    sandbox.run("echo one > file; exec 5>>log; echo early >&5")
    with sandbox.snapshot() as snapshot:
        digest = snapshot.digest()
        assert any("log" in loss for loss in snapshot.losses) or sandbox.backend == "local"
        sandbox.run("echo late >&5; echo more >> file; rm note.txt; mkdir new")
        [child] = snapshot.fork()
        child.run("echo child >> file; chmod 600 note.txt; x=1")
        assert snapshot.digest() == digest
        [second] = snapshot.fork()
        assert out(second, "cat file note.txt log; ls") == "one\nfirst\nearly\nfile\nlog\nnote.txt\n"
        assert out(sandbox, "cat log") == "early\nlate\n"
        child.close()
        second.close()


def test_equal_states_have_equal_digests(sandbox: Sandbox) -> None:
    sandbox.run("echo one > file")
    with sandbox.snapshot() as first:
        [left, right] = first.fork(2)
    left.run("echo two > a; x=1")
    right.run("x=1; echo two > a")
    with left.snapshot() as of_left, right.snapshot() as of_right:
        assert of_left.digest() == of_right.digest()
    right.run("x=2")
    with left.snapshot() as of_left, right.snapshot() as of_right:
        assert of_left.digest() != of_right.digest()
    left.close()
    right.close()


def test_what_is_alive_is_named_as_lost_and_can_be_required(sandbox: Sandbox) -> None:
    """C045, C047: never a success without the data."""
    sandbox.run("sleep 321 & echo started > state")
    with sandbox.snapshot() as snapshot:
        assert any(loss.startswith("process") for loss in snapshot.losses)
        [child] = snapshot.fork()
        assert out(child, "cat state; pgrep -x sleep >/dev/null || true") == "started\n"
        child.close()
    assert out(sandbox, "kill -0 $! && echo undisturbed") == "undisturbed\n"
    with pytest.raises(SnapshotUnsupported, match="process"):
        sandbox.snapshot(require=Level.PROCESS)


def test_children_outlive_their_parent_and_the_snapshot(sandbox: Sandbox) -> None:
    """C050, C052."""
    sandbox.run("echo kept > file")
    snapshot = sandbox.snapshot()
    [child] = snapshot.fork()
    snapshot.release()
    sandbox.close()
    with child.snapshot() as again:
        [grandchild] = again.fork()
    assert out(child, "cat file") == out(grandchild, "cat file") == "kept\n"
    child.close()
    grandchild.close()


def test_released_and_closed_things_say_so(sandbox: Sandbox) -> None:
    snapshot = sandbox.snapshot()
    snapshot.release()
    snapshot.release()
    with pytest.raises(SnapshotError, match="released"):
        snapshot.fork()
    sandbox.close()
    sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run("true")


def test_random_does_not_depend_on_forks(sandbox: Sandbox) -> None:
    sandbox.run("echo $RANDOM")
    child = fork(sandbox)
    try:
        assert out(sandbox, "echo $RANDOM $RANDOM") == out(child, "echo $RANDOM $RANDOM")
        assert out(sandbox, "echo $RANDOM") == out(child, "echo $RANDOM")
    finally:
        child.close()


def test_seeds_differ_and_repeat(backend: Backend) -> None:
    drawn = []
    for seed in (0, 1, 0):
        box = backend.create(SandboxSpec(seed=seed))
        drawn.append(out(box, "echo $RANDOM $RANDOM"))
        box.close()
    assert drawn[0] == drawn[2] != drawn[1]


def test_files_go_in_and_out(sandbox: Sandbox) -> None:
    sandbox.write("deep/er/data.bin", bytes(range(256)), mode=0o600)
    assert sandbox.read("deep/er/data.bin") == bytes(range(256))
    assert sandbox.read("deep/er/data.bin", max_bytes=3) == b"\0\1\2"
    assert out(sandbox, "stat -c '%a %s' deep/er/data.bin") == "600 256\n"
    sandbox.write("deep/er/data.bin", b"short")
    assert sandbox.read("deep/er/data.bin") == b"short"


@pytest.mark.parametrize("path", ["absent", "pipe", "folder", "no\0pe", "loop"])
def test_what_is_no_file_is_refused(sandbox: Sandbox, path: str) -> None:
    sandbox.run("mkfifo pipe; mkdir folder; ln -s loop loop")
    with pytest.raises(PathRefused, match=r"cannot be read|NUL|null"):
        sandbox.read(path)


def test_links_do_not_leave_the_sandbox(sandbox: Sandbox, tmp_path: Path) -> None:
    """Attack: a host file is named by a link that the agent made."""
    secret = tmp_path / "secret"
    secret.write_text("host secret")
    up = "../" * 30
    sandbox.run(
        f"ln -s {secret} absolute; ln -s {up}{secret} relative; ln -s {tmp_path} folder; ln -s /proc/1/root magic"
    )
    for path in ("absolute", "relative", "folder/secret", f"magic{secret}", f"{up}{secret}", "/proc/self/environ"):
        with pytest.raises(PathRefused):
            sandbox.read(path)
    with pytest.raises(PathRefused):
        sandbox.write("magic/planted", b"x")
    for path in ("absolute", "folder/secret"):
        try:
            sandbox.write(path, b"overwritten")
        except PathRefused:
            continue
    assert secret.read_text() == "host secret"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["secret"]


def test_changes_name_what_differs_from_the_start(sandbox: Sandbox) -> None:
    sandbox.run("mkdir made; echo hi > made/new; touch -d @0 note.txt; ln -s note.txt link")
    with sandbox.snapshot() as snapshot:
        found = {path.rpartition("/workspace")[2]: change for path, change in snapshot.changes().items()}
    assert sorted(found) == ["/link", "/made", "/made/new", "/note.txt"]
    assert (found["/made"].kind, found["/link"].target, found["/made/new"].size_bytes) == ("dir", "note.txt", 3)
    sandbox.run("rm -r made link note.txt")
    with sandbox.snapshot() as snapshot:
        assert {path.rpartition("/")[2]: c.kind for path, c in snapshot.changes().items()} == {"note.txt": "deleted"}
