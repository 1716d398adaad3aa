"""The statistics of the logit lens, on plain tensors.

Axes: layer (the residual before block 0, then after each block; the last is final), pos, d_model, vocab, k.
With z = unembed(state) in float32 and p = softmax(z):
    kl      = KL(p_final || p_layer) = log Z_layer - log Z_final + <p_final, z_final - z_layer>   (nats)
    entropy = H(p_layer) = log Z_layer - <p_layer, z_layer>                                       (nats)
The vocabulary is seen a few rows at a time: [layer, pos, vocab] never exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# Maxima of so many vocabulary entries are kept: the best tokens are found without sorting, and a CPU takes
# ten times as long for the maximum of one long row as for those of its blocks.
BLOCK = 128
# Rows of logits at once: enough for an efficient product.
ROWS_CPU, ROWS_ACCELERATOR = 512, 512
CACHED_VALUES = 1_500_000  # logits that a CPU's cache holds, with their probabilities


@dataclass(frozen=True)
class LensStatistics:
    """What the lens reads at every layer and position, on the device of the states, float32 and int64.

    kl, entropy [layer, pos] in nats; the last layer's kl is exactly 0.
    argmax [layer, pos]: the best token, of equals the one with the lowest id.
    top_ids, top_probs [layer, pos, k]: the k best, equals by rising id.
    settle_depth [pos]: the first layer from which argmax stays the final one.
    target_rank (number of tokens with a larger logit), target_prob [layer, pos]: None without a target.
    """

    kl: Tensor
    entropy: Tensor
    argmax: Tensor
    top_ids: Tensor
    top_probs: Tensor
    settle_depth: Tensor
    target_rank: Tensor | None
    target_prob: Tensor | None


def lens_statistics(
    states: Tensor,
    unembed: Callable[[Tensor], Tensor],
    *,
    top_k: int = 0,
    target_id: int | None = None,
    progress: Callable[[float, str], None] | None = None,
) -> LensStatistics:
    """The lens at every layer of `states` [layer, pos, d_model].

    `unembed` maps [..., d_model] to new logits [..., vocab], which are overwritten. `progress` is told the
    fraction done after each chunk of positions, and may raise to stop.
    """
    n_layers, n_pos, _ = states.shape
    device = states.device
    size = max(1, (ROWS_CPU if device.type == "cpu" else ROWS_ACCELERATOR) // n_layers)
    with torch.inference_mode():
        kl, entropy, target_prob = torch.zeros(3, n_layers, n_pos, device=device)
        target_rank = torch.zeros(n_layers, n_pos, dtype=torch.int64, device=device)
        top_ids = torch.zeros(n_layers, n_pos, max(top_k, 1), dtype=torch.int64, device=device)
        top_probs = torch.zeros(n_layers, n_pos, max(top_k, 1), device=device)
        for start in range(0, n_pos, size):
            stop = min(start + size, n_pos)
            # As one matrix, position by position, so that the rows of a few positions lie together.
            rows = unembed(states[:, start:stop].transpose(0, 1).flatten(0, 1))
            chunk = rows.float().unflatten(0, (-1, n_layers))  # [pos, layer, vocab]
            inner = stop - start
            if device.type == "cpu":  # the passes below read the same few rows, from the cache
                inner = max(1, CACHED_VALUES // chunk[0].numel())
            for first in range(start, stop, inner):
                at = slice(first, min(first + inner, stop))
                logits = chunk[first - start : at.stop - start]
                p = torch.empty_like(logits)
                if target_id is not None:
                    # Ones and zeros in float32, whose sums are exact: the fastest count there is on a CPU.
                    larger = torch.gt(logits, logits[..., target_id, None], out=p)
                    target_rank[:, at] = larger.sum(dim=-1).long().T
                best, ids = _take_best(logits, max(top_k, 1))
                # The dot products below cancel; without a common offset, of 100 in GPT-2, they lose less.
                logits.sub_(best[..., :1])
                torch.softmax(logits, dim=-1, out=p)
                probs = p.gather(-1, ids)
                top_ids[:, at], top_probs[:, at] = ids.transpose(0, 1), probs.transpose(0, 1)
                log_z = -probs[..., 0].log()  # the largest logit is 0 now
                # A product for each position: as one batched product it takes ten times as long on a CPU.
                crossed = torch.stack([z @ q[-1] for z, q in zip(logits, p, strict=True)])
                kl[:, at] = ((log_z - crossed) - (log_z[:, -1:] - crossed[:, -1:])).T
                if target_id is not None:
                    target_prob[:, at] = p[..., target_id].T
                entropy[:, at] = (log_z - torch.mul(p, logits, out=logits).sum(dim=-1)).T
            del rows, chunk, logits  # so that the next chunk can have their memory
            if progress is not None:
                progress(stop / n_pos, "logit lens")
        argmax = top_ids[..., 0].clone()
        stays = (argmax == argmax[-1]).flip(0).cumprod(dim=0)  # from the end, 1 for as long as it agrees
        return LensStatistics(
            kl=kl.clamp_min_(0),  # rounding can take it below
            entropy=entropy.clamp_min_(0),
            argmax=argmax,
            top_ids=top_ids[..., :top_k],
            top_probs=top_probs[..., :top_k],
            settle_depth=n_layers - stays.sum(dim=0),
            target_rank=None if target_id is None else target_rank,
            target_prob=None if target_id is None else target_prob,
        )


def _block_maxima(logits: Tensor) -> Tensor:
    """The maximum of every BLOCK entries, [..., vocab] -> [..., block]; the last block takes what is left."""
    whole = logits.shape[-1] // BLOCK * BLOCK
    maxima = logits[..., :whole].unflatten(-1, (-1, BLOCK)).amax(dim=-1)
    if whole == logits.shape[-1]:
        return maxima
    return torch.cat([maxima, logits[..., whole:].amax(dim=-1, keepdim=True)], dim=-1)


def _take_best(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, ids) [..., k] of the k largest logits [..., vocab], equals by rising id."""
    last = logits.shape[-1] - 1
    assert k <= last + 1, f"top_k is {k}, the vocabulary has {last + 1} tokens"
    blocks = _block_maxima(logits)
    inside = torch.arange(BLOCK, device=logits.device)
    values, ids = [], []
    for _ in range(k):
        block = blocks.argmax(dim=-1, keepdim=True)
        members = (block * BLOCK + inside).clamp_max_(last)  # the last block repeats its last entry
        found = logits.gather(-1, members)
        best, at = found.max(dim=-1, keepdim=True)
        token = members.gather(-1, at)
        values.append(best)
        ids.append(token)
        logits.scatter_(-1, token, -torch.inf)
        rest = found.masked_fill_(members == token, -torch.inf).amax(dim=-1, keepdim=True)
        blocks.scatter_(-1, block, rest)
    taken = torch.cat(values, dim=-1), torch.cat(ids, dim=-1)
    logits.scatter_(-1, taken[1], taken[0])  # as they were
    return taken
