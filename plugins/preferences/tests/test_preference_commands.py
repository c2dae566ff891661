"""Pairs, reward models, DPO and imitation through the command line, on a real tiny model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from builders import verdict
from domains import runtime

from integration.tiny_model import build_tiny
from nano_coder.agent.profiles import COMPACT_1, first_messages
from nano_coder.models.opening import open_weights, rank_of
from nano_preferences.registry import parse_reward
from nano_preferences.reward_checkpoint import open_reward_model
from nano_preferences.rewards.preference import Preference
from nano_rl.cli import cli
from nano_rl.imitation import RunEncoder, reader_of
from nano_rl.learn.batch import make_batches
from nano_rl.learn.logprob import token_logprobs
from nano_shared.checkpoint import read_checkpoint
from nano_shared.command_line import run_command
from nano_shared.errors import CheckpointError, ConfigError, UsageError
from nano_shared.files import checkpoints_dir
from nano_shared.policy import Conversation
from nano_shared.store import LogStore
from nano_shared.types import (
    Completion,
    Finish,
    Message,
    Role,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    Turn,
    TurnTokens,
)

WORDS = ("please", "now", "here", "there", "then", "stop", "go", "look")
LIKED = "please"
QUESTION = "Say something."


def answer(random: Random) -> str:
    return " ".join(random.choice(WORDS) for _ in range(5))


def rows(count: int) -> list[dict[str, str]]:
    """Pairs of an annotator who likes one word; the prompts differ."""
    random, made = Random(0), []
    while len(made) < count:
        one, two = sorted((answer(random), answer(random)), key=lambda text: -text.split().count(LIKED))
        if one.split().count(LIKED) > two.split().count(LIKED):
            made.append({"prompt": f"{QUESTION} {len(made)}", "chosen": one, "rejected": two})
    return made


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    texts = [r[k] for r in rows(80) for k in r] + [m.content for m in first_messages(COMPACT_1, task(), ())]
    return build_tiny(tmp_path_factory.mktemp("tiny"), texts * 3, hidden=32, layers=1, vocab_size=400)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NANO_LOG", raising=False)
    return tmp_path / "home"


@pytest.fixture
def nano(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs a command line; its exit code, and what it said on stderr."""

    def call(*arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            run_command(cli, [str(a) for a in arguments])
        return int(ended.value.code or 0), capsys.readouterr().err

    return call


def task(key: str = "task-0") -> Task:
    return Task(key=key, prompt=QUESTION)


def pairs_file(folder: Path, made: list[dict[str, str]]) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def run_of(reader: RunEncoder, name: str, text: str, reward: float | None, key: str = "task-0") -> Trajectory:
    """A logged run of one turn with the tokens that the policy would have had."""
    messages = first_messages(COMPACT_1, task(key), ())
    context = reader.template.delta(Conversation(messages))
    sampled = (*reader.template.encoder.text(text), reader.eos_id)
    tokens = TurnTokens(context_ids=context, sampled_ids=sampled, logprobs=(-1.0,) * len(sampled))
    completion = Completion(
        text=text, finish=Finish.STOP, tokens=tokens, sampling=Sampling(), policy_id="tiny"
    )
    turn = Turn(index=0, completion=completion, parser="compact", started=0, ended=0)
    return Trajectory(
        id=name, task=task(key), turns=(turn,),
        stop=StopReason.FINISHED, runtime_version="0", profile=COMPACT_1.name, profile_hash=COMPACT_1.hash,
        template_hash=reader.template.template_hash, tools_hash=COMPACT_1.tools_hash, policy="tiny",
        started=0.0, verdict=None if reward is None else verdict(reward),
    )  # fmt: skip


def likes(model: str, good: str, bad: str) -> float:
    """How much more probable one answer is than another, in nats."""
    opened = open_weights(model)
    reader = reader_of(opened)
    prompt = Message(role=Role.USER, content=QUESTION)
    scores = []
    for text in (good, bad):
        (row,) = reader.messages("row", [prompt, Message(role=Role.ASSISTANT, content=text)], [False, True])
        (batch,) = make_batches([row], max_tokens=10_000)
        scores.append(token_logprobs(opened.loaded.model, batch).sum().item())
    return scores[0] - scores[1]


OTHER_TEXTS = ["go stop please Say something."] * 9
"""of a vocabulary in which the same words are other tokens"""
FAST = ("--learning-rate", "1e-2", "--set", "batch=8")


def test_a_reward_model_is_trained_saved_and_scores_runs(
    tiny: Path, tmp_path: Path, nano: Callable[..., tuple[int, str]]
) -> None:
    pairs = pairs_file(tmp_path, rows(80))
    code, said = nano(
        "reward-model", "--pairs", pairs, "--model", tiny, "--name", "judge", *FAST, "--epochs", 6
    )
    assert code == 0, said
    assert "80, 0 with the tokens that were logged, 80 text-only" in said
    folder = checkpoints_dir() / "judge"
    manifest = read_checkpoint(folder)
    assert manifest.kind == "reward_model"
    assert float(str(manifest.metrics["held_out_accuracy"])) > 0.8
    assert manifest.metrics["held_out_pairs"] == 16
    assert "expected calibration error" in said
    assert "Calibration" in (folder / "calibration.html").read_text()
    assert parse_reward("tests=1,preference=0.2").parts["preference"] == {
        "weight": 0.2, "checkpoint": "judge",
    }  # fmt: skip

    reader = reader_of(open_weights(str(tiny)))
    kind, rude = (run_of(reader, n, t, None) for n, t in (("a", "please please go"), ("b", "stop stop go")))
    part = Preference(checkpoint="judge")
    part.prepare()
    within = runtime(tmp_path / "log")
    scores = [score.value or 0.0 for score in part.score([kind, rude], within)]
    assert 0 < scores[1] < scores[0] < 1
    nothing = kind.model_copy(update={"turns": ()})
    assert part.score([nothing], within)[0].value == 0

    # plain transformers loads it and says the same
    from transformers import AutoModelForSequenceClassification

    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    ids = torch.tensor([reader.rows(kind)[-1].ids])
    opened = open_reward_model("judge")
    assert opened is not None
    assert opened([kind])[0] > opened([rude])[0] + 1
    assert plain(input_ids=ids).logits.item() == pytest.approx(opened([kind])[0], abs=1e-5)

    with pytest.raises(CheckpointError, match="judge is a reward model, which scores runs and writes none"):
        open_weights("judge")


def test_a_reward_model_refuses_tokens_that_it_does_not_read(
    tiny: Path, tmp_path: Path, nano: Callable[..., tuple[int, str]]
) -> None:
    pairs = pairs_file(tmp_path, rows(6))
    assert nano("reward-model", "--pairs", pairs, "--model", tiny, "--name", "judge", "--epochs", 1)[0] == 0
    other = build_tiny(tmp_path / "other", OTHER_TEXTS, hidden=32, layers=1)
    foreign = run_of(reader_of(open_weights(str(other))), "foreign", "please go", None)
    model = open_reward_model("judge")
    assert model is not None
    with pytest.raises(UsageError, match="run foreign holds tokens of another template or vocabulary"):
        model([foreign])
    own = run_of(reader_of(open_weights(str(tiny))), "own", "please go", None)
    with pytest.raises(UsageError, match="run own holds tokens of another template"):
        model([own.model_copy(update={"template_hash": "u"})])
    with pytest.raises(ConfigError, match="is no reward model that this nano can open"):
        Preference(checkpoint=str(tiny)).prepare()


def test_dpo_moves_a_policy_to_what_is_preferred(
    tiny: Path, tmp_path: Path, nano: Callable[..., tuple[int, str]]
) -> None:
    pairs = pairs_file(tmp_path, rows(24))
    before = likes(str(tiny), "please please go", "stop stop go")
    code, said = nano(
        "dpo", "--pairs", pairs, "--model", tiny, "--name", "polite", *FAST, "--epochs", 4, "--lora-rank", 4
    )
    assert code == 0, said
    assert likes("polite", "please please go", "stop stop go") > before + 1
    assert read_checkpoint(checkpoints_dir() / "polite").kind == "adapter"


def test_pairs_of_a_log_are_built_and_trained_token_for_token(
    tiny: Path, tmp_path: Path, nano: Callable[..., tuple[int, str]]
) -> None:
    log, out = tmp_path / "log.db", tmp_path / "pairs.jsonl"
    reader = reader_of(open_weights(str(tiny)))
    with LogStore.open(log) as store:
        for i in range(4):
            store.append(run_of(reader, f"good-{i}", f"please {WORDS[i]}", 1.0, key=f"task-{i % 2}"))
            store.append(run_of(reader, f"bad-{i}", f"stop {WORDS[i]}", 0.0, key=f"task-{i % 2}"))
    assert nano("preferences", "build", "--log", log, "--out", out)[0] == 0
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(written) == 4
    assert all(row["exact"]["chosen"][0]["mask"][-1] == 1 for row in written)

    code, said = nano("dpo", "--pairs", out, "--model", tiny, "--name", "exact", "--lora-rank", 0)
    assert (code, "4, 4 with the tokens that were logged, 0 text-only" in said) == (0, True), said
    trained_on = read_checkpoint(checkpoints_dir() / "exact").trained_on
    assert trained_on.run_ids == tuple(sorted(f"{k}-{i}" for k in ("good", "bad") for i in range(4)))
    assert trained_on.tasks == 2  # so that it is not promoted on them
    code, said = nano("dpo", "--from-logs", "--log", log, "--model", tiny, "--name", "again", "--epochs", 1)
    assert code == 0, said

    # another policy's tokens, and another template's
    other = build_tiny(tmp_path / "other", OTHER_TEXTS, hidden=32, layers=1)
    code, said = nano("dpo", "--pairs", out, "--model", other, "--name", "foreign")
    assert code == 2
    assert "pair 1 holds tokens of another vocabulary than this policy's" in said
    for row in written:
        row["exact"]["template_hash"] = "u"
    out.write_text("".join(json.dumps(row) + "\n" for row in written))
    code, said = nano("dpo", "--pairs", out, "--model", tiny, "--name", "foreign")
    assert code == 2
    assert "pair 1 holds tokens of another chat template" in said


@pytest.mark.parametrize("command", ["dpo", "reward-model"])
def test_bad_input_is_a_sentence(
    command: str, tiny: Path, tmp_path: Path, nano: Callable[..., tuple[int, str]]
) -> None:
    model = ("--model", tiny, "--name", "none")
    assert nano(command, *model) == (2, "error: give either --pairs FILE, or --from-logs\n")
    bad = pairs_file(tmp_path, [*rows(2), {"prompt": "p", "chosen": "a", "rejected": "a"}])
    code, said = nano(command, "--pairs", bad, *model)
    assert code == 2
    assert f"{bad}:3: row: chosen and rejected are the same: nothing is preferred; leave the row out" in said
    LogStore.open(tmp_path / "empty.db").close()
    code, said = nano(command, "--from-logs", "--log", tmp_path / "empty.db", *model)
    assert code == 2
    assert "the log holds no preference pair" in said
    code, said = nano(command, "--from-logs", "--log", tmp_path / "none.db", *model)
    assert code == 2
    assert "none.db" in said
    assert not (tmp_path / "none.db").exists()
    assert not (checkpoints_dir() / "none").exists()


def test_imitation_of_conversations_and_of_logged_successes(
    tiny: Path, tmp_path: Path, nano: Callable[..., tuple[int, str]]
) -> None:
    log, talk = tmp_path / "log.db", tmp_path / "talk.jsonl"
    reader = reader_of(open_weights(str(tiny)))
    with LogStore.open(log) as store:
        store.append(run_of(reader, "good", "please go", 1.0))
        store.append(run_of(reader, "bad", "stop go", 0.0))
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "please please go"}]
    talk.write_text((json.dumps({"messages": messages}) + "\n") * 4)
    before = likes(str(tiny), "please please go", "stop stop go")
    code, said = nano(
        "sft", "--messages", talk, "--from-logs", "--log", log, "--model", tiny, "--name", "warm",
        "--epochs", 8, "--set", "dtype=bfloat16", "--lora-rank", 4, *FAST,
    )  # fmt: skip
    assert code == 0, said
    assert "imitated from the log: 1 runs (1 no success)" in said
    assert "rows: 5, 4 of them texts" in said
    assert likes("warm", "please please go", "stop stop go") > before + 0.5
    assert read_checkpoint(checkpoints_dir() / "warm").trained_on.run_ids == ("good",)


