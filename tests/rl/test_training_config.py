"""Settings: few, frozen, the recipe by default, and refused in a sentence when they cannot work."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from nano_rl.config.training import RewardConfig, SftConfig, TrainConfig
from nano_rl.learn.config import Config, CriticConfig, GuardConfig, ObjectiveConfig, OptimizerConfig
from nano_shared.errors import ConfigError
from nano_shared.settings import parse_config, section_of, setting_fields

OPTIONS = {
    ObjectiveConfig: "objective baseline std std_eps clip_low clip_high dual_clip ratio aggregation"
    " constant_length tis_cap tis_mode tis_floor tis_level reject_drift beta kl kl_in entropy_bonus overlong"
    " overlong_limit overlong_buffer dead_groups max_staleness normalise discount",
    OptimizerConfig: "learning_rate schedule warmup_steps weight_decay grad_clip states",
    GuardConfig: "mismatch_max mismatch_mean patience entropy_min shift_max",
    TrainConfig: "steps prompts_per_step group_size temperature max_tokens lora_rank dtype seed save_every"
    " gradient_checkpointing quantise keep_states resume refill scheduler heartbeat_seconds"
    " shuffle_rewards reward controls objective optimizer guards updates_per_step minibatches critic logs"
    " lambda_sft imitate offload peak_tflops engine asynchronous ray rollout_workers reflect",
    CriticConfig: "gae_lambda discount value_clip whiten optimizer",
    RewardConfig: "parts gate tie_break",
    SftConfig: "epochs batch stop_after max_tokens lora_rank dtype seed save_every optimizer"
    " gradient_checkpointing quantise",
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_options_are_few_and_adding_one_is_a_decision(kind: type[Config]) -> None:
    assert sorted(kind.model_fields) == sorted(OPTIONS[kind].split())
    # the papers of nine objectives name more settings than one recipe has; a training has many sources and
    # machines
    assert len(kind.model_fields) <= (36 if kind in (ObjectiveConfig, TrainConfig) else 24)


def test_defaults_are_the_recipe() -> None:
    objective = TrainConfig().objective
    assert (objective.baseline, objective.std) == ("mean", "none")
    assert (objective.clip_low, objective.clip_high, objective.tis_cap) == (0.2, 0.2, 2.0)
    assert (objective.beta, objective.kl) == (0.0, "k3")
    # rewards come at the end: below 1, a fresh critic would have to carry them back to the first tokens
    assert TrainConfig().critic.gae_lambda == 1.0


def test_a_training_of_an_earlier_version_still_rolls_out_ahead() -> None:
    assert TrainConfig.model_validate({"overlap": True}) == TrainConfig(asynchronous=True)
    assert TrainConfig(asynchronous=True).off_policy_bound == 1
    assert TrainConfig(asynchronous=True, engine=("http://a/v1",)).off_policy_bound == 4


def test_the_preference_loss_of_an_earlier_version_is_read_as_a_setting_of_the_logs() -> None:
    moved = TrainConfig.model_validate({"lambda_preference": 0.2, "logs": {"uses": 2}})
    assert (moved.logs.lambda_preference, moved.logs.uses) == (0.2, 2)
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        TrainConfig.model_validate({"lambda_preference": -1})


def test_the_core_of_a_training_has_few_settings() -> None:
    names = [name for name, field in setting_fields(TrainConfig) if not section_of(field)]
    core = [name for name in names if name.split(".")[0] not in ("objective", "critic", "logs", "reward")]
    assert len(core) <= 40, core
    assert len(names) <= 88, names


def test_configs_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        ObjectiveConfig().beta = 1.0


def test_nested_plain_values_are_read() -> None:
    config = parse_config(TrainConfig, {"objective": {"beta": 0.01}, "optimizer": {"schedule": "cosine"}})
    assert config.objective.beta == 0.01
    assert config.optimizer.schedule == "cosine"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"group_size": -1}, "group_size = -1: Input should be greater than or equal to 0"),
        ({"steps": 0}, "steps = 0: Input should be greater than or equal to 1"),
        ({"temperature": 0}, "temperature = 0: Input should be greater than 0"),
        (
            {"objective": {"clip_low": 1.5}},
            "objective.clip_low = 1.5: Input should be less than or",
        ),
        ({"objective": {"clip_espilon": 0.2}}, "objective.clip_espilon: no such setting"),
        ({"objective": {"beta": float("nan")}}, "objective.beta = nan: Input should be"),
        ({"objective": {"kl": "k4"}}, "objective.kl = 'k4': Input should be 'k1', 'k2', 'k3' or 'k3+'"),
        ({"steps": 5, "optimizer": {"warmup_steps": 6}}, "warmup_steps is above steps = 5"),
        ({"objective": {"kl": "k1"}}, "`kl` and `kl_in` are read where beta is above 0 alone"),
        ({"objective": {"objective": "rloo", "kl": "k2"}}, "give beta, or leave them out"),
        ({"objective": {"baseline": "none", "std": "sample"}}, "`std` needs a baseline"),
        ({"objective": {"normalise": "each"}}, "changes nothing where nothing is divided"),
        ({"objective": {"normalise": "each", "std": "sample"}}, "needs a reward of several parts"),
        ({"objective": {"discount": 0.9, "std": "sample"}}, "`discount` goes with std = none"),
        ({"objective": {"discount": 0.9}, "shuffle_rewards": True}, "no `discount`"),
        ({"reward": {"parts": {}}}, "name at least one part, for instance tests = 1"),
        ({"reward": {"tie_break": 1.0}}, "reward.tie_break = 1.0: Input should be less than 1"),
        ({"controls": 0.6}, "controls = 0.6: Input should be less than or equal to 0.5"),
        ({"refill": 2, "group_size": 0}, "`refill` rolls out more tasks, and group_size = 0 rolls out none"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_a_sentence(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(TrainConfig, values)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_ac_03_group_size_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to be compared with, so every advantage would be 0"):
        parse_config(TrainConfig, {"group_size": 1})
    assert TrainConfig(group_size=2).group_size == 2


def test_every_wrong_value_has_its_line() -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(TrainConfig, {"model": "tiny", "seed": -1})
    assert str(error.value).splitlines() == [
        "seed = -1: Input should be greater than or equal to 0",
        "model: no such setting of a training; set it in nano.toml, or as NANO_MODEL",
    ]
