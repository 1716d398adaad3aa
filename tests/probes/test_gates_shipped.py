"""What the gates of the shipped Engram show, and that shuffling its rows destroys it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engram_lab.models.handle import open_model
from engram_lab.probes.gates import GatesConfig, run


def test_shuffling_rows_destroys_what_the_gates_show() -> None:
    """On the shipped weights and sentences that no model of ours was trained on.

    Over all 240 of them the rank correlation is .14 at layer 1 and .37 at layer 6, where the query still tells
    something of the token, and the loss rises by .83 nats (95 % interval .79 to .88). Here are 20 of them.
    """
    sentences = (Path(__file__).parents[2] / "assets/texts/held_out.txt").read_text(encoding="utf-8").splitlines()
    name = "engram-mini"
    config = GatesConfig((name,), tuple(sentences[:20]), controls=("shuffled",), bootstrap=200, detail=False)
    result = run([open_model(name)], config).result
    (shuffled,) = result.controls
    assert (np.abs(shuffled.rank_correlation) < 0.6).all()
    assert shuffled.rank_correlation[0, 0] < 0.35
    assert shuffled.mean_loss_change_low > 0.4
    # Without the right rows the gates are lower: there is less that fits.
    assert (shuffled.gate_mean < result.gate_mean_low).all()


def test_what_came_through_the_gate_on_the_shipped_weights() -> None:
    """United -> States: the memory of "the United" speaks for it, and shutting it there costs the most."""
    prompt = "Washington, D.C., is the capital of the United"
    config = GatesConfig(("engram-mini",), (prompt,), " States", knock_out=True)
    result = run([open_model("engram-mini")], config).result
    said, knocked = result.attribution, result.knock_out
    whole = said.memory.sum((0, 1, 2)) + said.conv.sum(0) + said.block.sum(0) + said.embed
    np.testing.assert_allclose(whole, said.logit, atol=1e-4)
    assert (said.written[:, -1] > 0.5).all()
    assert knocked.logit_change.argmin() == knocked.logit_change.size - 1, "layer 6, at United"
    assert knocked.logit_change.min() < -0.5
