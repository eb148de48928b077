from __future__ import annotations

import copy
import json
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest

import agentgym
from agentgym.env import AgentEnv, fork
from agentgym.envs.counter import CounterEnv, counter_task
from agentgym.episode import Limits, Reply, cut_middle
from agentgym.errors import ConfigError, EnvError, SnapshotError, SnapshotUnsupported, UnknownName
from agentgym.snapshot import EnvSnapshot
from agentgym.task import Task
from agentgym.types import Action, Level, Param, StopReason, ToolCall, ToolSpec


@pytest.fixture
def env() -> Iterator[CounterEnv]:
    env = CounterEnv(codec="compact")
    yield env
    env.close()


@pytest.fixture
def json_env() -> Iterator[CounterEnv]:
    env = CounterEnv(codec="json")
    env.reset(seed=0)
    yield env
    env.close()


def add(n: int) -> str:
    return json.dumps({"name": "add", "arguments": {"n": n}})


# the contract of gymnasium


@pytest.mark.parametrize("maker", [gymnasium.make, agentgym.make])
def test_both_ways_of_making_give_a_bare_environment(maker: Any) -> None:
    env = maker("agentgym/Counter-v0", target=3)
    assert isinstance(env, CounterEnv)
    env.reset(seed=1)
    (child,) = fork(env)
    assert child.step("add 3")[0] == env.step("add 3")[0]
    for made in (env, child):
        made.close()


