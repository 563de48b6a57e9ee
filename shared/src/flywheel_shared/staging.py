"""Copies of a state on the CPU, taken in the moment for which training waits."""

from typing import Any

import torch
from torch import Tensor

from flywheel_shared.fsdp import local


class Staging:
    """Buffers that hold one state at a time, and are used again for the next.

    Memory that was touched before is filled several times as fast as new memory; that of a GPU's state is
    page-locked besides, so that it arrives at the speed of the bus. It takes the size of this rank's state for
    as long as the run lasts.
    """

    def __init__(self) -> None:
        self._held: Any = None
        self._locked: list[int] = []  # addresses

    @torch.no_grad()
    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """The same tree, its tensors copied to the CPU (DTensors stay DTensors), valid until the next call."""
        held: dict[str, Any] = self._copied(state, self._held)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._held = held
        return held

    def close(self) -> None:
        """Give the memory back."""
        for address in self._locked:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._locked, self._held = [], None

    def _copied(self, value: Any, into: Any) -> Any:
        if isinstance(value, Tensor):
            if isinstance(into, Tensor) and _alike(into, value):
                local(into).copy_(local(value.detach()), non_blocking=True)
                return into
            return self._new(value)
        if isinstance(value, dict):
            held = into if isinstance(into, dict) else {}
            return {key: self._copied(inner, held.get(key)) for key, inner in value.items()}
        return value

    def _new(self, value: Tensor) -> Tensor:
        copy = value.detach().to("cpu", copy=True)
        memory = local(copy)
        if value.device.type == "cuda" and memory.nbytes and _lock_pages(memory):
            self._locked.append(memory.data_ptr())
        return copy


def _lock_pages(memory: Tensor) -> bool:
    """Whether it could be done: a limit on locked memory makes copies slower, and nothing else."""
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and local(one).shape == local(other).shape
