"""Seeded tiny trainings and a hash of the weights that each ends in, for `test_training_bytes.py`.

    python tests/rl/training_bytes.py           prints them, as they are recorded there

The order in which numbers are added, and with it the last bit, depends on the width of a processor's
registers. So this runs in a process that uses what every x86_64 processor has (`BASELINE`), and no more.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

BASELINE = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX2,-AVX,-FMA,-FMA4",
    "OMP_NUM_THREADS": "1",
}


def hashed(weights: Mapping[str, Any]) -> str:
    digest = sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def trained(folder: Path) -> dict[str, str]:
    """The hash of each training, which begin from the same weights."""
    from looping import CONFIG, Loop, logged_groups, parity, tiny_model, weights

    from nano_coder.models.opening import open_weights
    from nano_preferences.config import DpoConfig
    from nano_preferences.dpo import train_dpo
    from nano_preferences.pairs import PairRows
    from nano_rl.config import SftConfig
    from nano_rl.gather.step_groups import Sources
    from nano_rl.imitation import train_sft
    from nano_rl.learn import train_step
    from nano_rl.learn.config import LogsConfig, OptimizerConfig
    from nano_rl.learn.groups import to_samples
    from nano_rl.learn.objectives import ObjectiveConfig
    from nano_shared.types import Limits, Task

    # of this file alone: generated tasks may come to read otherwise
    tasks = tuple(Task(key=f"t{n}", prompt=f"Say {n}.", limits=Limits(max_turns=1)) for n in range(4))
    tiny = tiny_model(folder / "model", tasks=tasks)
    fast = OptimizerConfig(learning_rate=1e-3)

    def loop(name: str, **changed: Any) -> str:
        changed = {"sources": Sources(tasks=tasks), "score": parity, **changed}
        return hashed(Loop(tiny, folder / name).go(CONFIG, **changed))

    logged = logged_groups(tiny, folder / "logged.db", (0.0, 1.0, 0.5), tasks)
    rows = [sample for group in logged for run in group.trajectories for sample in to_samples(run, 1.0)]
    pairs = [
        PairRows(chosen=(rows[a],), rejected=(rows[b],), prompt_key=str(a), encoded=False)
        for a, b in ((1, 0), (4, 3), (1, 2))
    ]

    def offline(train: Any, examples: Any, config: Any) -> str:
        model = open_weights(str(tiny)).loaded.model
        train(model, examples, config, folder / type(config).__name__, lambda *_: None)
        return hashed(weights(model))

    several: dict[str, Any] = {"updates_per_step": 2, "minibatches": 2}
    from_logs = {"sources": Sources(logged=logged), "score": None, "group_size": 0}
    ppo = {"objective": ObjectiveConfig(objective="ppo")}
    train_step.MIN_ESS, train_step.MAX_DRIFT = 0.0, None  # type: ignore[assignment]
    return {
        "grpo": loop("grpo", objective=ObjectiveConfig(objective="grpo"), **several),
        "gspo, an adapter": loop("gspo", objective=ObjectiveConfig(objective="gspo"), lora_rank=2),
        "ppo": loop("ppo", **ppo, **several),
        "overlap": loop("overlap", asynchronous=True),
        "from logs": loop("from logs", **from_logs, logs=LogsConfig(uses=None)),
        "sft": offline(train_sft, rows, SftConfig(batch=2, lora_rank=0, optimizer=fast)),
        "dpo": offline(train_dpo, pairs, DpoConfig(batch=2, lora_rank=0, optimizer=fast)),
    }


def main() -> None:
    if any(os.environ.get(name) != value for name, value in BASELINE.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | BASELINE)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(trained(Path(folder)), indent=4))


if __name__ == "__main__":
    main()
