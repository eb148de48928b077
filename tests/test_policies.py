from __future__ import annotations

from collections import Counter

import pytest

from agentgym.engine import SampleRequest
from agentgym.envs.keyhunt import generate
from agentgym.envs.terminal import TerminalEnv
from agentgym.errors import ConfigError, TaskError, UnknownName
from agentgym.parsing import get_codec, parse
from agentgym.policies import POLICIES, make_policy, policy_names
from agentgym.task import Task, load_tasks
from agentgym.types import Message, ToolCall, ToolSpec

TOOLS = TerminalEnv.tools
TASKS = [*generate(3), *load_tasks("nl2sh", num=3)]


def _request(task: Task, *turns: tuple[ToolCall, str], seed: int = 0) -> SampleRequest:
    messages = [Message("system", "tools"), Message("user", task.prompt)]
    for call, answer in turns:
        messages += [Message("assistant", "x", (call,)), Message("tool", answer, tool_call_id=call.id)]
    return SampleRequest((), tuple(messages), seed, task.id, len(turns))


def _run(command: str) -> ToolCall:
    return ToolCall("run", {"command": command})


@pytest.mark.parametrize("codec", ["compact", "json"])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_turn_is_a_valid_action_and_repeats(name: str, codec: str) -> None:
    policy = make_policy(name, tasks=TASKS, tools=TOOLS, codec=codec)
    again = make_policy(name, tasks=TASKS, tools=TOOLS, codec=codec)
    for task in TASKS:
        for seed in range(40):
            for turns in ((), ((_run("cat note"), "The code is in kemo"),), ((_run("ls"), "note"),) * 3):
                request = _request(task, *turns, seed=seed)
                text = policy(request)
                assert parse(text, TOOLS, get_codec(codec))
                assert again(request) == text


def test_names_and_descriptions_are_offered() -> None:
    assert set(policy_names()) == {"noop", "oracle", "random", "scripted"}
    assert all(policy_names().values())


def test_oracle_plays_gold_and_then_its_last_turn_again() -> None:
    policy = make_policy("oracle", tasks=TASKS, tools=TOOLS)
    for task in TASKS:
        texts = [policy(SampleRequest((), (), 0, task.id, turn)) for turn in range(5)]
        calls = [parse(text, TOOLS, get_codec("compact"))[0] for text in texts]
        gold = [(turn["name"], turn["arguments"]) for turn in task.gold]
        assert [(call.name, call.arguments) for call in calls] == (gold + [gold[-1]] * 5)[:5]


def test_noop_submits_nothing() -> None:
    assert make_policy("noop", tasks=TASKS, tools=TOOLS)(_request(TASKS[0])) == "submit"


def test_random_uses_every_tool() -> None:
    policy = make_policy("random", tasks=TASKS, tools=TOOLS)
    names = Counter(policy(_request(TASKS[0], seed=seed)).split()[0] for seed in range(400))
    assert set(names) == {tool.name for tool in TOOLS}
    assert 20 <= names["submit"] <= 90


def test_scripted_reads_the_branch_and_not_its_own_past() -> None:
    task = TASKS[0]
    policy = make_policy("scripted", tasks=TASKS, tools=TOOLS, skill=1.0)
    note = (_run("cat note"), "The code is in zuzu")
    code = (_run("cat zuzu/code"), "123")
    other = (_run("cat kemo/code"), "456")
    assert policy(_request(task, note, code)) == "submit 123"
    assert policy(_request(task)) == "run cat note"
    assert policy(_request(task, note)) == "run cat zuzu/code"
    assert policy(_request(task, note, code, other)) == "submit 456"
    assert policy(_request(task, other)) == "submit 456"


def test_scripted_without_skill_never_follows_the_note() -> None:
    policy = make_policy("scripted", tasks=TASKS, tools=TOOLS, skill=0.0)
    texts = {policy(_request(TASKS[0], seed=seed)) for seed in range(300)}
    assert texts == {f"run cat {name}/code" for name in TASKS[0].meta["dirs"]}


def test_scripted_mixes_right_and_wrong_turns() -> None:
    task = TASKS[-1]
    policy = make_policy("scripted", tasks=TASKS, tools=TOOLS, skill=0.6)
    gold = "run " + task.gold[0]["arguments"]["command"]
    texts = [policy(_request(task, seed=seed)) for seed in range(300)]
    assert 130 <= texts.count(gold) <= 230
    assert len(set(texts)) > 5
    after = [policy(_request(task, (_run(gold[4:]), "ok"), seed=seed)) for seed in range(100)]
    assert after.count("submit") > 50 and gold not in after


def test_what_cannot_be_played_is_refused_when_made() -> None:
    with pytest.raises(UnknownName, match=r"did you mean 'oracle'.*agentgym list policies"):
        make_policy("oracel", tasks=TASKS, tools=TOOLS)
    with pytest.raises(UnknownName, match="codec"):
        make_policy("noop", tasks=TASKS, tools=TOOLS, codec="xml")
    with pytest.raises(ConfigError, match="'bare' has no gold"):
        make_policy("oracle", tasks=[Task("bare", "e", "p")], tools=TOOLS)
    with pytest.raises(ConfigError, match="needs a tool named submit; the environment has: add"):
        make_policy("noop", tasks=TASKS, tools=[ToolSpec("add", "")])
    with pytest.raises(ConfigError, match=r"skill is 1\.5"):
        make_policy("scripted", tasks=TASKS, tools=TOOLS, skill=1.5)
    with pytest.raises(TaskError, match="without task 'nope'"):
        make_policy("oracle", tasks=TASKS, tools=TOOLS)(SampleRequest((), (), 0, "nope", 0))
