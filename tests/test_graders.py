from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, cast

import pytest

from agentgym.envs.graders import Verdict, Work, check_verifier, grade, same_output
from agentgym.errors import EnvError, TaskError
from agentgym.sandbox import Change, ExecResult, SandboxSnapshot
from agentgym.task import Task

HELLO = Change("file", 0o644, 5, "ab" * 32)


class Frozen:
    """A frozen world in memory: what a grader may ask of one, and a count of releases."""

    def __init__(self, changes: Mapping[str, Change], ended: ExecResult | None = None) -> None:
        self._changes, self._ended = dict(changes), ended
        self.released = 0
        self.asked: tuple[dict[str, bytes], str, float] | None = None

    def changes(self) -> dict[str, Change]:
        return self._changes

    def inspect(self, files: Mapping[str, bytes], command: str, *, timeout_s: float) -> ExecResult:
        self.asked = (dict(files), command, timeout_s)
        assert self._ended is not None
        return self._ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.released += 1


def _task(**verifier: Any) -> Task:
    return Task("t", "agentgym/Terminal-v0", "do it", verifier=verifier)


def _grade(task: Task, submitted: str | None, world: Frozen | None = None) -> Verdict:
    frozen = world or Frozen({})
    verdict = grade(task, Work(submitted, lambda: cast(SandboxSnapshot, frozen), {"/data": Change("dir", 0o755)}))
    needs_world = task.verifier["kind"] != "answer"
    assert frozen.released == needs_world
    return verdict


# answer


@pytest.mark.parametrize(
    ("rule", "answer", "right", "wrong"),
    [
        ("exact", "541", ["541", " 541\n"], ["", "542", "5 41", "the code is 541"]),
        ("exact", ["yes", "Yes"], ["yes", "Yes"], ["YES", "no"]),
        ("case", "Paris", ["paris", "PARIS "], ["Lyon"]),
        ("numeric", "0.5", ["0.5", ".50", "5e-1", "0.50000001"], ["0.51", "half", "nan", ""]),
        ("regex", r"v\d+", ["v1", "v22"], ["v", "xv1", "v1x"]),
    ],
)
def test_answer_rules(rule: str, answer: str | list[str], right: list[str], wrong: list[str]) -> None:
    task = _task(kind="answer", rule=rule, answer=answer)
    assert [_grade(task, given).outcome for given in right] == [1.0] * len(right)
    assert [_grade(task, given).outcome for given in wrong] == [0.0] * len(wrong)


def test_answer_is_the_tasks_own_unless_the_verifier_has_one() -> None:
    task = Task("t", "e", "p", verifier={"kind": "answer"}, answer="7")
    assert _grade(task, "7").outcome == 1.0
    assert _grade(task, None) == Verdict(0.0, "nothing was submitted", 0.0)
    assert "'8' is not '7'" in _grade(task, "8").reason


# nl2sh


@pytest.mark.parametrize(
    ("given", "wanted", "unordered", "same"),
    [
        ("a\nb\n", "a\nb", False, True),
        ("a  \nb\t\n\n\n", "a\nb\n", False, True),
        ("b\na\n", "a\nb\n", False, False),
        ("b\na\n", "a\nb\n", True, True),
        ("a\na\nb\n", "a\nb\nb\n", True, False),
        ("a\nb\n", "a\n b\n", False, False),
        ("3", "      3\n", False, True),
        ("3\n4", "      3\n", False, False),
        ("", "\n", False, True),
        ("", "a\n", False, False),
        ("a\n\nb", "a\nb", False, False),
    ],
)
def test_outputs_are_compared_by_the_stated_white_space_rules(
    given: str, wanted: str, unordered: bool, same: bool
) -> None:
    assert same_output(given, wanted, unordered=unordered) is same
    assert same_output(wanted, given, unordered=unordered) is same


def test_read_task_wants_output_and_an_untouched_world() -> None:
    task = _task(kind="nl2sh", goal="read", compare="lines", stdout="a\nb\n", accepted_stdout=["x\n"], changes={})
    assert _grade(task, "a\nb").outcome == 1.0
    assert _grade(task, "x").outcome == 1.0
    assert _grade(task, "").outcome == 0.0
    assert _grade(task, None).outcome == 0.0
    half = _grade(task, "a\nc")
    assert (half.outcome, half.partial) == (0.0, 0.25)
    dirty = _grade(task, "a\nb", Frozen({"/data/new": HELLO}))
    assert dirty.outcome == 0.0
    assert "/data/new should be as it was" in dirty.reason


