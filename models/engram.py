"""Engram: a Llama backbone with n-gram memory modules before attention (arXiv 2601.07372).

Axes: batch, pos, back (how many positions before, 0..N-1), order, head, branch (always 1 here), d_model.
A memory layer L reads rows of its table by hashing the last N canonical ids, and adds to the residual h
    e = concat(rows); k = W_K e; v = W_V e; s = <RMSNorm(k), RMSNorm(h)> / sqrt(d); g = gate(s) * v
    h = h + g + SiLU(DWConv(RMSNorm(g)))        then attention and MLP as in Llama.

What a token may look back to is its `reach`: the number of tokens before it in the same document. A document starts
where `position_ids` do not count on by one, and after masked (padding) tokens. History and convolution stop there.
Decoding state lives in extra layers of the ordinary transformers cache, whichever it is, over its whole length, so
that cropping, reordering and copying a cache keep it right.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaPreTrainedModel, LlamaRMSNorm

from engram_lab.models.canonical import canonical_map, map_sha256, tokenizer_sha256
from engram_lab.models.hashing import NgramHash, layer_multipliers, rows_per_order, table_primes
from engram_lab.models.memory_state import MemoryGeneration, state_layers

GATES = ("paper", "demo", "v41")
# transformers renamed the argument in 5.24.
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"


class EngramConfig(LlamaConfig):
    """LlamaConfig plus the keys of the released Engram checkpoints (`engram_*`); layer ids are 0-based blocks."""

    model_type = "engram_llama"

    engram_layer_ids: list[int] | tuple[int, ...] | None = None
    engram_num_embeddings: list[int] | tuple[int, ...] | None = None
    engram_max_ngram_size: int = 3
    engram_vocab_size: int | list[int] | tuple[int, ...] = 10000
    engram_n_heads: int = 8
    engram_head_dim: int = 16
    engram_pad_token_id: int = 0
    engram_compressed_vocab_size: int = 1
    engram_seed: int = 0
    engram_gate: str = "demo"
    engram_conv_kernel: int = 4
    engram_map_sha256: str = ""
    engram_tokenizer_sha256: str = ""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.engram_layer_ids = list(self.engram_layer_ids or [])
        if self.engram_gate not in GATES:
            raise ValueError(f"engram_gate is {self.engram_gate!r}; it must be one of {', '.join(GATES)}.")
        if not 0 <= self.engram_pad_token_id < self.vocab_size:
            raise ValueError(
                f"engram_pad_token_id is {self.engram_pad_token_id}, and the vocabulary has the ids 0 to "
                f"{self.vocab_size - 1}."
            )
        bad = [i for i in self.engram_layer_ids if not 0 <= i < self.num_hidden_layers]
        if bad:
            raise ValueError(f"engram_layer_ids {bad} are not among the blocks 0..{self.num_hidden_layers - 1}.")
        derived = [sum(sum(row) for row in layer) for layer in self.engram_primes()]
        given = self.engram_num_embeddings
        if given is not None and list(given) != derived:
            raise ValueError(f"engram_num_embeddings is {list(given)}, but the prime search gives {derived}.")
        self.engram_num_embeddings = derived

    def engram_primes(self) -> list[list[list[int]]]:
        """Head sizes [layer][order][head]."""
        sizes = self.engram_vocab_size
        sizes = rows_per_order(sizes if isinstance(sizes, int) else list(sizes), self.engram_max_ngram_size)
        return table_primes(self.engram_layer_ids or [], self.engram_max_ngram_size, self.engram_n_heads, sizes)

    def set_tokenizer(self, tokenizer: Any) -> np.ndarray:
        """Take the canonical map of `tokenizer` into the configuration; returns it, [raw id] int64."""
        canonical = canonical_map(tokenizer)
        self.engram_compressed_vocab_size = int(canonical.max()) + 1
        self.engram_map_sha256 = map_sha256(canonical)
        self.engram_tokenizer_sha256 = tokenizer_sha256(tokenizer)
        return canonical


def gate_value(score: Tensor, variant: str) -> Tensor:
    """The gate in (0, 1) for a score s: `paper` sigmoid(s); `demo` and `v41` sigmoid(+-sqrt(max(|s|, 1e-6)))."""
    if variant == "paper":
        return torch.sigmoid(score)
    root = score.abs().clamp_min(1e-6).sqrt()
    # sign(0) = 0 makes the demo gate exactly .5 at s = 0; copysign makes v41 sigmoid(1e-3) there.
    return torch.sigmoid(root * score.sign() if variant == "demo" else torch.copysign(root, score))


def gate_ceiling(d_model: int, variant: str) -> float:
    """The largest gate at unit norm weights: |s| <= sqrt(d_model) by Cauchy-Schwarz."""
    score = math.sqrt(d_model)
    return 1 / (1 + math.exp(-(score if variant == "paper" else math.sqrt(score))))


class CausalDepthwiseConv(nn.Module):
    """Depthwise convolution over pos with taps t, t-dilation, ..., each only within the token's reach."""

    def __init__(self, d_model: int, kernel: int, dilation: int) -> None:
        super().__init__()
        # Laid out as in nn.Conv1d: weight[:, 0, -1] is the tap at t itself.
        self.weight = nn.Parameter(torch.zeros(d_model, 1, kernel))
        self.kernel, self.dilation = kernel, dilation

    def forward(self, x: Tensor, reach: Tensor) -> Tensor:
        """x [batch, past + pos, d_model], reach [batch, pos] -> [batch, pos, d_model]."""
        length = reach.shape[1]
        taps = self.weight[:, 0, :]
        out = x[:, x.shape[1] - length :] * taps[:, -1]
        for tap in range(1, self.kernel):
            back = tap * self.dilation
            missing = back - (x.shape[1] - length)
            shifted = nn.functional.pad(x, (0, 0, missing, 0)) if missing > 0 else x[:, -missing:]
            seen = (reach >= back).unsqueeze(-1)
            out = out + torch.where(seen, shifted[:, :length], 0) * taps[:, -1 - tap]
        return out


