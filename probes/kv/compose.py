"""Composition: a block prefilled alone, moved behind a prefix by rotating its keys, against a prefill of the whole.

Axes: variant (a length of the block x how it is made), length. Made are, all behind the same prefix and before the
same suffix: the block as moved with its first K tokens run again, K = 0 and up; with all run again, which has to be
the full prefill but for rounding; and as controls for the block as given: not rotated, and left out. The tokens are
those of the three parts, one behind the other; the block has no BOS.
A key k cached at position p is moved by P with RoPE's rotations (arXiv 2104.09864): k' = R(p + P) R(p)^-1 k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from engram_lab.models.errors import LabError, PromptError, TargetError
from engram_lab.models.handle import Handle
from engram_lab.models.kv import KV, splice
from engram_lab.models.kv_runs import Prefill, check_kv, prefill, recompute
from engram_lab.models.rotary import Rotary, find_rotary, move
from engram_lab.probes.base import Array, Progress, Protocol, Record, Report, Timing, only, role
from engram_lab.probes.kv.append import ROUNDS, behind, seconds
from engram_lab.probes.kv.swap import check_request
from engram_lab.probes.spans import texts_of
from engram_lab.probes.stats import kl

PREFIX = (
    "You are the clerk of a small harbour. Answer from the page of today's log, and from nothing else. The harbour has "
    "four piers, and every ship has one of its own.\n"
)
BLOCK = (
    "The ferry Marta is moored at pier three and leaves at nine with forty guests. The tug Oskar waits at pier two. "
    "The fishing boat Linnea came in at dawn with herring and lies at pier four until the evening.\n"
)
SUFFIX = "The ferry Marta is moored at pier"
ANSWERS = (" three", " two", " four", " one")
KINDS = ("moved", "all", "unrotated", "left out")


@dataclass(frozen=True, eq=False)
class ComposeConfig(Record):
    """A request: one model, the three parts of a text, how many tokens of the block to run again.

    `prefix` may be empty. `answers`, if any, are those among which a decision is compared. `lengths` are further
    lengths of the block, which is repeated or cut for them. `time` measures seconds. Raises LabError.
    """

    models: tuple[str, ...]
    prefix: str = PREFIX
    block: str = BLOCK
    suffix: str = SUFFIX
    answers: tuple[str, ...] = ANSWERS
    recompute: tuple[int, ...] = (0, 2, 8)
    lengths: tuple[int, ...] = (16, 64, 256)
    time: bool = False

    def __post_init__(self) -> None:
        check_request(self.models, "refuse")
        if not self.block.strip() or not self.suffix.strip():
            raise PromptError("The block and the suffix need some text each: only the prefix may be empty.")
        if any(k < 0 for k in self.recompute) or list(self.recompute) != sorted(set(self.recompute)):
            raise LabError("The numbers of tokens to run again must be 0 or more, in rising order, each once.")
        if any(n < 1 for n in self.lengths) or len(set(self.lengths)) < len(self.lengths):
            raise LabError("The lengths of the block must be 1 or more, each once.")
        if len(self.answers) == 1 or any(not answer.strip() for answer in self.answers):
            raise LabError("Give at least two answers to decide among, none of them empty, or none at all.")


@dataclass(frozen=True, eq=False)
class ComposeTiming(Timing):
    """Seconds; DEFINITIONS of its front says of what."""

    seconds: Annotated[np.ndarray, Array("variant", unit="s", dtype="float64")]  # NaN for the controls
    full: Annotated[np.ndarray, Array("length", unit="s", dtype="float64")]
    continued: Annotated[np.ndarray, Array("length", unit="s", dtype="float64")]
    k: tuple[int, ...]  # for each the crossovers: the length from which on composing is faster at all longer ones too
    crossover_full: tuple[int, ...]  # [k] against the full prefill; 0 where there is none
    crossover_continued: tuple[int, ...]  # [k] against going on from the prefix
    said: str = field(metadata=role("prose"))


@dataclass(frozen=True, eq=False)
class ComposeResult(Record):
    """Composed against full; DEFINITIONS of its front says what each figure is."""

    name: str
    said: str = field(metadata=role("prose"))
    n_prefix: int
    n_suffix: int
    position: int = field(metadata=role("name"))  # where the block goes
    token_texts: tuple[str, ...]  # of the block as given
    kinds: tuple[str, ...]  # [variant] of KINDS
    names: tuple[str, ...]  # [variant]
    block_length: Annotated[np.ndarray, Array("variant", dtype="int64")]
    k: Annotated[np.ndarray, Array("variant", dtype="int64")]  # of the block's tokens run again; -1 for the controls
    computed: Annotated[np.ndarray, Array("variant", dtype="int64")]
    cosine: Annotated[np.ndarray, Array("variant", dtype="float64")]
    kl: Annotated[np.ndarray, Array("variant", unit="nats", dtype="float64")]
    same_top: Annotated[np.ndarray, Array("variant", dtype="bool")]
    same_decision: Annotated[np.ndarray, Array("variant", dtype="bool")]  # all true without answers
    largest_difference: Annotated[np.ndarray, Array("variant", unit="logits", dtype="float64")]
    top_id: Annotated[np.ndarray, Array("variant", dtype="int64", role="name")]
    top_texts: tuple[str, ...] = field(metadata=role("spelled"))  # [variant]
    decisions: tuple[str, ...] = field(metadata=role("spelled"))  # [variant] the likeliest answer; "" without answers
    lengths: Annotated[np.ndarray, Array("length", dtype="int64")]  # of the block; the first is as given
    full_tokens: Annotated[np.ndarray, Array("length", dtype="int64")]
    full_top_texts: tuple[str, ...] = field(metadata=role("spelled"))  # [length] of the full prefill
    full_decisions: tuple[str, ...] = field(metadata=role("spelled"))  # [length]
    digests: tuple[str, str] = field(metadata=role("hash"))  # of prefix and block as given, before and after
    timing: ComposeTiming | None = None


CONFIG, RESULT = ComposeConfig, ComposeResult


@dataclass(frozen=True)
class _Text:
    """The three parts in tokens, their caches, and the block where it belongs."""

    prefix_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    prefix: KV  # of no tokens, if the prefix is empty
    block: KV
    moved: KV

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.prefix_ids, *self.block_ids, *self.suffix_ids)


def run(
    handles: Sequence[Handle], config: ComposeConfig, progress: Progress | None = None
) -> Report[ComposeConfig, ComposeResult]:
    """Compositions of one text: cosine and KL [variant] of the next token's logits to those of a full prefill.

    A model without a rotary embedding is refused with the reason, as a LabError.

        >>> config = ComposeConfig((dense.name,), "Paris is", " the old", " mill", (" the", " sea"), lengths=(2,))
        >>> report = run([dense], config)
        >>> report.result.kl.shape == report.result.cosine.shape == (len(report.result.names),)
        True
    """
    handle = only(handles)
    prefix_ids, given, suffix_ids = parts(handle, config)
    lengths = [len(given), *(n for n in config.lengths if n != len(given))]
    if (longest := len(prefix_ids) + max(lengths) + len(suffix_ids)) > handle.context:
        raise PromptError(
            f"With a block of {max(lengths)} tokens the text is {longest} tokens long, and {handle.name} takes at most "
            f"{handle.context}: leave out the longest block."
        )
    firsts = _firsts(handle, config, suffix_ids)
    check_kv(handle)
    told = progress or (lambda fraction, doing: None)
    told(0.0, "prefix and block")
    # Every block begins like the longest one, and so does its cache.
    block = prefill(handle, _cut(given, max(lengths))).kv
    prefix = prefill(handle, prefix_ids).kv if prefix_ids else block.first(0)
    moved = move(handle, block, prefix.next_position)  # refuses a model whose cache cannot be moved
    digests = prefix.digest(), block.first(len(given)).digest()
    made: list[tuple[str, str, int, int, int, Tensor]] = []  # kind, name, length, k, computed, logits
    full: list[Tensor] = []
    texts: list[_Text] = []
    for n, length in enumerate(lengths):
        told(0.1 + 0.7 * n / len(lengths), f"block of {length} tokens")
        own = _cut(given, length)
        text = _Text(prefix_ids, own, suffix_ids, prefix, block.first(length), moved.first(length))
        texts.append(text)
        full.append(_whole(handle, text).logits[0, -1])
        for kind, name, k, computed, logits in _variants(handle, config, text, n == 0):
            made.append((kind, name, length, k, computed, logits))
    assert digests == (prefix.digest(), texts[0].block.digest())
    against = [full[lengths.index(length)] for _, _, length, _, _, _ in made]
    got, wanted = torch.stack([own[5] for own in made]).double(), torch.stack(against).double()
    log_p, log_q = wanted.log_softmax(-1), got.log_softmax(-1)
    tops, decided = got.argmax(-1), _decided(config, firsts, got)
    timing = _timing(handle, texts, [(own[0], own[2], own[3]) for own in made], told) if config.time else None
    result = ComposeResult(
        name=handle.name,
        said="",
        n_prefix=len(prefix_ids),
        n_suffix=len(suffix_ids),
        position=texts[0].prefix.next_position,
        token_texts=texts_of(handle.pieces(given, whole=False)),
        kinds=tuple(own[0] for own in made),
        names=tuple(own[1] for own in made),
        block_length=np.array([own[2] for own in made], dtype=np.int64),
        k=np.array([own[3] for own in made], dtype=np.int64),
        computed=np.array([own[4] for own in made], dtype=np.int64),
        cosine=torch.cosine_similarity(got, wanted, dim=-1).cpu().numpy(),
        kl=kl(log_p, log_q).clamp_min(0).cpu().numpy(),
        same_top=(tops == wanted.argmax(-1)).cpu().numpy(),
        same_decision=np.array([a == b for a, b in zip(decided, _decided(config, firsts, wanted), strict=True)]),
        largest_difference=(got - wanted).abs().amax(-1).cpu().numpy(),
        top_id=tops.cpu().numpy(),
        top_texts=texts_of(handle.pieces(tops.tolist(), whole=False)),
        decisions=tuple(decided),
        lengths=np.array(lengths, dtype=np.int64),
        full_tokens=np.array([len(text.ids) for text in texts], dtype=np.int64),
        full_top_texts=texts_of(handle.pieces([int(own.argmax()) for own in full], whole=False)),
        full_decisions=tuple(_decided(config, firsts, torch.stack(full).double())),
        digests=digests,
        timing=timing,
    )
    result = replace(result, said=_said(result, config))
    return Report("kv compose", config, Protocol.of(handles, [[text.ids for text in texts]], 0), result)


def parts(handle: Handle, config: ComposeConfig) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Tokens of prefix (with the model's BOS), block and suffix (without); PromptError for a part with none."""
    prefix = handle.encode(config.prefix) if config.prefix else ()
    block = behind(handle, config.prefix, config.block)
    suffix = behind(handle, config.block, config.suffix)
    for ids, name in ((block, "block"), (suffix, "suffix")):
        if not ids:
            raise PromptError(f"The tokenizer of {handle.name} makes no token of the {name}: type some text.")
    return prefix, block, suffix


