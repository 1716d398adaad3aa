"""The lens: what every layer's residual would predict, through the model's own final norm and head.

The logit lens (nostalgebraist 2020) reads the residual as it is, the tuned lens (arXiv 2303.08112) after an affine
translator of its layer (probes/tuned_lens.py). Axes are those of probes/lens_result.py, formulas those of
probes/lens_math.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch

from engram_lab.models.errors import LabError, PromptError
from engram_lab.models.handle import Handle, single_token
from engram_lab.probes.base import Progress, Protocol, Record, Report, arrays_of, check_handles, check_seed, part
from engram_lab.probes.batches import alike
from engram_lab.probes.lens_math import LensStatistics, lens_statistics
from engram_lab.probes.lens_result import Alignment, Difference, LensResult, ModelLens, TunedReading
from engram_lab.probes.spans import Spans, align, spans_of, texts_of
from engram_lab.probes.stats import draws, mean_interval, scalar_fields
from engram_lab.probes.tuned_lens import Translators, find, open_translators

# One sentence for each figure, to print beside it.
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
        check_seed(self.seed, self.bootstrap)


CONFIG, RESULT = LensConfig, LensResult


def depends(handles: Sequence[Handle], config: LensConfig) -> list[str]:
    """What a result depends on beside request and weights: which translators there are now."""
    if not config.tuned:
        return []
    found = [find(handle) for handle in handles]
    return ["" if path is None else f"{path} {path.stat().st_mtime_ns}" for path in found]


def run(
    handles: Sequence[Handle], config: LensConfig, progress: Progress | None = None
) -> Report[LensConfig, LensResult]:
    """The lens of one model or two on the prompts of `config`; prompts of one length share a forward.

    The result has a `ModelLens` for each of `handles`, whose arrays go over [layer, pos], pos through all prompts one
    after the other; for two models also the pairs of positions at the same text, and the difference of their means.

    All requests that cannot be served are refused before the first forward: PromptError, TargetError,
    NoTranslatorsError or CheckpointError for a tuned lens, and AlignmentError for two models whose positions cannot
    be matched by text.

        >>> report = run([handle], LensConfig((handle.name,), ("The river runs", "Paris is the capital")))
        >>> (lens,) = report.result.models
        >>> lens.kl.shape == (len(lens.layer_names), len(lens.token_ids))
        True
    """
    check_handles(handles, len(config.models))
    targets = [None if config.target is None else single_token(handle, config.target) for handle in handles]
    ids = [[handle.encode(prompt) for prompt in config.prompts] for handle in handles]
    spans = [list(map(partial(spans_of, handle), config.prompts, of)) for handle, of in zip(handles, ids, strict=True)]
    translators = [open_translators(handle) if config.tuned else None for handle in handles]
    aligned = align(handles, ids, spans) if len(handles) == 2 else None
    drawn = draws(config.prompts, config.bootstrap, config.seed)
    models = []
    for n, handle in enumerate(handles):
        k = min(config.top_k, handle.vocab_size) if config.detail else 0
        read = read_prompts(
            handle, ids[n], k, targets[n], translators[n], part(progress, n / len(handles), (n + 1) / len(handles))
        )
        models.append(_model_lens(handle, config, ids[n], spans[n], read, targets[n], translators[n], drawn))
    result = LensResult(
        tuple(models),
        {name: held.axes for name, held in arrays_of(ModelLens).items()},
        {name: held.unit for name, held in arrays_of(ModelLens).items() if held.unit},
        aligned,
        _difference(models[0], models[1], aligned, drawn) if aligned else None,
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
    batches = sorted(alike(list(map(len, ids)), TOGETHER))
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


def _in_order(parts: Sequence[LensStatistics], order: torch.Tensor) -> LensStatistics:
    """Statistics of several batches as one, its positions in `order`."""

    def joined(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if values[0] is None:
            return None
        axis = 0 if name == "settle_depth" else 1
        return torch.cat(values, dim=axis).index_select(axis, order)

    return LensStatistics(**{item.name: joined(item.name) for item in fields(LensStatistics)})


def _reading(
    handle: Handle,
    statistics: LensStatistics,
    counted: np.ndarray,
    index: np.ndarray,
    drawn: np.ndarray,
) -> dict[str, Any]:
    """The fields of a Reading."""
    found = {item.name: getattr(statistics, item.name) for item in fields(LensStatistics)}
    arrays: dict[str, Any] = {name: None if v is None else v.cpu().numpy() for name, v in found.items()}
    kl, top_ids = arrays["kl"], arrays["top_ids"]
    mean_kl, mean_kl_low, mean_kl_high = mean_interval(kl, counted, index, drawn)
    p10, p90 = np.quantile(kl[:, counted].astype(np.float64), [0.1, 0.9], axis=1)
    detail = top_ids.size > 0
    used = np.unique(top_ids).tolist()
    names = dict(zip(used, texts_of(handle.pieces(used, whole=False)), strict=True)) if detail else None
    del arrays["argmax"]
    return arrays | {
        "mean_kl": mean_kl,
        "mean_kl_low": mean_kl_low,
        "mean_kl_high": mean_kl_high,
        "kl_p10": p10,
        "kl_p90": p90,
        **scalar_fields("mean_settle_depth", mean_interval(arrays["settle_depth"], counted, index, drawn)),
        "top_ids": top_ids if detail else None,
        "top_probs": arrays["top_probs"] if detail else None,
        "token_names": names,
    }


def _model_lens(
    handle: Handle,
    config: LensConfig,
    ids: Sequence[Sequence[int]],
    spans: Sequence[Spans],
    read: tuple[list[LensStatistics], torch.Tensor],
    target_id: int | None,
    translators: Translators | None,
    drawn: np.ndarray,
) -> ModelLens:
    """One model's prompts put together, with the means over them."""
    index = np.repeat(np.arange(len(ids)), list(map(len, ids)))
    counted = np.concatenate([own.counted for own in spans])
    loss = read[1].cpu().numpy()
    logit, *rest = (_reading(handle, statistics, counted, index, drawn) for statistics in read[0])
    tuned = None
    if translators is not None:
        tuned = TunedReading(**rest[0], fit=translators.info, prompts_in_fit=translators.seen(config.prompts))
    return ModelLens(
        name=handle.name,
        layer_names=handle.layer_names,
        token_texts=texts_of([piece for prompt in spans for piece in prompt.pieces]),
        prompt_index=index,
        token_ids=np.concatenate([np.array(own, dtype=np.int64) for own in ids]),
        char_start=np.concatenate([own.start for own in spans]),
        char_end=np.concatenate([own.end for own in spans]),
        counted=counted,
        next_token_loss=loss,
        **logit,
        **scalar_fields("mean_loss", mean_interval(loss, counted, index, drawn)),
        **scalar_fields("mean_final_entropy", mean_interval(logit["entropy"][-1], counted, index, drawn)),
        target_id=target_id,
        tuned=tuned,
    )


def _difference(a: ModelLens, b: ModelLens, aligned: Alignment, drawn: np.ndarray) -> Difference:
    """Means of a - b over the pairs that both count; resampled like a single model, the pairing stays."""
    index, counted = a.prompt_index[aligned.pos_a], a.counted[aligned.pos_a] & b.counted[aligned.pos_b]

    def compared(in_a: np.ndarray, in_b: np.ndarray) -> tuple:
        values = in_a[..., aligned.pos_a].astype(np.float64) - in_b[..., aligned.pos_b]
        return mean_interval(values, counted, index, drawn)

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