def test_reset_and_step(env: CounterEnv) -> None:
    observation, info = env.reset(seed=0)
    assert observation.startswith("Count to 7.\ncount 0, draw ")
    assert [m["role"] for m in info["messages"]] == ["system", "user"] and info["messages"][1]["content"] == observation
    assert (info["task"], info["turn"], info["rewards"], info["stop_reason"]) == ("count-7", 0, {}, None)
    observation, reward, terminated, truncated, info = env.step("add 7")
    assert observation.startswith("count 7, draw") and (reward, terminated, truncated) == (0.0, False, False)
    said, heard = info["messages"]
    assert said["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"n": 7}'}
    assert (heard["role"], heard["tool_call_id"]) == ("tool", said["tool_calls"][0]["id"])
    assert info["left"] == {"turns": 19, "tool_calls": 99}
    result = env.play("submit")
    assert (result.reward, result.terminated, result.ended, result.info["rewards"]) == (
        1.0,
        True,
        True,
        {"outcome": 1.0},
    )


def test_unusual_ways_of_use_say_what_to_do(env: CounterEnv) -> None:
    with pytest.raises(EnvError, match="call reset first"):
        env.step("add 1")
    with pytest.raises(EnvError, match="call reset first"):
        env.snapshot()
    with pytest.raises(ConfigError, match="'tsak' is unknown"):
        env.reset(options={"tsak": "x"})
    with pytest.raises(UnknownName, match="unknown task 'count-8'; did you mean 'count-7'"):
        env.reset(options={"task": "count-8"})
    with pytest.raises(ConfigError, match="unknown limit"):
        env.reset(options={"task": Task("t", "e", "p", {"target": 1}, limits={"max_trains": 3})})
    with pytest.raises(ConfigError, match="render_mode 'human'"):
        CounterEnv(render_mode="human")
    with pytest.raises(ConfigError, match="max_turns is 0"):
        Limits(max_turns=0)
    env.reset()
    with pytest.raises(EnvError, match="an action is a text or an Action, got int"):
        env.step(3)  # type: ignore[arg-type]
    env.step("submit")
    with pytest.raises(EnvError, match="has ended"):
        env.step("add 1")


def test_render_is_the_last_observation() -> None:
    env = CounterEnv(render_mode="ansi")
    first, _ = env.reset()
    assert env.render() == first
    assert env.step("add 1")[0] == env.render()
    env.close()


def test_close_twice_and_begin_again(env: CounterEnv) -> None:
    env.reset()
    env.close()
    env.close()
    with pytest.raises(EnvError):
        env.step("add 1")
    assert env.reset()[0]


# C023


def test_c023_vector_autoreset_pairs_nothing_across_episodes() -> None:
    tasks = [counter_task(2)]
    env = gymnasium.make_vec(
        "agentgym/Counter-v0", num_envs=2, vectorization_mode="sync", tasks=tasks, limits=Limits(max_turns=50)
    )
    assert env.metadata["autoreset_mode"] is gymnasium.vector.AutoresetMode.NEXT_STEP
    env.reset(seed=3)
    plays = (["add 2", "submit"], ["add 1", "add 1", "add 0", "add 0", "submit"])
    turn, ends, resets = [0, 0], [], []
    for step in range(6):
        actions = tuple(play[min(t, len(play) - 1)] for play, t in zip(plays, turn, strict=True))
        observations, rewards, terminated, truncated, info = env.step(actions)
        for index in range(2):
            if observations[index].startswith("Count to"):
                resets.append((step, index))
                assert (rewards[index], terminated[index], truncated[index]) == (0.0, False, False)
                turn[index] = 0
                continue
            turn[index] += 1
            if terminated[index]:
                ends.append((step, index))
                assert observations[index] == "submitted 2" and rewards[index] == 1.0
                assert info["stop_reason"][index] == "success" and info["turn"][index] == turn[index]
    assert ends == [(1, 0), (4, 0), (4, 1)]
    assert resets == [(2, 0), (5, 0), (5, 1)]
    env.close()


# C032

VECTOR_SCRIPT = """
import gymnasium, agentgym, os, sys
if __name__ == "__main__":
    env = gymnasium.make_vec("agentgym/Counter-v0", num_envs=2, vectorization_mode="async",
                             vector_kwargs={"shared_memory": False})
    env.reset(seed=0)
    env.step(("add 1", "add 2"))
    print(*[process.pid for process in env.processes], flush=True)
    raise ValueError("the main program is broken")
"""


def test_c032_a_broken_script_ends_with_its_vector_workers(tmp_path: Any) -> None:
    script = tmp_path / "vector.py"
    script.write_text(VECTOR_SCRIPT)
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        started = time.monotonic()
        _, errors = process.communicate(timeout=20)
        assert time.monotonic() - started < 5
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0 and "ValueError: the main program is broken" in errors
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []


# C026, C029


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
def test_c026_every_seed_repeats(seed: int) -> None:
    def start() -> tuple[str, str, str]:
        env = CounterEnv([counter_task(n) for n in range(50)])
        observation, info = env.reset(seed=seed)
        again = env.step("add 1")[0]
        env.close()
        return observation, info["task"], again

    assert start() == start()


def test_no_seed_goes_on_with_the_stream(env: CounterEnv) -> None:
    observations = {env.reset(seed=0)[0], env.reset()[0], env.reset()[0]}
    assert len(observations) == 3
    assert env.reset(seed=0)[0] in observations


def test_c029_global_generators_do_not_matter_nor_other_environments(env: CounterEnv) -> None:
    env.reset(seed=4)
    alone = [env.step("add 1")[0] for _ in range(4)]
    other = CounterEnv()
    env.reset(seed=4)
    other.reset(seed=4)
    mixed = []
    for number in range(4):
        random.seed(number)
        np.random.seed(number)
        expected = random.Random(number).random(), np.random.RandomState(number).rand()
        mixed.append(env.step("add 1")[0])
        assert other.step("add 1")[0] == mixed[-1]
        assert (random.random(), np.random.rand()) == expected
    assert mixed == alone
    other.close()


# C070 and other mistakes of the policy

MALFORMED = {
    "truncated": '{"name": "add", "arguments": {"n": 1',
    "trailing comma": '{"name": "add", "arguments": {"n": 1,}}',
    "list": '{"name": "add", "arguments": [1]}',
    "null": '{"name": "add", "arguments": null}',
    "number": '{"name": "add", "arguments": 1}',
    "duplicate keys": '{"name": "add", "arguments": {"n": 1, "n": 2}}',
    "1 MB": '{"name": "add", "arguments": {"n": "' + "x" * 1_000_000 + '"}}',
    "5000 deep": '{"name": "add", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}",
    "unknown tool": '{"name": "subtract", "arguments": {"n": 1}}',
    "no id": '{"id": null, "name": "add", "arguments": {"n": 1}}',
    "no arguments": '{"name": "add"}',
    "huge number": '{"name": "add", "arguments": {"n": ' + "9" * 5000 + "}}",
}


@pytest.mark.parametrize("reply", MALFORMED.values(), ids=MALFORMED.keys())
def test_c070_a_malformed_call_is_an_observation(json_env: CounterEnv, reply: str) -> None:
    observation, reward, terminated, truncated, info = json_env.step(reply)
    assert observation.startswith("error: ") and len(observation) < 600
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert [m["role"] for m in info["messages"]] == ["assistant", "user"]
    assert (json_env.count, info["left"]["tool_calls"]) == (0, 100)
    assert json_env.step(add(2))[0].startswith("count 2")


def test_c070_bad_replies_in_a_row_end_the_episode(json_env: CounterEnv) -> None:
    ends = [json_env.play(reply) for reply in ("?", "?", add(1), "?", "?", "?")]
    assert [end.truncated for end in ends] == [False] * 5 + [True]
    assert ends[-1].info["stop_reason"] == "bad_calls"


@pytest.mark.parametrize(
    "calls",
    [(), (ToolCall("fly", {}),), (ToolCall("add", {}),), (ToolCall("add", {"n": "1"}),), (ToolCall("submit", {}),) * 2],
)
def test_calls_that_somebody_else_parsed_are_checked(json_env: CounterEnv, calls: tuple[ToolCall, ...]) -> None:
    result = json_env.play(Action("", calls=calls))
    assert result.observation.startswith("error: ") and not result.ended


def test_several_calls_in_one_reply(json_env: CounterEnv) -> None:
    reply = json.dumps([{"id": "a", "name": "add", "arguments": {"n": 3}}, {"id": "b", "name": "add", "arguments": {"n": 4}},
                        {"id": "c", "name": "submit", "arguments": {}}, {"id": "d", "name": "add", "arguments": {"n": 4}}])  # fmt: skip
    result = json_env.play(reply)
    assert (result.reward, result.terminated) == (1.0, True)
    answers = [(m["tool_call_id"], m["content"].split(",")[0]) for m in result.info["messages"][1:]]
    assert answers == [
        ("a", "count 3"),
        ("b", "count 7"),
        ("c", "submitted 7"),
        ("d", "not executed: the episode has ended"),
    ]


def test_c012_cut_replies(env: CounterEnv) -> None:
    env.reset()
    first = env.play(Action("add 7", cut=True))
    assert "was cut by the token limit" in first.observation and not first.ended and env.count == 0
    second = env.play(Action("add 7", cut=True))
    assert (second.truncated, second.info["stop_reason"]) == (True, "max_tokens")
    env.reset()
    for reply in (Action("add 1", cut=True), "add 1", Action("add 1", cut=True)):
        assert not env.play(reply).ended


# ends (C024)


@pytest.mark.parametrize(
    ("limits", "turns", "terminated", "reason", "reward"),
    [
        ({}, ["add 7", "submit"], True, "success", 1.0),
        ({}, ["add 6", "submit"], True, "failure", 0.0),
        ({"max_turns": 2}, ["add 7", "submit"], True, "success", 1.0),
        ({"max_turns": 2}, ["add 7", "add 0"], False, "max_turns", 1.0),
        ({"max_turns": 2, "score_truncated": False}, ["add 7", "add 0"], False, "max_turns", 0.0),
        ({"max_tool_calls": 1}, ["add 7"], False, "max_tool_calls", 1.0),
        ({"max_bad_calls": 1}, ["what?"], False, "bad_calls", 0.0),
        ({"timeout_s": 1e-9}, ["add 1"], False, "timeout", 0.0),
    ],
)
def test_c024_ends(limits: dict[str, float], turns: list[str], terminated: bool, reason: str, reward: float) -> None:
    env = CounterEnv(limits=Limits(**limits))  # type: ignore[arg-type]
    env.reset()
    results = [env.play(turn) for turn in turns]
    assert [r.ended for r in results] == [False] * (len(turns) - 1) + [True]
    last = results[-1]
    assert (last.terminated, last.truncated) == (terminated, not terminated)
    assert (last.info["stop_reason"], last.reward) == (reason, reward)
    env.close()


def test_stop_ends_an_episode_from_outside(env: CounterEnv) -> None:
    env.reset()
    env.step("add 7")
    with pytest.raises(EnvError, match="is no limit"):
        env.stop(StopReason.SUCCESS)
    assert env.stop(StopReason.MAX_TOKENS) == {"outcome": 1.0}
    with pytest.raises(EnvError, match="max_tokens"):
        env.step("add 1")
    with pytest.raises(EnvError, match="max_tokens"):
        env.stop(StopReason.BUDGET)
    env.reset(options={"task": Task("t", "e", "p", {"target": 0}, limits={"score_truncated": 0})})
    assert env.stop(StopReason.BUDGET) == {}


class Odd(AgentEnv):
    """Rewards, breaks and grades as its one tool is told."""

    tools = (ToolSpec("do", "Do.", (Param("what", "What."),)),)

    def begin(self, task: Task) -> str:
        self.notes: list[Any] = []
        return "go"

    def act(self, call: ToolCall) -> Reply | str:
        what = call.arguments["what"]
        self.notes.append(what)
        if what == "crash":
            raise ZeroDivisionError("oops")
        if what == "lock":
            self.notes.append(os.scandir("/"))
        if what == "end":
            return Reply("end", ended=True)
        return Reply("x" * 100_000, rewards={"step": 0.25})

    def grade(self) -> Any:
        last = self.notes[-2] if len(self.notes) > 1 else ""
        return {"nan": float("nan"), "nameless": {"style": 1.0}, "half": {"outcome": 0.5, "style": 0.1}}.get(last, 0.0)


@pytest.fixture
def odd() -> Iterator[Odd]:
    env = Odd([Task("t", "e", "p")])
    env.reset()
    yield env
    for note in getattr(env, "notes", ()):
        if hasattr(note, "close"):
            note.close()
    env.close()


def test_c017_a_broken_world_is_an_exception_and_stays_broken(odd: Odd) -> None:
    with pytest.raises(EnvError, match="Odd failed in turn 1: ZeroDivisionError: oops") as caught:
        odd.step("do crash")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    for use in (lambda: odd.step("do x"), odd.snapshot, odd.fork):
        with pytest.raises(EnvError, match="call reset"):
            use()
    odd.reset()
    assert odd.step("do x")[1] == 0.25


@pytest.mark.parametrize(("what", "message"), [("nan", "must be finite"), ("nameless", "must have 'outcome'")])
def test_a_grade_that_is_none_is_our_failure(odd: Odd, what: str, message: str) -> None:
    odd.step(f"do {what}")
    with pytest.raises(EnvError, match=message):
        odd.step("do end")


def test_partial_outcomes_and_named_rewards(odd: Odd) -> None:
    odd.step("do half")
    result = odd.play("do end")
    assert result.info["rewards"] == {"outcome": 0.5, "style": 0.1}
    assert result.reward == pytest.approx(0.6)
    assert (result.terminated, result.info["stop_reason"]) == (True, "submitted")


def test_long_observations_lose_their_middle(odd: Odd) -> None:
    observation = odd.step("do x")[0]
    assert len(observation) < 10_100 and "[... 90000 bytes cut ...]" in observation
    assert cut_middle("é" * 10, 100) == "é" * 10
    assert cut_middle("é" * 10, 7) == "é\n[... 13 bytes cut ...]\néé"


# forks


def test_c051_copies_are_refused(env: CounterEnv) -> None:
    env.reset()
    for how in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"use fork\(\)"):
            how(env)


