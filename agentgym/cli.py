"""The command line: what each command takes, and what its end means to the shell.

Owns options, help and exit codes: 0 where all went well, 1 where it did not, 2 where the caller asked for
something that cannot be, 130 and 143 where a signal ended it. Everything a command does is in `commands.py`
(rollout), `review.py` (tree, replay), `ops.py` (list, doctor, gc, bench) and `demo.py`, imported when it runs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from agentgym.errors import AgentGymError, UsageError
from agentgym.screen import Screen

app = typer.Typer(
    name="agentgym",
    help="A gym for language agents whose sandboxes fork at any turn.",
    rich_markup_mode=None,  # loading rich for help alone would take half as long again as the rest
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
tasks_app = typer.Typer(help="Task files.", rich_markup_mode=None, no_args_is_help=True)
app.add_typer(tasks_app, name="tasks")


def _example(line: str) -> str:
    return f"\b\nExample:\n  {line}"  # after a backspace the parser leaves lines as they are


Json = Annotated[bool, typer.Option("--json", help="One JSON object a line; the last is the summary.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its id under runs/.")]
OnlyTree = Annotated[str | None, typer.Option("--tree", metavar="ID", help="Only this tree.")]


@app.command(
    "rollout", epilog=_example("agentgym rollout agentgym/Terminal-v0 --tasks keyhunt --policy scripted --tree random")
)
def rollout_command(
    env: Annotated[str | None, typer.Argument(metavar="ENV", help="A registered environment.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Task family, file or folder.")] = None,
    policy: Annotated[str | None, typer.Option(help="Who plays.")] = None,
    tree: Annotated[str | None, typer.Option(metavar="CHOOSER", help="Where to fork.")] = None,
    num: Annotated[int | None, typer.Option(help="How many tasks.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of worlds, policy and forks.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings in TOML.")] = None,
    run: Annotated[str | None, typer.Option(metavar="DIR", help="The run's folder.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the settings in effect and stop.")] = False,
    as_json: Json = False,
) -> int:
    """Play tasks as chains or trees and store the run.

    Settings come from --config, AGENTGYM_<SECTION>__<KEY>, --set and the options above; later ones win.
    """
    from agentgym.commands import rollout, say_summary
    from agentgym.config import load_config

    flags = {
        "ENV": ("env.id", env),
        "--tasks": ("tasks.name", tasks),
        "--policy": ("policy.name", policy),
        "--tree": ("tree.chooser", tree),
        "--num": ("tasks.num", num),
        "--seed": ("run.seed", seed),
        "--run": ("run.folder", run),
    }
    settings = load_config(config, environ=os.environ, sets=set_ or (), flags=flags)
    screen = Screen(as_json=as_json)
    summary = rollout(settings, screen, dry_run=dry_run)
    if not dry_run:
        say_summary(screen, summary)
    return screen.finish(summary)


@app.command("tree", epilog=_example("agentgym tree runs/20250101-120000-keyhunt-scripted --tree keyhunt-0/0"))
def tree_command(
    run: Run,
    tree: OnlyTree = None,
    every: Annotated[bool, typer.Option("--all", help="Draw every tree.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every turn and every loss, nothing folded.")] = False,
    as_json: Json = False,
) -> int:
    """Draw the trees of a run in the terminal.

    Turns, rewards and values, fork points, what each fork kept and lost.
    """
    from agentgym.review import draw_run

    screen = Screen(as_json=as_json)
    return screen.finish(draw_run(run, screen, tree_id=tree, every=every, full=full))


@app.command("replay", epilog=_example("agentgym replay runs/20250101-120000-keyhunt-scripted"))
def replay_command(
    run: Run,
    node: Annotated[int | None, typer.Option(metavar="N", help="Only the branch to this node.")] = None,
    tree: OnlyTree = None,
    forked: Annotated[bool, typer.Option("--forked", help="Fork again where the rollout forked.")] = False,
    as_json: Json = False,
) -> int:
    """Execute stored branches again and compare.

    Names the first node where the world answers otherwise, and fails then.
    """
    from agentgym.review import replay_run

    screen = Screen(as_json=as_json)
    return screen.finish(replay_run(run, screen, tree_id=tree, node=node, forked=forked))


@app.command("list", epilog=_example("agentgym list tasks"))
def list_command(
    kind: Annotated[
        str | None, typer.Argument(metavar="KIND", help="One kind; all but runs and settings if absent.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Show what there is of each kind.

    Kinds: envs, tasks, policies, choosers, backends, benches, codecs, runs, settings.
    """
    from agentgym.ops import KINDS, listing

    screen = Screen(as_json=as_json)
    kinds = [kind] if kind else [name for name in KINDS if name not in ("runs", "settings")]
    total = 0
    for name in kinds:
        found = listing(name)
        total += len(found)
        for key, text in found.items():
            screen.row({"kind": name, "name": key, "about": text})
        screen.table(list(found.items()) or [("none", "")], (name, ""))
        screen.say()
    return screen.finish({"ok": True, "listed": total})


