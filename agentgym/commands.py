"""`agentgym rollout`: play, store, report, and leave nothing half done.

Owns what happens around `roll_out`: the run's folder and store, progress, signals and the summary. Leaves
checking settings to `plan.py` and looking at stored runs to `review.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from agentgym.config import RolloutConfig
from agentgym.errors import AgentGymError
from agentgym.plan import Plan, check_backend, make_plan, weakness
from agentgym.rollout import roll_out_async
from agentgym.runs import RunFolder
from agentgym.sandbox import Capabilities, close_backends
from agentgym.screen import Progress, Screen
from agentgym.store import Store
from agentgym.tree import Node, NodeStatus, Tree, saving

SIGNAL_CODES = {int(signal.SIGINT): 130, int(signal.SIGTERM): 143}
"""What a command that was stopped exits with."""


class Stopped(Exception):
    """A signal cancelled the rollout; carries which."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass(slots=True)
class Tally:
    """What has been played so far."""

    trees: dict[str, Tree] = field(default_factory=dict)
    ended: int = 0
    turns: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.started

    def note(self) -> str:
        """The rate, for progress."""
        return f"{self.turns} turns, {self.turns / max(self.seconds, 1e-6):.0f} turns/s"


def rollout(config: RolloutConfig, screen: Screen, *, dry_run: bool = False) -> dict[str, Any]:
    """Roll out tasks as the settings say, and store the run.

    Raises:
        UsageError: a setting names nothing, or would be ignored; nothing has started then.
        BackendUnavailable: this machine refuses the backend.

    Returns:
        The summary. Where a signal or a failure of ours ended the run in the middle, what was played is stored,
        and the summary has "error" and "exit_code".
    """
    plan = make_plan(config)
    if dry_run:
        screen.say(plan.config.to_toml())
        return {"ok": True, "dry_run": True, "trees": plan.num_trees, "config": plan.config.to_plain()}
    try:
        capabilities = check_backend(plan)
        warning = weakness(plan.env_kwargs.get("backend", ""), capabilities)
        if warning:
            screen.warn(warning)
        name = plan.config.run.name or f"{plan.config.tasks.name or plan.config.env.id}-{plan.config.policy.name}"
        with RunFolder(plan.config.run.folder, name) as run:
            return _run(plan, run, screen, {"backend": _isolation(plan, capabilities), "warning": warning})
    finally:
        close_backends()


def say_summary(screen: Screen, summary: dict[str, Any]) -> None:
    """The summary of a rollout for people."""
    outcome = "none scored" if summary["mean_outcome"] is None else f"{summary['mean_outcome']:.3f}"
    screen.say(
        f"{summary['tasks']} tasks, {summary['trees']} trees, {summary['leaves']} leaves; mean outcome {outcome}"
    )
    screen.say(
        f"{summary['turns']} turns, {summary['tokens']} tokens, {summary['tool_calls']} tool calls "
        f"in {summary['seconds']:.1f} s ({summary['turns_per_s']} turns/s)"
    )
    if summary["turns_saved"]:
        screen.say(
            f"saved against chains: {summary['turns_saved']} turns ({summary['calls_ratio']:.2f}x), "
            f"{summary['tokens_saved']} tokens ({summary['tokens_ratio']:.2f}x), {summary['calls_saved']} tool calls; "
            f"achieved/ideal {summary['achieved_over_ideal']}"
        )
    if "error" in summary:
        screen.error(summary["error"])
    if summary["infra_errors"]:
        screen.say(f"{summary['infra_errors']} branches broke and are not scored; the first: {summary['first_error']}")
    screen.say(f"run {summary['folder']}")


def _run(plan: Plan, run: RunFolder, screen: Screen, about: dict[str, Any]) -> dict[str, Any]:
    head: dict[str, Any] = {"ok": False, "run": run.id, "folder": str(run.path), "status": "running"}
    head |= {"env": plan.config.env.id, "policy": plan.config.policy.name, "chooser": plan.config.tree.chooser}
    # without its folder, so that the file can be given to --config again
    run.write_config(plan.config.changed({"run": {"folder": None}}).to_toml())
    run.write_summary(head)
    tally = Tally()
    status, error, code = "failed", None, 1
    try:
        with Store.open(run.database) as store:
            store.add_run(run.id, plan.config.to_plain() | about)
            try:
                asyncio.run(_play(plan, run.id, store, tally, screen))
                status = "complete"
            except (Stopped, KeyboardInterrupt):
                status = "interrupted"
                raise
            finally:
                store.end_run(run.id, status)
    except Stopped as stopped:
        error, code = f"stopped by {stopped}; {tally.turns} turns are kept in {run.path}", SIGNAL_CODES[stopped.number]
    except AgentGymError as failure:
        error = str(failure)
    finally:
        summary = head | {"status": status} | _figures(plan, tally) | about
        summary["ok"] = status == "complete" and not summary["infra_errors"]
        if error is not None:
            summary |= {"error": error, "exit_code": code}
        run.write_summary(summary)
    return summary


