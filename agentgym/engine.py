"""The door to whatever samples: token ids in; ids, log-probabilities, policy version out.

Owns the protocol, the request, how seeds are derived, and `ScriptedEngine`, which plays a plain Python policy
through the same door. Leaves real models to `agentgym.trainers` and chat rendering to `chat.py`.

Axes: T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentgym.chat import ByteRenderer, Renderer
from agentgym.errors import EngineError
from agentgym.types import Completion, Message


def derive_seed(*parts: int | str) -> int:
    """A seed from an identity: equal parts give equal seeds, on every machine and in every process.

    Seeds are never handed out in order of completion. A rollout derives, with its base seed `seed`,

        the world's reset            derive_seed(seed, task id, "world"), shared by all trees of the task
        the root of tree i           derive_seed(seed, task id, i)
        the k-th child of a node     derive_seed(the node's seed, k)
        the chooser of a task        derive_seed(seed, task id, "choose")

    so that a turn's seed depends on the base seed, the task, the tree and the position in the tree, and on
    nothing else; which replica samples it does not matter.

    Returns:
        63 bits: the first eight bytes of SHA-256 over the parts' `repr`, without the sign.
    """
    for part in parts:
        if type(part) is not int and type(part) is not str:  # numpy's integers have another repr
            return derive_seed(*(str(p) if isinstance(p, str) else int(p) for p in parts))
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One turn to sample."""

    ids_T: tuple[int, ...]
    """The whole branch so far; an engine that reads tokens uses only this."""
    messages: tuple[Message, ...]
    """The same branch as chat, for engines that speak chat."""
    seed: int
    task_id: str = ""
    turn_index: int = 0
    """Turns before this one."""
    max_tokens: int = 1024
    temperature: float = 1.0


class Engine(Protocol):
    """Samples turns with some version of a policy.

    An engine that answers at once, without waiting for anything, may also have `sample_now(request)`, the same
    as a plain call: the rollout then plays without a hop to its event loop at each turn.
    """

    policy_version: int
    trainable: bool
    """False where ids or log-probabilities are not the policy's own: fine for evaluation, refused for training."""

    @property
    def renderer(self) -> Renderer:
        """Turns chat into tokens and tokens into text for this engine's model."""

    async def sample(self, request: SampleRequest) -> Completion:
        """Sample one turn.

        Raises:
            EngineError: the engine is unreachable or broke.
        """

    async def score(self, ids_T: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of each token of each continuation after the context, in nats."""

    def load_weights(self, version: int) -> None:
        """Take new weights and reset caches that belong to the old ones."""

    def reset_cache(self) -> None:
        """Forget cached prefixes."""


Policy = Callable[[SampleRequest], str]
"""A policy without a model: reads the request, writes the turn."""


class ScriptedEngine:
    """Plays a Python function as if it were a model; tokens are bytes, every log-probability is 0 (certain)."""

    trainable = False

    def __init__(self, policy: Policy, *, policy_version: int = 0) -> None:
        self.policy = policy
        self.policy_version = policy_version
        self.renderer = ByteRenderer()

    async def sample(self, request: SampleRequest) -> Completion:
        """As `sample_now`, through the protocol's door."""
        return self.sample_now(request)

    def sample_now(self, request: SampleRequest) -> Completion:
        """Call the policy and spell its answer in byte tokens, cut at the request's limit."""
        version = self.policy_version
        text = self.policy(request)
        ids = (*self.renderer.encode(text), self.renderer.end_id)
        reason = "stop"
        if len(ids) > request.max_tokens:
            ids, reason = ids[: request.max_tokens], "length"
            text = self.renderer.decode(ids)
        return Completion(text, ids, (0.0,) * len(ids), reason, version)

    async def score(self, ids_T: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[list[float]]:
        """A script has no distribution.

        Raises:
            EngineError: always.
        """
        raise EngineError("a scripted policy has no probabilities to score with; use an engine with a model")

    def load_weights(self, version: int) -> None:
        """Count the version; there are no weights."""
        self.policy_version = version

    def reset_cache(self) -> None:
        """There is no cache."""
