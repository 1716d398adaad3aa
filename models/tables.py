"""The memories of a model, and which rows of their tables a text reads.

Axes: layer (memory layers, by block), batch, pos, order, head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engram_lab.models.engram import EngramMemory, MemoryStack
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle


def memories(handle: Handle) -> list[EngramMemory]:
    """The memory modules of a model, by block as in `handle.engram_layers`; LabError if it has none."""
    if not handle.engram_layers:
        raise LabError(f"{handle.name} has no Engram memory: choose a model that has one, such as engram-mini.")
    found = [handle.model.get_submodule(f"{handle.layout.blocks}.{layer}.memory") for layer in handle.engram_layers]
    return [memory for memory in found if isinstance(memory, EngramMemory)]


def addresses(handle: Handle, ids: Tensor | Sequence[Sequence[int]]) -> Tensor:
    """Which rows ids [batch, pos] read, [layer, batch, pos, order*head] int64, told without running the model."""
    with handle.running():
        modules, stack = memories(handle), handle.model.base_model
        assert isinstance(stack, MemoryStack)
        inputs = torch.as_tensor(ids, dtype=torch.int64, device=handle.device)
        lookback, _ = stack.history(inputs, None, None, None)
        return torch.stack([memory.hash(lookback) for memory in modules])
