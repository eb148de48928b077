from __future__ import annotations

import pytest

from agentgym.envs.endstate import compare_changes, expected_change
from agentgym.errors import TaskError
from agentgym.sandbox import Change

HELLO = Change("file", 0o644, 5, "ab" * 32)


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (Change("file", 0o600, 5, "ab" * 32), "mode 600"),
        (Change("file", 0o644, 6, "ab" * 32), "6 bytes"),
        (Change("file", 0o644, 5, "cd" * 32), "cdcd"),
        (Change("dir", 0o644), "a directory"),
        (Change("link", target="/etc/passwd"), "a link to /etc/passwd"),
        (Change("deleted"), "is deleted"),
    ],
)
def test_each_kind_of_difference_is_named(found: Change, word: str) -> None:
    reason, share = compare_changes({"/f": HELLO}, {"/f": found}, {})
    assert word in reason
    assert share == 0.0


def test_what_is_no_change_is_left_out() -> None:
    dirs = {"/data": Change("dir", 0o755), "/data/same": HELLO, "/data/l": Change("link", target="x")}
    seen = {"/usr": Change("dir", 0o755), "/data": Change("dir", 0o755), "/f": HELLO}
    assert compare_changes({"/f": HELLO}, seen, dirs) == ("", 1.0)
    assert compare_changes({"/usr": Change("dir", 0o755)}, {}, dirs) == ("", 1.0)
    assert "/data" in compare_changes({}, {"/data": Change("dir", 0o700)}, dirs)[0]
    rewritten = {"/data/same": HELLO, "/data/l": Change("link", target="x")}
    assert compare_changes({}, rewritten, dirs) == ("", 1.0)
    assert "/data/same" in compare_changes({}, {"/data/same": Change("file", 0o600, 5, "ab" * 32)}, dirs)[0]
    gone = {"/data/d": Change("deleted"), "/data/d/f": Change("deleted"), "/data/d/e/g": Change("deleted")}
    assert compare_changes({"/data/d": Change("deleted")}, gone, dirs) == ("", 1.0)
    assert compare_changes(gone, {"/data/d": Change("deleted")}, dirs) == ("", 1.0)


def test_a_deleted_neighbour_hides_nothing() -> None:
    found = {"/data/d": Change("deleted"), "/data/dd": Change("deleted")}
    assert "/data/dd" in compare_changes({"/data/d": Change("deleted")}, found, {})[0]


def test_several_differences_are_counted() -> None:
    reason, share = compare_changes({"/a": HELLO, "/b": HELLO}, {"/b": HELLO, "/c": HELLO, "/d": HELLO}, {})
    assert reason.startswith("/a should be a file of 5 bytes") and reason.endswith("(and 2 paths more)")
    assert share == 0.25


def test_expected_changes_are_read_from_lists() -> None:
    assert expected_change("/f", ["file", "0o644", "abab", 5]) == Change("file", 0o644, 5, "abab")
    assert expected_change("/d", ["dir", "1777"]) == Change("dir", 0o1777)
    assert expected_change("/l", ["link", "/f"]) == Change("link", target="/f")
    assert expected_change("/x", ["deleted"]) == Change("deleted")


@pytest.mark.parametrize("raw", [[], ["file"], ["file", "rw", "ab", 1], ["dir", 755], ["gone"], "deleted", None])
def test_other_lists_are_refused(raw: object) -> None:
    with pytest.raises(TaskError, match=r"expected change of '/f' is .*write \[file, mode, sha256, size\]"):
        expected_change("/f", raw)
