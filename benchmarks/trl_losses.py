"""Our losses against TRL's on identical tensors, in value and gradient, and TRL under our conformance suite.

    python benchmarks/trl_losses.py [--suite] [--venv DIR]

TRL 1.16 runs in an environment of its own, made in DIR if it is not there (some minutes). Float64 throughout.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "shared")]

from nano_conformance.adapter import Subject, our_loss  # noqa: E402
from nano_conformance.case import LossCase, make_case  # noqa: E402
from nano_rl.learn.groups import group_advantages  # noqa: E402

PACKAGES = ("trl==1.16.0", "torch==2.13.0")
LOSS_TYPES = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}
AGGREGATIONS = {loss: aggregation for aggregation, loss in LOSS_TYPES.items()}

DIFFERENT = {
    "bnpo": "a token mean of each micro-batch by itself, so the split matters; ours is the step's",
    "luspo, sapo, vespo": "other surrogates, which we do not offer",
    "cispo at sequence level": "CISPO has a weight a token; objective = recipe with ratio = sequence is free",
    "scale_rewards = batch": "one deviation for all prompts; ours is the group's",
    "use_bias_correction_kl": "the KL times the ratio; ours carries no weight",
    "k1, k2, KL in the reward": "TRL's GRPO has k3 in the loss alone",
    "RLOOTrainer": "clips a ratio of whole sequences; our rloo is the unclipped one of the paper",
    "entropy bonus": "a mean over the micro-batch's tokens; ours goes by the weights of the loss",
    "off-policy mask": "by the sign of each token's advantage where they differ in a row; ours by their mean",
    "delta below 1 + epsilon_high": "caps the ratio of positive advantages too; ours of negative ones",
}


class Peer:
    """TRL in a process of its own."""

    def __init__(self, python: Path) -> None:
        server = Path(__file__).with_name("trl_loss_server.py")
        self._process = subprocess.Popen(
            [str(python), str(server)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("the TRL process ended; its traceback stands above")
        answered: dict[str, Any] = json.loads(answer)
        return answered

    def loss(
        self, logprobs: Tensor, old: Tensor, behaviour: Tensor, reference: Tensor, advantages: Tensor,
        mask: Tensor, options: Mapping[str, Any],
    ) -> Tensor:  # fmt: skip
        """As `conformance.adapter.LossFunction`: its value is TRL's, and so is its gradient."""
        tensors = {
            "logprobs": logprobs, "old": old, "behaviour": behaviour, "reference": reference,
            "advantages": advantages, "mask": mask.double(),
        }  # fmt: skip
        request = {n: t.detach().tolist() for n, t in tensors.items()} | settings(options, len(mask))
        answer = self.ask(request)
        gradient = torch.tensor(answer["gradient"], dtype=torch.float64)
        # the value of the answer, with the gradient of the answer
        attached = (
            torch.where(gradient != 0, logprobs - logprobs.detach(), 0.0) * gradient.nan_to_num(1e300)
        ).sum()
        return attached + answer["loss"]

    def advantages(self, rewards: Sequence[float | None], *, baseline: str, std: str) -> list[float]:
        if baseline != "mean" or std == "population":
            raise NotImplementedError
        scale = "none" if std == "none" else "group"
        made = self.ask({"rewards": list(rewards), "scale": scale, "group": len(rewards)})["advantages"]
        return [float(a) for a in made]


