"""What a GGUF file holds and transformers' reader passes over: refused by name, as the model would run without it.

The reader takes the metadata of a short list for each architecture and the tensors that it finds a name for; of the
rest it says nothing. Metadata: github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import decoders, pre_tokenizers
from transformers import PreTrainedModel

from engram_lab.models.errors import CheckpointError

# Metadata that has one meaning in every architecture -> what a configuration calls it, the first that it has.
_SAME: dict[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings", "n_positions", "n_ctx", "seq_length"),
    "embedding_length": ("hidden_size", "n_embd"),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "block_count": ("num_hidden_layers", "n_layer"),
    "vocab_size": ("vocab_size",),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_attention_heads", "n_head"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("v_head_dim", "head_dim"),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "attention.scale": ("attention_multiplier",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_count": ("n_shared_experts",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
    "shortconv.l_cache": ("conv_L_cache",),
    "use_parallel_residual": ("use_parallel_residual", "parallel_attn"),
}
# What leaves the model as it is where the configuration has no word for it.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,), "expert_used_count": (0,), "attention.causal": (True,), "attention.max_alibi_bias": (0.0,),
    "logit_scale": (1.0,), "embedding_scale": (1.0,), "residual_scale": (1.0,), "attention.sliding_window": (0,),
    "rope.scaling.factor": (0.0, 1.0), "rope.scaling.attn_factor": (0.0, 1.0), "rope.scaling.finetuned": (False, True),
    "expert_gating_func": (0, 1),
}  # fmt: skip
# How text is cut before BPE, by the names of llama.cpp (llama-vocab.cpp), where transformers' reader takes the cut of
# GPT-2 for it: those for which that is right, and those for which every digit stands alone. Without the digits apart
# two spaces or line ends before a digit come out as two tokens instead of one.
_CUT_AS_GPT2 = {"", "gpt-2", "mpt", "olmo", "jais", "trillion", "phi-2", "jina-es", "jina-de", "jina-v2-es",
                "jina-v2-de", "gigachat", "a.x-4.0", "mellum", "modern-bert", "granite-docling"}  # fmt: skip
_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


@contextmanager
def alone(file: Path) -> Iterator[Path]:
    """A folder that holds this file only: of another model's tokenizer beside it transformers would take that one."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            (Path(folder) / file.name).symlink_to(file.resolve())
        except OSError:  # Windows gives the right to make one on request only
            yield file.parent
        else:
            yield Path(folder)


def check(file: Path, model: PreTrainedModel) -> None:
    """CheckpointError for metadata or a tensor of a GGUF file that `model`, which was read from it, does not have."""
    from gguf import MODEL_ARCH_NAMES, GGUFReader

    reader = GGUFReader(str(file))
    architecture = str(reader.fields["general.architecture"].contents())
    kind = reader.get_field("general.type")
    if kind is not None and kind.contents() != "model":
        raise CheckpointError(f"{file} says that it is no model by itself (general.type = {kind.contents()}).")
    others = {"adapter", *MODEL_ARCH_NAMES.values()} - {architecture}
    for key, field in reader.fields.items():
        prefix, _, short = key.partition(".")
        if prefix in others or (prefix == architecture and not _is_taken(short, field.contents(), model)):
            raise CheckpointError(
                f"{file} says {key} = {field.contents()}, which transformers' reader of GGUF leaves out, so the model "
                "would run as another one: use its safetensors."
            )
    for name in _without_place(reader, model):
        raise CheckpointError(
            f"{file} holds the tensor {name}, which transformers' reader of GGUF finds no place for, so it would "
            "run without it: use its safetensors."
        )


def _is_taken(key: str, value: Any, model: PreTrainedModel) -> bool:
    config: Any = model.config.get_text_config()
    if isinstance(value, list):  # one for each block
        if key == "attention.head_count_kv" and config.model_type.startswith("lfm2"):  # 0 where a block has none
            return bool(_equal(max(value), config.num_key_value_heads))
        return bool(value) and all(_is_taken(key, each, model) for each in value)
    if key == "attention.max_alibi_bias" and (config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False)):
        return _equal(value, 8.0)
    if value in _NEUTRAL.get(key, ()):
        return True
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if rope and all(isinstance(of, dict) for of in rope.values()):  # one for each kind of attention
        rope = rope.get("full_attention", {})
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if key == "rope.dimension_count":
        return bool(value == int(head * (rope.get("partial_rotary_factor") or 1.0)))
    if key in ("attention.key_length", "attention.value_length"):
        return bool(value == head)
    if key == "rope.freq_base":
        return _equal(value, rope.get("rope_theta"))
    if key == "rope.scaling.type":
        return value in ("none", "") or value == rope.get("rope_type")
    if key.startswith("rope.scaling."):
        name = key.removeprefix("rope.scaling.").replace("original_context_length", "original_max_position_embeddings")
        return rope.get("rope_type", "default") != "default" and _equal(value, rope.get(name))
    known = [getattr(config, name) for name in _SAME.get(key, ()) if getattr(config, name, None) is not None]
    if not known:  # the one is a number for the user where there are no positions, the other is in the tensors' shapes
        return key in ("context_length", "feed_forward_length")
    return _equal(value, known[0])


def _equal(a: Any, b: Any) -> bool:
    """Whether two numbers are one, of which one may have been float32."""
    numbers = isinstance(a, bool | int | float) and isinstance(b, bool | int | float)
    return numbers and math.isclose(float(a), float(b), rel_tol=1e-6)


def _without_place(reader: Any, model: PreTrainedModel) -> Iterator[str]:
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    architecture = str(reader.fields["general.architecture"].contents())
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    places = get_gguf_hf_weights_map(model, processor)
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    head, embedding = by_name.get("output.weight"), by_name.get("token_embd.weight")
    tied = model.config.get_text_config().tie_word_embeddings  # the reader ties some families, whatever the file holds
    if head is not None and embedding is not None and tied and not np.array_equal(head.data, embedding.data):
        yield head.name
    for tensor in reader.tensors:
        # Experts lie in one parameter, which has no ".weight" behind its name.
        if tensor.name in places or tensor.name.removesuffix(".weight") in places:
            continue
        if tensor.name == "rope_freqs.weight" and np.all(np.asarray(tensor.data) == 1):
            continue  # every angle as it is
        yield tensor.name


def set_cut(file: Path, tokenizer: Any) -> None:
    """Let `tokenizer`, which was read from a GGUF file, cut text as the file says; else CheckpointError."""
    from gguf import GGUFReader

    fields = GGUFReader(str(file)).fields
    kind, cut, prefix = (
        fields[key].contents() if key in fields else None
        for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.add_space_prefix")
    )
    backend = tokenizer.backend_tokenizer
    if prefix is False and isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer.prepend_scheme = "never"
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    as_gpt2 = isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) and backend.pre_tokenizer.use_regex
    if kind != "gpt2" or not as_gpt2 or (cut or "") in _CUT_AS_GPT2:
        return
    if cut not in _DIGITS_APART:
        raise CheckpointError(
            f"{file} cuts text in a way that transformers' reader of GGUF does not know (tokenizer.ggml.pre = {cut}), "
            "so prompts would come out as other tokens: use its safetensors."
        )
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
