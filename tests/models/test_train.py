"""A run can be stopped, resumed and compared with its twin; what it leaves can be used."""

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from engram_lab.models.data import PackedStream, prepare
from engram_lab.models.errors import CheckpointError, DataError
from engram_lab.models.train import GATE_BINS, TrainConfig, Trainer, held_out_loss

CONFIG: dict[str, Any] = {
    "n_layers": 3,
    "d_model": 32,
    "n_attention_heads": 2,
    "d_mlp": 48,
    "context": 64,
    "short_context": 32,
    "long_share": 0.4,
    "memory_layers": (0, 2),
    "hash_heads": 2,
    "row_width": 4,
    "rows_per_head": 80,
    "tokens": 10 * 128,
    "batch_tokens": 128,
    "warmup_steps": 2,
    "points": 3,
    "point_sequences": 2,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("train")
    rng = np.random.default_rng(0)
    documents = [" ".join(f"w{i}" for i in rng.integers(0, 50, 30)) for _ in range(2400)]
    (base / "text.txt").write_text("\n\n".join(documents))
    prepare(base / "data", [base / "text.txt"], vocab_size=350)
    return base / "data"


def ignore(line: dict[str, Any]) -> None:
    """A report that does nothing."""


def stop_at(step: int) -> Any:
    def report(line: dict[str, Any]) -> None:
        if line["step"] == step:
            raise KeyboardInterrupt

    return report


@pytest.fixture(scope="module")
def whole(data: Path) -> Path:
    out = data.parent / "whole"
    Trainer(TrainConfig(**CONFIG), data, out).run(ignore)
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_resumed_run_gives_the_same_bits(data: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    for step in (4, 7):
        trainer = Trainer(TrainConfig(**CONFIG), data, out)
        if step > 4:
            trainer.resume()
        with pytest.raises(KeyboardInterrupt):
            trainer.run(stop_at(step))
        # What Ctrl-C leaves is a model like any other.
        assert AutoModelForCausalLM.from_pretrained(out / "checkpoint").config.engram_layer_ids == [0, 2]
    trainer = Trainer(TrainConfig(**CONFIG), data, out)
    trainer.resume()
    trainer.run(ignore)
    for part in ("checkpoint", "final"):
        expected, got = weights(whole / part), weights(out / part)
        assert expected.keys() == got.keys()
        assert all(torch.equal(expected[k], got[k]) for k in expected)
    logs = [[json.loads(line) for line in (f / "log.jsonl").read_text().splitlines()] for f in (whole, out)]
    assert [(x["step"], x["loss"]) for x in logs[0]] == [(x["step"], x["loss"]) for x in logs[1]]
    assert len(logs[0]) == 10
    cards = [json.loads((folder / "final" / "training.json").read_text()) for folder in (whole, out)]
    assert cards[0]["points"] == cards[1]["points"] and len(cards[0]["points"]) == 4


def test_the_card_tells_the_loss_of_the_weights_that_ship(data: Path, whole: Path) -> None:
    card = json.loads((whole / "final" / "training.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(whole / "final", dtype=torch.float32).eval()
    stored = weights(whole / "final")
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert stored["model.canonical_ids"].dtype == torch.int64
    stream = PackedStream(data, "held_out", None)
    n = (stream.total - 1) // 64
    with torch.no_grad():
        losses = [
            float(cross_entropy(model(input_ids=ids, position_ids=positions).logits[0], labels[0]))
            for ids, labels, positions in (stream.batch(i * 64, 1, 64) for i in range(n))
        ]
    assert card["held_out_loss"] == pytest.approx(np.mean(losses), abs=1e-4)
    assert card["held_out_tokens"] == n * 64
    assert card["tokens"] == 1280
    assert card["parameters"]["tables"] == sum(model.config.engram_num_embeddings) * 4
    first, last = card["points"][0], card["points"][-1]
    assert last["held_out_loss"] < first["held_out_loss"]
    assert set(last["gate_histogram"]) == {"0", "2"}
    # Four sequences of 64 positions are looked at.
    assert all(len(bins) == GATE_BINS and sum(bins) == 256 for bins in last["gate_histogram"].values())


def test_the_twin_starts_from_the_same_backbone_and_sees_the_same_batches(data: Path, tmp_path: Path) -> None:
    trainers = [Trainer(TrainConfig(**CONFIG, twin=twin), data, tmp_path / str(twin)) for twin in (False, True)]
    engram, dense = (dict(t.model.named_parameters()) for t in trainers)
    assert all(torch.equal(engram[name], value) for name, value in dense.items())
    assert all(".memory." in name for name in engram.keys() - dense.keys())
    seen: list[list[torch.Tensor]] = [[], []]
    for trainer, ids in zip(trainers, seen, strict=True):
        trainer.model.get_input_embeddings().register_forward_hook(lambda _, x, __, ids=ids: ids.append(x[0]))
        trainer.train_step()
        trainer.train_step()
    assert len(seen[0]) == 2
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_training_learns_more_than_the_frequency_of_tokens(data: Path, tmp_path: Path) -> None:
    trainer = Trainer(TrainConfig(**{**CONFIG, "tokens": 60 * 128}), data, tmp_path / "long")
    stream = trainer.held_out
    before = held_out_loss(trainer.model, stream, 64, 5)[0]
    trainer.run(ignore)
    assert held_out_loss(trainer.model, stream, 64, 5)[0] < before - 1


def test_a_full_disk_ends_in_one_sentence_and_keeps_the_last_checkpoint(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "full"
    trainer = Trainer(TrainConfig(**CONFIG), data, out)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(stop_at(3))
    before = weights(out / "checkpoint")
    trainer = Trainer(TrainConfig(**CONFIG), data, out)
    trainer.resume()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # the kernel refuses, as on a full disk
    try:
        with pytest.raises(CheckpointError, match="--resume") as error:
            trainer.run(ignore, save_every=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(error.value)
    after = weights(out / "checkpoint")
    assert all(torch.equal(before[k], after[k]) for k in before)
    trainer = Trainer(TrainConfig(**CONFIG), data, out)
    trainer.resume()
    assert trainer.step == 3


def test_bad_requests_are_one_sentence(data: Path, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no multiple"):
        TrainConfig(context=100)
    with pytest.raises(DataError, match="less than one batch"):
        TrainConfig(tokens=5)
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        Trainer(TrainConfig(**CONFIG), data, tmp_path / "nothing").resume()
    with pytest.raises(CheckpointError, match="other settings"):
        Trainer(TrainConfig(**{**CONFIG, "muon_lr": 0.5}), data, whole).resume()
    with pytest.raises(DataError, match="held-out tokens"):
        Trainer(TrainConfig(**{**CONFIG, "context": 6400, "batch_tokens": 6400, "tokens": 6400}), data, tmp_path)


def test_the_warm_up_is_linear_from_the_first_step() -> None:
    config = TrainConfig(tokens=6144 * 200, warmup_steps=40)
    assert [config.rate_at(n) for n in (0, 9, 39)] == pytest.approx([1 / 40, 10 / 40, 1.0])
    assert config.rate_at(199) == pytest.approx(1 / 160) and config.rate_at(40) == pytest.approx(1.0)
