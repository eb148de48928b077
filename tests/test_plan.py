"""Settings against what they name: every knob turns something, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentgym import plan
from agentgym.config import load_config
from agentgym.envs.counter import CounterEnv
from agentgym.errors import BackendUnavailable, ConfigError
from agentgym.sandbox import Capabilities
from agentgym.types import Level

COUNTER = "agentgym/Counter-v0"
Command = Callable[..., tuple[int, list[dict[str, Any]], str]]
pytestmark = pytest.mark.usefixtures("workplace")


def test_every_knob_reaches_what_it_turns() -> None:
    sets = [
        "policy.max_tokens=11",
        "policy.max_branch_tokens=12",
        "policy.max_context_tokens=1300",
        "tree.chooser=random",
        "tree.trees_per_task=2",
        "tree.forks_per_round=4",
        "tree.rounds=5",
        "tree.keep_leaves=6",
        "tree.verify_forks=true",
        "budget.max_turns=70",
        "budget.max_tokens=71",
        "budget.max_tool_calls=72",
        "run.seed=8",
        "run.concurrency=9",
        "run.branch_timeout_s=10.5",
        "limits.max_turns=4",
        "env.codec=json",
    ]
    made = plan.make_plan(load_config(sets=sets, flags={"ENV": ("env.id", COUNTER)}))
    got, chooser = made.settings, made.settings.chooser
    assert (got.max_tokens_per_turn, got.max_sampled_tokens, got.max_context_tokens) == (11, 12, 1300)
    assert (got.trees_per_task, got.seed, got.concurrency, got.timeout_s, got.verify_forks) == (2, 8, 9, 10.5, True)
    assert (chooser.nodes, chooser.rounds, chooser.leaves) == (4, 5, 6)  # type: ignore[attr-defined]
    assert (got.budget.max_turns, got.budget.max_tokens, got.budget.max_tool_calls) == (70, 71, 72)
    env = made.make_env(made.tasks[0])
    env.reset(options={"task": made.tasks[0]})
    assert env.codec_name == "json" and env.episode.limits.max_turns == 4
    env.close()


def test_a_limit_that_is_set_wins_over_the_task() -> None:
    made = plan.make_plan(load_config(sets=["limits.max_turns=3", "tasks.num=1", "tasks.name=keyhunt"]))
    assert made.tasks[0].limits["max_turns"] == 3


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (["tree.width=3"], "tree.width is 3, but chooser 'none' ignores it"),
        (["tree.chooser=random", "tree.turns=3"], "tree.turns is (3,), but chooser 'random' ignores it"),
        (["tree.verify_forks=true"], "tree.verify_forks"),
        (["policy.name=noop", "policy.skill=0.5"], "policy.skill is 0.5, but policy 'noop' ignores it"),
        (["env.backend=local"], "uses no sandbox"),
        (["env.kwargs.codec=json"], "write env.codec instead"),
        (["tasks.num=2"], "has 1 tasks of its own, 2 are asked"),
        (["tasks.name=nl2sh"], "is for agentgym/Terminal-v0, not for"),
        (["limits.max_turns=0"], "limits.max_turns is '0'"),
    ],
)
def test_a_knob_that_would_be_ignored_is_refused(agentgym: Command, sets: list[str], said: str) -> None:
    code, _, err = agentgym("rollout", COUNTER, *(word for text in sets for word in ("--set", text)))
    assert code == 2 and said in err and err.count("\n") == 1
    assert not Path("runs").exists()


def test_a_refused_backend_says_what_to_do(agentgym: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real message, of the real backend, where it finds no folder to work in."""
    from agentgym.sandboxes import state
    from agentgym.sandboxes.namespace import NamespaceBackend

    monkeypatch.setattr(plan, "get_backend", lambda name: NamespaceBackend())
    monkeypatch.setattr(state, "places", lambda: [("/dev/null/none", True)])
    code, _, err = agentgym("rollout", "--tasks", "keyhunt", "--num", "1")
    assert code == 1 and "/dev/null/none" in err
    assert "agentgym doctor" in err and "env.backend=local" in err and not Path("runs").exists()


def test_a_backend_that_keeps_too_little_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shallow:
        def probe(self) -> Capabilities:
            return Capabilities(Level.FILES, frozenset())

    monkeypatch.setattr(plan, "get_backend", lambda name: Shallow())
    made = plan.make_plan(load_config(sets=["tasks.name=keyhunt", "tasks.num=1"]))
    with pytest.raises(BackendUnavailable, match=r"keeps level files .* needs shell"):
        plan.check_backend(made)


def test_an_environment_without_tasks_wants_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "make_env", lambda env_id, kwargs: CounterWithoutTasks())
    with pytest.raises(ConfigError, match="has 0 tasks of its own"):
        plan.make_plan(load_config(flags={"ENV": ("env.id", COUNTER)}))


class CounterWithoutTasks(CounterEnv):
    def __init__(self) -> None:
        super().__init__()
        self.tasks = ()
