"""The way to a shell in a container: named pipes in a folder that is shown inside, and the container's first process.

Owns that folder, the program of the first process and the questions to it. `docker exec` gives one stream that
mixes everything, costs 40 to 90 ms a command and cannot tell an exit from a kill. So the container's first process
is a small bash loop that starts the agent's bash on pipes from the folder; `shell.py` then speaks to it as it
does everywhere, at 0.1 ms a command, and a fork needs no exec at all. The names of the pipes are deleted as soon as
both ends are open: what the agent finds in the folder are two files that say nothing.

The first process runs with the rights of the agent, since Docker can give no others, so nothing that must hold rests
on it: a deadline ends the container through the daemon, and what it answers only names losses.
"""

from __future__ import annotations

import contextlib
import os
import select
import time

from agentgym.errors import SandboxError
from agentgym.sandboxes import shell
from agentgym.sandboxes.shell import COMMAND_FD, LOOP_NAME, SCRIPT_FD, STATUS_FD

PLACE = "/run/agentgym"
"""Where the folder is shown in the container, read-only."""
COMMAND = ["/bin/bash", "--norc", "--noprofile", f"{PLACE}/init"]
_PIPES = ("commands", "output", "errors", "status", "questions", "answers", "life")
_WRITTEN = ("commands", "questions")
_START_S, _ANSWER_S = 30.0, 10.0
# Job control, so that the shell does not start with interrupts ignored. `jobs` tells an exit from a signal, `wait` the
# number. A process of its own answers, since `read` does not return for a child that ends; an agent may kill it, and
# it is started anew. Only built-ins, but for readlink, which gets none of our descriptors.
_INIT = rf"""
cd {PLACE} || exit 1
for name in $(compgen -e); do export -n "$name"; done
IFS= read -r -d '' {LOOP_NAME} <loop
export {LOOP_NAME}
declare -A given
for name in /etc/hosts /etc/hostname /etc/resolv.conf; do
  IFS= read -r -d '' text 2>/dev/null <"$name"; given[$name]=$text
done
set -m
exec 3<questions 4>answers 5>life
oom() {{
  kills=0
  for name in /sys/fs/cgroup/memory/memory.oom_control /sys/fs/cgroup/memory.events; do
    while read -r word number; do [[ $word == oom_kill ]] && kills=$number; done 2>/dev/null <"$name"
  done
}}
gone() {{
  kill -0 "$shell" 2>/dev/null && return
  jobs -l >&5
  wait "$shell"
  status=$?; oom
  printf 'status %s %s\n' "$status" "$kills" >&5
  exit
}}
alive() {{
  for folder in /proc/[0-9]*; do
    pid=${{folder#/proc/}}; words=(); name=
    [[ $pid == 1 || $pid == "$shell" || $pid == "$BASHPID" ]] && continue
    mapfile -d '' -t words <"$folder/cmdline" || continue
    text=${{words[*]}}
    [[ $text ]] || read -r text <"$folder/comm"
    printf 'process %s (%s)\0' "$pid" "${{text:0:80}}" >&4
  done
  for file in /proc/$shell/fd/*; do
    number=${{file##*/}}
    [[ -e $file || -L $file ]] || continue
    [[ $file -ef /dev/null ]] && continue
    [[ -p $file ]] && (( number == 1 || number == 2 || number >= 10 )) && continue
    printf 'open file %s (%s)\0' "$number" "$(readlink "$file" 3<&- 4>&-)" >&4
  done
  for file in /dev/shm/* /dev/mqueue/*; do
    [[ -e $file || -L $file ]] && printf 'file %s (in memory only)\0' "$file" >&4
  done
  for name in "${{!given[@]}}"; do
    IFS= read -r -d '' text <"$name"
    [[ $text == "${{given[$name]}}" ]] || printf 'file %s (made by Docker for each container)\0' "$name" >&4
  done
}}
trap gone CHLD
/bin/bash --norc --noprofile bash {COMMAND_FD}<commands {STATUS_FD}>status {SCRIPT_FD}<script \
  0</dev/null 1>output 2>errors 3<&- 4>&- 5>&- &
shell=$!
gone
answer() {{
  while IFS= read -r -u 3 question; do
    case $question in
      alive) alive 2>/dev/null;;
      cwd) printf '%s\0' "$(readlink "/proc/$shell/cwd" 3<&- 4>&-)" >&4;;
      oom) oom; printf '%s\0' "$kills" >&4;;
    esac
    printf 'end\0' >&4
  done
  exit 7
}}
while :; do
  answer 5>&- &
  answerer=$!
  while kill -0 "$answerer" 2>/dev/null; do wait -n 2>/dev/null; code=$?; gone; done
  (( code == 7 )) && exit
done
"""


