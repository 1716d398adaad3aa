"""The facts of one user, written and checked: did the model learn them, and what else changed.

Axes: fact, item (see probes.facts.sets), d_model. The trigger's position is its last one, which predicts the answer's
first token. What is written there is written = g v + conv, with v = W_V e of the rows e and the gate g.
Writing is that of "User as Engram" (arXiv 2606.19172), see probes/facts/writing.py; efficacy, paraphrases and
neighbours are ROME's (arXiv 2202.05262).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engram_lab.models.engram import gate_ceiling
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle
from engram_lab.models.memory import Edit, read_memory
from engram_lab.models.overlay import Overlay, check_overlay, prepare
from engram_lab.models.tables import memories
from engram_lab.probes.base import Array, Progress, Protocol, Record, Report, only, role
from engram_lab.probes.facts.addresses import EditedReads, alias_items
from engram_lab.probes.facts.locality import Locality, locality
from engram_lab.probes.facts.sets import (
    WRITING,
    Asked,
    Score,
    StatedFact,
    Writing,
    ask,
    ask_neighbours,
    batches,
    check_request,
    encoded,
    paraphrase_items,
    recall_items,
    score,
    write,
)
from engram_lab.probes.facts.writing import WriteReport
from engram_lab.probes.gate_statistics import learned_ceilings


@dataclass(frozen=True, eq=False)
class CheckConfig(Record):
    """A request: one model, the facts of a user and how they are written, and unrelated texts. Raises LabError."""

    models: tuple[str, ...]
    facts: tuple[StatedFact, ...]
    writing: Writing = WRITING
    texts: tuple[str, ...] = ()
    seed: int = 0
    bootstrap: int = 1000

    def __post_init__(self) -> None:
        check_request(self.models, self.facts, self.seed, self.bootstrap)


@dataclass(frozen=True, eq=False)
class CheckResult(Record):
    """DEFINITIONS of its front says what each figure is. `writing` is null for an overlay that was there already."""

    name: str
    layer: int = field(metadata=role("name"))
    rows: int
    overlay_bytes: int
    writing: WriteReport | None
    scores: tuple[Score, ...]
    facts: Asked
    paraphrases: Asked
    neighbours: Asked
    compositions: Asked
    aliases: Asked
    gate_before: Annotated[np.ndarray, Array("fact")]
    gate_after: Annotated[np.ndarray, Array("fact")]
    gate_ceiling: float
    gate_ceiling_learned: float
    cos_value: Annotated[np.ndarray, Array("fact", unit="cosine")]
    cos_output: Annotated[np.ndarray, Array("fact", unit="cosine")]
    written_norm: Annotated[np.ndarray, Array("fact")]
    residual_norm: Annotated[np.ndarray, Array("fact")]
    locality: Locality


CONFIG, RESULT = CheckConfig, CheckResult


def run(
    handles: Sequence[Handle], config: CheckConfig, progress: Progress | None = None
) -> Report[CheckConfig, CheckResult]:
    """Write the facts, ask before and after, compare, undo; LabError for facts that cannot be written.

    What is asked goes over [item], `scores` are the means of its front's DEFINITIONS, each before and after.

        >>> facts = (StatedFact("The river runs past", " the sea"), StatedFact("Paris is the old", " mill"))
        >>> report = run([handle], CheckConfig((handle.name,), facts, bootstrap=9))
        >>> report.probe
        'facts check'
    """
    handle = only(handles)
    part = _parts(progress, (0.0, 0.4, 1.0))
    overlay, report = write(handle, config.facts, config.writing, part(0))
    result = measure(handle, overlay, config, part(1), report)
    ids = [[prompt for prompt, _ in encoded(handle, recall_items(config.facts))]]
    return Report("facts check", config, Protocol.of(handles, ids, config.seed), result)


def measure(
    handle: Handle,
    overlay: Overlay,
    config: CheckConfig,
    progress: Progress | None = None,
    writing: WriteReport | None = None,
) -> CheckResult:
    """What an overlay that holds the request's facts does. LabError if it does not, or is of another model."""
    check_overlay(handle, overlay)
    facts = config.facts
    missing = next((own.fact for own in facts if own.fact not in overlay.facts), None)
    if missing is not None or len(overlay.layers) != 1:
        raise LabError(
            f"The overlay of {overlay.user} does not hold {missing or 'rows of one layer'}: write the facts again."
        )
    (layer,) = overlay.layers
    patch, reads = prepare(handle, overlay), EditedReads(handle, overlay, facts)
    aliased = alias_items(handle, layer, facts)
    composed = [(n, own.composition) for n, own in enumerate(facts) if own.composition is not None]
    told = [_told(progress, n, what) for n, what in enumerate(_STEPS)]
    asked = ask(handle, patch, recall_items(facts), None, reads, told[0])
    paraphrases = ask(handle, patch, paraphrase_items(facts), None, reads, told[1])
    neighbours = ask_neighbours(handle, patch, facts, reads, told[2])
    compositions = ask(handle, patch, composed, None, reads, told[3])
    aliases = ask(handle, patch, aliased, None, reads, told[4])
    places = places_of(handle, overlay, layer, facts)
    others = [*paraphrases.prompts, *neighbours.prompts, *compositions.prompts]
    at = handle.engram_layers.index(layer)
    return CheckResult(
        name=handle.name,
        layer=layer,
        rows=overlay.n_rows,
        overlay_bytes=len(overlay.to_bytes()),
        writing=writing,
        scores=_scores(config, asked, paraphrases, neighbours, compositions, aliases),
        facts=asked,
        paraphrases=paraphrases,
        neighbours=neighbours,
        compositions=compositions,
        aliases=aliases,
        **places._asdict(),
        gate_ceiling=gate_ceiling(handle.d_model, memories(handle)[at].gate_variant),
        gate_ceiling_learned=float(learned_ceilings(handle)[at]),
        locality=locality(handle, overlay, facts, config.texts, others, told[5]),
    )


