"""What the commands share: the runtime they roll out in, and where a training lives; options.py's too."""

from __future__ import annotations

import atexit
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nano_coder.agent.profiles import COMPACT_1, with_tools
from nano_coder.commands.options import open_log
from nano_coder.config import AgentConfig, load_config, open_store, overriding_limits, redacting_store
from nano_coder.environment import Environments
from nano_coder.models.opening import (
    OWN_MODELS,
    OpenedWeights,
    find_opener,
    local_policy,
    name_to_train,
    open_policy,
    open_weights,
    rank_of,
)
from nano_coder.models.scripted import ScriptedPolicy
from nano_coder.run.execution import RunSettings, Runtime, open_agent
from nano_coder.sandbox.protocol import Sandbox, allowed_hosts, open_sandbox
from nano_coder.tools.tool import TOOLS
from nano_rl.gather.rollouts import ORACLE
from nano_rl.rewards import COMPOSERS, Reward
from nano_rl.tasks.task_file import read_tasks
from nano_shared.checkpoint import LATEST
from nano_shared.errors import UsageError
from nano_shared.extension_points import Extensions
from nano_shared.files import checkpoints_dir, nano_home
from nano_shared.policy import InterfaceProfile
from nano_shared.settings import Settings
from nano_shared.types import Sampling, Split, Task

if TYPE_CHECKING:
    from nano_coder.models.weights import Dtype
    from nano_rl.config import TrainConfig
    from nano_rl.learn.config import Quantise
    from nano_rl.training_record import TrainArguments


def all_tasks(
    file: Path | None, env: Sequence[str] | None, split: Split, seed: int
) -> tuple[Environments, list[Task]]:
    """The environments of --env, and the tasks of --tasks and theirs. Raises UsageError without either."""
    if file is None and not env:
        raise UsageError(
            "there are no tasks: give --tasks FILE or --env ENV (docs/extending.md#an-environment)"
        )
    environments = Environments.open(env or ())
    own = read_tasks(file) if file else []
    return environments, [*own, *environments.tasks(split, seed)]


def sandbox_opener(config: AgentConfig | None = None) -> Callable[[], Sandbox]:
    """Opens the sandbox of `config`, else of the environment and the files, in any process."""
    config = config or load_config({}, Path())[0]
    return partial(open_sandbox, config.sandbox, python=config.python, image=config.image)


def oracle_runtime(log: str | None, config: AgentConfig | None = None) -> Runtime:
    return Runtime(
        policy=ScriptedPolicy([]),
        sandbox=sandbox_opener(config)(),
        store=redacting_store(open_log(log, create=True)),
        profile=COMPACT_1,
        policy_name=ORACLE,
    )


def chosen_reward(text: str | None, tasks: Sequence[Task]) -> Reward | None:
    """The reward that --reward describes, checked against the tasks; None without one. Raises UsageError or
    ConfigError."""
    if not text:
        return None
    composer = COMPOSERS.find("composed")
    return composer.open_reward(composer.parse_reward(text)).probe(tasks)


def dtype_of(config: AgentConfig, sources: Mapping[str, str]) -> str:
    return config.dtype if sources["dtype"] == "flag" else "float32"


def policy_runtime(
    config: AgentConfig, sources: Mapping[str, str], *, temperature: float, model: str | None = None,
    trains: bool = False,
) -> Runtime:  # fmt: skip
    """The runtime of a policy by name. The sandbox refuses first, since that takes milliseconds. The
    command's own `temperature` counts, unless the command line sets that of the configuration. Answers that
    repeat themselves are ended, as in a user's run, unless the runs train."""
    if sources["temperature"] == "flag" and config.temperature is not None:
        temperature = config.temperature
    sandbox = sandbox_opener(config)()
    store = open_store(config)
    tools = [TOOLS.give(tool).spec.name for tool in config.tools]
    opened = open_policy(model or config.model, config, dtype=dtype_of(config, sources))
    configured = _configured(config, sources, opened.profile, temperature, tools)
    return Runtime(
        policy=opened.policy, sandbox=sandbox,
        store=redacting_store(store, getattr(opened.policy, "decode", None)), policy_name=opened.name,
        **configured | {"settings": replace(configured["settings"], ends_repetition=not trains)},
    )  # fmt: skip


