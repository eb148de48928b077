"""The generated family `keyhunt`: a note names the directory whose file holds the right 3-digit code.

Small enough for a model of a few hundred thousand weights, and still a task in which the first turn decides: who
reads the note knows, who does not guesses among the directories. Owns the generator only; it is played by
`agentgym/Terminal-v0`, and all paths are relative, so that the `local` backend can play it too.
"""

from __future__ import annotations

import numpy as np

from agentgym.errors import ConfigError
from agentgym.task import Task

MAX_TURNS = 5
MAX_DIRS = 256
MTIME_S = 1_704_067_200
"""2024-01-01, so that listings are the same on every day."""
_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"


def generate(num: int = 16, seed: int = 0, *, num_dirs: int = 8) -> list[Task]:
    """Make tasks; task i of a seed is the same whatever `num` is.

    Args:
        num: How many.
        seed: Of the whole family; ids are keyhunt-SEED-INDEX.
        num_dirs: Directories to choose from, so a guess is right once in `num_dirs`. Other than 8, the ids are
            keyhunt-SEED-INDEX-dNUM.

    Raises:
        ConfigError: no task, a negative seed, or a number of directories outside 2 to 256.
    """
    if num < 1 or seed < 0:
        raise ConfigError(f"keyhunt with num {num} and seed {seed}; num must be 1 or more and seed 0 or more")
    if not 2 <= num_dirs <= MAX_DIRS:
        raise ConfigError(f"keyhunt with num_dirs {num_dirs}; it must be 2 to {MAX_DIRS}")
    return [_task(seed, index, num_dirs) for index in range(num)]


def _task(seed: int, index: int, num_dirs: int) -> Task:
    rng = np.random.default_rng([seed, index, num_dirs])
    names = _names(rng, num_dirs)
    codes = [str(100 + int(n)) for n in rng.permutation(900)[:num_dirs]]
    right = int(rng.integers(num_dirs))
    where, code = names[right], codes[right]
    files = [{"path": "note", "text": f"The code is in {where}\n", "mtime": MTIME_S}]
    for name, number in zip(names, codes, strict=True):
        files.append({"path": name, "type": "dir", "mode": "0755", "mtime": MTIME_S})
        files.append({"path": f"{name}/code", "text": f"{number}\n", "mtime": MTIME_S})
    return Task(
        id=f"keyhunt-{seed}-{index}" + ("" if num_dirs == 8 else f"-d{num_dirs}"),
        env="agentgym/Terminal-v0",
        prompt=(
            "Find the 3-digit code and submit it. Each of these directories has a file named code, but only one "
            f"is right; the file note says which: {' '.join(names)}"
        ),
        setup={"files": files},
        verifier={"kind": "answer", "answer": code},
        gold=(
            {"name": "run", "arguments": {"command": "cat note"}},
            {"name": "run", "arguments": {"command": f"cat {where}/code"}},
            {"name": "submit", "arguments": {"answer": code}},
        ),
        answer=code,
        limits={"max_turns": MAX_TURNS},
        meta={"family": "keyhunt", "dirs": names},
    )


def _names(rng: np.random.Generator, num: int) -> list[str]:
    """Different four-letter names such as "kemo", so that a policy must copy them instead of knowing them."""
    names: dict[str, None] = {}
    while len(names) < num:
        parts = rng.integers([len(_CONSONANTS), len(_VOWELS)] * 2)
        names[_CONSONANTS[parts[0]] + _VOWELS[parts[1]] + _CONSONANTS[parts[2]] + _VOWELS[parts[3]]] = None
    return sorted(names)
