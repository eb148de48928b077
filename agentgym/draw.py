"""Draws a tree as text: one line a turn, branches indented only where the tree forks.

Owns the layout and the taming of text that agents wrote: control characters, terminal escapes and characters
that reorder a line are shown as escapes, and nothing is read as markup. Leaves loading trees to `commands.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import IO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from agentgym.tree import Node, NodeStatus, Tree, branch_return, saving

PLAIN_WIDTH = 120
"""Columns where the output is no terminal."""
_MIN_WIDTH = 60
_FOLD = 3
"""Turns in a row without reward, fork or end that are drawn as one line."""
_MAX_LOSSES = 3


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The signs of a drawing."""

    turn: str
    fork: str
    end: str
    broken: str
    down: str
    branch: str
    last: str
    fresh_branch: str
    fresh_last: str
    folded: str
    dots: str
    times: str


UNICODE = Glyphs("○", "◆", "●", "✗", "│  ", "├─ ", "└─ ", "├┄ ", "└┄ ", "⋮", "…", "\N{MULTIPLICATION SIGN}")
ASCII = Glyphs("o", "Y", "*", "x", "|  ", "|- ", "`- ", "|~ ", "`~ ", ":", "...", "x")


def print_tree(tree: Tree, file: IO[str], *, full: bool = False, width: int | None = None) -> None:
    """Draw a tree on a terminal (with colours) or into a file (without).

    Args:
        tree: With values set, if they are to be shown.
        file: Where to; its encoding decides between Unicode and ASCII signs.
        full: Draw every turn and name every loss.
        width: Columns; None: the terminal's, or 120.
    """
    console = Console(file=file, highlight=False, markup=False, emoji=False, soft_wrap=True)
    columns = width or (console.width if console.is_terminal else PLAIN_WIDTH)
    glyphs = UNICODE if _speaks_unicode(file) else ASCII
    for line in drawing(tree, glyphs=glyphs, width=columns, full=full):
        line.rstrip()
        console.print(line)


def drawing(tree: Tree, *, glyphs: Glyphs = UNICODE, width: int = PLAIN_WIDTH, full: bool = False) -> Iterator[Text]:
    """The lines of a drawing: title, columns, turns, legend, summary."""
    width = max(width, _MIN_WIDTH)
    title = Text(f"tree {clean(tree.id)}", style="bold")
    title.append(f"  task {clean(tree.task_id)}  {clean(tree.env_id)}  seed {tree.seed}", style="not bold")
    yield _fit(title, width, glyphs)
    if not tree.nodes:
        yield Text("no nodes yet")
        return
    yield _columns("turn  node  action", "reward", "value", "end", width, glyphs, style="dim")
    yield from _lines(tree, glyphs, width, full)
    yield _fit(_legend(glyphs), width, glyphs)
    yield Text(summary(tree), style="bold")


def summary(tree: Tree) -> str:
    """One line: leaves, returns, and what the tree saved against its leaves played as chains."""
    returns = [r for r in map(branch_return, tree.scored_leaves()) if r is not None]
    leaves = len(tree.leaves()) if len(tree.nodes) > 1 else 0
    words = [f"{leaves} {'leaf' if leaves == 1 else 'leaves'}"]
    words.append(f"mean return {fmean(returns):.3f}" if returns else "no leaf has a return")
    if leaves > len(returns):
        words.append(f"{leaves - len(returns)} not scored")
    saved = saving([tree])
    words.append(f"{saved.turns} turns played, {saved.chain_turns} as chains ({saved.calls_ratio:.2f}x)")
    if saved.tokens:
        words.append(f"{saved.tokens} tokens sampled, {saved.chain_tokens} as chains ({saved.tokens_ratio:.2f}x)")
    return "; ".join(words)


