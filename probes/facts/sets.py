"""Facts with what is asked about them, before they are written and after.

Axes: fact, item (a prompt with its answer that belongs to a fact), pos, vocab. "Before" is the model as it is, "after"
the same forward of the same batch with the overlays: every comparison of bits is between two runs of one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from engram_lab.models.errors import DataError, LabError
from engram_lab.models.handle import Handle
from engram_lab.models.overlay import Fact, Overlay, Patch, Stack, prepare
from engram_lab.probes.base import Array, Progress, Record, arrays_of, check_seed, role
from engram_lab.probes.batches import by_length, padded
from engram_lab.probes.facts.writing import METHODS, WriteReport, encode_facts, write_facts
from engram_lab.probes.spans import token_text
from engram_lab.probes.stats import draws, kl, ratio_interval

Edits = Patch | Sequence[Overlay | Stack | None]
MAX_STEPS, MAX_RATE = 1000, 1000
BATCH_TOKENS, BATCH_LOGITS = 2048, 1 << 24  # of a forward, with its padding


@dataclass(frozen=True, eq=False)
class Expected(Record):
    """A prompt and what follows it, leading space included."""

    prompt: str
    answer: str


@dataclass(frozen=True, eq=False)
class StatedFact(Record):
    """A fact, with other wordings of it, prompts that must not change, and one whose answer needs it and another."""

    trigger: str
    answer: str
    paraphrases: tuple[str, ...] = ()
    neighbours: tuple[Expected, ...] = ()
    composition: Expected | None = None
    id: str = ""

    @property
    def fact(self) -> Fact:
        """What is written."""
        return Fact(self.trigger, self.answer)


@dataclass(frozen=True, eq=False)
class Writing(Record):
    """How facts are written, see probes.facts.writing; without a layer at the deepest. Raises LabError."""

    user: str = "user"
    layer: int | None = None
    method: str = "optimised"
    steps: int = 15
    rate: float = 0.5
    pull: float = 0.01

    def __post_init__(self) -> None:
        if not self.user.strip():
            raise LabError("The user has no name: give one.")
        if self.method not in METHODS:
            raise LabError(f'"{self.method}" is not a method of writing: use {" or ".join(METHODS)}.')
        if not 0 <= self.steps <= MAX_STEPS:
            raise LabError(f"The number of steps is {self.steps}; it must be from 0 to {MAX_STEPS}.")
        if not (0 < self.rate <= MAX_RATE and 0 <= self.pull <= MAX_RATE):
            raise LabError(f"The rate must be above 0 and the pull 0 or more, both at most {MAX_RATE}.")


WRITING = Writing()  # as by default


def check_request(models: Sequence[str], facts: Sequence[StatedFact], seed: int, bootstrap: int) -> None:
    """What all requests about facts share. Raises LabError."""
    if len(models) != 1:
        raise LabError(f"Facts are written into one model, not {len(models)}.")
    if not facts:
        raise DataError("No fact was given: give at least one.")
    seen = set()
    for own in facts:
        if own.fact in seen:
            raise DataError(f"The fact {own.fact} is given twice: keep one of them.")
        seen.add(own.fact)
    check_seed(seed, bootstrap)


def write(
    handle: Handle, facts: Sequence[StatedFact], writing: Writing, progress: Progress | None = None
) -> tuple[Overlay, WriteReport]:
    """The overlay of a request, the same bits each time on one machine."""
    return write_facts(
        handle,
        [own.fact for own in facts],
        user=writing.user,
        layer=writing.layer,
        method="closed_form" if writing.method == "closed_form" else "optimised",
        steps=writing.steps,
        rate=writing.rate,
        pull=writing.pull,
        progress=progress,
    )


# --- Running with and without ----------------------------------------------------------------------------------------


def batches(handle: Handle, texts: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Tensor]]:
    """(numbers of the texts, ids [batch, pos]) of texts of like length, padded at the end."""
    most = min(BATCH_TOKENS, max(1, BATCH_LOGITS // handle.vocab_size))
    for batch in by_length(list(map(len, texts)), most):
        yield batch, padded([texts[n] for n in batch])


def logits_of(handle: Handle, ids: Tensor, patch: Patch | None) -> Tensor:
    """Logits [batch, pos, vocab] of one forward, with the overlays or as the model is."""
    with handle.running() if patch is None else patch.applied():
        logits: Tensor = handle.model(input_ids=ids.to(handle.device), use_cache=False).logits
        return handle.finite(logits, ids)


def before_and_after(
    handle: Handle,
    patch: Edits,
    texts: Sequence[Sequence[int]],
    told: Callable[[float], None] | None = None,
    base: Patch | None = None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(number of the text, logits [pos, vocab] before, and after), in no order; two forwards of each batch.

    `patch` is one for all texts, or an overlay (or None) for each of them; `base` is what is there before.
    """
    done = 0
    for numbers, ids in batches(handle, texts):
        own = patch if isinstance(patch, Patch) else prepare(handle, [patch[n] for n in numbers])
        before, after = logits_of(handle, ids, base), logits_of(handle, ids, own)
        for row, n in enumerate(numbers):
            yield n, before[row, : len(texts[n])], after[row, : len(texts[n])]
        done += len(numbers)
        if told is not None:
            told(done / len(texts))


