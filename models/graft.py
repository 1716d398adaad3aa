"""An empty memory grafted onto any causal LM: all rows zero, so that every output is bit for bit the base model's.

A zero row gives a zero value, and x + 0 is x, whatever the gate says. The rows are what overlays (models.overlay) fill.
The projections W_K and W_V never change: with orthogonal rows, drawn with a seed. There is no convolution. A grafted
block is its own class with the memory before it, the stack of blocks its own class with the token history of
models.engram; nothing else of the model is touched. On disk a graft is a small graft.json beside its base.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from engram_lab.models.canonical import canonical_map, map_sha256, tokenizer_sha256
from engram_lab.models.engram import (
    CACHE_ARGUMENT,
    EngramConfig,
    EngramMemory,
    MemoryStack,
)
from engram_lab.models.errors import CheckpointError, LabError, TokenizerMismatchError
from engram_lab.models.files import load_json, whole
from engram_lab.models.layouts import find_layout
from engram_lab.models.memory_state import MemoryGeneration, state_layers
from engram_lab.models.weightfiles import short

FILE = "graft.json"
FORMAT = "engram-lab graft 1"
# Of the configuration of a memory, what the base model's configuration gets too: everything else that reads it.
_KEYS = (
    "layer_ids", "num_embeddings", "max_ngram_size", "vocab_size", "n_heads", "head_dim", "pad_token_id",
    "compressed_vocab_size", "seed", "gate", "conv_kernel", "map_sha256", "tokenizer_sha256",
)  # fmt: skip


@dataclass(frozen=True)
class Graft:
    """What decides every bit of a graft, beside its base; `base` is the name under which that was opened."""

    base: str
    base_fingerprint: str
    layers: tuple[int, ...]
    rows_per_head: int
    heads: int
    head_dim: int
    max_ngram: int
    gate: str
    seed: int
    pad_token_id: int
    map_sha256: str

    @property
    def fingerprint(self) -> str:
        """16 hex characters for the base's weights and all of this but the base's name."""
        essentials = {key: value for key, value in asdict(self).items() if key != "base"}
        return short(hashlib.sha256(json.dumps([FORMAT, essentials], sort_keys=True).encode()))

    def save(self, folder: Path) -> None:
        """Write graft.json, whole or not at all, into a folder that holds nothing else of a model."""
        if (folder / "config.json").exists():
            raise LabError(f"{folder} holds a model: save the graft into a folder of its own.")
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, **asdict(self)}, ensure_ascii=False, indent=1)
        with whole(folder / FILE) as fresh:
            fresh.write_text(text, encoding="utf-8")


def load_graft(folder: Path) -> Graft:
    """What graft.json of a folder says; CheckpointError if it is damaged."""
    try:
        stored = load_json((folder / FILE).read_bytes())
        if stored.pop("format") != FORMAT:
            raise ValueError("it is of another version")
        stored["layers"] = tuple(stored["layers"])
        spec = Graft(**stored)
        kinds: dict[str, type] = {
            "layers": tuple,
            **dict.fromkeys(("base", "base_fingerprint", "gate", "map_sha256"), str),
        }
        for name, value in vars(spec).items():
            if type(value) is not kinds.get(name, int):  # not isinstance: true is no number
                raise ValueError(f"{name} is {value!r}")
        if not all(type(layer) is int for layer in spec.layers):
            raise ValueError(f"layers is {spec.layers!r}")
        return spec
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / FILE} is not a graft of this lab ({error}): graft the memory again."
        ) from error


def attach(model: PreTrainedModel, tokenizer: Any, spec: Graft, canonical: np.ndarray | None = None) -> None:
    """Put the memories of `spec` into `model`, in place; LabError if it cannot carry them."""
    stack, blocks = stack_of(model)
    config = model.config.get_text_config()
    bad = [layer for layer in spec.layers if not 0 <= layer < len(blocks)]
    if bad or not spec.layers:
        raise LabError(f"{spec.base} has the layers 0 to {len(blocks) - 1}: a memory cannot go to {bad or 'none'}.")
    touched: list[nn.Module] = [stack, *(blocks[layer] for layer in spec.layers)]
    if stack is not model.base_model or any("forward" in vars(module) for module in touched):
        raise LabError(f"{spec.base} runs its blocks in a way of its own, where a memory would not see the tokens.")
    canonical = canonical_map(tokenizer) if canonical is None else canonical
    if map_sha256(canonical) != spec.map_sha256:
        raise TokenizerMismatchError(
            f"The tokenizer of {spec.base} yields other canonical ids than when the memory was grafted: use that one."
        )
    weight: Any = model.get_input_embeddings().weight
    ids = torch.zeros(max(len(weight), len(canonical)), dtype=torch.int64)  # a row without a token is read by no text
    ids[: len(canonical)] = torch.from_numpy(canonical)
    memory_config = _memory_config(spec, config.hidden_size, len(blocks), canonical, tokenizer)
    for index, layer in enumerate(spec.layers):
        memory = _empty_memory(memory_config, index).to(weight.device, weight.dtype).eval().requires_grad_(False)
        blocks[layer].memory = memory
        blocks[layer].__class__ = _with(_GraftedBlock, type(blocks[layer]))
    for key in _KEYS:
        setattr(config, f"engram_{key}", getattr(memory_config, f"engram_{key}"))
    stack.register_buffer("canonical_ids", ids.to(weight.device), persistent=False)
    stack.graft = spec  # type: ignore[assignment]
    stack.grafted = tuple(blocks[layer] for layer in spec.layers)  # type: ignore[assignment]
    stack.__class__ = _with(_GraftedStack, type(stack))
    model.__class__ = _with(MemoryGeneration, type(model))


def _memory_config(spec: Graft, d_model: int, n_layers: int, canonical: np.ndarray, tokenizer: Any) -> EngramConfig:
    limits = {"rows_per_head": 10_000_000, "heads": 64, "head_dim": 4096}
    for name, most in limits.items():
        if not 1 <= getattr(spec, name) <= most:
            raise LabError(f"A memory cannot have {name} {getattr(spec, name)}: give a number from 1 to {most}.")
    if not 2 <= spec.max_ngram <= 8:
        raise LabError(f"A memory cannot read n-grams of up to {spec.max_ngram} tokens: give a number from 2 to 8.")
    try:
        return EngramConfig(
            hidden_size=d_model,
            num_hidden_layers=n_layers,
            num_attention_heads=1,
            num_key_value_heads=1,
            engram_layer_ids=list(spec.layers),
            engram_max_ngram_size=spec.max_ngram,
            engram_vocab_size=spec.rows_per_head,
            engram_n_heads=spec.heads,
            engram_head_dim=spec.head_dim,
            engram_pad_token_id=spec.pad_token_id,
            engram_compressed_vocab_size=int(canonical.max()) + 1,
            engram_seed=spec.seed,
            engram_gate=spec.gate,
            engram_conv_kernel=1,
            engram_map_sha256=spec.map_sha256,
            engram_tokenizer_sha256=tokenizer_sha256(tokenizer),
        )
    except (ValueError, TypeError) as error:
        raise LabError(f"A memory cannot be made as it was asked for: {error}") from error


class _GraftedMemory(EngramMemory):
    """`history` is (lookback, reach) of the forward that runs, given by the stack."""

    history: tuple[Tensor, Tensor]


def _empty_memory(config: EngramConfig, index: int) -> _GraftedMemory:
    """Rows of zeros, orthogonal W_K and W_V, and a convolution of one tap that is zero."""
    memory = _GraftedMemory(config, index)
    rng = np.random.default_rng([config.engram_seed, (config.engram_layer_ids or [])[index]])
    with torch.no_grad():
        memory.table.weight.zero_()
        for projection in (memory.key, memory.value):
            projection.weight.copy_(orthogonal(projection.out_features, projection.in_features, rng))
    return memory


def orthogonal(rows: int, columns: int, rng: np.random.Generator) -> Tensor:
    """A random matrix [rows, columns] float32 with orthonormal rows, or columns where these are fewer.

    Factored in float64, so that what machines do differently in the last digits is rounded away.
    """
    q, r = np.linalg.qr(rng.standard_normal((max(rows, columns), min(rows, columns))))
    q *= np.sign(np.diag(r))  # makes the factors unique
    return torch.from_numpy((q if rows >= columns else q.T).astype(np.float32))


class _GraftedBlock:
    """Mixed into the class of a block: the memory writes into the residual before the block runs."""

    memory: _GraftedMemory

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        lookback, reach = self.memory.history
        return super().forward(self.memory(hidden_states, lookback, reach, None), *args, **kwargs)  # type: ignore[misc]


class _GraftedStack(MemoryStack):
    """Mixed into the class of a stack of blocks: it keeps the token history, in the cache while decoding."""

    graft: Graft
    grafted: tuple[Any, ...]

    def memories(self) -> list[Any]:
        """The memory modules, by block."""
        return [block.memory for block in self.grafted]

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        """As the base's, which gets the cache that it would have made itself."""
        if input_ids is None:
            raise ValueError("A grafted model needs input_ids: its memory is addressed by token ids, not embeddings.")
        caches = [kwargs.pop(name, None) for name in ("cache", "past_key_values")]
        cache = next((one for one in caches if one is not None), None)
        use_cache = kwargs.pop("use_cache", None)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        state = state_layers(cache, self.config.num_hidden_layers, 0)[0] if cache is not None else None
        history = self.history(input_ids, kwargs.get("attention_mask"), kwargs.get("position_ids"), state)
        for memory in self.memories():
            memory.history = history
        if kwargs.get("inputs_embeds") is None:
            kwargs["input_ids"] = input_ids
        return super().forward(use_cache=use_cache, **{CACHE_ARGUMENT: cache}, **kwargs)  # type: ignore[misc]


def _with(mixin: type, base: type) -> type:
    """`base` with the mixin before it, under the same name, by which transformers looks up what a class can do."""
    return type(base.__name__, (mixin, base), {"__module__": base.__module__, "__qualname__": base.__qualname__})


def stack_of(model: PreTrainedModel) -> tuple[Any, Any]:
    """(the module that runs the blocks, the blocks)."""
    blocks = find_layout(model).blocks
    return model.get_submodule(blocks.rpartition(".")[0]), model.get_submodule(blocks)
