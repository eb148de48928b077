"""One suite for every registered environment, found in the registry."""

from __future__ import annotations

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

import agentgym
from agentgym.env import AgentEnv
from agentgym.testing import check_env, check_fork

SANDBOXED = {"agentgym/Terminal-v0"}
ENVS = [
    pytest.param(env_id, marks=pytest.mark.sandbox if env_id in SANDBOXED else ()) for env_id in agentgym.list_envs()
]


def test_the_built_in_environments_are_registered() -> None:
    assert {"agentgym/Terminal-v0", "agentgym/Counter-v0"} <= set(agentgym.list_envs())


@pytest.mark.parametrize("env_id", ENVS)
def test_keeps_the_contract_and_forks(env_id: str) -> None:
    assert len(check_env(env_id).checks) >= 10
    assert len(check_fork(env_id).checks) >= 7


@pytest.mark.parametrize("env_id", ENVS)
def test_both_makers_give_an_environment_that_forks(env_id: str) -> None:
    for made in (gymnasium.make(env_id), agentgym.make(env_id)):
        assert isinstance(made, AgentEnv)
        gymnasium_check_env(made)
        made.reset(seed=0)
        with made.snapshot() as snapshot:
            left, right = snapshot.fork(2)
            made.step("anything")
            made.restore(snapshot)
            assert made.episode.turn == left.episode.turn == right.episode.turn == 0
        for env in (left, right, made):
            env.close()
            env.close()
