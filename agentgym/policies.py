"""Policies without a model, for checks, demonstrations and trees with mixed outcomes.

Owns what they play; `ScriptedEngine` plays them. Each derives its turn from the request alone (seed, turn,
messages), never from state of its own, so that branches after a fork are consistent and a run repeats.

    oracle     the task's gold turns: shows that a task can be solved
    noop       submits at once, without an answer: shows that a task is not solved by nothing
    random     random harmless calls
    scripted   right turns and wrong ones, mixed: `skill` is the chance of a right one
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from agentgym.engine import Policy, SampleRequest
from agentgym.errors import ConfigError, TaskError, UnknownName
from agentgym.parsing import format_call, get_codec
from agentgym.task import Task
from agentgym.types import Message, ToolCall, ToolSpec

HARMLESS = (
    "ls",
    "pwd",
    "ls -a",
    "cat note",
    "find . -maxdepth 1 | sort",
    "echo hello",
    "date +%Y",
    "wc -c note",
    "id -un",
)
"""What `random` types into a shell: reads only, so that a run on any world ends as it should."""
_WORDS = ("hello", "42", "note", "yes", "a b c", "/etc/hostname")


@dataclass(frozen=True, slots=True)
class Context:
    """What every policy may know: the tasks it will meet, the tools, and how calls are spelt."""

    tasks: dict[str, Task]
    tools: tuple[ToolSpec, ...]
    codec: str
    skill: float

    def task(self, request: SampleRequest) -> Task:
        """The task of a request."""
        if request.task_id not in self.tasks:
            raise TaskError(f"the policy was made without task {request.task_id!r}; give make_policy all tasks")
        return self.tasks[request.task_id]

    def spell(self, call: ToolCall) -> str:
        """A call in the codec of the run."""
        return format_call(call, self.codec)


def make_policy(
    name: str, *, tasks: Iterable[Task], tools: Sequence[ToolSpec], codec: str = "compact", skill: float = 0.7
) -> Policy:
    """Make a policy by name.

    Args:
        name: A key of `POLICIES`.
        tasks: Every task that will be played.
        tools: The tools of the environment.
        codec: How calls are spelt, "compact" or "json".
        skill: Of `scripted`: the chance that a turn is the right one.

    Raises:
        UnknownName: there is no such policy or codec.
        ConfigError: the policy cannot play these tasks with these tools.
    """
    if name not in POLICIES:
        raise UnknownName.of("policy", name, POLICIES, "`agentgym list policies` lists them")
    get_codec(codec)
    if not 0 <= skill <= 1:
        raise ConfigError(f"skill is {skill}; it must be 0 to 1")
    return POLICIES[name](Context({task.id: task for task in tasks}, tuple(tools), codec, skill))


def policy_names() -> dict[str, str]:
    """The names `make_policy` accepts, each with one line of description."""
    return {name: (factory.__doc__ or "").split("\n")[0] for name, factory in POLICIES.items()}


def oracle(context: Context) -> Policy:
    """Play the task's gold turns; the last again where more is asked."""
    without = next((task.id for task in context.tasks.values() if not task.gold), None)
    if without is not None:
        raise ConfigError(f"task {without!r} has no gold turns, so the oracle cannot play it; give it `gold`")

    def policy(request: SampleRequest) -> str:
        gold = _gold(context.task(request))
        return context.spell(gold[min(request.turn_index, len(gold) - 1)])

    return policy


def noop(context: Context) -> Policy:
    """Submit at once, without an answer."""
    submit = next((tool for tool in context.tools if tool.name == "submit"), None)
    if submit is None:
        names = ", ".join(tool.name for tool in context.tools) or "none"
        raise ConfigError(f"policy noop needs a tool named submit; the environment has: {names}")
    text = context.spell(ToolCall("submit", {p.name: "" for p in submit.params if p.required}))
    return lambda request: text


def random_calls(context: Context) -> Policy:
    """Make random harmless calls; one in eight hands in."""
    if not context.tools:
        raise ConfigError("policy random needs tools; the environment has none")

    def policy(request: SampleRequest) -> str:
        return context.spell(_random_call(context.tools, random.Random(request.seed)))

    return policy


def scripted(context: Context) -> Policy:
    """Mix right and wrong turns from the seed, reading what happened so far."""

    def policy(request: SampleRequest) -> str:
        task = context.task(request)
        play = _SCRIPTS.get(str(task.meta.get("family")), _mixed_turn)
        return context.spell(play(context, task, request, random.Random(request.seed)))

    return policy


