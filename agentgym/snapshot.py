"""A frozen state of an environment: restore it many times, fork it n times, release it once.

Owns how the Python side of an environment is copied into a snapshot and out of it again. Leaves the world's
side to the resources, and when to freeze to `env.py`.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from agentgym.errors import ConfigError, EnvError, SnapshotError
from agentgym.sandbox import Resource, ResourceSnapshot
from agentgym.types import Level

if TYPE_CHECKING:
    from agentgym.env import AgentEnv


class _Slot:
    """Stands in a frozen state for something that a fork puts in: the new environment, or a live resource."""


_ids = itertools.count(1)


class EnvSnapshot:
    """A frozen state of an environment: restore it many times, fork it n times, release it once.

    Reference counted: whoever keeps it beyond the holder's `release` calls `retain` first. As a context
    manager it releases itself. Live copies are not touched by a release.
    """

    def __init__(self, env: AgentEnv, resources: Sequence[ResourceSnapshot]) -> None:
        """Freeze the Python side; the resources are frozen already. Use `AgentEnv.snapshot`."""
        self.id = f"s{next(_ids)}"
        self.level = min((r.level for r in resources), default=Level.STATE)
        """The least that all parts of the world keep."""
        self.losses = tuple(loss for r in resources for loss in r.losses)
        """What was running or open and will not come back; empty when nothing is lost."""
        self.task = env.episode.task
        self._origin = env
        self._class = type(env)
        self._resources = tuple(resources)
        self._slots = [_Slot() for _ in resources]
        self._env_slot = _Slot()
        self._shared = [env.spec, env.action_space, env.observation_space, env.tasks, env.default_limits, self.task]
        memo: dict[int, Any] = {id(shared): shared for shared in self._shared}
        memo |= {id(live): slot for live, slot in zip(env._resources, self._slots, strict=True)}
        memo[id(env)] = self._env_slot
        self._frozen = copied(vars(env), memo, type(env).__name__)
        self._references = 1

    def fork(self, n: int = 1, *, seeds: Sequence[int] | None = None) -> list[AgentEnv]:
        """Give n live environments in this state, independent of each other and of the origin.

        Args:
            n: How many.
            seeds: One a copy, for random futures that differ; None: all go on with the frozen random state,
                so equal actions give equal observations.

        Raises:
            SnapshotError: the snapshot was released.
        """
        if n < 1 or (seeds is not None and len(seeds) != n):
            raise ConfigError(f"fork(n={n}) needs n >= 1 and one seed a copy, got {seeds!r}")
        live = self._fork_resources(n)
        children = []
        for index in range(n):
            child = object.__new__(self._class)
            self._thaw_into(child, [forks[index] for forks in live])
            if seeds is not None:
                child.reseed(seeds[index])
            children.append(child)
        return children

    def restore(self, env: AgentEnv | None = None) -> AgentEnv:
        """Put an environment back into this state, in place: the one it was taken from unless told otherwise."""
        target = self._origin if env is None else env
        if type(target) is not self._class:
            raise SnapshotError(f"a snapshot of {self._class.__name__} cannot be restored into {type(target).__name__}")
        live = self._fork_resources(1)
        target._release_world()
        self._thaw_into(target, [forks[0] for forks in live])
        return target

    def digest(self) -> str:
        """A hash over the digests of all resources; two equal worlds have equal digests."""
        self._check()
        return hashlib.sha256("\n".join(r.digest() for r in self._resources).encode()).hexdigest()

    def retain(self) -> EnvSnapshot:
        """Count one holder more; each holder releases once."""
        self._check()
        self._references += 1
        return self

    def release(self) -> None:
        """Count one holder less; the last one frees the storage.

        Raises:
            SnapshotError: it was released already.
        """
        self._check()
        self._references -= 1
        if self._references == 0:
            self._frozen = {}
            for resource in self._resources:
                resource.release()

    @property
    def released(self) -> bool:
        """True once the last holder let go."""
        return self._references == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.released:
            self.release()

    def _check(self) -> None:
        if self.released:
            raise SnapshotError(f"snapshot {self.id} was released; take a new one, or retain() it before releasing")

    def _fork_resources(self, n: int) -> list[Sequence[Resource]]:
        self._check()
        live: list[Sequence[Resource]] = []
        try:
            for resource in self._resources:
                live.append(resource.fork(n))
        except BaseException:
            for forks in live:
                for fork_ in forks:
                    fork_.close()
            raise
        return live

    def _thaw_into(self, env: AgentEnv, live: list[Resource]) -> None:
        memo: dict[int, Any] = {id(shared): shared for shared in self._shared}
        memo |= {id(slot): resource for slot, resource in zip(self._slots, live, strict=True)}
        memo[id(self._env_slot)] = env
        thawed = copy.deepcopy(self._frozen, memo)
        vars(env).clear()
        vars(env).update(thawed)


def copied(state: dict[str, Any], memo: dict[int, Any], owner: str) -> dict[str, Any]:
    """A deep copy of attributes that shares what the memo names.

    Raises:
        EnvError: one of them cannot be copied; says which.
    """
    clean = dict(memo)  # a copy that fails half-way leaves half-made objects in its memo
    try:
        return copy.deepcopy(state, memo)
    except Exception as error:
        for name, value in state.items():
            try:
                copy.deepcopy(value, dict(clean))
            except Exception:
                raise EnvError(
                    f"attribute {name!r} of {owner} ({type(value).__name__}) cannot be copied by a fork; "
                    "attach() it as a resource, or build it anew where it is used"
                ) from error
        raise