class RowTable(nn.Embedding):
    """The rows of one layer; while `overlay` is set (models.overlay) it gives some of the rows that are read.

    It is called with the row ids [batch, pos, order*head] and what was read [..., head_dim]; the weight stays as it is.
    """

    overlay: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, rows: Tensor) -> Tensor:
        """[..., head_dim] of row ids [...]."""
        read = super().forward(rows)
        return read if self.overlay is None else self.overlay(rows, read)


class EngramMemory(nn.Module):
    """One memory module. `table`, `gate` and `written` are submodules so that a probe can read their outputs."""

    def __init__(self, config: EngramConfig, index: int) -> None:
        super().__init__()
        d_model = config.hidden_size
        layer_ids = config.engram_layer_ids or []
        self.index, self.gate_variant = index, config.engram_gate
        self.hash = NgramHash(
            layer_multipliers(
                layer_ids[index],
                config.engram_max_ngram_size,
                config.engram_compressed_vocab_size,
                config.engram_seed,
            ),
            config.engram_primes()[index],
        )
        width = (config.engram_max_ngram_size - 1) * config.engram_n_heads * config.engram_head_dim
        self.table = RowTable(self.hash.num_rows, config.engram_head_dim)  # [row, head_dim]
        self.key = nn.Linear(width, d_model, bias=False)  # W_K
        self.value = nn.Linear(width, d_model, bias=False)  # W_V
        self.key_norm = LlamaRMSNorm(d_model, eps=config.rms_norm_eps)
        self.query_norm = LlamaRMSNorm(d_model, eps=config.rms_norm_eps)
        self.conv_norm = LlamaRMSNorm(d_model, eps=config.rms_norm_eps)
        self.conv = CausalDepthwiseConv(d_model, config.engram_conv_kernel, config.engram_max_ngram_size)
        self.gate = nn.Identity()
        self.written = nn.Identity()

    def forward(self, residual: Tensor, lookback: Tensor, reach: Tensor, state: DynamicLayer | None) -> Tensor:
        """residual [batch, pos, d_model], lookback [batch, pos, back], reach [batch, pos] -> residual with memory."""
        rows = self.hash(lookback)
        read = self.table(rows.to(self.table.weight.device))  # [batch, pos, order*head, head_dim]
        e = read.flatten(-2).to(residual.device, residual.dtype, non_blocking=True)
        key, value = self.key_norm(self.key(e)), self.value(e)
        score = (key.float() * self.query_norm(residual).float()).sum(-1, keepdim=True) / math.sqrt(key.shape[-1])
        gate = self.gate(gate_value(score, self.gate_variant).to(value.dtype))  # [batch, pos, branch=1]
        gated = gate * value
        normed = self.conv_norm(gated)
        if state is not None:
            past, _ = state.update(normed.unsqueeze(1), normed[:, None, :, :0])
            normed = past.squeeze(1)
        return residual + self.written(gated + nn.functional.silu(self.conv(normed, reach)))