def test_state_task_wants_the_end_state_only() -> None:
    changes = {"/data/f": ["file", "0o644", "abab", 5], "/data/old": ["deleted"], "/l": ["link", "/data"]}
    task = _task(kind="nl2sh", goal="state", changes=changes)
    right = {"/data/f": HELLO, "/data/old": Change("deleted"), "/l": Change("link", target="/data")}
    assert _grade(task, None, Frozen(right)).outcome == 1.0
    assert _grade(task, "whatever", Frozen(right)).outcome == 1.0
    nothing = _grade(task, None, Frozen({}))
    assert (nothing.outcome, nothing.partial) == (0.0, 0.0)
    missing_one = _grade(task, None, Frozen({k: v for k, v in right.items() if k != "/l"}))
    assert missing_one.outcome == 0.0
    assert missing_one.partial == pytest.approx(2 / 3)
    assert missing_one.reason == "/l should be a link to /data and is as it was"


def test_any_accepted_end_state_will_do() -> None:
    states: list[dict[str, Any]] = [{"/l": ["link", "/a"]}, {"/l": ["file", "0o644", "abab", 5]}]
    task = _task(kind="nl2sh", goal="state", changes=states[0], accepted_changes=states[1:])
    assert _grade(task, None, Frozen({"/l": Change("link", target="/a")})).outcome == 1.0
    assert _grade(task, None, Frozen({"/l": HELLO})).outcome == 1.0
    assert _grade(task, None, Frozen({"/l": Change("link", target="/b")})).outcome == 0.0


# script


def _script(exit_code: int | None, stdout: str = "", *, timed_out: bool = False) -> Frozen:
    return Frozen({}, ExecResult(exit_code, stdout, "because", timed_out=timed_out))


def test_script_verdict_follows_the_protocol() -> None:
    task = _task(kind="script", files={"check.sh": "test -e /world/done"}, command="sh /grader/check.sh", timeout_s=5)
    solved = _script(0)
    assert _grade(task, None, solved).outcome == 1.0
    assert solved.asked == ({"check.sh": b"test -e /world/done"}, "sh /grader/check.sh", 5.0)
    failed = _grade(task, None, _script(1))
    assert failed.outcome == 0.0
    assert "because" in failed.reason


def test_missing_report_lines_count_as_failed() -> None:
    task = _task(kind="script", files={}, command="c", required=["PASS a", "PASS b"])
    assert _grade(task, None, _script(0, "PASS a\nPASS b \n")).outcome == 1.0
    silent = _grade(task, None, _script(0, "PASS a\n"))
    assert (silent.outcome, silent.partial) == (0.0, 0.5)
    assert "'PASS b'" in silent.reason
    assert _grade(task, None, _script(0, "I said PASS a and PASS b\n")).outcome == 0.0


@pytest.mark.parametrize("exit_code", [2, 126, 127, 137, None])
def test_a_grader_that_cannot_judge_is_our_failure(exit_code: int | None) -> None:
    task = _task(kind="script", files={}, command="c")
    with pytest.raises(EnvError, match=f"status {exit_code}"):
        _grade(task, None, _script(exit_code))


def test_a_grader_that_hangs_is_our_failure() -> None:
    task = _task(kind="script", files={}, command="c", timeout_s=0.5)
    with pytest.raises(EnvError, match=r"did not end in 0\.5 s"):
        _grade(task, None, _script(None, timed_out=True))


def test_further_statuses_may_mean_not_solved() -> None:
    task = _task(kind="script", files={}, command="c", fail_codes=[1, 2])
    assert _grade(task, None, _script(2)).outcome == 0.0


# broken verifiers


@pytest.mark.parametrize(
    ("verifier", "word"),
    [
        ({}, "kind None is unknown"),
        ({"kind": "vibes"}, "kind 'vibes' is unknown; kinds: answer, nl2sh, script"),
        ({"kind": "answer"}, "needs 'answer'"),
        ({"kind": "answer", "answer": []}, "needs 'answer'"),
        ({"kind": "answer", "answer": "1", "rule": "close"}, "rule 'close' is unknown"),
        ({"kind": "answer", "answer": "(", "rule": "regex"}, "no regular expression"),
        ({"kind": "answer", "answer": "1", "tolerence": 1}, "did you mean 'tolerance'"),
        ({"kind": "nl2sh", "goal": "state"}, "lacks 'changes'"),
        ({"kind": "nl2sh", "goal": "read", "changes": {}}, "lacks 'stdout'"),
        ({"kind": "nl2sh", "goal": "state", "changes": {"/f": ["file", "rw", "ab", 1]}}, "expected change of '/f'"),
        ({"kind": "nl2sh", "goal": "state", "changes": []}, "'changes' has the wrong type list"),
        ({"kind": "script", "files": {}}, "lacks 'command'"),
    ],
)
def test_broken_verifier_names_task_and_key(verifier: dict[str, Any], word: str) -> None:
    with pytest.raises(TaskError, match=r"task 't'") as caught:
        check_verifier(_task(**verifier))
    assert word in str(caught.value)