def test_forks_keep_counters_limits_and_random_state(env: CounterEnv) -> None:
    env.reset(seed=5, options={"task": Task("t", "e", "p", {"target": 3}, limits={"max_turns": 4})})
    env.step("add 1")
    env.step("?")
    left, right = env.fork(2)
    for world in (env, left, right):
        assert (world.count, world.episode.turn, world.episode.bad_calls, world.episode.tool_calls) == (1, 2, 1, 1)
    draws = {world.step("add 1")[0] for world in (left, right, env)}
    assert len(draws) == 1
    left.step("add 5")
    assert (env.count, left.count, right.count) == (2, 7, 2)
    assert left.episode.stop is StopReason.MAX_TURNS and right.episode.stop is None
    for world in (left, right):
        world.close()


def test_seeded_forks_have_futures_of_their_own(env: CounterEnv) -> None:
    env.reset(seed=5)
    with env.snapshot() as snapshot:
        children = snapshot.fork(3, seeds=[1, 2, 1])
        draws = [child.step("add 0")[0] for child in children]
        assert draws[0] == draws[2] != draws[1]
        with pytest.raises(ConfigError, match="one seed a copy"):
            snapshot.fork(2, seeds=[1])
        with pytest.raises(ConfigError, match="n >= 1"):
            snapshot.fork(0)
    for child in children:
        child.close()


