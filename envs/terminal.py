"""`agentgym/Terminal-v0`: a shell in a sandbox, played by commands and scored on the frozen world.

Owns the tools `run`, `write_file`, `read_file`, `submit` and, where it is asked for, `python`, and what the policy reads
of a command. Leaves the keys of a task's `setup` to `world.py`, scoring to `graders.py` and isolation to the backend.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentgym.env import AgentEnv
from agentgym.envs import graders
from agentgym.envs.world import path_outside, starting_world, world_of
from agentgym.episode import Limits, Reply
from agentgym.errors import BackendUnavailable, PathRefused, SnapshotBusy, TaskError
from agentgym.sandbox import DEFAULT_OUTPUT_BYTES, ExecResult, RunsPython, Sandbox, SandboxSnapshot, get_backend
from agentgym.task import Task
from agentgym.types import Action, Level, Param, ToolCall, ToolSpec

PYTHON = ToolSpec(
    "python",
    "Run Python as a notebook cell: variables stay for the next, the value of a last expression is shown.",
    (Param("code", "What Python runs."),),
)


class TerminalEnv(AgentEnv):
    """A shell whose state forks: files, directory, variables, functions; and the variables of Python, if asked for."""

    tools: tuple[ToolSpec, ...] = (
        ToolSpec(
            "run", "Run a command in the shell; its state stays for the next.", (Param("command", "What bash runs."),)
        ),
        ToolSpec(
            "write_file",
            "Write a file. A relative path begins at the directory where the task started.",
            (Param("path", "Where."), Param("content", "The whole content.")),
        ),
        ToolSpec(
            "read_file",
            "Read a file. A relative path begins at the directory where the task started.",
            (Param("path", "Where."),),
        ),
        ToolSpec(
            "submit",
            "End the task. Without an answer, the output of the last command is the answer.",
            (Param("answer", "The answer, where the task asks for one.", required=False),),
        ),
    )
    needs = Level.SHELL

    def __init__(
        self,
        tasks: str | Sequence[Task] = "keyhunt",
        *,
        backend: str = "namespace",
        python: bool = False,
        codec: str = "compact",
        limits: Limits | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Make an environment; no sandbox is opened before `reset`.

        Args:
            tasks: A family or file for `load_tasks`, or tasks.
            backend: "namespace", or "local", which isolates little and so is never a fallback.
            python: Offer the tool `python` too, whose variables a fork keeps: level `process` is needed then.
            codec: How the policy spells actions, "compact" or "json".
            limits: Defaults for tasks that set none.
            render_mode: "ansi" or None.
        """
        super().__init__(tasks, codec=codec, limits=limits, render_mode=render_mode)
        self.backend = backend
        if python:
            self.tools, self.needs = (*self.tools[:-1], PYTHON, self.tools[-1]), Level.PROCESS
        self.sandbox: Sandbox | None = None
        self.last_stdout: str | None = None
        """Of the last `run`, in full: what a bare `submit` hands in."""
        self.submitted: str | None = None
        self.verdict: graders.Verdict | None = None
        """Set when the episode was scored; also `info["verdict"]`."""

    def begin(self, task: Task) -> str:
        """Open the sandbox and check that the task can be played in it."""
        self.last_stdout = self.submitted = self.verdict = None
        self.sandbox = None
        graders.check_verifier(task)
        spec = replace(world_of(task, seed=int(self.np_random.integers(1 << 31))), python=PYTHON in self.tools)
        backend = get_backend(self.backend)
        capabilities = backend.probe()
        if capabilities.level < self.needs:
            raise BackendUnavailable(
                f"backend {self.backend!r} keeps level {capabilities.level} here and Terminal-v0 needs {self.needs}"
                f"{' for the tool python' if PYTHON in self.tools else ''}; `agentgym doctor` says why"
            )
        outside = path_outside(spec)
        if outside and "own_root" not in capabilities.isolation:
            raise BackendUnavailable(
                f"task {task.id!r} has {outside!r} outside its working directory and backend {self.backend!r} has no "
                "root of its own; use backend 'namespace', or tasks with relative paths such as keyhunt"
            )
        self.sandbox = self.attach(backend.create(spec))
        _check_programs(task, self.sandbox)
        return task.prompt

    def step(self, action: str | Action) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """As `AgentEnv.step`; when the episode was scored, `info["verdict"]` says why, for the caller only."""
        observation, reward, terminated, truncated, info = super().step(action)
        if self.verdict is not None:
            info["verdict"] = self.verdict.to_plain()
        return observation, reward, terminated, truncated, info

    def act(self, call: ToolCall) -> Reply | str:
        """Carry out one call."""
        arguments = call.arguments
        if call.name == "submit":
            self.submitted = str(arguments.get("answer", self.last_stdout or ""))
            return Reply("submitted", ended=True)
        flaw = next((flaw for name, value in arguments.items() if (flaw := _unsendable(name, value))), None)
        if flaw:
            return f"error: {flaw}"
        if call.name == "run":
            return self._run(arguments["command"])
        if call.name == "python":
            return self._run_python(arguments["code"])
        try:
            if call.name == "write_file":
                data = arguments["content"].encode()
                self._world.write(arguments["path"], data)
                return f"wrote {len(data)} bytes to {arguments['path']}"
            return _shown(self._world.read(arguments["path"]))
        except PathRefused as mistake:
            return f"error: {mistake}"

    def grade(self) -> Mapping[str, float]:
        """Score the frozen world by the task's verifier."""
        task = self.episode.task
        work = graders.Work(self.submitted, self._freeze, starting_world(task))
        self.verdict = graders.grade(task, work)
        return {"outcome": self.verdict.outcome}

    @property
    def _world(self) -> Sandbox:
        assert self.sandbox is not None, "act and grade run only after begin"
        return self.sandbox

    def _freeze(self) -> SandboxSnapshot:
        try:
            return self._world.snapshot()
        except SnapshotBusy:
            # the policy left processes that cannot be sealed: its work is done, so they end with its shell
            # (keywords only around `kill`, which the policy may have redefined: then the deadline ends the shell)
            self._world.run('until [[ "" ]]; do kill -9 $$; done', timeout_s=1.0)
            return self._world.snapshot()

    def _run(self, command: str) -> str:
        timeout_s, deadline = self._time()
        result = self._world.run(command, timeout_s=timeout_s)
        self.last_stdout = result.stdout
        return describe(result, deadline)

    def _run_python(self, code: str) -> str:
        assert isinstance(self._world, RunsPython), "begin refuses backends that keep less than level process"
        timeout_s, deadline = self._time()
        result = self._world.run_python(code, timeout_s=timeout_s)
        self.last_stdout = result.stdout
        return describe(result, deadline, python=True)

    def _time(self) -> tuple[float, str]:
        """What a command may take, in seconds, and how the policy is told."""
        limits = self.episode.limits
        left_s = max(limits.timeout_s - self.episode.elapsed_s, 0.1)
        # what is left of an episode differs from run to run, so it is no part of the text
        told = f"{limits.turn_timeout_s:g} s" if left_s > limits.turn_timeout_s else "all the time left"
        return min(limits.turn_timeout_s, left_s), told


