"""From settings to objects: everything a rollout needs, checked before anything starts.

Owns the refusal of knobs that the chosen environment, policy or chooser would ignore, and the settings in
effect, in which every default is written out. Leaves playing to `rollout.py`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from typing import Any

from gymnasium.envs.registration import load_env_creator

from agentgym import registry
from agentgym.branching import CHOOSERS, Budget, Chooser, get_chooser
from agentgym.config import RolloutConfig
from agentgym.engine import Policy, SampleRequest, ScriptedEngine
from agentgym.env import AgentEnv
from agentgym.episode import Limits
from agentgym.errors import BackendUnavailable, ConfigError
from agentgym.ops import is_weak
from agentgym.policies import make_policy
from agentgym.rollout import Settings
from agentgym.sandbox import Capabilities, get_backend
from agentgym.task import Task, load_tasks
from agentgym.types import Completion, Level

_CHOOSER_OPTIONS = {
    "width": "width",
    "turns": "turns",
    "forks_per_round": "nodes",
    "rounds": "rounds",
    "keep_leaves": "leaves",
}
"""Keys of the section [tree] and what the choosers call them."""
_SKILLED = ("scripted",)
"""Policies that have a skill."""
_DEFAULT_SKILL = 0.7
_OWN_KEYS = {"tasks": "tasks.name", "backend": "env.backend", "codec": "env.codec", "limits": "section [limits]"}
"""Arguments of environments that have a key of their own."""
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Plan:
    """A rollout that is ready to start."""

    config: RolloutConfig
    """In effect: what was not set holds the value that is used, but for limits, which each task may have its own."""
    tasks: list[Task]
    engine: MeteredEngine
    settings: Settings
    env_kwargs: dict[str, Any]
    """As JSON types; `make_env` reads them, and so does a replay."""
    needs: Level
    """The fork level without which the environment makes no sense."""

    def make_env(self, task: Task) -> AgentEnv:
        """An environment for a task."""
        return make_env(self.config.env.id, self.env_kwargs)

    @property
    def num_trees(self) -> int:
        """How many trees will grow."""
        return len(self.tasks) * self.settings.trees_per_task


class MeteredEngine(ScriptedEngine):
    """Counts what was really sampled, at the engine's door, from any thread."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self._lock = threading.Lock()
        self.turns = 0
        self.tokens = 0

    def sample_now(self, request: SampleRequest) -> Completion:
        """Sample, and count."""
        completion = super().sample_now(request)
        with self._lock:
            self.turns += 1
            self.tokens += len(completion.ids_T)
        return completion


def make_plan(config: RolloutConfig) -> Plan:
    """Check all settings against what they name, and make the objects.

    Raises:
        UnknownName: no such environment, task family, policy, chooser or codec.
        ConfigError: a setting would be ignored, or makes no sense together with another.
        TaskError: a task is broken.
    """
    kwargs = _env_kwargs(config)
    chooser = _chooser(config)
    skill = _skill(config)
    env = make_env(config.env.id, kwargs)
    try:
        kwargs = kwargs | {"limits": asdict(env.default_limits)}
        if hasattr(env, "backend"):
            kwargs["backend"] = env.backend
        tasks = _tasks(config, env)
        policy = make_policy(config.policy.name, tasks=tasks, tools=env.tools, codec=env.codec_name, skill=skill)
        in_effect = _in_effect(config, env, kwargs, chooser, len(tasks), skill)
        needs = env.needs
    finally:
        env.close()
    settings = Settings(
        trees_per_task=config.tree.trees_per_task,
        chooser=chooser,
        budget=Budget(**config.budget.model_dump()),
        concurrency=config.run.concurrency,
        seed=config.run.seed,
        max_tokens_per_turn=config.policy.max_tokens,
        max_sampled_tokens=config.policy.max_branch_tokens,
        max_context_tokens=config.policy.max_context_tokens,
        timeout_s=config.run.branch_timeout_s,
        verify_forks=config.tree.verify_forks,
    )
    return Plan(in_effect, tasks, MeteredEngine(policy), settings, kwargs, needs)


def make_env(env_id: str, kwargs: Mapping[str, Any]) -> AgentEnv:
    """Make an environment from arguments as they are stored."""
    plain = dict(kwargs)
    if isinstance(plain.get("limits"), Mapping):
        plain["limits"] = Limits(**plain["limits"])
    return registry.make(env_id, **plain)


def check_backend(plan: Plan) -> Capabilities | None:
    """Try the backend; None where the environment uses none.

    Raises:
        BackendUnavailable: this machine refuses it, or it keeps less than the environment needs.
    """
    if "backend" not in plan.env_kwargs:
        return None
    name = plan.env_kwargs["backend"]
    capabilities = get_backend(name).probe()
    if capabilities.level < plan.needs:
        raise BackendUnavailable(
            f"backend {name!r} keeps level {capabilities.level} and {plan.config.env.id} needs {plan.needs}; "
            "`agentgym doctor` says why"
        )
    return capabilities


def weakness(name: str, capabilities: Capabilities | None) -> str | None:
    """The warning that a weak backend deserves; None where it isolates."""
    if capabilities is None or not is_weak(capabilities):
        return None
    missing = "; ".join(f"{piece}: {consequence}" for piece, consequence in capabilities.missing.items())
    return f"backend {name!r} isolates little ({missing or 'nothing is kept apart'}); run only what you trust"


# checks


