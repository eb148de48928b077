"""AgentEnv: a Gymnasium environment whose actions are a policy's turns and whose state forks.

Owns the turn, the three fates, random state, and when to freeze. An author writes
`begin`, `act` and `grade`; whatever they store on `self` is copied by a fork, and whatever cannot be copied
is attached as a resource. Leaves tools, worlds and graders to the environments in `agentgym.envs`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self, TypeVar, cast

import gymnasium
import numpy as np

from agentgym.episode import ANY_TEXT, Episode, Limits, Reply, cut_middle
from agentgym.errors import AgentGymError, ConfigError, EnvError, ParseError, SnapshotUnsupported, UnknownName
from agentgym.parsing import check_calls, get_codec, parse
from agentgym.sandbox import Resource, ResourceSnapshot
from agentgym.snapshot import EnvSnapshot, copied
from agentgym.task import Task, load_tasks
from agentgym.types import Action, Level, Message, StepResult, StopReason, ToolCall, ToolSpec

R = TypeVar("R", bound=Resource)


class AgentEnv(gymnasium.Env[str, str]):
    """A multi-turn environment for language agents that forks at any turn.

    `reset(seed=, options={"task": Task | id})` and `step(text | Action)` are Gymnasium's; both are plain and
    synchronous. `snapshot`, `restore` and `fork` are for the caller and are never offered as tools.

    An author sets `tools` and writes `begin`, `act` and `grade`. Counters, limits and random state are kept
    here; `self.np_random` is the only source of randomness to use. Anything with processes, files or
    connections is attached: `self.sandbox = self.attach(sandbox)`.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  (gymnasium's own spelling)
    tools: tuple[ToolSpec, ...] = ()
    """What the policy can call; a constructor may set it anew where an option changes it, and `needs` with it."""
    needs: Level = Level.STATE
    """The fork level without which the environment makes no sense."""
    volatile: ClassVar[tuple[str, ...]] = ()
    """Patterns of what may differ when a branch is played again, such as r"\\d+ ms"."""

    def __init__(
        self,
        tasks: str | Sequence[Task] = (),
        *,
        codec: str = "compact",
        limits: Limits | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Make an environment; no world is opened before `reset`.

        Args:
            tasks: A family or file for `load_tasks`, or tasks; `reset` draws from them when given none.
            codec: How the policy spells actions, "compact" or "json".
            limits: Defaults for tasks that set none.
            render_mode: "ansi" or None.
        """
        if render_mode not in (None, "ansi"):
            raise ConfigError(f"render_mode {render_mode!r} is not offered; use 'ansi' or None")
        self.render_mode = render_mode
        self.tasks: tuple[Task, ...] = tuple(load_tasks(tasks) if isinstance(tasks, str) else tasks)
        self.codec_name = codec
        self._codec = get_codec(codec)
        self.default_limits = limits or Limits()
        # copies have random streams of their own
        self.action_space = copy.copy(ANY_TEXT)
        self.observation_space = copy.copy(ANY_TEXT)
        self._episode: Episode | None = None
        self._resources: list[Resource] = []
        self.turn_messages: tuple[Message, ...] = ()
        """What the last reset or step added to the chat."""
        self._observation = ""

    # what an author writes

    def begin(self, task: Task) -> str:
        """Open the world for a task and give the first observation."""
        raise NotImplementedError(f"{type(self).__name__} must define begin(task)")

    def act(self, call: ToolCall) -> Reply | str:
        """Carry out one call. The policy's mistakes are texts; only our failures are exceptions."""
        raise NotImplementedError(f"{type(self).__name__} must define act(call)")

    def grade(self) -> float | Mapping[str, float]:
        """Score the world as it stands; a mapping must have "outcome". Called once, at the end."""
        raise NotImplementedError(f"{type(self).__name__} must define grade()")

    def reseed(self, seed: int) -> None:
        """Give a fork a random future of its own; authors with more random state extend it."""
        self._np_random, self._np_random_seed = gymnasium.utils.seeding.np_random(seed)

    def system_prompt(self) -> str:
        """What the policy is told before the task: the tools and how to call them."""
        lines = []
        for tool in self.tools:
            names = [p.name if p.required else f"[{p.name}]" for p in tool.params]
            if self.codec_name == "compact":
                usage = " ".join([tool.name, *names[:1]]) + "".join(f"\\n{n}" for n in names[1:])
            else:
                usage = f"{tool.name}({', '.join(names)})"
            lines.append(f"{usage}: {tool.description}")
        how = (
            "Reply with one call: the tool's name, then its argument."
            if self.codec_name == "compact"
            else 'Reply with one call: {"name": TOOL, "arguments": {...}}'
        )
        return "\n".join([how, *lines])

    # gymnasium's side

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Close the old world and start an episode.

        Args:
            seed: Seeds `self.np_random`; 0 is a seed like any other, None goes on with the stream.
            options: "task", a `Task` or the id of one of the environment's tasks; drawn when absent.

        Raises:
            EnvError: the environment has no tasks and none was given.
        """
        super().reset(seed=seed)
        options = options or {}
        unknown = sorted(set(options) - {"task"})
        if unknown:
            raise ConfigError(f"reset option {unknown[0]!r} is unknown; the only one is 'task'")
        task = self._pick(options.get("task"))
        self._release_world()
        self._episode = episode = Episode(task, self._limits_of(task))
        try:
            observation = self.begin(task)
        except BaseException:
            self._release_world()
            self._episode = None
            raise
        self._observation = observation = cut_middle(observation, episode.limits.max_output_bytes)
        self.turn_messages = (Message("system", self.system_prompt()), Message("user", observation))
        return observation, self._info({})

    def step(self, action: str | Action) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one turn.

        Returns:
            observation, reward (sum of `info["rewards"]`), terminated, truncated, info with "messages"
            (OpenAI style, what this turn added), "rewards", "stop_reason" and "left" (of each limit).

        Raises:
            EnvError: no episode is running, or the world broke. Never used for the policy's mistakes.
        """
        episode = self._running()
        act = action if isinstance(action, Action) else Action(_text(action))
        started = time.perf_counter()
        try:
            reply, messages = self._turn(episode, act)
            episode.elapsed_s += time.perf_counter() - started
            rewards = dict(reply.rewards)
            episode.stop = self._limit_hit(episode) if not reply.ended else StopReason.SUBMITTED
            if episode.stop is not None and (reply.ended or episode.limits.score_truncated):
                rewards |= self._verdict(episode, reply.ended)
        except AgentGymError as error:
            episode.broken = str(error)
            raise
        except Exception as error:
            episode.broken = f"{type(error).__name__}: {error}"
            raise EnvError(f"{type(self).__name__} failed in turn {episode.turn}: {episode.broken}") from error
        self.turn_messages = messages
        self._observation = reply.text
        terminated = episode.stop is not None and episode.stop.terminated
        truncated = episode.stop is not None and not terminated
        return reply.text, float(sum(rewards.values())), terminated, truncated, self._info(rewards)

    def stop(self, reason: StopReason) -> dict[str, float]:
        """End the episode at a limit that is counted outside, such as sampled tokens.

        Returns:
            The named rewards of the end: what exists is graded where the limits say so, else none.

        Raises:
            EnvError: no episode is running, or the grading broke.
        """
        episode = self._running()
        if reason.terminated:
            raise EnvError(f"stop({reason}) is no limit; a task ends itself in act()")
        episode.stop = reason
        if not episode.limits.score_truncated:
            return {}
        try:
            return self._verdict(episode, submitted=False)
        except Exception as error:
            episode.broken = f"{type(error).__name__}: {error}"
            raise EnvError(f"{type(self).__name__} failed when it was graded: {episode.broken}") from error

    def play(self, action: str | Action) -> StepResult:
        """`step` with names."""
        return StepResult(*self.step(action))

    def render(self) -> str | None:
        """The last observation, in mode "ansi"."""
        return self._observation if self.render_mode == "ansi" else None

    def close(self) -> None:
        """End the world and free everything; twice is fine."""
        self._release_world()
        self._episode = None

    # forking

    @property
    def episode(self) -> Episode:
        """The counters of the running or ended episode."""
        if self._episode is None:
            raise EnvError(f"{type(self).__name__} has no episode; call reset first")
        return self._episode

    def attach(self, resource: R) -> R:
        """Make a part of the world fork and close with the environment; give it back for storing on `self`."""
        self._resources.append(resource)
        return resource

    def snapshot(self, *, require: Level | None = None) -> EnvSnapshot:
        """Freeze the whole state: world, counters, random state; the environment goes on.

        All resources are frozen, or none.

        Raises:
            SnapshotUnsupported: the world keeps less than `require`.
            EnvError: an attribute can be neither copied nor was attached.
        """
        self._running(may_have_ended=True)
        snapshots: list[ResourceSnapshot] = []
        try:
            for resource in self._resources:
                snapshots.append(resource.snapshot())
            snapshot = EnvSnapshot(self, snapshots)
            if require is not None and snapshot.level < require:
                raise SnapshotUnsupported(
                    f"level {require} is required, but {type(self).__name__} keeps level {snapshot.level} here "
                    f"(losses: {', '.join(snapshot.losses) or 'none alive'}); ask for less or use another backend"
                )
        except BaseException:
            for taken in snapshots:
                taken.release()
            raise
        return snapshot

    def restore(self, snapshot: EnvSnapshot) -> None:
        """Go back to a frozen state in place."""
        snapshot.restore(self)

    def fork(self, n: int = 1, *, seeds: Sequence[int] | None = None) -> list[Self]:
        """Give n live copies beside this one; see `EnvSnapshot.fork`."""
        with self.snapshot() as snapshot:
            return cast("list[Self]", snapshot.fork(n, seeds=seeds))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise TypeError(f"{type(self).__name__} cannot be deep-copied, its world is live; use fork()")

    def __copy__(self) -> Self:
        raise TypeError(f"{type(self).__name__} cannot be copied, its world is live; use fork()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{type(self).__name__} cannot be pickled, its world is live; use fork()")

    # inside

    def _running(self, may_have_ended: bool = False) -> Episode:
        episode = self.episode
        if episode.broken is not None:
            raise EnvError(f"the world broke in turn {episode.turn} ({episode.broken}); call reset")
        if episode.stop is not None and not may_have_ended:
            raise EnvError(f"the episode has ended ({episode.stop}); call reset, or fork an earlier snapshot")
        return episode

    def _pick(self, wanted: Any) -> Task:
        if isinstance(wanted, Task):
            return wanted
        if not self.tasks:
            raise EnvError(
                f"{type(self).__name__} has no tasks; make it with tasks=..., or reset(options={{'task': task}})"
            )
        if wanted is None:
            return self.tasks[int(self.np_random.integers(len(self.tasks)))]
        for task in self.tasks:
            if task.id == wanted:
                return task
        raise UnknownName.of("task", wanted, [t.id for t in self.tasks], "`agentgym list tasks` lists them")

    def _limits_of(self, task: Task) -> Limits:
        try:
            return replace(self.default_limits, **cast("dict[str, Any]", task.limits))
        except TypeError as error:
            raise ConfigError(f"task {task.id!r} has an unknown limit: {error}; see agentgym.Limits") from error

    def _turn(self, episode: Episode, act: Action) -> tuple[Reply, tuple[Message, ...]]:
        episode.turn += 1
        try:
            calls = self._read(episode, act)
        except ParseError as mistake:
            episode.bad_calls += 1
            text = cut_middle(f"error: {mistake}", episode.limits.max_output_bytes)
            return Reply(text), (Message("assistant", act.text), Message("user", text))
        episode.bad_calls = episode.cuts = 0
        said = Message("assistant", act.text, calls)
        answers: list[Message] = []
        texts: list[str] = []
        rewards: dict[str, float] = {}
        ended = False
        for call in calls:
            if ended or episode.tool_calls >= episode.limits.max_tool_calls:
                text = "not executed: " + ("the episode has ended" if ended else "no tool calls left")
            else:
                episode.tool_calls += 1
                answer = self.act(call)
                reply = Reply(answer) if isinstance(answer, str) else answer
                text = cut_middle(reply.text, episode.limits.max_output_bytes)
                ended = reply.ended
                for name, value in reply.rewards.items():
                    rewards[name] = rewards.get(name, 0.0) + value
            answers.append(Message("tool", text, tool_call_id=call.id))
            texts.append(text if len(calls) == 1 else f"[{call.id} {call.name}]\n{text}")
        return Reply("\n".join(texts), ended, rewards), (said, *answers)

    def _read(self, episode: Episode, act: Action) -> tuple[ToolCall, ...]:
        if act.cut:
            episode.cuts += 1
            raise ParseError("the reply was cut by the token limit and was not executed; write a shorter one")
        if act.calls is not None:
            return check_calls(act.calls, self.tools)
        return parse(act.text, self.tools, self._codec)

    def _limit_hit(self, episode: Episode) -> StopReason | None:
        limits = episode.limits
        if episode.cuts >= 2:
            return StopReason.MAX_TOKENS
        if episode.bad_calls >= limits.max_bad_calls:
            return StopReason.BAD_CALLS
        if episode.turn >= limits.max_turns:
            return StopReason.MAX_TURNS
        if episode.tool_calls >= limits.max_tool_calls:
            return StopReason.MAX_TOOL_CALLS
        if episode.elapsed_s >= limits.timeout_s:
            return StopReason.TIMEOUT
        return None

    def _verdict(self, episode: Episode, submitted: bool) -> dict[str, float]:
        graded = self.grade()
        verdict = dict(graded) if isinstance(graded, Mapping) else {"outcome": float(graded)}
        if "outcome" not in verdict:
            raise EnvError(f"grade() of {type(self).__name__} gave {sorted(verdict)}; it must have 'outcome'")
        for name, value in verdict.items():
            if not np.isfinite(value):
                raise EnvError(f"grade() of {type(self).__name__} gave {name}={value}; rewards must be finite")
        if submitted:
            outcome = verdict["outcome"]
            episode.stop = (
                StopReason.SUCCESS if outcome >= 1 else StopReason.FAILURE if outcome <= 0 else StopReason.SUBMITTED
            )
        return verdict

    def _info(self, rewards: dict[str, float]) -> dict[str, Any]:
        episode = self.episode
        limits = episode.limits
        return {
            "task": episode.task.id,
            "turn": episode.turn,
            "messages": [message.to_openai() for message in self.turn_messages],
            "rewards": rewards,
            "stop_reason": None if episode.stop is None else str(episode.stop),
            "left": {
                "turns": limits.max_turns - episode.turn,
                "tool_calls": limits.max_tool_calls - episode.tool_calls,
            },
        }

    def _release_world(self) -> None:
        resources, self._resources = self._resources, []
        for resource in reversed(resources):
            resource.close()


def _text(action: Any) -> str:
    if not isinstance(action, str):
        raise EnvError(f"an action is a text or an Action, got {type(action).__name__}")
    return action


def fork(env: gymnasium.Env[Any, Any], n: int = 1) -> list[gymnasium.Env[Any, Any]]:
    """Fork an environment through its gymnasium wrappers; each wrapper's own state is copied.

    Raises:
        EnvError: a wrapper holds something that cannot be copied, or the innermost environment cannot fork.
    """
    if isinstance(env, AgentEnv):
        return list(env.fork(n))
    if not isinstance(env, gymnasium.Wrapper):
        raise EnvError(f"{type(env).__name__} cannot fork; derive it from agentgym.AgentEnv")
    forks = fork(env.env, n)
    children: list[gymnasium.Env[Any, Any]] = []
    try:
        for inner in forks:
            child = object.__new__(type(env))
            vars(child).update(copied(vars(env), {id(env.env): inner, id(env): child}, type(env).__name__))
            children.append(child)
    except BaseException:
        for inner in forks:
            inner.close()
        raise
    return children
