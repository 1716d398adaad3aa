"""Where a causal LM keeps its parts: embedding, decoder blocks, final norm, head, what is done to the logits.

Names are dotted module paths, as `traced.get` and `model.get_submodule` take them. A layout is a claim until
models.handle has run the model and compared (see Handle).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engram_lab.models.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Layout:
    """Paths of the parts of a model, and how its head turns into logits."""

    embedding: str
    blocks: str
    final_norm: str
    head: str
    multiply: float | None = None  # Cohere's logit_scale
    divide: float | None = None  # Granite's logits_scaling
    softcap: float | None = None  # Gemma 2: cap * tanh(logits / cap)

    def unembed(self, model: nn.Module, residual: Tensor) -> Tensor:
        """Logits [..., vocab] of a residual [..., d_model], with the same operations as the model's own."""
        head = model.get_submodule(self.head)
        weight: Any = head.weight
        # Mamba carries its residual in float32 through a model of 16 bits.
        logits = head(model.get_submodule(self.final_norm)(residual).to(weight.dtype))
        if self.multiply is not None:
            logits = logits * self.multiply
        if self.divide is not None:
            logits = logits / self.divide
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def find_layout(model: PreTrainedModel) -> Layout:
    """The layout of `model`, by its structure and not by names; CheckpointError says which part is missing.

    The blocks are the list of as many modules as the configuration has layers that lies nearest to the embedding, the
    final norm the last norm of the residual's width beside them, the head what the model itself names as its output
    embedding.
    """
    config = model.config.get_text_config()
    kind = type(model).__name__
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    embedding = _name_of(model.get_input_embeddings(), modules)
    head = _name_of(model.get_output_embeddings(), modules)
    n_layers = getattr(config, "num_hidden_layers", None)
    if n_layers == 0:
        raise CheckpointError(f"{kind} has no decoder blocks (num_hidden_layers is 0), so there is no layer to show.")
    stacks = [n for n, m in modules.items() if isinstance(m, nn.ModuleList) and len(m) == n_layers]
    blocks = max(stacks, key=lambda name: (_shared(name, embedding or ""), -name.count(".")), default=None)
    parent = (blocks or "").rpartition(".")[0]
    beside = model.get_submodule(parent).named_children() if blocks else ()
    width = getattr(model.get_input_embeddings(), "weight", torch.empty(0)).shape[-1:]
    norms = [
        name
        for name, module in beside
        if "norm" in type(module).__name__.lower()
        # Gemma 4 E2B has one behind it, for its inputs per layer; OLMo's norms have no weight.
        and (not isinstance(weight := getattr(module, "weight", None), Tensor) or weight.shape == width)
    ]
    parts = {
        "embedding": embedding,
        f"list of {n_layers} decoder blocks": blocks,
        "final norm, beside the blocks": f"{parent}.{norms[-1]}".lstrip(".") if norms else None,
        "head": head,
    }
    if missing := [part for part, path in parts.items() if path is None]:
        raise CheckpointError(
            f"{kind} cannot be shown layer by layer, because this lab does not find its {' nor its '.join(missing)}."
        )
    embedding, blocks, norm, head = (str(path) for path in parts.values())
    return Layout(
        embedding,
        blocks,
        norm,
        head,
        multiply=_number(config, "logit_scale"),
        divide=_number(config, "logits_scaling"),
        softcap=_number(config, "final_logit_softcapping"),
    )


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int | float) else None


def _name_of(module: nn.Module | None, modules: Mapping[str, nn.Module]) -> str | None:
    return next((name for name, own in modules.items() if own is module), None)


def _shared(a: str, b: str) -> int:
    """How many parts two dotted paths begin with together."""
    return next((n for n, (x, y) in enumerate(zip(a.split("."), b.split("."), strict=False)) if x != y), a.count("."))
