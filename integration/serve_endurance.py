"""A server under many clients: random conversations over four APIs, disconnects, kills and adapter reloads.

    python integration/serve_endurance.py --out FOLDER --requests 1000
    python integration/serve_endurance.py --out FOLDER --requests 10000 --kills 20 --reloads 50

The policy is a tiny one with random weights, in float32, behind a `nano-coder serve` process. A client opens
conversations in sessions of their own or in none, continues and forks them, rewrites their history, streams,
and hangs up. Afterwards every logged turn is compared with what its template renders and its weights score,
and every answer that a client read is looked up in the log: its conversation must be one run, with these
turns in this order. The exit code is 1 where one of that fails. `--out` keeps the log.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from smoke import parse

from integration.tiny_model import build_tiny
from nano_coder.models.opening import local_policy, open_weights
from nano_coder.verify.tokens import MAX_GAP, TokenCheck, rescored
from nano_shared.store import LogStore
from nano_shared.types import Finish, Trajectory

DIALECTS = ("chat", "messages", "responses", "completions")
ADMIN = "admin"
WORDS = ("read", "the file", "then", "run its tests", "and", "mend", "what fails", "in one line")


@dataclass
class Talk:
    """A conversation as its client knows it."""

    dialect: str
    model: str
    session: str
    messages: list[dict[str, Any]]
    answers: list[str] = field(default_factory=list)
    """texts, one for each request"""

    def said(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})


class Client(threading.Thread):
    """Makes requests, one after another, until none is left."""

    def __init__(self, server: Server, number: int, seed: int, models: list[str]) -> None:
        super().__init__(daemon=True)
        self.server, self.number, self.models = server, number, models
        self.rng = random.Random(f"{seed}:{number}")
        self.talks: list[Talk] = []
        self.whole: list[Talk] = []
        """of each finished answer: its conversation up to there"""
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def run(self) -> None:
        with httpx.Client(timeout=120) as http:
            while self.server.take_one():
                talk, kind = self.next_talk()
                self.counts[kind] += 1
                self.counts[talk.dialect] += 1
                try:
                    self.ask(http, talk)
                except (httpx.TransportError, ConnectionError):
                    self.counts["cut off"] += 1  # the server was killed
                    time.sleep(0.2)

    def next_talk(self) -> tuple[Talk, str]:
        """A conversation that ends with a message of the user."""
        rng = self.rng
        roll = rng.random()
        line = f"{self.number}.{sum(self.counts.values())} " + " ".join(
            rng.choices(WORDS, k=rng.randint(1, 9))
        )
        if not self.talks or roll < 0.3:
            session = f"s-{self.number}-{len(self.talks)}" if rng.random() < 0.5 else ""
            talk = Talk(rng.choice(DIALECTS), rng.choice(self.models), session, [])
            talk.said(line)
            return talk, "opened"
        old = rng.choice(self.talks)
        cut, kind = len(old.answers), "continued"
        if old.dialect == "completions":
            cut, kind = 0, "opened"
        elif roll > 0.85:
            cut, kind = rng.randint(0, cut), "forked"
        messages = [dict(m) for m in old.messages[: 2 * cut]]
        if kind == "continued" and roll > 0.75 and messages:
            messages[0]["content"] += " (again)"
            kind, cut = "rewrote", 0
        talk = Talk(old.dialect, old.model, old.session, messages, old.answers[:cut])
        talk.said(line)
        return talk, kind

    def ask(self, http: httpx.Client, talk: Talk) -> None:
        rng = self.rng
        stream, hang_up = rng.random() < 0.5, rng.random() < 0.1
        path, body = request_of(talk, rng.randint(1, 24), rng.choice([0.0, 0.7, 1.0]), stream)
        root = self.server.root + (f"/sessions/{talk.session}" if talk.session else "")
        if not stream:
            answer = http.post(f"{root}{path}", json=body)
            self.check(answer.status_code, answer.text)
            if answer.status_code == 200:
                self.finish(talk, text_of(talk.dialect, answer.json()))
            return
        parts: list[str] = []
        with http.stream("POST", f"{root}{path}", json=body) as answer:
            if answer.status_code != 200:
                self.check(answer.status_code, answer.read().decode())
                return
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    parts.append(delta_of(talk.dialect, json.loads(line[6:])))
                if hang_up and any(parts):
                    self.counts["hung up"] += 1
                    return
        self.finish(talk, "".join(parts))

    def check(self, status: int, text: str) -> None:
        if status != 200:
            self.counts[f"status {status}"] += 1
            if status >= 500 or "Traceback" in text or status not in (400, 429):
                self.problems.append(f"{status}: {text[:200]}")

    def finish(self, talk: Talk, text: str) -> None:
        done = Talk(talk.dialect, talk.model, talk.session, talk.messages, [*talk.answers, text])
        self.whole.append(done)
        kept = Talk(*vars(done).values())
        kept.messages = [*talk.messages, {"role": "assistant", "content": text}]
        # an empty answer is no message that every API takes; rewritten history is not continued
        if text.strip() and len(talk.messages) == 2 * len(done.answers) - 1:
            self.talks = [*self.talks[-7:], kept]


def request_of(talk: Talk, tokens: int, temperature: float, stream: bool) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"model": talk.model, "temperature": temperature, "stream": stream}
    if talk.dialect == "completions":
        return "/v1/completions", body | {"prompt": talk.messages[-1]["content"], "max_tokens": tokens}
    if talk.dialect == "responses":
        return "/v1/responses", body | {"input": talk.messages, "max_output_tokens": tokens}
    path = "/v1/messages" if talk.dialect == "messages" else "/v1/chat/completions"
    return path, body | {"messages": talk.messages, "max_tokens": tokens}


def text_of(dialect: str, answer: dict[str, Any]) -> str:
    if dialect == "messages":
        return "".join(part.get("text", "") for part in answer["content"])
    if dialect == "responses":
        items = [item for item in answer["output"] if item["type"] == "message"]
        return "".join(part["text"] for item in items for part in item["content"])
    (choice,) = answer["choices"]
    return choice["text"] if dialect == "completions" else choice["message"]["content"] or ""


def delta_of(dialect: str, event: dict[str, Any]) -> str:
    """The text that an event adds."""
    if dialect == "messages":
        return event.get("delta", {}).get("text", "") if event["type"] == "content_block_delta" else ""
    if dialect == "responses":
        return event["delta"] if event["type"] == "response.output_text.delta" else ""
    if not event.get("choices"):
        return ""
    (choice,) = event["choices"]
    return choice["text"] if dialect == "completions" else choice["delta"].get("content") or ""


class Server:
    """The process, which can be killed and started again on the same port and log."""

    def __init__(self, model: Path, home: Path, requests: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.root = f"http://127.0.0.1:{self.port}"
        self._command = (
            sys.executable, "-c", "import sys; from nano_coder.cli import main; sys.exit(main())", "serve",
            "--model", str(model), "--set", "dtype=float32", "--port", str(self.port), "--admin-key", ADMIN,
        )  # fmt: skip
        self._environment = {**os.environ, "NANO_HOME": str(home)}
        self._left, self._lock = requests, threading.Lock()
        self.memory: list[float] = []
        self.start()

    @property
    def left(self) -> int:
        return self._left

    def take_one(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, env=self._environment)
        for _ in range(600):
            if self._process.poll() is not None:
                sys.exit(f"the server ended with {self._process.returncode}")
            try:
                if httpx.get(f"{self.root}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        sys.exit("the server does not answer")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(timeout=120)

    def load(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
        headers = {"Authorization": f"Bearer {ADMIN}"}
        httpx.post(
            f"{self.root}/v1/load_lora_adapter", json=body, headers=headers, timeout=120
        ).raise_for_status()

    def note_memory(self) -> None:
        """Append the resident megabytes."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        self.memory.append(int(status.partition("VmRSS:")[2].split()[0]) / 1024)

    def unfinished(self) -> float:
        """Requests that run or wait, by the server's own metrics."""
        text = httpx.get(f"{self.root}/metrics", timeout=30).text
        wanted = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(wanted))


