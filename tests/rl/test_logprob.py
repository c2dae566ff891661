"""Log-probs of trained tokens equal the naive computation over full logits, in value and gradient."""

from __future__ import annotations

import pytest
import torch
from builders import VOCABULARY, terms, tiny_llama, trajectory, turn
from torch import Tensor, nn

from nano_rl.learn.batch import Batch, make_batches
from nano_rl.learn.groups import to_samples
from nano_rl.learn.logprob import can_share, score_tokens, token_logprobs
from nano_rl.learn.loss import mean_metrics, policy_loss
from nano_shared.errors import ConfigError
from nano_shared.types import Sampling


def batch_of(*rows: tuple[int, int, float], dtype: torch.dtype = torch.float64) -> Batch:
    """One batch of two-turn rows given as (context, sampled, temperature)."""
    samples = []
    for i, (context, sampled, temperature) in enumerate(rows):
        s = Sampling(temperature=temperature)
        turns = turn(context, sampled, sampling=s), turn(2, sampled, sampling=s, index=1)
        samples += to_samples(trajectory(*turns, run_id=f"run-{i}"), 1.0 - 2 * (i % 2))
    (batch,) = make_batches(samples, max_tokens=10_000, dtype=dtype)
    return batch


def naive_logprobs(model: nn.Module, batch: Batch) -> Tensor:
    """The textbook: all logits, softmax at the row's temperature, shift by one, gather, mask."""
    logits = model(input_ids=batch.ids_BT, attention_mask=batch.attention_BT).logits
    logprobs = (logits / batch.temperature_B[:, None, None]).log_softmax(-1)[:, :-1]
    picked = logprobs.gather(2, batch.ids_BT[:, 1:, None]).squeeze(2)
    return nn.functional.pad(picked, (1, 0)) * batch.mask_BT


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def lora(model: nn.Module, **settings: float) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **settings)
    return get_peft_model(model, config)


ROWS = (3, 4, 1.0), (5, 2, 0.6), (1, 1, 1.7)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 1000])
@pytest.mark.parametrize("tied", [False, True])
def test_value_and_gradient_equal_full_logits(chunk_tokens: int, tied: bool) -> None:
    batch = batch_of(*ROWS)
    weights = torch.linspace(-1, 1, batch.mask_BT.numel(), dtype=torch.float64).view(batch.mask_BT.shape)
    model, reference = (tiny_llama(tie_word_embeddings=tied) for _ in range(2))
    actual = token_logprobs(model, batch, chunk_tokens=chunk_tokens)
    expected = naive_logprobs(reference, batch)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    (actual * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(gradients(model), gradients(reference), rtol=0, atol=1e-11)


def test_peft_model_value_and_gradient_equal_full_logits() -> None:
    batch = batch_of(*ROWS)
    model = lora(tiny_llama())
    bare = token_logprobs(tiny_llama(), batch)
    actual = token_logprobs(model, batch)
    assert (actual - bare).abs().max() > 1e-3
    actual.sum().backward()
    gradient = gradients(model)
    model.zero_grad()
    expected = naive_logprobs(model, batch)
    expected.sum().backward()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, gradients(model), rtol=0, atol=1e-11)


def test_ac_20_logits_are_divided_by_the_temperature_of_the_row() -> None:
    """Tokens sampled at T carry log-probs at T; the trainer's agree, so that the mismatch is nil."""
    model, temperature = tiny_llama(torch.float32), 0.6
    torch.manual_seed(1)
    ids = [2, 5]
    sampled, logprobs = [], []
    with torch.no_grad():
        for _ in range(8):
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
            distribution = torch.distributions.Categorical(logits=logits / temperature)
            token = distribution.sample()
            sampled.append(int(token))
            logprobs.append(min(float(distribution.log_prob(token)), 0.0))
            ids.append(int(token))

    def mismatch(recorded: float) -> float:
        run = trajectory(turn([2, 5], sampled, logprobs=logprobs, sampling=Sampling(temperature=recorded)))
        (batch,) = make_batches(to_samples(run, 1.0), max_tokens=100)
        return mean_metrics([policy_loss(token_logprobs(model, batch), batch, terms())[1]])["mismatch_max"]

    assert mismatch(temperature) < 1e-4
    assert mismatch(1.0) > 0.05


