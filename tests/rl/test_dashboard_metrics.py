"""The metrics of a step that dashboards of other trainers show, under their names."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch
from architectures import FAMILIES, build
from builders import terms, trajectory, turn
from looping import CONFIG, Loop, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from nano_rl.learn.batch import make_batches
from nano_rl.learn.groups import form_groups, group_metrics, to_samples
from nano_rl.learn.learner import prepare
from nano_rl.learn.loss import mean_metrics, policy_loss
from nano_rl.learn.metrics import MEASURED, dashboard_names, read_metrics
from nano_rl.learn.utilisation import FlopCounter, measured_flops
from nano_shared.types import Observation, StopReason


def test_lengths_and_tool_calls_are_counted_over_the_rollouts() -> None:
    def seen(*oks: bool) -> tuple[Observation, ...]:
        return tuple(Observation(tool="shell", ok=ok, text="", started=0.0, ended=1.0) for ok in oks)

    runs = []
    for n in range(20):
        made = turn(4, n + 1).model_copy(update={"observations": seen(True, n % 2 == 0)})
        run = trajectory(made, run_id=str(n), key="t", reward=float(n))
        runs.append(run if n else run.model_copy(update={"stop": StopReason.MAX_TOKENS}))
    metrics = group_metrics(form_groups(runs))
    assert metrics["completions/mean_length"] == 10.5
    assert metrics["completions/p95_length"] == 19  # 19 of 20 are not longer
    assert (metrics["completions/min_length"], metrics["completions/max_length"]) == (1, 20)
    assert metrics["completions/mean_terminated_length"] == pytest.approx(11)
    assert dashboard_names(metrics)["completions/clipped_ratio"] == pytest.approx(1 / 20)
    assert metrics["tools/call_frequency"] == 2
    assert metrics["tools/failure_frequency"] == 0.25
    assert metrics["reward_std"] == pytest.approx(statistics.stdev(range(20)))


def test_statistics_of_advantages_and_weights_do_not_depend_on_micro_batches() -> None:
    samples = []
    for n, advantage in enumerate((0.5, -2.0, 1.0)):
        samples += to_samples(trajectory(turn(3 + n, 4 + n), run_id=str(n)), advantage)
    found = []
    for size in (8, 10_000):
        parts = []
        for batch in make_batches(samples, max_tokens=size):
            logprobs_BT = torch.where(batch.mask_BT, batch.behaviour_logprobs_BT + 0.1, 0.0)
            parts.append(policy_loss(logprobs_BT, batch, terms())[1])
        found.append(mean_metrics(parts))
    assert len(parts) == 1
    tokens = [0.5] * 4 + [-2.0] * 5 + [1.0] * 6
    for metrics in found:
        assert (metrics["advantage_min"], metrics["advantage_max"]) == (-2, 1)
        assert metrics["advantage_mean"] == pytest.approx(statistics.fmean(tokens))
        assert metrics["advantage_std"] == pytest.approx(statistics.pstdev(tokens), rel=1e-6)
        assert metrics["weight_min"] == pytest.approx(torch.e**0.1, rel=1e-5)


@pytest.mark.slow
def test_a_training_writes_them_and_only_the_machine_may_change_them(tmp_path: Path) -> None:
    tiny, rows = tiny_model(tmp_path / "tiny"), []
    for name in ("one", "two"):
        Loop(tiny, tmp_path / name).go(CONFIG)
        rows.append(read_metrics(tmp_path / name / "metrics.jsonl"))
    trained = next(row for row in rows[0] if not row.get("skipped"))
    assert trained["reward"] == trained["reward_mean"]
    assert trained["frac_reward_zero_std"] == trained["frac_zero_std"]
    for name in (
        "reward_std", "completions/mean_length", "completions/clipped_ratio", "tools/call_frequency",
        "critic/advantages/max", "rollout_corr/rollout_is_min", "rollout_corr/rollout_is_max",
        "rollout_corr/rollout_is_eff_sample_size", "entropy", "grad_norm", "step_time",
        "tokens_per_second_train", "perf/mfu/actor", "perf/max_memory_rss_gb",
        "sampling/sampling_logp_difference/mean", "clip_ratio/low_mean", "learning_rate", "loss",
    ):  # fmt: skip
        assert trained[name] is not None, name
    assert trained["perf/mfu/actor"] > 0
    kept = [[{k: v for k, v in r.items() if not k.startswith(MEASURED)} for r in some] for some in rows]
    assert json.dumps(kept[0]) == json.dumps(kept[1])


@pytest.mark.some(4)
@pytest.mark.parametrize(("lora_rank", "near"), [(0, 1e-9), (2, 0.1)])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "phi3"])
def test_operations_are_those_that_torch_counts(family: str, lora_rank: int, near: float) -> None:
    causal = build(family)
    causal.set_attn_implementation("eager")  # of the others torch counts no operations on a CPU
    model = prepare(causal, lora_rank=lora_rank, seed=0)
    for layer in model.modules():
        if (
            type(layer).__bases__[0].__name__ == "_RoundsOnce"
        ):  # as PEFT computes it: torch does not count products in place
            layer.__class__ = type(layer).__bases__[1]
    counter, length = FlopCounter(model), 60
    with FlopCounterMode(display=False) as counted, counter():
        model(input_ids=torch.arange(length)[None], use_cache=False).logits.sum().backward()
    config = causal.config
    square = 4 * config.num_hidden_layers * config.hidden_size * length * (length - 1) / 2
    # eager attention computes the scores that are masked too
    assert counter.total(length) == pytest.approx(counted.get_total_flops() - 3 * square, rel=near)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_counted(family: str) -> None:
    model = build(family)
    counter = FlopCounter(model)
    with counter(), torch.no_grad():
        model(input_ids=torch.arange(5)[None], use_cache=False)
    assert counter.total(0) > 2 * 5 * 32 * 32


def test_a_devices_rate_is_that_of_a_product() -> None:
    assert measured_flops(torch.device("cpu"), torch.float32) > 1e9
