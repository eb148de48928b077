"""What is asked and how it is checked: data, loaded by name or from a file.

Owns the `Task` record, the families by name and the file formats. Leaves set-up and verification to the
environment, which reads `setup` and `verifier`.

A file holds one task a line (.jsonl), or `[[task]]` tables or a single task at the top level (.toml); a folder
holds such files. The keys are the fields of `Task`; id, env and prompt are required.
"""

from __future__ import annotations

import difflib
import importlib
import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from agentgym.errors import ConfigError, TaskError, UnknownName


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do. Everything but `prompt` is hidden from the policy."""

    id: str
    env: str
    """The environment that plays it, such as "agentgym/Terminal-v0"."""
    prompt: str
    setup: Mapping[str, Any] = field(default_factory=dict)
    """How the world starts; its keys belong to the environment."""
    verifier: Mapping[str, Any] = field(default_factory=dict)
    """How the end is scored; "kind" names the grader, the other keys belong to it."""
    gold: tuple[Mapping[str, Any], ...] = ()
    """The reference turns, each {"name": tool, "arguments": {...}}; what the oracle policy plays."""
    answer: str | None = None
    """The reference answer, for information gain; None where there is none."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Fields of `Limits` that this task overrides."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Source, difficulty, notes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Task:
        """Tasks are shared by forks: nothing in an episode may change them."""
        return self

    def to_plain(self) -> dict[str, Any]:
        """The task as JSON types, every field present; `from_plain` reads it back."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_plain(cls, raw: object) -> Task:
        """Read a task from JSON types.

        Raises:
            TaskError: names the field that is missing, unknown or of the wrong type.
        """
        problems = list(_problems(raw))
        if problems or not isinstance(raw, Mapping):
            raise TaskError(problems[0] if problems else "not a task")
        return cls(**{**raw, "gold": tuple(raw.get("gold", ()))})


@dataclass(frozen=True, slots=True)
class Family:
    """Tasks that are reached by a name."""

    source: str
    """A file under `agentgym/tasks`, or "module:function" with the signature (num, seed) -> list[Task]."""
    summary: str


FAMILIES = {
    "nl2sh": Family("terminal/nl2sh.jsonl", "117 one-goal shell tasks over four small file trees (NL2SH-ALFA)"),
    "keyhunt": Family("agentgym.envs.keyhunt:generate", "generated: follow a note to the file with a 3-digit code"),
}
DEFAULT_NUM = 16
"""Tasks of a generated family when no number is asked for."""
_ALIASES = {"terminal/nl2sh": "nl2sh", "terminal/keyhunt": "keyhunt"}
_REMEDY = "`agentgym list tasks` lists them; a task file ends in .jsonl or .toml"


def task_families() -> dict[str, str]:
    """Names that `load_tasks` accepts, each with one line of description."""
    return {name: family.summary for name, family in FAMILIES.items()}


def load_tasks(
    name: str, *, num: int | None = None, seed: int = 0, known_envs: Collection[str] | None = None
) -> list[Task]:
    """Load a family, a file, a folder of files, or what a function generates.

    Args:
        name: A family ("nl2sh"), a path (.jsonl, .toml, or a folder of them), or "module:function" with the
            signature (num, seed) -> list[Task].
        num: How many: the first ones of a file, or as many as a generator is to make; None: all, or 16.
        seed: Of a generated family; a file has one order.
        known_envs: Registered environment ids; when given, a task of any other is refused here instead of in
            the middle of a run.

    Raises:
        UnknownName: no such family and no such path.
        TaskError: a task is broken; names file, line and field.
        ConfigError: `num` is below 1 or above what the file has.
    """
    if num is not None and num < 1:
        raise ConfigError(f"num is {num}; ask for 1 task or more")
    short = _ALIASES.get(name, name)
    source = FAMILIES[short].source if short in FAMILIES else name
    if ":" in source and not Path(source).exists():
        tasks = _generate(source, DEFAULT_NUM if num is None else num, seed)
        problems = [f"{task.id}: {p}" for task in tasks for p in _env_problems(task.env, known_envs)]
    else:
        entries = list(_entries(_resolve(short, name)))
        problems = list(_entry_problems(entries, known_envs))
        tasks = [] if problems else [Task.from_plain(raw) for _, raw, _ in entries]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise TaskError(problems[0] + more)
    if not tasks:
        raise TaskError(f"{name} has no tasks; write one a line (.jsonl) or as [[task]] tables (.toml)")
    if num is not None and num > len(tasks):
        raise ConfigError(f"{num} tasks asked of {name}, which has {len(tasks)}; ask for fewer")
    return tasks[:num]


def check_tasks(path: str | Path, *, known_envs: Collection[str] | None = None) -> list[str]:
    """Every problem of a task file or folder, each with file and line; empty when all is well.

    Args:
        path: The file or folder.
        known_envs: Registered environment ids, for telling tasks that nothing can play.

    Raises:
        UnknownName: the path does not exist.
    """
    return list(_entry_problems(list(_entries(_resolve(str(path), str(path)))), known_envs))


# reading files

_Entry = tuple[str, Any, str | None]
"""Where it stands, the raw task, and what is wrong with its spelling (None: nothing)."""


def _resolve(short: str, name: str) -> list[tuple[str, Callable[[], bytes]]]:
    """The files behind a name, each with its label and a way to read it."""
    if short in FAMILIES:
        packaged = files("agentgym.tasks").joinpath(FAMILIES[short].source)
        return [(FAMILIES[short].source, packaged.read_bytes)]
    path = Path(name)
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in (".jsonl", ".toml") and p.is_file())
        return [(str(p), p.read_bytes) for p in found]
    if path.is_file() and path.suffix in (".jsonl", ".toml"):
        return [(str(path), path.read_bytes)]
    if path.exists():
        raise TaskError(f"{name} is no task file; expected a name that ends in .jsonl or .toml")
    raise UnknownName.of("task family or file", name, FAMILIES, _REMEDY)


def _entries(sources: Sequence[tuple[str, Callable[[], bytes]]]) -> Iterator[_Entry]:
    for label, read in sources:
        try:
            text = read().decode()
        except OSError as error:
            raise TaskError(f"{label} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            yield label, None, f"not UTF-8 at byte {error.start}"
            continue
        yield from _toml_entries(label, text) if label.endswith(".toml") else _json_entries(label, text)


def _json_entries(label: str, text: str) -> Iterator[_Entry]:
    # not splitlines(): a line separator inside a JSON string is legal and would cut the line in two
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{label}:{number}"
        try:
            yield where, json.loads(line, object_pairs_hook=_once, parse_constant=_no_constant), None
        except json.JSONDecodeError as error:
            yield where, None, f"not valid JSON ({error.msg} at column {error.colno})"
        except (ValueError, RecursionError) as error:
            yield where, None, f"not valid JSON ({error})"


def _toml_entries(label: str, text: str) -> Iterator[_Entry]:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        yield label, None, f"not valid TOML ({error})"
        return
    if "task" not in raw:
        yield f"{label}:1", raw, None
        return
    if not isinstance(raw["task"], list) or len(raw) > 1:
        keys = ", ".join(sorted(set(raw) - {"task"})) or "task"
        yield label, None, f"unexpected {keys}; expected [[task]] tables only, or one task at the top level"
        return
    lines = [n for n, line in enumerate(text.split("\n"), 1) if re.match(r"\s*\[\[\s*task\s*\]\]", line)]
    exact = len(lines) == len(raw["task"])  # a multi-line string may hold such a line too
    for index, entry in enumerate(raw["task"]):
        yield f"{label}:{lines[index]}" if exact else f"{label}, task {index + 1}", entry, None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(k for k in keys if keys.count(k) > 1)!r} occurs twice")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _generate(source: str, num: int, seed: int) -> list[Task]:
    module, _, attribute = source.partition(":")
    try:
        generate = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownName.of("task family or file", source, FAMILIES, f"{_REMEDY} ({error})") from error
    tasks = list(generate(num, seed))
    wrong = next((t for t in tasks if not isinstance(t, Task)), None)
    if wrong is not None:
        raise TaskError(f"{source} gave a {type(wrong).__name__}; it must give a list of agentgym.Task")
    return tasks


# checking entries


def _entry_problems(entries: Sequence[_Entry], known_envs: Collection[str] | None) -> Iterator[str]:
    seen: dict[str, str] = {}
    for where, raw, misspelt in entries:
        if misspelt is not None:
            yield f"{where}: {misspelt}"
            continue
        yield from (f"{where}: {problem}" for problem in _problems(raw))
        if not isinstance(raw, Mapping):
            continue
        if isinstance(raw.get("env"), str):
            yield from (f"{where}: {problem}" for problem in _env_problems(raw["env"], known_envs))
        task_id = raw.get("id")
        if isinstance(task_id, str) and seen.setdefault(task_id, where) != where:
            yield f"{where}: field 'id': {task_id!r} is used at {seen[task_id]} already; ids must differ"


def _env_problems(env: str, known: Collection[str] | None) -> Iterator[str]:
    if known is not None and env not in known:
        hint = _nearest(env, known)
        yield f"field 'env': environment {env!r} is not registered{hint}; `agentgym list envs` lists them"


_TYPES: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "env": (str,),
    "prompt": (str,),
    "setup": (Mapping,),
    "verifier": (Mapping,),
    "gold": (list, tuple),
    "answer": (str, type(None)),
    "limits": (Mapping,),
    "meta": (Mapping,),
}
_WORDS = {str: "a text", Mapping: "a table", list: "a list", type(None): "null"}
_REQUIRED = ("id", "env", "prompt")


def _problems(raw: object) -> Iterator[str]:
    """What is wrong with one raw task, each with the field's name."""
    if not isinstance(raw, Mapping):
        yield f"a task must be a table, got {type(raw).__name__}"
        return
    for name in _REQUIRED:
        if name not in raw:
            yield f"field {name!r} is missing; a task needs id, env and prompt"
    for name, value in raw.items():
        known = name in _TYPES
        fits = known and isinstance(value, _TYPES[name])
        if not known:
            yield f"field {name!r} is unknown{_nearest(name, _TYPES)}; fields: {', '.join(_TYPES)}"
        elif not fits:
            words = " or ".join(_WORDS[t] for t in _TYPES[name] if t in _WORDS)
            yield f"field {name!r} must be {words}, got {type(value).__name__}"
        elif name in _REQUIRED and not value.strip():
            yield f"field {name!r} is empty"
        elif odd := _odd(value):
            yield f"field {name!r} holds a {odd}; only texts, numbers, true, false, lists and tables can be stored"
        elif name == "gold":
            yield from _gold_problems(value)
        elif name == "limits":
            bad = [k for k, v in value.items() if not isinstance(v, int | float)]
            yield from (f"field 'limits': {k!r} must be a number, got {type(value[k]).__name__}" for k in bad)


def _gold_problems(turns: Sequence[Any]) -> Iterator[str]:
    for index, turn in enumerate(turns):
        good = isinstance(turn, Mapping) and set(turn) == {"name", "arguments"}
        if not good or not isinstance(turn["name"], str) or not isinstance(turn["arguments"], Mapping):
            yield f"field 'gold': turn {index} must be {{name: TOOL, arguments: {{...}}}}, got {str(turn)[:80]}"


def _odd(value: Any) -> str:
    """The type of the first value inside that JSON cannot spell (a TOML date, say); empty when there is none."""
    if isinstance(value, Mapping | list | tuple):
        items = value.values() if isinstance(value, Mapping) else value
        return next(filter(None, map(_odd, items)), "")
    return "" if isinstance(value, str | int | float | type(None)) else type(value).__name__


def _nearest(name: object, known: Collection[str]) -> str:
    close = difflib.get_close_matches(str(name), sorted(known), n=1, cutoff=0.4)
    return f", did you mean {close[0]!r}?" if close else ""


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
