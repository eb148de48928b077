"""What namespace sandboxes give on this machine, in words; what each missing piece costs.

Owns the words. Leaves finding out to the spawner, which tries.
"""

from __future__ import annotations

from agentgym.sandbox import Capabilities
from agentgym.sandboxes.client import Spawner
from agentgym.sandboxes.overlay import MAX_DEPTH
from agentgym.sandboxes.python_place import PYTHON, has_python
from agentgym.types import Level

_CONSEQUENCES = {
    "memory": "a command can use all memory of this machine",
    "max_pids": "a command can use up the process numbers of this machine",
    "cpu": "a command can use all processors",
    "disk": "files are counted once a second, and a sandbox that outgrew its limit is ended only then",
}
_UNWATCHED = "files can fill what the layers may take"


def capabilities_of(spawner: Spawner, *, python: bool) -> Capabilities:
    """What the sandboxes of a spawner give.

    Args:
        spawner: It runs.
        python: Of those with live Python, where there is one.
    """
    limited = spawner.limited
    held = {"network", "pids", "readonly_host", "own_root", "capabilities", "seccomp"}
    held |= {"memory", "cpu", "disk"} & limited | ({"max_pids"} if "pids" in limited else set())
    missing = {name: text for name, text in _CONSEQUENCES.items() if name not in held}
    if spawner.limits is None:
        missing["disk"] = _UNWATCHED
    if not has_python():
        missing["python"] = f"no {PYTHON}: live Python cannot be offered, and snapshots keep level shell at most"
    level = Level.PROCESS if python and has_python() else Level.SHELL
    return Capabilities(level, frozenset(held), missing, MAX_DEPTH)
