"""The page on facts put back as a run was kept: the same request, nothing written again; the facts it begins with."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest

from engram_lab.lab.app import fact_users, reopened, runner
from engram_lab.lab.ask import facts as facts_files
from engram_lab.lab.ask import texts
from engram_lab.lab.fronts import FRONTS, facts_alternatives, front, settled
from engram_lab.models.handle import open_model
from engram_lab.models.tables import addresses
from engram_lab.pages import facts_writing
from engram_lab.probes import module_of
from engram_lab.probes.facts import check as fact_check
from engram_lab.probes.facts import density, sets
from engram_lab.probes.facts.check import CheckConfig
from engram_lab.probes.facts.density import DensityConfig
from engram_lab.probes.facts.sets import Expected, StatedFact, Writing
from tests.pages.driving import clean, open_page
from tests.pages.viewing import LINES, ONE, noted, stand, there_and_back

pytestmark = pytest.mark.usefixtures("lab_with_memories")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What the page asks for."""
    return noted(monkeypatch)


FACTS = (
    StatedFact("The river runs past the old", " mill", ("Past the river is the",), (Expected("Paris is", " old"),)),
    StatedFact("Paris is the capital of", " Japan", composition=Expected("The old mill and the", " river"), id="paris"),
    StatedFact("Tokyo is the", " sea"),
)


@pytest.fixture(scope="module", autouse=True)
def persona(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Facts that the tiny models can read, in place of those that ship."""
    file = tmp_path_factory.mktemp("facts") / "persona.jsonl"
    file.write_text(facts_files.written(FACTS), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts_files, "PERSONA", file)
        facts_files.persona.cache_clear()
        yield
    facts_files.persona.cache_clear()


def stated(draw: random.Random, probe: str) -> Iterator[Any]:
    """As the page makes it, far from that, and what no widget of the page makes."""
    module = module_of(probe)
    ours = texts.held_out()[: draw.randint(1, 9)]
    writing = Writing("maya", None if probe == "facts layers" else 2)
    for facts, how, unrelated, fields in (
        (FACTS, writing, ours, {}),
        (FACTS[1:], dataclasses.replace(writing, user="Zoë", method="closed_form", steps=0), ours, {}),
        (FACTS, dataclasses.replace(writing, rate=0.1, steps=300), LINES, {"seed": 5, "bootstrap": 9}),
    ):
        if probe == "facts alternatives":
            yield facts_alternatives.request(ONE, facts, unrelated, 2, writing=how, ranks=(8,), **fields)
        elif probe == "facts check":
            yield CheckConfig(ONE, facts, how, unrelated, **fields)
        elif probe == "facts density":
            yield module.CONFIG(ONE, facts, how, (1, 2), draw.random() < 0.5, **fields)
        else:
            yield module.CONFIG(ONE, facts, how, **fields)


@pytest.fixture
def reopen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bytes | None]]:
    """What the app puts back on the page of facts as it begins."""
    todo: list[tuple[Any, bytes | None]] = []
    begin = reopened.begin

    def also(page: str) -> None:
        begin(page)
        if todo and page == "facts":
            reopened.state().facts.append(todo.pop())

    monkeypatch.setattr(reopened, "begin", also)
    return todo


@pytest.mark.parametrize("probe", [name for name in FRONTS if name.startswith("facts ")])
def test_the_page_of_facts_asks_again_without_a_press(
    probe: str, reopen: list[Any], asked: list[tuple[str, Any]]
) -> None:
    for n, config in enumerate(stated(random.Random(probe), probe)):
        reopen.append((config, None))
        at = there_and_back(probe, config, asked)
        assert at.radio(key="facts_user").value == config.writing.user
        differs = [c.value for c in at.caption if "changed since" in c.value]
        if probe != "facts check":
            assert bool(differs) == (n == 2), "the widgets make the request too, where the page has them"
        assert not at.session_state["_reopened"].facts, "once"


def test_reopened_facts_are_not_written_again(reopen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the overlay that was kept nothing is written, and undoing gives the bits back; a foreign one is left."""
    handle = open_model("engram-mini")
    config = CheckConfig(ONE, FACTS, Writing("ada", 2), texts.held_out()[:2])
    report = fact_check.run([handle], config)
    overlay, _ = sets.write(handle, FACTS, config.writing)
    left = overlay.without(FACTS[1].fact)
    monkeypatch.setattr(runner, "run", lambda probe, asked: report if asked.to_dict() == config.to_dict() else None)
    writes = []

    def counted(*args: Any) -> Any:
        writes.append(args)
        return sets.write(*args)

    monkeypatch.setattr(facts_writing, "write", counted)
    reopen.append((config, left.to_bytes()))
    at = stand(front("facts check").ASK.view(config))
    user = at.session_state["facts_users"]["ada"]
    own = user.written[handle.fingerprint]
    assert own.overlay == left and not writes
    assert own.undone == [FACTS[1].fact] and own.facts == tuple(fact.fact for fact in FACTS)
    assert fact_users.attachments(handle, user) == {"overlay": left.to_bytes()}
    clean(at.button(key="undo_user").click().run())
    assert "Of 3 triggers 3 have, in every logit, the bits from before writing" in at.success[0].value
    other = open_model("engram-mini-early")
    foreign, _ = sets.write(other, FACTS, config.writing)
    for raw in (b"{}" * 9, foreign.to_bytes()):
        reopen.append((config, raw))
        at = stand(front("facts check").ASK.view(config))
        assert at.session_state["facts_users"]["ada"].written[handle.fingerprint].overlay == overlay
        assert len(writes) == 1
        writes.clear()


def test_facts_begin_with_addresses_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two facts that end in the same tokens only the first is among the ten; the order is the file's."""
    first, twin, third = FACTS[1], StatedFact("Tokyo is the capital of", " mill"), FACTS[0]
    monkeypatch.setattr(facts_files, "persona", lambda: (first, twin, third))
    handle = open_model("engram-mini")
    ids = [handle.encode(own.trigger) for own in (first, twin, third)]
    rows = [addresses(handle, [own])[1, 0, -1].tolist() for own in ids]
    assert rows[0] == rows[1] != rows[2]
    at = clean(open_page("facts"))
    assert at.session_state["facts_users"]["maya"].facts == (first, third)
    clean(at.button(key="facts_3").click().run())
    assert at.button(key="write").label == "Write 3 facts"
    clean(at.button(key="facts_10").click().run())
    assert at.button(key="write").label == "Write 2 facts"


def test_what_a_command_on_facts_leaves_to_the_model() -> None:
    handle = open_model("engram-mini")
    writing = Writing("ada", method="closed_form")
    check = fact_check.run([handle], CheckConfig(ONE, FACTS, writing))
    assert settled(check).writing.layer == 2 and fact_check.run([handle], settled(check)).result == check.result
    dense = density.run([handle], DensityConfig(ONE, FACTS, writing, stacks=False))
    assert (settled(dense).sizes, settled(dense).writing.layer) == ((1, 2), 2)
    assert density.run([handle], settled(dense)).result == dense.result