def test_ac_29_padded_rows_equal_rows_alone() -> None:
    model, together = tiny_llama(), batch_of(*ROWS)
    padded = token_logprobs(model, together)
    for row, length in enumerate(together.attention_BT.sum(1).tolist()):
        alone = next(b for b in map(batch_of, ROWS) if b.ids_BT.shape[1] == length)
        torch.testing.assert_close(padded[row, :length], token_logprobs(model, alone)[0], rtol=0, atol=1e-12)


def test_ac_37_dropout_is_off_in_every_pass() -> None:
    model = lora(tiny_llama(attention_dropout=0.5), lora_dropout=0.5)
    batch = batch_of(*ROWS)
    scored = token_logprobs(model.eval(), batch)
    model.train()
    assert not torch.equal(naive_logprobs(model, batch), scored)  # the dropout is real
    trained = token_logprobs(model, batch)
    assert torch.equal(trained, scored)
    trained.sum().backward()
    assert model.training
    assert all(module.training for module in model.modules())


def test_scoring_twice_is_bit_identical_with_and_without_gradient() -> None:
    model, batch = tiny_llama(torch.float32), batch_of(*ROWS, dtype=torch.float32)
    with torch.no_grad():
        old = token_logprobs(model, batch)
    new = token_logprobs(model, batch)
    assert torch.equal(old, new.detach())
    _, metrics = policy_loss(new, batch.with_old(old), terms())
    assert metrics["ratio_deviation_max"] == 0.0


def test_head_sees_only_trained_positions_a_chunk_at_a_time() -> None:
    model, batch = tiny_llama(), batch_of(*ROWS)
    can_share(model)  # which runs the model's own head once
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[0]))
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs = token_logprobs(model, batch, chunk_tokens=4)
    assert sum(seen) == int(batch.mask_BT.sum())
    assert max(seen) == 4
    # no logits wait for the backward pass: each chunk is recomputed there
    assert not [shape for shape in kept if shape[-1:] == (VOCABULARY,)]
    logprobs.sum().backward()
    assert max(seen) == 4


def test_nothing_trained_gives_zeros_that_still_have_a_gradient() -> None:
    (batch,) = make_batches(to_samples(trajectory(turn(4, 0)), 1.0), max_tokens=100)
    model = tiny_llama(torch.float32)
    logprobs = token_logprobs(model, batch)
    assert logprobs.tolist() == [[0.0] * 4]
    logprobs.sum().backward()
    assert gradients(model).abs().max() == 0


def test_low_precision_weights_give_float32_log_probs() -> None:
    batch = batch_of(*ROWS, dtype=torch.float32)
    assert token_logprobs(tiny_llama(torch.bfloat16), batch).dtype is torch.float32


def test_entropy_is_that_of_the_distribution_at_the_temperature() -> None:
    model, batch = tiny_llama(), batch_of(*ROWS)
    logits = model(input_ids=batch.ids_BT, attention_mask=batch.attention_BT).logits
    logits = logits / batch.temperature_B[:, None, None]
    expected = nn.functional.pad(torch.distributions.Categorical(logits=logits).entropy()[:, :-1], (1, 0))
    scores = score_tokens(model, batch)
    entropy = scores.entropy_BT
    assert torch.equal(scores.logprobs_BT, token_logprobs(model, batch))
    torch.testing.assert_close(entropy, expected.detach() * batch.mask_BT, rtol=0, atol=1e-12)
    assert not entropy.requires_grad


def test_prompt_learning_adapter_is_refused() -> None:
    from peft import PromptTuningConfig, TaskType, get_peft_model

    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)
    with pytest.raises(ConfigError, match="prompt-learning"):
        token_logprobs(get_peft_model(tiny_llama(), config), batch_of(*ROWS))
