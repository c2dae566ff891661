"""Guards, each provoked in the real loop: it stops with its sentence, and the saved weights are spared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from looping import CONFIG, Given, Loop, logged_groups, same, scored, tiny_model, weights

from nano_coder.models.opening import local_policy, open_weights
from nano_coder.run.execution import Runtime
from nano_rl import train as loop_module
from nano_rl.gather.step_groups import Sources
from nano_rl.learn import logprob as forward
from nano_rl.learn import train_step
from nano_rl.learn import train_step as update_module
from nano_rl.learn.batch import Batch, make_batches
from nano_rl.learn.config import GuardConfig, LogsConfig, OptimizerConfig
from nano_rl.learn.groups import Group, to_samples
from nano_rl.learn.guards import Probe
from nano_rl.learn.logprob import token_logprobs
from nano_rl.learn.objectives import ObjectiveConfig
from nano_rl.resume import States
from nano_shared.errors import GuardTripped, NanoError, PolicyError, SandboxError
from nano_shared.types import Finish, StopReason, Trajectory


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def logged(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Group, ...]:
    """Two tasks, two runs each, one of them right."""
    return logged_groups(tiny, tmp_path_factory.mktemp("log") / "log.db")


def trips(loop: Loop, sentence: str, *, after: int = 0, **arguments: Any) -> None:
    """The training stops with that sentence, and what is saved are the weights of `after` sound steps."""
    started: list[dict[str, torch.Tensor]] = []
    told = arguments.pop("before", lambda model: None)

    def before(model: torch.nn.Module) -> None:
        told(model)
        started.append(weights(model))

    with pytest.raises(GuardTripped, match=sentence):
        loop.go(before=before, **arguments)
    states = States(loop.folder / "states")
    assert states.steps()[-1] == after
    saved = states.read(after)[1]["learner"]["weights"]
    assert all(bool(torch.isfinite(value).all()) for value in saved.values()) or "nan" in sentence
    if after == 0:
        assert all(torch.equal(saved[name], started[0][name]) or "nan" in sentence for name in saved)


def nudge(model: torch.nn.Module, _: Trajectory) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)


def test_weights_that_move_between_sampling_and_training(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(
        GuardTripped, match=r"step 0: sampler and trainer log-probs of fresh tokens differ by"
    ):
        Loop(tiny, tmp_path).go(on_run=nudge)


def test_a_reference_that_is_not_the_start(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(GuardTripped, match=r"step 0: the KL to the reference is .* before any update"):
        Loop(tiny, tmp_path).go(on_run=nudge, objective=ObjectiveConfig(beta=0.1))


def patched_batches(monkeypatch: pytest.MonkeyPatch, change: Callable[[Batch], Batch]) -> None:
    real = update_module.make_batches
    monkeypatch.setattr(update_module, "make_batches", lambda *a, **k: [change(b) for b in real(*a, **k)])


def test_old_log_probs_that_are_not_the_trainers_own(
    tiny: Path, tmp_path: Path, logged: tuple[Group, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    patched_batches(monkeypatch, lambda b: b.with_old(b.behaviour_logprobs_BT - 0.1))
    sentence = r"step 0: the trainer's ratio is .* away from 1 on the first update"
    trips(Loop(tiny, tmp_path), sentence, sources=Sources(logged=logged), score=None, group_size=0)


def test_ac_15_the_update_sees_a_row_as_it_is_alone(tiny: Path, tmp_path: Path) -> None:
    """Another composition and a plain forward pass where the update has a tree, or padded rows."""
    for name, more in {
        "trees": {},
        "parts": {"updates_per_step": 2, "minibatches": 2},
        "rows": {"before": lambda model: forward._supported.__setitem__(model, False)},
    }.items():
        seen: list[dict[str, float]] = []
        Loop(tiny, tmp_path / name).go(
            steps=1, score=alternate(), on_step=lambda _, __, values, s=seen: s.append(values), **more
        )  # fmt: skip
        assert 0 <= seen[0]["ratio_apart_max"] <= 1e-5


def test_ac_15_a_tree_whose_positions_are_wrong(
    tiny: Path, tmp_path: Path, logged: tuple[Group, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = forward.tree_hidden

    def twice_as_far(causal: Any, tree: Any) -> torch.Tensor:
        return real(causal, replace(tree, positions_N=2 * tree.positions_N))

    def later(model: torch.nn.Module) -> None:
        assert forward.shares_prefixes(model)
        monkeypatch.setattr(forward, "tree_hidden", twice_as_far)

    sentence = (
        r"step 0: the trainer's log-probs of a row are .* \(ratio_apart_max\) from those of the same row"
    )
    trips(
        Loop(tiny, tmp_path), sentence, sources=Sources(logged=logged), score=None, group_size=0, before=later
    )


def retold(run: Trajectory, **changed: Any) -> Trajectory:
    """The run with other tokens than were read or sampled, and their log-probs as they were."""
    first = run.turns[0]
    assert first.completion.tokens is not None
    tokens = first.completion.tokens
    other = tokens.model_copy(update={n: change(getattr(tokens, n)) for n, change in changed.items()})
    completion = first.completion.model_copy(update={"tokens": other})
    return run.model_copy(
        update={"turns": (first.model_copy(update={"completion": completion}), *run.turns[1:])}
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"sampled_ids": lambda ids: (*ids[1:], ids[0])},
        {"sampled_ids": lambda ids: ((ids[0] + 1) % 100, *ids[1:])},
        {"context_ids": lambda ids: (*ids[:-3], *ids[-2:])},
        {"context_ids": lambda ids: (1, *ids)},
        {"logprobs": lambda values: (0.0, *values[:-1])},
    ],
    ids=["a token shifted", "a token exchanged", "a template without a token", "one with another",
         "log-probs shifted"],
)  # fmt: skip
def test_ac_43_what_was_sampled_is_not_what_is_trained(
    tiny: Path, tmp_path: Path, logged: tuple[Group, ...], changed: dict[str, Any]
) -> None:
    other = with_runs(logged, lambda _, place, run: retold(rewarded(run, float(place)), **changed))
    sentence = "step 0: sampler and trainer log-probs of fresh tokens differ by"
    trips(Loop(tiny, tmp_path), sentence, sources=other, score=None, group_size=0)


def test_ac_43_fresh_tokens_beside_older_ones_are_not_excused(
    tiny: Path, tmp_path: Path, logged: tuple[Group, ...], keep_all: None
) -> None:
    """--from-logs --fresh: from the second step on the logged runs are old, and the fresh ones are not."""
    rolled: list[str] = []
    done: list[dict[str, float]] = []

    def late(model: torch.nn.Module, run: Trajectory) -> None:
        rolled.append(run.id)
        if done:
            nudge(model, run)

    with pytest.raises(GuardTripped, match=r"step 1: .* of fresh tokens beside older ones differ by"):
        Loop(tiny, tmp_path).go(
            sources=Sources(logged=logged), score=alternate(), group_size=4, logs=LogsConfig(uses=None),
            steps=3, on_run=late, on_step=lambda _, __, values: done.append(values),
        )  # fmt: skip
    assert done[0].get("stale", 0) == 0


def test_an_empty_mask(
    tiny: Path, tmp_path: Path, logged: tuple[Group, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    patched_batches(monkeypatch, lambda b: replace(b, mask_BT=torch.zeros_like(b.mask_BT)))
    trips(
        Loop(tiny, tmp_path), "step 0: the mask is empty", sources=Sources(logged=logged), score=None,
        group_size=0,
    )  # fmt: skip


def test_a_loss_that_is_not_finite(tiny: Path, tmp_path: Path, logged: tuple[Group, ...]) -> None:
    def poison(model: torch.nn.Module) -> None:
        with torch.no_grad():
            next(model.parameters())[0, 0] = torch.nan

    sources = Sources(logged=logged)
    trips(
        Loop(tiny, tmp_path), "step 0: loss is nan; lower the learning rate", sources=sources, score=None,
        group_size=0, before=poison,
    )  # fmt: skip


def test_a_learning_rate_that_diverges(tiny: Path, tmp_path: Path, logged: tuple[Group, ...]) -> None:
    trips(
        Loop(tiny, tmp_path), "step 0: one update moved .* the learning rate of 50 diverges; lower it",
        sources=Sources(logged=logged), score=None, group_size=0, optimizer=OptimizerConfig(learning_rate=50),
    )  # fmt: skip


def whole(run: Trajectory) -> Trajectory:
    """The run as if its last completion had ended by itself."""
    last = run.turns[-1]
    ended = last.model_copy(update={"completion": last.completion.model_copy(update={"finish": Finish.STOP})})
    return run.model_copy(update={"turns": (*run.turns[:-1], ended), "stop": StopReason.FINISHED})


def with_runs(groups: tuple[Group, ...], change: Callable[[int, int, Trajectory], Trajectory]) -> Sources:
    """The groups with each run changed; `change` is told the places of group and run."""
    return Sources(
        logged=tuple(
            replace(g, trajectories=tuple(change(i, j, run) for j, run in enumerate(g.trajectories)))
            for i, g in enumerate(groups)
        )
    )


def rewarded(run: Trajectory, reward: float | None) -> Trajectory:
    assert run.verdict is not None
    return whole(run).model_copy(update={"verdict": run.verdict.model_copy(update={"reward": reward})})


STRICT: dict[str, Any] = {"score": None, "group_size": 0, "steps": 9, "guards": GuardConfig(patience=3)}


def test_groups_that_are_all_dead(tiny: Path, tmp_path: Path, logged: tuple[Group, ...]) -> None:
    dead = with_runs(logged, lambda group, _, run: rewarded(run, float(group)))
    trips(Loop(tiny, tmp_path), "step 2: all groups of 3 steps are dead", after=2, sources=dead, **STRICT)


def test_a_reward_that_is_constant(tiny: Path, tmp_path: Path, logged: tuple[Group, ...]) -> None:
    constant = with_runs(logged, lambda _, __, run: rewarded(run, 0.5))
    trips(
        Loop(tiny, tmp_path), "step 2: every reward of 3 steps is 0.5: the grader cannot", after=2,
        sources=constant, **STRICT,
    )  # fmt: skip


def test_patience_outlives_a_restart(tiny: Path, tmp_path: Path, logged: tuple[Group, ...]) -> None:
    constant = with_runs(logged, lambda _, __, run: rewarded(run, 0.5))
    loop = Loop(tiny, tmp_path)
    loop.go(**{**STRICT, "steps": 2, "sources": constant})
    trips(loop, "step 2: every reward of 3 steps", after=2, sources=constant, resume=True, **STRICT)


def test_ac_39_runs_that_failed_for_our_reasons_score_nothing(
    tiny: Path, tmp_path: Path, logged: tuple[Group, ...]
) -> None:
    ours = with_runs(logged, lambda _, __, run: run.model_copy(update={"stop": StopReason.SANDBOX_ERROR}))
    trips(Loop(tiny, tmp_path), "step 2: no rollout of 3 steps has a reward", after=2, sources=ours, **STRICT)


class Failing(Given):
    """Every rollout ends as it would where something beside the policy is broken."""

    def __init__(self, **end: Any) -> None:
        super().__init__(lambda _: None)
        object.__setattr__(self, "recipe", end)

    def apply(self, runs: Sequence[Trajectory], runtime: Runtime) -> list[Trajectory]:
        kind = self.recipe.get("kind")  # type: ignore[attr-defined]
        stop = {name: value for name, value in self.recipe.items() if name != "kind"}  # type: ignore[attr-defined]
        ended = [scored(run, None).model_copy(update=stop) for run in runs]
        return [
            run.model_copy(update={"verdict": run.verdict.model_copy(update={"failure_kind": kind})})
            for run in ended
            if run.verdict
        ]


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("error", "end"),
    [
        (PolicyError, {"stop": StopReason.POLICY_ERROR, "stop_detail": "no such model"}),
        (SandboxError, {"stop": StopReason.SANDBOX_ERROR, "stop_detail": "no namespaces"}),
        (PolicyError, {"kind": "judge_unreachable"}),
    ],
)
def test_a_step_of_which_nothing_could_be_graded_ends_with_the_first_reason(
    tiny: Path, tmp_path: Path, error: type[NanoError], end: dict[str, Any]
) -> None:
    loop = Loop(tiny, tmp_path)
    reason = end.get("stop_detail", end.get("kind"))
    with pytest.raises(error, match=f"none of 4 runs could be graded; the first, run .*{reason}"):
        loop.go(reward=Failing(**end))
    assert States(tmp_path / "states").steps()[-1] == 0
    loop.go()


def test_everything_cut_off(tiny: Path, tmp_path: Path, logged: tuple[Group, ...]) -> None:
    cut = with_runs(logged, lambda _, __, run: run.model_copy(update={"stop": StopReason.MAX_TOKENS}))
    trips(
        Loop(tiny, tmp_path), "step 2: every rollout of 3 steps was cut off", after=2, sources=cut, **STRICT
    )


@pytest.fixture
def keep_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights that sampled were others: nothing may leave for that."""
    monkeypatch.setattr(train_step, "MIN_ESS", 0.0)
    monkeypatch.setattr(train_step, "MAX_DRIFT", None)


