"""A GGUF file runs on llama.cpp: ids, log-probs, limits, many rows, and what cannot be loaded."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import write_gguf
from typer.testing import CliRunner

from nano_coder.agent.best_first import next_beginning
from nano_coder.agent.chat_template import CHATML
from nano_coder.cli import cli
from nano_coder.config import CoreConfig
from nano_coder.models import opening
from nano_coder.models.opening import open_policy, open_weights
from nano_coder.verify.tokens import rescored
from nano_gguf.engine import LlamaEngine
from nano_gguf.policy import GgufPolicy
from nano_gguf.server import LlamaServer
from nano_rl.logs.admission import RunVerifier
from nano_shared.errors import ContextFull, PolicyError, UsageError
from nano_shared.extension_points import Extensions
from nano_shared.policy import Conversation
from nano_shared.store import LogStore
from nano_shared.types import Completion, Finish, Message, Role, Sampling

HALF = 0.05
"""nats: llama.cpp keeps keys and values as float16; a mistake is of several"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = {name: os.environ.get(name) for name in ("NANO_HOME", "OMP_NUM_THREADS")}
    folder = tmp_path_factory.mktemp("home")
    os.environ |= {"NANO_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    yield folder
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(scope="module")
def file(tiny_folder: Path, home: Path) -> Path:
    return write_gguf(tiny_folder, home / "tiny.gguf", template=CHATML, gain=2)


@pytest.fixture(scope="module")
def policy(file: Path) -> Iterator[GgufPolicy]:
    opened = open_policy(str(file)).policy
    assert isinstance(opened, GgufPolicy)
    yield opened
    opened.engine._server.close()


@pytest.fixture(scope="module")
def weights(file: Path) -> Any:
    """The same file, dequantised."""
    return open_policy(str(file), dtype="float32").policy


def conversation(text: str = "Say something.") -> Conversation:
    return Conversation((Message(role=Role.USER, content=text),))


def sampled(completion: Completion) -> tuple[int, ...]:
    assert completion.tokens is not None
    return completion.tokens.sampled_ids


def gaps(asked: Conversation, completion: Completion, weights: Any, temperature: float) -> list[float]:
    assert completion.tokens is not None
    tokens = completion.tokens
    row = (*asked.tokens, *tokens.context_ids, *tokens.sampled_ids)
    first = len(row) - len(tokens.sampled_ids)
    scores = weights.engine.score_alone(row, temperature, first=first)
    return [abs(a - b) for a, b in zip(scores, tokens.logprobs, strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_log_probs_are_those_of_the_weights_also_within_a_character(
    policy: GgufPolicy, weights: Any, temperature: float
) -> None:
    asked = conversation()
    completion = policy.complete(asked, Sampling(temperature=temperature, max_tokens=48, seed=2))
    text = [policy.decode([token]) for token in sampled(completion)]
    assert temperature == 0 or any("�" in each for each in text)  # bytes of which llama.cpp tells no log-prob
    assert max(gaps(asked, completion, weights, temperature)) < HALF


def test_the_likeliest_answers_are_given_one_after_another(policy: GgufPolicy) -> None:
    answers = []
    for _ in range(6):
        beginning = next_beginning(answers, policy.engine.eos_ids)
        assert beginning is not None
        sampling = Sampling(temperature=0.0, max_tokens=8)
        completion, found = policy.complete_beginning(conversation(), sampling, beginning)
        assert completion.tokens is not None
        assert completion.sampling.given == len(beginning)
        answers.append((completion.tokens, found))
    assert len({tokens.sampled_ids for tokens, _ in answers}) == len(answers)
    assert answers[0][0].sampled_ids == sampled(policy.complete(conversation(), sampling))


def test_top_k_and_top_p_renormalise(policy: GgufPolicy, weights: Any) -> None:
    sampling = Sampling(temperature=1.3, top_k=5, top_p=0.8, max_tokens=24, seed=1)
    mine = policy.complete(conversation(), sampling)
    assert mine.tokens is not None
    ids = (*mine.tokens.context_ids, *mine.tokens.sampled_ids)
    first = len(mine.tokens.context_ids)
    for place, logprob in enumerate(mine.tokens.logprobs):
        (score,) = weights.engine.score_tokens(ids[: first + place + 1], 1.3, first=first + place, top=5)
        best = [2.718281828459045**value for _, value in score.top]
        best = [each / sum(best) for each in best]
        kept = [each for n, each in enumerate(best) if sum(best[:n]) < 0.8]
        chosen = [token for token, _ in score.top].index(ids[first + place])
        assert 2.718281828459045**logprob == pytest.approx(kept[chosen] / sum(kept), abs=HALF)


def test_a_turn_extends_the_row_whose_prefix_is_kept(
    policy: GgufPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    answer = LlamaServer.answer

    def watched(self: LlamaServer, connection: Any) -> Any:
        found = answer(self, connection)
        read.append(found["timings"]["prompt_n"])
        return found

    asked = conversation("A long beginning. " * 12)
    asked.record(policy.complete(asked, Sampling(max_tokens=8, seed=0)))
    before = tuple(asked.tokens)
    asked.append(Message(role=Role.USER, content="And more?"))
    monkeypatch.setattr(LlamaServer, "answer", watched)
    again = policy.complete(asked, Sampling(max_tokens=4, seed=0))
    asked.record(again)
    assert tuple(asked.tokens)[: len(before)] == before
    assert len(before) > 60
    assert sum(read) < 45


def test_a_seed_repeats_a_row(policy: GgufPolicy) -> None:
    text = conversation("Question 0")
    first = sampled(policy.complete(text, Sampling(max_tokens=20, seed=7)))
    assert sampled(policy.complete(text, Sampling(max_tokens=20, seed=7))) == first


@pytest.mark.slow  # differed in two full suites, and never alone; why is not known
def test_rows_of_threads_are_those_of_one(policy: GgufPolicy) -> None:
    texts = [f"Question {n}" for n in range(4)]
    alone = [sampled(policy.complete(conversation(t), Sampling(max_tokens=20, seed=7))) for t in texts]
    together: dict[str, tuple[int, ...]] = {}

    def ask(text: str) -> None:
        together[text] = sampled(policy.complete(conversation(text), Sampling(max_tokens=20, seed=7)))

    threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[text][:3] for text in texts] == [ids[:3] for ids in alone]
    assert all(len(together[text]) == len(ids) or 2 in ids for text, ids in zip(texts, alone, strict=True))


def test_rows_that_the_cache_does_not_hold_together_wait(policy: GgufPolicy) -> None:
    words = "one two three four five six seven eight nine ten "
    long = [conversation(f"{number} " + words * 20) for number in range(3)]
    done: list[Completion] = []
    threads = [
        threading.Thread(target=lambda c: done.append(policy.complete(c, Sampling(max_tokens=24))), args=(c,))
        for c in long
    ]
    lengths = [len(policy.next_row(each)[1]) for each in long]
    assert all(policy.context_limit / 3 < length < policy.context_limit - 32 for length in lengths), lengths
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 3


def test_limits(policy: GgufPolicy) -> None:
    assert len(sampled(policy.complete(conversation(), Sampling(max_tokens=19, seed=5)))) <= 19
    letters = "aeinorst"  # of which forty tokens have one, whatever they are
    short = policy.complete(conversation(), Sampling(max_tokens=40, seed=5, stop=tuple(letters)))
    assert short.finish == Finish.STOP
    assert set(letters) & set(short.text)
    assert not set(letters) & set(policy.decode(sampled(short)[:-1]))
    with pytest.raises(ContextFull):
        policy.complete(conversation("word " * 2000), Sampling(max_tokens=4))
    ids = tuple(range(3, 103)) * 10 + tuple(range(3, 3 + policy.context_limit - 1003))
    last = policy.complete_ids(ids, Sampling(max_tokens=50))
    assert (len(sampled(last)), last.finish) == (3, Finish.LENGTH)


def test_stop_cancels_what_is_sampled(policy: GgufPolicy) -> None:
    asked = conversation()
    asked.stop = threading.Event()
    asked.stop.set()
    began = time.monotonic()
    completion = policy.complete(asked, Sampling(max_tokens=700))
    assert completion.finish == Finish.CANCELLED
    assert len(sampled(completion)) < 700
    assert time.monotonic() - began < 20
    assert sampled(policy.complete(conversation(), Sampling(max_tokens=2)))


def test_a_grammar_is_refused(policy: GgufPolicy) -> None:
    from nano_shared.types import Shaping

    with pytest.raises(UsageError, match="--set dtype=bfloat16"):
        policy.complete(conversation(), Sampling(shaping=Shaping(min_p=0.1)))


def test_a_run_is_logged_with_tokens_that_admission_measures(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    arguments = [
        "run",
        "Hi.",
        "-C",
        str(tmp_path / "work"),
        "--model",
        str(file),
        "--json",
        "--sandbox",
        "none",
    ]
    monkeypatch.setenv("NANO_ALLOW_NO_SANDBOX", "1")
    more = ["--limit", "max_turns=2", "--limit", "max_completion_tokens=8", "--log", str(tmp_path / "log.db")]
    done = CliRunner().invoke(cli, [*arguments, *more])
    run_id = json.loads(done.stdout)["run"]
    with LogStore.open(tmp_path / "log.db") as store:
        run = store.get(run_id)
        opened = open_weights(str(file))
        verified = RunVerifier(opened, store).verify(run, score=True)
    assert run.turns
    assert run.turns[0].completion.policy_id not in (opened.loaded.id, None)
    assert verified.refusal is None
    temperature = run.turns[0].completion.sampling.temperature
    assert max(token.gap for token in verified.tokens) < HALF / temperature
    assert rescored(run, open_policy(str(file), dtype="float32").policy.engine)  # type: ignore[attr-defined]


def test_without_the_plug_in_it_is_dequantised_and_said(
    file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Without(Extensions[Any]):
        def __contains__(self, name: object) -> bool:
            return name != "gguf" and super().__contains__(name)

    monkeypatch.setattr(opening, "MODELS", Without("nano.models"))
    assert not isinstance(open_policy(str(file)).policy, GgufPolicy)
    assert "is dequantised, which takes several times its size; pip install 'nano-rl-coder[gguf]'" in (
        capfd.readouterr().err
    )


def _cut(file: Path, home: Path) -> Path:
    (cut := home / "cut.gguf").write_bytes(file.read_bytes()[:-5000])
    return cut


def test_what_cannot_be_loaded_is_refused_in_a_sentence(
    file: Path, tiny_folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(path: Path, said: str) -> None:
        with pytest.raises(UsageError) as caught:
            open_policy(str(path))
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
        assert caught.value.exit_code == 2

    bare = write_gguf(tiny_folder, home / "bare.gguf", template=None)
    refused(bare, "has no chat template; put one into its folder")
    (text := home / "text.gguf").write_bytes(b"no model")
    refused(text, "text.gguf' cannot be loaded")
    cut = home / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:-5000])
    monkeypatch.setattr(
        "nano_gguf.policy.load_tokenizer", lambda _: opening.weights.load_tokenizer(str(file))
    )
    monkeypatch.setattr("nano_gguf.policy.own_profile", lambda _: "compact-1")
    refused(cut, "within the file bounds, model is corrupted or incomplete")
    unknown = write_gguf(tiny_folder, home / "unknown.gguf", template=CHATML, architecture="klingon")
    refused(
        unknown,
        "llama.cpp says: llama_model_load: error loading model: unknown model architecture: 'klingon'",
    )
    (tmp_path / "xllamacpp.py").write_text(
        "import os, sys\nprint('ggml: broken', file=sys.stderr)\nos.abort()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    refused(file, "ggml: broken (it ended with -6)")


def test_an_engine_that_dies_ends_the_turn_and_no_more(file: Path) -> None:
    opened: Any = open_policy(str(file), CoreConfig(kv_gib=0.001)).policy
    assert isinstance(opened.engine, LlamaEngine)
    opened.engine._server._child.kill()
    with pytest.raises(PolicyError, match=r"llama\.cpp, which ran tiny\.gguf, gave no answer"):
        opened.complete(conversation(), Sampling(max_tokens=4))