def _cut(ids: Sequence[int], length: int) -> tuple[int, ...]:
    """Repeated or cut to a length."""
    return (tuple(ids) * (length // len(ids) + 1))[:length]


def _whole(handle: Handle, text: _Text) -> Prefill:
    return prefill(handle, text.ids)


def _composed(handle: Handle, text: _Text, moved: KV, k: int) -> Tensor:
    """Logits [vocab] of the suffix's last token, with k tokens of the block run again."""
    kv = recompute(handle, splice(text.prefix, moved), len(text.prefix_ids), k)
    return prefill(handle, text.suffix_ids, kv).logits[0, -1]


def _variants(
    handle: Handle, config: ComposeConfig, text: _Text, controls: bool
) -> Iterator[tuple[str, str, int, int, Tensor]]:
    """(kind, name, k, computed, logits [vocab]) of one length."""
    length, n_suffix = len(text.block_ids), len(text.suffix_ids)
    for k in (*(k for k in config.recompute if k < length), length):
        kind, name = ("moved", f"K = {k}") if k < length else ("all", "K = all")
        yield kind, name, k, k + n_suffix, _composed(handle, text, text.moved, k)
    if controls:
        unrotated = replace(text.moved, keys=text.block.keys)
        yield "unrotated", "not rotated", -1, n_suffix, _composed(handle, text, unrotated, 0)
        before = text.prefix if text.prefix_ids else None
        left = prefill(handle, text.suffix_ids, before).logits[0, -1]
        yield "left out", "no block", -1, n_suffix, left


def _firsts(handle: Handle, config: ComposeConfig, suffix_ids: Sequence[int]) -> tuple[int, ...]:
    """First tokens of the answers behind the suffix."""
    found = tuple(behind(handle, config.suffix, answer)[0] for answer in config.answers)
    if len(set(found)) < len(found):
        raise TargetError(
            f"Two of the answers begin with the same token for {handle.name}, and first tokens are compared: reword "
            "one."
        )
    return found


def _decided(config: ComposeConfig, firsts: Sequence[int], logits: Tensor) -> list[str]:
    """The likeliest answer of each row [vocab]."""
    if not firsts:
        return [""] * len(logits)
    return [config.answers[n] for n in logits[:, list(firsts)].argmax(-1).tolist()]


def _timing(
    handle: Handle, texts: Sequence[_Text], made: Sequence[tuple[str, int, int]], told: Progress
) -> ComposeTiming:
    """Seconds of every variant (kind, length, k) and of what it competes with."""
    lengths = [len(text.block_ids) for text in texts]
    rotary = find_rotary(handle)
    found = np.full(len(made), np.nan)
    full, continued = np.zeros(len(texts)), np.zeros(len(texts))
    for n, text in enumerate(texts):
        told(0.8 + 0.2 * n / len(texts), f"time with a block of {lengths[n]} tokens")
        mine = [v for v, (kind, length, _) in enumerate(made) if length == lengths[n] and kind in ("moved", "all")]
        full[n], continued[n], *found[mine] = seconds(
            partial(_whole, handle, text),
            partial(_continued, handle, text),
            *(partial(_from_parts, handle, rotary, text, made[v][2]) for v in mine),
        )
    ks = tuple(sorted({k for kind, _, k in made if kind == "moved"}))
    at = {(length, k): found[v] for v, (kind, length, k) in enumerate(made) if kind == "moved"}
    crossed = [
        tuple(crossover(lengths, [at.get((length, k), np.inf) for length in lengths], own.tolist()) for k in ks)
        for own in (full, continued)
    ]
    return ComposeTiming(
        ROUNDS, torch.get_num_threads(), found, full, continued, ks, crossed[0], crossed[1],
        " ".join(_crossing(lengths, ks, own, what) for own, what in zip(crossed, _RIVALS, strict=True)),
    )  # fmt: skip


_RIVALS = ("a full prefill", "going on from the prefix's cache")


def crossover(lengths: Sequence[int], ours: Sequence[float], theirs: Sequence[float]) -> int:
    """The shortest length from which on ours is faster at every length; 0 if it is not at the longest."""
    best = 0
    for length, own, other in sorted(zip(lengths, ours, theirs, strict=True), reverse=True):
        if not own < other:
            break
        best = length
    return best


def _crossing(lengths: Sequence[int], ks: Sequence[int], crossed: Sequence[int], what: str) -> str:
    told = {0: "not at the longest block", min(lengths): "at every length"}
    shown = [f"{told.get(n, f'from {n} tokens on')} with K = {k}" for k, n in zip(ks, crossed, strict=True)]
    measured = ", ".join(map(str, sorted(lengths)))
    return f"Composing was faster than {what} {', '.join(shown)} (blocks of {measured} tokens)."


def _continued(handle: Handle, text: _Text) -> Prefill:
    """Block and suffix behind the prefix's cache."""
    return prefill(handle, (*text.block_ids, *text.suffix_ids), text.prefix if text.prefix_ids else None)


def _from_parts(handle: Handle, rotary: Rotary, text: _Text, k: int) -> Tensor:
    """The block's keys rotated as `move` does it, and all that follows."""
    old, new = text.block.positions, text.moved.positions
    with handle.running():
        keys = tuple(rotary.turn(own, n, old, new) for n, own in enumerate(text.block.keys))
    return _composed(handle, text, replace(text.moved, keys=keys), k)


def _said(result: ComposeResult, config: ComposeConfig) -> str:
    """What composing the block as given did, in a sentence."""
    mine = [n for n, length in enumerate(result.block_length.tolist()) if length == result.lengths[0]]
    shown = ", ".join(f"{result.names[n]}: {result.cosine[n]:.4f} and {result.kl[n]:.3g}" for n in mine)
    lost = [result.names[n] for n in mine if result.kinds[n] == "moved" and not result.same_decision[n]]
    top = [result.names[n] for n in mine if result.kinds[n] == "moved" and not result.same_top[n]]
    said = f"Logit cosine with the full prefill and KL in nats, the block of {result.lengths[0]} tokens: {shown}."
    ends = [("top token", top), *([("decision", lost)] if config.answers else [])]
    told = [f"another {what} with {', '.join(own)}" if own else f"the same {what} each time" for what, own in ends]
    return f"{said} Moved, the block gives {' and '.join(told)}."