def test_rows_longer_than_the_context_are_named_and_left_out(
    tiny: Path, tmp_path: Path, nano: Callable[..., tuple[int, str]]
) -> None:
    """By file and line, of each command that trains on fixed rows."""
    talk, told = tmp_path / "talk.jsonl", {"role": "assistant", "content": "please go"}
    short, long = ({"messages": [{"role": "user", "content": "go " * n}, told]} for n in (3, 2000))
    talk.write_text("".join(json.dumps(row) + "\n" for row in (short, long, short)))
    model = ("--model", tiny, *FAST)
    code, said = nano("sft", "--messages", talk, "--name", "short", *model)
    assert code == 0, said
    assert f"left out: 1 longer than the model's context; the first: {talk}:2 has " in said
    assert "imitation 1/1  loss " in said  # a line a step where stderr is no terminal
    pairs = pairs_file(tmp_path, [{"prompt": "go " * 2000, "chosen": "a", "rejected": "b"}])
    for command in ("dpo", "reward-model"):
        code, said = nano(command, "--pairs", pairs, "--name", "none", *model)
        assert code == 2
        assert f"the first: {pairs}, pair 1 chosen has " in said
        assert "no pair fits the context of the model" in said


def test_the_end_of_a_turn_is_the_samplers_also_where_the_tokenizer_names_none(
    tiny: Path, tmp_path: Path, nano: Callable[..., tuple[int, str]]
) -> None:
    bare, talk = tmp_path / "bare", tmp_path / "talk.jsonl"
    shutil.copytree(tiny, bare)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (bare / name).exists():
            kept = json.loads((bare / name).read_text())
            kept.pop("eos_token", None)
            (bare / name).write_text(json.dumps(kept))
    opened = open_weights(str(bare))
    assert opened.loaded.tokenizer.eos_token_id is None
    assert reader_of(opened).eos_id in opened.loaded.eos_ids
    talk.write_text(
        json.dumps({"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "go"}]})
    )
    code, said = nano("sft", "--messages", talk, "--name", "bare", "--model", bare, *FAST)
    assert code == 0, said
    pairs = pairs_file(tmp_path, rows(4))
    code, said = nano("dpo", "--pairs", pairs, "--name", "bare2", "--model", bare, *FAST)
    assert code == 0, said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            "2: row: no assistant message is left to train on",
        ),
        ('{"messages": [{"role": "user"}]}', r"2: messages\.0\.content: Field required"),
        (
            '{"messages": [{"role": "assistant", "content": "a", "tool_calls": []}]}',
            r"2: messages\.0\.tool_calls: Extra inputs are not permitted",
        ),
        ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "2: .*half of a surrogate pair"),
        ('{"text": "a"}', "2: messages: Field required; the fields are messages"),
        (
            '{"messages": [{"role": "assistant", "content": null, "tool_calls": []}]}',
            r"2: messages\.0\.content: is null; write tool calls into the text",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}',
            r"2: messages\.0\.content: Input should be a valid string",
        ),
        (
            '{"messages": [{"role": "user", "content": "a", "weight": 1}]}',
            r"2: messages\.0: only assistant messages have a weight",
        ),
        ("{", "2: row: is not JSON"),
    ],
)
def test_a_bad_conversation_is_named_by_line_and_field(
    line: str, said: str, tiny: Path, tmp_path: Path
) -> None:
    from nano_rl.imitation import read_messages

    good = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    (tmp_path / "talk.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(UsageError, match=said):
        read_messages(tmp_path / "talk.jsonl", reader_of(open_weights(str(tiny))))


def test_parts_of_text_are_its_text() -> None:
    from nano_rl.imitation import ChatMessage

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatMessage.model_validate({"role": "user", "content": parts}).content == "ab"


TALK = '{"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": "please"}]}'


def test_an_adapter_is_trained_on_at_its_own_rank(
    tiny: Path, tmp_path: Path, nano: Callable[..., tuple[int, str]]
) -> None:
    talk = tmp_path / "talk.jsonl"
    talk.write_text(TALK + "\n")
    ranks = []
    for model, name, more in ((tiny, "first", ["--lora-rank", 2]), ("first", "second", [])):
        assert nano("sft", "--messages", talk, "--model", model, "--name", name, "--epochs", 1, *more)[0] == 0
        manifest = read_checkpoint(checkpoints_dir() / name)
        ranks.append((manifest.kind, manifest.config["lora_rank"], rank_of(name)))
    assert ranks == [("adapter", 2, 2)] * 2
    for command in (
        ["sft", "--messages", talk, "--name", "third"], ["dpo", "--pairs", talk, "--name", "third"],
        ["train", "--from-logs", "--name", "third"], ["train", "--tasks", talk, "--name", "third"], ["plan"],
    ):  # fmt: skip
        for other in (8, 0):
            code, said = nano(*command, "--model", "first", "--lora-rank", other)
            assert code == 2
            assert f"--lora-rank: lora_rank is {other}, and first is an adapter of rank 2" in said
            assert "nano-rl checkpoints export first --to FOLDER" in said
    assert not (checkpoints_dir() / "third").exists()


def test_messages_of_weight_0_are_shown_and_not_trained(tiny: Path) -> None:
    reader = reader_of(open_weights(str(tiny)))
    talk = [
        Message(role=role, content=text)
        for role, text in [
            (Role.USER, "go"), (Role.ASSISTANT, "stop"), (Role.USER, "then"), (Role.ASSISTANT, "please"),
            (Role.USER, "now"),
        ]
    ]  # fmt: skip
    (row,) = reader.messages("row", talk, [False, False, False, True, False])
    trained = [i for i, m in zip(row.ids, row.mask, strict=True) if m]
    assert trained == [*reader.template.encoder.text("please"), reader.eos_id]
    # the whole row is what the template writes of the same conversation, up to the last trained token
    whole = reader.template.render(talk[:4], generation_prompt=False)
    assert reader.template.encoder.decode(row.ids) == whole.removesuffix("\n")


def test_sft_without_a_source_is_refused(nano: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, said = nano("sft", "--name", "none")
    assert (code, said) == (2, "error: name what to imitate: --tasks FILE, --from-logs or --messages FILE\n")
