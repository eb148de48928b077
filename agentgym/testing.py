"""Checks for authors of environments: does it keep the contract, and does it really fork?

Owns `check_env` and `check_fork`, which our own tests run on every environment of the package. Leaves the world's
own promises (isolation, graders) to the tests of whoever makes it.

    from agentgym.testing import check_env, check_fork
    check_env("my_namespace/MyEnv-v0")
    check_fork("my_namespace/MyEnv-v0")
"""

from __future__ import annotations

import copy
import json
import pickle
import random
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

from agentgym.env import AgentEnv
from agentgym.errors import EnvError, SnapshotError
from agentgym.parsing import format_call
from agentgym.registry import make
from agentgym.snapshot import EnvSnapshot
from agentgym.task import Task
from agentgym.types import StopReason, ToolCall

EnvSource = str | Callable[[], AgentEnv]
"""The id of a registered environment, or what makes one."""

SEEDS = (0, 1, 2**31 - 1)
BAD_REPLIES = ("", "  \n ", "no_such_tool 1", "{", "[]", "null", '{"name": "no_such_tool"}', "\0", "a" * 1_000_000)
NONSENSE = "?!"
"""A turn that changes no world: no tool has this name."""
INFO_KEYS = {"task", "turn", "messages", "rewards", "stop_reason", "left"}


class CheckFailed(AssertionError):
    """An environment breaks its contract; names the check, what was expected and what came."""


@dataclass(slots=True)
class Report:
    """What was checked, in order; it exists only where all of it passed."""

    env: str
    checks: list[str] = field(default_factory=list)


def check_env(env_id_or_factory: EnvSource, *, task: Task | None = None) -> Report:
    """Check that an environment keeps the contract of `AgentEnv`, gymnasium's own check included.

    Args:
        env_id_or_factory: The environment.
        task: What to play; the environment's first task when absent.

    Raises:
        CheckFailed: names the first broken promise.
        EnvError: there is no task to play.
    """
    subject = _Subject(env_id_or_factory, task)
    report = Report(subject.name)
    checks = (_gymnasium, _seeds, _globals, _info, _bad_replies, _limits, _copies, _closing, _gold, _empty_submit)
    for check in checks:
        _run(report, check, lambda check=check: check(subject))  # type: ignore[misc]
    return report


def check_fork(
    env_id_or_factory: EnvSource, *, task: Task | None = None, actions: Sequence[str] | None = None
) -> Report:
    """Check that forks, restores and snapshots of an environment are what they say.

    Args:
        env_id_or_factory: The environment.
        task: What to play; the environment's first task when absent.
        actions: Turns to play, which should change the world; the task's gold turns when absent.

    Raises:
        CheckFailed: names the first broken promise.
        EnvError: there is no task to play.
    """
    subject = _Subject(env_id_or_factory, task)
    turns = list(actions) if actions is not None else [NONSENSE, *subject.gold()]
    report = Report(subject.name)
    for check in (_same_future, _independent, _sealed, _restores, _releases, _outlives_parent, _forks_in_number):
        _run(report, check, lambda check=check: check(subject, turns))  # type: ignore[misc]
    return report


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a turn gave, as far as it must repeat."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    rewards: dict[str, float]
    stop_reason: str | None
    turn: int


class _Subject:
    """The environment under test, and the task it plays."""

    def __init__(self, source: EnvSource, task: Task | None) -> None:
        self._source = source
        with self.opened() as env:
            self.name = source if isinstance(source, str) else type(env).__name__
            self.has_tasks = bool(env.tasks)
            if task is None and not env.tasks:
                raise EnvError(f"{self.name} has no tasks to check it with; give check a task=...")
            self.task = task if task is not None else env.tasks[0]
            self.codec = env.codec_name
            self.tools = env.tools

    def make(self) -> AgentEnv:
        return make(self._source) if isinstance(self._source, str) else self._source()

    @contextmanager
    def opened(self) -> Any:
        env = self.make()
        try:
            yield env
        finally:
            env.close()

    def reset(self, env: AgentEnv, *, seed: int = 0, task: Task | None = None) -> tuple[str, dict[str, Any]]:
        return env.reset(seed=seed, options={"task": task or self.task})

    def gold(self) -> list[str]:
        return [format_call(ToolCall(turn["name"], turn["arguments"]), self.codec) for turn in self.task.gold]

    def linear(self, actions: Sequence[str]) -> list[_Outcome]:
        """What the actions give without forks, on a fresh environment."""
        with self.opened() as env:
            self.reset(env)
            return play(env, actions)


