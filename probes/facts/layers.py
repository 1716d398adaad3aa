"""The same facts written at each memory layer by itself: where a fact has to stand to be read.

Axes: layer (the memory layers asked for), step (of the writing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle
from engram_lab.models.overlay import prepare
from engram_lab.models.tables import memories
from engram_lab.probes.base import Array, Progress, Protocol, Record, Report, only, part, role
from engram_lab.probes.facts.check import places_of
from engram_lab.probes.facts.sets import (
    WRITING,
    StatedFact,
    Writing,
    ask,
    ask_neighbours,
    check_request,
    encoded,
    interval,
    paraphrase_items,
    recall_items,
    write,
)


@dataclass(frozen=True, eq=False)
class LayersConfig(Record):
    """A request: one model, facts, and the memory layers (all of them if empty); the writing names none.

    Raises LabError.
    """

    models: tuple[str, ...]
    facts: tuple[StatedFact, ...]
    writing: Writing = WRITING
    layers: tuple[int, ...] = ()
    seed: int = 0
    bootstrap: int = 1000

    def __post_init__(self) -> None:
        check_request(self.models, self.facts, self.seed, self.bootstrap)
        if self.writing.layer is not None:
            raise LabError(f"The writing names the layer {self.writing.layer}: name it among the layers.")
        if len(set(self.layers)) < len(self.layers):
            raise LabError("A layer is named twice: name each once.")


@dataclass(frozen=True, eq=False)
class LayersResult(Record):
    """After writing at one layer, each figure with its interval over facts; NaN where there is none to tell it by."""

    name: str
    layers: tuple[int, ...] = field(metadata=role("name"))
    top1: Annotated[np.ndarray, Array("layer", unit="share", dtype="float64")]
    top1_low: Annotated[np.ndarray, Array("layer", unit="share", dtype="float64")]
    top1_high: Annotated[np.ndarray, Array("layer", unit="share", dtype="float64")]
    top5: Annotated[np.ndarray, Array("layer", unit="share", dtype="float64")]
    top5_low: Annotated[np.ndarray, Array("layer", unit="share", dtype="float64")]
    top5_high: Annotated[np.ndarray, Array("layer", unit="share", dtype="float64")]
    probability: Annotated[np.ndarray, Array("layer", unit="probability", dtype="float64")]
    probability_low: Annotated[np.ndarray, Array("layer", unit="probability", dtype="float64")]
    probability_high: Annotated[np.ndarray, Array("layer", unit="probability", dtype="float64")]
    paraphrase_top1: Annotated[np.ndarray, Array("layer", unit="share", dtype="float64")]
    paraphrase_top1_low: Annotated[np.ndarray, Array("layer", unit="share", dtype="float64")]
    paraphrase_top1_high: Annotated[np.ndarray, Array("layer", unit="share", dtype="float64")]
    specificity: Annotated[np.ndarray, Array("layer", unit="share", dtype="float64")]
    specificity_low: Annotated[np.ndarray, Array("layer", unit="share", dtype="float64")]
    specificity_high: Annotated[np.ndarray, Array("layer", unit="share", dtype="float64")]
    same_answer: Annotated[np.ndarray, Array("layer", unit="share", dtype="float64")]
    same_answer_low: Annotated[np.ndarray, Array("layer", unit="share", dtype="float64")]
    same_answer_high: Annotated[np.ndarray, Array("layer", unit="share", dtype="float64")]
    gate_before: Annotated[np.ndarray, Array("layer", dtype="float64")]  # means over facts
    gate_after: Annotated[np.ndarray, Array("layer", dtype="float64")]
    written_share: Annotated[np.ndarray, Array("layer", unit="length of the residual", dtype="float64")]
    loss: Annotated[np.ndarray, Array("layer", "step", unit="nats")]


CONFIG, RESULT = LayersConfig, LayersResult
FIGURES = ("top1", "top5", "probability", "paraphrase_top1", "specificity", "same_answer")


def run(
    handles: Sequence[Handle], config: LayersConfig, progress: Progress | None = None
) -> Report[LayersConfig, LayersResult]:
    """Write, ask and undo at each layer: figures [layer], losses of the writing [layer, step].

    LabError for a layer without a memory before anything is written.

        >>> facts = (StatedFact("The river runs past", " the sea"), StatedFact("Paris is the old", " mill"))
        >>> report = run([handle], LayersConfig((handle.name,), facts, bootstrap=9))
        >>> report.result.layers == handle.engram_layers
        True
    """
    handle = only(handles)
    memories(handle)
    layers = config.layers or handle.engram_layers
    for layer in layers:
        if layer not in handle.engram_layers:
            has = ", ".join(map(str, handle.engram_layers))
            raise LabError(f"{handle.name} has no memory at layer {layer}: its memory layers are {has}.")
    found: list[dict[str, Any]] = []
    for n, layer in enumerate(layers):
        found.append(_at(handle, config, layer, part(progress, n / len(layers), (n + 1) / len(layers))))
    fields = {name: np.array([figures[name] for figures in found]) for name in found[0]}
    result = LayersResult(handle.name, tuple(layers), **fields)
    ids = [[prompt for prompt, _ in encoded(handle, recall_items(config.facts))]]
    return Report("facts layers", config, Protocol.of(handles, ids, config.seed), result)


def _at(handle: Handle, config: LayersConfig, layer: int, progress: Progress) -> dict[str, Any]:
    """The figures of one layer."""
    facts = config.facts
    overlay, report = write(handle, facts, replace(config.writing, layer=layer), part(progress, 0, 0.6))
    patch, what = prepare(handle, overlay), f"asking at layer {layer}"
    asked = ask(handle, patch, recall_items(facts), told=lambda done: progress(0.6 + 0.1 * done, what))
    other = ask(handle, patch, paraphrase_items(facts), told=lambda done: progress(0.7 + 0.1 * done, what))
    neighbours = ask_neighbours(handle, patch, facts, told=lambda done: progress(0.8 + 0.2 * done, what))
    columns = (
        asked.top1_after, asked.top5_after, asked.probability_after, other.top1_after, neighbours.wins_after,
        neighbours.same_top,
    )  # fmt: skip
    figures: dict[str, Any] = {}
    sources = (asked, asked, asked, other, neighbours, neighbours)
    for name, source, values in zip(FIGURES, sources, columns, strict=True):
        mean, low, high = interval(source.fact, values, config.seed, config.bootstrap)
        figures |= {name: mean, f"{name}_low": low, f"{name}_high": high}
    places = places_of(handle, overlay, layer, facts)
    return figures | {
        "gate_before": float(places.gate_before.mean(dtype=np.float64)),
        "gate_after": float(places.gate_after.mean(dtype=np.float64)),
        "written_share": float((places.written_norm / places.residual_norm).mean(dtype=np.float64)),
        "loss": report.loss,
    }
