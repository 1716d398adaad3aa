"""The field alone swapped, and the model writes before it answers: does it find out what the cache says elsewhere?

Axes: variant (a number of tokens written x a source). Sources: the old prompt's cache, the same with K and V of the
field from the new prompt's, and the new prompt's cache. Each goes on by itself, greedily:
    source's cache of the prompt + cue + k tokens that the model writes + line end + the end of the question once more
and the answer is read at the last token. With k = 0 nothing is written, and the rest stays. In a chat template what is
written is the reply, which is then ended, and the question's end is a user's new turn (probes.kv.append.closing).
A source that ends its text early is asked there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from engram_lab.models.errors import LabError, PromptError
from engram_lab.models.handle import Handle
from engram_lab.models.kv import stack, swap
from engram_lab.models.kv_runs import check_kv, continue_from, generate
from engram_lab.probes.base import Array, Progress, Protocol, Record, Report, only, role
from engram_lab.probes.kv.append import behind, closing, tail
from engram_lab.probes.kv.effects import Effects, Oracle, effects, oracle, oracle_sentence, run_clean
from engram_lab.probes.kv.scenario import Pair, Scenario, prepare
from engram_lab.probes.kv.swap import check_request
from engram_lab.probes.spans import texts_of

SOURCES = ("old", "field", "new")
CUE = "\nBefore the answer, once more what the text says:"


@dataclass(frozen=True, eq=False)
class ReasoningConfig(Record):
    """A request: one model, a scenario, the numbers of tokens written, and the cue that they follow ("" for none)."""

    models: tuple[str, ...]
    scenario: Scenario
    tokens: tuple[int, ...] = (0, 4, 16, 32)
    cue: str = CUE
    align: str = "refuse"

    def __post_init__(self) -> None:
        check_request(self.models, self.align)
        if not self.tokens or any(k < 0 for k in self.tokens):
            raise LabError("Name at least one number of tokens to write, 0 or more.")
        if list(self.tokens) != sorted(set(self.tokens)):
            raise LabError("The numbers of tokens must be in rising order, each once.")


@dataclass(frozen=True, eq=False)
class ReasoningResult(Record):
    """What each source answers after each number of tokens; DEFINITIONS of its front says what each figure is."""

    name: str
    pair: Pair
    oracle: Oracle  # without cue and question
    said: str = field(metadata=role("prose"))
    direct: Effects  # by source, from the caches as they are, as in the swap ladder
    sources: tuple[str, ...]  # [variant] of SOURCES
    tokens: Annotated[np.ndarray, Array("variant", dtype="int64")]  # asked for
    written: Annotated[np.ndarray, Array("variant", dtype="int64")]  # fewer where the text ended
    effects: Effects
    holds: Annotated[np.ndarray, Array("variant", dtype="bool")]
    texts: tuple[str, ...]  # [variant] what was written
    question: str  # what is asked at the end
    digests: tuple[str, str] = field(metadata=role("hash"))


CONFIG, RESULT = ReasoningConfig, ReasoningResult


def run(
    handles: Sequence[Handle], config: ReasoningConfig, progress: Progress | None = None
) -> Report[ReasoningConfig, ReasoningResult]:
    """The field alone swapped, and some tokens written before the answer: scores by number of tokens written.

    All that cannot be served is refused before the first forward, as a LabError.

        >>> cards = Scenario("Paris is the {field} of France.\\nTokyo is the old", "capital", "river", " mill", " sea")
        >>> report = run([handle], ReasoningConfig((handle.name,), cards, (0, 2), align="split"))
        >>> report.config.tokens
        (0, 2)
    """
    handle, scenario = only(handles), config.scenario
    pair = prepare(handle, scenario, config.align)
    cue = behind(handle, "" if scenario.chat else tail(scenario), config.cue)
    asked, most = closing(handle, scenario), config.tokens[-1]
    longest = pair.n_tokens + len(cue) + most + len(asked)
    if longest > handle.context:
        raise PromptError(
            f"With {most} tokens written the text is {longest} tokens long, and {handle.name} takes at most "
            f"{handle.context}: write fewer."
        )
    check_kv(handle)
    told = progress or (lambda fraction, doing: None)
    told(0.0, "clean runs")
    clean = run_clean(handle, pair)
    caches = stack([clean.stale, swap(clean.stale, clean.donor, pair.field), clean.donor])
    straight = continue_from(handle, caches, clean.last)[:, -1]
    direct = effects([straight], pair, dataclasses.replace(clean, old=straight[0], new=straight[2]), straight[2])
    out, end = generate(
        handle, caches, (*clean.last, *cue), most, stop=_ends(handle), progress=lambda f: told(0.1 + 0.6 * f, "writing")
    )
    begin = pair.n_tokens + len(cue)
    rows = [_until_end(row, _ends(handle)) for row in out.tolist()]
    found: list[Effects] = []
    for n, k in enumerate(config.tokens):
        told(0.7 + 0.3 * n / len(config.tokens), f"answer after {k} tokens")
        lengths = [min(k, len(row)) for row in rows]
        logits = torch.stack(
            [_answer(handle, end.kv.row(i).first(begin + length), asked) for i, length in enumerate(lengths)]
        )
        found.append(effects([logits], pair, dataclasses.replace(clean, old=logits[0], new=logits[2]), logits[2]))
    clean.check()
    cut = [row[:k] for k in config.tokens for row in rows]
    holds = [own.score[0] < 0 < own.score[2] for own in found]
    told_right = oracle(handle, pair, clean)
    result = ReasoningResult(
        name=handle.name,
        pair=pair,
        oracle=told_right,
        said=_said(pair, told_right, config, direct, found),
        direct=direct,
        sources=SOURCES * len(config.tokens),
        tokens=np.repeat(np.array(config.tokens, dtype=np.int64), len(SOURCES)),
        written=np.array([len(own) for own in cut], dtype=np.int64),
        effects=_together(found),
        holds=np.repeat(np.array(holds, dtype=bool), len(SOURCES)),
        texts=texts_of([b"".join(handle.pieces(tokens, whole=False)) for tokens in cut]),
        question=tail(scenario),
        digests=clean.digests,
    )
    return Report("kv reasoning", config, Protocol.of(handles, [[pair.ids_old, pair.ids_new, cue, asked]], 0), result)


def _answer(handle: Handle, kv: Any, asked: Sequence[int]) -> Tensor:
    return continue_from(handle, kv, asked)[0, -1]


def _ends(handle: Handle) -> tuple[int, ...]:
    """Tokens that end a text of this model."""
    ends: set[int] = set()
    for owner in (getattr(handle.model, "generation_config", None), handle.model.config.get_text_config()):
        own = getattr(owner, "eos_token_id", None)
        ends |= set(own) if isinstance(own, list | tuple) else {own} if isinstance(own, int) else set()
    if isinstance(handle.tokenizer.eos_token_id, int):
        ends.add(handle.tokenizer.eos_token_id)
    return tuple(sorted(ends))


def _until_end(row: Sequence[int], ends: Sequence[int]) -> list[int]:
    """What was written before the first token that ends a text."""
    return list(row[: next((n for n, own in enumerate(row) if own in ends), len(row))])


def _together(parts: Sequence[Effects]) -> Effects:
    return Effects(
        **{
            item.name: np.concatenate([getattr(part, item.name) for part in parts])
            for item in dataclasses.fields(Effects)
        }
    )


def _said(pair: Pair, found: Oracle, config: ReasoningConfig, direct: Effects, after: Sequence[Effects]) -> str:
    """Recovery of the field alone, at once and after writing; only where the model gets both clean prompts right."""
    if not found.both:
        return oracle_sentence(pair, found)
    parts = []
    for k, own in zip(config.tokens, after, strict=True):
        if own.score[0] < 0 < own.score[2]:
            parts.append(f"{own.recovery[1]:.0%} after {k} tokens ({'new' if own.score[1] > 0 else 'old'} answer)")
        else:
            parts.append(f"no claim after {k} (a clean cache answers wrongly there)")
    return f"The field alone recovers {direct.recovery[1]:.0%} when the answer is read at once; {', '.join(parts)}."
