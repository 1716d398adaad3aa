"""Two runs field by field: bits, tolerance, what turns, what is left out; against numbers put in by hand."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import typing
from typing import Any

import numpy as np
import pytest

from engram_lab.lab.fronts import FRONTS
from engram_lab.lab.fronts import facts_alternatives as front
from engram_lab.lab.sessions import compare
from engram_lab.lab.sessions.compare import Field, fields, verdict
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle
from engram_lab.probes import gates, module_of, rows
from engram_lab.probes import lens as lens_probe
from engram_lab.probes.base import Record, Report, Role, held_by
from engram_lab.probes.facts import alternatives
from engram_lab.probes.gates import GatesConfig
from engram_lab.probes.kv import compose, swap
from engram_lab.probes.kv.compose import ComposeConfig
from engram_lab.probes.kv.swap import SwapConfig
from engram_lab.probes.rows import RowsConfig
from tests.lab.fronts.test_facts_alternatives import FACTS, TEXTS
from tests.probes.kv.tiny import RIVER, opened
from tests.tiny_lab import PROMPT


def changed(report: Report, change: dict[str, Any]) -> Report:
    """The lens report with other values of its first model."""
    first, *rest = report.result.models
    models = (dataclasses.replace(first, **change), *rest)
    return dataclasses.replace(report, result=dataclasses.replace(report.result, models=models))


def moved(values: np.ndarray, at: Any, value: Any) -> np.ndarray:
    copy = values.copy()
    copy[at] = value
    return copy


def of(found: list[Field], path: str) -> Field:
    (field,) = [field for field in found if field.path == path]
    return field


def test_a_run_is_identical_to_itself_and_to_its_json(report: Report) -> None:
    again = Report.from_dict(json.loads(report.to_json()))
    for other in (report, again):
        got = verdict(report, other)
        assert (got.word, got.largest, got.where, got.differ, got.wrong) == ("identical", 0.0, "", 0, ())
        assert all(field.equal for field in fields(report, other))


def test_fields_name_paths_axes_units_and_shapes(report: Report) -> None:
    found = fields(report, report)
    n = len(report.result.models[1].token_ids)
    kl = of(found, "models[1].kl")
    assert (kl.kind, kl.axes, kl.unit, kl.shapes) == ("float", ("layer", "pos"), "nats", ((4, n), (4, n)))
    loss = of(found, "models[0].mean_loss")
    assert (loss.kind, loss.axes, loss.shapes) == ("float", (), ((), ()))
    assert loss.a == report.result.models[0].mean_loss
    assert of(found, "models[0].token_ids").kind == "discrete" and of(found, "models[0].layer_names").kind == "text"
    # What neither run has is no field.
    assert not [field for field in found if field.path.startswith("models[0].tuned")]


def test_the_largest_difference_is_the_one_put_in(report: Report) -> None:
    kl, first = report.result.models[0].kl, report.result.models[0]
    other = changed(
        report,
        {"kl": moved(kl, (1, 2), kl[1, 2] + np.float32(0.5)), "mean_loss": first.mean_loss - 0.25},
    )
    got = verdict(report, other)
    assert got.word == "changed" and got.where == "models[0].kl" and got.largest == pytest.approx(0.5, abs=1e-6)
    assert [text.partition(":")[0] for text in got.wrong] == ["models[0].kl", "models[0].mean_loss"]
    assert of(fields(report, other), "models[0].mean_loss").largest == pytest.approx(0.25)
    assert verdict(report, other, 0.6).word == "within tolerance" and verdict(report, other, 0.2).word == "changed"


def test_the_tolerance_grows_with_the_value(report: Report) -> None:
    kl = moved(report.result.models[0].kl, (0, 0), 1000.0)
    base = changed(report, {"kl": kl})
    assert verdict(base, changed(report, {"kl": moved(kl, (0, 0), 1000.09)})).word == "within tolerance"
    assert verdict(base, changed(report, {"kl": moved(kl, (0, 0), 1000.11)})).word == "changed"
    small = changed(report, {"kl": moved(kl, (0, 0), 0.0)})
    assert verdict(small, changed(report, {"kl": moved(kl, (0, 0), 9e-5)})).word == "within tolerance"
    assert verdict(small, changed(report, {"kl": moved(kl, (0, 0), 1.1e-4)})).word == "changed"


def test_one_bit_is_seen_and_so_is_the_sign_of_zero(report: Report) -> None:
    kl = moved(report.result.models[0].kl, (0, 0), 0.0)
    for value in (np.float32(1e-45), np.float32(-0.0)):
        got = verdict(changed(report, {"kl": kl}), changed(report, {"kl": moved(kl, (0, 0), value)}))
        assert got.word == "within tolerance" and got.wrong == ()


def test_nan_and_infinity(report: Report) -> None:
    loss = report.result.models[0].next_token_loss
    assert np.isnan(loss[-1])
    got = verdict(report, changed(report, {"next_token_loss": moved(loss, 0, np.nan)}))
    assert got.wrong == ("models[0].next_token_loss: NaN at other places",)
    infinite = changed(report, {"next_token_loss": moved(loss, 0, np.inf)})
    assert verdict(infinite, infinite).word == "identical"
    got = verdict(report, infinite, 1e9)
    assert got.word == "changed" and got.largest == np.inf


# What each field stood for before the probes said it themselves; all else is an amount.
ROLES: dict[Role, set[str]] = {
    "hash": {"digests"},
    "prose": {"said"},
    "spelled": {
        "token_names", "top_texts", "full_top_texts", "decisions", "full_decisions", "said_before", "said_after",
        "rival_texts", "promoted_texts", "suppressed_texts", "target_names",
    },
    "name": {
        "sentence", "pos_a", "pos_b", "fact", "fact_of", "char_start", "char_end", "draw", "leader", "due", "row",
        "prime", "position", "layer", "layers", "order", "head", "thresholds", "sizes", "quantiles", "groups",
    },
}  # fmt: skip
RANKS = {"promoted": "promoted_ids", "suppressed": "suppressed_ids", "top_probs": "top_ids"}


def records(kind: Any) -> set[type[Record]]:
    """The records that a type is made of, itself and at any depth."""
    if isinstance(kind, type) and issubclass(kind, Record):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {kind}.union(*(records(hints[item.name]) for item in dataclasses.fields(kind)))
    return set().union(*map(records, typing.get_args(kind)))


@pytest.mark.parametrize("probe", FRONTS)
def test_each_field_says_what_it_stands_for(probe: str) -> None:
    for kind in records(module_of(probe).RESULT):
        for name, held in held_by(kind).items():
            ids = name.endswith(("_id", "_ids", "_index"))
            role = "name" if ids else next((role for role, names in ROLES.items() if name in names), "amount")
            assert (held.role, held.ranks) == (role, RANKS.get(name, "")), f"{kind.__name__}.{name}"
            if held.ranks:
                assert held_by(kind)[held.ranks].role == "name"


def test_what_compares_runs_needs_no_torch() -> None:
    code = "import sys, engram_lab.lab.sessions.compare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_near_ties_may_turn_one_in_a_hundred() -> None:
    ranks = np.arange(250).reshape(5, 50)
    for turned in (2, 3):
        other = ranks.copy()
        other.ravel()[:turned] += 1
        for name in ("target_rank", "top_texts"):
            a, b = (own if name == "target_rank" else own.astype(str).astype(object) for own in (ranks, other))
            kind: tuple[compare.Kind, Role] = ("discrete", "amount") if a is ranks else ("text", "spelled")
            field = Field(f"models[0].{name}", kind[0], ("layer", "pos"), "", a, b, role=kind[1])
            assert field.differ == turned and not field.equal
            said = None if turned == 2 else f"models[0].{name}: 3 of 250 differ"
            assert field.wrong(0.0) == said
    truth = Field("flip", "discrete", (), "", np.array(True), np.array(False))
    assert truth.wrong(1.0) == "flip: 1 of 1 differ" and truth.largest == 1


def test_text_shapes_ids_and_what_one_run_lacks(report: Report) -> None:
    assert verdict(report, changed(report, {"name": "x"})).wrong == ("models[0].name: other text",)
    got = verdict(report, changed(report, {"target_rank": None}))
    assert got.wrong == ("models[0].target_rank: only A has it",)
    (one,) = [f for f in fields(changed(report, {"target_rank": None}), report) if f.path == "models[0].target_rank"]
    assert one.reason == "only B has it" and one.largest is None
    protocol = dataclasses.replace(report.protocol, prompt_ids=(((1,),), ((1,),)))
    got = verdict(report, dataclasses.replace(report, protocol=protocol))
    assert got.word == "changed" and got.wrong == ("prompt_ids: the models got other token ids",)
    fewer = dataclasses.replace(report, result=dataclasses.replace(report.result, models=report.result.models[:1]))
    lost = [f.path for f in fields(report, fewer) if f.b is None]
    assert "models[1].kl" in lost and "models[0].kl" not in lost and verdict(report, fewer).word == "changed"


def test_reasons_why_there_is_no_difference(report: Report, pair: list[Handle]) -> None:
    other = dataclasses.replace(report.config, prompts=(PROMPT + " again",))
    found = fields(report, lens_probe.run(pair, other))
    n = len(report.result.models[0].token_ids)
    m = len(lens_probe.run(pair, other).result.models[0].token_ids)
    assert of(found, "models[0].kl").reason == f"A is 4 layer x {n} pos, B is 4 layer x {m} pos"
    assert of(found, "models[0].mean_kl").reason is None
    assert of(found, "models[0].token_ids").reason == "its numbers are names of things, not amounts"
    assert of(found, "models[0].name").reason == "it is text"


def test_lists_from_the_largest_down_belong_together_only_for_the_same_tokens(
    report: Report, pair: list[Handle]
) -> None:
    assert of(fields(report, report), "models[0].top_probs").reason is None
    top = report.result.models[0].top_ids
    turned = changed(report, {"top_ids": moved(top, (0, 0), top[0, 0][::-1])})
    assert of(fields(report, turned), "models[0].top_probs").reason == "the two runs rank other tokens"
    a, b = (rows.run(pair[:1], RowsConfig(("engram-mini",), (text,), top_k=3)) for text in ("The old mill", "the sea"))
    assert of(fields(a, a), "came_through.promoted").reason is None
    assert of(fields(a, b), "came_through.promoted").reason == "the two runs rank other tokens"


def test_hashes_tell_identical_and_nothing_else_and_sentences_by_their_words() -> None:
    handle = opened("llama")
    run = swap.run([handle], SwapConfig((handle.name,), RIVER, draws=2))
    other = dataclasses.replace(run.result, digests=("0" * 64, run.result.digests[1]))
    got = verdict(run, dataclasses.replace(run, result=other))
    assert (got.word, got.differ, got.wrong) == ("within tolerance", 0, ())
    said = dataclasses.replace(run.result, said="Recovers 63% of it.")
    for text, word in (("Recovers 64% of it.", "within tolerance"), ("Recovers none of it.", "changed")):
        pair = [dataclasses.replace(run, result=own) for own in (said, dataclasses.replace(said, said=text))]
        assert verdict(*pair).word == word


def test_seconds_are_left_out_and_named() -> None:
    handle = opened("llama")
    config = ComposeConfig(
        (handle.name,), "Paris is the capital", " of France, and the river runs", " old mill", (" the", " sea"),
        lengths=(5, 20), time=True,
    )  # fmt: skip
    a, b = (compose.run([handle], config) for _ in range(2))
    assert not np.array_equal(a.result.timing.seconds, b.result.timing.seconds, equal_nan=True)
    got = verdict(a, b)
    assert got.word == "identical" and got.largest == 0
    assert got.left_out and all(path.startswith("timing.") for path in got.left_out)
    assert "timing.said" in got.left_out and "said" not in got.left_out


def test_an_array_in_seconds_is_left_out(pair: list[Handle]) -> None:
    handle = pair[0]
    config = front.request((handle.name,), FACTS[:2], TEXTS[:1], 0, time=True, lora_steps=2, ranks=(2,), bootstrap=3)
    a, b = (alternatives.run([handle], config) for _ in range(2))
    got = verdict(a, b)
    assert got.word == "identical" and got.left_out == ("seconds",)
    assert of(fields(a, b), "seconds").unit == "s" and of(fields(a, b), "seconds").shapes[0] == (len(a.result.methods),)


def test_two_probes_and_nonsense_are_refused(report: Report, pair: list[Handle]) -> None:
    other = gates.run(pair[:1], GatesConfig(("engram-mini",), (PROMPT,)))
    with pytest.raises(LabError, match='A is a run of "lens" and B one of "gates"'):
        compare.fields(report, other)
    for tolerance in (-1.0, float("nan"), float("inf")):
        with pytest.raises(LabError, match="must be 0 or more"):
            verdict(report, report, tolerance)
