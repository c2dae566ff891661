"""Weights that are laid out anew give the products that they gave before."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from nano_coder.models.local.llama import Joined, Linear, LlamaWeights, packs
from nano_shared.lora import LowRank

DTYPES = [torch.bfloat16, torch.float32]


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights(out: int, inputs: int, dtype: torch.dtype, *, bias: bool, seed: int = 1) -> LlamaWeights:
    return LlamaWeights(drawn(out, inputs, dtype=dtype, seed=seed), drawn(out, dtype=dtype) if bias else None)


def close(left: Tensor, right: Tensor) -> bool:
    # another kernel may sum in another order: the last bit of a bfloat16 at the size of the largest value
    return bool((left.float() - right.float()).abs().max() <= 2**-7 * right.float().abs().max())


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 70),
    st.sampled_from([8, 24, 64, 192]),
    st.integers(1, 80),
    st.booleans(),
)
def test_a_layer_is_the_linear_function(
    dtype: torch.dtype, rows: int, inputs: int, out: int, bias: bool
) -> None:
    layer = weights(out, inputs, dtype, bias=bias)
    x = drawn(rows, inputs, dtype=dtype, seed=2)
    for small in (True, False):
        assert close(Linear(layer, small=small)(x), F.linear(x, layer.matrix, layer.bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
@pytest.mark.parametrize("biased", [(False, False, False), (True, True, True), (True, False, True)])
def test_joined_layers_are_those_layers(dtype: torch.dtype, biased: tuple[bool, ...], small: bool) -> None:
    parts = [weights(out, 64, dtype, bias=bias) for out, bias in zip((48, 16, 16), biased, strict=True)]
    x = drawn(5, 64, dtype=dtype, seed=2)
    joined = Joined(parts, small=small)(x)
    assert [part.shape for part in joined] == [(5, 48), (5, 16), (5, 16)]
    for part, layer in zip(joined, parts, strict=True):
        assert close(part, F.linear(x, layer.matrix, layer.bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
@pytest.mark.parametrize("ranks", [(4, 2, 4), (4, 0, 4)], ids=["all", "one without an adapter"])
def test_joined_layers_have_their_own_adapters(
    dtype: torch.dtype, ranks: tuple[int, ...], small: bool
) -> None:
    plain = [weights(out, 64, dtype, bias=True) for out in (48, 16, 16)]
    adapters = [
        LowRank(drawn(rank, 64, dtype=torch.float32), drawn(len(part.matrix), rank, dtype=torch.float32), 0.5)
        for part, rank in zip(plain, ranks, strict=True)
    ]
    parts = [
        part._replace(adapter=a if len(a.down) else None) for part, a in zip(plain, adapters, strict=True)
    ]
    x = drawn(5, 64, dtype=dtype, seed=2)
    for found, part, (down, up, scaling) in zip(Joined(parts, small=small)(x), plain, adapters, strict=True):
        merged = part.matrix.float() + scaling * up @ down
        assert close(found, F.linear(x.float(), merged, None if part.bias is None else part.bias.float()))


def test_float32_of_a_large_model_is_not_copied() -> None:
    assert not packs(drawn(8, 8, dtype=torch.float32), small=False)
    layer = weights(8, 8, torch.float32, bias=False)
    assert Linear(layer).matrix is layer.matrix


def test_float32_of_a_small_model_is_packed_where_the_processor_has_no_avx512(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrix = drawn(8, 8, dtype=torch.float32)
    for capability, packed in (("AVX2", True), ("AVX512", False)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=capability: name)
        assert packs(matrix, small=True) == packed
