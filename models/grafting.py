"""Grafting an empty memory (models.graft) onto the model of a handle, and writing such a graft to disk."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from engram_lab.models.canonical import canonical_map, map_sha256
from engram_lab.models.errors import LabError
from engram_lab.models.graft import Graft, attach, stack_of
from engram_lab.models.handle import Handle


def graft(
    handle: Handle,
    layers: Sequence[int],
    *,
    rows_per_head: int = 10_000,
    heads: int = 8,
    head_dim: int | None = None,
    max_ngram: int = 3,
    gate: str = "demo",
    seed: int = 0,
) -> Handle:
    """A new handle of the same weights, shared and not copied, with an empty memory before each of these blocks.

    Without `head_dim` it is so wide that what a position reads, (max_ngram - 1) * heads * head_dim numbers, can have
    any value in the residual. LabError for a model or a layer that cannot carry one.
    """
    if handle.engram_layers:
        raise LabError(f"{handle.name} has a memory already: write facts into that, or graft onto its base.")
    config = handle.model.config.get_text_config()
    ids = (getattr(config, name, None) for name in ("pad_token_id", "eos_token_id"))
    pad = next((n for n in ids if isinstance(n, int) and 0 <= n < handle.vocab_size), 0)
    canonical = canonical_map(handle.tokenizer)
    spec = Graft(
        base=handle.name,
        base_fingerprint=handle.fingerprint,
        layers=tuple(sorted(set(layers))),
        rows_per_head=rows_per_head,
        heads=heads,
        head_dim=head_dim if head_dim is not None else -(-handle.d_model // max(1, (max_ngram - 1) * heads)),
        max_ngram=max_ngram,
        gate=gate,
        seed=seed,
        pad_token_id=pad,
        map_sha256=map_sha256(canonical),
    )
    with handle.lock:
        model = twin(handle.model)
    attach(model, handle.tokenizer, spec, canonical)
    layers_named = ",".join(map(str, spec.layers))
    return Handle(model, handle.tokenizer, f"{handle.name}+memory@{layers_named}", spec.fingerprint)


def graft_of(handle: Handle) -> Graft:
    """What `graft` or a graft folder made of this handle's model; LabError if it is not grafted."""
    found = getattr(stack_of(handle.model)[0], "graft", None)
    if not isinstance(found, Graft):
        raise LabError(f"{handle.name} has no grafted memory: there is nothing to save.")
    return found


def save_graft(handle: Handle, folder: Path) -> None:
    """Write the graft of a handle beside its base; its rows are zero, and what fills them are overlays."""
    spec = graft_of(handle)
    for memory in stack_of(handle.model)[0].memories():
        if memory.table.weight.any():
            raise LabError(f"{handle.name} has rows that are not zero, which a graft does not keep: use an overlay.")
    spec.save(folder)


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """New modules around the same tensors, without what nnsight has put around the old ones."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    wrapped = [name for name, module in model.named_modules() if "__nnsight__" in vars(module)]
    for name in wrapped:
        own = vars(model.get_submodule(name))
        shared |= {id(own["__nnsight__"]): (), id(own["forward"]): ()}
    twin = copy.deepcopy(model, shared)
    for name in wrapped:
        own = vars(twin.get_submodule(name))
        del own["__nnsight__"], own["forward"]
    return twin
