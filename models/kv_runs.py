"""Runs that make a KV cache, go on from one without changing it, and make a part of it new.

Axes: layer (decoder block), batch, kv_head, pos, head_dim, vocab.

What an edit can reach. A cached position is what later tokens see of it; what a token predicts is computed when it
runs. So to ask what an edited cache of a prompt of n tokens predicts next, the last token has to run again:
    run = prefill(handle, ids)                          cache of positions 0..n-1
    edited = swap(run.kv.first(n - 1), donor.kv.first(n - 1), positions)     edits are among positions 0..n-2
    logits = continue_from(handle, edited, ids[-1:])    the last token's own K, V and everything it reads is new
The clean run to compare with is the same call on the unedited `run.kv.first(n - 1)`: a forward of another shape (the
whole prompt at once, or another batch size) differs in the last bits, one of the same shape does not, so that a swap
with itself and a swap of everything are torch.equal to clean runs.

All runs are nnsight traces, in inference mode and under the handle's lock.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import nnsight
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin

from engram_lab.models.errors import LabError, PromptError, first_line
from engram_lab.models.handle import Handle
from engram_lab.models.kv import KV, KVError, join, shared_cache
from engram_lab.models.tracing import pin_source

pin_source(__file__)
_checked: weakref.WeakSet[Handle] = weakref.WeakSet()  # handles that check_kv has passed


@dataclass(frozen=True, eq=False)
class Prefill:
    """A run of tokens: `kv` of all so far, the tokens before included; logits [batch, pos, vocab] of this run."""

    kv: KV
    logits: Tensor


def prefill(
    handle: Handle,
    ids: Sequence[int] | Sequence[Sequence[int]] | Tensor,
    after: KV | None = None,
    *,
    start: int | None = None,
    logits: str = "last",
) -> Prefill:
    """Run ids [pos] or [batch, pos] after the cache `after`, which stays as it is.

    `start` is the position of the first, by default the next one. logits "last" gives those of the last token only.
    With one row of ids and a batch of caches, or the other way round, the one goes with every other. Raises KVError
    for a model without a per-token cache, PromptError for ids that are not the model's or go past its context.
    """
    device = handle.device
    tokens = torch.as_tensor(ids, dtype=torch.int64, device=device)
    tokens = tokens[None] if tokens.dim() == 1 else tokens
    if tokens.dim() != 2 or not tokens.numel():
        raise PromptError("There is no token to run: give ids of the shape [batch, pos].")
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < handle.vocab_size:
        raise PromptError(f"An id is outside the vocabulary of {handle.name}, 0 to {handle.vocab_size - 1}.")
    begin = start if start is not None else after.next_position if after is not None else 0
    positions = torch.arange(begin, begin + tokens.shape[1], device=device)
    if begin < 0 or begin + tokens.shape[1] > handle.context:
        raise PromptError(
            f"The tokens go from position {begin} to {begin + tokens.shape[1] - 1}, and {handle.name} has the "
            f"positions 0 to {handle.context - 1}."
        )
    batch = max(tokens.shape[0], after.batch if after is not None else 1)
    if tokens.shape[0] not in (1, batch):
        raise KVError(f"There are {tokens.shape[0]} rows of ids for {batch} caches: give one row, or as many.")
    tokens = tokens.expand(batch, -1)
    with handle.running():
        before = after.expand(batch) if after is not None else None
        cache = shared_cache(before) if before is not None else _empty_cache(handle)
        out = _run(handle, tokens, positions.expand(batch, -1), cache, 1 if logits == "last" else 0)
        seen = tokens if before is None else torch.cat([before.ids, tokens], dim=1)
        where = positions if before is None else torch.cat([before.positions, positions])
        return Prefill(_from_cache(handle, cache, seen, where), out)


def continue_from(
    handle: Handle, kv: KV, ids: Sequence[int] | Sequence[Sequence[int]] | Tensor, *, start: int | None = None
) -> Tensor:
    """Logits [batch, pos, vocab] of all `ids` run on the cache, which stays as it is; see prefill."""
    return prefill(handle, ids, kv, start=start, logits="all").logits


def generate(
    handle: Handle,
    kv: KV,
    last_ids: Sequence[int] | Sequence[Sequence[int]] | Tensor,
    n: int,
    *,
    stop: Collection[int] = (),
    progress: Callable[[float], None] | None = None,
) -> tuple[Tensor, Prefill]:
    """Greedy: (the n ids written [batch, n], the run up to the last of them with the logits after it).

    `last_ids`, the end of the text, run on `kv` first. Ends early once every row has written an id of `stop`.
    """
    run = prefill(handle, last_ids, kv)
    written: list[Tensor] = []
    ended = torch.zeros(run.kv.batch, dtype=torch.bool, device=handle.device)
    ends = torch.tensor(sorted(stop), dtype=torch.int64, device=handle.device)
    while len(written) < n and not (stop and bool(ended.all())):
        if progress is not None:
            progress(len(written) / n)
        chosen = run.logits[:, -1].argmax(dim=-1, keepdim=True)
        written.append(chosen)
        ended |= torch.isin(chosen[:, 0], ends)
        run = prefill(handle, chosen, run.kv)
    out = torch.cat(written, dim=1) if written else run.kv.ids[:, :0]
    return out, run


def recompute(handle: Handle, kv: KV, first: int, k: int) -> KV:
    """`kv` with tokens first..first+k-1 run again on what stands before them; those after stay as they were."""
    if not 0 <= first <= first + k <= kv.n_tokens:
        raise KVError(f"A cache of {kv.n_tokens} tokens has no tokens {first} to {first + k - 1} to recompute.")
    if k == 0:
        return kv
    where = kv.positions[first : first + k]
    run = prefill(handle, kv.ids[:, first : first + k], kv.first(first) if first else None, start=int(where[0])).kv
    return join([run, kv.span(first + k, kv.n_tokens)], 2, kv.positions)


def check_kv(handle: Handle) -> None:
    """KVError unless the model has a cache per token that it runs on as without one (tried on a few tokens, once)."""
    if handle in _checked:
        return
    length = min(6, handle.context)
    ids = [n * (handle.vocab_size - 1) // length for n in range(length)]
    try:
        whole = prefill(handle, ids).logits
        parts = prefill(handle, ids[length // 2 :], prefill(handle, ids[: length // 2]).kv).logits
    except LabError:
        raise
    except Exception as error:  # whatever the model's own code raises
        raise KVError(f"{handle.name} cannot run on a cache: {first_line(error)}.") from error
    gap = (whole - parts).abs().max() / whole.abs().max()
    if gap > (1e-3 if handle.dtype == torch.float32 else 0.1):
        raise KVError(
            f"{handle.name} gives other logits on its own cache than without one (by {float(gap):.1%} of the largest), "
            "so nothing can be learnt from editing it."
        )
    _checked.add(handle)


def check_parts(handle: Handle) -> None:
    """KVError for a cache in which keys and values are not apart: of DeepSeek's, a latent of both and a rotated key."""
    if getattr(handle.model.config.get_text_config(), "kv_lora_rank", None):
        raise KVError(
            f"{handle.name} keeps one latent for keys and values together (MLA) and beside it a rotated key, so that "
            "neither K nor V alone is there to be taken: swap both."
        )