def play(env: AgentEnv, actions: Sequence[str]) -> list[_Outcome]:
    """Play turns until they or the episode end."""
    outcomes: list[_Outcome] = []
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        outcomes.append(
            _Outcome(observation, reward, terminated, truncated, info["rewards"], info["stop_reason"], info["turn"])
        )
        if terminated or truncated:
            break
    return outcomes


def _run(report: Report, check: Callable[..., None], call: Callable[[], None]) -> None:
    title = (check.__doc__ or check.__name__).rstrip(".")
    try:
        call()
    except CheckFailed as failure:
        raise CheckFailed(f"{report.env}: {title}: no; {failure}") from failure.__cause__
    except Exception as error:
        raise CheckFailed(f"{report.env}: {title}: no; {type(error).__name__} was raised: {error}") from error
    report.checks.append(title)


def _expect(claim: str, expected: object, actual: object) -> None:
    if expected != actual:
        raise CheckFailed(f"{claim}: expected {_short(expected)}, got {_short(actual)}")


def _raises(claim: str, kind: type[Exception], call: Callable[[], object]) -> Exception:
    try:
        call()
    except kind as error:
        return error
    except Exception as error:
        raise CheckFailed(f"{claim}: expected {kind.__name__}, got {type(error).__name__}: {error}") from error
    raise CheckFailed(f"{claim}: expected {kind.__name__}, nothing was raised")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 600 else f"{text[:300]} ... {text[-280:]}"


# the contract


def _gymnasium(subject: _Subject) -> None:
    """Gymnasium's own checker has no complaint."""
    with subject.opened() as env, warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        env.tasks = env.tasks or (subject.task,)
        # its render and close checks make environments from the spec, which knows nothing of a task given here
        alone = env.spec is None or not subject.has_tasks
        try:
            gymnasium_check_env(env, skip_render_check=alone, skip_close_check=alone)
        except Exception as error:
            raise CheckFailed(f"gymnasium's check_env failed: {type(error).__name__}: {error}") from error
    if complaints:
        raise CheckFailed(f"gymnasium's check_env warns: {complaints[0].message}")


def _seeds(subject: _Subject) -> None:
    """A seed, 0 included, repeats the first observation and the task drawn."""
    for seed in SEEDS:
        starts = []
        for _ in range(2):
            with subject.opened() as env:
                env.tasks = env.tasks or (subject.task,)
                observation, info = env.reset(seed=seed)
                starts.append((observation, info["task"], env.np_random.bit_generator.state))
        _expect(f"reset(seed={seed}) on two fresh environments", starts[0], starts[1])


def _globals(subject: _Subject) -> None:
    """Global random generators are neither read nor disturbed."""
    actions = [NONSENSE, *subject.gold()]
    alone = subject.linear(actions)
    before = random.getstate(), np.random.get_state()
    try:
        random.seed(12345)
        np.random.seed(12345)
        ours = random.getstate(), repr(np.random.get_state())
        _expect("turns after the global generators were seeded", alone, subject.linear(actions))
        _expect("global generators after an episode", True, ours == (random.getstate(), repr(np.random.get_state())))
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _info(subject: _Subject) -> None:
    """Reset and step give the keys of info, and messages in the chat form."""
    with subject.opened() as env:
        observation, info = subject.reset(env)
        _expect("keys missing in the info of reset", set(), INFO_KEYS - set(info))
        _expect("the last message of reset holds the observation", True, observation in info["messages"][-1]["content"])
        _, _, _, _, info = env.step(NONSENSE)
        _expect("keys missing in the info of step", set(), INFO_KEYS - set(info))
        _expect("roles of a turn without a usable call", ["assistant", "user"], [m["role"] for m in info["messages"]])
        _expect("messages survive JSON", info["messages"], json.loads(json.dumps(info["messages"])))