class EngramDecoderLayer(LlamaDecoderLayer):
    """A Llama block; on a memory layer the memory writes into the residual before attention."""

    memory: EngramMemory | None

    def __init__(self, config: EngramConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        layer_ids = config.engram_layer_ids or []
        self.memory = EngramMemory(config, layer_ids.index(layer_idx)) if layer_idx in layer_ids else None

    def forward(self, hidden_states: Tensor, engram: dict[str, Any] | None = None, **kwargs: Any) -> Tensor:
        """As LlamaDecoderLayer; `engram` holds lookback, reach and the cache of this forward."""
        if self.memory is not None:
            if engram is None:
                raise ValueError("A memory layer runs only inside EngramModel, which gives it the token history.")
            state = engram["states"][1 + self.memory.index] if engram["states"] else None
            hidden_states = self.memory(hidden_states, engram["lookback"], engram["reach"], state)
        return super().forward(hidden_states, **kwargs)


def document_reach(position_ids: Tensor, keep: Tensor, last: Tensor | None) -> Tensor:
    """Number of tokens before each one in its own document, [batch, pos]; -1 at masked tokens.

    position_ids and keep [batch, pos]; `last` [batch, 2] is (reach, position) of the cached token before, if any.
    """
    batch, length = keep.shape
    if last is None:
        last = keep.new_full((batch, 2), -1, dtype=torch.int64)
    before_position = torch.cat([last[:, 1:], position_ids[:, :-1]], dim=1)
    before_keep = torch.cat([last[:, :1] >= 0, keep[:, :-1]], dim=1)
    starts = (position_ids != before_position + 1) | ~before_keep
    index = torch.arange(length, device=keep.device).expand(batch, length)
    # A document that goes on from the cache started at the virtual index -(1 + last reach).
    first = torch.where(starts, index, -(1 + last[:, :1]))
    return torch.where(keep, index - first.cummax(dim=1).values, -1)


def document_mask(reach: Tensor, length: int, dtype: torch.dtype) -> Tensor | None:
    """Additive mask [batch, 1, pos, past + pos] for the last `length` tokens, each seeing its own document only.

    reach [batch, past + pos] of all tokens. None where every row is one document, for which a causal mask will do.
    """
    index = torch.arange(reach.shape[1], device=reach.device)
    keep, start = reach >= 0, index - reach
    last = start.masked_fill(~keep, -1).amax(dim=1, keepdim=True)
    if not bool((keep & (start != last)).any()):
        return None
    query = index[-length:, None]
    allowed = (start[:, -length:, None] == start[:, None, :]) & keep[:, None, :] & (index <= query)
    allowed |= index == query  # a padding token sees itself, as a softmax over nothing is no number
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, torch.finfo(dtype).min).unsqueeze(1)


