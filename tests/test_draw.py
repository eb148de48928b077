"""Drawings of trees: what they show, and that no agent's text can do harm through them."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from agentgym.draw import ASCII, clean, drawing, print_tree, shorten, summary
from agentgym.tree import Node, NodeStatus, Tree, set_values
from agentgym.types import Level, StopReason


def grow(tree: Tree, parent: Node | None, action: str = "run ls", **fields: object) -> Node:
    turn = 0 if parent is None else parent.turn_index + 1
    node = Node(len(tree.nodes), parent, turn, action=action)
    for name, value in fields.items():
        setattr(node, name, value)
    return tree.add(node)


def end(tree: Tree, parent: Node, outcome: float, **fields: object) -> Node:
    reason = StopReason.SUCCESS if outcome else StopReason.FAILURE
    return grow(tree, parent, "submit", reward=outcome, status=NodeStatus.TERMINATED, stop_reason=reason, **fields)


def make_tree() -> Tree:
    """A fork after turn 2: one child fails, one wins in a fresh fork, one broke."""
    tree = Tree("task/0", "task", "agentgym/Counter-v0", 7)
    root = grow(tree, None, observation="Find it.\nReally.")
    first = grow(tree, root, "run cat note", reward=0.0, mask_T=(True, True))
    fork = grow(tree, first, "run sleep 9 &", reward=0.5, forkable=Level.SHELL, losses=("process 12: sleep 9",))
    end(tree, fork, 0.0)
    end(tree, fork, 1.0, forked=True)
    grow(tree, fork, reward=None, status=NodeStatus.INFRA_ERROR, error="SandboxError: it died\nlate", forked=True)
    set_values(tree)
    return tree


def lines(tree: Tree, **options: object) -> list[str]:
    return [line.plain for line in drawing(tree, **options)]  # type: ignore[arg-type]


def test_a_drawing_shows_turns_rewards_forks_and_ends() -> None:
    drawn = lines(make_tree())
    assert "task/0" in drawn[0] and "agentgym/Counter-v0" in drawn[0] and "seed 7" in drawn[0]
    [fork_turn] = [line for line in drawn if "run sleep 9 &" in line]
    assert "◆ 2 #2" in fork_turn and "+0.5" in fork_turn and "1.00" in fork_turn
    [fork] = [line for line in drawn if line.startswith("fork")]
    assert "\N{MULTIPLICATION SIGN}3" in fork and "keeps shell" in fork and "loses process 12: sleep 9" in fork
    [lost] = [line for line in drawn if "#3" in line]
    [won] = [line for line in drawn if "#4" in line]
    assert lost.startswith("├─ ●") and lost.endswith("failure") and "+0 " in lost
    assert won.startswith("├┄ ●") and won.endswith("success") and "+1" in won
    broken = next(i for i, line in enumerate(drawn) if "✗" in line)
    assert "infra_error" in drawn[broken] and "failed: SandboxError: it died" in drawn[broken + 1]


def test_the_summary_counts_leaves_and_savings() -> None:
    said = summary(make_tree())
    assert "3 leaves" in said and "mean return 1.000" in said and "1 not scored" in said  # (0.5 + 1.5) / 2
    assert "5 turns played, 9 as chains (1.80x)" in said
    assert "2 tokens sampled, 6 as chains (3.00x)" in said


def test_quiet_turns_are_folded_unless_all_are_wanted() -> None:
    tree = Tree("t", "t", "e", 0)
    node = grow(tree, None)
    for index in range(9):
        node = grow(tree, node, f"run step{index}", reward=0.0)
    end(tree, node, 1.0)
    folded = lines(tree)
    assert not any("step" in line for line in folded)
    assert any("9 turns (1 to 9), nodes #1 to #9" in line for line in folded)
    assert sum("step" in line for line in lines(tree, full=True)) == 9


def test_a_turn_with_a_reward_is_not_folded() -> None:
    tree = Tree("t", "t", "e", 0)
    node = grow(tree, None)
    for index in range(9):
        node = grow(tree, node, f"run step{index}", reward=0.25 if index == 4 else 0.0)
    assert next(line.split() for line in lines(tree) if "step" in line) == ["○", "5", "#5", "run", "step4", "+0.25"]


def test_only_a_few_losses_are_named_unless_all_are_wanted() -> None:
    tree = make_tree()
    tree.nodes[2].losses = tuple(f"process {i}" for i in range(9))
    assert any("process 2 and 6 more" in line for line in lines(tree))
    assert any("process 8" in line for line in lines(tree, full=True, width=300))


def test_no_escape_reaches_the_terminal() -> None:
    evil = "\x1b[2J\x1b]0;title\x07 \x9b31m \r \b \u202e \u2066 \u200b \u2028 \ud800 [red]x[/red] :smile:"
    tree = Tree(evil, evil, evil, 0)
    root = grow(tree, None, observation=evil)
    fork = grow(tree, root, f"run {evil}", losses=(evil,), forkable=Level.FILES)
    end(tree, fork, 1.0)
    grow(tree, fork, status=NodeStatus.INFRA_ERROR, error=evil)
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", newline="")
    print_tree(tree, out, width=200)
    out.seek(0)
    text = out.read()
    assert all(char == "\n" or char.isprintable() for char in text)
    assert "\\x1b[2J" in text and "\\u202e" in text and "\\ud800" in text
    assert "[red]x[/red]" in text and ":smile:" in text


def test_a_terminal_without_unicode_gets_ascii() -> None:
    tree = make_tree()
    tree.nodes[1].action = "run cat 日本語"
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    print_tree(tree, out, width=100)
    out.seek(0)
    text = out.read()
    assert text.isascii() and "\\u65e5" in text and "|~ *" in text


@given(st.lists(st.text(max_size=40), min_size=1, max_size=6), st.integers(60, 140))
def test_no_line_is_wider_than_the_screen(actions: list[str], width: int) -> None:
    tree = Tree("t", "t", "e", 0)
    node = grow(tree, None, observation="日本語" * 40)
    for action in actions:
        end(tree, node, 0.0, losses=(action,))
        node = grow(tree, node, action * 3, reward=0.0, losses=(action * 9,))
    for glyphs in ({}, {"glyphs": ASCII}):
        drawn = lines(tree, width=width, full=True, **glyphs)
        assert max(cell_len(line) for line in drawn[:-1]) <= width  # the summary may wrap
        assert all(char.isprintable() for line in drawn for char in line)


def test_deep_trees_are_drawn_without_recursion() -> None:
    tree = Tree("t", "t", "e", 0)
    node = grow(tree, None)
    for _ in range(2000):
        end(tree, node, 0.0)
        node = grow(tree, node, reward=0.0)
    drawn = lines(tree)
    assert len(drawn) == 2 + 1 + 2000 * 3 + 2
    assert max(map(len, drawn[:-1])) <= 120


def test_a_tree_without_nodes_says_so() -> None:
    assert lines(Tree("t", "t", "e", 0))[-1] == "no nodes yet"


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("", "(empty)"),
        (" \n ", "(blank)"),
        ("\n\nls\n", "ls"),
        ("a\nb\nc", "a (+2 lines)"),
        ("x" * 300, "x" * 200 + "…"),
    ],
)
def test_a_text_is_shortened_to_its_first_line(text: str, short: str) -> None:
    assert shorten(text) == short


@given(st.text())
def test_clean_text_is_printable_and_plain_text_stays(text: str) -> None:
    assert clean(text).isprintable()
    if text.isprintable():
        assert clean(text) == text
