"""CKA: which layer of one model looks like which layer of another, at the same points of the same texts.

Axes: layer_a, layer_b (residual streams: "embed" before block 0, then after each block), point (a position of a
sentence in both models). CKA is the linear one (arXiv 1905.00414); mathematics and estimators: probes/cka_math.py.
Points: probes/points.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch

from engram_lab.models.errors import LabError, PromptError
from engram_lab.models.handle import Handle
from engram_lab.probes import cka_math
from engram_lab.probes.base import LATER, Array, Progress, Protocol, Record, Report, check_handles, check_seed
from engram_lab.probes.batches import alike
from engram_lab.probes.points import ENTITY, LAST, POINTS, choose
from engram_lab.probes.stats import numbered, percentiles

FEWEST = 6  # different sentences that an interval needs: five have 126 different resamples, too few for 95 %
MASSIVE = 10.0  # times the median length: such a point decides the CKA of its layer
CHUNK = 1024  # points in a product
BATCH_TOKENS = 512  # in a forward; more only if one sentence has more
SPOOL_BYTES = 2**28  # points of a model kept in memory; what is more goes to a temporary file
FORWARDS = 0.6  # of the progress


@dataclass(frozen=True, eq=False)
class CKAConfig(Record):
    """A request: two models (or one with itself), sentences, and which of their positions to compare.

    entities[sentence]: spans of characters [start, end), for points "entity". prompts_b: other texts for the second
    model, as many, compared at their last tokens. `bootstrap` is the number of resamples drawn with `seed`.
    Raises PromptError or LabError.
    """

    models: tuple[str, ...]
    prompts: tuple[str, ...]
    entities: tuple[tuple[tuple[int, int], ...], ...] | None = None
    points: str = ENTITY
    prompts_b: tuple[str, ...] | None = None
    seed: int = 0
    bootstrap: int = 1000

    def __post_init__(self) -> None:
        if len(self.models) != 2:
            raise LabError(f"CKA compares two models, and {len(self.models)} are named: give two, or one twice.")
        if not self.prompts:
            raise PromptError("No prompt was given: give at least one.")
        if self.points not in POINTS:
            raise LabError(f'The points are "{self.points}"; they must be {", ".join(POINTS[:-1])} or {POINTS[-1]}.')
        check_seed(self.seed, self.bootstrap)
        if self.prompts_b is not None and self.points != LAST:
            raise LabError('Two sets of texts have only their ends in common: choose the points "last".')
        if self.prompts_b is not None and len(self.prompts_b) != len(self.prompts):
            raise PromptError(
                f"The sets have {len(self.prompts)} and {len(self.prompts_b)} texts; they are compared one to one, so "
                "give as many."
            )
        if self.points == ENTITY:
            if not self.entities or not any(self.entities):
                raise PromptError('No entity is marked in the texts: mark some, or choose the points "all" or "last".')
            if len(self.entities) != len(self.prompts):
                raise PromptError(f"There are {len(self.prompts)} prompts and entities of {len(self.entities)}.")
        for n, (text, spans) in enumerate(zip(self.prompts, self.entities or (), strict=False), 1):
            for start, end in spans:
                if not 0 <= start < end <= len(text):
                    raise PromptError(
                        f"The entity [{start}, {end}) is not within the {len(text)} characters of sentence {n}."
                    )


@dataclass(frozen=True, eq=False)
class CKAResult(Record):
    """How similar each layer of A (the first model) is to each of B; DEFINITIONS of its front says what each figure is.

    Block numbers are those of the layer names, "embed" is -1. Intervals are null for fewer than FEWEST different
    sentences. `massive_a` and `massive_b` are the longest state of a layer at a point over the median one. Layers that
    are the same at every point have no CKA: they are named in `constant_a` and `constant_b` and in no other field.
    """

    layers_a: tuple[str, ...]
    layers_b: tuple[str, ...]
    constant_a: tuple[str, ...]
    constant_b: tuple[str, ...]
    n_points: int
    n_sentences: int  # with a point
    n_dropped: int  # entities that end inside a token of either model
    sentence: Annotated[np.ndarray, Array("point", dtype="int64", role="name")]  # index into the prompts
    pos_a: Annotated[np.ndarray, Array("point", unit="token of the sentence", dtype="int64", role="name")]
    pos_b: Annotated[np.ndarray, Array("point", unit="token of the sentence", dtype="int64", role="name")]
    cka: Annotated[np.ndarray, Array("layer_a", "layer_b", dtype="float64")]
    biased: Annotated[np.ndarray, Array("layer_a", "layer_b", dtype="float64")]
    alignment_a: Annotated[np.ndarray, Array("layer_a", unit="block of B", dtype="float64")]
    alignment_b: Annotated[np.ndarray, Array("layer_b", unit="block of A", dtype="float64")]
    cka_low: Annotated[np.ndarray | None, Array("layer_a", "layer_b", dtype="float64")] = None
    cka_high: Annotated[np.ndarray | None, Array("layer_a", "layer_b", dtype="float64")] = None
    alignment_a_low: Annotated[np.ndarray | None, Array("layer_a", unit="block of B", dtype="float64")] = None
    alignment_a_high: Annotated[np.ndarray | None, Array("layer_a", unit="block of B", dtype="float64")] = None
    alignment_b_low: Annotated[np.ndarray | None, Array("layer_b", unit="block of A", dtype="float64")] = None
    alignment_b_high: Annotated[np.ndarray | None, Array("layer_b", unit="block of A", dtype="float64")] = None
    # Null if the models have different layers.
    lead: Annotated[np.ndarray | None, Array("layer_a", unit="blocks", dtype="float64")] = None
    lead_low: Annotated[np.ndarray | None, Array("layer_a", unit="blocks", dtype="float64")] = None
    lead_high: Annotated[np.ndarray | None, Array("layer_a", unit="blocks", dtype="float64")] = None
    mean_lead: float | None = None  # over the blocks, embed left out
    mean_lead_low: float | None = None
    mean_lead_high: float | None = None
    n_first: int = field(default=0, metadata=LATER)  # points left out because they are a model's first position
    massive_a: Annotated[np.ndarray | None, Array("layer_a", dtype="float64")] = field(default=None, metadata=LATER)
    massive_b: Annotated[np.ndarray | None, Array("layer_b", dtype="float64")] = field(default=None, metadata=LATER)


CONFIG, RESULT = CKAConfig, CKAResult


def run(handles: Sequence[Handle], config: CKAConfig, progress: Progress | None = None) -> Report[CKAConfig, CKAResult]:
    """CKA of all pairs of layers of two handles, which may be the same one twice.

    The result's arrays go over [layer_a, layer_b], layers of the first and of the second model. Sentences of equal
    lengths run together, each model sees each once. Raises PromptError, AlignmentError, or LabError for fewer than 4
    points, or points at which every layer of a model is the same.

        >>> texts = ("The river runs", "Paris is old", "the sea and the mill", "Tokyo is the capital of Japan")
        >>> config = CKAConfig((handle.name, dense.name), texts, points="all", bootstrap=9)
        >>> report = run([handle, dense], config)
        >>> report.result.cka.shape == (len(report.result.layers_a), len(report.result.layers_b))
        True
    """
    check_handles(handles, len(config.models))
    texts = (config.prompts, config.prompts if config.prompts_b is None else config.prompts_b)
    twice = handles[0] is handles[1] and texts[0] == texts[1]
    first = [handles[0].encode(text) for text in texts[0]]
    ids = (first, first if twice else [handles[1].encode(text) for text in texts[1]])
    chosen = choose(handles, texts, ids, config.points, config.entities)
    n_points = len(chosen.sentence)
    if n_points < cka_math.MIN_POINTS:
        raise LabError(
            f'CKA needs at least {cka_math.MIN_POINTS} points, and these texts have {n_points} of the kind "'
            f'{config.points}"{" behind their first token" if chosen.first else ""}: give more texts.'
        )
    with _Spool() as a, _Spool() as b:
        order = _forwards(handles, ids, chosen, (a, b), twice, progress)
        group = numbered(zip(*texts, strict=True))[chosen.sentence[order]]
        found, constant = _hsic((a, a if twice else b), group, handles, progress)
        massive = [spool.massive()[~same] for spool, same in zip((a, a if twice else b), constant, strict=True)]
    pairs = [list(zip(h.layer_names, own, strict=True)) for h, own in zip(handles, constant, strict=True)]
    names = [tuple(layer for layer, same in own if not same) for own in pairs]
    left_out = [tuple(layer for layer, same in own if same) for own in pairs]
    result = CKAResult(
        layers_a=names[0],
        layers_b=names[1],
        constant_a=left_out[0],
        constant_b=left_out[1],
        n_points=n_points,
        n_sentences=len(np.unique(chosen.sentence)),
        n_dropped=chosen.dropped,
        sentence=chosen.sentence,
        pos_a=chosen.pos_a,
        pos_b=chosen.pos_b,
        n_first=chosen.first,
        massive_a=massive[0],
        massive_b=massive[1],
        biased=cka_math.ratio(*found.biased),
        **_figures(found, names, config, n_points),
    )
    return Report("cka", config, Protocol.of(handles, ids, config.seed), result)


def block_number(layer: str) -> int:
    """The number of a layer's block; -1 for "embed"."""
    return -1 if layer == "embed" else int(layer)