class _EngramInit:
    """What from_pretrained cannot read from a file: hash constants come from the configuration."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        if isinstance(module, NgramHash):
            for name, value in module.constants().items():
                init.copy_(getattr(module, name), torch.from_numpy(value))
        elif isinstance(module, CausalDepthwiseConv):
            init.zeros_(module.weight)


class MemoryStack:
    """What a stack of blocks with memories adds to it: its token history, and the memories themselves."""

    config: Any
    canonical_ids: Tensor
    layers: Any

    def memories(self) -> list[EngramMemory]:
        """The memory modules, in the order of `engram_layer_ids`."""
        found = [layer.memory for layer in self.layers if isinstance(layer.memory, EngramMemory)]
        return sorted(found, key=lambda memory: memory.index)

    def place_tables(self, device: torch.device | str, pin: bool = False) -> None:
        """Keep the tables on another device than the rest; rows travel. `pin` locks host memory for fast copies."""
        for memory in self.memories():
            memory.table.to(device)
            if pin:
                memory.table.weight.data = memory.table.weight.data.pin_memory()

    def history(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        state: Any,
    ) -> tuple[Tensor, Tensor]:
        """(lookback [batch, pos, back], reach [batch, pos]) of canonical ids; appends the tokens to `state`."""
        batch, length = input_ids.shape
        past = state.get_seq_length() if state is not None else 0
        seen = state.keys[:, 0] if past else None  # [batch, past, (id, reach, position)]
        # index_select refuses an id outside the vocabulary, a negative one above all, where [] would wrap around.
        canonical = self.canonical_ids.index_select(0, input_ids.reshape(-1)).view(batch, length)
        if position_ids is None:
            position_ids = torch.arange(past, past + length, device=input_ids.device)
        position_ids = position_ids.expand(batch, length)
        keep = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None and attention_mask.dim() == 2:
            keep = attention_mask[:, -length:].bool()
        reach = document_reach(position_ids, keep, seen[:, -1, 1:] if seen is not None else None)
        if state is not None:
            tokens = torch.stack([canonical, reach, position_ids], dim=-1).unsqueeze(1)
            state.update(tokens, tokens[..., :0])
        n = self.config.engram_max_ngram_size
        ids = canonical if seen is None else torch.cat([seen[:, 1 - n :, 0], canonical], dim=1)
        ids = nn.functional.pad(ids, (n - 1, 0))  # what it brings in lies outside every reach
        pad = self.canonical_ids[self.config.engram_pad_token_id]
        back = torch.arange(n, device=ids.device)
        shifted = torch.stack([ids[:, ids.shape[1] - length - j : ids.shape[1] - j] for j in range(n)], dim=-1)
        return torch.where(reach.unsqueeze(-1) >= back, shifted, pad), reach


class EngramModel(_EngramInit, MemoryStack, LlamaModel):
    """LlamaModel whose blocks may carry a memory; the canonical map is a buffer, saved with the weights."""

    config_class = EngramConfig
    _can_record_outputs = {**LlamaModel._can_record_outputs, "hidden_states": EngramDecoderLayer}

    def __init__(self, config: EngramConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(EngramDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.register_buffer("canonical_ids", torch.arange(config.vocab_size))  # [raw id] int64
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As LlamaModel.forward (`past_key_values` is taken as `cache`); needs `input_ids`, which the hash reads."""
        past_key_values = kwargs.pop("past_key_values", None)
        cache = past_key_values if cache is None else cache
        if input_ids is None:
            raise ValueError("An Engram model needs input_ids: its memory is addressed by token ids, not embeddings.")
        if use_cache is None:
            use_cache = self.config.use_cache
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        states: Sequence[Any] = ()
        if cache is not None:
            states = state_layers(cache, self.config.num_hidden_layers, len(self.config.engram_layer_ids))
        lookback, reach = self.history(input_ids, attention_mask, position_ids, states[0] if states else None)
        if states and position_ids is not None and (attention_mask is None or attention_mask.dim() == 2):
            # transformers keeps packed documents apart only where there is no cache.
            mask = document_mask(states[0].keys[:, 0, :, 1], reach.shape[1], self.embed_tokens.weight.dtype)
            if mask is not None:
                # A static cache has places behind the tokens, which nothing may see.
                unused = cache.get_mask_sizes(reach.shape[1], 0)[0] - mask.shape[-1]
                attention_mask = nn.functional.pad(mask, (0, unused), value=torch.finfo(mask.dtype).min)
        return super().forward(
            input_ids=None if inputs_embeds is not None else input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            engram={"lookback": lookback, "reach": reach, "states": states},
            **{CACHE_ARGUMENT: cache},
            **kwargs,
        )


class EngramForCausalLM(_EngramInit, MemoryGeneration, LlamaForCausalLM):
    """The causal language model; `AutoModelForCausalLM.from_pretrained` gives it once `models` is imported."""

    config_class = EngramConfig

    def __init__(self, config: EngramConfig) -> None:
        LlamaPreTrainedModel.__init__(self, config)
        self.model = EngramModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


AutoConfig.register(EngramConfig.model_type, EngramConfig, exist_ok=True)
AutoModelForCausalLM.register(EngramConfig, EngramForCausalLM, exist_ok=True)
