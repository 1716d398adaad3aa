"""What a GGUF file holds and transformers' reader passes over: refused by name, as the model would run without it.

The reader takes the metadata of a short list for each architecture and the tensors that it finds a name for; of the
rest it says nothing. Metadata: github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
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
    "expert_count": (0,), "expert_used_count": (0,), "attention.causal": (True,), "attention.max_alibi_bias": (8.0,),
    "logit_scale": (1.0,), "embedding_scale": (1.0,), "residual_scale": (1.0,), "attention.sliding_window": (0,),
    "rope.scaling.factor": (0.0, 1.0), "rope.scaling.attn_factor": (0.0, 1.0), "rope.scaling.finetuned": (False, True),
    "expert_gating_func": (0, 1),
}  # fmt: skip
_EXPERTS = re.compile(r"_exps\.(weight|bias)$")  # the reader splits or joins them under names of its own


def check(file: Path, model: PreTrainedModel) -> None:
    """CheckpointError for metadata or a tensor of a GGUF file that `model`, which was read from it, does not have."""
    from gguf import GGUFReader

    reader = GGUFReader(str(file))
    architecture = str(reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        prefix, _, short = key.partition(".")
        if prefix == architecture and not _is_taken(short, field.contents(), model):
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
    if isinstance(value, list):  # one for each block: the reader takes it or fails
        return key in _SAME
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
    return bool(known) and _equal(value, known[0])


def _equal(a: Any, b: Any) -> bool:
    """Whether two numbers are one, of which one may have been float32."""
    return isinstance(b, bool | int | float) and math.isclose(float(a), float(b), rel_tol=1e-6)


def _without_place(reader: Any, model: PreTrainedModel) -> Iterator[str]:
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    architecture = str(reader.fields["general.architecture"].contents())
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    places = get_gguf_hf_weights_map(model, processor)
    for tensor in reader.tensors:
        if tensor.name in places or _EXPERTS.search(tensor.name):
            continue
        if tensor.name == "rope_freqs.weight" and np.all(np.asarray(tensor.data) == 1):
            continue  # every angle as it is
        yield tensor.name
