"""The logit lens: what every layer's residual would predict, through the model's own final norm and head.

Axes: layer (0 is "embed", the residual before block 0; the last is final), pos (the prompts one after
another, each with exactly the ids the model got), k (best first), pair (positions of two models at the
same text).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch

from models.errors import AlignmentError, LabError, PromptError
from models.handle import Handle, single_token
from probes.base import Array, Progress, Protocol, Record, Report, arrays_of
from probes.lens_math import LensStatistics, lens_statistics

# One sentence for each figure, to print beside it.
DEFINITIONS = {
    "kl": "KL(p_final || p_layer) in nats: float32 softmax of the residual after final norm and head.",
    "entropy": "Entropy of the layer's prediction, in nats.",
    "top_ids": "The tokens with the largest logits, equals by rising id.",
    "target_rank": "How many tokens have a larger logit than the target; 0 is top.",
    "settle_depth": "The first layer from which the most likely token stays the final one.",
    "next_token_loss": "Cross-entropy of the model's own prediction with the prompt's next token, in nats.",
    "mean": "Means are over all positions of all prompts except a special token that leads a prompt.",
    "interval": "95 % percentile bootstrap over prompts, which are drawn whole; for two models in pairs.",
}
MAX_TOP_K = 100


@dataclass(frozen=True, eq=False)
class LensConfig(Record):
    """A request: one model or two, prompts, and what to report of each position.

    `target` is a text that is one token; `detail=False` leaves out top_k of each position, for sets of texts.
    `bootstrap` is the number of resamples drawn with `seed`. Raises PromptError or LabError.
    """

    models: tuple[str, ...]
    prompts: tuple[str, ...]
    target: str | None = None
    top_k: int = 5
    seed: int = 0
    bootstrap: int = 1000
    detail: bool = True

    def __post_init__(self) -> None:
        if len(self.models) not in (1, 2):
            raise LabError(f"The lens takes one model or two, not {len(self.models)}.")
        if not self.prompts:
            raise PromptError("No prompt was given: give at least one.")
        if not 1 <= self.top_k <= MAX_TOP_K:
            raise LabError(f"top_k is {self.top_k}; it must be from 1 to {MAX_TOP_K}.")
        if self.seed < 0 or self.bootstrap < 1:
            raise LabError("The seed must be 0 or more, and the number of bootstrap resamples 1 or more.")


@dataclass(frozen=True, eq=False)
class ModelLens(Record):
    """What the lens shows of one model; DEFINITIONS says what each figure is."""

    name: str
    layer_names: tuple[str, ...]
    token_texts: tuple[str, ...]  # [pos], a byte that is no whole character as \xNN
    prompt_index: Annotated[np.ndarray, Array("pos", dtype="int64")]
    token_ids: Annotated[np.ndarray, Array("pos", dtype="int64")]
    char_start: Annotated[np.ndarray, Array("pos", unit="bytes of the prompt in UTF-8", dtype="int64")]
    char_end: Annotated[np.ndarray, Array("pos", unit="bytes of the prompt in UTF-8", dtype="int64")]
    counted: Annotated[np.ndarray, Array("pos", dtype="bool")]  # whether the means take this position in
    kl: Annotated[np.ndarray, Array("layer", "pos", unit="nats")]
    entropy: Annotated[np.ndarray, Array("layer", "pos", unit="nats")]
    settle_depth: Annotated[np.ndarray, Array("pos", unit="index into layer_names", dtype="int64")]
    next_token_loss: Annotated[np.ndarray, Array("pos", unit="nats")]  # NaN at a prompt's last position
    mean_kl: Annotated[np.ndarray, Array("layer", unit="nats", dtype="float64")]
    kl_p10: Annotated[np.ndarray, Array("layer", unit="nats", dtype="float64")]
    kl_p90: Annotated[np.ndarray, Array("layer", unit="nats", dtype="float64")]
    mean_loss: float | None  # null if no position has a next token
    mean_settle_depth: float | None
    # Intervals: null for a single prompt.
    mean_kl_low: Annotated[np.ndarray | None, Array("layer", unit="nats", dtype="float64")] = None
    mean_kl_high: Annotated[np.ndarray | None, Array("layer", unit="nats", dtype="float64")] = None
    mean_loss_low: float | None = None
    mean_loss_high: float | None = None
    mean_settle_depth_low: float | None = None
    mean_settle_depth_high: float | None = None
    top_ids: Annotated[np.ndarray | None, Array("layer", "pos", "k", dtype="int64")] = None
    top_probs: Annotated[np.ndarray | None, Array("layer", "pos", "k", unit="probability")] = None
    token_names: dict[int, str] | None = None  # text of every id in top_ids
    target_id: int | None = None
    target_rank: Annotated[np.ndarray | None, Array("layer", "pos", dtype="int64")] = None
    target_prob: Annotated[np.ndarray | None, Array("layer", "pos", unit="probability")] = None


@dataclass(frozen=True, eq=False)
class Alignment(Record):
    """Positions of the two models behind which the same text lies: indices into their pos axes."""

    pos_a: Annotated[np.ndarray, Array("pair", dtype="int64")]
    pos_b: Annotated[np.ndarray, Array("pair", dtype="int64")]


@dataclass(frozen=True, eq=False)
class Difference(Record):
    """First model minus second over aligned positions, with the paired interval (null for one prompt).

    mean_kl and settle_depth are null if the numbers of layers differ, loss if the token ids do.
    """

    mean_kl: Annotated[np.ndarray | None, Array("layer", unit="nats", dtype="float64")] = None
    mean_kl_low: Annotated[np.ndarray | None, Array("layer", unit="nats", dtype="float64")] = None
    mean_kl_high: Annotated[np.ndarray | None, Array("layer", unit="nats", dtype="float64")] = None
    loss: float | None = None
    loss_low: float | None = None
    loss_high: float | None = None
    settle_depth: float | None = None
    settle_depth_low: float | None = None
    settle_depth_high: float | None = None


@dataclass(frozen=True, eq=False)
class LensResult(Record):
    """The lens of each model, and how two compare. `axes` and `units` are those of the models' arrays."""

    models: tuple[ModelLens, ...]
    axes: dict[str, tuple[str, ...]]
    units: dict[str, str]
    aligned: Alignment | None = None
    difference: Difference | None = None


