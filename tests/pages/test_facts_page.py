"""The page on facts, on tiny models: users, the table, writing, what it shows, undoing by bits, sets, bad input."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from streamlit.testing.v1 import AppTest

from engram_lab.lab.ask import facts as facts_files
from engram_lab.lab.ask import texts
from engram_lab.lab.fronts import facts_check, front
from engram_lab.models.errors import DataError
from engram_lab.models.handle import Handle, open_model
from engram_lab.models.memory import Edit, read_memory
from engram_lab.models.overlay import Stack, prepare
from engram_lab.models.tables import addresses
from engram_lab.pages import facts_writing
from engram_lab.pages.facts_writing import FIRST, Said
from engram_lab.probes.facts import check
from engram_lab.probes.facts.check import CheckConfig
from engram_lab.probes.facts.locality import table_digest
from engram_lab.probes.facts.sets import StatedFact, Writing, write
from tests import memory_lab
from tests.lab.fronts.test_export import words
from tests.pages.driving import chart, clean, command, numbers, open_page, sentence, table
from tests.pages.driving import put as change

FACTS = memory_lab.PERSONA


@pytest.fixture(autouse=True)
def lab_of_tiny_models(lab_with_memories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    persona = tmp_path / "persona.jsonl"
    persona.write_text(facts_files.written(FACTS), encoding="utf-8")
    monkeypatch.setattr(facts_files, "PERSONA", persona)
    facts_files.persona.cache_clear()
    yield
    facts_files.persona.cache_clear()


@pytest.fixture(scope="module")
def handle(memory_models: Path) -> Iterator[Handle]:
    opened = open_model(str(memory_models / "engram-mini"))
    yield opened
    opened.close()


def opened(**query: str) -> AppTest:
    return open_page("facts", **({"facts_texts": "3"} | query))


def press(at: AppTest, key: str) -> AppTest:
    return clean(at.button(key=key).click().run())


def asked(at: AppTest) -> CheckConfig:
    """What is written for the chosen user."""
    user = at.session_state["facts_users"][at.radio(key="facts_user").value]
    (config,) = user.asked.values()
    assert isinstance(config, CheckConfig)
    return config


def said(at: AppTest) -> str:
    return " ".join(m.value for m in (*at.markdown, *at.success, *at.info, *at.caption)).replace("\\", "")


def config_of(**fields: Any) -> CheckConfig:
    request = CheckConfig(("engram-mini",), FACTS, Writing("maya", 2), texts.held_out()[:3])
    return dataclasses.replace(request, **fields)


def test_write_and_read_what_it_did(handle: Handle) -> None:
    at = clean(opened())
    assert "Did it learn" not in " ".join(s.value for s in at.subheader), "nothing is written before the button"
    press(at, "write")
    config = config_of()
    assert asked(at).to_dict() == config.to_dict()
    report = check.run([handle], config)
    result = report.result
    assert f"The model says {int(result.facts.top1_after.sum())} of 3 facts" in said(at)
    assert f"{result.gate_ceiling:.2f} at unit norm weights" in said(at)
    shown = table(at, "learned")
    assert list(shown["probability after"]) == [f"{p:.4f}" for p in result.facts.probability_after]
    drawn = next(numbers(t["x"]) for t in chart(at, "recall")["data"] if t.get("name") == "after writing")
    np.testing.assert_allclose(drawn, [own.after for own in result.scores if own.n], atol=1e-6)
    checks = table(at, "left out")
    assert list(checks["check"]) == [facts_check.CHECKS[own.name] for own in result.locality.checks]
    for own, verdict, equal in zip(result.locality.checks, checks["bits"], checks["equal"], strict=True):
        assert equal.startswith(f"{own.equal} of {own.compared}")
        assert (verdict == "bits equal") == (0 < own.compared == own.equal), "green only where bits are equal"
    assert facts_check.addresses_sentence(report) in said(at)
    # The command makes the same request but for the facts, which come from a file.
    args = [word for word in words(command(at)) if not word.startswith("--facts")]
    assert "--user=maya" in args and "--layer=2" in args and "--n-texts=3" in args
    assert list(front("facts check").rows(report))


def test_any_prompt_before_and_after(handle: Handle) -> None:
    at = press(opened(), "write")
    prompt = "Paris is the old and the old mill and the river runs past the old"
    change(at, "text_input", "facts_prompt.maya", prompt)
    overlay, _ = write(handle, FACTS, Writing("maya", 2))
    ids = handle.encode(prompt)
    before, after = (
        read_memory(handle, [ids], edit).logits[0]
        for edit in (Edit(), Edit(overlays=prepare(handle, overlay)))
    )  # fmt: skip
    rows = set(overlay.layers[2].rows.tolist())
    read = addresses(handle, [ids])[handle.engram_layers.index(2), 0].tolist()
    marked = [any(row in rows for row in own) for own in read]
    (html,) = [e.proto.body for e in at.get("html") if 'role="list"' in e.proto.body]
    chips = html.split('<span class="chip')[1:]
    assert [" replaced" in chip.partition('"')[0] for chip in chips] == marked and any(marked)
    assert f"{sum(marked)} of {len(ids)} tokens read replaced rows" in said(at)
    assert f"{int((before == after).all(-1).sum())} positions have the same bits" in said(at)
    tokens = table(at, "next after")
    chance = after[-1].softmax(-1)
    assert tokens["after"][0] == f"{float(chance.max()):.4f}"
    assert tokens["was before"][0] == f"{float(before[-1].softmax(-1)[chance.argmax()]):.4f}"


def test_undo_of_one_fact_and_of_the_rest(handle: Handle) -> None:
    at = press(opened(), "write")
    digest = table_digest(handle)
    for n in range(2):
        press(at, "undo_fact")
        own = at.session_state["facts_users"]["maya"].written[handle.fingerprint]
        assert own.undone == [fact.fact for fact in FACTS[: n + 1]] and own.tables == digest
        assert own.overlay.facts == tuple(fact.fact for fact in FACTS[n + 1 :])
        # What it says of the bits, by hand.
        ids = [handle.encode(FACTS[n].trigger)]
        bare = read_memory(handle, ids).logits
        left = read_memory(handle, ids, Edit(overlays=prepare(handle, own.overlay))).logits
        phrase = "The logits of its trigger have the bits from before writing"
        assert (phrase in said(at)) == torch.equal(bare, left)
    assert "2 of 3 facts undone since" in said(at)
    press(at, "undo_fact")
    assert "Of 3 triggers 3 have, in every logit, the bits from before writing" in at.success[0].value
    assert not at.session_state["facts_users"]["maya"].written and "learned" not in said(at)


def test_everything_of_two_users_is_undone(handle: Handle) -> None:
    at = press(opened(), "write")
    change(at, "radio", "facts_user", "quinn")
    press(at, "facts_10")
    press(at, "write")
    assert asked(at).writing.user == "quinn"
    change(at, "selectbox", "facts_whose", "all users, stacked")
    assert "rows get different vectors" in said(at)
    press(at, "undo_all")
    assert "Everything of maya and quinn is undone" in at.success[0].value
    assert "Of 6 triggers 6 have" in at.success[0].value
    assert not any(own.written for own in at.session_state["facts_users"].values())


def test_undoing_says_so_when_bits_are_lost(handle: Handle) -> None:
    """The sentence is no constant: with another digest from before, it says that bits are lost."""
    config = config_of()
    user = facts_writing.User("maya", FACTS)
    own = facts_writing._written(handle, config)
    for broken in (dataclasses.replace(own, tables=("0", "0")), dataclasses.replace(own, bare=("0",) * 3)):
        user.written[handle.fingerprint] = broken
        assert facts_writing.undo_users(handle, [user]).kind == "error"
    user.written[handle.fingerprint] = dataclasses.replace(own, tables=("0", "0"))
    lost = facts_writing.undo_fact(handle, user, FACTS[0].fact)
    assert lost.kind == "error" and "no longer have the digest" in lost.text
    assert isinstance(lost, Said)


def test_edited_counts_rows_by_hand(handle: Handle) -> None:
    overlay, _ = write(handle, FACTS, Writing("maya", 2))
    ids = handle.encode("Tokyo is the old mill of France")
    rows, read = overlay.layers[2].rows.tolist(), addresses(handle, [ids])[1, 0].tolist()
    assert facts_writing.edited(handle, Stack((overlay,)), ids).tolist() == [
        sum(r in rows for r in own) for own in read
    ]
    assert not facts_writing.edited(handle, Stack(), ids).any()


def test_users_and_their_tables() -> None:
    at = clean(opened())
    assert at.radio(key="facts_user").options == ["maya", "quinn"]
    at.text_input(key="facts_new_user").set_value(" ada ").run()
    assert clean(at).radio(key="facts_user").value == "ada"
    assert "quinn" in sentence(at.text_input(key="facts_new_user").set_value("quinn").run())
    at.text_input(key="facts_new_user").set_value("").run()
    press(at, "facts_remove")
    assert at.radio(key="facts_user").options == ["maya", "quinn"]
    # What is typed stays with its user.
    at.session_state["facts_table.maya.0"] = {
        "edited_rows": {0: {"answer": "sea"}}, "added_rows": [{"trigger": "France is", "answer": "old"}],
        "deleted_rows": [1],
    }  # fmt: skip
    clean(at.run())
    wanted = (
        dataclasses.replace(FACTS[0], answer=" sea", composition=None), FACTS[2], StatedFact("France is", " old"),
    )  # fmt: skip
    change(at, "radio", "facts_user", "quinn")
    change(at, "radio", "facts_user", "maya")
    assert clean(at).button(key="write").label == "Write 3 facts"
    press(at, "write")
    assert asked(at).to_dict() == config_of(facts=wanted).to_dict()


@pytest.mark.parametrize(
    ("kind", "key", "value", "field"),
    [
        ("selectbox", "facts_layer", 0, {"writing": Writing("maya", 0)}),
        ("number_input", "facts_steps", 2, {"writing": Writing("maya", 2, steps=2)}),
        ("button_group", "facts_method", "closed form", {"writing": Writing("maya", 2, "closed_form")}),
        ("number_input", "facts_texts", 1, {"texts": texts.held_out()[:1]}),
    ],
)
def test_each_setting_is_in_the_request(kind: str, key: str, value: Any, field: dict[str, Any]) -> None:
    at = press(change(opened(), kind, key, value), "write")
    assert asked(at).to_dict() == config_of(**field).to_dict()


def test_a_file_of_facts() -> None:
    at = clean(opened())
    upload = at.file_uploader(key="facts_file.maya")
    upload.set_value([("mine.csv", b"trigger,answer\nTokyo is the,mill\n", "text/csv")])
    press(clean(at.run()), "write")
    assert asked(at).facts[0].fact == StatedFact("Tokyo is the", " mill").fact
    at.file_uploader(key="facts_file.maya").set_value([("bad.csv", b"a,b\n1,2\n", "text/csv")])
    assert "bad.csv has no columns" in sentence(at.run())


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"trigger": "Tokyo is"}], "Row 4 of the table has no answer"),
        ([{"answer": "sea"}], "Row 4 of the table has no trigger"),
        ([{"trigger": "Tokyo is the", "answer": "sea"}], "is given twice"),
        ([{"trigger": "x" * 4000, "answer": "sea"}], "4001 tokens long"),
    ],
)
def test_bad_rows_are_one_sentence(rows: list[dict[str, str]], says: str) -> None:
    at = clean(opened())
    at.session_state["facts_table.maya.0"] = {"edited_rows": {}, "added_rows": rows, "deleted_rows": []}
    at.run()
    if not at.error:  # only the model can tell
        at.button(key="write").click().run()
    assert says in sentence(at)
    assert not at.session_state["facts_users"]["maya"].written, "nothing half-written"


def test_a_model_without_a_memory_says_what_to_do() -> None:
    at = clean(opened(model="dense-mini", against="nothing"))
    assert "engram-lab graft" in at.info[0].value and not at.button


def test_sets_run_on_demand() -> None:
    at = clean(opened(facts_view="Layers"))
    assert not at.get("plotly_chart")
    press(at, "facts_run")
    assert list(table(at, "layer")["layer"]) == ["0", "2"]
    change(at, "button_group", "facts_view", "Density")
    assert not at.get("plotly_chart")
    change(at, "toggle", "facts_stacks", False)
    press(at, "facts_run")
    assert list(table(at, "written together")["written together"]) == ["1", "2"]
    assert "--no-stacks" in command(at)


def test_half_a_row_and_empty_rows() -> None:
    assert facts_writing.stated([("", ""), (" Tokyo is the ", "sea")], FACTS) == (FACTS[2],)
    with pytest.raises(DataError, match=r"^Row 1 of the table has no answer: fill it in, or delete the row\.$"):
        facts_writing.stated([("Tokyo", "")], FACTS)
    assert FIRST == 10
