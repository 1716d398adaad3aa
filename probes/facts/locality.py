"""What else facts change: comparisons of bits where nothing may, and measures where something must.

Axes: fact, layer (that the overlay has rows in), pos, order, head, distance (positions behind the trigger's last one),
shared (how many of a position's rows are edited). A read is one row that one position looks up; it is edited if the
overlay holds the row. Causality alone keeps what stands before an edited read as it was, so that check proves little;
the others compare what nothing but the addresses keeps apart.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from engram_lab.models.handle import Handle
from engram_lab.models.overlay import Overlay, Patch, prepare
from engram_lab.models.tables import addresses, memories
from engram_lab.probes.base import Array, Record
from engram_lab.probes.facts.addresses import EditedReads, address_groups
from engram_lab.probes.facts.sets import StatedFact, batches, before_and_after, encoded, kl_of, logits_of, recall_items

DISTANCES = 16  # the trigger's position and 15 behind it


@dataclass(frozen=True, eq=False)
class Difference(Record):
    """A text that is not as before: how many positions differ, the first of them, the largest gap and KL, and why."""

    text: str
    positions: int
    first: int
    largest: float  # logits
    kl: float  # nats, at the position where it is largest
    why: str


@dataclass(frozen=True, eq=False)
class BitCheck(Record):
    """How many of what was compared (`unit`) have equal bits, and every exception.

    `left_out` is what the check does not speak of, for the reason given; of it, `left_out_equal` is equal all the same.
    """

    name: str
    unit: str
    compared: int
    equal: int
    exceptions: tuple[Difference, ...] = ()
    left_out: int = 0
    left_out_equal: int = 0
    why_left_out: str = ""

    @property
    def holds(self) -> bool:
        """Whether something was compared and all of it is equal."""
        return 0 < self.compared == self.equal


@dataclass(frozen=True, eq=False)
class Partial(Record):
    """A text that reads edited rows: at how many positions, how many reads, the most at one position, and why.

    by_ngram: reads of a row through an n-gram that a fact has too; by_collision: through another one.
    """

    text: str
    unrelated: bool  # else a paraphrase, a neighbour or a composition
    positions: int
    reads: int
    most: int
    by_ngram: int
    by_collision: int
    differs: int
    kl: float


@dataclass(frozen=True, eq=False)
class Locality(Record):
    """DEFINITIONS of the check's front says what each is.

    `address_groups`: facts that have one address; reads_histogram: positions of the `n_unrelated` unrelated texts by
    how many of their rows are edited.
    """

    checks: tuple[BitCheck, ...]
    after_kl: Annotated[np.ndarray, Array("distance", unit="nats")]  # mean over facts
    after_differs: Annotated[np.ndarray, Array("distance", unit="share of facts", dtype="float64")]
    after_n: Annotated[np.ndarray, Array("distance", dtype="int64")]  # facts with a position so far behind
    n_facts: int
    n_addresses: int
    address_groups: tuple[tuple[int, ...], ...]
    partial: tuple[Partial, ...]
    n_unrelated: int
    reads_histogram: Annotated[np.ndarray, Array("shared", dtype="int64")]


def table_digest(handle: Handle) -> tuple[str, ...]:
    """SHA-256 of each memory's table, bit for bit."""
    return tuple(
        hashlib.sha256(memory.table.weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for memory in memories(handle)
    )


def locality(
    handle: Handle,
    overlay: Overlay,
    facts: Sequence[StatedFact],
    texts: Sequence[str],
    others: Sequence[str],
    told: Callable[[float], None] | None = None,
) -> Locality:
    """Every check and measure of one overlay that holds the facts.

    `texts` are unrelated; `others` are about the facts without being triggers (paraphrases, neighbours).
    """
    say = told or (lambda fraction: None)
    digest = table_digest(handle)
    reads = EditedReads(handle, overlay, facts)
    layer = min(overlay.layers, default=handle.engram_layers[-1])
    groups = address_groups(handle, layer, facts)
    unaddressed, partial, histogram = _unrelated(handle, overlay, reads, texts, others, lambda done: say(0.4 * done))
    before, after, undone = _sentences(handle, overlay, reads, facts, texts, lambda done: say(0.4 + 0.4 * done))
    one, stay = _undo_one(handle, overlay, facts)
    say(0.9)
    users = _other_users(handle, overlay, facts)
    tables = table_digest(handle)
    changed = [
        Difference(f"table of layer {number}", 0, 0, 0.0, 0.0, "its rows are not those from before")
        for number, old, new in zip(handle.engram_layers, digest, tables, strict=True)
        if old != new
    ]
    table = BitCheck("undo table", "tables", len(tables), len(tables) - len(changed), tuple(changed))
    say(1.0)
    return Locality(
        checks=(unaddressed, before, table, undone, one, stay, users),
        **after,
        n_facts=len(facts),
        n_addresses=len(groups),
        address_groups=tuple(tuple(group) for group in groups if len(group) > 1),
        partial=partial,
        n_unrelated=len(dict.fromkeys(texts)),
        reads_histogram=histogram,
    )


def difference(text: str, before: Tensor, after: Tensor, why: str) -> Difference | None:
    """How logits [pos, vocab] differ; None if all bits agree."""
    if torch.equal(before, after):
        return None
    at = (before != after).any(-1).nonzero().flatten()
    gap, divergence = (before.float() - after.float()).abs().max(), kl_of(before, after).max()
    return Difference(text, len(at), int(at[0]), float(gap), float(divergence), why)


def _unrelated(
    handle: Handle,
    overlay: Overlay,
    reads: EditedReads,
    texts: Sequence[str],
    others: Sequence[str],
    told: Callable[[float], None],
) -> tuple[BitCheck, tuple[Partial, ...], np.ndarray]:
    """Checks 1 and 5, and the unrelated texts' positions by edited rows."""
    given = list(dict.fromkeys([*texts, *others]))
    coded = [handle.encode(text) for text in given]
    hit = [reads(ids) for ids in coded]  # [layer, pos, order*head]
    shared = [own.sum((0, 2)).numpy() for own in hit[: len(dict.fromkeys(texts))]]
    most = len(overlay.layers) * memories(handle)[0].hash.primes.numel()
    counts = np.bincount(np.concatenate([np.zeros(0, np.int64), *shared]), minlength=most + 1)
    equal, compared, exceptions, partial = 0, 0, [], []
    for n, before, after in before_and_after(handle, prepare(handle, overlay), coded, told):
        if not hit[n].any():
            compared += 1
            found = difference(given[n], before, after, "reads no edited row: not explained")
            equal += found is None
            exceptions += [] if found is None else [found]
            continue
        ngram = reads.by_ngram(coded[n])
        differs = (before != after).any(-1)
        partial.append(
            (
                n,
                Partial(
                    text=given[n],
                    unrelated=n < len(shared),
                    positions=int(hit[n].any(0).any(-1).sum()),
                    reads=int(hit[n].sum()),
                    most=int(hit[n].sum((0, 2)).max()),
                    by_ngram=int((hit[n] & ngram).sum()),
                    by_collision=int((hit[n] & ~ngram).sum()),
                    differs=int(differs.sum()),
                    kl=float(kl_of(before, after).max()),
                ),
            )
        )
    check = BitCheck(
        "unaddressed",
        "whole texts",
        compared,
        equal,
        tuple(exceptions),
        left_out=len(partial),
        left_out_equal=sum(own.differs == 0 for _, own in partial),
        why_left_out="they read edited rows, see the partial collisions" if partial else "",
    )
    return check, tuple(own for _, own in sorted(partial, key=lambda pair: pair[0])), counts


def _sentences(
    handle: Handle,
    overlay: Overlay,
    reads: EditedReads,
    facts: Sequence[StatedFact],
    texts: Sequence[str],
    told: Callable[[float], None],
) -> tuple[BitCheck, dict[str, np.ndarray], BitCheck]:
    """Checks 2 and 3 on each fact as a sentence with a text behind it, and all of it again when all is undone."""
    given, coded, at = [], [], []
    for n, (prompt, answer) in enumerate(encoded(handle, recall_items(facts))):
        text = f"{facts[n].trigger}{facts[n].answer}." + (f" {texts[n % len(texts)]}" if texts else "")
        whole = handle.tokenizer(text, truncation=False, verbose=False)["input_ids"]
        if tuple(whole[: len(prompt)]) != prompt:  # the tokenizer joins trigger and answer
            text, whole = f"{facts[n].trigger}{facts[n].answer}", [*prompt, *answer]
        # The positions that are told, and no more than the model takes.
        whole = whole[: min(len(prompt) - 1 + DISTANCES, handle.context)]
        given.append(text)
        coded.append(tuple(whole))
        at.append(len(prompt) - 1)
    total, differ, n_at = np.zeros(DISTANCES), np.zeros(DISTANCES), np.zeros(DISTANCES, dtype=np.int64)
    compared = equal = left = left_equal = 0
    exceptions = []
    for n, before, after in before_and_after(handle, prepare(handle, overlay), coded, lambda done: told(0.6 * done)):
        touched = reads(coded[n]).any(0).any(-1).nonzero().flatten()
        first = min(int(touched[0]) if len(touched) else at[n], at[n])
        same = (before == after).all(-1)
        compared, equal = compared + first, equal + int(same[:first].sum())
        left, left_equal = left + at[n] - first, left_equal + int(same[first : at[n]].sum())
        found = difference(given[n], before[:first], after[:first], "nothing edited was read yet: not explained")
        exceptions += [] if found is None else [found]
        behind = kl_of(before[at[n] :], after[at[n] :]).double().cpu().numpy()
        total[: len(behind)] += behind
        differ[: len(behind)] += (~same[at[n] :]).cpu().numpy()
        n_at[: len(behind)] += 1
    check = BitCheck(
        "before",
        "positions before the trigger's last",
        compared,
        equal,
        tuple(exceptions),
        left_out=left,
        left_out_equal=left_equal,
        why_left_out="they stand at or behind a read of another fact's row" if left else "",
    )
    with np.errstate(invalid="ignore"):
        after_kl, share = (total / n_at).astype(np.float32), differ / n_at
    emptied = functools.reduce(lambda own, fact: own.without(fact), overlay.facts, overlay)
    again = prepare(handle, emptied)
    gone, changed = 0, []
    for n, before, after in before_and_after(handle, again, coded, lambda done: told(0.6 + 0.4 * done)):
        found = difference(given[n], before, after, "all facts are removed: not explained")
        gone += found is None
        changed += [] if found is None else [found]
    undone = BitCheck("undo logits", "sentences", len(coded), gone, tuple(changed))
    return check, {"after_kl": after_kl, "after_differs": share, "after_n": n_at}, undone


def _undo_one(handle: Handle, overlay: Overlay, facts: Sequence[StatedFact]) -> tuple[BitCheck, BitCheck]:
    """Each fact taken out alone: its own trigger against the bare model, the next fact's against the whole overlay."""
    coded = [prompt for prompt, _ in encoded(handle, recall_items(facts))]
    left = [overlay.without(own.fact) for own in facts]
    following = [*range(1, len(facts)), 0]

    def read(n: int, rows: Mapping[int, Tensor]) -> bool:
        """Whether the trigger of fact n reads one of the rows {block: rows}."""
        found = addresses(handle, [coded[n]])[:, 0].cpu()
        return any(torch.isin(found[handle.engram_layers.index(block)], own).any() for block, own in rows.items())

    def gone(n: int) -> dict[int, Tensor]:
        """The rows that only fact n has."""
        kept = {block: layer.rows for block, layer in left[n].layers.items()}
        return {
            block: layer.rows[~torch.isin(layer.rows, kept[block])] if block in kept else layer.rows
            for block, layer in overlay.layers.items()
        }

    def check(name: str, triggers: Sequence[int], apart: Sequence[bool], base: Patch | None, why: str) -> BitCheck:
        same, exceptions = np.zeros(len(facts), dtype=bool), []
        for n, before, after in before_and_after(handle, left, [coded[i] for i in triggers], base=base):
            found = difference(facts[triggers[n]].trigger, before, after, f"{facts[n].fact} is removed: not explained")
            same[n] = found is None
            exceptions += [found] if found is not None and apart[n] else []
        mine = np.array(apart)
        counts = (int(mine.sum()), int(same[mine].sum()), tuple(exceptions), int((~mine).sum()), int(same[~mine].sum()))
        return BitCheck(name, "facts", *counts, why if counts[3] else "")

    free = [not read(n, {block: layer.rows for block, layer in left[n].layers.items()}) for n in range(len(facts))]
    others = [not read(after, gone(n)) for n, after in enumerate(following)]
    one = check("undo one fact", range(len(facts)), free, None, "their triggers read rows that other facts still have")
    whole = prepare(handle, overlay)
    return one, check("others stay", following, others, whole, "their triggers read rows that went with the other fact")


def _other_users(handle: Handle, overlay: Overlay, facts: Sequence[StatedFact]) -> BitCheck:
    """Batches with three users mixed, in all three orders, against batches of each alone."""
    coded = [prompt for prompt, _ in encoded(handle, recall_items(facts))]
    flipped = {n: dataclasses.replace(own, vectors=-own.vectors) for n, own in overlay.layers.items()}
    who = {"this user": overlay, "nobody": None, "another user": dataclasses.replace(overlay, layers=flipped)}
    compared = equal = 0
    exceptions = []
    for numbers, ids in batches(handle, coded):
        alone = {name: logits_of(handle, ids, prepare(handle, [own] * len(numbers))) for name, own in who.items()}
        for turn in range(len(who)):
            names = [list(who)[(row + turn) % len(who)] for row in range(len(numbers))]
            mixed = logits_of(handle, ids, prepare(handle, [who[name] for name in names]))
            for row, n in enumerate(numbers):
                compared += 1
                pair = alone[names[row]][row, : len(coded[n])], mixed[row, : len(coded[n])]
                found = difference(facts[n].trigger, *pair, f"as {names[row]}, beside others: not explained")
                equal += found is None
                exceptions += [] if found is None else [found]
    return BitCheck("other users", "prompts of a mixed batch", compared, equal, tuple(exceptions))
