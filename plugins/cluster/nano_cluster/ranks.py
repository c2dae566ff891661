"""The processes that torchrun starts: rank 0 runs the command, the others follow its orders.

An order is a key in torchrun's store, so that a rank that waits for one is in no collective, and so is the
answer to one: rollouts may take as long as they like, and a collective as long as `TIMEOUT` alone. While it
runs, each rank writes a heartbeat; who waits for a rank gives up when it has been silent for `TIMEOUT`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from nano_shared.errors import NanoError, RolloutsFailed

TIMEOUT = timedelta(minutes=5)
"""of every collective, and of the silence of a rank"""
GRACE_SECONDS = 5.0
"""silence of rank 0 after which a rank that was asked to end does"""
BEAT_SECONDS = 1.0
POLL_SECONDS = 0.01
JOIN, LEAVE = "join", "leave"


class RankLost(NanoError):
    """A process of the training is gone or silent."""

    exit_code = 4


class _Pulse:
    """The heartbeat of a rank, as another one hears it."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._key = store, f"nano/beat/{rank}"
        self._beat, self._looked = b"", 0.0
        self._heard = time.monotonic()

    def silence(self) -> float:
        """Seconds without a beat."""
        now = time.monotonic()
        if now - self._looked >= BEAT_SECONDS:
            self._looked = now
            if self._store.check([self._key]) and self._beat != (newest := self._store.get(self._key)):
                self._beat, self._heard = newest, now
        return now - self._heard


