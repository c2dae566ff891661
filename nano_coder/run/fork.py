"""Runs that continue a logged one: forks sampled from one of its steps, and a further message of the user.

Files and tokens are restored exactly. The last turn before a message gets one more observation, the message;
of a shell the directory of files goes on, and no process or variable.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial

from nano_coder.agent.loop import SAID, cut_turns, derived_seed, observed_last, plain_observation
from nano_coder.agent.profiles import continuing_profile
from nano_coder.run.execution import Runtime, as_much_again, branch_run, grade_run, refuse_served
from nano_coder.run.tries import run_side_by_side, with_private_notes
from nano_coder.verify.tokens import PromptRenderer, prove_prompts
from nano_shared.errors import UsageError
from nano_shared.files import content_hash
from nano_shared.hidden_checks import CommandChecks
from nano_shared.types import StopReason, Trajectory


def fork_run(
    run: Trajectory, runtime: Runtime, *, at: int, n: int, seed: int | None = None, check: str | None = None,
    on_run: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:  # fmt: skip
    """Sample `n` continuations of a run from after its step `at` (0 is the start): [n] graded and logged.

    Each is a new run whose first `at` turns are the parent's with their logged tokens; forks of one step form
    a group. `check` is a shell line that grades them as a hidden check; without it the task's own check does.
    Seeds make a fork repeatable. Raises UsageError for a step that nothing can follow, and for a policy that
    would read the run's tokens differently.
    """
    refuse_step(run, at)
    _refuse_other_reader(run, runtime, at)
    task = run.task
    if check is not None:  # which its agent does not see, under a key of its own
        key = f"{task.key}+{content_hash(check).removeprefix('sha256:')[:8]}"
        task = task.model_copy(update={"hidden": CommandChecks(command=check), "key": key})
    runtime = with_private_notes(runtime)
    base = secrets.randbits(32) if seed is None else seed

    def one(member: int, graders: Executor) -> list[Future[Trajectory]]:
        own = derived_seed(base, run.id, at, member)
        fork = branch_run(run, cut_turns(run.turns, at), runtime, task=task, seed=own)
        return [graders.submit(grade_run, fork, runtime)]

    return run_side_by_side([partial(one, member) for member in range(n)], runtime.policy, on_run=on_run)


def refuse_step(run: Trajectory, at: int) -> None:
    """Raises UsageError for a step that the run does not have, and for one that nothing can follow."""
    refuse_served(run)
    count, limits = len(run.turns), run.task.limits
    if run.snapshot is None:
        raise UsageError(f"run {run.id} never got a workspace, so there is none to restore; fork another run")
    if not 0 <= at <= count:
        raise UsageError(f"run {run.id} has no step {at}: --at takes 0 (the start) to {count}")
    if at == count and run.stop is not None and not run.stop.ours:
        raise UsageError(
            f"run {run.id} ended with step {at} ({run.stop}), and nothing follows it; "
            + (f"fork it at 0 to {count - 1}" if count else "it has no other step")
        )
    if at >= limits.max_turns:
        raise UsageError(
            f"step {at} of run {run.id} leaves none of its {limits.max_turns} turns; fork it earlier"
        )


def _refuse_other_reader(run: Trajectory, runtime: Runtime, at: int) -> None:
    """Raises UsageError unless the policy reads the logged prefix as the policy that sampled it."""
    if at == 0:
        return  # only the files are taken over
    if run.is_redacted:
        raise UsageError(f"run {run.id} was redacted: the tokens to continue from are hidden; fork it at 0")
    profile = continuing_profile(runtime.profile, run)
    if profile.hash != run.profile_hash:
        raise UsageError(
            f"run {run.id} was made under profile {run.profile}, and {runtime.policy_name} runs under"
            f" {profile.name}; fork it with a model of its profile, or at 0"
        )
    prefix = run.model_copy(update={"turns": cut_turns(run.turns, at)})
    bare = not any(turn.completion.tokens for turn in prefix.turns)
    if not isinstance(runtime.policy, PromptRenderer):
        if bare:
            return  # text continues text
        raise UsageError(
            f"run {run.id} holds tokens, which {runtime.policy_name} cannot take; fork it with --model"
            f" {run.policy}, or at 0"
        )
    if not prefix.has_tokens and run.template_hash != runtime.policy.template_hash:
        raise UsageError(
            f"run {run.id} is text-only: {runtime.policy_name} would have to encode what another model wrote;"
            " fork it with the model that wrote it, or at 0"
        )
    differing = prove_prompts(prefix, profile, runtime.policy, runtime.store.blobs).differing
    if differing is not None:
        raise UsageError(
            f"{runtime.policy_name} reads run {run.id} otherwise than it is logged, from the prompt of step"
            f" {differing.index + 1} on; fork it with --model {run.policy}, or at 0"
        )


def say_to_run(run: Trajectory, text: str, runtime: Runtime, *, seed: int | None = None) -> Trajectory:
    """Continue a run with a message of the user. What the run has used of its limits is added to them. Raises
    UsageError for a run that nothing can follow, and as `branch_run` does."""
    refuse_unsaid(run, text)
    turns = observed_last(run.turns, plain_observation(SAID, text, ok=True))
    return branch_run(run, turns, runtime, task=as_much_again(run, runtime), seed=seed)


def refuse_unsaid(run: Trajectory, text: str) -> None:
    """Raises UsageError for a run that no message can follow."""
    refuse_served(run)
    if not text.strip():
        raise UsageError("the message is empty; say what to do next")
    if run.stop is None:
        raise UsageError(f"run {run.id} has not ended; nano-coder resume {run.id} goes on with it")
    if not run.turns:
        raise UsageError(f"run {run.id} has no turn to go on from; run the task again")
    if run.is_redacted:
        raise UsageError(f"run {run.id} was redacted: what the model read is not in the log any more")
    if run.stop is StopReason.CONTEXT_FULL:
        raise UsageError(
            f"the context of run {run.id} is full; nano-coder apply {run.id} keeps its work, and a new run"
            " goes on from there"
        )
