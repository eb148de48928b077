"""Merging of settings, and what is refused instead of being dropped."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.config import RolloutConfig, load_config, settings
from agentgym.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def refusal(**sources: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(**sources)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_later_sources_win(tmp_path: Path) -> None:
    file = write(tmp_path, "[run]\nseed = 1\nconcurrency = 1\n[tasks]\nnum = 1\n[tree]\nwidth = 1\n")
    config = load_config(
        file,
        environ={"AGENTGYM_RUN__SEED": "2", "AGENTGYM_TASKS__NUM": "2", "AGENTGYM_TREE__WIDTH": "2"},
        sets=["run.seed=3", "tasks.num=3"],
        flags={"--seed": ("run.seed", 4), "--num": ("tasks.num", None)},
    )
    assert (config.run.seed, config.tasks.num, config.tree.width, config.run.concurrency) == (4, 3, 2, 1)


def test_texts_get_the_type_of_their_key() -> None:
    config = load_config(
        sets=[
            "tasks.name=123",
            "limits.score_truncated=false",
            "tree.turns=5,10, 15",
            "limits.timeout_s=2.5",
            "env.kwargs.target=9",
            "env.kwargs.label=plain text",
            "tasks.num=none",
        ]
    )
    assert config.tasks.name == "123"
    assert config.limits.score_truncated is False
    assert config.tree.turns == (5, 10, 15)
    assert config.limits.timeout_s == 2.5
    assert config.env.kwargs == {"target": 9, "label": "plain text"}
    assert config.tasks.num is None


@pytest.mark.parametrize(
    ("text", "key", "near"),
    [
        ("num = 3\n", "num", "tasks.num"),  # at the top level
        ("[tree]\nforks-per-round = 2\n", "forks-per-round", "tree.forks_per_round"),  # hyphens
        ("[tree]\nnum = 2\n", "num", "tasks.num"),  # of another section
        ("[tree]\nchoser = 'none'\n", "choser", "tree.chooser"),  # misspelt
        ("[tree]\nmax_tokens = 2\n", "max_tokens", "policy.max_tokens or budget.max_tokens"),
    ],
)
def test_a_wrong_key_of_a_file_is_named_with_the_nearest(tmp_path: Path, text: str, key: str, near: str) -> None:
    """C065."""
    file = write(tmp_path, text)
    said = refusal(file=file)
    section = "[tree]" if "[tree]" in text else "top level"
    assert repr(key) in said and section in said and str(file) in said
    assert f"did you mean {near}?" in said and "agentgym list settings" in said


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("AGENTGYM_TREE__FORKS-PER-ROUND", "tree.forks_per_round"),
        ("AGENTGYM_TREE__NUM", "tasks.num"),
        ("AGENTGYM_TREE__CHOSER", "tree.chooser"),
    ],
)
def test_a_wrong_key_of_the_environment_is_named_with_the_nearest(name: str, near: str) -> None:
    """C065."""
    said = refusal(environ={name: "2"})
    assert name in said and "[tree]" in said and f"did you mean {near}?" in said


def test_a_single_underscore_is_no_silent_default() -> None:
    assert "AGENTGYM_TREE__WIDTH" in refusal(environ={"AGENTGYM_TREE_WIDTH": "2"})


def test_other_variables_are_left_alone() -> None:
    environ = {"AGENTGYM_STATE": "/x", "AGENTGYM_MODEL": "m", "PATH": "/bin", "TREE__WIDTH": "2"}
    assert load_config(environ=environ) == RolloutConfig()


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("tree.forks-per-round=2", "tree.forks_per_round"),
        ("tree.num=2", "tasks.num"),
        ("num=2", "tasks.num"),
        ("tree.chooser.x=2", "tree.chooser"),
    ],
)
def test_a_wrong_key_of_the_command_line_is_named_with_the_nearest(text: str, near: str) -> None:
    """C065."""
    said = refusal(sets=[text])
    assert f"--set {text.split('=')[0]}" in said and f"did you mean {near}?" in said


def test_an_unknown_section_is_named_with_the_nearest(tmp_path: Path) -> None:
    for said in (
        refusal(sets=["tre.width=2"]),
        refusal(environ={"AGENTGYM_TRE__WIDTH": "2"}),
        refusal(file=write(tmp_path, "[tre]\nwidth = 2\n")),
    ):
        assert "unknown section 'tre'" in said and "did you mean 'tree'?" in said


@pytest.mark.parametrize(
    "text",
    [
        "tree.width=0",
        "tree.width=wide",
        "tree.turns=1,x",
        "tree.turns=0",
        "limits.timeout_s=nan",
        "limits.timeout_s=-1",
        "limits.score_truncated=perhaps",
        "policy.skill=1.5",
        "run.seed=-1",
        "run.concurrency=none",
        "env.kwargs=3",
    ],
)
def test_a_value_of_the_wrong_kind_names_key_and_source(text: str) -> None:
    key, value = text.split("=")
    said = refusal(sets=[text])
    assert said.startswith(f"{key} is {value!r} (--set {key}); expected ")


@pytest.mark.parametrize("value", ['"4"', "4.0", "true", "1979-05-27", "[4]"])
def test_a_file_is_read_strictly(tmp_path: Path, value: str) -> None:
    assert "tree.width is" in refusal(file=write(tmp_path, f"[tree]\nwidth = {value}\n"))


def test_a_file_that_is_none_is_one_line(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(file=tmp_path / "absent.toml")
    assert "not valid TOML" in refusal(file=write(tmp_path, "[tree\n"))
    assert "has no value" in refusal(sets=["tree.width"])


def test_kwargs_of_all_sources_are_merged(tmp_path: Path) -> None:
    """C066."""
    file = write(tmp_path, "[env.kwargs]\na = 1\nb = 1\n")
    config = load_config(file, environ={"AGENTGYM_ENV__KWARGS": "{b = 2, c = 2}"}, sets=["env.kwargs.c=3"])
    assert config.env.kwargs == {"a": 1, "b": 2, "c": 3}


def test_every_key_is_described() -> None:
    rows = list(settings())
    assert len({key for key, *_ in rows}) == len(rows)
    assert all(meaning and meaning != "None" for *_, meaning in rows)


@given(
    folder=st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    turns=st.none() | st.lists(st.integers(1, 99), min_size=1, max_size=4).map(tuple),
    kwargs=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])), st.booleans() | st.integers(-9, 9) | st.text()
    ),
    skill=st.none() | st.floats(0, 1),
)
def test_what_is_written_reads_back(
    folder: str, turns: tuple[int, ...] | None, kwargs: dict[str, Any], skill: float | None
) -> None:
    kwargs = {key: value for key, value in kwargs.items() if not _has_surrogate(value)}
    config = RolloutConfig().changed(
        {"run": {"folder": folder}, "tree": {"turns": turns}, "env": {"kwargs": kwargs}, "policy": {"skill": skill}}
    )
    assert RolloutConfig.model_validate(tomllib.loads(config.to_toml())) == config


def _has_surrogate(value: object) -> bool:
    return isinstance(value, str) and any(0xD800 <= ord(char) <= 0xDFFF for char in value)