def names_of(config: CKAConfig) -> tuple[str, str]:
    """The two models' names, told apart if they are the same."""
    a, b = config.models
    return (a, b) if a != b else (f"{a} (A)", f"{b} (B)")


def looks_like(report: Report[CKAConfig, CKAResult], layer: str, of: int = 0) -> str:
    """One sentence: "Layer 3 of A looks like layer 5.2 of B (95 % interval 5.0 to 5.5)." `of` is 0 for A, 1 for B."""
    result, names = report.result, names_of(report.config)
    layers, side = ((result.layers_a, "a"), (result.layers_b, "b"))[of]
    value, low, high = (getattr(result, f"alignment_{side}{end}") for end in ("", "_low", "_high"))
    at = layers.index(layer)
    if np.isnan(value[at]):
        return f"Layer {layer} of {names[of]} looks like no layer of {names[1 - of]}: no CKA is above 0."
    within = "" if low is None else f" (95 % interval {low[at]:.1f} to {high[at]:.1f})"
    return f"Layer {layer} of {names[of]} looks like layer {value[at]:.1f} of {names[1 - of]}{within}."


class _Spool(tempfile.SpooledTemporaryFile):
    """Points [point, layer, d_model], float32, written once and read a piece at a time; large ones on disk."""

    def __init__(self) -> None:
        super().__init__(max_size=SPOOL_BYTES)
        self.shape: tuple[int, ...] = ()
        self._lengths: list[torch.Tensor] = []  # [point, layer]

    def put(self, points: torch.Tensor) -> None:
        """Append points [point, layer, d_model]."""
        self.shape = tuple(points.shape[1:])
        self._lengths.append(points.double().norm(dim=-1).cpu())
        self.write(points.float().cpu().contiguous().numpy().tobytes())

    def massive(self) -> np.ndarray:
        """How many times the median length the longest point has, [layer]; 0 where the median is 0."""
        lengths = torch.cat(self._lengths).numpy()
        middle = np.median(lengths, axis=0)
        return np.divide(lengths.max(axis=0), middle, out=np.zeros_like(middle), where=middle > 0)

    def pieces(self, keep: torch.Tensor, device: torch.device) -> Iterator[torch.Tensor]:
        """The points, CHUNK at a time, of the layers to `keep`, on the device."""
        layers, width = self.shape
        position = 0  # two readers of one spool take turns
        while True:
            self.seek(position)
            raw = self.read(CHUNK * layers * width * 4)
            if not raw:
                return
            position += len(raw)
            points = torch.frombuffer(bytearray(raw), dtype=torch.float32).view(-1, layers, width)
            yield (points if bool(keep.all()) else points[:, keep]).to(device)