def settings(options: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Our options in TRL's words. Raises NotImplementedError for what TRL's GRPO does not offer."""
    cispo = options["objective"] == "cispo"
    if options["objective"] in ("rloo", "reinforce") or (
        options["beta"] > 0 and (options["kl"], options["kl_in"]) != ("k3", "loss")
    ):
        raise NotImplementedError
    if cispo and (options["clip_low"] < 1 or options["aggregation"] != "token"):
        raise NotImplementedError
    mode = None
    if options["tis_cap"] is not None:
        mode = f"{options['tis_level']}_{options['tis_mode']}"
    sequences = options["num_sequences"]
    return {
        "loss_type": "cispo" if cispo else LOSS_TYPES[options["aggregation"]],
        "level": options["ratio"],
        "beta": options["beta"],
        "epsilon_low": options["clip_low"],
        # TRL bounds the weight of CISPO by epsilon_high itself
        "epsilon_high": options["clip_high"] + cispo,
        "delta": options["dual_clip"],
        "length": options["constant_length"],
        "off_policy": options["reject_drift"],
        "is_mode": mode,
        "is_min": options["tis_floor"] or None,
        "is_max": options["tis_cap"],
        "num_tokens": options["num_tokens"],
        # TRL's micro-batches are equal: as many as this one goes into the step
        "micro_batches": sequences / rows if rows < sequences else 1,
    }


def grid() -> list[dict[str, Any]]:
    axes = {
        "loss": ["grpo", "dapo", "dr_grpo", "cispo"],
        "scale": ["none", "group"],
        "level": ["token", "sequence"],
        "beta": [0.0, 0.04],
        "weights": ["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
        "delta": [None, 1.5],
    }
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [c for c in combinations if c["loss"] != "cispo" or (c["level"] == "token" and c["delta"] is None)]


def compare(peer: Peer) -> list[tuple[dict[str, Any], float, float]]:
    """(combination, difference of the values, largest of the gradients) of every point of the grid."""
    random = torch.Generator().manual_seed(0)
    lengths = [5, 2, 7, 3, 4, 6, 1, 5]
    rewards = [1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.0, 0.25]
    new = [(-torch.rand(n, dtype=torch.float64, generator=random) * 3 - 0.1).tolist() for n in lengths]
    moved = [
        [[p + 0.4 * float(torch.randn((), generator=random)) for p in row] for row in new] for _ in range(3)
    ]
    results = []
    for point in grid():
        std = "sample" if point["scale"] == "group" else "none"
        # the advantages of each side are its own
        ours = [a for g in (rewards[:4], rewards[4:]) for a in group_advantages(g, std=std)]
        theirs = peer.ask({"rewards": rewards, "scale": point["scale"], "group": 4})["advantages"]
        level, _, mode = point["weights"].partition("_")
        weighted = (
            {"tis_cap": None} if level == "none" else {"tis_cap": 1.2, "tis_level": level, "tis_mode": mode}
        )
        if mode == "mask":
            weighted["tis_floor"] = 0.7
        objective = (
            {"objective": "cispo"} if point["loss"] == "cispo"
            else {"aggregation": AGGREGATIONS[point["loss"]], "dual_clip": point["delta"]}
        )  # fmt: skip
        if point["loss"] == "dr_grpo":
            objective["constant_length"] = 16

        def case(advantages: Sequence[float], chosen: dict[str, Any]) -> LossCase:
            spread = [[a] * n for a, n in zip(advantages, lengths, strict=True)]
            return make_case(new, spread, old=moved[0], behaviour=moved[1], reference=moved[2], **chosen)

        chosen = {**objective, **weighted, "beta": point["beta"], "ratio": point["level"]}
        mine, yours = case(ours, chosen), case(theirs, chosen)
        value = float((mine.value(our_loss) - yours.value(peer.loss)).abs())
        gradient = float((mine.gradient(our_loss) - yours.gradient(peer.loss)).abs().max())
        results.append((point, value, gradient))
    return results


def python_of(venv: Path) -> Path:
    python = venv / "bin" / "python"
    if not python.exists():
        print(f"making {venv} with {', '.join(PACKAGES)}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PACKAGES], check=True)
    return python


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    from nano_conformance.command import _show
    from nano_conformance.suite import run_suite

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=Path(tempfile.gettempdir()) / "nano-trl-1.16.0")
    parser.add_argument(
        "--suite", action="store_true", help="our conformance suite on TRL, instead of the grid"
    )
    arguments = parser.parse_args()
    peer = Peer(python_of(arguments.venv))
    if arguments.suite:
        subject = Subject(name="trl 1.16.0", loss=peer.loss, credit={"advantages": peer.advantages})
        _show(subject.name, list(run_suite(subject)))
        return
    results = compare(peer)
    console = Console(width=None if sys.stdout.isatty() else 130)
    table = Table("loss type", "scale_rewards", "points", "largest difference, value", "gradient")
    for loss in ("grpo", "dapo", "dr_grpo", "cispo"):
        for scale in ("none", "group"):
            of = [(v, g) for p, v, g in results if (p["loss"], p["scale"]) == (loss, scale)]
            worst = [max(column) for column in zip(*of, strict=True)]
            table.add_row(loss, scale, str(len(of)), *(f"{w:.1e}" for w in worst))
    console.print(table)
    reasons = Table("where definitions differ", "how")
    for name, reason in DIFFERENT.items():
        reasons.add_row(name, reason)
    console.print(reasons)


if __name__ == "__main__":
    main()
