"""The card: tables that read right, and a FINDINGS.md that says what the shipped cards say."""

from pathlib import Path

import numpy as np
import pytest

from engram_lab.lab.command import card
from engram_lab.models.handle import open_model
from engram_lab.probes.lens import LensConfig, run

ROOT = Path(__file__).parents[3]


def test_the_readme_has_the_figures_of_the_shipped_cards() -> None:
    found = card.cards()
    assert list(found) == list(card.NAMES)
    assert card.training_table(found) in (ROOT / "FINDINGS.md").read_text()
    size = sum(f.stat().st_size for name in found for f in (card.MODELS / name).iterdir())
    assert size <= 64e6
    tokens = [c["tokens"] for c in found.values()]
    assert tokens[0] == tokens[2] >= 10e6 > tokens[1]


def test_the_shipped_pair_shares_its_backbone_shape_and_reads_differently() -> None:
    engram, dense = (open_model(name) for name in ("engram-mini", "dense-mini"))
    try:
        for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"):
            assert getattr(engram.model.config, key) == getattr(dense.model.config, key)
        assert engram.n_layers >= 8 and len(engram.engram_layers) == 2
        prompts = ("The capital of the United States is", "He was born in New York City and studied law.")
        report = run([engram, dense], LensConfig(("engram-mini", "dense-mini"), prompts, detail=False, tuned=True))
        rows = {line.split(" | ")[0][2:]: line for line in card.lens_table(report).splitlines()}
        first = report.result.models[0]
        for name, reading in (("logit lens", first), ("tuned lens", first.tuned)):
            for n, layer in enumerate(first.layer_names):
                assert f"| {reading.mean_kl[n]:.2f} [" in rows[f"{name}, KL(final, {layer}), nats"]
            assert f"| {reading.mean_settle_depth:.2f} [" in rows[f"{name}, settle depth, layers"]
        assert f"| {first.mean_final_entropy:.2f} [" in rows["final entropy, nats"]
        # Translators that ship are worth having: on these texts, too, every block is read better through its own.
        for model in report.result.models:
            assert (model.tuned.mean_kl[:-1] < model.mean_kl[:-1]).all() and model.tuned.prompts_in_fit == 0
        losses = np.array([m.mean_loss for m in report.result.models])
        # Random guessing costs ln(vocabulary); a trained model is far below it.
        assert (losses < np.log(engram.vocab_size) - 2).all()
    finally:
        engram.close()
        dense.close()


def test_a_user_can_bring_other_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from engram_lab.lab.command.main import main

    file = tmp_path / "mine.txt"
    file.write_text("The river flows north.\nShe wrote three novels in Paris.\n")
    assert main(["card", "lens", "--prompts", str(file)]) == 0
    out = capsys.readouterr().out
    assert "on 2 texts" in out and sum(line.startswith("| ---") for line in out.splitlines()) == 3
