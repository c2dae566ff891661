"""A device that is not the CPU, for tests of placement where there is no GPU; its numbers are real.

A tensor on it wraps a CPU tensor. An operation with tensors of both devices is refused, as CUDA does: numbers
without dimensions alone may come from the CPU. PyTorch takes one such device in a process, so
`test_devices.py` starts `on_fake_device.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "fakegpu"
_BETWEEN = ("aten::_to_copy", "aten::copy_")
"""the operations between devices"""


class Placed(Tensor):
    """A tensor on the fake device."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> Placed:
        made: Placed = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, numbers.size(), strides=numbers.stride(), storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype, device=torch.device(NAME, 0),
        )  # fmt: skip
        return made

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placed({self.numbers})"

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def tolist(self) -> Any:
        return self.numbers.tolist()

    def __deepcopy__(self, memo: Any) -> Tensor:
        copied: Tensor = Placed(self.numbers.detach().clone())
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(torch.tensor(index, device=self.device) if type(index) is list else index)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: Placed) -> None:
        self.numbers = value.numbers

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(operation, args, kwargs or {})


class FakeDevice(TorchDispatchMode):
    """Makes the tensors that are asked for with the fake device."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(operation, args, kwargs or {})


def _compute(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = operation._schema.name
    given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    placed = [value for value in given if isinstance(value, Placed)]
    goal = kwargs.get("device")
    goes = torch.device(goal).type if goal is not None else None
    if not placed and goes != NAME:
        return operation(*args, **kwargs)
    if name == "aten::_fused_sdp_choice":
        return 0  # attention as plain operations
    strange = [value for value in given if not isinstance(value, Placed) and value.ndim > 0]
    if placed and strange and name not in _BETWEEN:
        raise RuntimeError(f"{name}: a tensor of shape {tuple(strange[0].shape)} is on the CPU")
    known = {id(value.numbers): value for value in placed}
    to_cpu = goes == "cpu" or (name == "aten::copy_" and not isinstance(args[0], Placed))

    def inside(value: Any) -> Any:
        if isinstance(value, Placed):
            return value.numbers
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def outside(value: Any) -> Any:
        if not isinstance(value, Tensor) or to_cpu:
            return value
        return known[id(value)] if id(value) in known else Placed(value)

    result = operation(*tree_map(inside, args), **tree_map(inside, kwargs))
    if name == "aten::copy_":
        return args[0]
    return tree_map(outside, result)


def install() -> torch.device:
    """Register the device in this process."""
    _setup_privateuseone_for_python_backend(NAME)
    backend: Any = getattr(torch, NAME)
    backend.get_amp_supported_dtype = lambda: [torch.bfloat16]
    FakeDevice().__enter__()
    plain = torch.tensor

    def tensor(data: Any, *, device: Any = None, **more: Any) -> Tensor:
        made = plain(data, **more)  # which copies to a device where no mode sees it
        return made if device is None else made.to(device)

    torch.tensor = tensor
    Tensor.new_tensor = lambda self, data: tensor(data, dtype=self.dtype, device=self.device)  # type: ignore[method-assign, assignment]
    return torch.device(NAME, 0)
