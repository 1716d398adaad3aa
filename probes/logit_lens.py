"""The logit lens: what every layer's residual would predict, through the model's own final norm and head.

Axes: layer (0 is "embed", the residual before block 0; the last is final), pos (the prompts one after another,
each with exactly the ids the model got), k (best first), pair (positions of two models at the same text).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from models.errors import AlignmentError, LabError, PromptError
from models.handle import Handle, single_token
from probes.base import Progress, Protocol, Record, Report, array
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
    prompt_index: np.ndarray = array("pos", dtype="int64")
    token_ids: np.ndarray = array("pos", dtype="int64")
    char_start: np.ndarray = array("pos", unit="bytes of the prompt in UTF-8", dtype="int64")
    char_end: np.ndarray = array("pos", unit="bytes of the prompt in UTF-8", dtype="int64")
    counted: np.ndarray = array("pos", dtype="bool")  # whether the means take this position in
    kl: np.ndarray = array("layer", "pos", unit="nats")
    entropy: np.ndarray = array("layer", "pos", unit="nats")
    settle_depth: np.ndarray = array("pos", unit="index into layer_names", dtype="int64")
    next_token_loss: np.ndarray = array("pos", unit="nats")  # NaN at a prompt's last position
    mean_kl: np.ndarray = array("layer", unit="nats", dtype="float64")
    kl_p10: np.ndarray = array("layer", unit="nats", dtype="float64")
    kl_p90: np.ndarray = array("layer", unit="nats", dtype="float64")
    mean_loss: float | None  # null if no position has a next token
    mean_settle_depth: float
    # Intervals: null for a single prompt.
    mean_kl_low: np.ndarray | None = array("layer", unit="nats", dtype="float64", optional=True)
    mean_kl_high: np.ndarray | None = array("layer", unit="nats", dtype="float64", optional=True)
    mean_loss_low: float | None = None
    mean_loss_high: float | None = None
    mean_settle_depth_low: float | None = None
    mean_settle_depth_high: float | None = None
    top_ids: np.ndarray | None = array("layer", "pos", "k", dtype="int64", optional=True)
    top_probs: np.ndarray | None = array("layer", "pos", "k", unit="probability", optional=True)
    token_names: dict[int, str] | None = None  # text of every id in top_ids
    target_id: int | None = None
    target_rank: np.ndarray | None = array("layer", "pos", dtype="int64", optional=True)
    target_prob: np.ndarray | None = array("layer", "pos", unit="probability", optional=True)


@dataclass(frozen=True, eq=False)
class Alignment(Record):
    """Positions of the two models behind which the same text lies: indices into their pos axes."""

    pos_a: np.ndarray = array("pair", dtype="int64")
    pos_b: np.ndarray = array("pair", dtype="int64")


@dataclass(frozen=True, eq=False)
class Difference(Record):
    """First model minus second over aligned positions, with the paired bootstrap interval (null for one prompt).

    mean_kl and settle_depth are null if the numbers of layers differ, loss if the token ids do.
    """

    mean_kl: np.ndarray | None = array("layer", unit="nats", dtype="float64", optional=True)
    mean_kl_low: np.ndarray | None = array("layer", unit="nats", dtype="float64", optional=True)
    mean_kl_high: np.ndarray | None = array("layer", unit="nats", dtype="float64", optional=True)
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
