"""A Harbor job's results directory: the job's counts, and a trial for each run.

JOB/config.json  JOB/result.json
JOB/TRIAL/config.json  result.json  agent/trajectory.json  verifier/reward.json
"""

from __future__ import annotations

import json
import re
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nano_coder.formats import RunFormat
from nano_formats import atif
from nano_formats.token_triple import rollout_details, triples
from nano_formats.transcript import iso
from nano_shared.logged_run import LoggedRun
from nano_shared.strict_json import Row
from nano_shared.types import Message, StopReason, Trajectory

_NAMESPACE = uuid.UUID("6f1d1c52-6c3c-5a53-8f0b-9c7f1a4c2f11")
_AGENT = "nano-coder"
_DATASET = "nano"
_EXCEPTIONS = {
    StopReason.MAX_SECONDS: "AgentTimeoutError",
    StopReason.INTERRUPTED: "CancelledError",
    StopReason.SANDBOX_ERROR: "RuntimeRequestError",
    StopReason.POLICY_ERROR: "ApiError",
}
"""in Harbor's words; of these only the time-out leaves a reward that counts"""


@dataclass(slots=True)
class HarborJob:
    """Writes trial by trial, and the counts at the end; what is kept is one number a reward and trial."""

    folder: Path
    trials: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    rewarded: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    started: float | None = None
    ended: float | None = None
    models: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(
        self, run: LoggedRun, opening: Sequence[Message] | None, tools: list[dict[str, Any]] | None
    ) -> None:
        trajectory = run.trajectory
        name = trial_name(trajectory)
        trial = self.folder / name
        (trial / "agent").mkdir(parents=True)
        (trial / "verifier").mkdir()
        _dump(trial / "agent" / "trajectory.json", atif.write(run, opening, tools=tools))
        config = _config(trajectory, name)
        result = self._result(trajectory, name, config)
        if trajectory.reward is not None:
            _dump(trial / "verifier" / "reward.json", result["verifier_result"]["rewards"])
        _dump(trial / "config.json", config)
        _dump(trial / "result.json", result)
        self._count(trajectory, name, result)

    def close(self) -> None:
        """The job's own files."""
        stats: dict[str, Any] = {
            "n_completed_trials": self.trials,
            "n_errored_trials": self.errors.total(),
            "n_cancelled_trials": self.errors["CancelledError"],
            "n_input_tokens": self.tokens["input"],
            "n_output_tokens": self.tokens["output"],
            "evals": self.models,
        }
        result = {
            "id": str(uuid.uuid5(_NAMESPACE, f"job {self.folder.name} {self.started} {self.trials}")),
            "started_at": iso(self.started or 0.0),
            "finished_at": iso(self.ended if self.ended is not None else self.started or 0.0),
            "n_total_trials": self.trials,
            "stats": stats,
        }
        _dump(self.folder / "result.json", result)
        _dump(self.folder / "config.json", {"job_name": "nano-export", "agents": [{"name": _AGENT}]})

    def _result(self, run: Trajectory, name: str, config: Row) -> Row:
        found = [triple for triple in triples(run) if triple is not None]
        rewards = None
        if run.verdict is not None and run.verdict.reward is not None:
            parts = {k: v for k, v in run.verdict.components.items() if v is not None}
            rewards = {**parts, "reward": run.verdict.reward}
        exception = _EXCEPTIONS.get(run.stop) if run.stop else "CancelledError"
        timing = {"started_at": iso(run.started), "finished_at": iso(run.ended)}
        return {
            "id": str(uuid.uuid5(_NAMESPACE, run.id)),
            "task_name": run.task.key,
            "trial_name": name,
            "trial_uri": f"nano:{run.id}",
            "task_id": {"path": _safe(run.task.key)},
            "source": _DATASET,
            "task_checksum": run.task.id,
            "config": config,
            "agent_info": {
                "name": _AGENT, "version": run.runtime_version, "model_info": {"name": run.policy},
            },
            "agent_result": {
                "n_input_tokens": sum(len(t.prompt_ids) for t in found) if run.has_tokens else None,
                "n_output_tokens": sum(len(t.sampled_ids) for t in found) if run.has_tokens else None,
                "rollout_details": rollout_details(found) if run.has_tokens else None,
                "metadata": {"run": run.id, "stop": run.stop},
            },
            "verifier_result": {"rewards": rewards} if rewards else None,
            "exception_info": {
                "exception_type": exception,
                "exception_message": run.stop_detail or str(run.stop or "the run never ended"),
                "exception_traceback": "",
                "occurred_at": iso(run.ended) or iso(run.started) or "1970-01-01T00:00:00Z",
            } if exception else None,
            **timing,
            "agent_execution": timing,
        }  # fmt: skip

    def _count(self, run: Trajectory, name: str, result: Row) -> None:
        self.trials += 1
        self.started = run.started if self.started is None else min(self.started, run.started)
        ended = run.ended if run.ended is not None else run.started
        self.ended = ended if self.ended is None else max(self.ended, ended)
        for kind in ("input", "output"):
            self.tokens[kind] += result["agent_result"][f"n_{kind}_tokens"] or 0
        stats = self.models.setdefault(
            f"{_AGENT}__{run.policy}__{_DATASET}",
            {"n_trials": 0, "n_errors": 0, "reward_stats": {}, "exception_stats": {}},
        )
        if result["verifier_result"]:
            stats["n_trials"] += 1
            for part, value in result["verifier_result"]["rewards"].items():
                stats["reward_stats"].setdefault(part, {}).setdefault(str(value), []).append(name)
        if result["exception_info"]:
            kind = result["exception_info"]["exception_type"]
            self.errors[kind] += 1
            stats["n_errors"] += 1
            stats["exception_stats"].setdefault(kind, []).append(name)


def trial_name(run: Trajectory) -> str:
    return f"{_safe(run.task.key)[:48]}__{_safe(run.id)}"


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "run"


def _config(run: Trajectory, name: str) -> Row:
    return {
        "task": {"path": _safe(run.task.key)},
        "trial_name": name,
        "agent": {"name": _AGENT, "model_name": run.policy},
    }


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value) + "\n", encoding="utf-8")


HARBOR = RunFormat(name="harbor", write_folder=HarborJob)
