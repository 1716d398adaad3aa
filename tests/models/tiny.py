"""Tiny random models of every supported family and tiny tokenizers, built here and written nowhere."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from engram_lab.models.engram import EngramConfig, EngramForCausalLM

TEXT = [
    "The river runs past the old mill and into the sea.",
    "Paris is the capital of France, and Tokyo (東京) that of Japan.",
    "A naïve café, 👍🏽 and    four spaces,\ta tab\nand a new line.",
] * 4
VOCAB = 384
_SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "max_position_embeddings": 64}
SMALL_LLAMA: dict[str, Any] = _SHAPE | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def configs() -> dict[str, PreTrainedConfig]:
    """Family -> configuration of 3 layers, 32 wide."""
    return {
        "llama": LlamaConfig(**SMALL_LLAMA),
        "llama_tied": LlamaConfig(**SMALL_LLAMA, tie_word_embeddings=True),
        "qwen2": Qwen2Config(**SMALL_LLAMA),
        "qwen3": Qwen3Config(**SMALL_LLAMA),
        "gpt2": GPT2Config(
            vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=1
        ),
        "gpt_neox": GPTNeoXConfig(
            **_SHAPE, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
        ),
        # A cap near the size of the logits, so that leaving it out shows.
        "gemma2": Gemma2Config(**SMALL_LLAMA, final_logit_softcapping=0.05, query_pre_attn_scalar=8),
        "gemma3": Gemma3TextConfig(**SMALL_LLAMA, query_pre_attn_scalar=8),
        "granite": GraniteConfig(**SMALL_LLAMA, logits_scaling=8.0),
    }


def make(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of a family, in eval mode; norms are not the identity, so that a wrong one shows."""
    config = configs()[family]
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    model_class: Any = CAUSAL[type(config)]
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def engram(tokenizer: PreTrainedTokenizerFast, seed: int = 1, **changes: Any) -> EngramForCausalLM:
    """A random Engram with a memory at block 1, addressed by the tokenizer's own canonical ids."""
    shape = SMALL_LLAMA | {"vocab_size": len(tokenizer), "engram_layer_ids": [1]}
    config = EngramConfig(**shape | {"engram_vocab_size": 50, "engram_n_heads": 2} | changes)
    canonical = config.set_tokenizer(tokenizer)
    torch.manual_seed(seed)
    model = EngramForCausalLM(config).eval()
    model.model.canonical_ids.copy_(torch.from_numpy(canonical))
    return model


def byte_level(bos: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer as GPT-2's, with <|bos|> put first if `bos`."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXT, trainer)
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|bos|>", eos_token="<|eos|>")


def sentencepiece(prefix: bool) -> PreTrainedTokenizerFast:
    """A BPE tokenizer with byte fallback as Llama 2's (`prefix`: a space goes before the text) or Gemma's."""
    merges = [("▁", "▁"), ("t", "h"), ("▁", "th"), ("▁th", "e"), ("e", "r"), ("▁", "r"), ("i", "s")]
    merges += [("r", "is"), ("▁", "P"), ("▁P", "a"), ("▁Pa", "ris")]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for symbol in [*"▁abcdefghijklmnopqrstuvwxyzP.,é", *map("".join, merges)]:
        vocab.setdefault(symbol, len(vocab))
    core = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