def _forwards(
    handles: Sequence[Handle],
    ids: Sequence[Sequence[tuple[int, ...]]],
    chosen: Any,
    spools: tuple[_Spool, _Spool],
    twice: bool,
    progress: Progress | None,
) -> np.ndarray:
    """Run the sentences that have points and keep these; returns their order [point]."""
    members: dict[int, np.ndarray] = {int(n): np.flatnonzero(chosen.sentence == n) for n in np.unique(chosen.sentence)}
    sentences = list(members)
    lengths = [(len(ids[0][n]), len(ids[1][n])) for n in sentences]
    order: list[np.ndarray] = []
    done = 0
    # Of one length, so that nothing is padded, which not every model takes as nothing.
    for numbers in alike(lengths, BATCH_TOKENS):
        batch = [sentences[n] for n in numbers]
        points = [members[n] for n in batch]
        row = torch.from_numpy(np.repeat(np.arange(len(batch)), [len(at) for at in points]))
        order += points
        for which in (0,) if twice else (0, 1):
            handle = handles[which]
            pos = torch.from_numpy((chosen.pos_a, chosen.pos_b)[which][np.concatenate(points)])
            states = handle.residuals([ids[which][n] for n in batch]).states
            device = states.device
            with torch.inference_mode():
                spools[which].put(states[:, row.to(device), pos.to(device)].transpose(0, 1))
        done += len(batch)
        if progress is not None:
            progress(FORWARDS * done / len(members), f"sentence {done} of {len(members)}")
    return np.concatenate(order)


