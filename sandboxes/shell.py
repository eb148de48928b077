"""The host's side of one bash: commands in, output and status back, state out.

Owns the protocol and nothing of isolation, so that every backend on this machine can use it. Bash runs one
loop, all on line 1, that reads a text from a pipe, evaluates it with the control descriptors closed, and
reports the status on another pipe. There is no prompt to imitate and no end marker in the output to fake,
and messages count lines as `bash -c` does, however many commands or forks came before. Status and output
still come from untrusted code; nothing here is ever a reward.

What it keeps between commands is the whole shell. The options e, u, n, v, x last for one command: kept,
they would end or silence the session at the next harmless failure.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import select
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentgym.errors import SandboxError
from agentgym.sandbox import ExecResult
from agentgym.types import Level

COMMAND_FD, STATUS_FD, SCRIPT_FD = 30, 31, 32
LOOP_NAME = "__agentgym_l"
_OWN_FD = 255
"""Where bash itself keeps the script it reads: closed in every program that it starts, so commands come there."""
# functions, their attributes, variables, settings, aliases, traps, limits and directory; a NUL ends each part, and
# no value has one
_CAPTURE = (
    r"{ \builtin printf 'begin\0'; \builtin declare -f; \builtin printf '\0'; \builtin declare -F; "
    r"\builtin printf '\0'; \builtin declare -p; \builtin printf '\0'; "
    r"""\builtin printf 'set --'; \builtin printf ' %s' "${@@Q}"; \builtin printf '\n'; """
    r"\builtin umask -p; \builtin shopt -p; \builtin set +o; \builtin printf '\0'; "
    r"\builtin alias -p; \builtin printf '\0'; \builtin trap -p; \builtin printf '\0'; "
    r"\builtin ulimit -S -a; \builtin ulimit -H -a; "
    r"""if [[ . -ef $PWD ]]; then \builtin printf 'cd -- %s\n' "${PWD@Q}"; fi; \builtin printf '\0'; } """
    rf">&{STATUS_FD} 2>/dev/null"
)
# The report comes first in the loop, so that it is also made after a stray `break` or `continue`. Options are reset
# only where one is set: what would hide the trace of that costs nine system calls, a tenth of a built-in command.
_LOOP = (
    rf"exec {COMMAND_FD}<&-; unset {LOOP_NAME}; while :; "
    r"do while case $- in *[eunvx]*) { \set +eunvx; } 2>/dev/null;; esac; "
    rf"""\builtin printf '%s %s\0' "$__agentgym_n" "$__agentgym_s" >&{STATUS_FD}; """
    rf"IFS=' ' \builtin read -r -d '' -u {_OWN_FD} __agentgym_n __agentgym_r || \builtin exit; "
    rf"IFS= \builtin read -r -d '' -u {_OWN_FD} __agentgym_c || \builtin exit; "
    r"do __agentgym_s=0; case $__agentgym_n in [0-9]*) RANDOM=$__agentgym_r; "
    rf'\builtin eval "$__agentgym_c" {STATUS_FD}>&-;; state) {_CAPTURE};; '
    r'*) \builtin eval "$__agentgym_c";; esac; __agentgym_s=$?; done; done; \builtin exit'
)
LOOP_ENV = {LOOP_NAME: _LOOP}
"""How the loop reaches bash: what it reads from a pipe it reads byte by byte, and this is read in one go."""
_TRACE = re.compile(r"\++ __agentgym_s=\d+\n\++ case \$- in\n\Z")
"""What `set -x` shows of the loop after a command."""
_DRAIN_BYTES = 1 << 20
_CHUNK = 1 << 16
_PARTS = 7
_VOLATILE = re.compile(
    rb"^declare -\S+ (?:BASHPID|BASH_ARGC|BASH_ARGV|BASH_ARGV0|BASH_COMMAND|BASH_LINENO|BASH_SOURCE|BASH_SUBSHELL"
    rb"|BASH_VERSINFO|BASHOPTS|SHELLOPTS|BASH_VERSION|COMP_WORDBREAKS|DIRSTACK|EPOCHREALTIME|EPOCHSECONDS|EUID|FUNCNAME"
    rb"|GROUPS|__agentgym_.|HISTCMD|HOSTNAME|LINENO|MACHTYPE|OSTYPE|PIPESTATUS|PPID|RANDOM|SRANDOM|UID|_)(?:=.*)?$"
)
_PARSING = (b"extglob", b"expand_aliases")
"""Options that change how functions are read, so that they are set after them."""
_LIMIT = re.compile(rb"^.*\((?:[^()]*, )?-(\w)\)\s+(\S+)$")


@dataclass(frozen=True, slots=True)
class Captured:
    """Output that was collected under a limit."""

    text: str
    total_bytes: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one command ended: with a status, at the deadline, or with the shell itself."""

    status: int | None
    ended: str
    """"status", "deadline" or "shell"."""
    output: Captured
    errors: Captured