@app.command("doctor", epilog=_example("agentgym doctor"))
def doctor_command(as_json: Json = False) -> int:
    """Say what this machine gives, by trying it.

    Each backend and what it keeps apart, state folders, Python, optional extras; what is missing and what that means.
    """
    from agentgym.ops import doctor
    from agentgym.sandbox import close_backends

    screen = Screen(as_json=as_json)
    try:
        checks = list(doctor())
    finally:
        close_backends()
    for check in checks:
        screen.row({"area": check.area, "name": check.name, "state": check.state, "detail": check.detail})
    screen.table([(c.area, c.name, c.state, c.detail) for c in checks], ("area", "what", "state", "found"))
    failed = [f"{check.area} {check.name}" for check in checks if check.state == "failed"]
    return screen.finish({"ok": not failed, "checks": len(checks), "failed": failed})


@app.command("gc", epilog=_example("agentgym gc --dry-run"))
def gc_command(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: Json = False,
) -> int:
    """Free what crashed runs left behind.

    Processes, mounts, control groups and folders; the runs are marked interrupted.
    """
    from agentgym.ops import collect_garbage

    screen = Screen(as_json=as_json)
    done = collect_garbage(dry_run=dry_run)
    for line in done:
        screen.row({"left_behind": line, "removed": not dry_run})
        screen.say(f"{'would remove' if dry_run else 'removed'}: {line}")
    if not done:
        screen.say("nothing was left behind")
    return screen.finish({"ok": True, "found": len(done), "removed": 0 if dry_run else len(done)})


@app.command("bench", epilog=_example("agentgym bench fork step"))
def bench_command(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Benches, or all.")],
    as_json: Json = False,
) -> int:
    """Measure against a baseline in the same run.

    Fails where a target is missed by more than 20 %.
    """
    from agentgym.ops import bench_names, run_benches
    from agentgym.sandbox import close_backends

    screen = Screen(as_json=as_json)
    chosen = bench_names(names)
    try:
        rows = list(run_benches(chosen, screen))
    finally:
        close_backends()
    missed = [f"{row.bench}/{row.case}" for row in rows if row.missed]
    return screen.finish({"ok": not missed, "benches": len(chosen), "rows": len(rows), "missed": missed})


@app.command("demo", epilog=_example("agentgym demo"))
def demo_command(as_json: Json = False) -> int:
    """Grow, draw and replay trees of real shell sessions."""
    from agentgym.demo import demo

    screen = Screen(as_json=as_json)
    return screen.finish(demo(screen))


@tasks_app.command("check", epilog=_example("agentgym tasks check my_tasks.jsonl"))
def tasks_check_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A task file or a folder of them.")],
    as_json: Json = False,
) -> int:
    """Name every problem of a task file, with line and field."""
    from agentgym.registry import list_envs
    from agentgym.task import check_tasks

    screen = Screen(as_json=as_json)
    problems = check_tasks(file, known_envs=list_envs())
    for problem in problems:
        screen.row({"problem": problem})
        screen.say(problem)
    screen.say(f"{len(problems)} problems" if problems else f"{file}: no problems")
    return screen.finish({"ok": not problems, "problems": len(problems)})


# the shell's side


class _Terminated(KeyboardInterrupt):
    """SIGTERM, so that a command cleans up as it does on Ctrl-C."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and give its exit code; errors are one line on standard error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = typer.main.get_command(app)
    try:
        before = signal.signal(signal.SIGTERM, _on_terminate)
    except ValueError:  # not the main thread
        before = None
    try:
        result = command.main(args=given, prog_name="agentgym", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except BaseException as error:
        return _exit_code(error, "--json" in given)
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _on_terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise _Terminated


def _exit_code(error: BaseException, as_json: bool) -> int:
    """Say what went wrong, in one line, and give the code for the shell."""
    if isinstance(error, typer.Abort) and error.__cause__ is not None:
        error = error.__cause__  # the parser wraps what a signal raised
    if isinstance(error, BrokenPipeError):
        # the reader has seen enough; do not let the interpreter complain when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    if isinstance(error, TyperException):
        text, code = " ".join(error.format_message().split("\n")), error.exit_code
        if error.exit_code == 2 and "Usage:" in text:
            print(error.format_message(), file=sys.stderr)
            return 2
    elif isinstance(error, AgentGymError):
        text, code = " ".join(str(error).split("\n")), 2 if isinstance(error, UsageError) else 1
    elif isinstance(error, KeyboardInterrupt):
        number = signal.SIGTERM if isinstance(error, _Terminated) else signal.SIGINT
        text, code = f"stopped by {number.name}", 128 + number
    else:
        raise error
    screen = Screen(as_json=as_json)
    screen.error(text)
    screen.row({"ok": False, "error": text})
    return code


if __name__ == "__main__":
    sys.exit(main())
