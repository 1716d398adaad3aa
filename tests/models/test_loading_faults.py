"""What a checkpoint holds is loaded as transformers loads it, in every dtype, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MambaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from engram_lab.models import weightfiles
from engram_lab.models.errors import CheckpointError, LabError
from engram_lab.models.handle import open_model
from tests.models import tiny
from tests.models.gguf_file import write_llama

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny.byte_level()


def saved(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    model.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    return folder


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Put tensors into the file, or take away those that are None; __ stands for a dot."""
    tensors = load_file(folder / FILE)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, folder / FILE, {"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def deepseek() -> torch.nn.Module:
    """With a router whose bias transformers keeps in float32."""
    torch.manual_seed(3)
    config = DeepseekV3Config(
        vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, n_group=2, topk_group=1, q_lora_rank=16,
        num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    model = CAUSAL[DeepseekV3Config](config)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if "bias" in name:
                buffer.copy_(torch.randn_like(buffer))
    return model


def images_and_experts() -> torch.nn.Module:
    """Whose text part, and not its own class, names what stays in float32."""
    torch.manual_seed(4)
    text = {
        "model_type": "glm4_moe", "vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 64,
        "moe_intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "n_group": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "topk_group": 1,
        "first_k_dense_replace": 1, "max_position_embeddings": 64,
    }  # fmt: skip
    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
              "num_attention_heads": 2, "image_size": 8, "patch_size": 4}  # fmt: skip
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=1)
    return LlavaForConditionalGeneration(config)


def mamba() -> torch.nn.Module:
    """Whose residual is in float32 whatever the rest is in."""
    torch.manual_seed(5)
    return CAUSAL[MambaConfig](MambaConfig(vocab_size=tiny.VOCAB, hidden_size=32, num_hidden_layers=3, state_size=4))


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "deepseek_v3": deepseek,
    "llava": images_and_experts,
    "mamba": mamba,
    **{family: lambda family=family: tiny.make(family) for family in ("llama_tied", "gpt2", "gpt_neox", "gemma3")},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", MODELS)
def test_every_tensor_is_that_of_transformers(
    family: str, dtype: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weightfiles, "_SMALL", 64)  # so that tensors of this size count as large ones
    folder = saved(MODELS[family](), tokenizer, tmp_path)
    auto = AutoModelForImageTextToText if family == "llava" else AutoModelForCausalLM
    theirs = auto.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ours = open_model(str(folder), dtype=dtype).model
    expected = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    found = dict(ours.named_parameters()) | dict(ours.named_buffers())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    ids = torch.tensor([[3, 50, 7, 200]])
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, ours(ids).logits)
    if family == "deepseek_v3" and dtype == "bfloat16":
        bias = next(tensor for name, tensor in found.items() if name.endswith("e_score_correction_bias"))
        assert bias.dtype == torch.float32 and not torch.equal(bias, bias.bfloat16().float()), "it was never rounded"