def test_entropy_that_collapses(
    tiny: Path, tmp_path: Path, logged: tuple[Group, ...], keep_all: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nano_rl.learn.guards.SHIFT_MAX", 1e9)

    def sharpen(model: torch.nn.Module) -> None:
        with torch.no_grad():
            dict(model.named_parameters())["model.norm.weight"].mul_(1e4)

    sound = with_runs(logged, lambda _, place, run: rewarded(run, float(place)))
    settings = {
        **STRICT,
        "guards": GuardConfig(patience=3, mismatch_max=1e9),
        "optimizer": OptimizerConfig(learning_rate=1e-9),
        "logs": LogsConfig(uses=None),
    }
    trips(
        Loop(tiny, tmp_path), "step 2: the policy has collapsed: its entropy was under 0.001", after=2,
        sources=sound, before=sharpen, **settings,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "cause"),
    [
        (0, "the sampler does not serve the weights that were trained"),
        (4, "only 0% of what the last update gained arrives in the sampler"),
    ],
)
def test_ac_41_a_sampler_that_serves_older_weights(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, cause: str
) -> None:
    copies: list[torch.nn.Module] = []

    def stale(loaded: Any, *arguments: Any, **named: Any) -> Any:
        copies.append(copies[0] if copies else copy.deepcopy(loaded.model))
        return local_policy(replace(loaded, model=copies[-1]), *arguments, **named)

    monkeypatch.setattr(loop_module, "local_policy", stale)
    trips(
        Loop(tiny, tmp_path),
        rf"step \d: after the update the served log-probs of a probe are .*: {cause}",
        score=alternate(), config=CONFIG.model_copy(update={"lora_rank": rank}),
    )  # fmt: skip


