from __future__ import annotations

import re

import pytest

from agentgym.envs.keyhunt import generate
from agentgym.envs.world import world_of
from agentgym.errors import ConfigError


def test_tasks_are_the_same_on_every_machine() -> None:
    task = generate(1, 0)[0]
    assert task.answer == "541"
    assert task.meta["dirs"] == ["dubi", "katu", "kibu", "mozo", "nari", "rate", "rofi", "vosu"]
    assert task.gold[1]["arguments"] == {"command": "cat nari/code"}


def test_a_task_does_not_depend_on_how_many_are_made() -> None:
    assert generate(20, 3)[:5] == generate(5, 3)
    assert generate(5, 3) != generate(5, 4)


@pytest.mark.parametrize("num_dirs", [2, 8, 40])
def test_only_the_directory_of_the_note_has_the_right_code(num_dirs: int) -> None:
    for task in generate(30, 1, num_dirs=num_dirs):
        content = {file.path: file.data.decode() for file in world_of(task).files if file.kind == "file"}
        pointed = re.fullmatch(r"The code is in (\w{4})\n", content.pop("note"))
        assert pointed is not None
        assert content[f"{pointed[1]}/code"].strip() == task.answer == task.verifier["answer"]
        assert len(content) == num_dirs == len(set(content.values()))
        assert all(re.fullmatch(r"[1-9]\d\d\n", code) for code in content.values())
        assert not any(path.startswith("/") for path in content)
        assert task.answer not in task.prompt and all(name in task.prompt for name in task.meta["dirs"])


def test_every_directory_is_the_right_one_sometimes() -> None:
    places = [task.meta["dirs"].index(task.gold[1]["arguments"]["command"][4:8]) for task in generate(400, 2)]
    counts = [places.count(place) for place in range(8)]
    assert min(counts) >= 25, f"a uniform choice has about 50 each, got {counts}"


def test_ids_tell_variants_apart() -> None:
    ids = {task.id for seed in (0, 1) for dirs in (4, 8) for task in generate(3, seed, num_dirs=dirs)}
    assert len(ids) == 12
    assert {"keyhunt-0-0", "keyhunt-1-2-d4"} <= ids


@pytest.mark.parametrize(
    ("num", "seed", "dirs", "word"), [(0, 0, 8, "num 0"), (1, -1, 8, "seed -1"), (1, 0, 1, "num_dirs 1")]
)
def test_impossible_families_are_refused(num: int, seed: int, dirs: int, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        generate(num, seed, num_dirs=dirs)
