"""agentgym: an agentic environment gym with tree-forking sandboxes.

`import agentgym` registers the built-in environments with gymnasium and offers the few names most scripts
need; everything heavier is imported where it is used.
"""

from agentgym.env import AgentEnv, fork
from agentgym.episode import Limits, Reply
from agentgym.registry import list_envs, make, register
from agentgym.snapshot import EnvSnapshot
from agentgym.task import Task, load_tasks
from agentgym.types import Action, Level, Message, Param, StopReason, ToolCall, ToolSpec

__version__ = "0.1.0"

__all__ = [
    "Action",
    "AgentEnv",
    "EnvSnapshot",
    "Level",
    "Limits",
    "Message",
    "Param",
    "Reply",
    "StopReason",
    "Task",
    "ToolCall",
    "ToolSpec",
    "fork",
    "list_envs",
    "load_tasks",
    "make",
    "register",
]