def _bad_replies(subject: _Subject) -> None:
    """Unusable replies are observations without reward, and too many in a row end the episode."""
    for reply in BAD_REPLIES:
        with subject.opened() as env:
            subject.reset(env)
            (outcome,) = play(env, [reply])
            claim = f"after the unusable reply {reply[:20]!r}"
            _expect(
                f"reward and end {claim}",
                (0.0, False, False),
                (sum(outcome.rewards.values()), outcome.terminated, outcome.truncated),
            )
            _expect(f"a short observation {claim}", True, 0 < len(outcome.observation) < 10_000)
    with subject.opened() as env:
        subject.reset(env, task=replace(subject.task, limits={**subject.task.limits, "max_bad_calls": 2}))
        outcomes = play(env, [NONSENSE] * 3)
        _expect(
            "end after two unusable replies in a row",
            (2, str(StopReason.BAD_CALLS)),
            (len(outcomes), outcomes[-1].stop_reason),
        )


def _limits(subject: _Subject) -> None:
    """The turn limit truncates, and nothing can follow the end."""
    limits = {**subject.task.limits, "max_turns": 2, "max_bad_calls": 100}
    with subject.opened() as env:
        subject.reset(env, task=replace(subject.task, limits=limits))
        outcomes = play(env, [NONSENSE] * 3)
        ends = [(outcome.terminated, outcome.truncated) for outcome in outcomes]
        _expect("ends under max_turns = 2", [(False, False), (False, True)], ends)
        _expect("stop reason", str(StopReason.MAX_TURNS), outcomes[-1].stop_reason)
        _raises("a step after the end", EnvError, lambda: env.step(NONSENSE))


def _copies(subject: _Subject) -> None:
    """A live environment refuses to be copied or pickled, and names fork()."""
    with subject.opened() as env:
        subject.reset(env)
        for how in (copy.deepcopy, copy.copy, pickle.dumps):
            error = _raises(f"{how.__name__} of a live environment", TypeError, lambda how=how: how(env))  # type: ignore[misc]
            _expect(f"the message of {how.__name__} names fork()", True, "fork()" in str(error))


def _closing(subject: _Subject) -> None:
    """Closing twice is fine, and a closed environment steps no more."""
    with subject.opened() as env:
        env.close()
        subject.reset(env)
        env.close()
        env.close()
        _raises("a step after close", EnvError, lambda: env.step(NONSENSE))


def _gold(subject: _Subject) -> None:
    """The task's gold turns score 1."""
    if subject.task.gold:
        last = subject.linear(subject.gold())[-1]
        claim = f"outcome and end of the gold turns of task {subject.task.id!r}"
        _expect(
            claim,
            (1.0, True, str(StopReason.SUCCESS)),
            (last.rewards.get("outcome"), last.terminated, last.stop_reason),
        )


def _empty_submit(subject: _Subject) -> None:
    """Handing in nothing does not score 1."""
    for tool in (tool for tool in subject.tools if tool.name == "submit"):
        nothing = ToolCall("submit", {p.name: "" for p in tool.params if p.required})
        last = subject.linear([format_call(nothing, subject.codec)])[-1]
        _expect(
            "an empty submit ends the episode below 1", (True, True), (last.terminated, last.rewards["outcome"] < 1)
        )


# forks


