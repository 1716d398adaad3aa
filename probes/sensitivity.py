"""What a memory is needed for: loss on sets of texts with it intact, changed or off.

Axes: set (of texts), condition (the first is the model as it is; then each control; then the second model), item.
An item is a text and the answer that ends it; only the answer's tokens are scored. Without an answer all tokens are,
but, as in the lens, not what a special token that leads the text predicts. The change of a condition is its mean
cross-entropy over these tokens less that of the model as it is. That facts need the memory and reading does not is a
finding of Engram (arXiv 2601.07372).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from engram_lab.models.errors import DataError, LabError
from engram_lab.models.handle import Handle
from engram_lab.models.memory import Edit, check_edit, edited_logits
from engram_lab.probes.base import Array, Progress, Protocol, Record, Report, check_handles, check_seed, part
from engram_lab.probes.batches import by_length, padded
from engram_lab.probes.gates import edit_of
from engram_lab.probes.stats import draws, percentiles, ratio

INTACT = "as it is"
BATCH_TOKENS = 2048


@dataclass(frozen=True, eq=False)
class Item(Record):
    """A text and what should follow it; an empty answer scores the whole text. DataError if both are empty."""

    text: str
    answer: str = ""

    def __post_init__(self) -> None:
        if not self.text:
            raise DataError(f'An item with the answer "{self.answer}" has no text before it.')


@dataclass(frozen=True, eq=False)
class TextSet(Record):
    """A named set of items. DataError for an empty one."""

    name: str
    items: tuple[Item, ...]

    def __post_init__(self) -> None:
        if not self.items:
            raise DataError(f"The set {self.name} holds no item.")


@dataclass(frozen=True, eq=False)
class SensitivityConfig(Record):
    """A request: a model with a memory, maybe a second model to stand beside it, sets, and the controls.

    Each control is "name" or "name@layer" with a name of models.memory.CONTROLS; `seed` draws the shuffle and the
    `bootstrap` resamples. Raises LabError.
    """

    models: tuple[str, ...]
    sets: tuple[TextSet, ...]
    controls: tuple[str, ...] = ("off",)
    seed: int = 0
    bootstrap: int = 1000

    def __post_init__(self) -> None:
        if len(self.models) not in (1, 2):
            raise LabError(f"This takes one model with a memory, or two models, not {len(self.models)}.")
        if not self.sets:
            raise DataError("No text set was given: give at least one.")
        if len({texts.name for texts in self.sets}) < len(self.sets):
            raise DataError("Two text sets have the same name: give each its own.")
        if len(set(self.controls)) < len(self.controls):
            raise LabError("A control is named twice: name each once.")
        check_seed(self.seed, self.bootstrap)


@dataclass(frozen=True, eq=False)
class SensitivityResult(Record):
    """DEFINITIONS of its front says what each figure is."""

    sets: tuple[str, ...]
    conditions: tuple[str, ...]
    n_items: Annotated[np.ndarray, Array("set", dtype="int64")]
    n_tokens: Annotated[np.ndarray, Array("set", dtype="int64")]  # scored, of the first model
    loss: Annotated[np.ndarray, Array("set", "condition", unit="nats a token", dtype="float64")]
    loss_low: Annotated[np.ndarray, Array("set", "condition", unit="nats a token", dtype="float64")]
    loss_high: Annotated[np.ndarray, Array("set", "condition", unit="nats a token", dtype="float64")]
    change: Annotated[np.ndarray, Array("set", "condition", unit="nats a token", dtype="float64")]
    change_low: Annotated[np.ndarray, Array("set", "condition", unit="nats a token", dtype="float64")]
    change_high: Annotated[np.ndarray, Array("set", "condition", unit="nats a token", dtype="float64")]
    contrast: Annotated[np.ndarray, Array("set", "condition", unit="nats a token", dtype="float64")]
    contrast_low: Annotated[np.ndarray, Array("set", "condition", unit="nats a token", dtype="float64")]
    contrast_high: Annotated[np.ndarray, Array("set", "condition", unit="nats a token", dtype="float64")]
    top: Annotated[np.ndarray, Array("set", "condition", unit="share of items", dtype="float64")]  # NaN: no answers
    set_index: Annotated[np.ndarray, Array("item", dtype="int64", role="name")]
    item_loss: Annotated[np.ndarray, Array("condition", "item", unit="nats", dtype="float64")]  # summed over tokens
    item_tokens: Annotated[np.ndarray, Array("condition", "item", dtype="int64")]
    item_top: Annotated[np.ndarray, Array("condition", "item", dtype="bool")]


CONFIG, RESULT = SensitivityConfig, SensitivityResult


def run(
    handles: Sequence[Handle], config: SensitivityConfig, progress: Progress | None = None
) -> Report[SensitivityConfig, SensitivityResult]:
    """The losses of every set under every condition; LabError and DataError before the first forward.

    The result's arrays go over [set, condition] and [condition, item]; the first condition is the model as it is, then
    come the controls, then the second model.

        >>> texts = TextSet("rivers", (Item("The river runs past the old mill"), Item("Paris is the", " capital")))
        >>> report = run([handle], SensitivityConfig((handle.name,), (texts,), bootstrap=9))
        >>> report.result.conditions, report.result.change.shape
        (('as it is', 'off'), (1, 2))
    """
    check_handles(handles, len(config.models))
    edits: list[tuple[Handle, Edit | None]] = [(handles[0], None)]
    for control in config.controls:
        edits.append((handles[0], edit_of(control, config.seed)))
        check_edit(handles[0], edits[-1][1] or Edit())
    edits += [(handle, None) for handle in handles[1:]]
    items = [item for texts in config.sets for item in texts.items]
    encoded = {id(handle): [_encode(handle, item) for item in items] for handle in handles}
    _check_tokens(handles, items, encoded)
    measured = []
    for n, (handle, edit) in enumerate(edits):
        name = handle.name if edit is None else f"{handle.name}, {config.controls[n - 1]}"
        tell = part(progress, n / len(edits), (n + 1) / len(edits))
        measured.append(_scores(handle, encoded[id(handle)], edit, name, tell))
    loss, tokens, top = (np.stack(part) for part in zip(*measured, strict=True))
    conditions = (INTACT, *config.controls, *(handle.name for handle in handles[1:]))
    ids = [[tokens for tokens, _ in encoded[id(handle)]] for handle in handles]
    return Report(
        "sensitivity",
        config,
        Protocol.of(handles, ids, config.seed),
        _result(config, conditions, loss, tokens, top, [bool(item.answer) for item in items]),
    )


def _encode(handle: Handle, item: Item) -> tuple[tuple[int, ...], int]:
    """(ids, first scored position): the tokens that end behind the text; of a whole text see above."""
    ids = handle.encode(item.text + item.answer)
    if not item.answer:
        first = 2 if handle.is_special(ids[0]) else 1
        if len(ids) <= first:
            raise DataError(f'The text "{item.text}" is one token for {handle.name}, which leaves nothing to score.')
        return ids, first
    if not handle.lossless(item.text + item.answer, ids):
        raise DataError(
            f'The tokenizer of {handle.name} changes the text "{item.text[-40:]}{item.answer}", so its answer cannot '
            "be told from it: use a model whose tokenizer keeps the text."
        )
    pieces, end = handle.pieces(ids), 0
    for position, (token, piece) in enumerate(zip(ids, pieces, strict=True)):
        end += 0 if handle.is_special(token) else len(piece)
        if end > len(item.text.encode()):
            if not position:
                break
            return ids, position
    raise DataError(f'The answer "{item.answer}" of "{item.text[-40:]}" is no token of its own for {handle.name}.')


def _check_tokens(
    handles: Sequence[Handle], items: Sequence[Item], encoded: Mapping[int, Sequence[tuple[tuple[int, ...], int]]]
) -> None:
    """LabError where two models cut a text into different numbers of tokens: nats of each would be of other things."""
    for n, item in enumerate(items):
        counts = [len(ids) - first for ids, first in (encoded[id(handle)][n] for handle in handles)]
        if len(set(counts)) > 1:
            raise LabError(
                f'{handles[0].name} scores {counts[0]} tokens of "{(item.text + item.answer)[:60]}" and '
                f"{handles[1].name} {counts[1]}, so their nats a token cannot be compared: compare models of one "
                "tokenizer."
            )


def _scores(
    handle: Handle,
    encoded: Sequence[tuple[tuple[int, ...], int]],
    edit: Edit | None,
    name: str,
    progress: Progress | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(summed loss, scored tokens, whether the first scored token is the top one), each [item]."""
    loss, top = np.zeros(len(encoded)), np.zeros(len(encoded), dtype=bool)
    tokens = np.array([len(ids) - first for ids, first in encoded], dtype=np.int64)
    lengths, done = [len(ids) for ids, _ in encoded], 0
    for batch in by_length(lengths, BATCH_TOKENS):
        together = padded([encoded[i][0] for i in batch])
        with handle.running():
            logits = handle.residuals(together).logits if edit is None else edited_logits(handle, together, edit)
            following = together[:, 1:].to(logits.device)
            nats = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), following.flatten(), reduction="none"
            ).view_as(following)
            best = logits[:, :-1].argmax(dim=-1) == following
        for row, i in enumerate(batch):
            first = encoded[i][1] - 1
            loss[i] = nats[row, first : lengths[i] - 1].double().sum().item()
            top[i] = bool(best[row, first])
        done += len(batch)
        if progress is not None:
            progress(done / len(encoded), name)
    return loss, tokens, top


