"""Verdicts over a finished world: what was submitted and how the files changed, against what was asked.

Owns the three kinds of verifier of shell tasks and their keys. Leaves freezing and rewards to the environment.
A verdict is for the caller: the policy never reads it, and nothing here reads the agent's shell.

    kind "answer"   answer (text or list of texts; default the task's own), rule: exact | case | numeric | regex,
                    tolerance (numeric, relative, 1e-6)
    kind "nl2sh"    goal: read (submitted output and end state) | state (end state only),
                    compare: lines | lines_unordered, stdout, accepted_stdout (list),
                    changes ({path: change}), accepted_changes (list of such tables)
    kind "script"   files ({name: text}, shown at /grader), command (run by sh, the frozen world at /world),
                    timeout_s (60), fail_codes ([1]), required (lines that the grader must print)

White space: answers are compared without leading and trailing white space. Outputs are compared line by line
without white space at the end of lines and without empty lines at the end; white space before a line counts,
since columns are part of an output, except where either side is a single line.

Protocol of a script: 0 is solved, a fail code (1) is not solved, and every other end, a timeout included, is our
failure and never a 0. A script that runs what the policy wrote must do so in a child process and keep the child's
output to itself, since whatever reaches its own output counts as its word.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentgym.envs.endstate import compare_changes, expected_change
from agentgym.errors import EnvError, TaskError
from agentgym.sandbox import Change, SandboxSnapshot
from agentgym.task import Task

MAX_QUOTED = 200


@dataclass(frozen=True, slots=True)
class Verdict:
    """The score of a finished episode and why."""

    outcome: float
    """1.0 or 0.0."""
    reason: str
    """What matched, or the first thing that did not."""
    partial: float
    """How near it came, from 0 to 1: for looking at runs, never a reward."""

    def to_plain(self) -> dict[str, Any]:
        """The verdict as JSON types."""
        return {"outcome": self.outcome, "reason": self.reason, "partial": self.partial}


@dataclass(frozen=True, slots=True)
class Work:
    """What an episode left to be scored."""

    submitted: str | None
    """The answer; None when the episode was cut before anything was handed in."""
    freeze: Callable[[], SandboxSnapshot]
    """Freezes the world; called only by graders that look at files."""
    starting: Mapping[str, Change]
    """The files, directories and links that the task put into the world."""


def grade(task: Task, work: Work) -> Verdict:
    """Score the work by the task's verifier.

    Raises:
        TaskError: the verifier is broken.
        EnvError: a grader script could not run or gave no verdict.
    """
    check_verifier(task)
    return _GRADERS[task.verifier["kind"]](task, work)


def check_verifier(task: Task) -> None:
    """Refuse a broken verifier before an episode is spent on it.

    Raises:
        TaskError: names the task and the key.
    """
    kind = task.verifier.get("kind")
    if kind not in _GRADERS:
        raise TaskError(f"task {task.id!r}: verifier kind {kind!r} is unknown; kinds: {', '.join(_GRADERS)}")
    keys = _KEYS[kind]
    for key, value in task.verifier.items():
        if key != "kind" and key not in keys:
            close = difflib.get_close_matches(key, keys, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            raise TaskError(
                f"task {task.id!r}: verifier key {key!r} is unknown{hint}; kind {kind} has: {', '.join(keys)}"
            )
        if key != "kind" and not isinstance(value, keys[key]):
            raise TaskError(f"task {task.id!r}: verifier key {key!r} has the wrong type {type(value).__name__}")
    for key, choices in _CHOICES.items():
        if key in task.verifier and task.verifier[key] not in choices:
            raise TaskError(
                f"task {task.id!r}: verifier {key} {task.verifier[key]!r} is unknown; one of {', '.join(choices)}"
            )
    needed = [*_NEEDED[kind], *(["stdout"] if task.verifier.get("goal") == "read" else [])]
    missing = [key for key in needed if key not in task.verifier]
    if missing:
        raise TaskError(f"task {task.id!r}: verifier of kind {kind} lacks {missing[0]!r}")
    if kind == "answer":
        _references(task)
    if kind == "nl2sh":
        _end_states(task)


# answer


def _grade_answer(task: Task, work: Work) -> Verdict:
    if work.submitted is None:
        return Verdict(0.0, "nothing was submitted", 0.0)
    given = work.submitted.strip()
    rule = task.verifier.get("rule", "exact")
    tolerance = float(task.verifier.get("tolerance", 1e-6))
    for reference in _references(task):
        if _RULES[rule](given, reference.strip(), tolerance):
            return Verdict(1.0, f"the answer is right ({rule})", 1.0)
    return Verdict(0.0, f"the answer {_quoted(given)} is not {_quoted(_references(task)[0])} ({rule})", 0.0)


def _references(task: Task) -> Sequence[str]:
    raw = task.verifier.get("answer", task.answer)
    references = [raw] if isinstance(raw, str) else raw
    if not references or not all(isinstance(r, str) for r in references):
        raise TaskError(f"task {task.id!r}: verifier of kind answer needs 'answer', a text or a list of texts")
    for pattern in references if task.verifier.get("rule") == "regex" else ():
        try:
            re.compile(pattern)
        except re.error as error:
            raise TaskError(f"task {task.id!r}: answer {pattern!r} is no regular expression: {error}") from error
    return list(references)


def _same_number(given: str, reference: str, tolerance: float) -> bool:
    try:
        return math.isclose(float(given), float(reference), rel_tol=tolerance)
    except ValueError:
        return False


_RULES: dict[str, Callable[[str, str, float], bool]] = {
    "exact": lambda given, reference, _: given == reference,
    "case": lambda given, reference, _: given.casefold() == reference.casefold(),
    "numeric": _same_number,
    "regex": lambda given, reference, _: re.fullmatch(reference, given) is not None,
}


# nl2sh


def _grade_nl2sh(task: Task, work: Work) -> Verdict:
    verifier = task.verifier
    with work.freeze() as world:
        found = world.changes()
    compared = [compare_changes(wanted, found, work.starting) for wanted in _end_states(task)]
    wrong, files_right = next((pair for pair in compared if not pair[0]), compared[0])
    if verifier["goal"] == "state":
        return Verdict(float(not wrong), wrong or "the end state is right", files_right)
    unordered = verifier.get("compare", "lines") == "lines_unordered"
    accepted = [verifier["stdout"], *verifier.get("accepted_stdout", ())]
    if work.submitted is None:
        return Verdict(0.0, "nothing was submitted", 0.0)
    if not any(same_output(work.submitted, output, unordered=unordered) for output in accepted):
        near = max(_line_overlap(work.submitted, output) for output in accepted)
        return Verdict(
            0.0, f"the output {_quoted(work.submitted)} is not {_quoted(accepted[0])}", 0.5 * near * files_right
        )
    return Verdict(float(not wrong), wrong or "the output is right", files_right)


def same_output(given: str, wanted: str, *, unordered: bool = False) -> bool:
    """Compare two outputs line by line under the white-space rules above."""
    left, right = _lines(given), _lines(wanted)
    if len(left) <= 1 and len(right) <= 1:
        return given.strip() == wanted.strip()
    return Counter(left) == Counter(right) if unordered else left == right


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")] if text.strip() else []


def _line_overlap(given: str, wanted: str) -> float:
    left, right = Counter(_lines(given)), Counter(_lines(wanted))
    return (left & right).total() / max(left.total(), right.total(), 1)


def _end_states(task: Task) -> list[dict[str, Change]]:
    try:
        raw = [task.verifier["changes"], *task.verifier.get("accepted_changes", ())]
        return [{path: expected_change(path, change) for path, change in state.items()} for state in raw]
    except (TaskError, AttributeError) as error:
        raise TaskError(f"task {task.id!r}: verifier changes are wrong: {error}") from error


# script


def _grade_script(task: Task, work: Work) -> Verdict:
    verifier = task.verifier
    files = {name: text.encode() for name, text in verifier["files"].items()}
    timeout_s = float(verifier.get("timeout_s", 60.0))
    with work.freeze() as world:
        result = world.inspect(files, verifier["command"], timeout_s=timeout_s)
    last = _quoted((result.stderr or result.stdout).strip()[-MAX_QUOTED:])
    if result.timed_out:
        raise EnvError(f"the grader of {task.id!r} did not end in {timeout_s:g} s; raise its timeout_s. Last: {last}")
    if result.exit_code == 0:
        said = {line.strip() for line in result.stdout.split("\n")}
        required = list(verifier.get("required", ()))
        missing = [line for line in required if line.strip() not in said]
        partial = 1.0 - len(missing) / len(required) if required else 1.0
        reason = f"the grader did not report {_quoted(missing[0])}" if missing else "the grader is satisfied"
        return Verdict(float(not missing), reason, partial)
    if result.exit_code in verifier.get("fail_codes", (1,)):
        return Verdict(0.0, f"the grader is not satisfied: {last}", 0.0)
    raise EnvError(
        f"the grader of {task.id!r} ended with status {result.exit_code}; it must end with 0 (solved) or one of "
        f"its fail_codes (not solved). Last: {last}"
    )


def _quoted(text: str) -> str:
    return repr(text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "...")


_GRADERS: dict[str, Callable[[Task, Work], Verdict]] = {
    "answer": _grade_answer,
    "nl2sh": _grade_nl2sh,
    "script": _grade_script,
}
_KEYS: dict[str, dict[str, tuple[type, ...]]] = {
    "answer": {"answer": (str, list, tuple), "rule": (str,), "tolerance": (int, float)},
    "nl2sh": {
        "goal": (str,),
        "compare": (str,),
        "stdout": (str,),
        "accepted_stdout": (list, tuple),
        "changes": (Mapping,),
        "accepted_changes": (list, tuple),
    },
    "script": {
        "files": (Mapping,),
        "command": (str,),
        "timeout_s": (int, float),
        "fail_codes": (list, tuple),
        "required": (list, tuple),
    },
}
_NEEDED = {"answer": (), "nl2sh": ("goal", "changes"), "script": ("files", "command")}
_CHOICES = {"rule": tuple(_RULES), "goal": ("read", "state"), "compare": ("lines", "lines_unordered")}
