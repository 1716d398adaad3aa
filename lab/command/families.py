"""The families of models that the lab is tried on: a small random one of each, against transformers itself.

`engram-lab bench families` runs them all; the table of the README is made from it by `table`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "head_dim": 8,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
STATES: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
SECTIONS: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
# Family -> (configuration of transformers, what it needs beside SIZES; a part for the text where it takes images).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", SIZES),
    "Mistral": ("MistralConfig", SIZES),
    "Mixtral": ("MixtralConfig", SIZES | EXPERTS),
    "Ministral 3": ("Ministral3Config", SIZES),
    "Qwen2": ("Qwen2Config", SIZES),
    "Qwen2 MoE": ("Qwen2MoeConfig", SIZES | EXPERTS | {"shared_expert_intermediate_size": 16}),
    "Qwen3": ("Qwen3Config", SIZES),
    "Qwen3 MoE": ("Qwen3MoeConfig", SIZES | EXPERTS),
    "Qwen3-Next": ("Qwen3NextConfig", SIZES | EXPERTS | LINEAR | {"shared_expert_intermediate_size": 16}),
    "Qwen3.5": ("Qwen3_5TextConfig", SIZES | LINEAR),
    "Gemma": ("GemmaConfig", SIZES),
    "Gemma 2": ("Gemma2Config", SIZES | {"query_pre_attn_scalar": 8}),
    "Gemma 3": ("Gemma3TextConfig", SIZES | {"query_pre_attn_scalar": 8}),
    "GPT-2": ("GPT2Config", GPT),
    "GPT-J": ("GPTJConfig", GPT | {"rotary_dim": 4}),
    "GPT-Neo": ("GPTNeoConfig", {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "max_position_embeddings": 64,
                                 "attention_types": [[["global", "local"], 2]]}),
    "GPT-NeoX": ("GPTNeoXConfig", SIZES),
    "GPT-OSS": ("GptOssConfig", SIZES | EXPERTS),
    "GPT BigCode": ("GPTBigCodeConfig", GPT),
    "CodeGen": ("CodeGenConfig", GPT | {"rotary_dim": 4}),
    "BLOOM": ("BloomConfig", {"hidden_size": 32, "n_layer": 4, "n_head": 4}),
    "MPT": ("MptConfig", {"d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 64}),
    "OPT": ("OPTConfig", {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
                          "max_position_embeddings": 64, "word_embed_proj_dim": 32}),
    "Falcon": ("FalconConfig", {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}),
    "Phi": ("PhiConfig", SIZES),
    "Phi 3": ("Phi3Config", SIZES | {"pad_token_id": 0}),
    "Persimmon": ("PersimmonConfig", SIZES),
    "StableLM": ("StableLmConfig", SIZES),
    "StarCoder2": ("Starcoder2Config", SIZES),
    "Cohere": ("CohereConfig", SIZES),
    "Granite": ("GraniteConfig", SIZES | {"logits_scaling": 8.0}),
    "OLMo 2": ("Olmo2Config", SIZES),
    "OLMoE": ("OlmoeConfig", SIZES | EXPERTS),
    "SmolLM3": ("SmolLM3Config", SIZES | {"pad_token_id": 0}),
    "Nemotron": ("NemotronConfig", SIZES),
    "DeepSeek-V2": ("DeepseekV2Config", SIZES | EXPERTS | LATENT | {"q_lora_rank": None}),
    "DeepSeek-V3": ("DeepseekV3Config", SIZES | EXPERTS | LATENT | {"q_lora_rank": 16}),
    "XGLM": ("XGLMConfig", {"d_model": 32, "ffn_dim": 64, "num_layers": 4, "attention_heads": 4,
                            "max_position_embeddings": 64}),
    "BioGPT": ("BioGptConfig", SIZES),
    "LFM2": ("Lfm2Config", SIZES | {"layer_types": ["conv", "full_attention"] * 2}),
    "Mamba": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 4, "state_size": 8}),
    "Gemma 4": ("Gemma4TextConfig", SIZES | {"global_head_dim": 8, "layer_types": ["full_attention"] * 4,
                                             "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
    "Gemma 4 E2B": ("Gemma4TextConfig", SIZES | {"global_head_dim": 8, "layer_types": ["full_attention"] * 4,
                                                 "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2}),
    "Llama 4": ("Llama4TextConfig", SIZES | EXPERTS | {"intermediate_size_mlp": 64}),
    "Bamba": ("BambaConfig", SIZES | STATES | {"attn_layer_indices": [1, 3]}),
    "Jamba": ("JambaConfig", SIZES | EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
                                                "mamba_dt_rank": 4}),
    "Nemotron-H": ("NemotronHConfig", SIZES | {
        "layers_block_type": ["mamba", "attention", "mlp", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 8,
        "n_groups": 1, "ssm_state_size": 8, "chunk_size": 16}),
    "Mistral3": ("Mistral3Config", {"text_config": ("MistralConfig", SIZES),
                                    "vision_config": ("PixtralVisionConfig", VISION)}),
    "Qwen2-VL": ("Qwen2VLConfig", {
        "text_config": ("Qwen2VLTextConfig", SIZES | {"rope_parameters": SECTIONS}),
        "vision_config": ("Qwen2VLVisionConfig", {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 32})}),
    "SmolVLM": ("SmolVLMConfig", {"text_config": ("LlamaConfig", SIZES),
                                  "vision_config": ("SmolVLMVisionConfig", VISION)}),
    "LLaVA": ("LlavaConfig", {"text_config": ("LlamaConfig", SIZES), "vision_config": ("CLIPVisionConfig", VISION)}),
}  # fmt: skip
TEXT = "The river runs past the old mill and into the sea."


@cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    from engram_lab.models import listing

    return AutoTokenizer.from_pretrained(listing.SHIPPED / "engram-mini", local_files_only=True)


def make(name: str) -> Any:
    """A random model of a family, in eval mode, whose vocabulary is that of the shipped tokenizer."""
    import torch
    import transformers

    from engram_lab.models.architectures import class_of

    def config_of(kind: str, fields: dict[str, Any]) -> Any:
        inner = {key: config_of(*value) if isinstance(value, tuple) else value for key, value in fields.items()}
        special = {"vocab_size": len(_tokenizer()), "bos_token_id": 1, "eos_token_id": 1}
        if not inner.keys() >= {"text_config"} and "Vision" not in kind:
            inner = special | inner
        if inner.get("hidden_size_per_layer_input"):
            inner["vocab_size_per_layer_input"] = len(_tokenizer())
        return getattr(transformers, kind)(**inner)

    config = config_of(*FAMILIES[name])
    torch.manual_seed(0)
    model = class_of(config)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms that are no identity, biases that are not zero: a wrong one shows
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def measure(name: str) -> dict[str, Any]:
    """What works with the family, or the sentence that says why not, and the largest difference of any number.

    lens: every residual against transformers' own hidden states, and the logits. kv: logits behind a cache against
    those without one. facts: the logits of a grafted memory with a written row, run through the lab, against plain
    torch. The differences are shares of the largest number.
    """
    import torch

    from engram_lab.models.errors import LabError
    from engram_lab.models.handle import Handle
    from engram_lab.models.kv_runs import check_kv, continue_from, prefill

    gaps: list[float] = []

    def compare(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        gaps.append(float((ours - theirs).abs().max() / theirs.abs().max()))

    def attempt(work: Callable[[], object]) -> str:
        try:
            work()
        except LabError as error:
            return str(error)
        return "yes"

    out: dict[str, Any] = {"family": name, "lens": "yes"}
    model = make(name)
    try:
        handle = Handle(model, _tokenizer(), name)
    except LabError as error:
        return out | {"lens": str(error), "kv": "no", "facts": "no", "largest_difference": None}
    ids = torch.tensor([handle.encode(TEXT)])
    with handle.running():
        theirs = handle.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    mine = handle.residuals(ids)
    compare(mine.logits, theirs.logits)
    hidden: Sequence[torch.Tensor] = theirs.hidden_states or ()
    first = 0 if hidden and torch.equal(hidden[0], mine.states[0]) else 1  # Mamba lists no embedding
    for state, other in zip(mine.states[first:-1], hidden, strict=False):
        compare(state, other)  # transformers' last one is behind the final norm

    def kv() -> None:
        check_kv(handle)
        half = ids.shape[1] // 2
        behind = continue_from(handle, prefill(handle, ids[:, :half]).kv, ids[:, half:])
        compare(behind, theirs.logits[:, half:])

    out["kv"] = attempt(kv)
    out["facts"] = attempt(lambda: _facts(handle, compare))
    return out | {"largest_difference": max(gaps)}


def _facts(handle: Any, compare: Callable[[Any, Any], None]) -> None:
    """Write a fact into an empty memory of the model, and compare with the row put into the table by hand.

    Also what the writing reports: the probability of the answer before, and behind it.
    """
    import torch

    from engram_lab.models.grafting import graft
    from engram_lab.models.overlay import prepare
    from engram_lab.models.tables import memories
    from engram_lab.probes.facts.sets import StatedFact, Writing, write

    grafted = graft(handle, [2], rows_per_head=200, heads=2)
    overlay, report = write(
        grafted, (StatedFact("The river runs past the old", " mill and into"),), Writing("ada", steps=2)
    )
    (answer,) = report.answer_ids
    ids = torch.tensor([grafted.encode("The river runs past the old")])
    whole = torch.cat([ids, torch.tensor([answer[:-1]], dtype=ids.dtype)], dim=1)

    def probability() -> torch.Tensor:
        logits = grafted.model(input_ids=whole, use_cache=False).logits[0, ids.shape[1] - 1 :].double()
        return logits.log_softmax(-1).gather(1, torch.tensor([answer]).T).sum()

    with torch.no_grad():
        compare(torch.tensor(report.probability_before).double().log(), probability())
    with prepare(grafted, overlay).applied():
        ours = grafted.residuals(ids).logits
    (memory,) = memories(grafted)
    with torch.no_grad():
        rows = overlay.layers[2]
        before = memory.table.weight[rows.rows].clone()
        memory.table.weight[rows.rows] = rows.vectors
        theirs = grafted.model(input_ids=ids, use_cache=False).logits
        compare(torch.tensor(report.probability_after).double().log(), probability())
        memory.table.weight[rows.rows] = before
    compare(ours, theirs)


def table(measured: Sequence[dict[str, Any]]) -> str:
    """The README's table, in Markdown: families with the same answers are one row, with their largest difference."""
    rows: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in measured:
        words = tuple("yes" if row[part] == "yes" else "refused" for part in ("lens", "kv", "facts"))
        rows.setdefault(words, []).append(row)
    lines = ["| family | lens | KV cache | facts | largest difference |", "|---|---|---|---|---|"]
    for words, members in rows.items():
        gaps = [row["largest_difference"] for row in members if row["largest_difference"] is not None]
        names = ", ".join(row["family"] for row in members)
        lines.append(
            f"| {names} | {' | '.join(words)} | {max(gaps):.0e} |" if gaps else f"| {names} | {' | '.join(words)} | |"
        )
    return "\n".join(lines) + "\n"
