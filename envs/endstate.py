"""Two end states of a file tree compared: what a task expects to have changed, and what did.

Owns what counts as the same and how a difference is said. Pure: knows no sandbox and no task.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from agentgym.errors import TaskError
from agentgym.sandbox import Change

_BASE = {path: Change("dir", 0o755) for path in ("/", "/etc", "/home", "/opt", "/srv", "/usr", "/var")}
"""Directories that every root file system has; naming one with its usual mode is no change."""
_OCTAL = re.compile(r"(0o)?[0-7]{1,5}")


def expected_change(path: str, raw: object) -> Change:
    """Read ["file", "0o644", sha256 prefix, size], ["dir", "0o755"], ["link", target] or ["deleted"].

    Raises:
        TaskError: it is none of these.
    """
    match raw:
        case ["file", str(mode), str(sha256), int(size)] if _OCTAL.fullmatch(mode):
            return Change("file", int(mode, 8), size, sha256)
        case ["dir", str(mode)] if _OCTAL.fullmatch(mode):
            return Change("dir", int(mode, 8))
        case ["link", str(target)]:
            return Change("link", target=target)
        case ["deleted"]:
            return Change("deleted")
    raise TaskError(
        f"expected change of {path!r} is {raw!r}; write [file, mode, sha256, size], "
        "[dir, mode], [link, target] or [deleted]"
    )


def compare_changes(
    wanted: Mapping[str, Change], found: Mapping[str, Change], starting: Mapping[str, Change]
) -> tuple[str, float]:
    """Compare two end states.

    An entry that says what the starting world has already (a file written anew with the same content, a
    directory that only its neighbours changed) is left out on both sides, and so is what lies below a deleted
    directory. Times are not compared.

    Args:
        wanted: Path to change; a `sha256` may be a prefix.
        found: As the sandbox reports it.
        starting: What the task put into the world.

    Returns:
        The first difference (empty when there is none), and the share of paths that agree.
    """
    left, right = _essential(wanted, starting), _essential(found, starting)
    differences = []
    for path in sorted(left.keys() | right.keys()):
        if path not in right:
            differences.append(f"{path} should be {_said(left[path])} and is as it was")
        elif path not in left:
            differences.append(f"{path} should be as it was and is {_said(right[path])}")
        elif not _same_change(left[path], right[path]):
            differences.append(f"{path} should be {_said(left[path])} and is {_said(right[path])}")
    paths = len(left.keys() | right.keys())
    more = f" (and {len(differences) - 1} paths more)" if len(differences) > 1 else ""
    return differences[0] + more if differences else "", 1.0 - len(differences) / paths if paths else 1.0


def _essential(changes: Mapping[str, Change], starting: Mapping[str, Change]) -> dict[str, Change]:
    before = {**_BASE, **starting}
    gone = {path for path, change in changes.items() if change.kind == "deleted"}
    kept = {}
    for path, change in changes.items():
        if path in before and _same_change(change, before[path]):
            continue
        if change.kind == "deleted" and any(parent in gone for parent in _parents(path)):
            continue
        kept[path] = change
    return kept


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(2, len(parts))]


def _same_change(wanted: Change, found: Change) -> bool:
    if wanted.kind != found.kind:
        return False
    if wanted.kind == "link":
        return wanted.target == found.target
    if wanted.kind == "deleted":
        return True
    if wanted.mode & 0o7777 != found.mode & 0o7777:
        return False
    same_content = wanted.size_bytes == found.size_bytes and found.sha256.startswith(wanted.sha256)
    return wanted.kind == "dir" or same_content


def _said(change: Change) -> str:
    if change.kind == "file":
        return f"a file of {change.size_bytes} bytes, mode {change.mode & 0o7777:o}, sha256 {change.sha256[:16]}"
    if change.kind == "dir":
        return f"a directory, mode {change.mode & 0o7777:o}"
    return f"a link to {change.target}" if change.kind == "link" else "deleted"
