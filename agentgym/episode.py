"""What an episode counts and what limits it, and the values of one turn.

Owns the records that `AgentEnv` keeps and the spaces it declares. Leaves what they mean to `env.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from agentgym.errors import ConfigError
from agentgym.task import Task
from agentgym.types import StopReason

_PRINTABLE = "".join(chr(c) for c in range(32, 127))
MAX_TEXT = 1 << 24


class AnyText(gymnasium.spaces.Text):
    """A space of all Unicode texts; gymnasium's own knows only a listed alphabet. Samples are short ASCII."""

    def __init__(self, max_length: int = MAX_TEXT, seed: int | None = None) -> None:
        super().__init__(max_length, min_length=0, charset=_PRINTABLE, seed=seed)

    def contains(self, x: Any) -> bool:
        """True for any text that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A random printable text of at most 32 characters."""
        length = int(self.np_random.integers(0, 33))
        return "".join(_PRINTABLE[int(i)] for i in self.np_random.integers(0, len(_PRINTABLE), length))


ANY_TEXT = AnyText()
"""Copied by each environment: building the alphabet anew would take most of its constructor."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When an episode is cut. Counted inside the environment, so that forks inherit what is used up."""

    max_turns: int = 20
    max_tool_calls: int = 100
    timeout_s: float = 600.0
    """Seconds spent acting in the world, over the whole episode; sampling does not count."""
    turn_timeout_s: float = 30.0
    max_output_bytes: int = 10_000
    """Of one observation; longer ones lose their middle and say how much."""
    max_bad_calls: int = 3
    """Unusable replies in a row."""
    score_truncated: bool = True
    """Score what exists when a limit ends the episode; otherwise the reward is 0."""

    def __post_init__(self) -> None:
        """Refuse limits that no episode could meet."""
        for name in ("max_turns", "max_tool_calls", "timeout_s", "turn_timeout_s", "max_output_bytes", "max_bad_calls"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"limit {name} is {getattr(self, name)!r}; it must be above 0")


@dataclass(frozen=True, slots=True)
class Reply:
    """What an author's `act` answers to one call."""

    text: str
    ended: bool = False
    """True where the policy handed its work in: the episode is graded and terminated."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Named rewards of this turn, beside the outcome."""


@dataclass(slots=True)
class Episode:
    """What the base class counts; copied by every fork."""

    task: Task
    limits: Limits
    turn: int = 0
    tool_calls: int = 0
    bad_calls: int = 0
    cuts: int = 0
    """Replies in a row that the engine's token limit cut."""
    elapsed_s: float = 0.0
    stop: StopReason | None = None
    broken: str | None = None


def cut_middle(text: str, limit_bytes: int) -> str:
    """Keep head and tail of a text that is too long, and say between them how many bytes were cut."""
    if len(text) <= limit_bytes // 4:
        return text
    raw = text.encode("utf-8", "surrogatepass")
    if len(raw) <= limit_bytes:
        return text
    half = limit_bytes // 2
    head = raw[:half].decode("utf-8", "ignore")
    tail = raw[len(raw) - (limit_bytes - half) :].decode("utf-8", "ignore")
    return f"{head}\n[... {len(raw) - limit_bytes} bytes cut ...]\n{tail}"
