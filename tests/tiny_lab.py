"""Two tiny models with one tokenizer, in memory and as the shipped folders of a lab of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from engram_lab.models.handle import Handle
from engram_lab.probes import lens as lens_probe
from engram_lab.probes.base import Report
from engram_lab.probes.lens import LensConfig
from tests import memory_lab
from tests.memory_lab import CONTEXT
from tests.models import tiny

PROMPT = "The river runs past the the the old <mill> $5 and $6"
TARGET = " the"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny.byte_level()


@pytest.fixture(scope="session")
def twins(tokenizer: PreTrainedTokenizerFast) -> dict[str, PreTrainedModel]:
    dense = tiny.make("llama", max_position_embeddings=CONTEXT)
    return {"engram-mini": tiny.engram(tokenizer, max_position_embeddings=CONTEXT), "dense-mini": dense}


@pytest.fixture(scope="session")
def pair(twins: dict[str, PreTrainedModel], tokenizer: PreTrainedTokenizerFast) -> list[Handle]:
    return [Handle(model, tokenizer, name) for name, model in twins.items()]


@pytest.fixture(scope="session")
def report(pair: list[Handle]) -> Report:
    """Both models on one prompt, with a target."""
    return lens_probe.run(pair, LensConfig(tuple(h.name for h in pair), (PROMPT,), TARGET, top_k=4))


@pytest.fixture(scope="session")
def set_report(pair: list[Handle]) -> Report:
    """Both models on a few texts."""
    texts = ("The river runs", "Paris is the capital of France", "past the old mill and into the sea")
    config = LensConfig(tuple(h.name for h in pair), texts, bootstrap=60, detail=False)
    return lens_probe.run(pair, config)


def training(memory: bool) -> dict:
    """A training.json as models/train.py writes it, with made-up points."""
    points = [
        {
            "step": step,
            "tokens": step * 1000,
            "held_out_loss": 9 - step / 500,
            "layer_names": ["embed", "0", "1", "2"],
            "mean_kl": [3.0 + step / 1000, 2.0, 1.0, 0.0],
            "gate_histogram": {"1": [step, 10, 30, 0]} if memory else {},
        }
        for step in (0, 500, 1000)
    ]
    return {"config": {"n_layers": 3, "d_model": 32, "memory_layers": [1]}, "points": points}


@pytest.fixture(scope="session")
def shipped(
    tmp_path_factory: pytest.TempPathFactory,
    twins: dict[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerFast,
) -> Path:
    """A folder as assets/models: the tiny models under the shipped names, with their cards."""
    folder = tmp_path_factory.mktemp("models")
    for name, model in twins.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        memory = name == "engram-mini"
        (folder / name / "training.json").write_text(json.dumps(training(memory)))
        card = {
            "name": name,
            "data": "a made-up text",
            "tokens": 1_000_000,
            "steps": 1000,
            "parameters": {"all": 2e5, "table": 1e5 if memory else 0, "active_per_token": 1e5},
            "held_out_loss_nats": 4.5,
            "held_out_tokens": 1234,
            "limits": ["They are tiny."],
        }
        (folder / name / "card.json").write_text(json.dumps(card))
    return folder


@pytest.fixture(scope="session")
def memory_models(tmp_path_factory: pytest.TempPathFactory, shipped: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """The folder of tests.memory_lab."""
    return memory_lab.make(tmp_path_factory.mktemp("lab"), shipped, tokenizer)


@pytest.fixture
def lab_with_memories(memory_models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An app whose shipped models are those of tests.memory_lab."""
    memory_lab.serve(memory_models, monkeypatch)
    return memory_models
