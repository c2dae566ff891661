"""Decoding steps on a GPU as recorded graphs: one launch a step in place of some two thousand.

A step of a small model takes a GPU less time than Python needs to launch its kernels. So the step is
recorded (`torch.cuda.CUDAGraph`) once it comes again with the same blocks of KV, and replayed for as long as
they stay: tokens, positions, lengths and the rows of each prefix are read from memory that is written before
each replay. Rows that left are computed and ignored, and so are positions beyond each row's length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nano_coder.models.local.attention import Arena, DecodeAttention, SharedPrefixes
from nano_coder.models.local.llama import LlamaForward

_ROWS = 8
"""rows by which a recorded step is rounded up"""
_POSITIONS = 128
"""positions by which a recorded step is rounded up; an eighth of them from 1,024 on"""
_WASTE = 4
"""a step that reads more than this many times the positions, or rows, is recorded anew"""


class DecodeGraph:
    """The recorded step of one decoder."""

    def __init__(self, forward: LlamaForward) -> None:
        self._forward = forward
        self._recorded: _Recorded | None = None
        self._before: tuple[int, ...] | None = None
        """what the last step would have recorded"""

    def forget(self) -> None:
        """Let go of the recorded step and the blocks of KV that it reads."""
        self._recorded = None

    def step(
        self,
        arena: Arena,
        prefixes: SharedPrefixes,
        lengths_B: Sequence[int],
        ids_B: Sequence[int],
        positions_B: Sequence[int],
    ) -> Tensor | None:
        """[B, V] logits after the last token of each row; None where the step is not worth to be recorded
        yet. `lengths_B`: positions already in each row's slot."""
        step = _Step(prefixes, lengths_B, ids_B, positions_B)
        if self._recorded is None or not self._recorded.fits(arena, step):
            stays = self._recorded is not None and self._recorded.reads(arena, prefixes)
            self._recorded = None
            size = min(-(-step.rows // _ROWS) * _ROWS, arena.kv.shape[2])
            length = min(_rounded(step.longest), arena.kv.shape[4])
            sizes = (arena.kv.data_ptr(), prefixes.kv.data_ptr(), size, length)
            if not stays and self._before != sizes:
                self._before = sizes
                return None
            self._recorded = _Recorded(self._forward, arena, step, size, length)
        self._before = None
        return self._recorded.replay(step)


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """What a step reads; the rows are those of `DecodeGraph.step`."""

    prefixes: SharedPrefixes
    lengths_B: Sequence[int]
    ids_B: Sequence[int]
    positions_B: Sequence[int]

    @property
    def rows(self) -> int:
        return len(self.ids_B)

    @property
    def longest(self) -> int:
        """Positions of the longest slot, the new one included."""
        return max(self.lengths_B) + 1

    def inputs(self, size: int) -> Tensor:
        """[3, size] ids, positions and slot lengths; a row that left writes to the first position of a slot
        that nobody reads."""
        idle = size - self.rows
        seen_B = [length + 1 for length in self.lengths_B]
        return torch.tensor(
            [[*self.ids_B, *[0] * idle], [*self.positions_B, *[0] * idle], [*seen_B, *[1] * idle]]
        )


class _Recorded:
    """One step for a number of rows and positions, over fixed blocks of KV."""

    def __init__(self, forward: LlamaForward, arena: Arena, step: _Step, size: int, length: int) -> None:
        self._kv, self._size, self._length = arena.kv, size, length
        self._widest = min(-(-step.prefixes.widest // _ROWS) * _ROWS, size)
        self._prefixes = step.prefixes.padded(size, self._widest)
        self._read = step.prefixes
        """the prefixes whose groups are read now"""
        self._inputs_3B = step.inputs(size).to(arena.kv.device)
        ids_B, positions_B, seen_B = self._inputs_3B

        def run() -> Tensor:
            attention = DecodeAttention.of_tensors(arena, seen_B, length, self._prefixes)
            return forward.logits(forward.hidden(ids_B, positions_B, attention))

        self._logits_BV, self._again = record(run)

    def reads(self, arena: Arena, prefixes: SharedPrefixes) -> bool:
        return self._kv is arena.kv and self._prefixes.kv is prefixes.kv

    def fits(self, arena: Arena, step: _Step) -> bool:
        fits = step.rows <= self._size and step.longest <= self._length
        wasteful = (
            self._size > max(_ROWS, _WASTE * step.rows)
            or self._length > max(_POSITIONS, _WASTE * step.longest)
        )  # fmt: skip
        wide = step.prefixes.widest > self._widest
        return self.reads(arena, step.prefixes) and fits and not wide and not wasteful

    def replay(self, step: _Step) -> Tensor:
        if self._read is not step.prefixes:
            self._prefixes.regroup(step.prefixes.padded(self._size, self._widest))
            self._read = step.prefixes
        self._inputs_3B.copy_(step.inputs(self._size))
        self._again()
        return self._logits_BV[: step.rows].clone()


def record(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """What `run` returns, and a function that computes it anew in the same memory."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # other threads may use the device meanwhile
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return result, graph.replay


def _rounded(positions: int) -> int:
    step = max(_POSITIONS, 1 << max(0, positions.bit_length() - 4))
    return -(-positions // step) * step
