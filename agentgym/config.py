"""Settings of a rollout: one frozen record, merged from file, environment, `--set` and flags; later wins.

Owns the sections, the merging, and the refusal of keys that are misspelt or stand in the wrong section. Leaves
what only a chooser, policy or environment can know (does it use this knob?) to `commands.py`.

    [tree]                                      in a TOML file
    chooser = "random"
    AGENTGYM_TREE__CHOOSER=random               in the environment
    --set tree.chooser=random                   on the command line
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from agentgym.errors import ConfigError

ENV_PREFIX = "AGENTGYM_"
_REMEDY = "`agentgym list settings` lists them"
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EnvSettings(_Section):
    """The environment and how it is made."""

    id: str = Field("agentgym/Terminal-v0", description="registered environment")
    backend: str | None = Field(None, description="sandbox backend; the environment's own default if not set")
    codec: str = Field("compact", description="how the policy spells actions")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="further arguments of the environment")


class LimitSettings(_Section):
    """Limits of an episode; what is set here wins over the task's own."""

    max_turns: Count | None = Field(None, description="turns of an episode")
    max_tool_calls: Count | None = Field(None, description="tool calls of an episode")
    timeout_s: Annotated[float, Field(gt=0)] | None = Field(None, description="seconds of acting, over an episode")
    turn_timeout_s: Annotated[float, Field(gt=0)] | None = Field(None, description="seconds of one turn")
    max_output_bytes: Count | None = Field(None, description="bytes of one observation")
    max_bad_calls: Count | None = Field(None, description="unusable replies in a row")
    score_truncated: bool | None = Field(None, description="score what exists when a limit ends an episode")


class TaskSettings(_Section):
    """Which tasks are played."""

    name: str | None = Field(
        None, description="family, file, folder, or module:function; the environment's own if not set"
    )
    num: Count | None = Field(None, description="how many; all of a file, 16 of a generated family")
    seed: Seed | None = Field(None, description="of generated tasks; run.seed if not set")


class PolicySettings(_Section):
    """Who plays."""

    name: str = Field("scripted", description="policy")
    skill: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="scripted: chance of a right turn")
    max_tokens: Count = Field(1024, description="sampled tokens of one turn")
    max_branch_tokens: Count | None = Field(None, description="sampled tokens of one branch")
    max_context_tokens: Count | None = Field(None, description="tokens of one branch, observations included")


class TreeSettings(_Section):
    """Where a rollout forks. Each chooser takes some of the keys; the others are refused with it."""

    chooser: str = Field("none", description="where to fork")
    width: Count | None = Field(None, description="children of a fork")
    turns: tuple[Count, ...] | None = Field(None, description="turns at which siblings differ, from 1 on")
    trees_per_task: Count = Field(1, description="M: trees of a task")
    forks_per_round: Count | None = Field(None, description="N: nodes forked in a round, each tree")
    rounds: Count | None = Field(None, description="L: rounds of forking")
    keep_leaves: Count | None = Field(None, description="K: leaves kept of a tree, at most")
    verify_forks: bool = Field(False, description="compare the digest of each fork with its snapshot's")


class BudgetSettings(_Section):
    """What all trees of one task may cost together; no limit if not set."""

    max_turns: Count | None = Field(None, description="turns, over all trees of a task")
    max_tokens: Count | None = Field(None, description="sampled tokens, over all trees of a task")
    max_tool_calls: Count | None = Field(None, description="tool calls, over all trees of a task")


class RunSettings(_Section):
    """The run itself."""

    name: str | None = Field(None, description="last part of the run's id; the task family if not set")
    folder: str | None = Field(None, description="where the run is written; runs/<time>-<name> if not set")
    seed: Seed = Field(0, description="of worlds, policy and forks")
    concurrency: Annotated[int, Field(ge=1, le=4096)] = Field(8, description="episodes that live at the same time")
    branch_timeout_s: Annotated[float, Field(gt=0)] = Field(600.0, description="seconds of playing one branch")