def _hsic(
    spools: tuple[_Spool, _Spool], group: np.ndarray, handles: Sequence[Handle], progress: Progress | None
) -> tuple[cka_math.Hsic, tuple[np.ndarray, np.ndarray]]:
    """(HSICs of the layers that are not constant, which are [layer_a], [layer_b]); `group` [point]: equal texts."""
    device = handles[0].device if handles[0].device.type == "cuda" else torch.device("cpu")

    def read(keep: Sequence[np.ndarray]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        sides = (spool.pieces(torch.from_numpy(k), device) for spool, k in zip(spools, keep, strict=True))
        return zip(*sides, strict=True)

    def tell(fraction: float) -> None:
        if progress is not None:
            progress(FORWARDS + (1 - FORWARDS) * fraction, "all pairs of layers")

    with torch.inference_mode():
        constant = cka_math.constant(read([np.ones(spool.shape[0], dtype=bool) for spool in spools]))
        for handle, same in zip(handles, constant, strict=True):
            if same.all():
                raise LabError(
                    f"Every layer of {handle.name} is the same at all {len(group)} points, so there is no CKA: the "
                    "texts up to them are equal; give different ones."
                )
        group = np.unique(group, return_inverse=True)[1]
        return cka_math.hsic(lambda: read([~same for same in constant]), group, tell), constant


def _figures(found: cka_math.Hsic, names: Sequence[Sequence[str]], config: CKAConfig, n_points: int) -> dict[str, Any]:
    """CKA, alignments and lead with their intervals, as the fields of the result name them."""
    for of, layers, model in zip(found.unbiased[1:], names, config.models, strict=True):
        for value, layer in zip(of, layers, strict=True):
            if not value > 0:
                raise LabError(
                    f"The {n_points} points of layer {layer} of {model} are all equally far from each other, so it has "
                    "no CKA: give more texts."
                )
    numbers = [np.array([block_number(layer) for layer in own], dtype=np.float64) for own in names]
    same_layers = names[0] == names[1]
    blocks = numbers[0] >= 0

    def derived(cka: np.ndarray) -> dict[str, np.ndarray]:
        """All that follows from CKA [..., layer_a, layer_b]."""
        a = cka_math.soft_alignment(cka, numbers[1])
        b = cka_math.soft_alignment(cka.swapaxes(-1, -2), numbers[0])
        values = {"cka": cka, "alignment_a": a, "alignment_b": b}
        if same_layers:
            values["lead"] = (a - b) / 2
            values["mean_lead"] = values["lead"][..., blocks].mean(axis=-1)
        return values

    figures: dict[str, Any] = derived(cka_math.ratio(*found.unbiased))
    assert found.shares is not None
    if len(found.shares[0]) >= FEWEST:
        drawn = [derived(cka) for cka in cka_math.resampled(found, config.bootstrap, config.seed)]
        for name in list(figures):
            # A resample without a positive match has no alignment; a layer that never has one has no interval.
            low, high = percentiles(np.concatenate([block[name] for block in drawn]), figures[name])
            figures[f"{name}_low"], figures[f"{name}_high"] = low, high
    return {k: float(v) if k.startswith("mean_lead") else np.asarray(v) for k, v in figures.items()}