def describe(result: ExecResult, deadline: str, *, python: bool = False) -> str:
    """What the policy reads of a command: its output, its errors, and how it ended where that is news.

    Args:
        result: Of the command.
        deadline: What it was given, as a text.
        python: Python ran it, whose errors end with their traceback, and not a shell.
    """
    parts = [text.removesuffix("\n") for text in (result.stdout, result.stderr) if text.removesuffix("\n")]
    if result.truncated:
        total = result.stdout_bytes + result.stderr_bytes
        parts.append(f"[{total} bytes of output, its middle left out]")
    who, gone = ("Python", ", its variables are gone") if python else ("the shell", "")
    if result.timed_out:
        now = f"{who} was restarted{gone}" if result.shell_restarted else "variables are kept"
        parts.append(f"[timed out after {deadline}; {now}]")
    elif result.shell_restarted:
        parts.append(f"[{who} ended; a new one was started{gone}]")
    elif result.exit_code and not python:
        parts.append(f"[exit {result.exit_code}]")
    return "\n".join(parts) or "[no output]"


def _shown(data: bytes) -> str:
    text = data.decode("utf-8", "replace")
    if len(data) >= DEFAULT_OUTPUT_BYTES:
        text += f"\n[only the first {DEFAULT_OUTPUT_BYTES} bytes]"
    return text or "[empty file]"


def _unsendable(name: str, value: str) -> str | None:
    """Why a text cannot reach a shell or a file: the policy's mistake, found before the sandbox sees it."""
    if "\0" in value and name != "content":
        return f"{name} has a NUL character, which no command and no path can have"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"{name} is not valid Unicode at character {error.start}"
    return None


def _check_programs(task: Task, sandbox: Sandbox) -> None:
    programs = task.setup.get("programs", {})
    if not isinstance(programs, Mapping):
        raise TaskError(f"task {task.id!r}: setup programs must map each program to its package")
    if not programs:
        return
    bad = next((p for p in programs if not re.fullmatch(r"[\w.+-]+", str(p))), None)
    if bad is not None:
        raise TaskError(f"task {task.id!r}: {bad!r} is no program's name")
    result = sandbox.run("\n".join(f"command -v {p} >/dev/null || echo {p}" for p in programs))
    missing = [f"{p} (package {programs[p]})" for p in result.stdout.split()]
    if missing:
        raise TaskError(
            f"task {task.id!r} needs {', '.join(missing)}, which this machine lacks; install it on the host"
        )
