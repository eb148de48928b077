"""Random seeds of a sandbox: functions of its seed and of how many commands it ran, so that they fork.

Bash cannot tell the position of its RANDOM stream. Seeding it anew for each command makes what a command
draws the same whether the shell was forked on the way or not.
"""

from __future__ import annotations

import hashlib


def command_seed(seed: int, count: int) -> int:
    """What RANDOM is set to before command number `count`, below 2**20."""
    return int.from_bytes(hashlib.sha256(f"random {seed} {count}".encode()).digest()[:4], "big") >> 12


def hash_seed(seed: int) -> int:
    """PYTHONHASHSEED of a sandbox, in the range that Python takes."""
    return int.from_bytes(hashlib.sha256(f"hash {seed}".encode()).digest()[:4], "big")