def clean(text: str) -> str:
    """The text with everything that could move the cursor, colour, hide or reorder shown as an escape."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def shorten(text: str, limit: int = 200) -> str:
    """The first line that says something, cleaned, with a count of the lines left out."""
    # an agent's reply can be megabytes; nobody reads more than a line here
    lines = [line.strip() for line in text[:4096].split("\n") if line.strip()]
    if not lines:
        return "(empty)" if not text else "(blank)"
    more = f" (+{len(lines) - 1} lines)" if len(lines) > 1 else ""
    cut = lines[0][:limit]
    return clean(cut) + ("…" if len(lines[0]) > limit else "") + more


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _speaks_unicode(file: IO[str]) -> bool:
    return (getattr(file, "encoding", None) or "utf-8").lower().replace("-", "").startswith("utf")


def _lines(tree: Tree, glyphs: Glyphs, width: int, full: bool) -> Iterator[Text]:
    """Depth first without recursion, since a tree may be thousands of turns deep."""
    stack: list[tuple[Node, str, str]] = [(tree.root, "", "")]
    while stack:
        node, lead, indent = stack.pop()
        chain = [node] if full else _quiet_chain(node)
        if len(chain) >= _FOLD:
            first, last = chain[0], chain[-1]
            text = f"{glyphs.folded} {len(chain)} turns ({first.turn_index} to {last.turn_index}), "
            text += f"nodes #{first.id} to #{last.id}"
            yield _columns(_indented(lead, width, glyphs) + text, "", "", "", width, glyphs, style="dim")
            stack.append((last.children[0], indent, indent))
            continue
        yield _node_line(node, _indented(lead, width, glyphs), glyphs, width)
        if _broken(node):
            why = f"{_indented(indent, width, glyphs)}failed: {shorten(node.error or 'no reason stored')}"
            yield _fit(Text(why, style="red"), width, glyphs)
        if len(node.children) > 1:
            yield _fit(_fork_line(node, _indented(indent, width, glyphs), glyphs, full), width, glyphs)
        stack.extend(reversed(_children(node, indent, glyphs)))


def _children(node: Node, indent: str, glyphs: Glyphs) -> list[tuple[Node, str, str]]:
    if len(node.children) == 1:
        return [(node.children[0], indent, indent)]
    drawn = []
    for child in node.children:
        is_last = child is node.children[-1]
        fresh = (glyphs.fresh_last if is_last else glyphs.fresh_branch) if child.forked else None
        mark = fresh or (glyphs.last if is_last else glyphs.branch)
        drawn.append((child, indent + mark, indent + ("   " if is_last else glyphs.down)))
    return drawn


def _quiet_chain(node: Node) -> list[Node]:
    """From here on, the turns that neither fork, end, earn nor fail; empty where this one does."""
    chain: list[Node] = []
    while (
        node.parent is not None and len(node.children) == 1 and not node.reward and not node.forked and not node.ended
    ):
        chain.append(node)
        node = node.children[0]
    return chain


def _indented(lead: str, width: int, glyphs: Glyphs) -> str:
    """The lead, its front cut where a tree forks deeper than the screen is wide."""
    room = width // 3
    return lead if len(lead) <= room else glyphs.dots + lead[-(room - len(glyphs.dots)) :]


def _node_line(node: Node, lead: str, glyphs: Glyphs, width: int) -> Text:
    broken = _broken(node)
    glyph = glyphs.fork if len(node.children) > 1 else glyphs.end if node.ended else glyphs.turn
    glyph = glyphs.broken if broken else glyph
    said = shorten(node.observation if node.parent is None else node.action)
    if node.parent is None:
        said = f"start: {said}"
    style = "red" if broken else "green" if node.ended and (node.reward or 0) > 0 else "yellow" if node.ended else ""
    end = str(node.stop_reason or node.status) if node.ended else ""
    reward = f"{node.reward:+.3g}" if node.reward is not None else "" if node.parent is None else "-"
    value = f"{node.value:.2f}" if node.value is not None else ""
    return _columns(
        f"{lead}{glyph} {node.turn_index} #{node.id} {said}", reward, value, end, width, glyphs, style=style
    )


def _broken(node: Node) -> bool:
    return node.status in (NodeStatus.INFRA_ERROR, NodeStatus.RESTORE_FAILED)


def _fork_line(node: Node, indent: str, glyphs: Glyphs, full: bool) -> Text:
    kept = f"keeps {node.forkable}" if node.forkable is not None else "level not recorded"
    shown = node.losses if full else node.losses[:_MAX_LOSSES]
    lost = ", ".join(clean(loss) for loss in shown) or "nothing"
    if len(node.losses) > len(shown):
        lost += f" and {len(node.losses) - len(shown)} more"
    text = f"{indent}fork {glyphs.times}{len(node.children)}: {kept}, loses {lost}"
    return Text(text, style="magenta")


def _columns(left: str, reward: str, value: str, end: str, width: int, glyphs: Glyphs, *, style: str = "") -> Text:
    """Left column cut to its room, then reward, value and end."""
    room = max(width - 34, 30)
    text = _fit(Text(left), room, glyphs)
    text.append(" " * (room - cell_len(text.plain)))
    text.append(f" {reward:>7} {value:>6}  ", style="bold" if reward not in ("", "+0") else "")
    text.append(end)
    text.stylize_before(style)
    return _fit(text, width, glyphs)


def _fit(text: Text, width: int, glyphs: Glyphs) -> Text:
    if glyphs is ASCII and not text.plain.isascii():
        text.plain = text.plain.encode("ascii", "backslashreplace").decode()
    if cell_len(text.plain) > width:
        text.truncate(width - len(glyphs.dots))
        text.append(glyphs.dots)
    return text


def _legend(glyphs: Glyphs) -> Text:
    signs: Sequence[tuple[str, str]] = (
        (glyphs.turn, "turn"),
        (glyphs.fork, "fork point"),
        (glyphs.end, "end"),
        (glyphs.broken, "our failure, not scored"),
        (glyphs.fresh_branch.strip(), "began in a fresh fork"),
        (glyphs.folded, "turns folded, --full shows them"),
    )
    return Text("   ".join(f"{sign} {meaning}" for sign, meaning in signs), style="dim")