CONFIG, RESULT = LensConfig, LensResult


def run(handles: Sequence[Handle], config: LensConfig, progress: Progress | None = None) -> Report:
    """The lens of one model or two on the prompts of `config`, each prompt in a forward of its own.

    All requests that cannot be served are refused before the first forward: PromptError, TargetError, and
    AlignmentError for two models whose positions cannot be matched by text.
    """
    if len(handles) != len(config.models):
        raise LabError(f"The request names {len(config.models)} models, and {len(handles)} were given.")
    targets = [None if config.target is None else single_token(handle, config.target) for handle in handles]
    ids = [[handle.encode(prompt) for prompt in config.prompts] for handle in handles]
    spans = [
        [_spans(handle, *each) for each in zip(config.prompts, own, strict=True)]
        for handle, own in zip(handles, ids, strict=True)
    ]
    aligned = _align(handles, ids, spans) if len(handles) == 2 else None
    weights = _weights(config)

    def told(n: int, i: int) -> Progress | None:
        """The progress of prompt i of model n, within the whole."""
        if progress is None:
            return None
        at, steps = n * len(config.prompts) + i, len(handles) * len(config.prompts)
        doing = f"{handles[n].name}: prompt {i + 1} of {len(config.prompts)}"
        return lambda fraction, _: progress((at + fraction) / steps, doing)

    models = []
    for n, handle in enumerate(handles):
        k = config.top_k if config.detail else 0
        read = [read_prompt(handle, own, k, targets[n], told(n, i)) for i, own in enumerate(ids[n])]
        models.append(_model_lens(handle, ids[n], spans[n], read, targets[n], weights))
    result = LensResult(
        tuple(models),
        {name: held.axes for name, held in arrays_of(ModelLens).items()},
        {name: held.unit for name, held in arrays_of(ModelLens).items() if held.unit},
        aligned,
        _difference(models[0], models[1], aligned, weights) if aligned else None,
    )
    return Report("lens", config, Protocol.of(handles, ids, config.seed), result)


