"""The lens: what every layer's residual would predict, through the model's own final norm and head.

The logit lens (nostalgebraist 2020) reads the residual as it is, the tuned lens (arXiv 2303.08112) after an affine
translator of its layer (probes/tuned_lens.py). Axes are those of probes/lens_result.py, formulas those of
probes/lens_math.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from engram_lab.models.errors import AlignmentError, LabError, PromptError
from engram_lab.models.handle import Handle, single_token
from engram_lab.probes import definitions
from engram_lab.probes.base import Progress, Protocol, Record, Report, arrays_of
from engram_lab.probes.lens_math import LensStatistics, lens_statistics
from engram_lab.probes.lens_result import Alignment, Difference, LensResult, ModelLens, TunedReading
from engram_lab.probes.tuned_lens import Translators, find, open_translators

# One sentence for each figure, to print beside it.
DEFINITIONS = definitions.LENS
MAX_TOP_K = 100
TOGETHER = 512  # tokens: prompts of one length share a forward up to this


@dataclass(frozen=True, eq=False)
class LensConfig(Record):
    """A request: one model or two, prompts, and what to report of each position.

    `target` is a text that is one token; `detail=False` leaves out top_k of each position, for sets of texts;
    `tuned` adds the tuned lens, for models that have translators.
    `bootstrap` is the number of resamples drawn with `seed`. Raises PromptError or LabError.
    """

    models: tuple[str, ...]
    prompts: tuple[str, ...]
    target: str | None = None
    top_k: int = 5
    seed: int = 0
    bootstrap: int = 1000
    detail: bool = True
    tuned: bool = False

    def __post_init__(self) -> None:
        if len(self.models) not in (1, 2):
            raise LabError(f"The lens takes one model or two, not {len(self.models)}.")
        if not self.prompts:
            raise PromptError("No prompt was given: give at least one.")
        if not 1 <= self.top_k <= MAX_TOP_K:
            raise LabError(f"top_k is {self.top_k}; it must be from 1 to {MAX_TOP_K}.")
        if self.seed < 0 or self.bootstrap < 1:
            raise LabError("The seed must be 0 or more, and the number of bootstrap resamples 1 or more.")


CONFIG, RESULT = LensConfig, LensResult


def depends(handles: Sequence[Handle], config: LensConfig) -> list[str]:
    """What a result depends on beside request and weights: which translators there are now."""
    if not config.tuned:
        return []
    found = [find(handle) for handle in handles]
    return ["" if path is None else f"{path} {path.stat().st_mtime_ns}" for path in found]


def run(handles: Sequence[Handle], config: LensConfig, progress: Progress | None = None) -> Report:
    """The lens of one model or two on the prompts of `config`; prompts of one length share a forward.

    All requests that cannot be served are refused before the first forward: PromptError, TargetError,
    NoTranslatorsError or CheckpointError for a tuned lens, and AlignmentError for two models whose positions cannot
    be matched by text.
    """
    if len(handles) != len(config.models):
        raise LabError(f"The request names {len(config.models)} models, and {len(handles)} were given.")
    targets = [None if config.target is None else single_token(handle, config.target) for handle in handles]
    ids = [[handle.encode(prompt) for prompt in config.prompts] for handle in handles]
    spans = [
        [spans_of(handle, *each) for each in zip(config.prompts, own, strict=True)]
        for handle, own in zip(handles, ids, strict=True)
    ]
    translators = [open_translators(handle) if config.tuned else None for handle in handles]
    aligned = align(handles, ids, spans) if len(handles) == 2 else None
    weights = resample_weights(config)

    def told(n: int) -> Progress | None:
        """The progress of model n, within the whole."""
        return progress and (lambda fraction, doing: progress((n + fraction) / len(handles), doing))

    models = []
    for n, handle in enumerate(handles):
        k = min(config.top_k, handle.vocab_size) if config.detail else 0
        read = read_prompts(handle, ids[n], k, targets[n], translators[n], told(n))
        models.append(_model_lens(handle, config, ids[n], spans[n], read, targets[n], translators[n], weights))
    result = LensResult(
        tuple(models),
        {name: held.axes for name, held in arrays_of(ModelLens).items()},
        {name: held.unit for name, held in arrays_of(ModelLens).items() if held.unit},
        aligned,
        _difference(models[0], models[1], aligned, weights) if aligned else None,
    )
    return Report("lens", config, Protocol.of(handles, ids, config.seed), result)


def read_prompts(
    handle: Handle,
    ids: Sequence[Sequence[int]],
    top_k: int = 0,
    target_id: int | None = None,
    translators: Translators | None = None,
    progress: Progress | None = None,
) -> tuple[list[LensStatistics], torch.Tensor]:
    """([logit lens, and the tuned one with `translators`], next_token_loss [pos], NaN at each prompt's last).

    pos runs over the prompts in their order; those of one length go through the model together, so none is padded.
    """
    batches = _batches([len(own) for own in ids])
    lenses = 1 if translators is None else 2
    read: list[list[LensStatistics]] = [[] for _ in range(lenses)]
    losses, done = [], 0

    def tell(part: float) -> None:
        if progress is not None:
            progress((done + part * len(batch)) / len(ids), f"{handle.name}: prompt {done + 1} of {len(ids)}")

    with handle.running():
        for batch in batches:
            got = handle.residuals([ids[n] for n in batch])
            for n, own in enumerate(read):
                states = got.states if n == 0 or translators is None else translators.apply(got.states)
                statistics = lens_statistics(
                    states.flatten(1, 2),
                    handle.unembed,
                    top_k=top_k,
                    target_id=target_id,
                    progress=lambda fraction, _, n=n: tell((n + fraction) / lenses),  # type: ignore[misc]
                )
                own.append(statistics)
            following = torch.tensor([ids[n][1:] for n in batch], dtype=torch.int64, device=got.logits.device)
            loss = torch.nn.functional.cross_entropy(
                got.logits[:, :-1].float().transpose(1, 2), following, reduction="none"
            )
            losses.append(torch.cat([loss, loss.new_full((len(batch), 1), torch.nan)], dim=1).flatten())
            done += len(batch)
    # From the order of the batches to that of the prompts.
    starts = np.cumsum([0, *map(len, ids)])
    places = [np.arange(starts[n], starts[n + 1]) for batch in batches for n in batch]
    order = torch.from_numpy(np.argsort(np.concatenate(places))).to(handle.device)
    return [_in_order(own, order) for own in read], torch.cat(losses)[order]


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Prompts of one length, up to TOGETHER tokens, by their first prompt."""
    alike: dict[int, list[int]] = {}
    for n, length in enumerate(lengths):
        alike.setdefault(length, []).append(n)
    batches = []
    for length, members in alike.items():
        size = max(1, TOGETHER // length)
        batches += [members[n : n + size] for n in range(0, len(members), size)]
    return sorted(batches)


def _in_order(parts: Sequence[LensStatistics], order: torch.Tensor) -> LensStatistics:
    """Statistics of several batches as one, its positions in `order`."""

    def joined(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if values[0] is None:
            return None
        axis = 0 if name == "settle_depth" else 1
        return torch.cat(values, dim=axis).index_select(axis, order)

    return LensStatistics(**{item.name: joined(item.name) for item in fields(LensStatistics)})


@dataclass(frozen=True)
class Spans:
    """Where a prompt's tokens lie in its UTF-8 bytes: ends [pos], starts [pos]; lossless if they spell it."""

    pieces: list[bytes]
    start: np.ndarray
    end: np.ndarray
    counted: np.ndarray
    lossless: bool


def spans_of(handle: Handle, prompt: str, ids: Sequence[int]) -> Spans:
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
    return Spans(pieces, np.concatenate([[0], end[:-1]]).astype(np.int64), end, counted, lossless)


def align(handles: Sequence[Handle], ids: Sequence, spans: Sequence[Sequence[Spans]]) -> Alignment:
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


def _reading(
    handle: Handle,
    statistics: LensStatistics,
    counted: np.ndarray,
    index: np.ndarray,
    weights: np.ndarray | None,
) -> dict[str, Any]:
    """The fields of a Reading."""
    found = {item.name: getattr(statistics, item.name) for item in fields(LensStatistics)}
    arrays: dict[str, Any] = {name: None if v is None else v.cpu().numpy() for name, v in found.items()}
    kl, top_ids = arrays["kl"], arrays["top_ids"]
    mean_kl, mean_kl_low, mean_kl_high = mean_interval(kl, counted, index, weights)
    p10, p90 = np.quantile(kl[:, counted].astype(np.float64), [0.1, 0.9], axis=1)
    detail = top_ids.size > 0
    used = np.unique(top_ids).tolist()
    names = dict(zip(used, map(_text, handle.pieces(used, whole=False)), strict=True)) if detail else None
    del arrays["argmax"]
    return arrays | {
        "mean_kl": mean_kl,
        "mean_kl_low": mean_kl_low,
        "mean_kl_high": mean_kl_high,
        "kl_p10": p10,
        "kl_p90": p90,
        **scalar_fields("mean_settle_depth", mean_interval(arrays["settle_depth"], counted, index, weights)),
        "top_ids": top_ids if detail else None,
        "top_probs": arrays["top_probs"] if detail else None,
        "token_names": names,
    }


def _text(piece: bytes) -> str:
    return piece.decode(errors="backslashreplace")


def _model_lens(
    handle: Handle,
    config: LensConfig,
    ids: Sequence[Sequence[int]],
    spans: Sequence[Spans],
    read: tuple[list[LensStatistics], torch.Tensor],
    target_id: int | None,
    translators: Translators | None,
    weights: np.ndarray | None,
) -> ModelLens:
    """One model's prompts put together, with the means over them."""
    index = np.repeat(np.arange(len(ids)), [len(own) for own in ids])
    counted = np.concatenate([own.counted for own in spans])
    loss = read[1].cpu().numpy()
    logit, *rest = (_reading(handle, statistics, counted, index, weights) for statistics in read[0])
    tuned = None
    if translators is not None:
        tuned = TunedReading(**rest[0], fit=translators.info, prompts_in_fit=translators.seen(config.prompts))
    return ModelLens(
        name=handle.name,
        layer_names=handle.layer_names,
        token_texts=tuple(_text(piece) for own in spans for piece in own.pieces),
        prompt_index=index,
        token_ids=np.concatenate([np.array(own, dtype=np.int64) for own in ids]),
        char_start=np.concatenate([own.start for own in spans]),
        char_end=np.concatenate([own.end for own in spans]),
        counted=counted,
        next_token_loss=loss,
        **logit,
        **scalar_fields("mean_loss", mean_interval(loss, counted, index, weights)),
        **scalar_fields("mean_final_entropy", mean_interval(logit["entropy"][-1], counted, index, weights)),
        target_id=target_id,
        tuned=tuned,
    )


def _difference(a: ModelLens, b: ModelLens, aligned: Alignment, weights: np.ndarray | None) -> Difference:
    """Means of a - b over the pairs that both count; resampled like a single model, the pairing stays."""
    index, counted = a.prompt_index[aligned.pos_a], a.counted[aligned.pos_a] & b.counted[aligned.pos_b]

    def compared(in_a: np.ndarray, in_b: np.ndarray) -> tuple:
        values = in_a[..., aligned.pos_a].astype(np.float64) - in_b[..., aligned.pos_b]
        return mean_interval(values, counted, index, weights)

    found: dict[str, Any] = scalar_fields("final_entropy", compared(a.entropy[-1], b.entropy[-1]))
    if np.array_equal(a.token_ids, b.token_ids):
        found |= scalar_fields("loss", compared(a.next_token_loss, b.next_token_loss))
    if len(a.layer_names) == len(b.layer_names):
        for prefix, x, y in (("", a, b), ("tuned_", a.tuned, b.tuned)):
            if x is not None and y is not None:
                found |= scalar_fields(f"{prefix}settle_depth", compared(x.settle_depth, y.settle_depth))
                names = [f"{prefix}mean_kl{end}" for end in ("", "_low", "_high")]
                found |= dict(zip(names, compared(x.kl, y.kl), strict=True))
    return Difference(**found)


def resample_weights(config: LensConfig) -> np.ndarray | None:
    """How often each resample draws each prompt, [resample, prompt]; None for one prompt."""
    n = len(config.prompts)
    if n == 1:
        return None
    return np.random.default_rng(config.seed).multinomial(n, np.full(n, 1 / n), size=config.bootstrap)


def mean_interval(values: np.ndarray, counted: np.ndarray, index: np.ndarray, weights: np.ndarray | None) -> tuple:
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


def scalar_fields(name: str, mean: tuple) -> dict[str, Any]:
    """(mean, low, high) as the fields name, name_low, name_high; what is not defined is None."""
    keys = (name, f"{name}_low", f"{name}_high")
    return {k: None if v is None or np.isnan(v) else float(v) for k, v in zip(keys, mean, strict=True)}