def kl_of(before: Tensor, after: Tensor) -> Tensor:
    """KL(before || after) [...] in nats of logits [..., vocab], by float32 log-softmax; 0 where the bits agree."""
    divergence = kl(before.float().log_softmax(-1), after.float().log_softmax(-1))
    return torch.where((before == after).all(-1), 0.0, divergence)


@dataclass(frozen=True, eq=False)
class Asked(Record):
    """Prompts with their answers, before and after; a prompt is shown without its answer, that is asked for behind it.

    wins: whether the answer's first token is likelier than the rival, 1 or 0, NaN where the two are one; said: the
    likeliest next token; kl at the prompt's last position; same_bits: every logit of prompt and answer is the same;
    edited_reads: how many of the rows that the prompt's last position reads are edited.
    """

    fact: Annotated[np.ndarray, Array("item", dtype="int64", role="name")]  # which fact the item belongs to
    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    answer_ids: tuple[tuple[int, ...], ...] = field(metadata=role("name"))
    probability_before: Annotated[np.ndarray, Array("item", unit="probability")]
    probability_after: Annotated[np.ndarray, Array("item", unit="probability")]
    top1_before: Annotated[np.ndarray, Array("item", dtype="bool")]
    top1_after: Annotated[np.ndarray, Array("item", dtype="bool")]
    top5_before: Annotated[np.ndarray, Array("item", dtype="bool")]
    top5_after: Annotated[np.ndarray, Array("item", dtype="bool")]
    rival_texts: tuple[str, ...] = field(metadata=role("spelled"))
    wins_before: Annotated[np.ndarray, Array("item", dtype="float64")]
    wins_after: Annotated[np.ndarray, Array("item", dtype="float64")]
    said_before: tuple[str, ...] = field(metadata=role("spelled"))
    said_after: tuple[str, ...] = field(metadata=role("spelled"))
    same_top: Annotated[np.ndarray, Array("item", dtype="bool")]
    kl: Annotated[np.ndarray, Array("item", unit="nats")]
    same_bits: Annotated[np.ndarray, Array("item", dtype="bool")]
    edited_reads: Annotated[np.ndarray, Array("item", dtype="int64")]


