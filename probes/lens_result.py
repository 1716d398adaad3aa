"""What the lens reports: one reading for the logit lens and, where translators were fitted, one for the tuned lens.

Axes: layer (0 is "embed", the residual before block 0; the last is final), pos (the prompts one after
another, each with exactly the ids the model got), k (best first), pair (positions of two models at the
same text).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from engram_lab.probes.base import Array, Record, role
from engram_lab.probes.tuned_lens import FitInfo


@dataclass(frozen=True, eq=False, kw_only=True)
class Reading(Record):
    """What one lens shows of a model, at every position and in the mean. Intervals are null for a single prompt."""

    kl: Annotated[np.ndarray, Array("layer", "pos", unit="nats")]
    entropy: Annotated[np.ndarray, Array("layer", "pos", unit="nats")]
    settle_depth: Annotated[np.ndarray, Array("pos", unit="index into layer_names", dtype="int64")]
    mean_kl: Annotated[np.ndarray, Array("layer", unit="nats", dtype="float64")]
    kl_p10: Annotated[np.ndarray, Array("layer", unit="nats", dtype="float64")]
    kl_p90: Annotated[np.ndarray, Array("layer", unit="nats", dtype="float64")]
    mean_settle_depth: float | None
    mean_kl_low: Annotated[np.ndarray | None, Array("layer", unit="nats", dtype="float64")] = None
    mean_kl_high: Annotated[np.ndarray | None, Array("layer", unit="nats", dtype="float64")] = None
    mean_settle_depth_low: float | None = None
    mean_settle_depth_high: float | None = None
    top_ids: Annotated[np.ndarray | None, Array("layer", "pos", "k", dtype="int64", role="name")] = None
    top_probs: Annotated[np.ndarray | None, Array("layer", "pos", "k", unit="probability", ranks="top_ids")] = None
    token_names: dict[int, str] | None = field(default=None, metadata=role("spelled"))  # text of every id in top_ids
    target_rank: Annotated[np.ndarray | None, Array("layer", "pos", dtype="int64")] = None
    target_prob: Annotated[np.ndarray | None, Array("layer", "pos", unit="probability")] = None


@dataclass(frozen=True, eq=False, kw_only=True)
class TunedReading(Reading):
    """The tuned lens, with what its translators were fitted on."""

    fit: FitInfo
    prompts_in_fit: int  # how many of the prompts are lines of that text; 0 for a fair evaluation


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelLens(Reading):
    """What the logit lens shows of one model, and in `tuned` the tuned lens.

    DEFINITIONS of its front says what each figure is.
    """

    name: str
    layer_names: tuple[str, ...]
    token_texts: tuple[str, ...]  # [pos], a byte that is no whole character as \xNN
    prompt_index: Annotated[np.ndarray, Array("pos", dtype="int64", role="name")]
    token_ids: Annotated[np.ndarray, Array("pos", dtype="int64", role="name")]
    char_start: Annotated[np.ndarray, Array("pos", unit="bytes of the prompt in UTF-8", dtype="int64", role="name")]
    char_end: Annotated[np.ndarray, Array("pos", unit="bytes of the prompt in UTF-8", dtype="int64", role="name")]
    counted: Annotated[np.ndarray, Array("pos", dtype="bool")]  # whether the means take this position in
    next_token_loss: Annotated[np.ndarray, Array("pos", unit="nats")]  # NaN at a prompt's last position
    mean_loss: float | None  # null if no position has a next token
    mean_loss_low: float | None = None
    mean_loss_high: float | None = None
    mean_final_entropy: float | None
    mean_final_entropy_low: float | None = None
    mean_final_entropy_high: float | None = None
    target_id: int | None = field(default=None, metadata=role("name"))
    tuned: TunedReading | None = None


@dataclass(frozen=True, eq=False)
class Alignment(Record):
    """Positions of the two models behind which the same text lies: indices into their pos axes."""

    pos_a: Annotated[np.ndarray, Array("pair", dtype="int64", role="name")]
    pos_b: Annotated[np.ndarray, Array("pair", dtype="int64", role="name")]


@dataclass(frozen=True, eq=False)
class Difference(Record):
    """First model minus second over aligned positions, with the paired interval (null for one prompt).

    mean_kl and settle_depth are null if the numbers of layers differ, loss if the token ids do, tuned_* without
    translators.
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
    final_entropy: float | None = None
    final_entropy_low: float | None = None
    final_entropy_high: float | None = None
    tuned_mean_kl: Annotated[np.ndarray | None, Array("layer", unit="nats", dtype="float64")] = None
    tuned_mean_kl_low: Annotated[np.ndarray | None, Array("layer", unit="nats", dtype="float64")] = None
    tuned_mean_kl_high: Annotated[np.ndarray | None, Array("layer", unit="nats", dtype="float64")] = None
    tuned_settle_depth: float | None = None
    tuned_settle_depth_low: float | None = None
    tuned_settle_depth_high: float | None = None


@dataclass(frozen=True, eq=False)
class LensResult(Record):
    """The lens of each model, and how two compare. `axes` and `units` are those of the models' arrays."""

    models: tuple[ModelLens, ...]
    axes: dict[str, tuple[str, ...]]
    units: dict[str, str]
    aligned: Alignment | None = None
    difference: Difference | None = None