@dataclass(frozen=True, slots=True)
class ShellState:
    """Everything of a shell that a script can bring back, between two commands."""

    script: bytes

    def digest(self) -> str:
        """A hash without what always differs, such as SECONDS."""
        lines = [line for line in self.script.split(b"\n") if not line.startswith(b"declare -i SECONDS=")]
        return hashlib.sha256(b"\n".join(lines)).hexdigest()


class NoState(SandboxError):
    """A shell does not give its state: what was typed into it has redefined what the question is made of."""


HIDDEN_STATE = "shell state (its functions hide built-ins)"
"""The loss that a snapshot names where its shell gave no state."""


def level_kept(losses: Sequence[str]) -> Level:
    """What a snapshot with these losses keeps: the shell, or only its files."""
    return Level.FILES if HIDDEN_STATE in losses else Level.SHELL


class Collector:
    """Keeps head and tail of a stream in bounded memory and counts the rest."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit = limit_bytes
        self.half = limit_bytes // 2
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def add(self, chunk: bytes) -> None:
        """Take the next bytes."""
        self.total += len(chunk)
        room = self.limit - len(self.head)
        if room > 0:
            self.head += chunk[:room]
            chunk = chunk[room:]
        if chunk:
            self.tail += chunk
            if len(self.tail) > 4 * self.limit + _CHUNK:
                del self.tail[: len(self.tail) - self.limit]

    def captured(self) -> Captured:
        """The text, cut in the middle with a count where it was too long; invalid bytes are replaced."""
        if self.total <= self.limit:
            return Captured(self.head.decode("utf-8", "replace"), self.total, False)
        keep = self.limit - self.half
        tail = (self.head + self.tail)[-keep:] if keep else b""
        cut = self.total - self.half - keep
        text = self.head[: self.half].decode("utf-8", "ignore") + f"\n[... {cut} bytes cut ...]\n"
        return Captured(text + tail.decode("utf-8", "ignore"), self.total, True)


def result(outcome: Outcome, status: int | None, duration_s: float) -> ExecResult:
    """The outcome as callers see it; `status` is the shell's own where it ended, negative for a signal."""
    ended = outcome.ended == "shell"
    killed = ended and status is not None and status < 0
    return ExecResult(
        None if killed or outcome.ended == "deadline" else status,
        outcome.output.text,
        outcome.errors.text,
        timed_out=outcome.ended == "deadline",
        killed=killed,
        shell_restarted=outcome.ended != "status",
        truncated=outcome.output.truncated or outcome.errors.truncated,
        stdout_bytes=outcome.output.total_bytes,
        stderr_bytes=outcome.errors.total_bytes,
        duration_s=duration_s,
    )


def make_pipes() -> tuple[list[int], list[int]]:
    """Four pipes: our ends (commands, output, errors, status) and the shell's, in the same order.

    The loop is called already: a shell that starts on them reports once on the status pipe when it is ready.
    """
    ours, theirs = [], []
    for index in range(4):
        read, write = os.pipe2(os.O_CLOEXEC)
        mine, other = (write, read) if index == 0 else (read, write)
        flags = fcntl.fcntl(mine, fcntl.F_GETFL)
        fcntl.fcntl(mine, fcntl.F_SETFL, flags | os.O_NONBLOCK)
        ours.append(mine)
        theirs.append(other)
    os.write(ours[0], f'\\eval "${LOOP_NAME}"\n'.encode())
    return ours, theirs


def script_file(script: bytes) -> int:
    """A file in memory that the shell reads at its start: one read call instead of one a byte."""
    fd = os.memfd_create("script", os.MFD_CLOEXEC)
    os.write(fd, script)
    return fd