def test_snapshots_are_counted_and_released_once(env: CounterEnv) -> None:
    env.reset()
    snapshot = env.snapshot()
    snapshot.retain()
    snapshot.release()
    assert not snapshot.released
    snapshot.fork()[0].close()
    snapshot.release()
    for use in (snapshot.release, snapshot.fork, snapshot.restore, snapshot.digest, snapshot.retain):
        with pytest.raises(SnapshotError, match="was released"):
            use()


def test_restore_in_place_and_into_another(env: CounterEnv) -> None:
    env.reset(seed=1)
    env.step("add 3")
    with env.snapshot() as snapshot:
        futures = []
        for _ in range(3):
            futures.append([env.step("add 1")[0], env.step("submit")[0]])
            env.restore(snapshot)
        assert futures[0] == futures[1] == futures[2]
        other = CounterEnv()
        assert snapshot.restore(other) is other and other.step("add 1")[0] == futures[0][0]
        odd = Odd()
        with pytest.raises(SnapshotError, match="snapshot of CounterEnv cannot be restored into Odd"):
            snapshot.restore(odd)
    other.close()


def test_a_level_that_is_not_kept_is_refused(env: CounterEnv) -> None:
    env.reset()
    with pytest.raises(SnapshotUnsupported, match="level shell is required, but CounterEnv keeps level state"):
        env.snapshot(require=Level.SHELL)