def test_ac_41_a_sound_update_is_served_as_it_is_trained(tiny: Path, tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []
    Loop(tiny, tmp_path).go(steps=1, score=alternate(), on_step=lambda _, __, values: seen.append(values))
    assert seen[0]["probe_mismatch_max"] <= 1e-4
    assert seen[0]["probe_shift"] > 0
    assert "adapter_arrives" not in seen[0]


def test_what_an_adapter_gains_arrives_in_the_sampler(tiny: Path, tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []
    Loop(tiny, tmp_path).go(
        steps=2, score=alternate(), on_step=lambda _, __, values: seen.append(values),
        config=CONFIG.model_copy(update={"lora_rank": 4}),
    )  # fmt: skip
    assert [values["adapter_arrives"] for values in seen] == pytest.approx([1, 1], abs=0.01)


@pytest.mark.parametrize(
    ("shown", "noise", "share"), [(1.0, 0.0, 1.0), (0.3, 0.0, 0.3), (0.3, 0.01, 0.3), (1.0, 0.1, None)]
)
def test_the_share_that_arrives_is_that_of_the_gain_unless_rounding_hides_it(
    tiny: Path, logged: tuple[Group, ...], shown: float, noise: float, share: float | None
) -> None:
    model = open_weights(str(tiny)).loaded.model
    runs = [(run, float(1 - 2 * place)) for g in logged for place, run in enumerate(g.trajectories)]
    rows = [row for run, advantage in runs for row in to_samples(run, advantage)]
    (batch,) = make_batches(rows, max_tokens=9999)
    probe = Probe.of(logged, model)
    assert probe is not None
    with torch.no_grad():
        after_BT = token_logprobs(model, batch)
    gain_BT = 0.01 * batch.advantages_BT
    sampled = replace(batch, behaviour_logprobs_BT=after_BT - shown * gain_BT)
    probe.trained.append((sampled, after_BT - gain_BT))
    lengths = batch.attention_BT.sum(1).tolist()
    places = {
        tuple(ids[:n].tolist()): i for i, (ids, n) in enumerate(zip(batch.ids_BT, lengths, strict=True))
    }
    random = torch.Generator().manual_seed(0)

    def sampler(ids: tuple[int, ...], temperature: float, *, first: int) -> list[float]:
        exact_T = after_BT[places[ids], first : len(ids)]
        return (exact_T + noise * torch.randn(exact_T.shape, generator=random)).tolist()

    found = probe.arrives(model, sampler).get("adapter_arrives")
    assert found == (share and pytest.approx(share, abs=0.25 if noise else 1e-4))


def alternate() -> Callable[[Trajectory], float]:
    """Rewards of which every group of two has both."""
    rewards = iter([0.0, 1.0] * 999)
    return lambda _: next(rewards)


def test_ac_21_what_samples_is_set_by_the_config_alone(tiny: Path, tmp_path: Path) -> None:
    def tempted(model: Any) -> None:
        model.generation_config.update(temperature=0.1, top_p=0.5, top_k=3, do_sample=True)

    assert same(
        Loop(tiny, tmp_path / "a").go(steps=1, before=tempted), Loop(tiny, tmp_path / "b").go(steps=1)
    )