def _run(handle: Handle, ids: Tensor, positions: Tensor, cache: Cache, keep: int) -> Tensor:
    """Logits of one traced forward, which appends to `cache`; `keep` last positions (0: all)."""
    takes = inspect.signature(handle.model.forward).parameters
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": True}
    inputs["cache" if "cache" in takes else "past_key_values"] = cache  # renamed in transformers 5.24
    if "logits_to_keep" in takes:
        inputs["logits_to_keep"] = keep
    traced = handle.traced
    with traced.trace(**inputs):
        out = nnsight.save(traced.output.logits)
    return handle.finite(out[:, -keep:] if keep else out, ids)


def running_states(handle: Handle) -> list[int]:
    """The blocks that keep one running state instead of keys and values per token: linear attention, convolutions."""
    layers = DynamicCache(config=handle.model.config.get_text_config()).layers
    return [n for n, layer in enumerate(layers) if isinstance(layer, LinearAttentionCacheLayerMixin)]


def _empty_cache(handle: Handle) -> Cache:
    """A cache whose layers keep every token; KVError if the model's own would keep something else."""
    if other := running_states(handle):
        raise KVError(
            f"{handle.name} keeps one running state instead of keys and values per token in {len(other)} of its "
            f"{handle.n_layers} layers (layer {other[0]} for one), so there is no position to edit: use a model with "
            "attention in every layer."
        )
    return DynamicCache()


def _from_cache(handle: Handle, cache: Cache, ids: Tensor, positions: Tensor) -> KV:
    layers: list[Any] = list(cache.layers)
    length = ids.shape[1]
    # In the order of the configuration, which is that of the state layers.
    memory = tuple(getattr(handle.model.config.get_text_config(), "engram_layer_ids", None) or ())
    n_states = {1, 1 + len(memory)} if memory else {0}  # the history of tokens, and in an Engram its convolutions
    attention, state = layers[: handle.n_layers], layers[handle.n_layers :]
    held = [layer.get_seq_length() for layer in attention]
    if len(held) != handle.n_layers or len(state) not in n_states or any(n != length for n in held):
        raise KVError(
            f"{handle.name} keeps keys and values for {min(held, default=0)} of {length} tokens in {len(held)} of "
            f"{handle.n_layers} layers, and an edit needs every token in every layer."
        )
    return KV(
        tuple(layer.keys for layer in attention),
        tuple(layer.values for layer in attention),
        ids,
        positions,
        tuple(layer.keys for layer in state),
        memory if len(state) > 1 else (),  # a grafted memory has no convolution
    )
