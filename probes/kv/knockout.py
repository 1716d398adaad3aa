"""Knock-outs: which part of a prompt's cache the answer cannot do without.

Axes: variant (a target x how it is knocked out x draw). Targets are the field, the notes (punctuation, line ends and
special tokens behind the field: where a model could have written down what it made of it), all that is behind the
field, or chosen positions; all in the old prompt's clean cache.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from engram_lab.models.errors import LabError, PromptError
from engram_lab.models.handle import Handle
from engram_lab.models.kv import KV, KVEdit, blank_each, swap_each
from engram_lab.models.kv_runs import check_kv, continue_from, prefill
from engram_lab.probes.base import Array, Progress, Protocol, Record, Report, check_seed, only, role
from engram_lab.probes.kv.effects import Effects, Oracle, effects, oracle, oracle_sentence, run_clean
from engram_lab.probes.kv.scenario import Pair, Scenario, prepare
from engram_lab.probes.kv.swap import check_request
from engram_lab.probes.spans import texts_of

TARGETS = ("field", "notes", "downstream", "positions")
HOWS = ("zero", "mean", "random", "unrelated")
UNRELATED = (
    "On the first morning of the fair the square was full before eight. Two farmers had brought their goats, a potter "
    "had set up her wheel under the clock, and the baker's boy ran from stall to stall with a tray of rolls. By noon "
    "it rained a little, and nobody minded. The band played under the arches until the lamps were lit."
)


@dataclass(frozen=True, eq=False)
class KnockoutConfig(Record):
    """A request: one model, a scenario, what to knock out (`targets` of TARGETS) and how (`hows` of HOWS).

    `positions` are those of the target "positions". `unrelated` is repeated until it is as long as the prompt; "random"
    is drawn `draws` times with `seed`. Raises LabError.
    """

    models: tuple[str, ...]
    scenario: Scenario
    targets: tuple[str, ...] = ("field", "notes", "downstream")
    hows: tuple[str, ...] = HOWS
    positions: tuple[int, ...] = ()
    unrelated: str = UNRELATED
    draws: int = 4
    align: str = "refuse"
    seed: int = 0

    def __post_init__(self) -> None:
        check_request(self.models, self.align)
        for chosen, known, what in ((self.targets, TARGETS, "target"), (self.hows, HOWS, "way")):
            if not chosen or set(chosen) - set(known) or len(set(chosen)) < len(chosen):
                raise LabError(f"Name at least one {what} of a knock-out, each once, of: {', '.join(known)}.")
        if ("positions" in self.targets) != bool(self.positions):
            raise LabError('Chosen positions and the target "positions" go together: give both or neither.')
        check_seed(self.seed, self.draws, "draws")
        if not self.unrelated.strip():
            raise PromptError("The unrelated text is empty: type at least one word.")


@dataclass(frozen=True, eq=False)
class Anecdote(Record):
    """A published observation, tried on this prompt."""

    claim: str
    variants: tuple[str, ...]  # what it was tried with
    held: tuple[bool, ...]  # [variant]
    said: str = field(metadata=role("prose"))


@dataclass(frozen=True, eq=False)
class KnockoutResult(Record):
    """The knock-outs; DEFINITIONS of its front says what each figure is.

    Scores and flips are against the old prompt's clean run.
    """

    name: str
    pair: Pair
    oracle: Oracle
    targets: tuple[str, ...]  # [variant]
    hows: tuple[str, ...]
    draw: Annotated[np.ndarray, Array("variant", dtype="int64", role="name")]  # of the random ones, else -1
    positions: tuple[tuple[int, ...], ...]  # [variant]
    effects: Effects
    margin: Annotated[np.ndarray, Array("variant", unit="logits", dtype="float64")]
    margin_clean: float
    kept: Annotated[np.ndarray, Array("variant", dtype="bool")]
    top_texts: tuple[str, ...] = field(metadata=role("spelled"))  # [variant] the most likely token
    anecdotes: tuple[Anecdote, ...]
    left_out: tuple[str, ...]  # targets that this prompt has no position of
    digests: tuple[str, str] = field(metadata=role("hash"))


CONFIG, RESULT = KnockoutConfig, KnockoutResult


def run(
    handles: Sequence[Handle], config: KnockoutConfig, progress: Progress | None = None
) -> Report[KnockoutConfig, KnockoutResult]:
    """The knock-outs of one scenario: effects [variant] of each target of the cache blanked in each way.

    All that cannot be served is refused before the first forward, as a LabError.

        >>> cards = Scenario("Paris is the {field} of France.\\nTokyo is the old", "capital", "river", " mill", " sea")
        >>> report = run([handle], KnockoutConfig((handle.name,), cards, ("field",), ("zero",), draws=1, align="split"))
        >>> report.config.hows
        ('zero',)
    """
    handle = only(handles)
    pair = prepare(handle, config.scenario, config.align)
    where = {
        "field": pair.field,
        "notes": notes(handle, pair),
        "downstream": pair.downstream,
        "positions": tuple(sorted(set(config.positions))),
    }
    if bad := [p for p in where["positions"] if not 0 <= p < pair.n_editable]:
        raise LabError(
            f"Position {bad[0]} cannot be knocked out: the prompt has the positions 0 to {pair.n_editable - 1}."
        )
    check_kv(handle)
    other = unrelated_ids(handle, config.unrelated, pair.n_editable) if "unrelated" in config.hows else ()
    clean = run_clean(handle, pair)
    found = oracle(handle, pair, clean)
    targets = [target for target in config.targets if where[target]]
    tried = [
        (target, how, draw)
        for how in config.hows
        for draw in (range(config.draws) if how == "random" else (-1,))
        for target in targets
    ]

    def batches() -> Iterator[Tensor]:
        """Logits [target, vocab] of every way and draw, in the order of `tried`."""
        edits = [KVEdit(where[target]) for target in targets]
        generator = torch.Generator().manual_seed(config.seed)
        for n, how in enumerate(config.hows):
            for draw in range(config.draws if how == "random" else 1):
                if progress is not None:
                    progress((n + draw / config.draws) / len(config.hows), f"knocked out: {how}")
                if how in ("zero", "mean"):
                    batch = blank_each(clean.stale, edits, how)
                else:
                    donor = _noise(clean.stale, generator) if how == "random" else prefill(handle, other).kv
                    batch = swap_each(clean.stale, donor, edits)
                yield continue_from(handle, batch, clean.last)[:, -1]

    if not targets:
        raise LabError(f"The prompt has no position of {' or '.join(config.targets)}: name another target.")
    got = effects(batches(), pair, clean, clean.old)
    clean.check()
    result = KnockoutResult(
        name=handle.name,
        pair=pair,
        oracle=found,
        targets=tuple(target for target, _, _ in tried),
        hows=tuple(how for _, how, _ in tried),
        draw=np.array([draw for _, _, draw in tried], dtype=np.int64),
        positions=tuple(where[target] for target, _, _ in tried),
        effects=got,
        margin=-got.score,
        margin_clean=-found.score[0],
        kept=answer_kept(pair, found, got),
        top_texts=texts_of(handle.pieces(got.top_id.tolist(), whole=False)),
        anecdotes=_anecdotes(pair, found, tried, answer_kept(pair, found, got)),
        left_out=tuple(target for target in config.targets if not where[target]),
        digests=clean.digests,
    )
    ids = [[pair.ids_old, pair.ids_new, *([other] if other else [])]]
    return Report("kv knockout", config, Protocol.of(handles, ids, config.seed), result)


def answer_kept(pair: Pair, found: Oracle, got: Effects) -> np.ndarray:
    """[variant] whether the old prompt's answer survived: it leads, and is the top token if it was."""
    kept: np.ndarray = got.score < 0
    return kept & (got.top_id == pair.answer_ids[0]) if found.top[0] else kept