def encoded(handle: Handle, items: Sequence[tuple[int, Expected]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(ids of the prompt, ids of the answer) of each item; LabError as from `encode_facts`."""
    facts = [Fact(own.prompt, own.answer) for _, own in items]
    return [encode_facts(handle, [fact])[fact] for fact in facts]


def ask(
    handle: Handle,
    patch: Edits,
    items: Sequence[tuple[int, Expected]],
    rivals: Sequence[int] | None = None,
    reads: Callable[[Sequence[int]], Tensor] | None = None,
    told: Callable[[float], None] | None = None,
) -> Asked:
    """Ask every item (number of its fact, prompt and answer); `rivals` [item] are token ids, if not the likeliest.

    `reads` tells which rows of ids [pos] are edited, [layer, pos, order*head] bool.
    """
    coded = encoded(handle, items)
    texts = [(*prompt, *answer[:-1]) for prompt, answer in coded]
    rows: list[dict[str, Any]] = [{} for _ in items]
    for n, before, after in before_and_after(handle, patch, texts, told):
        prompt, answer = coded[n]
        last, wanted = len(prompt) - 1, torch.tensor(answer, device=before.device).unsqueeze(1)
        first = before[last].clone()
        first[answer[0]] = -torch.inf
        rival = int(first.argmax()) if rivals is None else rivals[n]
        row: dict[str, Any] = {"rival_texts": token_text(handle, rival)}
        for when, logits in (("before", before), ("after", after)):
            asked = logits[last:].float()
            chances = asked.log_softmax(-1).gather(1, wanted)
            # How many are likelier; of equals the first id is said, as argmax does.
            target = asked.gather(1, wanted)
            ids = torch.arange(asked.shape[1], device=asked.device)
            rank = ((asked > target) | ((asked == target) & (ids < wanted))).sum(-1)
            row[f"probability_{when}"] = float(chances.sum().exp())
            row[f"top1_{when}"], row[f"top5_{when}"] = bool((rank == 0).all()), bool((rank < 5).all())
            row[f"wins_{when}"] = np.nan if rival == answer[0] else float(asked[0, answer[0]] > asked[0, rival])
            row[f"said_{when}"] = token_text(handle, int(asked[0].argmax()))
        row["same_top"] = int(before[last].argmax()) == int(after[last].argmax())
        row["kl"], row["same_bits"] = float(kl_of(before[last], after[last])), torch.equal(before, after)
        row["edited_reads"] = 0 if reads is None else int(reads(prompt)[:, -1].sum())
        rows[n] = row
    arrays, columns = arrays_of(Asked), dict[str, Any]()
    for name in [item.name for item in fields(Asked)][4:]:  # behind those of the items themselves
        column = [row[name] for row in rows]
        columns[name] = np.array(column, dtype=arrays[name].dtype) if name in arrays else tuple(column)
    return Asked(
        fact=np.array([n for n, _ in items], dtype=np.int64),
        prompts=tuple(item.prompt for _, item in items),
        answers=tuple(item.answer for _, item in items),
        answer_ids=tuple(answer for _, answer in coded),
        **columns,
    )


# --- Means -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Score(Record):
    """A mean over `n` items with its interval, before and after; NaN where there is no item to tell it by."""

    name: str
    n: int
    before: float
    before_low: float
    before_high: float
    after: float
    after_low: float
    after_high: float


def score(name: str, asked: Asked, before: np.ndarray, after: np.ndarray, seed: int, bootstrap: int) -> Score:
    """The mean of values [item]; NaN is left out."""
    values = [interval(asked.fact, own, seed, bootstrap) for own in (before, after)]
    return Score(name, int((~np.isnan(after.astype(np.float64))).sum()), *values[0], *values[1])


def interval(groups: np.ndarray, values: np.ndarray, seed: int, bootstrap: int) -> tuple[float, float, float]:
    """(mean, low, high) of values [item], resampled by groups [item]; without an interval for a single group."""
    known = ~np.isnan(values.astype(np.float64))
    if not known.any():
        return (np.nan,) * 3
    _, index = np.unique(groups[known], return_inverse=True)
    sums, counts = np.bincount(index, weights=values[known].astype(np.float64)), np.bincount(index)
    mean, low, high = ratio_interval(sums, counts, draws(len(counts), bootstrap, seed))
    return float(mean), float(low), float(high)


def recall_items(facts: Sequence[StatedFact]) -> list[tuple[int, Expected]]:
    """The facts themselves as items."""
    return [(n, Expected(own.trigger, own.answer)) for n, own in enumerate(facts)]


def paraphrase_items(facts: Sequence[StatedFact]) -> list[tuple[int, Expected]]:
    """Their other wordings."""
    return [(n, Expected(text, own.answer)) for n, own in enumerate(facts) for text in own.paraphrases]


def neighbour_items(facts: Sequence[StatedFact]) -> list[tuple[int, Expected]]:
    """What must not change."""
    return [(n, other) for n, own in enumerate(facts) for other in own.neighbours]


def ask_neighbours(
    handle: Handle,
    patch: Patch,
    facts: Sequence[StatedFact],
    reads: Callable[[Sequence[int]], Tensor] | None = None,
    told: Callable[[float], None] | None = None,
) -> Asked:
    """The neighbours, each with its fact's answer as the rival."""
    items = neighbour_items(facts)
    firsts = [answer[0] for _, answer in encoded(handle, recall_items(facts))]
    return ask(handle, patch, items, [firsts[n] for n, _ in items], reads, told)