class Ranks:
    """This process among those that torchrun started."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank, self.size, self._store = rank, size, store
        self.joined = False
        """whether the process group is open"""
        self._asked_to_end = threading.Event()
        self._orders = 0

    @property
    def beside(self) -> int:
        """How many other ranks this machine has."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.size)) - 1

    @classmethod
    def connect(cls) -> Ranks:
        return cls(*next(iter(dist.rendezvous("env://", timeout=TIMEOUT))))

    def join(self, device: str) -> None:
        """Open the process group; all ranks do."""
        if os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if device == "cuda":
            torch.cuda.set_device(local_rank())
        with lost_explained():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                store=dist.PrefixStore("nano/group", self._store),
                rank=self.rank, world_size=self.size, timeout=TIMEOUT,
            )  # fmt: skip
        self.joined = True

    def order(self, name: str, /, **told: Any) -> None:
        """Give the other ranks an order; `told` is plain data."""
        with lost_explained():
            self._store.set(f"nano/order/{self._orders}", json.dumps([name, told]))
        self._orders += 1

    def orders(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The orders of rank 0 until it leaves. Raises RankLost if it is silent for too long."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._asked_to_end.set())
        while True:
            key = f"nano/order/{self._orders}"
            with lost_explained():
                self._wait(key)
            self._orders += 1
            name, told = json.loads(self._store.get(key))
            if name == LEAVE:
                return
            yield name, told

    def _wait(self, key: str) -> None:
        first = _Pulse(self._store, 0)
        while not self._store.check([key]):  # a wait with a time-out prints a warning each time
            time.sleep(POLL_SECONDS)
            if (silent := first.silence()) > self._patience:
                raise RankLost(f"rank 0 has been silent for {silent:.0f} s, so rank {self.rank} ends")

    @property
    def _patience(self) -> float:
        """Seconds that another rank may be silent."""
        return GRACE_SECONDS if self._asked_to_end.is_set() else TIMEOUT.total_seconds()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Do in the block what was ordered last, and let rank 0 know how it ended: a NanoError is raised
        there and not here, since rank 0 ends all. If rank 0 ends before, this process does at once."""
        over = threading.Event()
        threading.Thread(target=self._end_with_rank_0, args=(over,), daemon=True).start()
        failure: tuple[str, int] | None = ("it ended: see its own message above", RankLost.exit_code)
        try:
            yield
            failure = None
        except NanoError as problem:
            failure = str(problem), problem.exit_code
        finally:
            over.set()
            with lost_explained():
                self._store.set(self._answer(self.rank), json.dumps(failure))

    def _end_with_rank_0(self, over: threading.Event) -> None:
        first, key = _Pulse(self._store, 0), f"nano/order/{self._orders}"
        with suppress(dist.DistNetworkError):  # torchrun is gone
            while not self._store.check([key]) and first.silence() <= self._patience:
                if over.wait(BEAT_SECONDS):
                    return
        if not over.is_set():
            os._exit(RankLost.exit_code)

    def answered(self, rank: int) -> bool:
        """Whether a rank has done what was ordered last. Raises RolloutsFailed if it failed."""
        with lost_explained():
            if not self._store.check([self._answer(rank)]):
                return False
            if failure := json.loads(self._store.get(self._answer(rank))):
                raise RolloutsFailed(f"rank {rank}: {failure[0]}", failure[1])
        return True

    def await_answers(self) -> None:
        """Until all other ranks have done what was ordered last. Raises as `answered`, and RankLost."""
        waiting = {rank: _Pulse(self._store, rank) for rank in range(1, self.size)}
        while waiting := {rank: pulse for rank, pulse in waiting.items() if not self.answered(rank)}:
            time.sleep(POLL_SECONDS)
            with lost_explained():
                silences = {rank: pulse.silence() for rank, pulse in waiting.items()}
            for rank, silent in silences.items():
                if silent > self._patience:
                    raise RankLost(
                        f"rank {rank} has been silent for {silent:.0f} s; the same command goes on from the"
                        " last saved state"
                    )

    @contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """Note in the block that this process was asked to end, as torchrun asks when a rank has ended."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {int(n): handler for n in numbers if callable(handler := signal.getsignal(n))}

        def handle(number: int, frame: FrameType | None) -> None:
            self._asked_to_end.set()
            before[number](number, frame)

        for number in before:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _answer(self, rank: int) -> str:
        return f"nano/answer/{self._orders}/{rank}"

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Write heartbeats until the block ends."""
        over = threading.Event()

        def beat() -> None:
            count = 0
            with suppress(dist.DistNetworkError):  # torchrun is gone, which the next order finds out
                while not over.wait(BEAT_SECONDS):
                    self._store.set(f"nano/beat/{self.rank}", str(count := count + 1))

        thread = threading.Thread(target=beat, name="nano-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def scatter(self, shares: Sequence[Any] | None = None) -> Any:
        """This rank's share of what rank 0 gives."""
        received: list[Any] = [None]
        with lost_explained():
            dist.scatter_object_list(received, list(shares) if shares is not None else None, src=0)
        return received[0]

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all ranks by rank, on rank 0; None on the others."""
        received: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with lost_explained():
            dist.gather_object(value, received, dst=0)
        return received

    def agree(self, value: bool = False) -> bool:
        """What rank 0 says."""
        told = [value]
        with lost_explained():
            dist.broadcast_object_list(told, src=0)
        return told[0]


def local_rank() -> int:
    """The number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


@contextmanager
def lost_explained() -> Iterator[None]:
    """A broken collective as RankLost."""
    try:
        yield
    except RuntimeError as error:
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        if not isinstance(error, dist.DistError) and not any(
            word in told for word in ("gloo", "Connection", "Timed out", "NCCL")
        ):
            raise
        raise RankLost(
            f"a rank of this training is gone or silent ({told}): see its own message above; the same command"
            " goes on from the last saved state"
        ) from error


_leader: list[Ranks] = []


def leader() -> Ranks | None:
    """The ranks, in the process that leads them; None in any other."""
    return _leader[0] if _leader else None


def run_rank(command: Callable[[], None], follow: Callable[[Ranks], None]) -> None:
    """Run the command line on rank 0, and `follow` on the others."""
    ranks = Ranks.connect()
    os.environ.pop("TORCHELASTIC_RUN_ID", None)  # what this process starts is no rank
    if ranks.rank:
        try:
            with ranks.beating():
                follow(ranks)
        except NanoError as problem:
            print(f"error: rank {ranks.rank}: {problem}", file=sys.stderr)
            sys.exit(problem.exit_code)
        if ranks.joined:
            dist.destroy_process_group()
        return
    _leader.append(ranks)
    code: Any = 1
    try:
        with ranks.beating():
            command()
    except SystemExit as ended:
        code = ended.code or 0
        raise
    finally:
        _leader.clear()
        with suppress(RankLost):  # torchrun is gone
            ranks.order(LEAVE)
        if code == 0 and ranks.joined:
            dist.destroy_process_group()
        elif code == 0 and ranks.size > 1:
            print("nano: one rank did all of this: only `train` uses the others", file=sys.stderr)
