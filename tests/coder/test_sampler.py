"""The sampler draws from the distribution it reports, to the last token of a large vocabulary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nano_coder.models.local.sampler import draw, uniforms
from nano_shared.types import Sampling

pytestmark = pytest.mark.usefixtures("one_thread")
PLAIN = Sampling()


def drawn(logits_V: torch.Tensor, count: int, sampling: Sampling = PLAIN, seed: int = 0) -> list[int]:
    tokens, _ = draw(logits_V.expand(count, -1), [sampling] * count, uniforms(seed, count))
    return tokens


def chi_square(tokens: list[int], probs_V: torch.Tensor) -> tuple[float, int]:
    """The statistic over bins of at least five expected draws, and its degrees of freedom."""
    order = probs_V.argsort(descending=True)
    expected = probs_V[order].double() * len(tokens)
    observed = torch.bincount(torch.tensor(tokens), minlength=len(probs_V))[order].double()
    kept = expected >= 5
    expected = torch.cat([expected[kept], expected[~kept].sum()[None]])
    observed = torch.cat([observed[kept], observed[~kept].sum()[None]])
    if expected[-1] < 5:
        expected, observed = expected[:-1], observed[:-1]
    return float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1


@pytest.mark.some(4)
@pytest.mark.parametrize("size", [7, 128, 300, 1536])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_draws_follow_the_distribution_by_chi_square(size: int, temperature: float) -> None:
    logits_V = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 2
    probs_V = torch.softmax(logits_V.double() / temperature, -1)
    statistic, freedom = chi_square(drawn(logits_V, 20_000, Sampling(temperature=temperature)), probs_V)
    # four deviations of a chi-square, whose variance is twice its degrees of freedom
    assert freedom > 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_the_check_by_chi_square_can_fail() -> None:
    logits_V = torch.randn(300, generator=torch.Generator().manual_seed(1))
    wrong_V = torch.softmax(logits_V.double() / 1.1, -1)
    statistic, freedom = chi_square(drawn(logits_V, 20_000), wrong_V)
    assert statistic > freedom + 4 * (2 * freedom) ** 0.5


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 700),
    seed=st.integers(0, 2**20),
    uniform=st.floats(0, 1, exclude_max=True),
    spread=st.floats(0, 30),
    dropped=st.integers(0, 5),
)
def test_a_token_is_the_one_where_the_cdf_passes_the_uniform(
    size: int, seed: int, uniform: float, spread: float, dropped: int
) -> None:
    """Against the plain inverse CDF in float64, up to the rounding of the block sums; and its log-prob."""
    generator = torch.Generator().manual_seed(seed)
    logits_V = torch.randn(size, generator=generator) * spread
    logits_V[torch.randperm(size, generator=generator)[: min(dropped, size - 1)]] = -torch.inf
    ((token,), (logprob,)) = draw(logits_V[None], [PLAIN], [uniform])
    probs_V = torch.softmax(logits_V.double(), -1)
    cdf_V = probs_V.cumsum(0)
    assert probs_V[token] > 0
    assert float(cdf_V[token] - probs_V[token]) - 1e-6 <= uniform <= float(cdf_V[token]) + 1e-6
    assert logprob == pytest.approx(float(probs_V[token].log()), abs=2e-6, rel=1e-6)


def test_the_ends_of_the_uniform_draw_the_ends_of_the_vocabulary() -> None:
    logits_V = torch.zeros(1000)
    logits_V[:3] = logits_V[-2:] = -torch.inf
    last = torch.nextafter(torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64))
    assert draw(logits_V.expand(2, -1), [PLAIN] * 2, [0.0, last.item()])[0] == [3, 997]


def test_the_tail_of_a_large_vocabulary_is_drawn() -> None:
    """In float32 partial sums the second half of such a vocabulary would vanish behind the first token."""
    logits_V = torch.full((49_152,), -17.0)
    logits_V[0] = 0.0
    share = 49_151 * torch.tensor(-17.0).double().exp().item()
    tail = 1 - 0.5 * share / (1 + share)
    ((token,), _) = draw(logits_V[None], [PLAIN], [tail])
    assert token == pytest.approx(49_152 / 2, rel=0.01)


def test_logits_are_left_as_they_were() -> None:
    logits_BV = torch.randn(4, 200)
    before = logits_BV.clone()
    settings_ = [Sampling(), Sampling(temperature=0), Sampling(top_k=3), Sampling(temperature=0.5, top_p=0.4)]
    draw(logits_BV, settings_, [0.5] * 4)
    assert torch.equal(logits_BV, before)


def test_rows_of_other_settings_do_not_touch_each_other() -> None:
    logits_BV = torch.randn(4, 200, generator=torch.Generator().manual_seed(3))
    rows = [Sampling(), Sampling(temperature=0), Sampling(top_k=3), Sampling(temperature=0.5, top_p=0.4)]
    tokens, logprobs = draw(logits_BV, rows, [0.1, 0.3, 0.6, 0.9])
    for row, sampling in enumerate(rows):
        alone = draw(logits_BV[row : row + 1], [sampling], [[0.1, 0.3, 0.6, 0.9][row]])
        assert alone[0] == [tokens[row]]
        assert alone[1] == pytest.approx([logprobs[row]], abs=1e-6)


def test_uniforms_are_those_of_the_seed() -> None:
    assert uniforms(3, 5) == uniforms(3, 9)[:5]
    assert uniforms(3, 5) != uniforms(4, 5)
    assert uniforms(None, 5) != uniforms(None, 5)


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-31, 1e-20, 1e-6])
def test_a_temperature_near_zero_draws_the_likeliest_and_leaves_other_rows_alone(temperature: float) -> None:
    logits_BV = torch.randn(2, 300, generator=torch.Generator().manual_seed(5)) * 9
    cold = Sampling(temperature=temperature)
    (first, second), (logprob, other) = draw(logits_BV, [cold, PLAIN], [0.999, 0.5])
    assert (first, logprob) == (int(logits_BV[0].argmax()), 0.0)
    assert ([second], [other]) == draw(logits_BV[1:], [PLAIN], [0.5])