def _cuts(turns: Sequence[str]) -> list[int]:
    """Where to fork: at the root, in the middle, before the last turn."""
    return sorted({0, len(turns) // 2, max(0, len(turns) - 1)})


@contextmanager
def _at(subject: _Subject, turns: Sequence[str]) -> Any:
    """An environment after some turns, and its snapshot."""
    with subject.opened() as env, ExitStack() as stack:
        subject.reset(env)
        play(env, turns)
        snapshot: EnvSnapshot = stack.enter_context(env.snapshot())
        yield env, snapshot


def _forked(snapshot: EnvSnapshot, stack: ExitStack, n: int = 1) -> list[AgentEnv]:
    children = snapshot.fork(n)
    for child in children:
        stack.callback(child.close)
    return children


def _same_future(subject: _Subject, turns: Sequence[str]) -> None:
    """The same turns after a fork give the same as without it, in the child and in the parent."""
    linear = subject.linear(turns)
    for cut in _cuts(turns):
        with _at(subject, turns[:cut]) as (env, snapshot), ExitStack() as stack:
            (child,) = _forked(snapshot, stack)
            _expect(f"the child forked after turn {cut}", linear[cut:], play(child, turns[cut:]))
            _expect(f"the parent that was forked after turn {cut}", linear[cut:], play(env, turns[cut:]))


def _independent(subject: _Subject, turns: Sequence[str]) -> None:
    """Parent and siblings do not see each other, turn by turn."""
    cut = len(turns) // 2
    futures = [[*turns[cut:]], [NONSENSE, *turns[cut:]], [*turns[:1], *turns[-2:-1], *turns[cut:]]]
    linear = [subject.linear([*turns[:cut], *future])[cut:] for future in futures]
    with _at(subject, turns[:cut]) as (env, snapshot), ExitStack() as stack:
        worlds = [env, *_forked(snapshot, stack, 2)]
        seen: list[list[_Outcome]] = [[], [], []]
        for turn in range(max(map(len, linear))):
            for world, future, outcomes, alone in zip(worlds, futures, seen, linear, strict=True):
                if turn < len(alone):
                    outcomes += play(world, [future[turn]])
        for who, expected, actual in zip(("parent", "first child", "second child"), linear, seen, strict=True):
            _expect(f"turns of the {who}, played in turns with its siblings", expected, actual)


def _sealed(subject: _Subject, turns: Sequence[str]) -> None:
    """A snapshot's digest does not change while parent and children go on."""
    cut = len(turns) // 2
    with _at(subject, turns[:cut]) as (env, snapshot), ExitStack() as stack:
        digest = snapshot.digest()
        (child,) = _forked(snapshot, stack)
        play(child, turns[cut:])
        _expect("digest after a child went on", digest, snapshot.digest())
        play(env, turns[cut:])
        _expect("digest after the parent went on", digest, snapshot.digest())
        (late,) = _forked(snapshot, stack)
        _expect("a child forked late", subject.linear(turns)[cut:], play(late, turns[cut:]))


def _restores(subject: _Subject, turns: Sequence[str]) -> None:
    """Restoring in place works more than once."""
    cut = len(turns) // 2
    linear = subject.linear(turns)[cut:]
    with _at(subject, turns[:cut]) as (env, snapshot):
        for time in ("before a restore", "after a restore", "after a second restore"):
            _expect(f"turns {time}", linear, play(env, turns[cut:]))
            env.restore(snapshot)


def _releases(subject: _Subject, turns: Sequence[str]) -> None:
    """A released snapshot says so; its children live on."""
    cut = len(turns) // 2
    with _at(subject, turns[:cut]) as (env, snapshot), ExitStack() as stack:
        (child,) = _forked(snapshot, stack)
        snapshot.release()
        _raises("releasing twice", SnapshotError, snapshot.release)
        _raises("forking a released snapshot", SnapshotError, snapshot.fork)
        _raises("restoring a released snapshot", SnapshotError, lambda: env.restore(snapshot))
        _expect("a child whose snapshot was released", subject.linear(turns)[cut:], play(child, turns[cut:]))


def _outlives_parent(subject: _Subject, turns: Sequence[str]) -> None:
    """Children go on when the parent is closed."""
    cut = len(turns) // 2
    with _at(subject, turns[:cut]) as (env, snapshot), ExitStack() as stack:
        (child,) = _forked(snapshot, stack)
        env.close()
        _expect("a child whose parent was closed", subject.linear(turns)[cut:], play(child, turns[cut:]))


def _forks_in_number(subject: _Subject, turns: Sequence[str]) -> None:
    """fork(3) gives three, and closing one harms no other."""
    cut = len(turns) // 2
    linear = subject.linear(turns)[cut:]
    with subject.opened() as env, ExitStack() as stack:
        subject.reset(env)
        play(env, turns[:cut])
        children = env.fork(3)
        for child in children:
            stack.callback(child.close)
        children[0].close()
        for which, world in (("second of three", children[1]), ("third of three", children[2]), ("parent", env)):
            _expect(f"turns of the {which} after the first was closed", linear, play(world, turns[cut:]))