def fresh_script(env: Sequence[tuple[str, str]], workdir: str) -> bytes:
    """The state of a shell in which nothing was typed yet."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in env]
    lines += ["shopt -s expand_aliases", "umask 0022", f"cd -- {shlex.quote(workdir)}", "unset OLDPWD"]
    return os.fsencode("\n".join(lines) + "\n")


class Shell:
    """A running bash; owns our ends of its pipes."""

    def __init__(self, fds: list[int], alive_fd: int) -> None:
        """Take over the descriptors of `make_pipes`.

        Args:
            fds: Our ends.
            alive_fd: Becomes readable when the shell ends; stays the caller's.
        """
        self.commands, self.output, self.errors, self.status = fds
        self.alive_fd = alive_fd
        self._status_bytes = bytearray()
        self._poller = select.poll()
        for fd in (self.output, self.errors, self.status, alive_fd):
            self._poller.register(fd, select.POLLIN)
        self._prelude = f"start 0\0\\. /dev/fd/{SCRIPT_FD} >/dev/null 2>&1;exec {SCRIPT_FD}<&-\0".encode()

    def run(self, command: str, number: int, *, timeout_s: float, max_output_bytes: int, random_seed: int) -> Outcome:
        """Run a command to its end, its deadline, or the shell's death.

        Args:
            command: Any text without NUL.
            number: How many commands ran in this state's past; the shell can see it.
            timeout_s: From now.
            max_output_bytes: Of each stream.
            random_seed: Seeds RANDOM, so that what it draws does not depend on whether the shell was forked.
        """
        collectors = (Collector(max_output_bytes), Collector(max_output_bytes))
        status, ended, _ = self._exchange(command, str(number % 10), 0, timeout_s, collectors, random_seed)
        errors = collectors[1].captured()
        if errors.text.endswith("in\n") and (trace := _TRACE.search(errors.text)):
            text = errors.text[: trace.start()]
            errors = Captured(text, errors.total_bytes - len(trace[0]), errors.truncated)
        return Outcome(status, ended, collectors[0].captured(), errors)

    def settings(self) -> frozenset[bytes]:
        """Lines of the state that a shell in which nothing was typed has as well."""
        _, _, variables, settings, _, _, rest = self._state_parts(10.0)
        return frozenset([*variables, *settings, *rest]) - {b""}

    def _state_parts(self, timeout_s: float, meanwhile: Callable[[], None] = lambda: None) -> list[list[bytes]]:
        sink = (Collector(0), Collector(0))
        _, ended, parts = self._exchange("", "state", _PARTS, timeout_s, sink, meanwhile=meanwhile)
        if ended != "status" or len(parts) != _PARTS + 1:
            raise NoState(f"the shell does not give its state ({ended}); its functions may hide built-ins")
        return [part.split(b"\n") for part in parts[1:]]

    def capture(
        self, defaults: frozenset[bytes], *, timeout_s: float = 10.0, meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[ShellState, bool]:
        """The state, and whether the working directory could be named.

        Args:
            defaults: Lines that need not be replayed, from `settings` of a shell just started.
            timeout_s: For the shell to answer.
            meanwhile: Called while the shell writes.

        Raises:
            NoState: the shell does not answer.
        """
        parts = self._state_parts(timeout_s, meanwhile)
        functions, attributes, variables, settings, aliases, traps, rest = parts
        said = (
            (variables, b"declare "),
            (settings, b"umask "),
            (settings, b"shopt "),
            (settings, b"set -o"),
            (rest, b"open f"),
        )
        if not all(any(line.startswith(start) for line in part) for part, start in said):
            raise NoState("the shell does not give its whole state; its built-ins may be disabled")
        kept = [line for line in variables if line not in defaults and not _VOLATILE.match(line)]
        # unset first: a starting bash marks it as exported, and declaring it would keep the mark
        oldpwd = [b"unset OLDPWD", *(line for line in kept if re.match(rb"^declare -\S+ OLDPWD=", line))]
        moves = [line for line in rest if line.startswith(b"cd -- ")][-1:]
        switches = [b"shopt -s " + name for name in _PARSING if b"shopt -s " + name in settings]
        script = [
            b"unset PATH HOSTNAME PS4",
            *kept,
            *(line for line in settings if line not in defaults and line[9:] not in _PARSING),
            *(b"ulimit -%s %s" % limit for limit in _changed_limits(rest, defaults)),
            *moves,
            *oldpwd,
            # from here on names may mean something else: functions are read with no alias about, traps come last
            b"shopt -u expand_aliases",
            *aliases,
            b"shopt -s extglob",
            *functions,
            *(b"\\builtin " + line for line in attributes if line and not line.startswith(b"declare -f ")),
            b"\\builtin shopt -u extglob expand_aliases",
            *(b"\\builtin " + line for line in switches),
            *traps,
        ]
        return ShellState(b"\n".join(script) + b"\n"), bool(moves)

    def change_root(self, physical: str | None, *, timeout_s: float = 10.0) -> bool:
        """Enter the working directory anew after the root changed below the shell; False if it cannot."""
        where = "${PWD@Q}" if physical is None else _in_double_quotes(_quoted(physical))
        text = (
            f'if [[ -v OLDPWD ]]; then \\eval "\\cd -- {where} && OLDPWD=${{OLDPWD@Q}}"; '
            f'else \\eval "\\cd -- {where}" && \\unset OLDPWD; fi >/dev/null 2>&1'
        )
        status, ended, _ = self._exchange(text, "root", 0, timeout_s, (Collector(0), Collector(0)))
        return ended == "status" and status == 0

    def close(self) -> None:
        """Close our ends."""
        for fd in (self.commands, self.output, self.errors, self.status):
            os.close(fd)

    def _exchange(
        self,
        text: str,
        label: str,
        num_parts: int,
        timeout_s: float,
        collectors: tuple[Collector, Collector],
        random_seed: int = 0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[int | None, str, list[bytes]]:
        pending = memoryview(self._prelude + os.fsencode(f"{label} {random_seed}\0{text}\0"))
        self._prelude = b""
        parts: list[bytes] = []
        deadline = time.monotonic() + timeout_s
        pending = self._push(pending)
        if pending:
            self._poller.register(self.commands, select.POLLOUT)
        try:
            meanwhile()
            while True:
                left = deadline - time.monotonic()
                ready = self._poller.poll(max(0.0, left) * 1000)
                if not ready:
                    if left <= 0:
                        return None, "deadline", parts
                    continue
                died = False
                for fd, _ in ready:
                    if fd == self.output:
                        self._read_into(fd, collectors[0])
                    elif fd == self.errors:
                        self._read_into(fd, collectors[1])
                    elif fd == self.commands:
                        pending = self._push(pending)
                        if not pending:
                            self._poller.unregister(self.commands)
                    elif fd == self.alive_fd:
                        died = True
                status = self._read_status(parts, num_parts, label.encode())
                if status is not None or died:
                    self._drain(collectors)
                    return status, "status" if status is not None else "shell", parts
        finally:
            if pending:
                self._poller.unregister(self.commands)

    def _push(self, pending: memoryview) -> memoryview:
        try:
            return pending[os.write(self.commands, pending) :]
        except BlockingIOError:
            return pending
        except BrokenPipeError:
            return pending[len(pending) :]

    def _read_status(self, parts: list[bytes], num_parts: int, label: bytes) -> int | None:
        try:
            self._status_bytes += os.read(self.status, _CHUNK)
        except BlockingIOError:
            return None
        while b"\0" in self._status_bytes:
            message, _, rest = bytes(self._status_bytes).partition(b"\0")
            self._status_bytes = bytearray(rest)
            if len(parts) < num_parts + bool(num_parts):
                if parts or message == b"begin":
                    parts.append(message)
                continue
            found, _, status = message.partition(b" ")
            # anything else is not ours: a stray report of the agent's own making is dropped
            if found == label and status.isdigit():
                return int(status)
        return None

    def _read_into(self, fd: int, collector: Collector) -> int:
        try:
            chunk = os.read(fd, _CHUNK)
        except BlockingIOError:
            return 0
        if not chunk:
            self._poller.unregister(fd)
        collector.add(chunk)
        return len(chunk)

    def _drain(self, collectors: tuple[Collector, Collector]) -> None:
        # bounded: a background job may go on writing for ever
        for fd, collector in ((self.output, collectors[0]), (self.errors, collectors[1])):
            taken = 0
            while taken < _DRAIN_BYTES:
                try:
                    chunk = os.read(fd, _CHUNK)
                except BlockingIOError:
                    break
                if not chunk:
                    break
                collector.add(chunk)
                taken += len(chunk)


def _changed_limits(rest: Sequence[bytes], defaults: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    found = [(line, match) for line in rest if (match := _LIMIT.match(line))]
    half = len(found) // 2
    kinds = [b"S"] * half + [b"H"] * (len(found) - half)
    # p, the pipe size, cannot be set; a soft limit may look like the default of a hard one, so both are told
    changed = {match[1] for line, match in found if line not in defaults}
    return [(kind + m[1], m[2]) for kind, (_, m) in zip(kinds, found, strict=True) if m[1] in changed - {b"p"}]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _in_double_quotes(text: str) -> str:
    return re.sub(r'([\\$`"])', r"\\\1", text)
