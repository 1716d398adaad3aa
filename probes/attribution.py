"""What the memory says and whether it matters: direct logit attribution, and gates shut one at a time.

Axes: layer (memory layers, by block), block (all decoder blocks), order (n-grams of 2, 3, ...), head, pos.
The last residual is a sum: embedding + blocks + what the memories wrote. The final norm divides it by one number at
each position; with that number kept as it was (frozen), the logit of a token is the sum of what each part gives it:
    logit[v] = sum over parts <part, w * W_U[v]> / rms(last residual)
A logit is known up to a constant that all tokens share, so compare parts, or look at the log-probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from engram_lab.models.handle import Handle
from engram_lab.models.memory import Edit, MemoryRead, edited_logits
from engram_lab.models.tables import memories
from engram_lab.probes.base import Array, Progress, Record, role
from engram_lab.probes.spans import token_text

# Tokens at once in a knock-out: a few forwards of a long prompt, many of a short one.
TOKENS = 4096


@dataclass(frozen=True, eq=False)
class Attribution(Record):
    """The parts of the target's logit at every position: memory + conv of all layers + block + embed = logit."""

    target_ids: Annotated[np.ndarray, Array("pos", dtype="int64", role="name")]
    logit: Annotated[np.ndarray, Array("pos", unit="logit")]
    log_prob: Annotated[np.ndarray, Array("pos", unit="nats")]
    memory: Annotated[np.ndarray, Array("layer", "order", "head", "pos", unit="logit")]  # gate * W_V slice * row
    conv: Annotated[np.ndarray, Array("layer", "pos", unit="logit")]  # written - gate * value
    written: Annotated[np.ndarray, Array("layer", "pos", unit="logit")]  # all that the layer's memory wrote
    block: Annotated[np.ndarray, Array("block", "pos", unit="logit")]  # attention + MLP
    embed: Annotated[np.ndarray, Array("pos", unit="logit")]


@dataclass(frozen=True, eq=False)
class KnockOut(Record):
    """What the target loses when one gate is shut: with it shut minus as it is, at `position` of the first prompt.

    NaN where nothing was run: behind `position`, which cannot see it, and in other prompts.
    """

    position: int = field(metadata=role("name"))
    target_id: int = field(metadata=role("name"))
    target_text: str
    logit: float
    log_prob: float
    logit_change: Annotated[np.ndarray, Array("layer", "pos", unit="logit")]
    log_prob_change: Annotated[np.ndarray, Array("layer", "pos", unit="nats")]


@dataclass(frozen=True)
class Parts:
    """The tensors [..., pos] of an Attribution of one prompt, float64."""

    logit: Tensor
    memory: Tensor
    conv: Tensor
    written: Tensor
    block: Tensor
    embed: Tensor


def parts(handle: Handle, read: MemoryRead, targets: Tensor) -> Parts:
    """The attribution of `targets` [pos] in one prompt's forward (batch of 1); only inside running().

    For the models that carry a memory: a Llama's RMSNorm, and logits that nothing is done to.
    """
    norm: Any = handle.model.get_submodule(handle.layout.final_norm)
    head: Any = handle.model.get_submodule(handle.layout.head)
    states = read.states[:, 0].double()  # [1 + block, pos, d_model]
    scale = (states[-1].square().mean(dim=-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    # What a part is multiplied with, [pos, d_model].
    along = head.weight[targets].double() * norm.weight.double() * scale
    blocks = (states.diff(dim=0) * along).sum(-1)  # [block, pos], memories included
    written = (read.written[:, 0].double() * along).sum(-1)
    blocks[list(handle.engram_layers)] -= written
    by_head = []
    for memory, rows, gate in zip(memories(handle), read.read[:, 0], read.gate[:, 0], strict=True):
        # W_V^T along: what each number read is multiplied with, [pos, order, head, head_dim].
        weight = (along @ memory.value.weight.double()).view(rows.shape)
        # Rows may lie on the host (place_tables).
        by_head.append(
            ((rows.to(along.device).double() * weight).sum(-1) * gate.double().unsqueeze(-1)).permute(1, 2, 0)
        )
    from_rows = torch.stack(by_head)
    return Parts(
        logit=(states[-1] * along).sum(-1),
        memory=from_rows,
        conv=written - from_rows.sum(dim=(1, 2)),
        written=written,
        block=blocks,
        embed=(states[0] * along).sum(-1),
    )


def targets_of(read: MemoryRead, ids: Sequence[int], target_id: int | None) -> Tensor:
    """[pos]: the chosen token; without one the prompt's next token, at its last position the model's top token."""
    last = read.logits[0, -1].argmax() if target_id is None else torch.tensor(target_id)
    following = list(ids[1:]) if target_id is None else [target_id] * (len(ids) - 1)
    return torch.tensor([*following, int(last)], dtype=torch.int64, device=read.logits.device)


def attribution(found: Sequence[tuple[Parts, Tensor, Tensor]]) -> Attribution:
    """The record of prompts one after another, each as (parts, targets [pos], log-probability of them [pos])."""

    def joined(name: str) -> np.ndarray:
        return torch.cat([getattr(own, name) for own, _, _ in found], dim=-1).float().cpu().numpy()

    names = ("logit", "memory", "conv", "written", "block", "embed")
    return Attribution(
        target_ids=torch.cat([targets for _, targets, _ in found]).cpu().numpy(),
        log_prob=torch.cat([log_prob for _, _, log_prob in found]).cpu().numpy(),
        **{name: joined(name) for name in names},
    )


def knock_out(
    handle: Handle,
    ids: Sequence[int],
    position: int,
    target_id: int,
    n_pos: int,
    progress: Progress | None = None,
) -> KnockOut:
    """Each gate up to `position` shut in a forward of its own, many of them in one batch; arrays [layer, n_pos]."""
    n_layers, length = len(handle.engram_layers), position + 1
    seen = torch.tensor([ids[:length]], dtype=torch.int64)

    def scores(closed: Tensor) -> Tensor:
        """(logit, log-probability) of the target, [2, run] float32."""
        logits = edited_logits(handle, seen.expand(closed.shape[1], -1), Edit(closed=closed), position).float()
        return torch.stack([logits[:, target_id], logits.log_softmax(-1)[:, target_id]]).cpu()

    with torch.inference_mode():
        intact = scores(torch.zeros(n_layers, 1, length, dtype=torch.bool))
        size = max(1, TOKENS // length)
        runs, changes = torch.arange(n_layers * length), []
        for some in runs.split(size):
            closed = torch.zeros(n_layers, len(some), length, dtype=torch.bool)
            closed[some // length, torch.arange(len(some)), some % length] = True
            changes.append(scores(closed) - intact)
            if progress is not None:
                progress((int(some[-1]) + 1) / len(runs), f"{handle.name}: gates shut one at a time")
    change = np.full((2, n_layers, n_pos), np.nan, dtype=np.float32)
    change[:, :, :length] = torch.cat(changes, dim=1).view(2, n_layers, length).numpy()
    text = token_text(handle, target_id)
    return KnockOut(position, target_id, text, float(intact[0]), float(intact[1]), change[0].copy(), change[1].copy())
