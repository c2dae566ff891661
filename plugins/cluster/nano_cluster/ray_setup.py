"""What Ray workers and ranks are given: for a training, and for `nano-rl rollout`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nano_cluster import engine_pool
from nano_cluster.adapter_publisher import engine_key, probe_of
from nano_cluster.ray_rollouts import RayRollouts
from nano_cluster.ray_worker import OpenWorkerPolicy, RemoteModel, WorkerSetup, machine, open_named
from nano_cluster.worker_status import WORKERS
from nano_coder import __version__
from nano_coder.config import AgentConfig, load_config
from nano_coder.models.opening import OpenedWeights
from nano_coder.run.execution import Runtime
from nano_coder.tools.tool import TOOLS
from nano_rl.config import TrainConfig
from nano_shared.files import new_run_id


def open_training_workers(
    opened: OpenedWeights, runtime: Runtime, config: TrainConfig, folder: Path,
    on_change: Callable[[str], None],
) -> RayRollouts:  # fmt: skip
    """Workers that sample from the servers of `config.engine`. Raises as RayRollouts."""
    assert config.ray is not None
    loaded = opened.loaded
    model = RemoteModel(
        tokenizer=loaded.tokenizer, chat_template=loaded.chat_template, profile=opened.profile, id=loaded.id,
        context_limit=loaded.context_limit, probe=probe_of(opened, config), urls=config.engine,
        api_key=engine_key(), patience=engine_pool.PATIENCE_SECONDS,
    )  # fmt: skip
    return RayRollouts(
        setup_of(runtime, model.open, load_config({}, Path())[0]), config.ray,
        workers=config.rollout_workers, patience=engine_pool.PATIENCE_SECONDS,
        sessions=runtime.environments.sessions, status=folder / WORKERS, on_change=on_change,
    )  # fmt: skip


def open_rollout_workers(
    runtime: Runtime, config: AgentConfig, address: str, workers: int | None, on_change: Callable[[str], None]
) -> RayRollouts:
    """Workers of a hosted model, which `config` names. Raises as RayRollouts."""
    return RayRollouts(
        setup_of(runtime, partial(open_named, config), config), address, workers=workers,
        sessions=runtime.environments.sessions, follows=False, on_change=on_change,
    )  # fmt: skip


def setup_of(runtime: Runtime, open_policy: OpenWorkerPolicy | None, config: AgentConfig) -> WorkerSetup:
    store: Any = runtime.store
    address = store.address if "://" in store.address else str(Path(store.address).resolve())
    return WorkerSetup(
        version=__version__, machine=machine(), log=address, blobs=store.blobs.address,
        witness=store.put_blob(new_run_id().encode()), open_policy=open_policy,
        config=config if store.user is None else config.model_copy(update={"owner": store.user.name}),
        profile=runtime.profile, policy_name=runtime.policy_name, settings=runtime.settings,
        tool_files=TOOLS.files, environments=runtime.environments.references,
    )  # fmt: skip