def _env_kwargs(config: RolloutConfig) -> dict[str, Any]:
    """Arguments of the environment, each of which it takes."""
    known = _parameters(config.env.id)
    for name in config.env.kwargs:
        if name in _OWN_KEYS:
            raise ConfigError(f"env.kwargs.{name} is set; write {_OWN_KEYS[name]} instead")
        if known is not None and name not in known:
            close = get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"; did you mean {close[0]!r}?" if close else ";"
            takes = ", ".join(sorted(set(known) - set(_OWN_KEYS))) or "nothing of its own"
            raise ConfigError(
                f"env.kwargs.{name} is set, but {config.env.id} has no such option{hint} it takes: {takes}"
            )
    if config.env.backend is not None and known is not None and "backend" not in known:
        raise ConfigError(f"env.backend is {config.env.backend!r}, but {config.env.id} uses no sandbox; leave it unset")
    kwargs = dict(config.env.kwargs) | {"codec": config.env.codec}
    if config.env.backend is not None:
        kwargs["backend"] = config.env.backend
    limits = {key: value for key, value in config.limits.model_dump().items() if value is not None}
    return kwargs | ({"limits": asdict(Limits(**limits))} if limits else {})


def _parameters(env_id: str) -> Mapping[str, inspect.Parameter] | None:
    """Parameters of an environment's constructor, those it passes on included; None where it takes anything."""
    entry_point = registry.spec(env_id).entry_point
    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    assert creator is not None, "our registry takes no environment without an entry point"
    makers = (
        [vars(cls)["__init__"] for cls in creator.__mro__ if "__init__" in vars(cls)]
        if isinstance(creator, type)
        else [creator]
    )
    found: dict[str, inspect.Parameter] = {}
    for maker in makers:
        parameters = inspect.signature(maker).parameters.values()
        found = {p.name: p for p in parameters if p.kind in _NAMED and p.name != "self"} | found
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            return found
    return None


def _chooser(config: RolloutConfig) -> Chooser:
    name = config.tree.chooser
    given = {key: value for key in _CHOOSER_OPTIONS if (value := getattr(config.tree, key)) is not None}
    if name in CHOOSERS:
        takes = inspect.signature(CHOOSERS[name]).parameters
        for key in given:
            if _CHOOSER_OPTIONS[key] not in takes:
                valid = [f"tree.{k}" for k, option in _CHOOSER_OPTIONS.items() if option in takes]
                raise ConfigError(
                    f"tree.{key} is {given[key]!r}, but chooser {name!r} ignores it; "
                    f"it takes: {', '.join(valid) or 'none of these'}; `agentgym list choosers` lists choosers"
                )
        if config.tree.verify_forks and name == "none":
            raise ConfigError("tree.verify_forks is set, but chooser 'none' forks nothing; choose another, or unset it")
    return get_chooser(name, **{_CHOOSER_OPTIONS[key]: value for key, value in given.items()})


def _skill(config: RolloutConfig) -> float:
    if config.policy.skill is None:
        return _DEFAULT_SKILL
    if config.policy.name not in _SKILLED:
        raise ConfigError(
            f"policy.skill is {config.policy.skill}, but policy {config.policy.name!r} ignores it; "
            f"only {', '.join(_SKILLED)} has a skill; `agentgym list policies` lists policies"
        )
    return config.policy.skill


def _tasks(config: RolloutConfig, env: AgentEnv) -> list[Task]:
    """The tasks, each for this environment, with the limits that were set."""
    name = config.tasks.name or _own_family(config.env.id)
    seed = config.run.seed if config.tasks.seed is None else config.tasks.seed
    if name is not None:
        tasks = load_tasks(name, num=config.tasks.num, seed=seed, known_envs=registry.list_envs())
    else:
        tasks = list(env.tasks[: config.tasks.num])
        if len(tasks) < (config.tasks.num or 1):
            raise ConfigError(
                f"{config.env.id} has {len(env.tasks)} tasks of its own, {config.tasks.num or 1} are asked; "
                "name others with --tasks (`agentgym list tasks`)"
            )
    stranger = next((task for task in tasks if task.env != config.env.id), None)
    if stranger is not None:
        raise ConfigError(
            f"task {stranger.id!r} of {name or 'the environment'} is for {stranger.env}, not for {config.env.id}"
        )
    limits = {key: value for key, value in config.limits.model_dump().items() if value is not None}
    # what a user asks for wins over what a task brings, or it would be ignored in silence
    return [replace(task, limits={**task.limits, **limits}) for task in tasks] if limits else tasks


def _own_family(env_id: str) -> str | None:
    parameter = (_parameters(env_id) or {}).get("tasks")
    return parameter.default if parameter is not None and isinstance(parameter.default, str) else None


def _in_effect(
    config: RolloutConfig, env: AgentEnv, kwargs: Mapping[str, Any], chooser: Chooser, num_tasks: int, skill: float
) -> RolloutConfig:
    options = {key: getattr(chooser, option, None) for key, option in _CHOOSER_OPTIONS.items()}
    return config.changed(
        {
            "env": {"backend": kwargs.get("backend"), "codec": env.codec_name},
            "tasks": {
                "name": config.tasks.name or _own_family(config.env.id),
                "num": num_tasks,
                "seed": config.run.seed if config.tasks.seed is None else config.tasks.seed,
            },
            "policy": {"skill": skill if config.policy.name in _SKILLED else None},
            "tree": options,
        }
    )
