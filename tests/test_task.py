from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import ConfigError, TaskError, UnknownName
from agentgym.task import FAMILIES, Task, check_tasks, load_tasks, task_families

GOOD = {"id": "a", "env": "agentgym/Terminal-v0", "prompt": "do it"}
ENVS = ["agentgym/Counter-v0", "agentgym/Terminal-v0"]


def _jsonl(folder: Path, *lines: object, name: str = "tasks.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


# families


def test_packaged_family_has_117_tasks_with_gold_and_verifier() -> None:
    tasks = load_tasks("nl2sh")
    assert len(tasks) == 117
    assert len({task.id for task in tasks}) == 117
    assert {task.verifier["goal"] for task in tasks} == {"read", "state"}
    assert sum(task.verifier["goal"] == "read" for task in tasks) == 74
    for task in tasks:
        assert [turn["name"] for turn in task.gold] == ["run", "submit"]
        assert (task.answer is not None) == (task.verifier["goal"] == "read")
        assert task.verifier["changes"] or task.verifier["stdout"].strip(), f"{task.id} is solved by doing nothing"
    assert load_tasks("terminal/nl2sh") == tasks
    assert load_tasks("nl2sh", num=3) == tasks[:3]


def test_no_packaged_gold_uses_a_program_outside_a_minimal_system() -> None:
    for task in load_tasks("nl2sh"):
        words = set(task.gold[0]["arguments"]["command"].replace("|", " ").split())
        assert not words & {"cpio", "tree", "rev", "hexdump", "xxd", "python3", "perl", "file"}, task.id


def test_generated_family_takes_num_and_seed() -> None:
    assert len(load_tasks("keyhunt")) == 16
    assert [task.id for task in load_tasks("keyhunt", num=2, seed=5)] == ["keyhunt-5-0", "keyhunt-5-1"]
    assert load_tasks("agentgym.envs.keyhunt:generate", num=2, seed=5) == load_tasks("keyhunt", num=2, seed=5)


def test_families_are_listed_and_all_load() -> None:
    assert set(task_families()) == set(FAMILIES)
    for name in task_families():
        assert load_tasks(name, num=1, known_envs=ENVS)


@pytest.mark.parametrize("name", ["nl2hs", "no/such/file.jsonl", "no.such.module:generate", "agentgym.task:no_such"])
def test_unknown_name_says_which_command_lists_them(name: str) -> None:
    with pytest.raises(UnknownName, match="agentgym list tasks") as caught:
        load_tasks(name)
    assert repr(name) in str(caught.value)


def test_unknown_family_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'nl2sh'"):
        load_tasks("nl2hs")


@pytest.mark.parametrize(("num", "word"), [(0, "1 task or more"), (-1, "1 task or more"), (118, "which has 117")])
def test_impossible_number_is_refused(num: int, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        load_tasks("nl2sh", num=num)


# files


def test_all_formats_of_one_task_are_equal(tmp_path: Path) -> None:
    raw = GOOD | {"setup": {"workdir": "/w"}, "gold": [{"name": "submit", "arguments": {}}], "limits": {"max_turns": 3}}
    table = (
        'id = "a"\nenv = "agentgym/Terminal-v0"\nprompt = "do it"\n'
        'gold = [{name = "submit", arguments = {}}]\nsetup = {workdir = "/w"}\nlimits = {max_turns = 3}\n'
    )
    (tmp_path / "one.toml").write_text(table)
    (tmp_path / "many.toml").write_text("[[task]]\n" + table)
    (tmp_path / "folder").mkdir()
    lines = _jsonl(tmp_path, "", raw, "")
    _jsonl(tmp_path / "folder", raw)
    expected = [Task.from_plain(raw)]
    assert expected[0].gold == ({"name": "submit", "arguments": {}},)
    for path in (lines, tmp_path / "one.toml", tmp_path / "many.toml", tmp_path / "folder"):
        assert load_tasks(str(path)) == expected
        assert check_tasks(path) == []


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({k: v for k, v in GOOD.items() if k != "env"}, ["field 'env' is missing"]),
        ({k: v for k, v in GOOD.items() if k != "prompt"}, ["field 'prompt' is missing"]),
        (GOOD | {"id": 7}, ["field 'id' must be a text, got int"]),
        (GOOD | {"id": " "}, ["field 'id' is empty"]),
        (GOOD | {"setup": []}, ["field 'setup' must be a table, got list"]),
        (GOOD | {"answer": 4}, ["field 'answer' must be a text or null, got int"]),
        (GOOD | {"verifer": {}}, ["field 'verifer' is unknown, did you mean 'verifier'?"]),
        (GOOD | {"gold": ["ls"]}, ["field 'gold': turn 0", "arguments"]),
        (GOOD | {"gold": [{"name": "run"}]}, ["field 'gold': turn 0"]),
        (GOOD | {"limits": {"max_turns": "3"}}, ["field 'limits': 'max_turns' must be a number, got str"]),
        ([GOOD], ["a task must be a table, got list"]),
        ('{"id": "a",', ["not valid JSON"]),
        ('{"id": "a", "id": "b"}', ["not valid JSON", "'id' occurs twice"]),
        ('{"limits": {"x": NaN}}', ["not valid JSON", "NaN"]),
        ("[" * 100_000, ["not valid JSON"]),
    ],
)
def test_broken_line_names_file_line_and_field(tmp_path: Path, raw: object, words: list[str]) -> None:
    path = _jsonl(tmp_path, GOOD | {"id": "fine"}, raw)
    with pytest.raises(TaskError) as caught:
        load_tasks(str(path))
    for word in [f"{path}:2: ", *words]:
        assert word in str(caught.value)
    assert check_tasks(path)[0] in str(caught.value)


