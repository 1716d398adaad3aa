"""The gates: how far a memory opens at each token, what it writes, what that says, and what is lost without it.

Axes: layer (memory layers, by block), branch (always 1 so far), pos (the prompts one after another, each with exactly
the ids the model got), lens_layer (0 is "embed"), bin (of gates, 20 from 0 to 1).
With e the rows read, h the residual and d its width (Engram, arXiv 2601.07372),
    g = gate(<RMSNorm(W_K e), RMSNorm(h)> / sqrt(d)),  written = g W_V e + SiLU(conv(RMSNorm(g W_V e)))
Attribution and knock-outs: probes/attribution.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from engram_lab.models.engram import gate_ceiling
from engram_lab.models.errors import LabError, PromptError
from engram_lab.models.handle import Handle, single_token
from engram_lab.models.memory import CONTROLS, Edit, MemoryRead, check_edit, read_memory
from engram_lab.models.tables import memories
from engram_lab.probes.attribution import Attribution, KnockOut, attribution, knock_out, parts, targets_of
from engram_lab.probes.base import Array, Progress, Protocol, Record, Report, arrays_of, check_seed, only, role
from engram_lab.probes.gate_statistics import Ngram, canonical_map, learned_ceilings, ranking, spearman
from engram_lab.probes.lens_math import lens_statistics
from engram_lab.probes.spans import spans_of, texts_of, token_text
from engram_lab.probes.stats import draws, mean_interval, scalar_fields

# One sentence for each figure, to print beside it.
BINS = 20


@dataclass(frozen=True, eq=False)
class GatesConfig(Record):
    """A request: one model with a memory, prompts, and what to do to the memory.

    `target` is a text that is one token; without one each position's is the prompt's next token, at the last position
    the model's top token. `position` of the first prompt, from its end if negative, is where `knock_out` reads the
    target. Each of `controls` is a name of models.memory.CONTROLS, for all memory layers or as "name@layer" for one;
    `seed` draws the shuffle and `bootstrap` resamples. N-grams found at least `min_count` times are ranked, `ranked`
    from either end. `detail=False` leaves out attribution, lens curves and the gates with each control, for text sets.
    Raises PromptError or LabError.
    """

    models: tuple[str, ...]
    prompts: tuple[str, ...]
    target: str | None = None
    position: int | None = None
    controls: tuple[str, ...] = ()
    knock_out: bool = False
    seed: int = 0
    bootstrap: int = 1000
    min_count: int = 5
    ranked: int = 12
    detail: bool = True

    def __post_init__(self) -> None:
        if len(self.models) != 1:
            raise LabError(f"The gates are those of one model, not of {len(self.models)}.")
        if not self.prompts:
            raise PromptError("No prompt was given: give at least one.")
        check_seed(self.seed, self.bootstrap)
        if self.min_count < 1 or self.ranked < 1:
            raise LabError("The smallest count of an n-gram and the number of n-grams ranked must be 1 or more.")
        for control in self.controls:
            edit_of(control, self.seed)


def edit_of(control: str, seed: int) -> Edit:
    """The edit that "name" or "name@layer" stands for; LabError for another text."""
    name, at, layer = control.partition("@")
    for known in CONTROLS:
        if name == known and (not at or layer.isdecimal()):
            return Edit(known, (int(layer),) if at else (), seed)
    raise LabError(
        f'The control "{control}" is none: use {", ".join(CONTROLS)}, each as it is or with a layer as in "off@1".'
    )


@dataclass(frozen=True, eq=False)
class ControlRun(Record):
    """The same prompts with the memory changed; `change` is with the control minus without."""

    control: str
    layers: tuple[int, ...] = field(metadata=role("name"))  # where it acts
    next_token_loss: Annotated[np.ndarray, Array("pos", unit="nats")]
    final_kl: Annotated[np.ndarray, Array("pos", unit="nats")]  # KL(intact || controlled) of the predictions
    rank_correlation: Annotated[np.ndarray, Array("layer", "branch", dtype="float64")]  # NaN for a constant gate
    gate_mean: Annotated[np.ndarray, Array("layer", "branch", dtype="float64")]
    mean_loss: float | None
    mean_loss_change: float | None
    mean_final_kl: float | None
    mean_kl: Annotated[np.ndarray | None, Array("lens_layer", unit="nats", dtype="float64")] = None
    # Intervals: null for a single prompt.
    mean_kl_low: Annotated[np.ndarray | None, Array("lens_layer", unit="nats", dtype="float64")] = None
    mean_kl_high: Annotated[np.ndarray | None, Array("lens_layer", unit="nats", dtype="float64")] = None
    mean_loss_low: float | None = None
    mean_loss_high: float | None = None
    mean_loss_change_low: float | None = None
    mean_loss_change_high: float | None = None
    mean_final_kl_low: float | None = None
    mean_final_kl_high: float | None = None
    gate: Annotated[np.ndarray | None, Array("layer", "branch", "pos")] = None
    written_norm: Annotated[np.ndarray | None, Array("layer", "branch", "pos")] = None


@dataclass(frozen=True, eq=False)
class GatesResult(Record):
    """What the memory of one model does; DEFINITIONS of its front says what each figure is."""

    name: str
    layers: tuple[int, ...] = field(metadata=role("name"))  # block numbers
    layer_names: tuple[str, ...]  # [lens_layer]
    token_texts: tuple[str, ...]  # [pos], a byte that is no whole character as \xNN
    prompt_index: Annotated[np.ndarray, Array("pos", dtype="int64", role="name")]
    token_ids: Annotated[np.ndarray, Array("pos", dtype="int64", role="name")]
    canonical_ids: Annotated[np.ndarray, Array("pos", dtype="int64", role="name")]
    char_start: Annotated[np.ndarray, Array("pos", unit="bytes of the prompt in UTF-8", dtype="int64", role="name")]
    char_end: Annotated[np.ndarray, Array("pos", unit="bytes of the prompt in UTF-8", dtype="int64", role="name")]
    counted: Annotated[np.ndarray, Array("pos", dtype="bool")]  # whether the means take this position in
    gate: Annotated[np.ndarray, Array("layer", "branch", "pos")]
    ceiling: float
    ceiling_learned: Annotated[np.ndarray, Array("layer", dtype="float64")]
    written_norm: Annotated[np.ndarray, Array("layer", "branch", "pos")]
    residual_norm: Annotated[np.ndarray, Array("layer", "pos")]
    next_token_loss: Annotated[np.ndarray, Array("pos", unit="nats")]  # NaN at a prompt's last position
    position: int = field(metadata=role("name"))  # the readout position in the first prompt
    gate_mean: Annotated[np.ndarray, Array("layer", "branch", dtype="float64")]
    gate_p10: Annotated[np.ndarray, Array("layer", "branch", dtype="float64")]
    gate_p90: Annotated[np.ndarray, Array("layer", "branch", dtype="float64")]
    written_norm_mean: Annotated[np.ndarray, Array("layer", "branch", dtype="float64")]
    histogram: Annotated[np.ndarray, Array("layer", "bin", unit="share of positions", dtype="float64")]
    mean_loss: float | None
    mean_kl: Annotated[np.ndarray | None, Array("lens_layer", unit="nats", dtype="float64")] = None
    # Intervals: null for a single prompt.
    gate_mean_low: Annotated[np.ndarray | None, Array("layer", "branch", dtype="float64")] = None
    gate_mean_high: Annotated[np.ndarray | None, Array("layer", "branch", dtype="float64")] = None
    written_norm_mean_low: Annotated[np.ndarray | None, Array("layer", "branch", dtype="float64")] = None
    written_norm_mean_high: Annotated[np.ndarray | None, Array("layer", "branch", dtype="float64")] = None
    histogram_low: Annotated[np.ndarray | None, Array("layer", "bin", dtype="float64")] = None
    histogram_high: Annotated[np.ndarray | None, Array("layer", "bin", dtype="float64")] = None
    mean_kl_low: Annotated[np.ndarray | None, Array("lens_layer", unit="nats", dtype="float64")] = None
    mean_kl_high: Annotated[np.ndarray | None, Array("lens_layer", unit="nats", dtype="float64")] = None
    mean_loss_low: float | None = None
    mean_loss_high: float | None = None
    attribution: Attribution | None = None
    # text of every id in attribution.target_ids
    target_names: dict[int, str] | None = field(default=None, metadata=role("spelled"))
    knock_out: KnockOut | None = None
    controls: tuple[ControlRun, ...] = ()
    highest: tuple[Ngram, ...] = ()  # for several prompts, by layer and order
    lowest: tuple[Ngram, ...] = ()
    axes: dict[str, tuple[str, ...]] | None = None
    units: dict[str, str] | None = None


CONFIG, RESULT = GatesConfig, GatesResult


@dataclass(frozen=True)
class _Run:
    """One prompt, intact or with a control, on the CPU: [.., pos]; log_p [pos, vocab] stays where it was made."""

    gate: Tensor
    written_norm: Tensor
    residual_norm: Tensor
    loss: Tensor
    kl: Tensor | None
    log_p: Tensor


def run(
    handles: Sequence[Handle], config: GatesConfig, progress: Progress | None = None
) -> Report[GatesConfig, GatesResult]:
    """The gates of one model on the prompts of `config`, each prompt and control in a forward of its own.

    The result's arrays go over [layer, branch, pos], layer over those with a memory, pos through all prompts one after
    the other. Requests that cannot be served are refused before the first forward: PromptError, TargetError, LabError.

        >>> report = run([handle], GatesConfig((handle.name,), ("The river runs past the old mill",)))
        >>> report.result.gate.shape[0] == len(handle.engram_layers), bool((report.result.gate <= 1).all())
        (True, True)
    """
    handle = only(handles)
    memories(handle)
    target_id = None if config.target is None else single_token(handle, config.target)
    edits = [edit_of(control, config.seed) for control in config.controls]
    for edit in edits:
        check_edit(handle, edit)
    ids = [handle.encode(prompt) for prompt in config.prompts]
    position = _position(config.position, len(ids[0]))
    steps, done = len(ids) * (1 + len(edits)) + config.knock_out, 0

    def told(doing: str, part: float = 1.0) -> None:
        nonlocal done
        if progress is not None:
            progress((done + part) / steps, f"{handle.name}: {doing}")
        done += part == 1.0

    intact: list[_Run] = []
    controlled: list[list[_Run]] = [[] for _ in edits]
    final_kl: list[list[Tensor]] = [[] for _ in edits]
    found: list[tuple[Any, Tensor, Tensor]] = []
    with torch.inference_mode():
        for i, own in enumerate(ids):
            with handle.running():
                read = read_memory(handle, [own])
                base = _run_of(handle, read, own, config.detail)
                if config.detail:
                    targets = targets_of(read, own, target_id)
                    log_prob = base.log_p.gather(-1, targets[:, None])[:, 0]
                    found.append((parts(handle, read, targets), targets, log_prob))
            intact.append(base)
            if i == 0:
                readout = int(targets_of(read, own, target_id)[position])
            told(f"prompt {i + 1} of {len(ids)}")
            for n, edit in enumerate(edits):
                with handle.running():
                    other = _run_of(handle, read_memory(handle, [own], edit), own, config.detail)
                final_kl[n].append((base.log_p.exp() * (base.log_p - other.log_p)).sum(-1).clamp_min(0).cpu())
                controlled[n].append(_without_log_p(other))
                told(f"prompt {i + 1} of {len(ids)}, {config.controls[n]}")
            intact[-1] = _without_log_p(base)
    knocked = None
    if config.knock_out:
        doing = "gates shut one at a time"
        inner = None if progress is None else lambda fraction, _: told(doing, fraction)
        knocked = knock_out(handle, ids[0], position, readout, sum(map(len, ids)), inner)
    result = _result(handle, config, ids, position, intact, controlled, final_kl, found, knocked)
    return Report("gates", config, Protocol.of(handles, [ids], config.seed), result)


def _position(asked: int | None, length: int) -> int:
    """The readout position from 0; LabError if the prompt has no such one."""
    position = length - 1 if asked is None else asked + length * (asked < 0)
    if not 0 <= position < length:
        raise LabError(
            f"The prompt has no position {asked}: its {length} tokens are 0 to {length - 1}, or -1 for the last."
        )
    return position


def _run_of(handle: Handle, read: MemoryRead, ids: Sequence[int], lens: bool) -> _Run:
    """The figures of one forward of one prompt; only inside running()."""
    log_p = read.logits[0].float().log_softmax(-1)
    following = torch.tensor(ids[1:], dtype=torch.int64, device=log_p.device)
    loss = -log_p[:-1].gather(-1, following[:, None])[:, 0]
    return _Run(
        gate=read.gate[:, 0].transpose(1, 2).float().cpu(),
        written_norm=read.written[:, 0].float().norm(dim=-1).unsqueeze(1).cpu(),
        residual_norm=read.residual[:, 0].float().norm(dim=-1).cpu(),
        loss=torch.cat([loss, loss.new_full((1,), torch.nan)]).cpu(),
        kl=lens_statistics(read.states[:, 0], handle.unembed).kl.cpu() if lens else None,
        log_p=log_p,
    )


def _without_log_p(run: _Run) -> _Run:
    """What is kept of a run: [pos, vocab] of one prompt at a time is enough."""
    return _Run(run.gate, run.written_norm, run.residual_norm, run.loss, run.kl, run.log_p[:0])


def _result(
    handle: Handle,
    config: GatesConfig,
    ids: Sequence[Sequence[int]],
    position: int,
    intact: Sequence[_Run],
    controlled: Sequence[Sequence[_Run]],
    final_kl: Sequence[Sequence[Tensor]],
    found: Sequence[tuple[Any, Tensor, Tensor]],
    knocked: KnockOut | None,
) -> GatesResult:
    """All prompts put together, with the means over them."""
    spans = [spans_of(handle, prompt, own) for prompt, own in zip(config.prompts, ids, strict=True)]
    index = np.repeat(np.arange(len(ids)), [len(own) for own in ids])
    counted = np.concatenate([own.counted for own in spans])
    drawn = draws(config.prompts, config.bootstrap, config.seed)

    def mean(values: np.ndarray) -> tuple:
        """(mean, low, high), each [...], of values [..., pos]."""
        found = mean_interval(values.reshape(-1, values.shape[-1]), counted, index, drawn)
        return tuple(None if own is None else own.reshape(values.shape[:-1]) for own in found)

    gate, written, loss = (_joined(intact, name) for name in ("gate", "written_norm", "loss"))
    token_ids = np.concatenate([np.array(own, dtype=np.int64) for own in ids])
    # [layer, bin, pos]: whether the gate is in the bin; a gate of 1 is in the last one.
    inside = np.minimum((gate.mean(1) * BINS).astype(int), BINS - 1)[:, None] == np.arange(BINS)[:, None]
    p10, p90 = np.quantile(gate[..., counted].astype(np.float64), [0.1, 0.9], axis=-1)
    fields: dict[str, Any] = {
        "gate": gate,
        "written_norm": written,
        "token_ids": token_ids,
        "canonical_ids": canonical_map(handle)[token_ids],
        "prompt_index": index,
        "counted": counted,
        "char_start": np.concatenate([own.start for own in spans]),
        "char_end": np.concatenate([own.end for own in spans]),
    }
    highest, lowest = (
        ranking(handle, config.prompts, fields, config.min_count, config.ranked) if len(ids) > 1 else ((), ())
    )
    made = attribution(found) if found else None
    used = [] if made is None else np.unique(made.target_ids).tolist()
    kinds = (GatesResult, ControlRun, Attribution, KnockOut)
    return GatesResult(
        name=handle.name,
        layers=handle.engram_layers,
        layer_names=handle.layer_names,
        token_texts=texts_of([piece for prompt in spans for piece in prompt.pieces]),
        **fields,
        ceiling=gate_ceiling(handle.d_model, memories(handle)[0].gate_variant),
        ceiling_learned=learned_ceilings(handle),
        residual_norm=_joined(intact, "residual_norm"),
        next_token_loss=loss,
        position=position,
        gate_p10=p10,
        gate_p90=p90,
        **_arrays("gate_mean", mean(gate)),
        **_arrays("written_norm_mean", mean(written)),
        **_arrays("histogram", mean(inside.astype(np.float64))),
        **(_arrays("mean_kl", mean(_joined(intact, "kl"))) if config.detail else {}),
        **scalar_fields("mean_loss", mean(loss)),
        attribution=made,
        target_names={i: token_text(handle, i) for i in used} if made is not None else None,
        knock_out=knocked,
        controls=tuple(
            _control(handle, config, n, runs, torch.cat(list(final_kl[n])).numpy(), gate, loss, counted, mean)
            for n, runs in enumerate(controlled)
        ),
        highest=highest,
        lowest=lowest,
        axes={name: held.axes for kind in kinds for name, held in arrays_of(kind).items()},
        units={name: held.unit for kind in kinds for name, held in arrays_of(kind).items() if held.unit},
    )


def _control(
    handle: Handle,
    config: GatesConfig,
    n: int,
    runs: Sequence[_Run],
    final_kl: np.ndarray,
    gate: np.ndarray,
    loss: np.ndarray,
    counted: np.ndarray,
    mean: Callable[[np.ndarray], tuple],
) -> ControlRun:
    """Control `n` against the intact `gate` and `loss`."""
    changed, own_loss = _joined(runs, "gate"), _joined(runs, "loss")
    pairs = zip(
        gate[..., counted].reshape(-1, counted.sum()), changed[..., counted].reshape(-1, counted.sum()), strict=True
    )
    return ControlRun(
        control=config.controls[n],
        layers=edit_of(config.controls[n], config.seed).layers or handle.engram_layers,
        next_token_loss=own_loss,
        final_kl=final_kl,
        rank_correlation=np.array([spearman(a, b) for a, b in pairs]).reshape(gate.shape[:2]),
        gate_mean=mean(changed)[0],
        **(_arrays("mean_kl", mean(_joined(runs, "kl"))) if config.detail else {}),
        **scalar_fields("mean_loss", mean(own_loss)),
        **scalar_fields("mean_loss_change", mean(own_loss.astype(np.float64) - loss)),
        **scalar_fields("mean_final_kl", mean(final_kl)),
        gate=changed if config.detail else None,
        written_norm=_joined(runs, "written_norm") if config.detail else None,
    )


def _joined(runs: Sequence[_Run], name: str) -> np.ndarray:
    return torch.cat([getattr(own, name) for own in runs], dim=-1).numpy()


def _arrays(name: str, mean: tuple) -> dict[str, Any]:
    """(mean, low, high) as the fields name, name_low, name_high."""
    return dict(zip((name, f"{name}_low", f"{name}_high"), mean, strict=True))