POLICIES: dict[str, Callable[[Context], Policy]] = {
    "noop": noop,
    "oracle": oracle,
    "random": random_calls,
    "scripted": scripted,
}


# turns


def _gold(task: Task) -> list[ToolCall]:
    return [ToolCall(turn["name"], dict(turn["arguments"])) for turn in task.gold]


def _random_call(tools: Sequence[ToolSpec], rng: random.Random) -> ToolCall:
    enders = [tool for tool in tools if tool.name == "submit"]
    others = [tool for tool in tools if tool.name != "submit"]
    tool = rng.choice(enders if enders and (not others or rng.random() < 0.125) else others)
    arguments: dict[str, str | int | float | bool] = {}
    for param in tool.params:
        if param.required or rng.random() < 0.5:
            arguments[param.name] = _random_value(tool, param.name, param.kind, rng)
    return ToolCall(tool.name, arguments)


def _random_value(tool: ToolSpec, name: str, kind: str, rng: random.Random) -> str | int | float | bool:
    if kind == "boolean":
        return rng.random() < 0.5
    if kind in ("integer", "number"):
        return rng.randint(0, 9)
    if tool.name == "write_file":
        return "scratch.txt" if name == "path" else f"line {rng.randint(0, 9)}"
    return rng.choice(HARMLESS if name == "command" else _WORDS)


def _played(messages: Sequence[Message]) -> list[tuple[ToolCall, str]]:
    """The calls so far, each with what the world answered."""
    answers = {}
    pairs: list[tuple[ToolCall, str]] = []
    for message in reversed(messages):
        if message.role == "tool":
            answers[message.tool_call_id] = message.content
        elif message.role == "assistant":
            pairs.extend((call, answers.get(call.id, "")) for call in reversed(message.tool_calls))
            answers = {}
    return pairs[::-1]


def _mixed_turn(context: Context, task: Task, request: SampleRequest, rng: random.Random) -> ToolCall:
    """The next gold turn that was not played yet, or a plausible wrong one."""
    gold = _gold(task)
    done = 0
    for call, _ in _played(request.messages):
        if done < len(gold) and (call.name, dict(call.arguments)) == (gold[done].name, dict(gold[done].arguments)):
            done += 1
    if gold and rng.random() < context.skill:
        return gold[min(done, len(gold) - 1)]
    if rng.random() < 0.7 or not any(tool.name == "submit" for tool in context.tools):
        return _wrong_call(context, gold, rng)
    return ToolCall("submit", {})


def _wrong_call(context: Context, gold: Sequence[ToolCall], rng: random.Random) -> ToolCall:
    """What somebody might type who has read the task badly: the right command on the wrong thing, or a look round."""
    commands = [str(call.arguments["command"]) for call in gold if "command" in call.arguments]
    if commands and rng.random() < 0.5:
        command = rng.choice(commands)
        slip = rng.choice((f"echo {command.split()[0]}", f"{command} >/dev/null | head -1", "ls /", "pwd; ls"))
        return ToolCall("run", {"command": slip})
    others = [tool for tool in context.tools if tool.name not in ("submit", "write_file")]
    return _random_call(others, rng) if others else gold[0]


def _keyhunt_turn(context: Context, task: Task, request: SampleRequest, rng: random.Random) -> ToolCall:
    """Follow the note or guess a directory; hand in the last code that was seen, or a wrong one."""
    names = [str(name) for name in task.meta["dirs"]]
    told, seen = None, None
    for call, answer in _played(request.messages):
        if call.name != "run":
            continue
        if pointed := re.search(r"The code is in (\w+)", answer):
            told = pointed[1]
        if code := re.fullmatch(r"\s*(\d{3})\s*", answer):
            seen = code[1]
    skilled = rng.random() < context.skill
    if seen is not None:
        return ToolCall("submit", {"answer": seen if skilled else str(rng.randint(100, 999))})
    if told is not None:
        return ToolCall("run", {"command": f"cat {told if skilled else rng.choice(names)}/code"})
    return ToolCall("run", {"command": "cat note" if skilled else f"cat {rng.choice(names)}/code"})


_SCRIPTS: dict[str, Callable[[Context, Task, SampleRequest, random.Random], ToolCall]] = {"keyhunt": _keyhunt_turn}
