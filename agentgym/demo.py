"""`agentgym demo`: the main job on a small scale, with what is built in.

Owns which tasks are shown and the order of showing. Everything it does, the other commands do.
"""

from __future__ import annotations

import shutil
from typing import Any

from agentgym.commands import rollout
from agentgym.config import load_config
from agentgym.review import draw_run, replay_run
from agentgym.screen import Screen
from agentgym.task import Task, load_tasks

NUM_TASKS = 24
"""Of each family: a run and its replay stay under a minute on two cores."""
_SETTINGS = (
    "tasks.name=agentgym.demo:demo_tasks",
    f"tasks.num={2 * NUM_TASKS}",
    "policy.name=scripted",
    "policy.skill=0.75",
    "tree.chooser=random",
    "tree.forks_per_round=3",
    "tree.rounds=2",
    "run.name=demo",
)


def demo(screen: Screen) -> dict[str, Any]:
    """Grow trees of live shells, draw one, replay all, and say what the trees saved.

    Raises:
        BackendUnavailable: this machine cannot run the sandbox; says what to do.
    """
    config = load_config(sets=_SETTINGS)
    screen.say(f"1. growing trees over {2 * NUM_TASKS} terminal tasks; each fork copies a live shell and its files")
    played = rollout(config, screen)
    if "error" in played:
        screen.error(played["error"])
        return played
    folder = played["folder"]
    screen.say(
        f"   {played['trees']} trees, {played['leaves']} leaves, {played['turns']} turns in {played['seconds']:.1f} s "
        f"({played['turns_per_s']:.0f} turns/s); mean outcome {played['mean_outcome'] or 0:.3f}\n"
    )
    screen.say("2. one of them")
    drawn = draw_run(folder, screen, brief=True)
    screen.say("3. executing every branch again, each from its own start")
    replayed = replay_run(folder, screen)
    screen.say("\n4. against the same leaves played as chains")
    ideal = {"turns": played["calls_ratio"], "tokens": played["tokens_ratio"]}
    for what, ratio in ideal.items():
        screen.say(
            f"   {what}: {played[what]} sampled instead of {played[what] + played[f'{what}_saved']}: {ratio:.2f}x fewer "
            f"(achieved/ideal {played['achieved_over_ideal']:.2f})"
        )
    screen.say(
        f"   tool calls: {played['tool_calls']} executed instead of {played['tool_calls'] + played['calls_saved']}"
    )
    screen.say(f"\nThe run is in {folder}. Next: agentgym tree {folder} --all")
    return played | {
        "ok": bool(played["ok"] and drawn["ok"] and replayed["ok"]),
        "replayed_nodes": replayed["nodes"],
        "replayed_equal": replayed["equal"],
    }


def demo_tasks(num: int, seed: int) -> list[Task]:
    """Half of them real one-goal tasks that this machine has the programs for, half generated."""
    real = [task for task in load_tasks("nl2sh") if all(map(shutil.which, task.setup.get("programs", ())))]
    return [*real[: num // 2], *load_tasks("keyhunt", num=num - num // 2, seed=seed)]