def adapter(base: Path, folder: Path, seed: int) -> Path:
    """Write a LoRA adapter with random weights."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    if not folder.exists():
        torch.manual_seed(seed)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], base_model_name_or_path=str(base))
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.3)
        model.save_pretrained(folder)
    return folder


def disturb(server: Server, options: argparse.Namespace, folders: list[Path]) -> None:
    """Kill and reload at even distances of the requests, until they are used up."""
    events = sorted(
        [(n / (options.kills + 1), "kill") for n in range(1, options.kills + 1)]
        + [(n / (options.reloads + 1), "reload") for n in range(1, options.reloads + 1)]
    )
    loaded: Path | None = None
    for share, event in events:
        while server.left > 0 and 1 - server.left / options.requests < share:
            time.sleep(0.05)
        if event == "kill":
            server.kill()
            server.start()
        else:
            loaded = folders[0] if loaded == folders[1] else folders[1]
        if loaded is not None:
            server.load("a", loaded)


def verify(store: LogStore, clients: list[Client]) -> dict[str, Any]:
    """What the log holds, against the weights and against what the clients read."""
    engines: dict[str, Any] = {}
    runs: dict[tuple[str, ...], list[Trajectory]] = {}
    largest, tokens, turns, cancelled, wrong = 0.0, 0, 0, 0, []
    for summary in store.runs():
        run = store.get(summary.id)
        if run.policy not in engines:
            opened = open_weights(run.policy)
            policy = local_policy(opened.loaded, opened.profile)
            check = TokenCheck(template=policy.template, eos_ids=policy.engine.eos_ids, blobs=store.blobs)
            engines[run.policy] = policy.engine, check
        engine, check = engines[run.policy]
        wrong += [f"{run.id}: {finding}" for finding in check.findings(run)]
        # turns before a fork may be of other weights, which their own run is compared with
        own = {turn.index for turn in run.own_turns}
        scores = [score for score in rescored(run, engine) if score.turn in own] if run.turns else []
        largest = max([largest, *(abs(s.recomputed - s.recorded) for s in scores)])
        tokens, turns = tokens + len(scores), turns + len(run.own_turns)
        cancelled += sum(turn.completion.finish is Finish.CANCELLED for turn in run.own_turns)
        texts = [turn.completion.text for turn in run.turns]
        for end in range(1, len(texts) + 1):
            runs.setdefault(tuple(texts[:end]), []).append(run)
    unlogged = [
        talk.answers for client in clients for talk in client.whole
        if not any(same(talk, run) for run in runs.get(tuple(talk.answers), ()))
    ]  # fmt: skip
    return {
        "runs": len(store.runs()), "turns": turns, "sampled tokens": tokens, "cancelled turns": cancelled,
        "largest difference of log-probs": largest, "wrong tokens": wrong[:5],
        "answers read": sum(len(client.whole) for client in clients), "not in the log": unlogged[:5],
    }  # fmt: skip


def same(talk: Talk, run: Trajectory) -> bool:
    """Whether the run holds the messages of the conversation, in their order."""
    asked = [m["content"] for m in talk.messages if m["role"] == "user"][-len(talk.answers) :]
    text = "\n".join(m.content for turn in run.turns[: len(talk.answers)] for m in turn.messages)
    places = [text.find(line) for line in asked]
    return talk.dialect == "completions" or (-1 not in places and places == sorted(places))


def main() -> int:
    parser = argparse.ArgumentParser(description="Random clients of a server; its log verified afterwards.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--reloads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parse(parser, requests=6, clients=2)
    home = options.out / "home"
    if home.exists():
        parser.error(f"{home} is there already; name another folder")
    texts = [file.read_text() for file in sorted(Path("shared/nano_shared").glob("*.py"))]
    model = build_tiny(options.out / "tiny", texts, vocab_size=1024, hidden=64, layers=2)
    folders = [adapter(model, options.out / f"adapter-{n}", n) for n in range(2)]
    server = Server(model, home, options.requests)
    names = ["tiny"]
    if options.reloads:
        server.load("a", folders[0])
        names.append("a")
    clients = [Client(server, n, options.seed, names) for n in range(options.clients)]
    began = time.monotonic()
    disturbing = threading.Thread(target=disturb, args=(server, options, folders), daemon=True)
    for thread in (*clients, disturbing):
        thread.start()
    while any(client.is_alive() for client in clients):
        time.sleep(0.2 if options.smoke else 2)
        try:
            server.note_memory()
        except (FileNotFoundError, ProcessLookupError, IndexError):  # killed just now
            continue
    disturbing.join()
    seconds = time.monotonic() - began
    for _ in range(50):
        if not (left := server.unfinished()):
            break
        time.sleep(0.1)
    server.stop()
    result = {
        **verify(LogStore.open(str(home / "log.db")), clients),
        "requests a second": round(options.requests / seconds, 1),
        "unfinished at the end": left,
        "resident MB": [round(m) for m in server.memory[:: max(1, len(server.memory) // 10)]],
        "counts": dict(sum((client.counts for client in clients), Counter())),
        "problems": [problem for client in clients for problem in client.problems][:5],
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    bad = ("wrong tokens", "not in the log", "problems", "unfinished at the end")
    return int(any(result[name] for name in bad) or result["largest difference of log-probs"] > MAX_GAP)


if __name__ == "__main__":
    sys.exit(main())