def test_what_cannot_be_copied_is_named(odd: Odd) -> None:
    odd.step("do lock")
    with pytest.raises(EnvError, match="attribute 'notes' of Odd"):
        odd.snapshot()


class Part:
    """A resource that fails when it is told to."""

    def __init__(self, log: list[str], name: str, fails: str = "") -> None:
        self.log, self.name, self.fails = log, name, fails
        self.level: Level = Level.PROCESS
        self.losses: tuple[str, ...] = (name,)

    def _do(self, what: str) -> None:
        if self.fails == what:
            raise RuntimeError(f"{self.name} fails to {what}")
        self.log.append(f"{what} {self.name}")

    def snapshot(self) -> Part:
        self._do("freeze")
        return self

    def fork(self, n: int = 1) -> list[Part]:
        self._do("fork")
        return [Part(self.log, f"{self.name}'", self.fails) for _ in range(n)]

    def digest(self) -> str:
        return self.name

    def release(self) -> None:
        self._do("release")

    def close(self) -> None:
        self._do("close")


@pytest.mark.parametrize("fails", ["", "freeze", "fork"])
def test_all_parts_are_frozen_and_forked_or_none(odd: Odd, fails: str) -> None:
    log: list[str] = []
    for name, failing in (("a", ""), ("b", fails)):
        setattr(odd, name, odd.attach(Part(log, name, failing)))
    if fails:
        with pytest.raises(RuntimeError, match=f"b fails to {fails}"):
            odd.fork()
        undone = (
            ["freeze a", "release a"]
            if fails == "freeze"
            else ["freeze a", "freeze b", "fork a", "close a'", "release a", "release b"]
        )
        assert log == undone
        return
    (child,) = odd.fork()
    assert vars(child)["a"].name == "a'" and vars(odd)["a"].name == "a"
    snapshot = odd.snapshot()
    assert (snapshot.level, snapshot.losses) == (Level.PROCESS, ("a", "b"))
    snapshot.release()
    log.clear()
    child.close()
    odd.close()
    assert log == ["close b'", "close a'", "close b", "close a"]


# C049


class History(gymnasium.Wrapper[str, str, str, str]):
    """Remembers what it saw."""

    def __init__(self, env: gymnasium.Env[str, str]) -> None:
        super().__init__(env)
        self.seen: list[str] = []

    def step(self, action: str) -> Any:
        result = self.env.step(action)
        self.seen.append(result[0])
        return result


def wrapped() -> History:
    inner = gymnasium.wrappers.TimeLimit(CounterEnv(), 5)
    return History(gymnasium.wrappers.TransformReward(inner, lambda reward: 2 * float(reward)))


def test_c049_wrappers_fork_with_their_state() -> None:
    env = wrapped()
    env.reset(seed=2)
    env.step("add 1")
    env.step("add 1")
    children = fork(env, 2)
    ends = [[world.step("add 1")[3] for _ in range(3)] for world in (*children, env)]
    assert ends == [[False, False, True]] * 3
    histories = [world.seen for world in (env, *children)]  # type: ignore[attr-defined]
    assert [len(h) for h in histories] == [5, 5, 5] and histories[0] == histories[1] == histories[2]
    assert len({id(h) for h in histories}) == 3
    assert len({id(world.unwrapped) for world in (env, *children)}) == 3
    for world in (env, *children):
        world.close()


def test_c049_a_wrapper_that_cannot_fork_fails_loudly() -> None:
    env = wrapped()
    env.reset()
    with os.scandir("/") as handle:
        env.seen.append(handle)  # type: ignore[arg-type]
        with pytest.raises(EnvError, match="attribute 'seen' of History"):
            fork(env)
    env.close()
    with pytest.raises(EnvError, match="cannot fork; derive it from"):
        fork(gymnasium.make("CartPole-v1").unwrapped)


def test_snapshot_ids_differ(env: CounterEnv) -> None:
    env.reset()
    snapshots: list[EnvSnapshot] = [env.snapshot() for _ in range(3)]
    assert len({s.id for s in snapshots}) == 3
    for snapshot in snapshots:
        snapshot.release()