# What `measure` does, and where in its progress each begins.
_STEPS = (
    "asking the facts", "asking paraphrases", "asking neighbours", "asking compositions", "asking aliases",
    "comparing bits",
)  # fmt: skip
_STARTS = (0.0, 0.1, 0.2, 0.3, 0.35, 0.45, 1.0)


def _told(progress: Progress | None, step: int, what: str) -> Callable[[float], None]:
    start, end = _STARTS[step : step + 2]
    return lambda done: progress(start + done * (end - start), what) if progress is not None else None


def _parts(progress: Progress | None, ends: Sequence[float]) -> Callable[[int], Progress | None]:
    """The progress of each part of a run, between two of `ends`."""

    def part(n: int) -> Progress | None:
        if progress is None:
            return None
        return lambda done, what: progress(ends[n] + done * (ends[n + 1] - ends[n]), what)

    return part


def _scores(
    config: CheckConfig, facts: Asked, paraphrases: Asked, neighbours: Asked, compositions: Asked, aliases: Asked
) -> tuple[Score, ...]:
    def of(name: str, asked: Asked, field: str) -> Score:
        before, after = (getattr(asked, f"{field}_{when}") for when in ("before", "after"))
        return score(name, asked, before, after, config.seed, config.bootstrap)

    kept = neighbours.same_top
    return (
        of("top-1", facts, "top1"),
        of("top-5", facts, "top5"),
        of("probability", facts, "probability"),
        of("efficacy", facts, "wins"),
        of("paraphrase", paraphrases, "wins"),
        of("paraphrase top-1", paraphrases, "top1"),
        of("paraphrase probability", paraphrases, "probability"),
        of("specificity", neighbours, "wins"),
        score("same answer", neighbours, np.ones_like(kept), kept, config.seed, config.bootstrap),
        of("composition top-1", compositions, "top1"),
        of("composition probability", compositions, "probability"),
        of("alias top-1", aliases, "top1"),
    )


class Places(NamedTuple):
    """What happens at each trigger's position, all [fact] float32."""

    gate_before: np.ndarray
    gate_after: np.ndarray
    cos_value: np.ndarray
    cos_output: np.ndarray
    written_norm: np.ndarray
    residual_norm: np.ndarray


def places_of(handle: Handle, overlay: Overlay, layer: int, facts: Sequence[StatedFact]) -> Places:
    """One traced forward of all triggers before, and one after."""
    at, memory = handle.engram_layers.index(layer), memories(handle)[handle.engram_layers.index(layer)]
    edit = Edit(overlays=prepare(handle, overlay))
    coded = encoded(handle, recall_items(facts))
    found = np.zeros((6, len(facts)), dtype=np.float32)
    for numbers, ids in batches(handle, [prompt for prompt, _ in coded]):
        rows = torch.arange(len(numbers), device=handle.device)
        last = torch.tensor([len(coded[n][0]) - 1 for n in numbers], device=handle.device)
        before, after = read_memory(handle, ids), read_memory(handle, ids, edit)
        written = after.written[at, rows, last].double()
        with handle.running():
            value = memory.value(after.read[at, rows, last].flatten(1).to(memory.value.weight.dtype)).double()
        wanted = torch.tensor([coded[n][1][0] for n in numbers], device=handle.device)
        output = output_rows(handle, before.states[-1, rows, last], wanted).double()
        cosine = torch.nn.functional.cosine_similarity
        parts = (
            before.gate[at, rows, last, 0],
            after.gate[at, rows, last, 0],
            cosine(written, value, dim=-1),
            cosine(written, output, dim=-1),
            written.norm(dim=-1),
            after.residual[at, rows, last].double().norm(dim=-1),
        )
        for row, part in enumerate(parts):
            found[row, numbers] = part.float().cpu().numpy()
    return Places(*found)


def output_rows(handle: Handle, last: Tensor, wanted: Tensor) -> Tensor:
    """The gradient [item, d_model] of the logits of tokens [item] in last residuals [item, d_model]."""
    with handle.running(), torch.inference_mode(False), torch.enable_grad():
        residual = last.clone().requires_grad_()
        chosen = handle.unembed(residual).gather(1, wanted.clone().unsqueeze(1))
        return torch.autograd.grad(chosen.sum(), residual)[0]
