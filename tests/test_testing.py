from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from agentgym.env import AgentEnv
from agentgym.envs.counter import CounterEnv, counter_task
from agentgym.episode import Reply
from agentgym.errors import EnvError
from agentgym.task import Task
from agentgym.testing import CheckFailed, check_env, check_fork
from agentgym.types import ToolCall


@pytest.mark.parametrize("codec", ["compact", "json"])
def test_counter_keeps_the_contract_and_forks(codec: str) -> None:
    report = check_env(lambda: CounterEnv(codec=codec))
    assert report.env == "CounterEnv" and len(report.checks) == 10
    assert len(check_fork(lambda: CounterEnv(codec=codec)).checks) == 7


def test_by_id_and_with_a_task() -> None:
    assert check_env("agentgym/Counter-v0", task=counter_task(3)).env == "agentgym/Counter-v0"
    check_fork("agentgym/Counter-v0", actions=["add 1", "add 2", "add 3", "submit"])


def test_an_environment_without_tasks_needs_one() -> None:
    class Bare(CounterEnv):
        def __init__(self) -> None:
            AgentEnv.__init__(self)

    with pytest.raises(EnvError, match="give check a task"):
        check_env(Bare)
    check_env(Bare, task=counter_task(3))


class Forgetful(CounterEnv):
    """Its count does not fork: it is kept outside."""

    counts: ClassVar[dict[int, int]] = {}

    def begin(self, task: Task) -> str:
        Forgetful.counts[id(self)] = 0
        return super().begin(task)

    def act(self, call: ToolCall) -> Reply | str:
        self.count = Forgetful.counts.get(id(self), 0)
        reply = super().act(call)
        Forgetful.counts[id(self)] = self.count
        return reply


class Shared(CounterEnv):
    """All copies count on one list."""

    totals: ClassVar[list[int]] = []

    def begin(self, task: Task) -> str:
        Shared.totals.clear()
        return super().begin(task)

    def act(self, call: ToolCall) -> Reply | str:
        if call.name == "add":
            Shared.totals.append(call.arguments["n"])
        self.count = sum(Shared.totals) - (call.arguments["n"] if call.name == "add" else 0)
        return super().act(call)


@pytest.mark.parametrize("broken", [Forgetful, Shared])
def test_check_fork_finds_state_that_does_not_fork(broken: Callable[[], AgentEnv]) -> None:
    with pytest.raises(CheckFailed, match=r"expected .* got "):
        check_fork(broken, actions=["add 1", "add 2", "add 4", "submit"])


class Moody(CounterEnv):
    def _state(self) -> str:
        return f"{super()._state()} {random.random()}"


class Noisy(CounterEnv):
    def act(self, call: ToolCall) -> Reply | str:
        random.seed(1)
        return super().act(call)


class Generous(CounterEnv):
    def grade(self) -> float:
        return 1.0


class Strict(CounterEnv):
    def grade(self) -> float:
        return 0.0


class Fragile(CounterEnv):
    def step(self, action: Any) -> Any:
        if "?" in str(action):
            raise ValueError("I do not understand")
        return super().step(action)


class Shaky(CounterEnv):
    def step(self, action: Any) -> Any:
        if action == "no_such_tool 1":
            raise ValueError("I do not understand")
        return super().step(action)


class Copyable(CounterEnv):
    def __copy__(self) -> Any:
        return self


class Sticky(CounterEnv):
    def close(self) -> None:
        if self._episode is None:
            raise RuntimeError("closed already")
        super().close()


class Endless(CounterEnv):
    def _limit_hit(self, episode: Any) -> Any:
        return None


class Silent(CounterEnv):
    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {k: v for k, v in info.items() if k != "messages"}


class Ill(CounterEnv):
    def step(self, action: Any) -> Any:
        return (*super().step(action)[:4], [])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Moody, "reset"),
        (Noisy, "global generators"),
        (Generous, "empty submit"),
        (Strict, "gold turns of task 'count-7'"),
        (Fragile, "ValueError: I do not understand"),
        (Shaky, "end the episode: no; ValueError was raised: I do not understand"),
        (Copyable, "copy of a live environment"),
        (Endless, "unusable replies in a row"),
        (Silent, "info of step"),
        (Ill, "gymnasium's check_env failed"),
    ],
)
def test_check_env_names_the_broken_promise(broken: Callable[[], AgentEnv], message: str) -> None:
    with pytest.raises(CheckFailed, match=message):
        check_env(broken)


def test_check_env_finds_a_close_that_works_once() -> None:
    with pytest.raises(RuntimeError, match="closed already"):
        check_env(Sticky)