def read_prompt(
    handle: Handle,
    ids: Sequence[int],
    top_k: int = 0,
    target_id: int | None = None,
    progress: Progress | None = None,
) -> tuple[LensStatistics, torch.Tensor]:
    """(statistics, next_token_loss [pos], NaN at the last) of one prompt's ids, in one forward."""
    with handle.running():
        got = handle.residuals([ids])
        statistics = lens_statistics(
            got.states[:, 0],
            handle.unembed,
            top_k=min(top_k, handle.vocab_size),
            target_id=target_id,
            progress=progress,
        )
        following = torch.tensor(ids[1:], dtype=torch.int64, device=got.logits.device)
        loss = torch.nn.functional.cross_entropy(got.logits[0, :-1].float(), following, reduction="none")
        return statistics, torch.cat([loss, loss.new_full((1,), torch.nan)])


@dataclass(frozen=True)
class _Spans:
    """Where a prompt's tokens lie in its UTF-8 bytes: ends [pos], starts [pos]; lossless if they spell it."""

    pieces: list[bytes]
    start: np.ndarray
    end: np.ndarray
    counted: np.ndarray
    lossless: bool


def _spans(handle: Handle, prompt: str, ids: Sequence[int]) -> _Spans:
    pieces, text = handle.pieces(ids), prompt.encode()
    special = [handle.is_special(i) for i in ids]
    counted = np.ones(len(ids), dtype=bool)
    counted[0] = len(ids) == 1 or not special[0]
    # A special token is no part of the text, unless its name was typed: behind the leading one, or at once.
    for typed_from in (len(ids), 1, 0):
        spelled = [b"" if special[n] and n < typed_from else piece for n, piece in enumerate(pieces)]
        if lossless := b"".join(spelled) == text:
            break
    else:
        spelled = [b"" if special[n] else piece for n, piece in enumerate(pieces)]
    end = np.minimum(np.cumsum([len(piece) for piece in spelled]), len(text)).astype(np.int64)
    return _Spans(pieces, np.concatenate([[0], end[:-1]]).astype(np.int64), end, counted, lossless)


def _align(handles: Sequence[Handle], ids: Sequence, spans: Sequence[Sequence[_Spans]]) -> Alignment:
    """Positions behind which the same text lies; AlignmentError if there are none but the prompts' ends."""
    pairs: list[tuple[int, int]] = []
    offset_a = offset_b = inner = 0
    for n, (ids_a, ids_b, a, b) in enumerate(zip(*ids, *spans, strict=True)):
        if ids_a == ids_b and a.pieces == b.pieces:
            matched = [(i, i) for i in range(len(ids_a))]
        else:
            for handle, own in zip(handles, (a, b), strict=True):
                if not own.lossless:
                    raise AlignmentError(
                        f"{handles[0].name} and {handles[1].name} have different tokenizers, and that of "
                        f"{handle.name} changes the text of prompt {n + 1}, so their positions cannot be "
                        "matched by text: compare models whose tokenizers keep it."
                    )
            behind = {int(end): i for i, end in enumerate(b.end)}  # the last token that ends there
            ends = {int(end): i for i, end in enumerate(a.end)}
            matched = [(i, behind[end]) for end, i in ends.items() if end in behind]
        last = (len(ids_a) - 1, len(ids_b) - 1)
        inner += sum(a.counted[i] and b.counted[j] and (i, j) != last for i, j in matched)
        inner += a.counted.sum() == 1 or b.counted.sum() == 1  # there is no more to match
        pairs += [(offset_a + i, offset_b + j) for i, j in matched]
        offset_a, offset_b = offset_a + len(ids_a), offset_b + len(ids_b)
    if not inner:
        raise AlignmentError(
            f"The tokens of {handles[0].name} and {handles[1].name} meet only at the end of the text, "
            "so no positions can be compared: use models whose tokenizers are more alike."
        )
    pos_a, pos_b = np.array(pairs, dtype=np.int64).T
    return Alignment(pos_a.copy(), pos_b.copy())