def test_a_router_in_float32_among_16_bits_is_never_rounded(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DeepSeek's are published: whatever name it has in the file."""
    monkeypatch.setattr(weightfiles, "_SMALL", 64)
    model = deepseek()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "gate.weight" not in name and "bias" not in name:
            tensor.data = tensor.data.bfloat16()
    folder = saved(model, tokenizer, tmp_path)
    ours = open_model(str(folder), dtype="bfloat16").model
    gates = [name for name, _ in model.named_parameters() if name.endswith("mlp.gate.weight")]
    assert len(gates) == 2
    for name in gates:
        assert torch.equal(ours.get_parameter(name), model.get_parameter(name))


@pytest.mark.parametrize(
    "name",
    ["lm_head.bias", "model.layers.1.self_attn.q_proj.bias", "model.norm.bias", "model.layers.0.mlp.gate.weight",
     "model.embed_positions.weight", "classifier.weight"],
)  # fmt: skip
def test_a_tensor_without_a_place_is_named(name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    folder = saved(tiny.make("llama"), tokenizer, tmp_path)
    edit_tensors(folder, **{name.replace(".", "__"): torch.randn(32)})
    with pytest.raises(CheckpointError, match=rf"holds 1 weights that config.json has no place for, {name} for one"):
        open_model(str(folder))


def test_the_weights_of_another_family_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    qwen = CAUSAL[Qwen2Config](Qwen2Config(**tiny.SMALL_LLAMA))
    folder = saved(qwen, tokenizer, tmp_path)
    LlamaConfig(**tiny.SMALL_LLAMA).save_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"holds 9 weights .*\.self_attn\.k_proj\.bias for one"):
        open_model(str(folder))


def test_what_every_model_computes_itself_is_no_weight(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Old GPT-2, NeoX and Llama files hold masks and angles."""
    folder = saved(tiny.make("gpt2"), tokenizer, tmp_path / "gpt2")
    mask = torch.ones(64, 64, dtype=torch.uint8).tril()[None, None]
    edit_tensors(folder, transformer__h__0__attn__bias=mask, transformer__h__0__attn__masked_bias=torch.tensor(-1e4))
    open_model(str(folder))
    folder = saved(tiny.make("llama"), tokenizer, tmp_path / "llama")
    edit_tensors(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    open_model(str(folder))


def test_a_head_beside_a_tied_embedding_has_to_be_it(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    folder = saved(tiny.make("llama"), tokenizer, tmp_path)
    edit_config(folder, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"ties the head to the embedding .* a head of its own, lm_head.weight"):
        open_model(str(folder))
    edit_tensors(folder, lm_head__weight=load_file(folder / FILE)["model.embed_tokens.weight"].clone())
    open_model(str(folder))


ADAPTER = {"base_model_name_or_path": "some/base", "peft_type": "LORA"}


@pytest.mark.parametrize(
    ("there", "sentence"),
    [
        ((FILE, "config.json"), "holds an adapter of some/base .* beside the model, which this lab would leave out"),
        ((), "holds an adapter of some/base .* and no model: merge it into its base"),
    ],
)
def test_an_adapter_is_not_passed_over(
    there: tuple[str, ...], sentence: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = saved(tiny.make("llama"), tokenizer, tmp_path)
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
    for name in {FILE, "config.json"} - set(there):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match=sentence):
        open_model(str(folder))


# --- The constants of an Engram --------------------------------------------------------------------------------------


def canonical(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        edit_tensors(folder, model__canonical_ids=change(load_file(folder / FILE)["model.canonical_ids"]))

    return spoil


def first_to(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda ids: torch.cat([torch.tensor([value]), ids[1:]])


SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "reversed": (canonical(lambda ids: ids.flip(0).clone()), "not the map of its tokenizer"),
    "two exchanged": (
        canonical(lambda ids: ids[[*range(50), 60, *range(51, 60), 50, *range(61, len(ids))]].clone()),
        "not the map of its tokenizer",
    ),
    "out of range": (canonical(first_to(9999)), "canonical_ids go from 1 to 9999"),
    "below zero": (canonical(first_to(-1)), "canonical_ids go from -1 to"),
    "compressed size": (lambda folder: edit_config(folder, engram_compressed_vocab_size=7), "config.json names 7"),
    "pad": (lambda folder: edit_config(folder, engram_pad_token_id=-100), "engram_pad_token_id is -100"),
    "pad beyond": (lambda folder: edit_config(folder, engram_pad_token_id=10**6), "engram_pad_token_id is 1000000"),
    "multipliers": (
        lambda folder: edit_tensors(folder, model__layers__1__memory__hash__stored=torch.tensor([3, 5, 7])),
        "no place for, model.layers.1.memory.hash.stored",
    ),
    "no fingerprint, another map": (
        lambda folder: (
            edit_config(folder, engram_map_sha256="", engram_tokenizer_sha256=""),
            canonical(lambda ids: ids.flip(0).clone())(folder),
        )[0],
        "not the map of its tokenizer",
    ),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_the_constants_of_an_engram_are_checked(kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    folder = saved(tiny.engram(tokenizer), tokenizer, tmp_path)
    open_model(str(folder))
    spoil, sentence = SPOILT[kind]
    spoil(folder)
    with pytest.raises(LabError, match=sentence) as caught:
        open_model(str(folder))
    assert "\n" not in str(caught.value)


def test_an_engram_without_a_fingerprint_opens_with_its_own_tokenizer(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = saved(tiny.engram(tokenizer), tokenizer, tmp_path)
    edit_config(folder, engram_map_sha256="", engram_tokenizer_sha256="")
    assert open_model(str(folder)).engram_layers == (1,)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_keys_of_an_engram_on_another_backbone(
    family: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = saved(tiny.make(family), tokenizer, tmp_path)
    edit_config(folder, engram_layer_ids=[1], engram_vocab_size=50)
    with pytest.raises(CheckpointError, match=rf'keys of an Engram .* the type "{family}"'):
        open_model(str(folder))


# --- GGUF ------------------------------------------------------------------------------------------------------------


def metadata(key: str, value: Any) -> Callable[[gguf.GGUFWriter], None]:
    kinds = {str: "string", bool: "bool", int: "uint32", float: "float32"}
    return lambda writer: getattr(writer, f"add_{kinds[type(value)]}")(f"llama.{key}", value)


def tensor(name: str, *shape: int, value: float = 0.5) -> Callable[[gguf.GGUFWriter], None]:
    return lambda writer: writer.add_tensor(name, np.full(shape, value, dtype=np.float32))


PASSED_OVER = {
    "linear scaling": (metadata("rope.scaling.type", "linear"), "rope.scaling.type = linear"),
    "yarn": (metadata("rope.scaling.type", "yarn"), "rope.scaling.type = yarn"),
    "factor alone": (metadata("rope.scaling.factor", 4.0), "rope.scaling.factor = 4.0"),
    "angles": (tensor("rope_freqs.weight", 4), "the tensor rope_freqs.weight"),
    "long factors": (tensor("rope_factors_long.weight", 4), "the tensor rope_factors_long.weight"),
    "soft cap": (metadata("final_logit_softcapping", 30.0), "final_logit_softcapping = 30.0"),
    "attention's soft cap": (metadata("attn_logit_softcapping", 50.0), "attn_logit_softcapping = 50.0"),
    "window": (metadata("attention.sliding_window", 16), "attention.sliding_window = 16"),
    "another head": (metadata("attention.key_length", 16), "attention.key_length = 16"),
    "scale of logits": (metadata("logit_scale", 0.25), "logit_scale = 0.25"),
    "residual scale": (metadata("residual_scale", 0.2), "residual_scale = 0.2"),
    "clamp": (metadata("attention.clamp_kqv", 8.0), "attention.clamp_kqv = 8.0"),
    "what nobody knows": (metadata("new.thing", 3), "new.thing = 3"),
    "attention's bias": (tensor("blk.0.attn_q.bias", 32), "the tensor blk.0.attn_q.bias"),
    "output bias": (tensor("output.bias", tiny.VOCAB), "the tensor output.bias"),
    "a norm of queries": (tensor("blk.1.attn_q_norm.weight", 8), "the tensor blk.1.attn_q_norm.weight"),
}
TAKEN = {
    "no scaling": metadata("rope.scaling.type", "none"),
    "a factor of one": metadata("rope.scaling.factor", 1.0),
    "angles as they are": tensor("rope_freqs.weight", 4, value=1.0),
    "the head as it is": metadata("attention.value_length", 8),
    "no experts": metadata("expert_count", 0),
}


@pytest.mark.parametrize("kind", PASSED_OVER)
def test_what_the_reader_of_gguf_passes_over_is_named(
    kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    more, sentence = PASSED_OVER[kind]
    write_llama(tmp_path / "tiny.gguf", tiny.make("llama"), tokenizer, more)
    with pytest.raises(CheckpointError, match=sentence.replace(".", r"\.")) as caught:
        open_model(str(tmp_path / "tiny.gguf"))
    assert "use its safetensors" in str(caught.value)


@pytest.mark.parametrize("kind", TAKEN)
def test_what_changes_nothing_is_no_reason(kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny.make("llama")
    write_llama(tmp_path / "tiny.gguf", model, tokenizer, TAKEN[kind])
    handle = open_model(str(tmp_path / "tiny.gguf"))
    ids = torch.tensor([handle.encode("The river runs")])
    with torch.no_grad():
        torch.testing.assert_close(handle.residuals(ids).logits, model(ids).logits, rtol=0, atol=1e-6)


# --- Models that take images, and others that are no causal LM --------------------------------------------------------

VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def with_images(kind: str) -> torch.nn.Module:
    import transformers

    text = tiny.SMALL_LLAMA | {"bos_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(4)
    if kind == "llava":
        config = transformers.LlavaConfig(
            text_config=LlamaConfig(**text), vision_config=transformers.CLIPVisionConfig(**VISION)
        )
        return transformers.LlavaForConditionalGeneration(config)
    if kind == "mistral3":
        pixtral = transformers.PixtralVisionConfig(**VISION, head_dim=16)
        config = transformers.Mistral3Config(text_config=transformers.MistralConfig(**text), vision_config=pixtral)
        return transformers.Mistral3ForConditionalGeneration(config)
    linear = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(text_config=text | linear, vision_config=vision)
    return transformers.Qwen3_5ForConditionalGeneration(config)


@pytest.mark.parametrize("kind", ["llava", "mistral3", "qwen3_5"])
def test_the_text_of_a_model_that_takes_images(kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = with_images(kind).eval()
    folder = saved(model, tokenizer, tmp_path)
    handle = open_model(str(folder))
    ids = torch.tensor([handle.encode("The river runs")])
    with torch.no_grad():
        torch.testing.assert_close(handle.residuals(ids).logits, model(input_ids=ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["T5Config", "CLIPConfig", "ViTConfig"])
def test_what_continues_no_text_says_what_it_is(kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    import transformers

    folder = saved(tiny.make("llama"), tokenizer, tmp_path)
    config = getattr(transformers, kind)()
    config.save_pretrained(folder)
    with pytest.raises(CheckpointError, match=rf'type "{config.model_type}", which is not a causal language model'):
        open_model(str(folder))