def _configured(
    config: AgentConfig, sources: Mapping[str, str], profile: InterfaceProfile, temperature: float,
    tools: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    longest = config.max_completion_tokens or profile.completion_tokens
    return {
        "profile": with_tools(profile, tools),
        "sampling": Sampling(temperature=temperature, max_tokens=longest),
        "settings": RunSettings(
            limits=overriding_limits(config, sources),
            hosts=allowed_hosts(config.net),
            search=config.search,
            agent=open_agent(config.agent, config.agent_folders),
            at_once=config.at_once,
        ),
    }


class TrainingPlan(Protocol):
    """What a training takes: an extension of `nano.plans`, a module."""

    def refuse_unfit(
        self, model: str | None, config: TrainConfig, device: str | None, *, ranks: int, beside: int
    ) -> None:
        """Raises UsageError for a training that cannot fit, with the settings that make it fit."""

    def refuse_long_row(self, model: Any, longest: int, config: TrainConfig) -> None:
        """Raises UsageError for a row of so many tokens that does not fit into what memory is free."""


PLANS: Extensions[TrainingPlan] = Extensions("nano.plans")


def model_to_train(model: str | None) -> str:
    """The name of the local model that --model or the configuration names (`name_to_train`)."""
    return name_to_train(load_config({"model": model}, Path())[0].model)


def adapter_rank(settings: Settings[Any], model: str | None) -> dict[str, int]:
    """The setting `lora_rank` where the model to train is an adapter: its own rank, since it is trained on;
    else empty. Raises UsageError where another was given."""
    if settings.print_only:
        return {}
    name = model_to_train(model)
    rank, source = rank_of(name), settings.sources.get("lora_rank")
    if rank is None:
        return {}
    if source and settings.values["lora_rank"] != rank:
        raise UsageError(
            f"{source}: lora_rank is {settings.values['lora_rank']}, and {name} is an adapter of rank {rank},"
            " which is trained on as it is: leave lora_rank out; to begin anew over it, nano-rl checkpoints"
            f" export {name} --to FOLDER, and train --model FOLDER"
        )
    return {"lora_rank": rank}


def weights_to_train(
    name: str, dtype: Dtype, device: str | None, quantise: Quantise | None = None
) -> OpenedWeights:
    """Weights of a local model by name, for trainings without rollouts; place and profile as configured."""
    config = load_config({"device": device}, Path())[0]
    return open_weights(name, dtype=dtype, device=config.device, quantise=quantise, profile=config.profile)


def training_runtime(given: TrainArguments, settings: TrainConfig) -> tuple[OpenedWeights, Runtime]:
    """Trainable weights, and the runtime that samples from them; a training gives it the weights of each
    step."""
    asked = {
        "model": given.model, "log": given.logs[0] if given.logs else None, "tools": given.tools,
        "device": given.device, "agent": given.agent, **given.limit,
    }  # fmt: skip
    asked |= {"agent_folders": given.agent_folders} if given.agent_folders else {}
    config, sources = load_config(asked, Path())
    tools = [TOOLS.give(tool).spec.name for tool in config.tools]
    sandbox = sandbox_opener(config)()
    store = open_store(config)
    name = name_to_train(config.model)
    opened = open_weights(
        name, dtype=settings.dtype, profile=config.profile, device=config.device,
        quantise=settings.quantise, kv_gib=config.kv_gib,
    )  # fmt: skip
    configured = _configured(config, sources, opened.profile, settings.temperature, tools)
    opened = replace(opened, profile=configured["profile"])
    policy = local_policy(opened.loaded, opened.profile)
    return opened, Runtime(
        policy=policy, sandbox=sandbox, policy_name=name,
        store=redacting_store(store, policy.template.encoder.decode), **configured,
    )  # fmt: skip


def look_first(*, files: Iterable[Path | None] = (), models: Iterable[str | None] = ()) -> None:
    """Raises UsageError for a file that is not there and for a name that is no model's, before any work."""
    for file in files:
        if file is not None and not file.is_file():
            what = "is a folder" if file.is_dir() else "no such file"
            raise UsageError(f"{file}: {what}; name a file that is there")
    for model in models:
        if model is not None and not find_opener(model):
            name_to_train(model)


def looked_first(model: str | None, files: Iterable[Path | None], log: str | None, from_logs: bool) -> str:
    """The model to train, looked at with files and log before torch is imported, which takes seconds."""
    look_first(files=files)
    parent = model_to_train(model)
    if from_logs:
        open_log(log).close()
    return parent


def training_folder(name: str, extended_to: int | None = None) -> tuple[Path, Path]:
    """The checkpoint to be and the folder of the training's state; a command that leaves it empty removes it.
    With `extended_to` a training that has written its checkpoint goes on, and writes checkpoint NAME-STEPS.
    Raises UsageError as `checkpoint_target`."""
    folder = trainings_dir() / name
    finished = extended_to is not None and (checkpoints_dir() / name).exists() and folder.exists()
    if finished:
        from nano_rl.resume import STATES

        numbers = (path.name for path in (folder / STATES).glob("*"))
        done = max((int(number) for number in numbers if number.isdecimal()), default=0)
        if int(extended_to or 0) <= done:
            raise UsageError(
                f"training {name} is finished after step {done}: --steps N above {done} goes on from there,"
                f" and writes checkpoint {name}-N"
            )
    target = checkpoint_target(f"{name}-{extended_to}" if finished else name)
    if finished:
        print(f"checkpoint {name} stays as it is; this one will be {target.name}", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    atexit.register(_remove_empty, folder)
    return target, folder


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # it holds something
        folder.rmdir()


_LONGEST_NAME = 100
"""characters; the names of temporary files beside it must fit too"""


def checkpoint_target(name: str, option: str = "--name") -> Path:
    """The checkpoint to be, which `option` names. Raises UsageError for a name that cannot be a folder's,
    that stands for something else where a model or a checkpoint is named, or that is taken."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or len(name) > _LONGEST_NAME:
        raise UsageError(
            f"{option} {name!r}: use letters, digits, '.', '_' and '-', at most {_LONGEST_NAME} characters"
        )
    from nano_coder.config import catalogue
    from nano_rl.checkpoints.promotion import HISTORY

    if name.casefold() in {LATEST, HISTORY, *OWN_MODELS, *catalogue()}:
        raise UsageError(f"{option} {name}: nano means something else by that name; choose another")
    target = checkpoints_dir() / name
    taken = [path.name for path in checkpoints_dir().glob("[!.]*") if path.name.casefold() == name.casefold()]
    if taken:
        raise UsageError(f"checkpoint {taken[0]} exists already ({target.parent}); choose another {option}")
    return target


def trainings_dir() -> Path:
    return nano_home() / "trainings"