def _result(
    config: SensitivityConfig,
    conditions: tuple[str, ...],
    loss: np.ndarray,
    tokens: np.ndarray,
    top: np.ndarray,
    answered: Sequence[bool],
) -> SensitivityResult:
    """The means and intervals of loss, tokens and top [condition, item]."""
    index = np.repeat(np.arange(len(config.sets)), [len(texts.items) for texts in config.sets])
    rng = np.random.default_rng(config.seed)
    drawn = []
    for texts in config.sets:
        drawn.append(np.full((1 + config.bootstrap, len(texts.items)), np.nan))  # a single item has no spread to tell
        known = draws(texts.items, config.bootstrap, rng)
        drawn[-1][: len(known)] = known

    def means(s: int) -> np.ndarray:
        """Loss a token [draw, condition] of one set."""
        mine = index == s
        return ratio(drawn[s] @ loss[:, mine].T, drawn[s] @ tokens[:, mine].T)

    losses = np.stack([means(s) for s in range(len(config.sets))])  # [set, draw, condition]
    changes = losses - losses[:, :, :1]
    contrasts = changes[:1] - changes
    share = np.full((len(config.sets), len(conditions)), np.nan)
    for s in range(len(config.sets)):
        mine = (index == s) & np.array(answered)
        if mine.any():
            share[s] = top[:, mine].mean(axis=1)
    fields: dict[str, np.ndarray] = {}
    for name, values in (("loss", losses), ("change", changes), ("contrast", contrasts)):
        low, high = percentiles(values[:, 1:].swapaxes(0, 1), values[:, 0])
        fields |= {name: values[:, 0].copy(), f"{name}_low": low, f"{name}_high": high}
    return SensitivityResult(
        sets=tuple(texts.name for texts in config.sets),
        conditions=conditions,
        n_items=np.bincount(index, minlength=len(config.sets)).astype(np.int64),
        n_tokens=np.array([tokens[0, index == s].sum() for s in range(len(config.sets))]),
        **fields,
        top=share,
        set_index=index,
        item_loss=loss,
        item_tokens=tokens,
        item_top=top,
    )
