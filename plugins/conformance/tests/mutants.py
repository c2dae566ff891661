"""Mutants of our loss, credit and aggregation, each with the check of the suite that has to kill it.

    python tests/rl/mutants.py          the table: mutant, killed by, the failure of one draw

A mutant is one change of the real source, in a copy that is imported beside it. It is killed where its check
fails, with numbers and not by an exception, in each of three draws. Changes that change nothing are not listed:
`<` for `<=` at a bound that no drawn number meets, and `detach` of what is then compared and not multiplied.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import nano_rl
from nano_conformance.adapter import Subject
from nano_conformance.case import CheckResult, ConformanceCheck, Status, run_check
from nano_conformance.suite import checks
from nano_rl.learn import objectives
from nano_shared import extension_points

ROOT = Path(str(nano_rl.__file__)).parent
DRAWS = (0, 1, 2)
ADAPTER = "nano_conformance.adapter"
AGAIN = (
    "nano_rl.learn.objectives",
    "nano_rl.learn.loss",
    "nano_rl.learn.groups",
    ADAPTER,
)
"""modules that are imported again around a changed one"""


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str
    old: str
    """stands once in the file"""
    new: str
    killed_by: str
    """kind / name of the check"""


M = Mutant
CLIP = CISPO = REINFORCE = "learn/objectives.py"
KLF = IMP = LOSS = RATIO = AGG = "learn/loss.py"
ADV = GAE = "learn/advantages.py"
GRPO, PLAIN = "grid / grpo: no weights", "grid / recipe: no weights"
SEQ, MASKED = "grid / recipe: truncated sequence weights", "grid / recipe: masked weights"
ROWS = "grid / recipe, ratio of sequences: no weights"
GROUPS = "credit / groups of any size, missing rewards: {}, std {}".format
MUTANTS = [
    # the surrogates
    M("clip: lower bound gone", CLIP, "bounded_N = ratio_N.clamp(1 - config.clip_low,", "bounded_N = ratio_N.clamp(0.0,", GRPO),
    M("clip: upper bound gone", CLIP, "bounded_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)",
      "bounded_N = ratio_N.clamp(1 - config.clip_low, 1e9)", "grid / dapo: no weights"),
    M("clip: bounds exchanged", CLIP, "bounded_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high",
      "bounded_N = ratio_N.clamp(1 - config.clip_high, 1 + config.clip_low", "grid / ppo: no weights"),
    M("clip: lower bound above one", CLIP, "bounded_N = ratio_N.clamp(1 - config.clip_low,",
      "bounded_N = ratio_N.clamp(1 + config.clip_low,", GRPO),
    M("clip: symmetric", CLIP, "bounded_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)",
      "bounded_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_low)", "grid / dr_grpo: no weights"),
    M("clip: maximum for minimum", CLIP, ".minimum(bounded_N", ".maximum(bounded_N", GRPO),
    M("clip: no minimum", CLIP, "-(ratio_N * advantages_N).minimum(bounded_N * advantages_N)",
      "-(bounded_N * advantages_N)", "grid / dr_grpo: no weights"),
    M("clip: never", CLIP, "-(ratio_N * advantages_N).minimum(bounded_N * advantages_N)",
      "-(ratio_N * advantages_N)", "grid / ppo: no weights"),
    M("clip: sign of the loss", CLIP, "loss_N = -(ratio_N", "loss_N = (ratio_N", GRPO),
    M("clip: advantage left out of the bound", CLIP, "minimum(bounded_N * advantages_N)",
      "minimum(bounded_N)", GRPO),
    M("dual clip: never", CLIP, "config.dual_clip is None", "True", "grid / ppo: no weights"),
    M("dual clip: both signs", CLIP, "config.dual_clip * advantages_N.abs()", "config.dual_clip * advantages_N",
      GRPO),
    M("dual clip: from below", CLIP, "loss_N.minimum(config.dual_clip", "loss_N.maximum(config.dual_clip", GRPO),
    M("dual clip: one too much", CLIP, "config.dual_clip * adv", "(1 + config.dual_clip) * adv", GRPO),
    M("cispo: gradient through the weight", CISPO, "ratio_N.detach().clamp", "ratio_N.clamp",
      "grid / cispo: no weights"),
    M("cispo: no bound", CISPO, "ratio_N.detach().clamp(1 - config.clip_low, 1 + config.clip_high)",
      "ratio_N.detach()", "grid / cispo: no weights"),
    M("cispo: lower bound forgotten", CISPO, "detach().clamp(1 - config.clip_low,", "detach().clamp(0,",
      "grid / cispo: no weights"),
    M("cispo: log-prob stopped", CISPO, "weight_N * advantages_N * new_N", "weight_N * advantages_N * new_N.detach()",
      "grid / cispo: no weights"),
    M("reinforce: sign", REINFORCE, "return -advantages_N", "return advantages_N",
      "grid / rloo: no weights"),
    M("reinforce: the ratio for the log-prob", REINFORCE, "return -advantages_N * new_N",
      "return -advantages_N * ratio_N", "grid / reinforce: no weights"),
    # ratios
    M("ratio: old and new exchanged", LOSS, "new_N - old_N, old_N - tokens", "old_N - new_N, old_N - tokens", GRPO),
    M("ratio: to the sampler", LOSS, "new_N - old_N, old_N - tokens", "new_N - tokens.behaviour_N, old_N - tokens",
      GRPO),
    M("ratio: the first update has no gradient", LOSS, "old_N = new_N.detach() if", "old_N = new_N if",
      "grid / grpo: first update"),
    M("ratio: old log-probs never read", LOSS, "new_N.detach() if tokens.old_N is None else tokens.old_N",
      "new_N.detach()", GRPO),
    M("ratio: of sequences, never", LOSS, 'config.ratio == "sequence"', 'config.ratio == "never"',
      "grid / gspo: no weights"),
    M("ratio: of sequences, for all", LOSS, 'config.ratio == "sequence"', 'config.ratio != "never"', GRPO),
    M("ratio: product over the sequence", RATIO, "row_sums(values_N, row_N) / row_sums(torch.ones_like(values_N), row_N)",
      "row_sums(values_N, row_N)", ROWS),
    M("ratio: mean over the micro-batch", RATIO, "row_sums(values_N, row_N) / row_sums(torch.ones_like(values_N), row_N)",
      "values_N.mean().expand_as(values_N)", ROWS),
    M("ratio: one token too few in the mean", RATIO, "row_sums(torch.ones_like(values_N), row_N)",
      "(row_sums(torch.ones_like(values_N), row_N) - 1)", ROWS),
    M("ratio: half the length in the mean", RATIO, "torch.ones_like(values_N)", "torch.full_like(values_N, 0.5)",
      "grid / gspo: no weights"),
    M("ratio: sums without gradient", RATIO, "index_add(0, row_N, values_N)", "index_add(0, row_N, values_N.detach())",
      "grid / gspo: no weights"),
    M("ratio: sums over all rows", RATIO, "index_add(0, row_N, values_N)[row_N]",
      "index_add(0, row_N * 0, values_N)[row_N * 0]", ROWS),
    M("ratio: sums of the row before", RATIO, "index_add(0, row_N, values_N)[row_N]",
      "index_add(0, row_N, values_N)[(row_N - 1).clamp(min=0)]", ROWS),
    M("ratio: bounded at two nats", RATIO, "MAX_LOG_RATIO = 20.0", "MAX_LOG_RATIO = 2.0",
      "closed forms / a ratio of six nats"),
    M("ratio: bounded at twelve nats", RATIO, "MAX_LOG_RATIO = 20.0", "MAX_LOG_RATIO = 12.0",
      "closed forms / a sequence weight of 18 nats"),
    M("ratio: not bounded", RATIO, "log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()", "log_ratio_N.exp()",
      "closed forms / far apart: policy and start"),
    M("ratio: bounded from above alone", RATIO, "clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)", "clamp(0, MAX_LOG_RATIO)",
      GRPO),
    # importance weights and rejection
    M("weights: upside down", LOSS, "old_N - tokens.behaviour_N", "tokens.behaviour_N - old_N", MASKED),
    M("weights: of the present", LOSS, "old_N - tokens.behaviour_N", "new_N.detach() - tokens.behaviour_N", MASKED),
    M("weights: with gradient", LOSS, "old_N - tokens.behaviour_N", "new_N - tokens.behaviour_N",
      "grid / recipe: first update"),
    M("weights: left out", LOSS, "loss_N = weight_N * own_N", "loss_N = own_N", MASKED),
    M("weights: raw ones", LOSS, "raw_N, weight_N = importance_weights", "weight_N, _ = raw_N, _ = importance_weights",
      "grid / recipe: truncated weights"),
    M("weights: bounded from below", IMP, "raw_N.clamp(max=config", "raw_N.clamp(min=config",
      "grid / grpo: truncated weights"),
    M("weights: capped at one", IMP, "clamp(max=config.tis_cap)", "clamp(max=1.0)", "grid / grpo: truncated weights"),
    M("weights: no floor", IMP, "raw_N >= config.tis_floor", "raw_N >= 0", MASKED),
    M("weights: mask keeps what it should drop", IMP, "& (raw_N <= config.tis_cap)", "& (raw_N > config.tis_cap)", MASKED),
    M("weights: masked ones count as one", IMP, "return raw_N, raw_N * kept_N", "return raw_N, kept_N * 1.0", MASKED),
    M("weights: floor or cap", IMP, "(raw_N >= config.tis_floor) & (raw", "(raw_N >= config.tis_floor) | (raw", MASKED),
    M("weights: truncated for masked", IMP, 'tis_mode == "truncate"', 'tis_mode != "never"',
      "grid / recipe: masked sequence weights"),
    M("weights: of tokens for sequences", IMP, 'tis_level == "sequence"', 'tis_level == "never"', SEQ),
    M("weights: of sequences for tokens", IMP, 'tis_level == "sequence"', 'tis_level != "never"', MASKED),
    M("weights: mean for product", IMP, "row_sums(mismatch_N, row_N) if", "row_means(mismatch_N, row_N) if", SEQ),
    M("weights: over the micro-batch", IMP, "row_sums(mismatch_N, row_N) if", "mismatch_N.sum().expand_as(mismatch_N) if",
      SEQ),
    M("rejection: of good sequences", IMP, "row_means(advantages_N, row_N) < 0", "row_means(advantages_N, row_N) > 0",
      PLAIN),
    M("rejection: by each token's sign", IMP, "row_means(advantages_N, row_N) < 0", "advantages_N < 0", PLAIN),
    M("rejection: whatever the advantage", IMP, "drifted_N & (row_means(advantages_N, row_N) < 0)", "drifted_N", PLAIN),
    M("rejection: by each token's drift", IMP, "row_means(behaviour_N - new_N.detach(), row_N) > drift",
      "behaviour_N - new_N.detach() > drift", PLAIN),
    M("rejection: of what became likelier", IMP, "behaviour_N - new_N.detach()", "new_N.detach() - behaviour_N", PLAIN),
    M("rejection: by the sum", IMP, "row_means(behaviour_N - new", "row_sums(behaviour_N - new", PLAIN),
    M("rejection: not applied", LOSS, "weight_N = weight_N * kept_N", "pass", PLAIN),
    M("rejection: the others", LOSS, "weight_N = weight_N * kept_N", "weight_N = weight_N * ~kept_N", PLAIN),
    # KL
    M("k1: sign", KLF, "        return log_ratio_N\n", "        return -log_ratio_N\n", GRPO),
    M("k2: not halved", KLF, '    if kind == "k2":\n        return log_ratio_N.square() / 2',
      '    if kind == "k2":\n        return log_ratio_N.square()', GRPO),
    M("k3: the forward one", KLF, "clamped_exp(-log_ratio_N) - 1 + log_ratio_N", "clamped_exp(log_ratio_N) - 1 - log_ratio_N",
      GRPO),
    M("k3: one left out", KLF, "clamped_exp(-log_ratio_N) - 1 +", "clamped_exp(-log_ratio_N) +", GRPO),
    M("k3+: gradient of k3", KLF, "k2_N - k2_N.detach() + k3_N.detach()", "k3_N", GRPO),
    M("k3+: value of k2", KLF, "k2_N - k2_N.detach() + k3_N.detach()", "k2_N", GRPO),
    M("k3+: no gradient", KLF, "k2_N - k2_N.detach() + k3_N.detach()", "k3_N.detach()", GRPO),
    M("KL: policy and reference exchanged", KLF, "log_ratio_N = new_N - reference_N", "log_ratio_N = reference_N - new_N",
      GRPO),
    M("KL: weighted", LOSS, "loss_N = loss_N + config.beta * charge_N", "loss_N = loss_N + weight_N * config.beta * charge_N",
      "grid / grpo: truncated weights"),
    M("KL: without beta", LOSS, "loss_N + config.beta * charge_N", "loss_N + charge_N", GRPO),
    M("KL: taken off", LOSS, "loss_N + config.beta * charge_N", "loss_N - config.beta * charge_N", GRPO),
    M("KL in the loss: of the start", LOSS, "new_N if in_loss else old_N", "old_N", GRPO),
    M("KL in the reward: of the present", LOSS, "new_N if in_loss else old_N", "new_N", GRPO),
    M("KL in the reward: in the loss too", LOSS, "            charge_N = None\n", "            pass\n", GRPO),
    M("KL in the reward: over rows", KLF, "sums_to_the_end(kl_N.detach(), row_N)", "sums_to_the_end(kl_N.detach(), row_N * 0)",
      GRPO),
    M("KL in the reward: each token's own", KLF, "sums_to_the_end(kl_N.detach(), row_N)", "kl_N.detach()", GRPO),
    M("KL in the reward: of what came before", RATIO, "(row_sums(values_N.double(), row_N) - (before_N - offset_N))",
      "(before_N - offset_N)", GRPO),
    M("KL in the reward: without the token itself", RATIO, "values_N.double().cumsum(0) - values_N.double()",
      "values_N.double().cumsum(0)", GRPO),
    M("KL in the reward: rows begin one late", RATIO, "starts[1:] = row_N[1:] != row_N[:-1]",
      "starts[1:-1] = row_N[1:-1] != row_N[:-2]; starts[-1] = False; starts = starts.roll(1); starts[0] = True", GRPO),
    M("KL in the reward: given", KLF, "advantages_N - beta", "advantages_N + beta", GRPO),
    M("KL in the reward: beta twice", KLF, "advantages_N - beta *", "advantages_N - beta * beta *", GRPO),
    # sums and shares
    M("tokens: weights as counts", LOSS, "weight_N=batch.weight_BT[mask]",
      "weight_N=(batch.weight_BT > 0)[mask]", PLAIN),
    M("tokens: the row is the column", LOSS, "mask.nonzero(as_tuple=True)[0]",
      "mask.nonzero(as_tuple=True)[1]", SEQ),
    M("tokens: sampler and start exchanged", LOSS, "behaviour_N=batch.behaviour_logprobs_BT[mask]",
      "behaviour_N=batch.behaviour_logprobs_BT[mask] if old is None else old[mask]", MASKED),
    M("loss: mean of the micro-batch", LOSS, "loss = (tokens.weight_N * loss_N).sum()",
      "loss = (tokens.weight_N * loss_N).sum() / tokens.weight_N.sum()", "invariances / recipe: cut into micro-batches"),
    M("loss: shares left out", LOSS, "loss = (tokens.weight_N * loss_N).sum()", "loss = loss_N.mean()",
      "invariances / grpo: cut into micro-batches"),
    M("share: tokens of the row under a token mean", AGG, "return 1 / tokens", "return 1 / own", PLAIN),
    M("share: constant and own exchanged", AGG, '(constant_length if aggregation == "constant" else own)',
      '(own if aggregation == "constant" else constant_length)', GRPO),
    M("share: trajectories left out", AGG, "1 / (trajectories * (", "1 / (1 * (", GRPO),
    M("share: a sum for the constant", AGG, '(constant_length if aggregation == "constant" else own)',
      '(1 if aggregation == "constant" else own)', "grid / dr_grpo: no weights"),
    M("weights of rows: empty trajectories count", AGG, "sum(count > 0 for", "sum(count >= 0 for",
      "credit / what the tokens of a row weigh"),
    M("weights of rows: each row a trajectory", AGG, "own=tokens_of[s.run_id]", "own=s.num_action_tokens",
      "credit / what the tokens of a row weigh"),
    M("weights of rows: the last row's tokens", AGG, "tokens_of[sample.run_id] += ", "tokens_of[sample.run_id] = ",
      "credit / what the tokens of a row weigh"),
    # advantages
    M("advantage: no baseline", ADV, "return math.fsum(scored) / len(scored)\n    return", "return 0.0\n    return",
      GROUPS("mean", "none")),
    M("advantage: reward added to the baseline", ADV, "(r - _baseline(r, scored, baseline))",
      "(r + _baseline(r, scored, baseline))", GROUPS("mean", "none")),
    M("advantage: sign", ADV, "(r - _baseline(r, scored, baseline))", "(_baseline(r, scored, baseline) - r)",
      GROUPS("rloo", "none")),
    M("advantage: missing rewards count in the mean", ADV, "math.fsum(scored) / len(scored)\n    return",
      "math.fsum(scored) / (len(scored) + 1)\n    return", GROUPS("mean", "none")),
    M("advantage: a missing reward is 0", ADV,
      "scored = [float(r) for r in rewards if r is not None and not math.isnan(r)]\n    if baseline",
      "scored = [float(r or 0.0) for r in rewards]\n    if baseline", GROUPS("mean", "population")),
    M("rloo: itself among the others", ADV, "math.fsum((*scored, -reward)) / (len(scored) - 1)",
      "math.fsum(scored) / len(scored)", GROUPS("rloo", "none")),
    M("rloo: all of them through the others", ADV, "/ (len(scored) - 1)\n", "/ len(scored)\n", GROUPS("rloo", "none")),
    M("deviation: n for n - 1", ADV, 'len(scored) - 1 if std == "sample" else', 'len(scored) if std == "sample" else',
      GROUPS("mean", "sample")),
    M("deviation: n - 1 for n", ADV, 'std == "sample" else len(scored)', 'std == "sample" else len(scored) - 1',
      GROUPS("mean", "population")),
    M("deviation: variance", ADV, "math.sqrt(math.fsum((r - mean) ** 2 for r in scored) / freedom)",
      "math.fsum((r - mean) ** 2 for r in scored) / freedom", GROUPS("mean", "sample")),
    M("deviation: multiplied", ADV, "baseline)) / scale", "baseline)) * scale", GROUPS("rloo", "sample")),
    M("deviation: never", ADV, 'if std != "none" else 1.0', 'if std == "never" else 1.0', GROUPS("mean", "sample")),
    M("deviation: around 0", ADV, "(r - mean) ** 2", "r ** 2", GROUPS("mean", "population")),
    M("dead groups: two are too few", "learn/groups.py", "len(scored) < 2 or all(r", "len(scored) < 3 or all(r",
      GROUPS("mean", "none")),
    M("dead groups: by the mean alone", "learn/groups.py", "return len(scored) < 2 or all(r == scored[0] for r in scored)",
      "return len(scored) < 3", GROUPS("mean", "none")),
    M("turns: undiscounted", ADV, "reward + discount * following", "reward + following",
      "credit / turns: discounted returns against the group's"),
    M("turns: from the front", ADV, "for reward in reversed(rewards):", "for reward in rewards:",
      "credit / turns: discounted returns against the group's"),
    M("turns: long rollouts count more", ADV, "math.fsum(r) / len(r) if r else None for r in returns",
      "math.fsum(r) if r else None for r in returns", "credit / turns: discounted returns against the group's"),
    M("gae: lambda left out", GAE, "discount * lam * following", "discount * following", "credit / gae, term by term"),
    M("gae: value not taken off", GAE, "discount * next_value - values[k] +", "discount * next_value +",
      "credit / gae, term by term"),
    M("gae: next value undiscounted", GAE, "discount * next_value", "next_value", "credit / gae, term by term"),
    M("gae: a value behind the end", GAE, "following = next_value = 0.0", "following = 0.0; next_value = values[-1]",
      "credit / gae, term by term"),
    M("gae: from the front", GAE, "range(len(rewards) - 1, -1, -1)", "range(len(rewards))", "credit / gae, term by term"),
    M("gae: returns without values", GAE, "[a + v for a, v in zip(advantages", "[a for a, v in zip(advantages",
      "credit / gae, term by term"),
    M("whitened: not centred", GAE, "tuple((a - mean) * scale", "tuple(a * scale", "credit / whitened over sampled tokens"),
    M("whitened: over all tokens", GAE, "zip(row, mask, strict=True) if m\n", "zip(row, mask, strict=True)\n",
      "credit / whitened over sampled tokens"),
    M("whitened: not divided", GAE, "else 1 / (deviation + 1e-8)", "else 1.0", "credit / whitened over sampled tokens"),
    M("whitened: untrained tokens too", GAE, "(a - mean) * scale * m for", "(a - mean) * scale for",
      "credit / whitened over sampled tokens"),
]  # fmt: skip


def killed(mutant: Mutant, draws: Sequence[int] = DRAWS) -> list[CheckResult]:
    """The failure of its check in each of the draws. Raises AssertionError for a mutant that lives, and for one that
    is no change of the source."""
    with subject_of(mutant) as subject:
        results = [run_check(_checks(draw)[mutant.killed_by], subject) for draw in draws]
    for draw, result in zip(draws, results, strict=True):
        assert result.status == Status.FAILED, f"{mutant.name} lives in draw {draw}"
        assert "expected" in result.note, f"{mutant.name} was killed by an exception: {result.note}"
    return results


@contextmanager
def subject_of(mutant: Mutant) -> Iterator[Subject]:
    """Our losses with that change, in modules of their own."""
    path = ROOT / mutant.file
    source = path.read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1, f"{mutant.name}: found {source.count(mutant.old)} times"
    with changed(path, source.replace(mutant.old, mutant.new)) as subject:
        yield subject


@contextmanager
def changed(path: Path, source: str) -> Iterator[Subject]:
    """Our losses with another source for one of their modules."""
    name = ".".join(("nano_rl", *path.relative_to(ROOT).with_suffix("").parts))
    before = {n: module for n, module in sys.modules.items() if n.startswith(AGAIN)}
    # objectives are extensions, which are loaded once: ours stay those of our modules, and the others load anew
    for entry in entry_points(group="nano.objectives"):
        objectives.find_objective(entry.name)
    for draw in DRAWS:
        _checks(draw)
    extension_points._loaded.cache_clear()
    for gone in before:
        del sys.modules[gone]
    try:
        spec = importlib.util.spec_from_loader(name, None, origin=str(path))
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        exec(compile(source, str(path), "exec"), module.__dict__)
        yield importlib.import_module(ADAPTER).OURS
    finally:
        for again in [n for n in sys.modules if n.startswith(AGAIN)]:
            del sys.modules[again]
        sys.modules |= before
        extension_points._loaded.cache_clear()
        for name, module in before.items():
            package, _, attribute = name.rpartition(".")
            setattr(sys.modules[package], attribute, module)


@cache
def _checks(draw: int) -> dict[str, ConformanceCheck]:
    return {f"{kind} / {check.name}": check for kind, check in checks(draw)}


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("", "mutant", "killed by", "how", show_edge=False)
    for place, mutant in enumerate(MUTANTS, start=1):
        table.add_row(str(place), mutant.name, mutant.killed_by, killed(mutant)[0].note)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    print(f"{len(MUTANTS)} mutants, each killed in {len(DRAWS)} draws")


if __name__ == "__main__":
    main()
