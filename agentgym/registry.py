"""Register and make environments: thin over gymnasium's own registry.

Owns the entry-point group `agentgym.envs` and the wrappers' switch-off. Environments are named by string
("agentgym.envs.terminal:TerminalEnv") and imported when made, so the core imports none of them.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

import gymnasium
from gymnasium.envs.registration import EnvCreator, EnvSpec
from gymnasium.envs.registration import registry as gymnasium_registry

from agentgym.env import AgentEnv
from agentgym.errors import EnvError, UnknownName

GROUP = "agentgym.envs"
_ours: dict[str, str] = {}
_plugins_loaded = False


def register(env_id: str, entry_point: str | type[AgentEnv], **kwargs: Any) -> None:
    """Register an environment under "namespace/Name-v0" for `agentgym.make` and `gymnasium.make`.

    Args:
        env_id: The id; registering it twice with the same entry point is fine.
        entry_point: A class, or "package.module:Class", imported when an environment is made.
        kwargs: Default arguments of the constructor.
    """
    target = entry_point if isinstance(entry_point, str) else f"{entry_point.__module__}:{entry_point.__qualname__}"
    if _ours.get(env_id, target) != target:
        raise EnvError(f"environment {env_id!r} is registered as {_ours[env_id]} already; choose another id")
    if env_id not in _ours:
        # gymnasium's wrappers count outside the environment, and what they count would not fork
        gymnasium.register(
            env_id, cast("EnvCreator | str", entry_point), disable_env_checker=True, order_enforce=False, kwargs=kwargs
        )
        _ours[env_id] = target


def make(env_id: str, **kwargs: Any) -> AgentEnv:
    """Make an environment by id.

    Raises:
        UnknownName: nothing is registered under the id, here or in a plugin.
    """
    if env_id not in _ours:
        load_plugins()
    if env_id not in _ours:
        raise UnknownName.of("environment", env_id, _ours, "`agentgym list envs` lists them")
    env = gymnasium.make(env_id, **kwargs)
    if not isinstance(env, AgentEnv):
        raise EnvError(f"environment {env_id!r} is a {type(env).__name__}; it must derive from agentgym.AgentEnv")
    return env


def list_envs() -> list[str]:
    """All ids, plugins included."""
    load_plugins()
    return sorted(_ours)


def spec(env_id: str) -> EnvSpec:
    """Gymnasium's record of a registered environment."""
    list_envs()
    if env_id not in _ours:
        raise UnknownName.of("environment", env_id, _ours, "`agentgym list envs` lists them")
    return gymnasium_registry[env_id]


def load_plugins() -> None:
    """Import what installed packages offer in the entry-point group `agentgym.envs`; importing registers.

    Raises:
        EnvError: a plugin cannot be imported; names it and its package.
    """
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    for point in entry_points(group=GROUP):
        _load(point)


def _load(point: EntryPoint) -> None:
    try:
        point.load()
    except Exception as error:
        owner = point.dist.name if point.dist is not None else "an unknown package"
        raise EnvError(f"plugin {point.name!r} ({point.value}) of {owner} cannot be imported: {error}") from error


register("agentgym/Terminal-v0", "agentgym.envs.terminal:TerminalEnv")
register("agentgym/Counter-v0", "agentgym.envs.counter:CounterEnv")