class RolloutConfig(_Section):
    """All settings of `agentgym rollout`."""

    env: EnvSettings = EnvSettings.model_construct()
    limits: LimitSettings = LimitSettings.model_construct()
    tasks: TaskSettings = TaskSettings.model_construct()
    policy: PolicySettings = PolicySettings.model_construct()
    tree: TreeSettings = TreeSettings.model_construct()
    budget: BudgetSettings = BudgetSettings.model_construct()
    run: RunSettings = RunSettings.model_construct()

    def changed(self, values: Mapping[str, Mapping[str, Any]]) -> RolloutConfig:
        """A copy with some values replaced, checked again."""
        plain = self.model_dump()
        for section, keys in values.items():
            plain[section] |= keys
        return RolloutConfig.model_validate(plain)

    def to_toml(self) -> str:
        """The settings as a file for `--config`; what is not set stands as a comment."""
        lines: list[str] = []
        for section, keys in self.model_dump().items():
            lines.append(f"[{section}]")
            for key, value in keys.items():
                lines.append(f"# {key} is not set" if value is None else f"{key} = {_toml(value)}")
            lines.append("")
        return "\n".join(lines)

    def to_plain(self) -> dict[str, Any]:
        """The settings as JSON types."""
        plain: dict[str, Any] = self.model_dump(mode="json")
        return plain


@dataclass(frozen=True, slots=True)
class Given:
    """One setting that somebody gave."""

    section: str
    key: str
    value: Any
    source: str
    """What the user reads: "run.toml", "AGENTGYM_TREE__WIDTH", "--set tree.width"."""
    is_text: bool
    """True where the value came as text and its type is to be guessed from the key."""


def load_config(
    file: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    sets: Sequence[str] = (),
    flags: Mapping[str, tuple[str, Any]] | None = None,
) -> RolloutConfig:
    """Merge all sources; later ones win: file, environment, `--set`, flags.

    Args:
        file: A TOML file with the sections of `RolloutConfig`.
        environ: Variables `AGENTGYM_<SECTION>__<KEY>`; other names are left alone.
        sets: "section.key=value".
        flags: Option name to ("section.key", value); values None are skipped.

    Raises:
        ConfigError: names key, section, source and the nearest valid key.
    """
    given = [*(_from_file(file) if file else ()), *_from_environ(environ or {}), *map(_from_set, sets)]
    for flag, (path, value) in (flags or {}).items():
        if value is not None:
            section, _, key = path.partition(".")
            given.append(Given(section, key, value, flag, isinstance(value, str)))
    plain: dict[str, dict[str, Any]] = {}
    for item in given:
        key, value = _checked(item)
        keys = plain.setdefault(item.section, {})
        keys[key] = keys.get(key, {}) | value if key == "kwargs" else value
    return RolloutConfig.model_validate(plain)


def settings() -> Iterator[tuple[str, str, Any, str]]:
    """Every key as (section.key, type, default, what it means)."""
    for section, model in _sections().items():
        for key, info in model.model_fields.items():
            yield (
                f"{section}.{key}",
                _type_words(info.annotation),
                info.get_default(call_default_factory=True),
                str(info.description),
            )


# sources


def _from_file(path: Path) -> Iterator[Given]:
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}; give a TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not valid TOML: {error}") from error
    for section, keys in raw.items():
        if not isinstance(keys, dict):
            raise ConfigError(
                f"unknown key {section!r} at the top level of {path}{_nearest(None, section)}"
                f"keys stand in a section; {_REMEDY}"
            )
        _check_section(section, str(path))
        for key, value in keys.items():
            yield Given(section, key, value, str(path), False)


def _from_environ(environ: Mapping[str, str]) -> Iterator[Given]:
    for name, value in sorted(environ.items()):
        if not name.upper().startswith(ENV_PREFIX):
            continue
        rest = name[len(ENV_PREFIX) :].lower()
        section, split, key = rest.partition("__")
        if split:
            _check_section(section, name)
            yield Given(section, key, value, name, True)
        elif (start := re.split(r"[_-]", rest, maxsplit=1))[0] in _sections() and len(start) > 1:
            # one underscore would be dropped in silence, and the run would go on with defaults
            raise ConfigError(
                f"environment variable {name} names no setting; between section and key stand two underscores: "
                f"{ENV_PREFIX}{start[0].upper()}__{start[1].upper()}; {_REMEDY}"
            )


