"""The clean runs of a scenario's two prompts, and what an edit of a cache did to the answer.

Axes: variant (edits of one cache), vocab. The stale cache is the old prompt's, the donor the new one's; all logits are
those of the last token, which runs again on the edited cache as it does in the clean runs. An edit is scored by the
logits of the first tokens of the two answers:
    score = logit[new answer] - logit[old answer],  recovery = (edited - old) / (new - old)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from engram_lab.models.handle import Handle
from engram_lab.models.kv import KV, KVEdit, swap_each
from engram_lab.models.kv_runs import continue_from, prefill
from engram_lab.probes.base import Array, Progress, Record, role
from engram_lab.probes.kv.scenario import Pair
from engram_lab.probes.spans import texts_of
from engram_lab.probes.stats import kl

BUDGET = 2**28  # bytes of caches in one batch; a constant, as the batch's shape decides the last bits


@dataclass(frozen=True, eq=False)
class Clean:
    """The caches of both prompts without their last token, and the last token's logits [vocab] on each.

    `last` is the last token's id; the logits are those of continue_from with a batch of 1. `digests` of (stale, donor).
    """

    stale: KV
    donor: KV
    last: tuple[int]
    old: Tensor
    new: Tensor
    digests: tuple[str, str]

    def check(self) -> None:
        """The caches are what they were; an assertion of this lab's own."""
        assert (self.stale.digest(), self.donor.digest()) == self.digests


def run_clean(handle: Handle, pair: Pair) -> Clean:
    """Both prompts, each in a run of its own of the same shape; KVError for a model that cannot do it."""
    stale, donor = (prefill(handle, ids).kv.first(pair.n_editable) for ids in (pair.ids_old, pair.ids_new))
    last = (pair.ids_old[-1],)
    old, new = (continue_from(handle, kv, last)[0, -1] for kv in (stale, donor))
    return Clean(stale, donor, last, old, new, (stale.digest(), donor.digest()))


def rows_at_once(clean: Clean) -> int:
    """Edits that run in one forward."""
    return max(1, BUDGET // clean.stale.n_bytes)


def edited(
    handle: Handle, clean: Clean, edits: Sequence[KVEdit], progress: Progress | None = None, doing: str = "edits"
) -> Iterator[Tensor]:
    """Logits [variant, vocab] of the last token for the stale cache with each edit from the donor, batch by batch."""
    rows = rows_at_once(clean)
    for first in range(0, len(edits), rows):
        if progress is not None:
            progress(first / len(edits), doing)
        batch = swap_each(clean.stale, clean.donor, edits[first : first + rows])
        yield continue_from(handle, batch, clean.last)[:, -1]


def differing(clean: Clean) -> tuple[int, ...]:
    """Positions at which the two caches are not the same. Before the field they are: no edit changes anything there."""
    n = clean.stale.n_tokens
    other = torch.zeros(n, dtype=torch.bool, device=clean.stale.ids.device)
    pairs = [(clean.stale.keys, clean.donor.keys), (clean.stale.values, clean.donor.values)]
    pairs.append((clean.stale.state, clean.donor.state))
    for stale, donor in pairs:
        for one, two in zip(stale, donor, strict=True):
            other |= (one != two).transpose(1, 2).reshape(n, -1).any(dim=1)
    return tuple(torch.nonzero(other)[:, 0].tolist())


# --- What it did ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Effects(Record):
    """What each variant answers; DEFINITIONS of its front says what each figure is."""

    score: Annotated[np.ndarray, Array("variant", unit="logits", dtype="float64")]
    recovery: Annotated[np.ndarray, Array("variant", unit="share", dtype="float64")]  # NaN: both clean scores are equal
    flip: Annotated[np.ndarray, Array("variant", dtype="bool")]
    prob_old: Annotated[np.ndarray, Array("variant", unit="probability", dtype="float64")]
    prob_new: Annotated[np.ndarray, Array("variant", unit="probability", dtype="float64")]
    top_id: Annotated[np.ndarray, Array("variant", dtype="int64", role="name")]
    cosine: Annotated[np.ndarray, Array("variant", dtype="float64")]
    kl: Annotated[np.ndarray, Array("variant", unit="nats", dtype="float64")]


def effects(batches: Iterable[Tensor], pair: Pair, clean: Clean, reference: Tensor) -> Effects:
    """Of logits [variant, vocab], batch by batch; cosine and KL are to `reference` [vocab]."""
    reference = reference.double()
    log_reference = reference.log_softmax(-1)
    before, after = (_score(logits.double()[None], pair)[0] for logits in (clean.old, clean.new))
    columns: list[tuple[Tensor, ...]] = []
    for batch in batches:
        logits = batch.double()
        log_p = logits.log_softmax(-1)
        score = _score(logits, pair)
        probs = log_p[:, list(pair.answer_ids)].exp()
        columns.append(
            (
                score,
                (score - before) / (after - before) if after != before else torch.full_like(score, torch.nan),
                (score > 0) != (before > 0),
                probs[:, 0],
                probs[:, 1],
                logits.argmax(-1),
                torch.cosine_similarity(logits, reference[None], dim=-1),
                kl(log_reference, log_p).clamp_min(0),
            )
        )
    return Effects(*(torch.cat(column).cpu().numpy() for column in zip(*columns, strict=True)))


def _score(logits: Tensor, pair: Pair) -> Tensor:
    old, new = pair.answer_ids
    return logits[:, new] - logits[:, old]


@dataclass(frozen=True, eq=False)
class Oracle(Record):
    """Whether the model gets both clean prompts right, which every claim rests on; fields are (old, new) prompt."""

    right: tuple[bool, bool]  # the prompt's answer leads the other one
    top: tuple[bool, bool]  # it is the model's most likely token
    score: tuple[float, float]
    prob_old: tuple[float, float]  # of the old answer
    prob_new: tuple[float, float]
    top_ids: tuple[int, int] = field(metadata=role("name"))
    top_texts: tuple[str, str] = field(metadata=role("spelled"))
    cosine: float  # of the clean runs' logits
    kl: float  # KL(new || old), nats

    @property
    def both(self) -> bool:
        """Whether a claim can be made at all."""
        return all(self.right)


def oracle(handle: Handle, pair: Pair, clean: Clean) -> Oracle:
    """Of the clean runs."""
    got = effects([torch.stack([clean.old, clean.new])], pair, clean, clean.new)
    scores, tops = got.score.tolist(), got.top_id.tolist()
    texts = texts_of(handle.pieces(tops, whole=False))

    def two(values: Any) -> Any:
        return tuple(values.tolist())

    return Oracle(
        right=(scores[0] < 0, scores[1] > 0),
        top=(tops[0] == pair.answer_ids[0], tops[1] == pair.answer_ids[1]),
        score=two(got.score),
        prob_old=two(got.prob_old),
        prob_new=two(got.prob_new),
        top_ids=two(got.top_id),
        top_texts=(texts[0], texts[1]),
        cosine=float(got.cosine[0]),
        kl=float(got.kl[0]),
    )


def oracle_sentence(pair: Pair, found: Oracle) -> str:
    """What the oracle says, in a sentence."""
    if found.both:
        return "The model gets both clean prompts right."
    wrong = [
        f'the {which} prompt should give "{pair.answer_texts[n]}", and the model prefers "{pair.answer_texts[1 - n]}"'
        for n, which in enumerate(("old", "new"))
        if not found.right[n]
    ]
    return f"No claim can be made of this cache: {', and '.join(wrong)}."
