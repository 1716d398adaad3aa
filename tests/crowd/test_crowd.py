"""Many people at one lab, over real websockets: every page is byte for byte what it is for one alone.

ENGRAM_LAB_FULL=1 runs all 200 requests and watches the memory; without it there are 24.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from engram_lab.lab.ask import texts
from tests.children import serving
from tests.crowd.visitor import PATIENCE, Visitor
from tests.full import FULL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PEOPLE = 8
EACH = 25 if FULL else 3  # requests
SETTLED = 7  # requests of each before the memory is looked at: 56 in all
FORGOTTEN = 125.0  # seconds until a session whose socket was closed is gone
# A word that only one of them types, and nobody else may ever receive.
WORDS = ("quabble", "zindra", "mornix", "fellup", "trosk", "vyndel", "jarrow", "humbix")
BEGINNINGS = ("The river runs past the", "Once upon a time the old", "Paris is the capital of", "He never saw the")
SCENARIO = "Note: {field} is where {word} the nurse lives. Question: In which city does {word} live? Answer:"
Act = tuple[str, str, dict[str, Any]]  # go or set, page, query or widgets


def acts(person: int) -> list[Act]:
    """What one person does: pages and probes in an order of their own, with prompts that hold their word."""
    drawn, word = random.Random(person), WORDS[person]
    found: list[Act] = []
    page = ""
    for n in range(EACH):
        prompt = f"{drawn.choice(BEGINNINGS)} {word} {drawn.choice(BEGINNINGS).lower()} number {n}"
        kinds: dict[str, Act] = {
            "lens": ("go", "lens", {"mode": texts.ONE, "prompt": prompt}),
            "alone": ("go", "lens", {"mode": texts.ONE, "prompt": prompt, "against": "nothing", "target": " the"}),
            "set": ("go", "lens", {"mode": texts.SET, "texts": 3, "bootstrap": 200, "seed": person * 100 + n}),
            "gates": ("go", "gates", {"mode": texts.ONE, "prompt": prompt}),
            "rows": ("go", "rows", {"prompt": prompt, "texts": 20}),
            "hash": ("go", "hash", {"prompt": prompt}),
            "kv": ("go", "kv", {"scenario": "home-city", "draws": 2,
                                "template.home-city": SCENARIO.replace("{word}", word.title())}),
            "cka": ("go", "cka", {"sentences": 6 + person}),
            "start": ("go", "start", {}),
        }  # fmt: skip
        weights = {"lens": 4, "alone": 2, "set": 1, "gates": 4, "rows": 3, "hash": 2, "kv": 2, "cka": 1, "start": 1}
        # Between them they begin with every kind.
        kind = drawn.choices(list(weights), list(weights.values()))[0] if n else list(kinds)[person]
        if page in ("lens", "gates", "rows") and drawn.random() < 0.4:
            act: Act = ("set", page, {"prompt": prompt})
            if page == "gates" and drawn.random() < 0.3:
                act[2]["knock_out"] = True
        else:
            act = kinds[kind]
        if page == "lens" and act[0] == "set" and found[-1][2].get("mode") == texts.SET:
            act = kinds["gates"]
        page = act[1]
        found.append(act)
    return found


def do(visitor: Visitor, act: Act) -> None:
    what, page, values = act
    if what == "go":
        visitor.go(page, **values)
    else:
        visitor.set(**values)
    visitor.done()


@dataclass
class Seen:
    """What one person got: the page after each request, its charts, the seconds, all bytes."""

    pages: list[list[bytes]] = field(default_factory=list)
    charts: list[dict[str, str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    waited: int = 0
    received: bytes = b""


def visit(address: str, person: int, barrier: threading.Barrier | None, seen: Seen, resident: Resident | None) -> None:
    """One person's whole visit."""
    with Visitor(address) as visitor:
        for n, act in enumerate(acts(person)):
            if barrier is not None and n in (0, SETTLED):
                barrier.wait(2 * PATIENCE)
                if resident is not None and n == SETTLED:
                    if person == 0:
                        resident.at_rest("settled")
                    barrier.wait(2 * PATIENCE)
            began = time.monotonic()
            do(visitor, act)
            seen.seconds.append(time.monotonic() - began)
            seen.pages.append(visitor.page())
            seen.charts.append(visitor.charts())
            seen.errors += [f"{act}: {error}" for error in visitor.errors()]
            if resident is not None:
                resident.look()
        seen.waited = sum("before you" in text for text in visitor.waited)
        seen.received = visitor.received
        if barrier is not None:
            barrier.wait(2 * PATIENCE)
            if resident is not None and person == 0:
                resident.at_rest("end")
            barrier.wait(2 * PATIENCE)


