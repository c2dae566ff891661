"""A verdict with the fields of NeMo Gym's verify response."""

from __future__ import annotations

from typing import Any

from nano_shared.types import Verdict

_KINDS = """
transport_unreachable transport_peer_drop transport_timeout transport_local_resource agent_run_error
agent_request_failed agent_timeout agent_command_not_allowed judge_failed judge_unparseable verifier_error
provider_unavailable provider_quota_exhausted provider_oom_killed session_lost session_expired
session_release_failed cancelled kill_shaped shutdown persistence_failed cohort_incomplete
"""
FAILURE_KINDS = frozenset(_KINDS.split())
"""NeMo Gym's closed vocabulary; other kinds are named `nano:<kind>`"""
_TAKEN = frozenset(
    {"reward", "mask_sample", "failure_kind", "failure_reason", "reward_components", "response"}
)


def verified(verdict: Verdict) -> dict[str, Any]:
    """The response for a verdict. `reward` must be a number there: an invalid measurement is masked."""
    kind, _, detail = (verdict.failure_kind or "").partition(": ")
    components = {name: value for name, value in verdict.components.items() if value is not None}
    found = "; ".join(f"{t.kind}: {t.detail}" for t in verdict.tampering)
    return {
        **{name: value for name, value in components.items() if name not in _TAKEN},
        "reward": 0.0 if verdict.reward is None else verdict.reward,
        "mask_sample": verdict.reward is None,
        "failure_kind": None if not kind else kind if kind in FAILURE_KINDS else f"nano:{kind}",
        "failure_reason": detail or found or None,
        "reward_components": components,
        "nano_verdict": verdict.model_dump(mode="json"),
    }
