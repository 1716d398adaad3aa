"""Where a causal LM keeps its parts: embedding, decoder blocks, final norm, head, what is done to the logits.

Names are dotted module paths, as `traced.get` and `model.get_submodule` take them. A layout is a claim until
models.handle has run the model and compared (see Handle).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engram_lab.models.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# For each part, the names it has in: Llama, Qwen, Gemma, Mistral and ours; GPT-2; GPT-NeoX; multimodal Gemma.
PARTS: dict[str, tuple[str, ...]] = {
    "embedding": (
        "model.embed_tokens",
        "transformer.wte",
        "gpt_neox.embed_in",
        "model.language_model.embed_tokens",
    ),
    "decoder blocks": ("model.layers", "transformer.h", "gpt_neox.layers", "model.language_model.layers"),
    "final norm": (
        "model.norm",
        "transformer.ln_f",
        "gpt_neox.final_layer_norm",
        "model.language_model.norm",
    ),
    "head": ("lm_head", "embed_out"),
}


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
        logits = model.get_submodule(self.head)(model.get_submodule(self.final_norm)(residual))
        if self.multiply is not None:
            logits = logits * self.multiply
        if self.divide is not None:
            logits = logits / self.divide
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def find_layout(model: PreTrainedModel) -> Layout:
    """The layout of `model`; CheckpointError says which part is missing and where it was looked for."""
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    found = {part: next((path for path in paths if path in names), None) for part, paths in PARTS.items()}
    missing = [f"{part} (looked for {', '.join(PARTS[part])})" for part, path in found.items() if path is None]
    if missing:
        raise CheckpointError(
            f"{type(model).__name__} cannot be shown layer by layer, because this lab does not find its "
            f"{' nor its '.join(missing)}."
        )
    config = model.config.get_text_config()
    return Layout(
        embedding=found["embedding"] or "",
        blocks=found["decoder blocks"] or "",
        final_norm=found["final norm"] or "",
        head=found["head"] or "",
        multiply=getattr(config, "logit_scale", None),
        divide=getattr(config, "logits_scaling", None),
        softcap=getattr(config, "final_logit_softcapping", None),
    )
