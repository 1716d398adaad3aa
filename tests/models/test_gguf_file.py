"""A GGUF file gives the model and the tokens that it was written from, or a refusal that names what would be lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import BloomConfig, BloomForCausalLM, PreTrainedTokenizerFast

from engram_lab.models.errors import CheckpointError
from engram_lab.models.handle import open_model
from tests.models import tiny
from tests.models.gguf_file import write_llama

TEXTS = ["The river  24", "in 1234  5\n\n6's", "Paris is  the", " the mill"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny.byte_level()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.final_logit_softcapping", [30.0]),
        ("llama.logit_scale", [0.5, 0.5, 0.5]),
        ("llama.attention.key_length", [8, 16, 8]),
        ("llama.attention.max_alibi_bias", 8.0),
        ("adapter.type", "lora"),
        ("adapter.lora.alpha", 16.0),
        ("clip.has_vision_encoder", True),
        ("qwen2.rope.scaling.factor", 4.0),
        ("general.type", "adapter"),
        ("general.type", "mmproj"),
    ],
)
def test_metadata_of_other_kinds_is_named(
    key: str, value: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    kinds = {str: "string", bool: "bool", int: "uint32", float: "float32", list: "array"}
    file = tmp_path / "tiny.gguf"
    write_llama(file, tiny.make("llama"), tokenizer, lambda w: getattr(w, f"add_{kinds[type(value)]}")(key, value))
    with pytest.raises(CheckpointError, match=key.replace(".", r"\.")):
        open_model(str(file))


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.1.ffn_down_exps.bias", "blk.0.attn_sinks.weight"])
def test_no_tensor_is_passed_over_for_its_kind(name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = tmp_path / "tiny.gguf"
    write_llama(file, tiny.make("llama"), tokenizer, lambda w: w.add_tensor(name, np.ones((4, 64), dtype=np.float32)))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        open_model(str(file))


def write_bloom(file: Path, tokenizer: PreTrainedTokenizerFast, head: np.ndarray | None) -> BloomForCausalLM:
    """As llama.cpp's converter does, which takes queries, keys and values of all heads apart."""
    config = BloomConfig(vocab_size=tiny.VOCAB, hidden_size=32, n_layer=2, n_head=4)
    torch.manual_seed(0)
    model = BloomForCausalLM(config).eval()
    writer = gguf.GGUFWriter(str(file), "bloom")
    numbers = {"context_length": 64, "embedding_length": 32, "feed_forward_length": 128, "block_count": 2}
    for key, value in (numbers | {"head_count": 4, "head_count_kv": 4, "layer_norm_eps": 1e-5}).items():
        getattr(writer, f"add_{key}")(value)
    tokens = [tokenizer.convert_ids_to_tokens(i) for i in range(len(tokenizer))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *(f"<pad{i}>" for i in range(len(tokens), tiny.VOCAB))])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BLOOM, 2)
    for name, tensor in model.transformer.state_dict().items():
        stem, _, kind = name.rpartition(".")
        if "query_key_value" in name:
            tensor = tensor.reshape(4, 3, 8, -1).swapaxes(0, 1).reshape(tensor.shape)
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", tensor.numpy())
    if head is not None:
        writer.add_tensor("output.weight", head)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_a_model_without_positions_is_read(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Its context and its inner width are not in transformers' configuration."""
    model = write_bloom(tmp_path / "bloom.gguf", tokenizer, None)
    handle = open_model(str(tmp_path / "bloom.gguf"))
    ids = torch.tensor([handle.encode("The river runs")])
    with torch.no_grad():
        torch.testing.assert_close(handle.residuals(ids).logits, model(ids).logits, rtol=0, atol=1e-6)


def test_a_head_that_the_reader_would_tie_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    head = np.random.default_rng(0).standard_normal((tiny.VOCAB, 32)).astype(np.float32)
    model = write_bloom(tmp_path / "own.gguf", tokenizer, head)
    with pytest.raises(CheckpointError, match=r"holds the tensor output\.weight"):
        open_model(str(tmp_path / "own.gguf"))
    write_bloom(tmp_path / "same.gguf", tokenizer, model.transformer.word_embeddings.weight.detach().numpy())
    open_model(str(tmp_path / "same.gguf"))


@pytest.mark.parametrize("pre", ["smollm", "starcoder", "command-r"])
def test_digits_are_cut_as_the_file_says(pre: str, tmp_path: Path) -> None:
    expected = tiny.byte_level()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    expected.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level])
    write_llama(tmp_path / "tiny.gguf", tiny.make("llama"), tiny.byte_level(), pre=pre)
    handle = open_model(str(tmp_path / "tiny.gguf"))
    assert [handle.encode(text) for text in TEXTS] == [tuple(expected(text)["input_ids"]) for text in TEXTS]


@pytest.mark.parametrize("pre", ["deepseek-llm", "default", "of tomorrow"])
def test_a_cut_that_nobody_knows_is_named(pre: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    write_llama(tmp_path / "tiny.gguf", tiny.make("llama"), tokenizer, pre=pre)
    with pytest.raises(CheckpointError, match=rf"tokenizer\.ggml\.pre = {pre}\), so prompts would come out as other"):
        open_model(str(tmp_path / "tiny.gguf"))


def test_a_text_gets_no_space_where_the_file_says_so(tmp_path: Path) -> None:
    expected = tiny.sentencepiece(prefix=False)
    file = tmp_path / "tiny.gguf"
    write_llama(file, tiny.make("llama"), expected, lambda w: w.add_add_space_prefix(False), pre="default")
    handle = open_model(str(file))
    assert [handle.encode(text) for text in TEXTS] == [tuple(expected(text)["input_ids"]) for text in TEXTS]
    assert all(handle.lossless(text, handle.encode(text)) for text in TEXTS)


def test_what_lies_beside_a_file_has_no_say_in_it(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    write_llama(tmp_path / "tiny.gguf", tiny.make("llama"), tokenizer)
    alone = open_model(str(tmp_path / "tiny.gguf"))
    tiny.sentencepiece(prefix=True).save_pretrained(tmp_path)
    tiny.configs()["gpt2"].save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("[")
    beside = open_model(str(tmp_path / "tiny.gguf"))
    assert [beside.encode(text) for text in TEXTS] == [alone.encode(text) for text in TEXTS]
    assert beside.fingerprint == alone.fingerprint
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds an adapter .* beside the model"):
        open_model(str(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("left", [4, 100, -100])
def test_a_file_that_is_cut_off_is_one_sentence(left: int, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = tmp_path / "tiny.gguf"
    write_llama(file, tiny.make("llama"), tokenizer)
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf cannot be read as a GGUF model: ") as caught:
        open_model(str(file))
    assert "\n" not in str(caught.value)
