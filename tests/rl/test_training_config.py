"""Settings: few, frozen, the recipe by default, and refused in a sentence when they cannot work."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from nano_preferences.critic import CriticTerms
from nano_rl.config import RewardConfig, SftConfig, TrainConfig
from nano_rl.learn.config import GuardConfig, LogsConfig, OptimizerConfig
from nano_rl.learn.objectives import ObjectiveConfig
from nano_shared.errors import ConfigError
from nano_shared.settings import Config, parse_config, section_of, setting_fields

OPTIONS = {
    ObjectiveConfig: "objective clip_low clip_high beta max_staleness",
    OptimizerConfig: "learning_rate schedule warmup_steps states",
    GuardConfig: "mismatch_max patience",
    LogsConfig: "uses mutants lambda_preference",
    TrainConfig: "steps prompts_per_step group_size temperature max_tokens lora_rank dtype seed save_every"
    " gradient_checkpointing quantise resume refill scheduler reward controls objective optimizer guards"
    " updates_per_step minibatches logs lambda_sft imitate offload engine asynchronous ray rollout_workers"
    " reflect",
    RewardConfig: "parts gate tie_break",
    SftConfig: "epochs batch stop_after max_tokens lora_rank dtype seed save_every optimizer"
    " gradient_checkpointing quantise",
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_options_are_few_and_adding_one_is_a_decision(kind: type[Config]) -> None:
    assert sorted(kind.model_fields) == sorted(OPTIONS[kind].split())


def test_defaults_are_the_recipe() -> None:
    objective = TrainConfig().objective.terms
    assert (objective.baseline, objective.std) == ("mean", "none")
    assert (objective.clip_low, objective.clip_high, objective.tis_cap) == (0.2, 0.2, 2.0)
    assert (objective.beta, objective.kl) == (0.0, "k3")
    # rewards come at the end: below 1, a fresh critic would have to carry them back to the first tokens
    assert CriticTerms().gae_lambda == 1.0


def test_rollouts_are_one_update_ahead_here_and_four_on_servers() -> None:
    assert TrainConfig(asynchronous=True).off_policy_bound == 1
    assert TrainConfig(asynchronous=True, engine=("http://a/v1",)).off_policy_bound == 4


def test_a_training_has_few_settings() -> None:
    names = [name for name, field in setting_fields(TrainConfig) if not section_of(field)]
    assert len(names) <= 42, names  # 40, and those of `reward`


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
        ({"objective": {"kl": "k4"}}, "objective.kl: no such setting"),
        ({"optimizer": {"grad_clip": 1.0}}, "optimizer.grad_clip: no such setting"),
        ({"shuffle_rewards": True}, "shuffle_rewards: no such setting"),
        ({"steps": 5, "optimizer": {"warmup_steps": 6}}, "warmup_steps is above steps = 5"),
        ({"reward": {"parts": {}}}, "name at least one part, for instance tests = 1"),
        ({"reward": {"tie_break": 1.0}}, "reward.tie_break = 1.0: Input should be less than 1"),
        ({"controls": 0.6}, "controls = 0.6: Input should be less than or equal to 0.5"),
        (
            {"refill": 2, "group_size": 0},
            "`refill` is about fresh rollouts, and group_size = 0",
        ),
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
