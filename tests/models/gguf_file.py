"""Writes a Llama and its tokenizer as a GGUF file, as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _interleaved(weight: torch.Tensor, n_head: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring pairs, transformers halves: the rows of a head are reordered."""
    return weight.reshape(n_head, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_llama(
    file: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    more: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    pre: str = "gpt-2",
) -> None:
    """Write `model` in float32 with its BPE tokenizer, byte-level or with byte fallback.

    `more` adds metadata and tensors; `pre` is how text is cut.
    """
    config = model.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)

    tokens = [tokenizer.convert_ids_to_tokens(i) for i in range(len(tokenizer))]
    padding = [f"<pad{i}>" for i in range(len(tokens), config.vocab_size)]
    kinds = [gguf.TokenType.CONTROL if t in tokenizer.all_special_tokens else gguf.TokenType.NORMAL for t in tokens]
    core = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("llama" if core["byte_fallback"] else "gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + padding)
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED] * len(padding))
    writer.add_token_merges([" ".join(pair) for pair in core["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(True)

    for name, tensor in model.state_dict().items():
        if name.endswith("q_proj.weight"):
            tensor = _interleaved(tensor, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            tensor = _interleaved(tensor, config.num_key_value_heads)
        writer.add_tensor(_gguf_name(name), tensor.numpy().astype(np.float32))
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in whole:
        return f"{whole[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.weight"