def _model_lens(
    handle: Handle,
    ids: Sequence[Sequence[int]],
    spans: Sequence[_Spans],
    read: Sequence[tuple[LensStatistics, torch.Tensor]],
    target_id: int | None,
    weights: np.ndarray | None,
) -> ModelLens:
    """One model's prompts put together, with the means over them."""

    def joined(name: str, axis: int) -> np.ndarray:
        return torch.cat([getattr(statistics, name) for statistics, _ in read], dim=axis).cpu().numpy()

    def text(piece: bytes) -> str:
        return piece.decode(errors="backslashreplace")

    index = np.repeat(np.arange(len(ids)), [len(own) for own in ids])
    counted = np.concatenate([own.counted for own in spans])
    kl, settle_depth = joined("kl", 1), joined("settle_depth", 0)
    loss = torch.cat([own for _, own in read]).cpu().numpy()
    mean_kl, mean_kl_low, mean_kl_high = _mean(kl, counted, index, weights)
    p10, p90 = np.quantile(kl[:, counted].astype(np.float64), [0.1, 0.9], axis=1)
    top_ids = joined("top_ids", 1)
    detail = top_ids.size > 0
    used = np.unique(top_ids).tolist()
    return ModelLens(
        name=handle.name,
        layer_names=handle.layer_names,
        token_texts=tuple(text(piece) for own in spans for piece in own.pieces),
        prompt_index=index,
        token_ids=np.concatenate([np.array(own, dtype=np.int64) for own in ids]),
        char_start=np.concatenate([own.start for own in spans]),
        char_end=np.concatenate([own.end for own in spans]),
        counted=counted,
        kl=kl,
        entropy=joined("entropy", 1),
        settle_depth=settle_depth,
        next_token_loss=loss,
        mean_kl=mean_kl,
        kl_p10=p10,
        kl_p90=p90,
        mean_kl_low=mean_kl_low,
        mean_kl_high=mean_kl_high,
        **_scalars("mean_loss", _mean(loss, counted, index, weights)),
        **_scalars("mean_settle_depth", _mean(settle_depth, counted, index, weights)),
        top_ids=top_ids if detail else None,
        top_probs=joined("top_probs", 1) if detail else None,
        token_names=dict(zip(used, map(text, handle.pieces(used, whole=False)), strict=True)) if detail else None,
        target_id=target_id,
        target_rank=None if target_id is None else joined("target_rank", 1),
        target_prob=None if target_id is None else joined("target_prob", 1),
    )


def _difference(a: ModelLens, b: ModelLens, aligned: Alignment, weights: np.ndarray | None) -> Difference:
    """Means of a - b over the pairs that both count; resampled like a single model, the pairing stays."""
    index, counted = a.prompt_index[aligned.pos_a], a.counted[aligned.pos_a] & b.counted[aligned.pos_b]

    def compared(name: str) -> tuple:
        in_a, in_b = getattr(a, name)[..., aligned.pos_a], getattr(b, name)[..., aligned.pos_b]
        return _mean(in_a.astype(np.float64) - in_b, counted, index, weights)

    fields: dict[str, Any] = {}
    if np.array_equal(a.token_ids, b.token_ids):
        fields |= _scalars("loss", compared("next_token_loss"))
    if len(a.layer_names) == len(b.layer_names):
        fields |= _scalars("settle_depth", compared("settle_depth"))
        fields |= dict(zip(("mean_kl", "mean_kl_low", "mean_kl_high"), compared("kl"), strict=True))
    return Difference(**fields)


def _weights(config: LensConfig) -> np.ndarray | None:
    """How often each resample draws each prompt, [resample, prompt]; None for one prompt."""
    n = len(config.prompts)
    if n == 1:
        return None
    return np.random.default_rng(config.seed).multinomial(n, np.full(n, 1 / n), size=config.bootstrap)


def _mean(values: np.ndarray, counted: np.ndarray, index: np.ndarray, weights: np.ndarray | None) -> tuple:
    """(mean, low, high) of values [..., pos] where counted and not NaN; the 95 % interval or None."""
    valid = counted & ~np.isnan(values.reshape(-1, values.shape[-1])[0])
    member = (index[valid] == np.arange(index.max() + 1)[:, None]).astype(np.float64)  # [prompt, pos]
    sums, counts = member @ values[..., valid].T.astype(np.float64), member.sum(axis=1)
    if not counts.any():
        return np.full(values.shape[:-1], np.nan), None, None
    mean = sums.sum(axis=0) / counts.sum()
    if weights is None:
        return mean, None, None
    drawn = (weights @ counts).reshape(-1, *[1] * (sums.ndim - 1))
    with np.errstate(invalid="ignore"):  # a resample may hold no position at all
        means = weights @ sums / drawn
    low, high = np.nanquantile(means, [0.025, 0.975], axis=0)
    return mean, low, high


def _scalars(name: str, mean: tuple) -> dict[str, Any]:
    """(mean, low, high) as the fields name, name_low, name_high; what is not defined is None."""
    keys = (name, f"{name}_low", f"{name}_high")
    return {k: None if v is None or np.isnan(v) else float(v) for k, v in zip(keys, mean, strict=True)}