class Resident:
    """The memory of a server over its runs, MB."""

    def __init__(self, address: str, pid: int) -> None:
        self._address, self._process = address, psutil.Process(pid)
        self._lock = threading.Lock()
        self.curve: list[float] = []
        self.at: dict[str, float] = {}

    def look(self) -> None:
        with self._lock:
            self.curve.append(round(self._process.memory_info().rss / 1e6, 1))

    def at_rest(self, name: str) -> None:
        """Look while nobody is at work, once those who left are forgotten, for whom Streamlit waits a while."""
        if not FULL:
            return
        time.sleep(FORGOTTEN)
        for _ in range(2):  # it forgets at the next one who leaves
            with Visitor(self._address) as other:
                other.go("start").done()
        time.sleep(4.0)  # then what has ended is put away
        self.at[name] = self._process.memory_info().rss / 1e6


def crowd(address: str, pid: int) -> tuple[list[Seen], Resident]:
    """All of them at once."""
    seen, barrier, resident = [Seen() for _ in range(PEOPLE)], threading.Barrier(PEOPLE), Resident(address, pid)
    failed: list[BaseException] = []

    def one(person: int) -> None:
        try:
            visit(address, person, barrier, seen[person], resident)
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=one, args=(person,), daemon=True) for person in range(PEOPLE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return seen, resident


def unlike(a: Sequence[bytes], b: Sequence[bytes]) -> list[str]:
    """Where two pages are not the same: their lengths, or the first bytes of each pair that differ."""
    found = [] if len(a) == len(b) else [f"{len(a)} and {len(b)} elements"]
    for x, y in zip(a, b, strict=False):
        if x != y:
            at = max(next((n for n, (i, j) in enumerate(zip(x, y, strict=False)) if i != j), 0) - 40, 0)
            found.append(f"{x[:30]!r}: {x[at : at + 120]!r} and {y[at : at + 120]!r}")
    return found


def differing(alone: Sequence[Seen], together: Sequence[Seen]) -> list[str]:
    """Requests whose page is not the same in every byte."""
    wrong = []
    for person, (one, many) in enumerate(zip(alone, together, strict=True)):
        for act, a, b, c, d in zip(acts(person), one.charts, many.charts, one.pages, many.pages, strict=True):
            if a != b:
                wrong.append(f"{WORDS[person]} {act}: charts {[key for key in a if a[key] != b.get(key)]}")
            elif c != d:
                wrong.append(f"{WORDS[person]} {act}: {unlike(c, d)[:2]}")
    return wrong


def strangers(words: Sequence[str], received: Sequence[bytes]) -> list[str]:
    """Who received a word that is another's."""
    return [
        f"{words[person]} received {word}"
        for person, data in enumerate(received)
        for other, word in enumerate(words)
        if other != person and word.lower().encode() in data.lower()
    ]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A lab for one at a time, which has computed nothing that the busy one is asked for."""
    with serving(ENGRAM_LAB_DATA=str(tmp_path_factory.mktemp("quiet"))) as (where, _):
        yield where


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """A lab for all at once, and its process."""
    with serving(ENGRAM_LAB_DATA=str(tmp_path_factory.mktemp("busy"))) as lab:
        yield lab


def test_many_at_once_get_what_each_gets_alone(quiet: str, busy: tuple[str, int]) -> None:
    alone = [Seen() for _ in range(PEOPLE)]
    for person in range(PEOPLE):
        visit(quiet, person, None, alone[person], None)
    began = time.monotonic()
    together, resident = crowd(*busy)
    seconds = time.monotonic() - began
    wrong = differing(alone, together)
    runs = sum(len(seen.pages) for seen in together)
    errors = [error for seen in together for error in seen.errors]
    figures = {
        "runs": runs,
        "errors": len(errors),
        "wrong": len(wrong),
        "seconds": round(seconds, 1),
        "seconds alone": round(sum(map(sum, (seen.seconds for seen in alone))), 1),
        "charts": sum(len(charts) for seen in together for charts in seen.charts),
        "told to wait": sum(seen.waited > 0 for seen in together),
        "resident MB": {name: round(mb, 1) for name, mb in resident.at.items()},
        "curve MB": resident.curve[::10],
    }
    print(json.dumps(figures))
    assert runs == PEOPLE * EACH
    assert not errors and not [error for seen in alone for error in seen.errors]
    assert not wrong, "\n".join(wrong[:5])
    assert not strangers(WORDS, [seen.received for seen in together])
    for seen, word in zip(together, WORDS, strict=True):
        assert word.encode() in seen.received.lower(), "the test looks for words that nobody gets"
    if FULL:
        assert resident.at["end"] < 1.01 * resident.at["settled"], resident.curve


USERS = ("Wexleyan", "Ombersson")


def write(visitor: Visitor, name: str, steps: int) -> None:
    """A new user of that name writes ten facts with so many steps."""
    visitor.go("facts", facts_steps=steps, facts_texts=2).done()
    visitor.set(facts_new_user=name).done()
    visitor.press("Write 10 facts")


def test_two_people_write_facts_into_one_model(quiet: str, busy: tuple[str, int]) -> None:
    alone, (address, _) = [], busy
    for steps, name in enumerate(USERS, 1):
        with Visitor(quiet) as visitor:
            write(visitor, name, steps)
            alone.append(visitor.done().page())
    with Visitor(address) as first, Visitor(address) as second, Visitor(address) as third:
        for steps, (visitor, name) in enumerate(zip((first, second), USERS, strict=True), 1):
            write(visitor, name, steps)
        third.go("gates", prompt="A third one looks on").done()
        assert not unlike(first.done().page(), alone[0]) and not unlike(second.done().page(), alone[1])
        assert not first.errors() and not second.errors() and first.charts() != second.charts()
        # One undoes: nothing changes for the other, in the next run of the script either.
        first.press(f"Undo {USERS[0]}").done()
        assert "have, in every logit, the bits from before writing" in first.text().replace("\\", "")
        before = second.charts(), second.text()
        second.set().done()
        assert (second.charts(), second.text()) == before and not second.errors()
        assert not strangers(USERS, [first.received, second.received])
        assert all(name.encode() not in third.received for name in USERS)


LONG = "The river runs past the old mill and into the wide sea, where the ships of the town lie. " * 6


def told(visitor: Visitor, position: int) -> bool:
    return f"Waiting: {position} before you" in visitor.waited


def test_waiting_shows_the_position_and_can_be_cancelled(busy: tuple[str, int]) -> None:
    address, _ = busy
    with Visitor(address) as first:
        people = [Visitor(address) for _ in range(5)]
        second, third, fourth, fifth, same = people
        for visitor in (first, *people):
            visitor.go("gates", prompt="Good morning").done()
        with Visitor(address) as alone:
            alone.go("gates", prompt="The second waits").done()
            expected = alone.charts()
            alone.go("lens", prompt="The fifth waits too", against="nothing").done()
            last = alone.charts()
        first.set(prompt=LONG, knock_out=True)
        first.until(lambda: any("gates shut" in text for text in first.waited), "the first to run")
        # The second asks for something new, as what was had before needs no turn.
        second.set(prompt="The second waits!").until(lambda: told(second, 1), "the second to be told")
        third.set(prompt="The third one waits").until(lambda: told(third, 2), "the third to be told")
        fourth.set(prompt="The fourth one waits").until(lambda: told(fourth, 3), "the fourth to be told")
        fifth.set(prompt="The fifth one waits").until(lambda: told(fifth, 4), "the fifth to be told")
        same.set(prompt=LONG, knock_out=True).until(lambda: told(same, 5), "the one who asks for the same")
        # One cancels, one closes the tab: who is behind goes ahead, while the first still runs.
        third.press("Cancel").done()
        assert "Cancelled: nothing was computed" in third.text() and not third.charts()
        fourth.close()
        fifth.until(lambda: told(fifth, 2), "the fifth to go ahead")
        assert first.running and second.running
        for visitor in (first, second, fifth, same):
            visitor.done()
            assert not visitor.errors() and visitor.charts()
        assert not unlike(same.page(), first.page())
        assert not any("gates shut" in text for text in same.waited), "it was computed a second time"
        third.press("Run it").done()
        assert third.charts() and not third.errors()
        # What was had before is there without waiting.
        assert second.set(prompt="The second waits").done().charts() == expected
        fifth.go("lens", prompt="The fifth waits too", against="nothing").done()
        assert fifth.charts() == last
        for visitor in people:
            visitor.close()