class Lines:
    """Our ends of the pipes of one container, from one start of it to its end."""

    def __init__(self, folder: str, script: bytes) -> None:
        """Lay everything out for the container to start with.

        Args:
            folder: Shown in the container; it lies in one that only we can enter.
            script: Brings the shell's state back.
        """
        self._folder = folder
        self._names = [*_PIPES, "script", "init", "loop", "bash"]
        self._unlink()
        for name, data in (("script", script), ("init", _INIT.encode()), ("loop", shell.LOOP_ENV[LOOP_NAME].encode())):
            _write(os.path.join(folder, name), data)
        # a script named "bash", so that messages begin with that
        os.symlink(f"/dev/fd/{COMMAND_FD}", os.path.join(folder, "bash"))
        ends: dict[str, int] = {}
        for name in _PIPES:
            path = os.path.join(folder, name)
            os.mkfifo(path)
            os.chmod(path, 0o666)  # the container's root may be another user here
            # both ways: a pipe cannot be opened for writing alone before somebody reads
            flags = os.O_RDWR if name in _WRITTEN else os.O_RDONLY
            ends[name] = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
        os.write(ends["commands"], f'\\eval "${LOOP_NAME}"\n'.encode())
        self.life = ends["life"]
        self._status = ends["status"]
        self._questions, self._answers = ends["questions"], ends["answers"]
        self.shell = shell.Shell([ends[name] for name in _PIPES[:4]], self.life)

    def wait_ready(self) -> None:
        """Wait until the shell reads its first command, then take the names of the pipes away.

        Raises:
            SandboxError: it did not start.
        """
        poller = select.poll()
        poller.register(self._status, select.POLLIN)
        poller.register(self.life, select.POLLIN)
        if [fd for fd, _ in poller.poll(_START_S * 1000)] != [self._status]:
            raise SandboxError(
                "no shell starts in the container; the image needs /bin/bash 4.4 or newer, and the daemon must see "
                f"the folders of this machine ({self._folder})"
            )
        self._unlink()

    def ask(self, question: str) -> list[str]:
        """What the first process answers.

        Raises:
            NoState: it does not; an agent can bring it to that.
        """
        os.write(self._questions, f"{question}\n".encode())
        received = bytearray()
        poller = select.poll()
        poller.register(self._answers, select.POLLIN)
        deadline = time.monotonic() + _ANSWER_S
        while not received.endswith(b"end\0") and len(received) < 1 << 20:
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                break
            chunk = os.read(self._answers, 1 << 16)
            if not chunk:
                break
            received += chunk
        if not received.endswith(b"end\0"):
            raise shell.NoState("the first process of the container does not answer")
        return received.decode("utf-8", "replace").split("\0")[:-2]

    def exit_status(self) -> tuple[int | None, int]:
        """How the shell ended, negative for a signal, and how many processes were ended for want of memory.

        The status is None where the first process ended with it, or before it could tell.
        """
        text = bytearray()
        poller = select.poll()
        poller.register(self.life, select.POLLIN)
        deadline = time.monotonic() + _ANSWER_S
        # to its end, unless an agent writes here: it finds the pipe among the first process's descriptors
        while poller.poll(max(0.0, deadline - time.monotonic()) * 1000) and len(text) < 1 << 16:
            chunk = os.read(self.life, 4096)
            if not chunk:
                break
            text += chunk
        job, _, last = text.decode("utf-8", "replace").rstrip("\n").rpartition("\n")
        words = last.split()
        if len(words) != 3 or words[0] != "status" or not (words[1] + words[2]).isdigit():
            return None, 0
        status, kills = int(words[1]), int(words[2])
        by_signal = status > 128 and not {"Exit", "Done"} & set(job.split()[2:3])
        return (128 - status if by_signal else status), kills

    def close(self) -> None:
        """Close our ends, and take away the names that are left."""
        self.shell.close()
        for fd in (self.life, self._questions, self._answers):
            os.close(fd)
        self._unlink()

    def _unlink(self) -> None:
        for name in self._names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._folder, name))


def _write(path: str, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
    os.chmod(path, 0o644)