def test_unregistered_environment_is_found_at_the_start(tmp_path: Path) -> None:
    """C067."""
    lines = [GOOD | {"id": f"t{n}", "env": "agentgym/Terminl-v0" if n == 316 else GOOD["env"]} for n in range(500)]
    path = _jsonl(tmp_path, *lines)
    assert len(load_tasks(str(path))) == 500
    with pytest.raises(TaskError) as caught:
        load_tasks(str(path), known_envs=ENVS)
    for word in (f"{path}:317: ", "'env'", "'agentgym/Terminl-v0'", "did you mean 'agentgym/Terminal-v0'", "list envs"):
        assert word in str(caught.value)


def test_check_reports_every_broken_line(tmp_path: Path) -> None:
    lines = [GOOD | {"id": f"t{n}", "env": "x" if n in (1, 3) else GOOD["env"]} for n in range(5)]
    path = _jsonl(tmp_path, *lines, GOOD | {"id": "t0"}, "oops")
    problems = check_tasks(path, known_envs=ENVS)
    assert [p.split(": ")[0] for p in problems] == [f"{path}:{n}" for n in (2, 4, 6, 7)]
    assert f"'t0' is used at {path}:1 already" in problems[2]


def test_same_id_in_two_files_of_a_folder_is_refused(tmp_path: Path) -> None:
    _jsonl(tmp_path, GOOD, name="a.jsonl")
    _jsonl(tmp_path, GOOD, name="b.jsonl")
    with pytest.raises(TaskError, match=r"b\.jsonl:1: field 'id'.*a\.jsonl:1"):
        load_tasks(str(tmp_path))


def test_toml_problem_names_the_line_of_its_table(tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text('[[task]]\nid = "a"\nenv = "e"\nprompt = "p"\n\n[[task]]\nid = "b"\nenv = "e"\nprmpt = "p"\n')
    assert [p.split(": ")[0] for p in check_tasks(path)] == [f"{path}:6", f"{path}:6"]
    path.write_text('[[task]]\nid = "a"\nenv = "e"\nprompt = """\n[[task]]\n"""\nx = 1\n')
    assert check_tasks(path)[0].startswith(f"{path}, task 1: field 'x' is unknown")
    path.write_text('id = "a"\nenv = "e"\nprompt = "p"\nmeta = {when = 2024-01-01}\n')
    assert "field 'meta' holds a date" in check_tasks(path)[0]
    path.write_text('note = 1\n[[task]]\nid = "a"\n')
    assert "unexpected note" in check_tasks(path)[0]
    path.write_text("[[task]\n")
    assert "not valid TOML" in check_tasks(path)[0]


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskError, match=r"t\.jsonl: not UTF-8 at byte 0"):
        load_tasks(str(tmp_path / "t.jsonl"))
    (tmp_path / "t.csv").write_text("id\n")
    with pytest.raises(TaskError, match=r"t\.csv is no task file"):
        load_tasks(str(tmp_path / "t.csv"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TaskError, match="has no tasks"):
        load_tasks(str(tmp_path / "empty.jsonl"))


# plain


def test_every_known_task_survives_the_way_through_json() -> None:
    for task in [*load_tasks("nl2sh"), *load_tasks("keyhunt")]:
        assert Task.from_plain(json.loads(json.dumps(task.to_plain()))) == task


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_tables = st.dictionaries(st.text(max_size=6), _json, max_size=3)


@given(_tables, _tables, st.none() | st.text(), st.lists(_tables, max_size=3))
def test_any_task_survives_the_way_through_json(
    setup: dict[str, object], meta: dict[str, object], answer: str | None, turns: list[dict[str, object]]
) -> None:
    gold = tuple({"name": "run", "arguments": arguments} for arguments in turns)
    task = Task("i", "e", "p", setup=setup, gold=gold, answer=answer, meta=meta)
    assert Task.from_plain(json.loads(json.dumps(task.to_plain()))) == task


def test_a_task_is_shared_by_copies() -> None:
    task = load_tasks("keyhunt", num=1)[0]
    assert copy.deepcopy(task) is task
