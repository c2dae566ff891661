"""The peer's side of `grpo_step.py`: TRL's own GRPOTrainer, unmodified, one step for each line on stdin.

    python grpo_step_trl.py MODEL_FOLDER CASE_JSON

Runs in an environment of its own: torch, trl, peft. TRL's fastest setting on a CPU: no gradient
checkpointing, weights in the dtype of the case without autocast, old log-probs taken from sampling.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")

from grpo_step_case import OBSERVED, TEMPLATE, Case, prompt_of, report

FOREVER = 1_000_000


def main() -> None:
    import torch
    import transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    transformers.logging.set_verbosity_error()
    folder, case = sys.argv[1], Case(**json.loads(sys.argv[2]))
    torch.set_num_threads(2)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", truncation_side="left")
    tokenizer.chat_template = TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, case.dtype))
    rows = case.prompts * case.rollouts
    lengths = {"max_new_tokens": case.new_tokens}
    if not case.ragged:
        lengths["min_new_tokens"] = case.new_tokens
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="grpo_step_trl"),
        use_cpu=case.device == "cpu", bf16=False, fp16=False,
        per_device_train_batch_size=min(case.peer_micro, rows),
        gradient_accumulation_steps=max(1, rows // case.peer_micro),
        num_generations=case.rollouts, learning_rate=1e-6, lr_scheduler_type="constant", max_steps=FOREVER,
        max_completion_length=case.new_tokens if case.turns == 1 else 100_000,
        max_tool_calling_iterations=case.turns - 1 if case.turns > 1 else None,
        generation_kwargs=lengths, temperature=1.0, beta=0.0, gradient_checkpointing=False, seed=1,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, shuffle_dataset=False,
    )  # fmt: skip
    more: dict[str, Any] = {}
    if case.turns > 1:
        _always_calls(tokenizer, case)
        more["tools"] = [_tool(case)]
    if case.lora_rank:
        from peft import LoraConfig

        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        more["peft_config"] = LoraConfig(
            r=case.lora_rank, lora_alpha=2 * case.lora_rank, lora_dropout=0.0, task_type="CAUSAL_LM",
            target_modules=targets,
        )  # fmt: skip
    if case.ragged:
        _end_ragged(model, case, tokenizer.eos_token_id)
    trainer = GRPOTrainer(
        model=model, args=config, processing_class=tokenizer, reward_funcs=_reward,
        train_dataset=Dataset.from_list(_prompts(case, tokenizer)), callbacks=[_steps()], **more,
    )  # fmt: skip
    _watch(trainer)
    trainer.train()


def _prompts(case: Case, tokenizer: Any) -> list[dict[str, Any]]:
    if case.turns == 1:
        texts = [
            prompt_of(case.prompt_tokens, i, lambda t: len(tokenizer(t)["input_ids"]))
            for i in range(case.prompts)
        ]
        return [{"prompt": text} for text in texts]

    def chat(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    def count(text: str) -> int:
        return len(
            tokenizer(tokenizer.apply_chat_template(chat(text), add_generation_prompt=True, tokenize=False))[
                "input_ids"
            ]
        )

    return [{"prompt": chat(prompt_of(case.prompt_tokens, i, count))} for i in range(case.prompts)]


def _reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) % 7 / 7 for ids in completion_ids]


SPENT = {"rollout": 0.0, "tools": 0.0, "generated": 0.0, "prefilled": 0.0, "trained_positions": 0.0}


def _steps() -> Any:
    """A callback that waits for a line before each step, and reports the step after it."""
    import torch
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not sys.stdin.readline():
                os._exit(0)
            self.before = dict(SPENT)
            self.started, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds, cpu = time.perf_counter() - self.started, time.process_time() - self.cpu
            figures = {name: SPENT[name] - self.before[name] for name in SPENT}
            if torch.cuda.is_available():
                figures["gpu_gb"] = torch.cuda.max_memory_allocated() / 2**30
            report(figures, seconds, cpu)

    return Steps()


def _watch(trainer: Any) -> None:
    """Count what TRL's own methods do, without changing it."""

    def counted(name: str, after: Any) -> None:
        method = getattr(trainer, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = method(*args, **kwargs)
            after(time.perf_counter() - started, args, result)
            return result

        setattr(trainer, name, call)

    def generated(seconds: float, args: Any, result: Any) -> None:
        SPENT["generated"] += sum(map(len, result[0]))
        SPENT["prefilled"] += sum(map(len, args[0]))

    def rolled(seconds: float, args: Any, result: Any) -> None:
        SPENT["rollout"] += seconds

    def scored(seconds: float, args: Any, result: Any) -> None:
        SPENT["trained_positions"] += args[1].numel()

    counted("_generate_single_turn", generated)
    counted("_generate", rolled)
    counted("_get_per_token_logps_and_entropies", scored)


def _tool(case: Case) -> Any:
    def run_python(code: str) -> str:
        """Run a Python program and return what it printed.

        Args:
            code: The program.

        Returns:
            What the program printed.
        """
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=30
        )
        SPENT["tools"] += time.perf_counter() - started
        return done.stdout[:OBSERVED]

    return run_python


def _always_calls(tokenizer: Any, case: Case) -> None:
    """Whatever the model says is taken for a call of the tool, so that a random model does the work too."""

    def parse_response(self: Any, ids: Any, **_: Any) -> dict[str, Any]:
        call = {"name": "run_python", "arguments": {"code": case.program}}
        text = self.decode(ids, skip_special_tokens=True)
        return {"role": "assistant", "content": text, "tool_calls": [{"type": "function", "function": call}]}

    tokenizer.response_schema = {"type": "object"}
    kind = tokenizer.__class__
    tokenizer.__class__ = type("Scripted" + kind.__name__, (kind,), {"parse_response": parse_response})


def _end_ragged(model: Any, case: Case, eos: int) -> None:
    """End each rollout at the length that the case gives it."""
    import torch

    generate = model.generate

    class Ends:
        def __init__(self) -> None:
            self.step = 0

        def __call__(self, ids: Any, scores: Any) -> Any:
            self.step += 1
            lengths = torch.tensor([case.length(row % case.rollouts) for row in range(len(ids))])
            last = lengths <= self.step
            scores[:, eos] = float("-inf")
            scores[last] = float("-inf")
            scores[last, eos] = 0.0
            return scores

    def ending(*args: Any, **kwargs: Any) -> Any:
        return generate(*args, **kwargs, logits_processor=[Ends()])

    model.generate = ending


if __name__ == "__main__":
    main()
