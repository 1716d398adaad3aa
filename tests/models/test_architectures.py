"""A folder that is no causal language model, or only a part of one, says what it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    BartConfig,
    BertConfig,
    ElectraConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    T5Config,
    WhisperConfig,
)

from engram_lab.models.errors import CheckpointError, LabError
from engram_lab.models.handle import open_model
from tests.models import tiny

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a checkpoint that opens."""
    folder = tmp_path_factory.mktemp("whole")
    tiny.make("llama").save_pretrained(folder)
    tiny.byte_level().save_pretrained(folder)
    open_model(str(folder))
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def folder(whole: dict[str, bytes], tmp_path: Path) -> Path:
    for name, content in whole.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def sentence(folder: Path) -> str:
    with pytest.raises(LabError) as caught:
        open_model(str(folder))
    text = str(caught.value)
    assert "\n" not in text and str(folder) in text
    return text


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (BertConfig(), "an encoder, which reads a text in both directions"),
        (RobertaConfig(), "an encoder, which reads a text in both directions"),
        (ElectraConfig(), "an encoder, which reads a text in both directions"),
        (BartConfig(), "an encoder with a decoder"),
        (WhisperConfig(), "an encoder with a decoder"),
        (T5Config(), "not a causal language model"),
    ],
)
def test_what_does_not_continue_text_says_what_it_is(config: Any, what: str, folder: Path) -> None:
    config.save_pretrained(folder)
    assert f'of the type "{config.model_type}", which is {what}' in sentence(folder)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "quantised with bitsandbytes",
        ),
        ({"quantization_config": {"load_in_8bit": True}}, "quantised with bitsandbytes, which cannot be run here"),
        ({"quantization_config": {"quant_method": "new"}}, "quantised with new, which transformers does not know"),
        ({"quantization_config": {"quant_method": ["x"]}}, "does not say how"),
        ({"quantization_config": {}}, "does not say how"),
        ({"quantization_config": "x"}, "config.json cannot be used"),
        ({"model_type": ["llama"]}, "an architecture that this lab does not know"),
        ({"model_type": {}}, "an architecture that this lab does not know"),
        ({"max_position_embeddings": None}, "'max_position_embeddings' expected int, got NoneType"),
        ({"rms_norm_eps": "x"}, "'rms_norm_eps' expected float, got str"),
        ({"num_hidden_layers": 10**9}, "names 1000000000 layers, and the file holds 30 tensors"),
        ({"num_hidden_layers": 0}, "no place for, model.layers.0"),
        ({"transformers_weights": "other.safetensors"}, "names weights of its own"),
    ],
)
def test_a_configuration_that_cannot_be_meant(change: dict[str, Any], what: str, folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert what in sentence(folder)


@pytest.mark.parametrize(
    ("there", "without", "what"),
    [
        ("model.Q4_1.gguf", ("config.json", "model.safetensors"), "give the file itself, "),
        ("model.GGUF", ("model.safetensors",), "give the file itself, "),
        ("adapter_config.json", ("config.json", "model.safetensors"), "and no model: merge it"),
        ("adapter_model.safetensors", (), "(adapter_model.safetensors) beside the model"),
        ("adapter_model.bin", ("model.safetensors",), "(adapter_model.bin) and no model"),
        ("engram_adapters.safetensors", (), "does not run the memories of engram-peft, or move it away"),
    ],
)
def test_a_part_of_a_model_says_what_it_is(there: str, without: tuple[str, ...], what: str, folder: Path) -> None:
    (folder / there).write_bytes(b"{}")
    for name in without:
        (folder / name).unlink()
    assert what in sentence(folder)


@pytest.mark.parametrize(
    "text",
    [DEEP, "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": null}}',
     '{"weight_map": {"a": 1, "b": "b.safetensors"}}', '{"weight_map": {"a": ""}}'],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_an_index_that_is_none(text: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)
    assert "is not a valid index of weight files" in sentence(folder)


@pytest.mark.parametrize(
    "changes",
    [{"dtype": ["F32"]}, {"shape": [-1]}, {"shape": [1.5]}, {"shape": ["x"]}, {"shape": 1}, {"shape": [True]},
     {"data_offsets": [0, 1e9]}, {"data_offsets": [-4, 4]}, {"data_offsets": [0]}],
    ids=str,
)  # fmt: skip
def test_a_header_that_is_none(changes: dict[str, Any], folder: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert "its header cannot be read" in sentence(folder)


NESTED: dict[str, Callable[[Path], object]] = {
    "graft.json": lambda folder: None,
    "adapter_config.json": lambda folder: (folder / "config.json").unlink(),
    "tokenizer.json": lambda folder: None,
    "tokenizer_config.json": lambda folder: None,
    "special_tokens_map.json": lambda folder: None,
}


@pytest.mark.parametrize("name", NESTED)
def test_json_nested_without_end(name: str, folder: Path) -> None:
    NESTED[name](folder)
    (folder / name).write_text(DEEP)
    sentence(folder)


def test_the_map_of_an_engram_is_text(tmp_path: Path) -> None:
    tokenizer: PreTrainedTokenizerFast = tiny.byte_level()
    tiny.engram(tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    for value in (5, "abc", ["x"]):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"engram_map_sha256": value}))
        assert "map" in sentence(tmp_path)


def test_an_adapter_of_no_tensors_is_one(folder: Path) -> None:
    save_file({"a": torch.ones(1)}, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="holds an adapter"):
        open_model(str(folder))