def _from_set(text: str) -> Given:
    path, equals, value = text.partition("=")
    section, dot, key = path.strip().partition(".")
    source = f"--set {path.strip()}"
    if not equals:
        raise ConfigError(f"--set {text!r} has no value; expected --set section.key=value")
    if not dot:
        raise ConfigError(
            f"unknown key {section!r} at the top level ({source}){_nearest(None, section)}"
            f"expected section.key=value; {_REMEDY}"
        )
    _check_section(section, source)
    return Given(section, key, value.strip(), source, True)


# checking


def _sections() -> dict[str, type[BaseModel]]:
    return {
        name: info.annotation
        for name, info in RolloutConfig.model_fields.items()
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
    }


def _check_section(section: str, source: str) -> None:
    if section not in _sections():
        close = difflib.get_close_matches(section, _sections(), n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]!r}?" if close else ";"
        raise ConfigError(f"unknown section {section!r} ({source}){hint} sections: {', '.join(_sections())}; {_REMEDY}")


def _checked(item: Given) -> tuple[str, Any]:
    """The key and the value in its type."""
    key, _, inner = item.key.partition(".")
    model = _sections()[item.section]
    if key not in model.model_fields or (inner and key != "kwargs"):
        raise ConfigError(
            f"unknown key {item.key!r} in section [{item.section}] ({item.source})"
            f"{_nearest(item.section, item.key)}{_REMEDY}"
        )
    info = model.model_fields[key]
    annotation: Any = Annotated[(info.annotation, info, *info.metadata)]
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    try:
        if inner:
            return key, {inner: _guess(item.value)}
        if not item.is_text:
            # JSON mode is strict about types but takes a list for a tuple, as TOML has no tuples
            return key, adapter.validate_json(json.dumps(item.value), strict=True)
        return key, adapter.validate_python(_read(item.value, "tuple" in str(info.annotation), key == "kwargs"))
    except (ValidationError, TypeError, ValueError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ConfigError(
            f"{item.section}.{key} is {item.value!r} ({item.source}); expected {_type_words(info.annotation)}: {reason}"
        ) from error


def _read(text: str, is_list: bool, is_table: bool) -> Any:
    """A value that came as text, spelt so that its type can be read from it."""
    if text.lower() == "none":
        return None
    if is_list:
        return tuple(part.strip() for part in text.strip("[] ").split(",") if part.strip())
    return _guess(text) if is_table else text


def _guess(text: Any) -> Any:
    """A TOML value where it is one, else the text itself."""
    if not isinstance(text, str):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _nearest(section: str | None, key: str) -> str:
    """A hint that names the valid key: the same in other spelling, in another section, or the most alike."""
    plain = key.replace("-", "_").lower()
    all_keys = [(s, k) for s, model in _sections().items() for k in model.model_fields]
    own = [(s, k) for s, k in all_keys if s == section]
    exact = [f"{s}.{k}" for s, k in [*own, *all_keys] if k == plain]
    if not exact:
        here = difflib.get_close_matches(plain, [k for _, k in own], n=1, cutoff=0.6)
        exact = [f"{section}.{k}" for k in here]
    if not exact:
        close = difflib.get_close_matches(plain, [k for _, k in all_keys], n=1, cutoff=0.3)
        exact = [f"{s}.{k}" for s, k in all_keys if k in close][:1]
    return f"; did you mean {' or '.join(dict.fromkeys(exact))}? " if exact else "; "


def _type_words(annotation: Any) -> str:
    """The type as a reader of the command line would say it."""
    text = str(annotation)
    words = ("dict", "a table"), ("tuple", "whole numbers"), ("bool", "true or false"), ("int", "a whole number")
    found = next((word for part, word in (*words, ("float", "a number")) if part in text), "a text")
    return found + (" or none" if "None" in text else "")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, dict):
        pairs = (f"{k if _BARE_KEY.fullmatch(k) else _toml(k)} = {_toml(v)}" for k, v in value.items())
        return f"{{{', '.join(pairs)}}}"
    return repr(value)
