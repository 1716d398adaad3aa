"""The request and the result of probes.facts.alternatives, and what the figures mean.

Axes: method, prompt (every fact's trigger, then every fact's paraphrases), kind ("triggers", "paraphrases"), text
(unrelated). METHODS says what each method is.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from engram_lab.models.errors import DataError, LabError
from engram_lab.probes.base import Array, Record, role
from engram_lab.probes.facts.sets import (
    MAX_STEPS,
    Expected,
    StatedFact,
    Writing,
    check_request,
    paraphrase_items,
    recall_items,
)
from engram_lab.probes.stats import draws, percentiles, ratio

NOTHING, CLOSED, OPTIMISED, PROMPT, RETRIEVAL = (
    "nothing", "rows, closed form", "rows, optimised", "facts in the prompt", "facts retrieved",
)  # fmt: skip
AS_FAR = ", as far as rows"  # behind the name of a LoRA
METHODS = {
    NOTHING: "The model as it is.",
    CLOSED: "An overlay for the memory's rows, by formula.",
    OPTIMISED: "An overlay for the memory's rows, trained.",
    "LoRA, rank r": "An adapter on the projections of queries, keys and values, trained on all facts until the mean "
    "loss of the answers' tokens is low.",
    "LoRA, rank r" + AS_FAR: "The same training, stopped once its loss is that of the rows: no more is learnt than by "
    "them.",
    PROMPT: "All facts before the text, one a line; the first that fit, where the context is too short for all.",
    RETRIEVAL: "The best few facts for the text, by TF-IDF, before it, one a line, the best one last; none where no "
    "fact shares a word with it.",
}
KINDS = ("triggers", "paraphrases")


@dataclass(frozen=True, eq=False)
class AlternativesConfig(Record):
    """A request.

    `writing` says how the rows are written; both of its methods are run, and the one that it names is what everything
    is compared with. `retrieved` names, for every prompt (see `prompts_of`) and then every unrelated text, the facts
    that are put before it, best first (lab.ask.retrieval makes it); empty leaves retrieval out. LoRA trains at most
    `lora_steps` steps of Adam at `lora_rate`, until the mean loss is `lora_stop` nats. With `time` the report says how
    long writing took, and is not the same twice. Raises LabError.
    """

    models: tuple[str, ...]
    facts: tuple[StatedFact, ...]
    unrelated: tuple[str, ...]
    retrieved: tuple[tuple[int, ...], ...] = ()
    writing: Writing = Writing()  # noqa: RUF009 - a record is never changed
    ranks: tuple[int, ...] = (64, 8)
    lora_steps: int = 120
    lora_rate: float = 3e-3
    lora_stop: float = 0.1
    seed: int = 0
    bootstrap: int = 1000
    time: bool = False

    def __post_init__(self) -> None:
        check_request(self.models, self.facts, self.seed, self.bootstrap)
        if not self.unrelated:
            raise DataError("There is no unrelated text: give at least one, to see what else changes.")
        if min(self.ranks, default=1) < 1 or len(set(self.ranks)) < len(self.ranks):
            raise LabError("The ranks of LoRA must be 1 or more, each named once.")
        if not 0 <= self.lora_steps <= MAX_STEPS:
            raise LabError(f"The steps of LoRA are {self.lora_steps}; they must be from 0 to {MAX_STEPS}.")
        if not (0 < self.lora_rate < float("inf") and 0 <= self.lora_stop < float("inf")):
            raise LabError("The rate of LoRA must be above 0, and the loss at which it stops 0 or more.")
        wanted = len(prompts_of(self.facts)) + len(self.unrelated)
        if self.retrieved and len(self.retrieved) != wanted:
            raise DataError(f"The retrieved facts are for {len(self.retrieved)} texts, but there are {wanted}.")
        if any(not 0 <= n < len(self.facts) for own in self.retrieved for n in own):
            raise DataError(f"A retrieved fact is not one of the facts 0 to {len(self.facts) - 1}.")

    @property
    def reference(self) -> str:
        """The rows that the methods are compared with."""
        return CLOSED if self.writing.method == "closed_form" else OPTIMISED


def prompts_of(facts: Sequence[StatedFact]) -> list[tuple[int, Expected]]:
    """(number of the fact, what asks for it and its answer): every trigger, then every paraphrase."""
    return [*recall_items(facts), *paraphrase_items(facts)]


@dataclass(frozen=True, eq=False)
class AlternativesResult(Record):
    """DEFINITIONS of its front says what each figure is, METHODS what each method; NaN where there is none."""

    methods: tuple[str, ...]
    layer: int = field(metadata=role("name"))
    prompts: tuple[str, ...]  # [prompt]
    fact_of: Annotated[np.ndarray, Array("prompt", dtype="int64", role="name")]
    paraphrase: Annotated[np.ndarray, Array("prompt", dtype="bool")]
    answer_tokens: Annotated[np.ndarray, Array("prompt", dtype="int64")]
    probability: Annotated[np.ndarray, Array("method", "prompt", unit="probability", dtype="float64")]
    rank: Annotated[np.ndarray, Array("method", "prompt", dtype="int64")]  # of the worst token; 0 is the likeliest
    retrieved_own: Annotated[np.ndarray, Array("prompt", dtype="bool")]  # the prompt's own fact was retrieved
    kinds: tuple[str, ...]
    n_prompts: Annotated[np.ndarray, Array("kind", dtype="int64")]
    top1: Annotated[np.ndarray, Array("kind", "method", unit="share", dtype="float64")]
    top1_low: Annotated[np.ndarray, Array("kind", "method", unit="share", dtype="float64")]
    top1_high: Annotated[np.ndarray, Array("kind", "method", unit="share", dtype="float64")]
    top5: Annotated[np.ndarray, Array("kind", "method", unit="share", dtype="float64")]
    top5_low: Annotated[np.ndarray, Array("kind", "method", unit="share", dtype="float64")]
    top5_high: Annotated[np.ndarray, Array("kind", "method", unit="share", dtype="float64")]
    mean: Annotated[np.ndarray, Array("kind", "method", unit="probability", dtype="float64")]  # of the probability
    mean_low: Annotated[np.ndarray, Array("kind", "method", unit="probability", dtype="float64")]
    mean_high: Annotated[np.ndarray, Array("kind", "method", unit="probability", dtype="float64")]
    gap: Annotated[np.ndarray, Array("kind", "method", unit="share", dtype="float64")]
    gap_low: Annotated[np.ndarray, Array("kind", "method", unit="share", dtype="float64")]
    gap_high: Annotated[np.ndarray, Array("kind", "method", unit="share", dtype="float64")]
    tokens: Annotated[np.ndarray, Array("text", dtype="int64")]  # scored
    positions: Annotated[np.ndarray, Array("text", dtype="int64")]  # compared: one more
    text_change: Annotated[np.ndarray, Array("method", "text", unit="nats", dtype="float64")]  # summed over tokens
    text_size: Annotated[np.ndarray, Array("method", "text", unit="nats", dtype="float64")]  # summed over tokens
    text_kl: Annotated[np.ndarray, Array("method", "text", unit="nats", dtype="float64")]  # summed over positions
    text_changed: Annotated[np.ndarray, Array("method", "text", dtype="int64")]
    loss: float  # of the model as it is, on the unrelated texts, nats a token
    change: Annotated[np.ndarray, Array("method", unit="nats a token", dtype="float64")]
    change_low: Annotated[np.ndarray, Array("method", unit="nats a token", dtype="float64")]
    change_high: Annotated[np.ndarray, Array("method", unit="nats a token", dtype="float64")]
    size: Annotated[np.ndarray, Array("method", unit="nats a token", dtype="float64")]
    size_low: Annotated[np.ndarray, Array("method", unit="nats a token", dtype="float64")]
    size_high: Annotated[np.ndarray, Array("method", unit="nats a token", dtype="float64")]
    kl: Annotated[np.ndarray, Array("method", unit="nats", dtype="float64")]
    kl_low: Annotated[np.ndarray, Array("method", unit="nats", dtype="float64")]
    kl_high: Annotated[np.ndarray, Array("method", unit="nats", dtype="float64")]
    more: Annotated[np.ndarray, Array("method", unit="times the rows'", dtype="float64")]
    more_low: Annotated[np.ndarray, Array("method", unit="times the rows'", dtype="float64")]
    more_high: Annotated[np.ndarray, Array("method", unit="times the rows'", dtype="float64")]
    more_kl: Annotated[np.ndarray, Array("method", unit="times the rows'", dtype="float64")]
    more_kl_low: Annotated[np.ndarray, Array("method", unit="times the rows'", dtype="float64")]
    more_kl_high: Annotated[np.ndarray, Array("method", unit="times the rows'", dtype="float64")]
    changed: Annotated[np.ndarray, Array("method", dtype="int64")]
    n_positions: int
    bytes: Annotated[np.ndarray, Array("method", dtype="int64")]
    extra_tokens: Annotated[np.ndarray, Array("method", unit="tokens before a prompt", dtype="float64")]
    facts_in_prompt: int
    lora_loss: tuple[
        tuple[float, ...], ...
    ]  # [LoRA][step], in the order of the methods, before each step and behind the last
    peft: str  # its release
    seconds: Annotated[np.ndarray | None, Array("method", unit="s", dtype="float64")] = None  # to write the facts


@dataclass(frozen=True)
class Drift:
    """Of the unrelated texts: tokens [text] and their loss [text] summed; the others [method, text], sums or counts."""

    tokens: np.ndarray
    loss: np.ndarray
    change: np.ndarray
    size: np.ndarray
    kl: np.ndarray
    changed: np.ndarray


def summarise(
    config: AlternativesConfig, chance: np.ndarray, rank: np.ndarray, drift: Drift, methods: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """The means and intervals of AlternativesResult from chance, rank [method, prompt] and the drift."""
    fact_of = np.array([n for n, _ in prompts_of(config.facts)])
    paraphrase = np.arange(len(fact_of)) >= len(config.facts)
    rows = methods.index(config.reference)
    kinds: list[dict[str, np.ndarray]] = []
    for mine in (~paraphrase, paraphrase):
        _, index = np.unique(fact_of[mine], return_inverse=True)  # the facts that have such prompts
        member = np.eye(index.max(initial=-1) + 1)[index]  # [prompt, fact]
        drawn = draws(member.shape[1], config.bootstrap, config.seed)
        top1, top5, mean = (
            ratio(drawn @ (values[:, mine] @ member).T, (drawn @ member.sum(0))[:, None])
            for values in (rank == 0, rank < 5, np.exp(chance))
        )
        kinds.append({"top1": top1, "top5": top5, "mean": mean, "gap": top1 - top1[:, rows : rows + 1]})
    fields: dict[str, np.ndarray] = {}
    for name in kinds[0]:
        of_kinds = [_with_interval(name, kind[name]) for kind in kinds]
        fields |= {key: np.stack([kind[key] for kind in of_kinds]) for key in of_kinds[0]}
    drawn = draws(config.unrelated, config.bootstrap, config.seed + 1)
    tokens, positions = drawn @ drift.tokens, drawn @ (drift.tokens + 1)
    change, size = (drawn @ sums.T / tokens[:, None] for sums in (drift.change, drift.size))
    kl = drawn @ drift.kl.T / positions[:, None]
    more, more_kl = (ratio(values, values[:, rows : rows + 1]) for values in (size, kl))
    for name, values in (("change", change), ("size", size), ("kl", kl), ("more", more), ("more_kl", more_kl)):
        fields |= _with_interval(name, values)
    return fields


def _with_interval(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """values [1 + resample, method]: the first, and 95 % of the others; NaN where a resample has no value."""
    low, high = percentiles(np.where(np.isnan(values[1:]).any(axis=0), np.nan, values[1:]), values[0])
    return {name: values[0].copy(), f"{name}_low": low.copy(), f"{name}_high": high.copy()}


def peft_version() -> str:
    """The release of what trains the adapters."""
    return importlib.metadata.version("peft")
