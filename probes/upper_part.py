"""The part of a model above a memory layer, run again and again on the same texts with other rows in that layer.

Axes: example, pos, tail (the positions from the first one that reads a changed row), target, d_model, vocab.
What lies below the layer, and what lies before the tail, does not depend on the rows: it is computed once, by the
model's own cached forward. The blocks above are then called with the very arguments that they got in it, with
gradients if they are wanted. No weight is touched, and none collects a gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from engram_lab.models.engram import CACHE_ARGUMENT
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle
from engram_lab.models.kv_runs import running_states
from engram_lab.models.tables import memories

AT_ONCE = 64  # examples in one forward
# Up to so many positions a forward costs what reading the weights does, or in a narrow model calling the blocks, so
# that a shorter tail may as well be run as a longer one.
CHEAP = 32
CHEAP_NARROW = 1 << 21  # divided by d_model squared


# From which layers up the blocks of a model can be run again.
_checked: weakref.WeakKeyDictionary[Handle, set[int]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Example:
    """ids [pos] of a text whose last len(targets) positions are to predict `targets`; the tail starts at `start`."""

    ids: tuple[int, ...]
    targets: tuple[int, ...]
    start: int


@dataclass
class Tails:
    """Some examples with tails of one length, left-padded to one: what the upper part needs to run on them.

    residual [example, tail, d_model] before the layer; at [2, target] are the (example, tail) of every target in
    `targets` [target], in the order of `examples` (numbers in the list that was given).
    """

    examples: list[int]
    targets: Tensor
    at: Tensor
    residual: Tensor
    last: Tensor = field(default_factory=lambda: torch.empty(0))  # behind the last block, with the tables as they were
    _calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    _cache: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    _history: list[tuple[Any, Any]] = field(default_factory=list)

    def restore(self) -> None:
        """Bring the cache, and what a grafted memory was given, back to where the layer began."""
        for layer, state in self._cache:
            layer.__dict__.clear()
            layer.__dict__.update(state)
        for memory, history in self._history:
            memory.history = history


def _keep_last(tails: Tails, module: Any, args: Any, output: Any) -> None:
    tails.last = (output[0] if isinstance(output, tuple) else output).clone()


def _groups(examples: Sequence[Example], cheap: int) -> list[tuple[list[int], int]]:
    """(numbers of examples to run together, their tail), longest tails first; `cheap` as CHEAP."""
    groups: list[tuple[list[int], int]] = []
    for number in sorted(range(len(examples)), key=lambda n: examples[n].start - len(examples[n].ids)):
        tail = len(examples[number].ids) - examples[number].start
        if groups:
            numbers, longest = groups[-1]
            if (len(numbers) < AT_ONCE and tail == longest) or (len(numbers) + 1) * longest <= cheap:
                numbers.append(number)
                continue
        groups.append(([number], tail))
    return groups


class UpperPart:
    """The blocks from `layer` up, on some examples; make it and use it only inside `Handle.running()`."""

    def __init__(self, handle: Handle, layer: int, examples: Sequence[Example]) -> None:
        self._handle, self._layer = handle, layer
        if running_states(handle):
            raise self._refusal()
        self._blocks = list(handle.model.get_submodule(handle.layout.blocks).children())[layer:]
        with torch.inference_mode(False), torch.no_grad():
            self.tails = [
                self._tails(examples, *group)
                for group in _groups(examples, max(CHEAP, CHEAP_NARROW // handle.d_model**2))
            ]
            checked = _checked.setdefault(handle, set())
            if layer not in checked and self.tails:
                self._check(self.tails[0])
                checked.add(layer)

    def _check(self, tails: Tails) -> None:
        """LabError unless the blocks give twice what they gave in the forward: some write over what they were given.

        So do those that keep a running state, or share keys and values of a block below.
        """
        for _ in range(2):
            again = self._hidden(tails)
            if again.shape != tails.last.shape or not torch.allclose(again, tails.last, rtol=1e-4, atol=1e-5):
                raise self._refusal()

    def _refusal(self) -> LabError:
        return LabError(
            f"The blocks of {self._handle.name} from {self._layer} up cannot be run again on what they were given "
            "(linear attention, or keys and values shared between blocks), so no fact can be written there: use a "
            "model with ordinary attention."
        )

    def _tails(self, examples: Sequence[Example], numbers: list[int], length: int) -> Tails:
        model, device = self._handle.model, self._handle.device
        chosen = [examples[number] for number in numbers]
        longest = max(len(example.ids) for example in chosen)
        ids = torch.zeros(len(chosen), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, example in enumerate(chosen):
            ids[row, longest - len(example.ids) :] = torch.tensor(example.ids)
            mask[row, longest - len(example.ids) :] = 1
        ids, mask = ids.to(device), mask.to(device)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        cache = DynamicCache(config=model.config.get_text_config())
        where = [(row, length - len(e.targets) + n) for row, e in enumerate(chosen) for n in range(len(e.targets))]
        targets = [target for example in chosen for target in example.targets]
        tails = Tails(
            examples=numbers,
            targets=torch.tensor(targets, device=device),
            at=torch.tensor(where, device=device).T,
            residual=torch.empty(0),
        )

        def forward(first: int, last: int) -> None:
            model(
                input_ids=ids[:, first:last],
                attention_mask=mask[:, :last],
                position_ids=positions[:, first:last],
                use_cache=True,
                logits_to_keep=1,
                **{CACHE_ARGUMENT: cache},
            )

        if longest > length:
            forward(0, longest - length)
        with ExitStack() as hooks:
            for block in self._blocks:
                hook = self._recorder(tails, cache)
                hooks.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
            hooks.callback(self._blocks[-1].register_forward_hook(partial(_keep_last, tails)).remove)
            forward(longest - length, longest)
        # Blocks that only read what others keep may be given no more than what logits were asked for (Gemma 4 E2B).
        if not length == tails.residual.shape[1] == tails.last.shape[1]:
            raise self._refusal()
        return tails

    def _recorder(self, tails: Tails, cache: Any) -> Any:
        def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not tails._calls:
                tails.residual = args[0]
                tails._cache = [(layer, dict(layer.__dict__)) for layer in cache.layers]
                found = [(memory, getattr(memory, "history", None)) for memory in memories(self._handle)]
                tails._history = [(memory, history) for memory, history in found if history is not None]
            tails._calls.append((args[1:], dict(kwargs)))

        return record

    def last_residual(self, tails: Tails) -> Tensor:
        """The residual behind the last block at the targets, [target, d_model], with the tables as they are read now.

        With gradients where grad mode is on.
        """
        return self._hidden(tails)[tails.at[0], tails.at[1]]

    def _hidden(self, tails: Tails) -> Tensor:
        """The residual behind the last block, [example, tail, d_model]."""
        tails.restore()
        try:
            hidden = tails.residual
            for block, (args, kwargs) in zip(self._blocks, tails._calls, strict=True):
                output = block(hidden, *args, **kwargs)
                hidden = output[0] if isinstance(output, tuple) else output
        finally:
            tails.restore()  # drops what the cache has kept of this run
        return hidden

    def log_probs(self, tails: Tails) -> Tensor:
        """Log-probability [target] float32 of the targets."""
        logits = self._handle.unembed(self.last_residual(tails)).float()
        return logits.log_softmax(-1).gather(1, tails.targets.unsqueeze(1)).squeeze(1)