def notes(handle: Handle, pair: Pair) -> tuple[int, ...]:
    """Positions behind the field with nothing but punctuation or a line end, or a special token."""

    def is_note(position: int) -> bool:
        text = pair.token_texts_old[position]
        bare = text.strip()
        signs = bool(bare) and all(unicodedata.category(char)[0] == "P" for char in bare)
        return signs or (not bare and "\n" in text) or handle.is_special(pair.ids_old[position])

    return tuple(filter(is_note, pair.downstream))


def unrelated_ids(handle: Handle, text: str, n: int) -> tuple[int, ...]:
    """The first n tokens of a text that is repeated until it has as many."""

    def read(times: int) -> list[int]:
        ids: list[int] = handle.tokenizer(" ".join([text] * times), verbose=False)["input_ids"]
        return ids[:n]

    once = read(1)
    ids = once if len(once) >= n else read(n // max(len(once) - 1, 1) + 2)
    if len(ids) < n:
        raise PromptError(f"The tokenizer of {handle.name} makes no token of the unrelated text: type some words.")
    return tuple(ids)


def _noise(kv: KV, generator: torch.Generator) -> KV:
    """K and V drawn with the mean and spread that each entry has over positions; an Engram's history stays."""

    def drawn(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        return tensor.mean(dim=2, keepdim=True) + noise * tensor.std(dim=2, keepdim=True, correction=0)

    keys, values = tuple(map(drawn, kv.keys)), tuple(map(drawn, kv.values))
    return replace(kv, keys=keys, values=values, state=(*kv.state[:1], *map(drawn, kv.state[1:])))


def _anecdotes(
    pair: Pair, found: Oracle, tried: Sequence[tuple[str, str, int]], kept: np.ndarray
) -> tuple[Anecdote, ...]:
    """The two published ones: the field's K, V do not matter once the notes are written, and the notes do."""
    made = []
    for claim, target, hows, stays in (
        ("With random values at the field the answer stays.", "field", ("random", "unrelated"), True),
        ("With the notes behind the field cleared the answer is wrong.", "notes", ("zero", "mean"), False),
        ("With everything behind the field cleared the answer is wrong.", "downstream", ("zero", "mean"), False),
    ):
        mine = [n for n, (where, how, _) in enumerate(tried) if where == target and how in hows]
        held = tuple(bool(kept[n]) == stays for n in mine)
        if not mine:
            continue
        if not found.right[0]:
            said = oracle_sentence(pair, found)
        elif all(held):
            said = "It held here."
        else:
            said = f"It held here in {sum(held)} of {len(held)} tries." if any(held) else "It did not hold here."
        names = tuple(f"{tried[n][1]} {tried[n][2] + 1}" if tried[n][2] >= 0 else tried[n][1] for n in mine)
        made.append(Anecdote(claim, names, held, said))
    return tuple(made)
