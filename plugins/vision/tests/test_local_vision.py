"""Local vision-language models: prompts and pixels are the processor's, log-probs and gradients those of
transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from executions import a_runtime, a_task
from pictures import picture
from tiny_vision import build_tiny_vision
from typer.testing import CliRunner

from nano_coder.agent.profiles import find_profile
from nano_coder.models.opening import MODELS, ModelOptions, name_to_train
from nano_coder.run.execution import run_task
from nano_rl.cli import cli
from nano_rl.learn.objectives import find_objective
from nano_shared.errors import ContextFull, UsageError
from nano_shared.files import checkpoints_dir
from nano_shared.policy import Conversation, Policy, sees
from nano_shared.types import ImageRef, Message, Role, Sampling, Shaping, StopReason, Trust, Verdict
from nano_vision.image_file import read_image
from nano_vision.model import VisionModel, load_vision
from nano_vision.policy import VisionPolicy
from nano_vision.training import (
    VisionRow,
    add_adapter,
    add_gradients,
    refusal_of,
    row_logprobs,
    vision_rows,
)

FAMILIES = ("qwen2_5_vl", "idefics3")
FILES = {
    read_image(data, "x").blob: data for data in (picture(40, 30), picture(64, 64), picture(30, 30, "JPEG"))
}
IMAGES = tuple(read_image(data, "x") for data in FILES.values())
LETTERS = Shaping(allowed_token_ids=tuple(range(33, 80)))
"""keeps the texts of a random model to what a template renders again as it was"""


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def policy(folder: Path) -> VisionPolicy:
    return VisionPolicy(load_vision(str(folder)))


def asked(*images: ImageRef, content: str = "What is <image> and <|image_pad|>?") -> Conversation:
    conversation = Conversation((Message(role=Role.USER, content=content, images=images),))
    conversation.get_blob = FILES.__getitem__
    return conversation


def plain_forward(loaded: VisionModel, ids: Any, images: Any) -> torch.Tensor:
    """[L, V] log-probs by transformers alone: pixels of its processor, positions of its own."""
    loaded.model.model.rope_deltas = None
    pixels = loaded.look(images, FILES.__getitem__).tensors
    ids_1L = torch.tensor([ids])
    more = {}
    if "image_grid_thw" in pixels:
        more["mm_token_type_ids"] = (ids_1L == loaded.model.config.image_token_id).long()
    with torch.no_grad():
        out = loaded.model(input_ids=ids_1L, attention_mask=torch.ones_like(ids_1L), **pixels, **more)
    return out.logits[0].float().log_softmax(-1)


def test_the_prompt_is_that_of_the_processor(policy: VisionPolicy) -> None:
    """Of a text that spells no token: the processor takes what a user types for a token."""
    loaded = policy.loaded
    answer = policy.complete(asked(*IMAGES[:2], content="What?"), Sampling(max_tokens=1, seed=0))
    parts = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "What?"}]
    text = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    opened = [loaded.look([image], FILES.__getitem__) for image in IMAGES[:2]]
    pieces = text.split(loaded.processor.image_token)
    whole = "".join(p for pair in zip(pieces, [*(o.texts[0] for o in opened), ""], strict=True) for p in pair)
    assert answer.tokens is not None
    assert list(answer.tokens.context_ids) == loaded.tokenizer(whole, add_special_tokens=False)["input_ids"]
    image_id = loaded.tokenizer.convert_tokens_to_ids(loaded.processor.image_token)
    spelled = policy.complete(asked(*IMAGES[:2]), Sampling(max_tokens=1, seed=0)).tokens
    assert spelled is not None
    assert spelled.context_ids.count(image_id) == answer.tokens.context_ids.count(image_id)


def test_log_probs_are_those_of_a_whole_forward_pass_and_the_row_goes_on(policy: VisionPolicy) -> None:
    conversation = asked(IMAGES[0])
    first = policy.complete(conversation, Sampling(max_tokens=5, seed=1, shaping=LETTERS))
    conversation.record(first)
    conversation.append(Message(role=Role.TOOL, content="shot.png", images=IMAGES[1:2]))
    # a row of text alone in between does not shift the positions of this one
    policy.complete(asked(content="no image"), Sampling(max_tokens=3, seed=3))
    second = policy.complete(conversation, Sampling(max_tokens=5, seed=2, shaping=LETTERS))
    assert first.tokens is not None
    assert second.tokens is not None
    # Idefics3's template writes a space before an answer, which this model has not sampled: a new row
    goes_on = second.tokens.row == 0
    assert goes_on == (policy.loaded.model.config.model_type == "qwen2_5_vl")
    before = conversation.tokens if goes_on else []
    ids = (*before, *second.tokens.context_ids, *second.tokens.sampled_ids)
    rows = [(first, conversation.tokens, IMAGES[:1]), (second, ids, IMAGES[:2])]
    for turn, row, images in rows:
        assert turn.tokens is not None
        logprobs = plain_forward(policy.loaded, row, images)
        places = range(len(row) - len(turn.tokens.sampled_ids), len(row))
        again = [float(logprobs[at - 1, row[at]]) for at in places]
        assert turn.tokens.logprobs == pytest.approx(again, abs=1e-4)
    assert policy.decode(ids).count(policy.decode(first.tokens.sampled_ids)) == 1


def test_greedy_decoding_is_that_of_generate(policy: VisionPolicy) -> None:
    loaded, conversation = policy.loaded, asked(*IMAGES[:2])
    answer = policy.complete(conversation, Sampling(temperature=0, max_tokens=6)).tokens
    assert answer is not None
    given = loaded.arguments(answer.context_ids, loaded.look(IMAGES[:2], FILES.__getitem__))
    made = loaded.model.generate(**given, do_sample=False, max_new_tokens=6)
    assert tuple(made[0, len(answer.context_ids) :].tolist())[: len(answer.sampled_ids)] == answer.sampled_ids


def test_the_model_sees_the_pixels(policy: VisionPolicy) -> None:
    """Two images of one size: equal ids, other log-probs."""
    red, noise = picture(40, 40), picture(40, 40, "JPEG", quality=1)
    FILES.update({read_image(data, "x").blob: data for data in (red, noise)})
    sampling = Sampling(temperature=0, max_tokens=1)
    one, other = (policy.complete(asked(read_image(d, "x")), sampling).tokens for d in (red, noise))
    assert one is not None
    assert other is not None
    assert one.context_ids == other.context_ids
    assert one.logprobs != other.logprobs


def test_a_run_of_the_agent_logs_the_row(policy: VisionPolicy, folder: Path, tmp_path: Path) -> None:
    assert isinstance(policy, Policy)
    assert sees(policy)
    runtime = a_runtime(tmp_path, policy=policy, profile=find_profile(policy.profile),
                        sampling=Sampling(max_tokens=4))  # fmt: skip
    runtime.store.blobs.put(FILES[IMAGES[0].blob])
    run = run_task(a_task(images=IMAGES[:1]), runtime, seed=0)
    assert run.stop is StopReason.FORMAT_ERRORS
    assert run.has_tokens
    assert runtime.store.get(run.id) == run
    with pytest.raises(ContextFull, match="show smaller images"):
        policy.complete(asked(*IMAGES * 40, content="x" * 4096), Sampling())
    with pytest.raises(UsageError, match="trained where its weights are"):
        name_to_train(f"vision:{folder}")


def a_row(policy: VisionPolicy, seed: int, advantage: float, images: Any) -> VisionRow:
    from nano_rl.learn.groups import TrainSample

    tokens = policy.complete(asked(*images), Sampling(max_tokens=5, seed=seed)).tokens
    assert tokens is not None
    context, sampled = len(tokens.context_ids), len(tokens.sampled_ids)
    sample = TrainSample(
        run_id=f"r{seed}", ids=(*tokens.context_ids, *tokens.sampled_ids),
        mask=(0,) * context + (1,) * sampled, logprobs=(0.0,) * context + tokens.logprobs,
        versions=(0,) * (context + sampled), advantage=advantage, temperature=1.0,
    )  # fmt: skip
    return VisionRow(sample=sample, pixels=policy.loaded.look(images, FILES.__getitem__))


def test_the_gradient_of_a_lora_step_is_that_of_plain_transformers(folder: Path) -> None:
    """The reference: transformers' cross-entropy on the same pixels and ids, weighted by hand."""
    loaded = load_vision(str(folder))
    loaded = loaded.with_model(add_adapter(loaded.model, rank=4, seed=0))
    with torch.no_grad():  # a fresh adapter's product is 0, and so is half of its gradient
        for name, parameter in loaded.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05, generator=torch.Generator().manual_seed(len(name)))
    # sampled by the adapted weights, so that the importance weights are 1
    policy = VisionPolicy(loaded)
    rows = [a_row(policy, 1, 0.5, IMAGES[:2]), a_row(policy, 2, -0.5, IMAGES[1:2])]
    trained = {n: p for n, p in loaded.model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in n and "vision" not in n and "visual" not in n for n in trained)
    metrics = add_gradients(loaded, rows, find_objective("recipe").with_terms(aggregation="sequence"))
    assert metrics["ratio_deviation_max"] == 0
    assert metrics["mismatch_max"] < 1e-4
    ours = {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}
    loaded.model.zero_grad()

    # the share of a token is 1 / (trajectories x its trajectory's tokens); the ratio is 1
    for row in rows:
        ids = torch.tensor([row.sample.ids])
        more = {}
        if "image_grid_thw" in row.pixels.tensors:
            base = loaded.model.get_base_model()
            base.model.rope_deltas = None
            more["mm_token_type_ids"] = (ids == base.config.image_token_id).long()
        logits = loaded.model(
            input_ids=ids, attention_mask=torch.ones_like(ids), **row.pixels.tensors, **more
        ).logits
        labels = torch.where(torch.tensor([row.sample.mask]).bool(), ids, -100)
        mean = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])
        (row.sample.advantage / len(rows) * mean).backward()
    assert set(ours) == set(trained)
    for name, parameter in trained.items():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_logged_runs_with_images_train_an_adapter_that_can_be_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANO_HOME", str(tmp_path / "home"))
    policy = VisionPolicy(load_vision(str(folder)))
    runtime = a_runtime(tmp_path, policy=policy, profile=find_profile(policy.profile),
                        sampling=Sampling(max_tokens=4))  # fmt: skip
    runtime.store.blobs.put(FILES[IMAGES[0].blob])
    task, runs = a_task(images=IMAGES[:1], tools=()), []
    for seed, reward in ((0, 1.0), (1, 0.0)):
        run = run_task(task, runtime, seed=seed)
        verdict = Verdict(reward=reward, trust=Trust.HIDDEN, grader="test", graded_hash="x")
        runtime.store.add_verdict(run.id, verdict)
        runs.append(runtime.store.get(run.id))
    assert [refusal_of(run, policy.id) for run in runs] == [None, None]
    assert refusal_of(runs[0], "another") == "sampled by other weights"

    arguments = ["vision", "--model", f"vision:{folder}", "--log", str(tmp_path / "log.db")]
    arguments += ["--learning-rate", "0.01", "--lora-rank", "4"]
    done = CliRunner().invoke(cli, [*arguments, "--name", "seen"])
    assert done.exit_code == 0, done.exception
    opened = MODELS.find("vision")(str(checkpoints_dir() / "seen"), ModelOptions())
    assert isinstance(opened, VisionPolicy)
    assert opened.id != policy.id
    (rows,) = vision_rows(runs, policy.loaded, runtime.store.get_blob)
    before = [gain(policy.loaded, row) for row in rows]
    assert sum(gain(opened.loaded, row) for row in rows) > sum(before), "what was rewarded became likelier"

    for more, said in (
        (["--name", "seen"], "there is a checkpoint of that name"),
        (["--name", "other", "--task", "none-*"], "no task of the log has two runs"),
    ):
        refused = CliRunner().invoke(cli, [*arguments, *more])
        assert isinstance(refused.exception, UsageError)
        assert said in str(refused.exception)


@torch.no_grad()
def gain(loaded: VisionModel, row: VisionRow) -> float:
    """Log-prob of what was sampled, times its advantage."""
    logprobs = row_logprobs(loaded, row)[0]
    return float((logprobs * torch.tensor(row.sample.mask)).sum()) * row.sample.advantage


@pytest.mark.parametrize("name", ["nowhere", "./no/such/folder"])
def test_what_is_no_vision_model_is_refused(name: str, tiny_folder: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        load_vision(name)
    with pytest.raises(UsageError, match="vision"):
        load_vision(str(tiny_folder))
