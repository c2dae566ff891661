"""`nano-rl admit`: what the log can teach, before a step is spent on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from nano_coder.commands.options import PolicyChoice, SinceChoice, TaskChoice, open_log
from nano_rl.commands.options import Log, Seed
from nano_shared.command_line import JsonOption, emit
from nano_shared.errors import NanoError
from nano_shared.run_facts import RunFilter, moment

if TYPE_CHECKING:
    from nano_coder.models.opening import OpenedWeights
    from nano_shared.policy import InterfaceProfile


def command(
    log: Log = None,
    task: TaskChoice = None,
    since: SinceChoice = None,
    policy: PolicyChoice = None,
    model: Annotated[
        str | None, Option(help="Policy to be trained, if not the promoted one: checkpoint or folder.")
    ] = None,
    max_staleness: Annotated[
        int | None, Option(min=0, metavar="N", help="Refuse runs of a policy N steps older.")
    ] = None,
    exact: Annotated[
        bool, Option("--exact", help="Look at the tokens of every run, not of a sample.")
    ] = False,
    seed: Seed = 0,
    as_json: JsonOption = False,
) -> int:
    """What the log can teach: runs by their best use, and each reason why not a better one.

    Everything is read off the columns of the log, and of a seeded sample of runs (or with --exact of all)
    the tokens are held against texts, template and weights. Without a model at hand the report says so.
    """
    chosen = RunFilter(task=task, since=moment(since), policy=policy)
    with open_log(log) as store:
        from nano_rl.logs.admission import RunVerifier, TargetPolicy, survey

        has_tokens = store.has_tokens()
        opened, note = _opened(model) if has_tokens else (None, None)
        verifier, target = None, TargetPolicy(max_staleness=max_staleness)
        if not has_tokens:
            target = TargetPolicy(profile=_profile(model))
        elif opened is not None:
            verifier = RunVerifier(opened, store)
            target = TargetPolicy(
                profile=opened.profile, template_hash=verifier.template_hash, version=opened.version,
                max_staleness=max_staleness,
            )  # fmt: skip
        report = survey(store, chosen, target, verifier, exact=exact, seed=seed)
        report.notes += _notes(note, exact=exact, bounded=max_staleness is not None)
        if report.runs and not has_tokens:
            report.notes.append("no run of the log has tokens, so no model was loaded to hold them against")
        if not report.runs:
            report.notes.append("no run of the log matches; leave out --task, --since or --policy")
        found = {"log": store.url, "policy": _named(opened), **report.as_dict()}
        emit(found, as_json, lambda: print("\n".join((f"log {store.url}", *report.lines()))))
    return 0


def _profile(model: str | None) -> InterfaceProfile | None:
    """The profile of the policy to judge for, without its weights; None where there is no policy."""
    from nano_coder.agent.profiles import find_profile
    from nano_coder.models.opening import usual_profile

    try:
        return find_profile(usual_profile(model))
    except NanoError:
        if model is not None:
            raise
        return None


def _opened(model: str | None) -> tuple[OpenedWeights | None, str | None]:
    """The policy to judge for, or why there is none. Raises UsageError for one that was named and is not."""
    from nano_coder.models.opening import default_model, open_weights

    if model is not None:
        return open_weights(model), None
    try:
        return open_weights(default_model()), None
    except NanoError as problem:
        return None, str(problem)
    except ModuleNotFoundError as problem:
        return None, f"{problem}; install nano with its extra `rl`"


def _notes(problem: str | None, *, exact: bool, bounded: bool) -> list[str]:
    if problem is None:
        return []
    left = ["template and profile against the policy's", "tokens", "effective sample size"]
    left += ["--max-staleness"] if bounded else []
    left += ["--exact"] if exact else []
    return [f"no model is at hand ({problem}), so these were not judged: {', '.join(left)}"]


def _named(opened: OpenedWeights | None) -> dict[str, object] | None:
    if opened is None:
        return None
    return {"id": opened.loaded.id, "version": opened.version, "profile": opened.profile.name}
