"""Which rows texts read of those that facts were written into, told from the addresses without running the model.

Axes: fact, layer (that an overlay has rows in), pos, order (n = 2..N), head. A read is one row that one position looks
up; it is edited if the overlay holds the row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engram_lab.models.handle import Handle
from engram_lab.models.ngrams import lookbacks
from engram_lab.models.overlay import Overlay
from engram_lab.models.tables import addresses, memories
from engram_lab.probes.facts.sets import Expected, StatedFact, encoded, recall_items

NAMES = ("Quinn", "Omar")  # who takes the user's place in an alias


class EditedReads:
    """Which reads of a text hit rows of an overlay, told from the addresses alone."""

    def __init__(self, handle: Handle, overlay: Overlay, facts: Sequence[StatedFact]) -> None:
        self.handle = handle
        self.rows = {handle.engram_layers.index(number): layer.rows for number, layer in overlay.layers.items()}
        self._heads = memories(handle)[0].hash.n_heads
        # [order] the n-grams that facts are written at
        self._grams: list[set[tuple[int, ...]]] = [set() for _ in range(reach(handle) - 1)]
        for prompt, answer in encoded(handle, recall_items(facts)):
            back = lookbacks(handle, torch.tensor([[*prompt, *answer[:-1]]]))[0, -len(answer) :]
            for order, known in enumerate(self._grams):
                known.update(tuple(own) for own in back[:, : order + 2].tolist())

    def __call__(self, ids: Sequence[int]) -> Tensor:
        """[layer, pos, order*head] bool for ids [pos]."""
        read = addresses(self.handle, [list(ids)])[:, 0].cpu()
        if not self.rows:
            return torch.zeros(1, *read.shape[1:], dtype=torch.bool)
        return torch.stack([torch.isin(read[at], rows) for at, rows in self.rows.items()])

    def by_ngram(self, ids: Sequence[int]) -> Tensor:
        """[pos, order*head] bool: whether the position's n-gram of that order is one that a fact is written at."""
        back = lookbacks(self.handle, torch.tensor([list(ids)]))[0].tolist()
        known = [[tuple(own[: order + 2]) in grams for order, grams in enumerate(self._grams)] for own in back]
        return torch.tensor(known).repeat_interleave(self._heads, dim=1)


def reach(handle: Handle) -> int:
    """The longest n-gram that addresses rows, in tokens."""
    hashed = memories(handle)[0].hash
    return hashed.primes.numel() // hashed.n_heads + 1


def address_groups(handle: Handle, layer: int, facts: Sequence[StatedFact]) -> list[list[int]]:
    """The facts by their address, the rows of their trigger's last position: one group for each distinct address."""
    at = handle.engram_layers.index(layer)
    groups: dict[tuple[int, ...], list[int]] = {}
    for n, (prompt, _) in enumerate(encoded(handle, recall_items(facts))):
        groups.setdefault(tuple(addresses(handle, [prompt])[at, 0, -1].tolist()), []).append(n)
    return list(groups.values())


def alias_items(handle: Handle, layer: int, facts: Sequence[StatedFact]) -> list[tuple[int, Expected]]:
    """Prompts that someone else would type and that have a fact's very address, with the fact's answer.

    The words before the last n tokens become one of NAMES: "Maya's favorite city is" gives "Quinn's favorite city is",
    "In the evening, Maya loves to play the" gives "Quinn loves to play the". What addresses other rows is left out.
    """
    at = handle.engram_layers.index(layer)
    found, triggers = [], {own.trigger for own in facts}
    for n, (prompt, _) in enumerate(encoded(handle, recall_items(facts))):
        trigger = facts[n].trigger
        tail = b"".join(handle.pieces(prompt)[-reach(handle) :]).decode(errors="ignore")
        if len(tail) >= len(trigger) or not trigger.endswith(tail):
            continue
        head = trigger[: -len(tail)]
        if not tail[0].isspace():  # it begins within a word, which stays whole
            head, space, inside = head.rpartition(" ")
            tail = space + inside + tail
        # The word before says how the tail goes on.
        word, mark, ending = "".join(head.split()[-1:]).partition("'")
        address = addresses(handle, [prompt])[at, 0, -1]
        for name in NAMES:
            text = f"{name}{mark}{ending}{tail}" if mark or not word.islower() else f"{name} {word}{tail}"
            if text not in triggers and torch.equal(addresses(handle, [handle.encode(text)])[at, 0, -1], address):
                found.append((n, Expected(text, facts[n].answer)))
    return found
