"""`agentgym/Counter-v0`: count to a target. The smallest environment that forks, and an example for authors.

An environment is one file: its tools, how an episode starts (`begin`), what a call does (`act`), how the end is
scored (`grade`), and one `register` line. What is stored on `self` forks by itself, and so do `self.np_random`
and every limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentgym.env import AgentEnv
from agentgym.episode import Reply
from agentgym.registry import register
from agentgym.task import Task
from agentgym.types import Param, ToolCall, ToolSpec


class CounterEnv(AgentEnv):
    """Add numbers until the count is the target, then submit; a random draw each turn shows that chance forks too."""

    tools: tuple[ToolSpec, ...] = (
        ToolSpec("add", "Add a whole number to the count.", (Param("n", "A whole number.", kind="integer"),)),
        ToolSpec("submit", "Hand in the count."),
    )

    def __init__(self, tasks: str | Sequence[Task] = (), *, target: int = 7, **options: Any) -> None:
        """Make an environment with tasks, or with one of that target; options as for `AgentEnv`."""
        super().__init__(tasks or [counter_task(target)], **options)

    def begin(self, task: Task) -> str:
        """Start at 0."""
        self.count = 0
        self.target = int(task.setup["target"])
        return f"{task.prompt}\n{self._state()}"

    def act(self, call: ToolCall) -> Reply | str:
        """Add, or hand in."""
        if call.name == "submit":
            return Reply(f"submitted {self.count}", ended=True)
        self.count += call.arguments["n"]
        return self._state()

    def grade(self) -> float:
        """1 where the count is the target."""
        return float(self.count == self.target)

    def _state(self) -> str:
        return f"count {self.count}, draw {self.np_random.integers(1000)}"


def counter_task(target: int) -> Task:
    """The task of counting to a target."""
    gold = ({"name": "add", "arguments": {"n": target}}, {"name": "submit", "arguments": {}})
    return Task(f"count-{target}", "agentgym/Counter-v0", f"Count to {target}.", {"target": target}, gold=gold)


register("agentgym/Counter-v0", CounterEnv)