async def _play(plan: Plan, run_id: str, store: Store, tally: Tally, screen: Screen) -> None:
    """Roll out, handing each turn to the store as it is played; a signal cancels and cleans up."""
    with Progress("rollout", plan.num_trees) as progress, _signals() as stopped:

        def on_node(tree: Tree, node: Node) -> None:
            if tree.id not in tally.trees:
                tally.trees[tree.id] = tree
                task = next(task for task in plan.tasks if task.id == tree.task_id)
                store.add_tree(run_id, tree, task, env_kwargs=plan.env_kwargs)
            store.add_node(run_id, tree.id, node)
            tally.turns += node.parent is not None
            progress.update(tally.ended, tally.note())

        def on_tree(tree: Tree) -> None:
            store.end_tree(run_id, tree)
            tally.ended += 1
            screen.row(tree_row(tree))
            progress.update(tally.ended, tally.note())

        try:
            await roll_out_async(
                plan.tasks, plan.engine, plan.settings, make_env=plan.make_env, on_node=on_node, on_tree=on_tree
            )
        except asyncio.CancelledError:
            if stopped:
                raise Stopped(stopped[0]) from None
            raise


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Let the first SIGINT or SIGTERM cancel the current task; a second one ends the process as usual."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    stopped: list[int] = []
    before = {number: signal.getsignal(number) for number in SIGNAL_CODES}

    def stop(number: int) -> None:
        stopped.append(number)
        loop.remove_signal_handler(number)
        assert task is not None, "called from a coroutine, so there is a task"
        task.cancel()

    try:
        for number in SIGNAL_CODES:
            loop.add_signal_handler(number, stop, number)
    except (ValueError, RuntimeError):  # not the main thread: the caller's signals are not ours
        before = {}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def tree_row(tree: Tree) -> dict[str, Any]:
    """One tree for machines."""
    saved = saving([tree])
    return {
        "tree": tree.id,
        "task": tree.task_id,
        "leaves": len(tree.leaves()),
        "outcomes": outcomes(tree),
        "turns": saved.turns,
        "chain_turns": saved.chain_turns,
        "tokens": saved.tokens,
        "tool_calls": saved.tool_calls,
        "infra_errors": len(broken(tree)),
        "errors": [node.error for node in broken(tree)][:3],
    }


def outcomes(tree: Tree) -> list[float]:
    """The outcome of each leaf that was scored; 0 where a limit ended it unscored."""
    return [leaf.rewards.get("outcome", 0.0) for leaf in tree.scored_leaves()]


def broken(tree: Tree) -> list[Node]:
    """Nodes where our side failed."""
    return [node for node in tree.nodes if node.status in (NodeStatus.INFRA_ERROR, NodeStatus.RESTORE_FAILED)]


def _figures(plan: Plan, tally: Tally) -> dict[str, Any]:
    trees = list(tally.trees.values())
    found = [outcome for tree in trees for outcome in outcomes(tree)]
    saved = saving(trees)
    seconds = tally.seconds
    errors = [node for tree in trees for node in broken(tree)]
    return {
        "tasks": len(plan.tasks),
        "trees": len(trees),
        "leaves": sum(len(tree.leaves()) for tree in trees),
        "mean_outcome": fmean(found) if found else None,
        "infra_errors": len(errors),
        "first_error": errors[0].error if errors else None,
        "turns": saved.turns,
        "tokens": saved.tokens,
        "tool_calls": saved.tool_calls,
        "turns_saved": saved.chain_turns - saved.turns,
        "calls_saved": saved.chain_tool_calls - saved.tool_calls,
        "tokens_saved": saved.chain_tokens - saved.tokens,
        "calls_ratio": round(saved.calls_ratio, 4),
        "tokens_ratio": round(saved.tokens_ratio, 4),
        # each token of the trees once is ideal; whatever the engine sampled beyond that was sampled again
        "achieved_over_ideal": round(saved.tokens / plan.engine.tokens, 4) if plan.engine.tokens else None,
        "seconds": round(seconds, 3),
        "turns_per_s": round(saved.turns / seconds, 1) if seconds else None,
    }


def _isolation(plan: Plan, capabilities: Capabilities | None) -> dict[str, Any] | None:
    """What the record says of the backend."""
    if capabilities is None:
        return None
    return {
        "name": plan.env_kwargs["backend"],
        "level": str(capabilities.level),
        "isolation": sorted(capabilities.isolation),
        "missing": dict(capabilities.missing),
    }
