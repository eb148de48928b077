"""The small frozen values that pass between rooms.

Owns messages, actions, completions, tool descriptions, stop reasons and fork levels. Leaves tasks to
`task.py`, sandboxes to `sandbox.py` and nodes to `tree.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

_json = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps would build an encoder for every call


class Level(IntEnum):
    """How much of a live world a snapshot keeps; each level contains the one before."""

    STATE = 0
    """Python object state, random state, counters."""
    FILES = 1
    """And the file system."""
    SHELL = 2
    """And the shell: directory, variables, functions, aliases, options, traps, umask."""
    PROCESS = 3
    """And live processes: background jobs, open files, interpreter heaps."""

    def __str__(self) -> str:
        return self.name.lower()


class StopReason(StrEnum):
    """Why an episode ended. The first three are `terminated`, the rest `truncated`."""

    SUCCESS = "success"
    FAILURE = "failure"
    SUBMITTED = "submitted"
    """The task ended itself and its score is neither plainly right nor plainly wrong."""
    MAX_TURNS = "max_turns"
    MAX_TOOL_CALLS = "max_tool_calls"
    MAX_TOKENS = "max_tokens"
    """The budget of sampled tokens ran out, or a reply was cut twice in a row."""
    MAX_CONTEXT = "max_context"
    TIMEOUT = "timeout"
    BAD_CALLS = "bad_calls"
    """Too many unusable replies in a row."""
    BUDGET = "budget"
    """The rollout's own budget ended while the episode could have gone on."""

    @property
    def terminated(self) -> bool:
        """True where the task ended itself, False where a limit did."""
        return self in (StopReason.SUCCESS, StopReason.FAILURE, StopReason.SUBMITTED)


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of a tool."""

    name: str
    description: str
    required: bool = True
    kind: str = "string"
    """A JSON schema type: string, integer, number, boolean."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """What the policy is told about a tool."""

    name: str
    description: str
    params: tuple[Param, ...] = ()

    def to_openai(self) -> dict[str, Any]:
        """The tool in the OpenAI function-calling form."""
        properties = {p.name: {"type": p.kind, "description": p.description} for p in self.params}
        required = [p.name for p in self.params if p.required]
        parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of one tool."""

    name: str
    arguments: Mapping[str, Any]
    id: str = "call_0"

    def to_openai(self) -> dict[str, Any]:
        """The call as it stands in an assistant message."""
        arguments = _json(dict(self.arguments))
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class Action:
    """The policy's turn: its text, or calls that something else has parsed already."""

    text: str
    calls: tuple[ToolCall, ...] | None = None
    """None: the environment parses the text with its codec."""
    cut: bool = False
    """True when the engine stopped at its token limit, so the text may end inside a call; never executed."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, in the OpenAI roles system, user, assistant, tool."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    def to_openai(self) -> dict[str, Any]:
        """The message as the chat-completions API spells it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.to_openai() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    @classmethod
    def from_openai(cls, raw: Mapping[str, Any]) -> Message:
        """Read a message back; the arguments of a call must be a JSON object."""
        calls = tuple(
            ToolCall(c["function"]["name"], json.loads(c["function"]["arguments"]), c["id"])
            for c in raw.get("tool_calls") or ()
        )
        return cls(raw["role"], raw.get("content") or "", calls, raw.get("tool_call_id"))


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled for one turn.

    Example: ids (7, 8), logprobs (-0.1, -2.3), text "ls", finish_reason "stop", policy_version 3.
    """

    text: str
    ids_T: tuple[int, ...]
    logprobs_T: tuple[float, ...]
    """Under the behaviour policy at the sampling temperature, in nats; one a token."""
    finish_reason: str = "stop"
    """"stop", or "length" when the token limit cut the reply."""
    policy_version: int = 0
    """The version when sampling began."""
    entropy_T: tuple[float, ...] = ()
    """Entropy of the top-k distribution at each token, in nats; empty where the engine has none."""
    end_policy_version: int | None = None
    """Set where the weights changed while the turn was being sampled."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step of an environment, as `gymnasium` returns it, with names."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """True where no further step is possible."""
        return self.terminated or self.truncated
