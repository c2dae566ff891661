"""The work of one GRPO step, in numbers, for both sides of `grpo_step.py`. Standard library only."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from peak_memory import peak_kb

TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{%- if m['content'] %}{{ m['content'] }}{% endif %}"
    "{%- if m['tool_calls'] %}{{ m['tool_calls'][0]['function'] | tojson }}{% endif %}"
    "{{ '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""chat template of the multi-turn rows"""
PROGRAM = "print(('ok %d ' % sum(range(1000))) * 40)"
"""what every tool call of the multi-turn rows runs, in a process of its own"""
OBSERVED = 80
"""characters of its output that the model is shown"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the benchmark. Tokens are counted by the model's own tokenizer."""

    name: str
    model: Literal["smollm2", "tiny"]
    prompts: int
    rollouts: int
    prompt_tokens: int = 256
    new_tokens: int
    """sampled in every turn"""
    turns: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora_rank: int = 0
    max_tokens: int = 4096
    """of a micro-batch of ours"""
    peer_micro: int = 8
    """rollouts of a micro-batch of the peer, at its fastest"""
    ragged: bool = False
    """rollout g of a group ends after (g + 1) / rollouts of `new_tokens`"""
    device: str = "cpu"
    tool_seconds: float = 0.0
    """that every tool call sleeps, besides its program"""
    times_faster: float = 0.0
    """the bar; 0 where there is none"""
    times_smaller: float = 0.0
    """the bar of peak memory; 0 where there is none"""

    @property
    def program(self) -> str:
        return f"import time; time.sleep({self.tool_seconds}); {PROGRAM}" if self.tool_seconds else PROGRAM

    def length(self, rollout: int) -> int:
        """Tokens that this rollout of a group samples in a turn."""
        return self.new_tokens * (rollout + 1) // self.rollouts if self.ragged else self.new_tokens

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def prompt_of(tokens: int, seed: int, count: Callable[[str], int]) -> str:
    """A text of exactly that many tokens, as `count` counts them (with whatever surrounds it)."""
    text = f"Problem {seed}. Return the value of"
    words = ["item", "list", "index", "total", "name", "count", "data", "line", "key", "range"]
    place = seed
    while (missing := tokens - count(text)) > 0:
        longer = text + " " + words[place % len(words)]
        place += 1
        text = longer if count(longer) <= tokens else text + "." * missing
    if count(text) != tokens:
        raise SystemExit(f"no prompt of exactly {tokens} tokens: got {count(text)}")
    return text


def answer_steps(step: Callable[[], dict[str, float]]) -> None:
    """One step for every line on standard input, its figures as one JSON line on standard output."""
    for _ in sys.stdin:
        started, cpu = time.perf_counter(), time.process_time()
        figures = step()
        report(figures, time.perf_counter() - started, time.process_time() - cpu)


def report(figures: dict[str, float], seconds: float, cpu_seconds: float) -> None:
    """Write the line that `grpo_step.py` reads. `peak_mb` is the process's largest resident set so far."""
    line = {**figures, "seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mb": peak_kb() // 1024}
    print("STEP " + json.dumps(line), flush=True)
