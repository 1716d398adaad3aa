"""The fair line against a list that is gone through by hand, with real threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_lab.lab.app.line import Line
from tests.full import examples

SOON = 20.0  # seconds in which whatever is due has happened, on a busy machine too
Needs = frozenset[str] | None


class Gone(BaseException):
    """Raised where a waiting script is ended, as Streamlit does: no Exception."""


class Visitor:
    """A thread that comes to the line, and goes when it is told to."""

    def __init__(self, line: Line, needs: Needs) -> None:
        self.needs = needs
        self.heard: list[int] = []
        self.running = self.done = False
        self._cancelled, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._visit, args=(line,), daemon=True)
        self._thread.start()

    def _visit(self, line: Line) -> None:
        try:
            with line.turn(self.needs, self._on_wait, every=0.005):
                self.running = True
                assert self._leave.wait(3 * SOON)
                self.running = False
        except Gone:
            pass
        self.done = True

    def _on_wait(self, before: int) -> None:
        self.heard.append(before)
        if self._cancelled.is_set():
            raise Gone

    def go(self) -> None:
        """End the turn, or the waiting for it."""
        self._cancelled.set()
        self._leave.set()
        self._thread.join(SOON)
        assert self.done


def shares(a: Needs, b: Needs) -> bool:
    return a is None or b is None or bool(a & b)


def before(line: list[Visitor], at: int) -> int:
    """By the definition: how many earlier ones need something of what the one at `at` needs."""
    return sum(shares(line[at].needs, earlier.needs) for earlier in line[:at])


def soon(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def stands(here: list[Visitor]) -> None:
    """All are where the definition puts them: running, or told how many are before."""
    for at, visitor in enumerate(here):
        due = before(here, at)
        if due:
            soon(lambda v=visitor, n=due: v.heard[-1:] == [n], f"{at} was told {visitor.heard}, not {due}")
            assert not visitor.running
        else:
            soon(lambda v=visitor: v.running, f"{at} does not run")


needs = st.one_of(st.none(), st.frozensets(st.sampled_from("abc"), min_size=1))


@examples()
@given(
    st.lists(st.one_of(needs.map(lambda own: ("come", own)), st.integers(0, 9).map(lambda n: ("go", n))), max_size=14)
)
def test_everybody_is_where_the_definition_says(actions: list[tuple[str, object]]) -> None:
    line, here = Line(), []
    try:
        for what, which in actions:
            if what == "come":
                length = len(here)
                here.append(Visitor(line, which))  # type: ignore[arg-type]
                soon(lambda n=length: line.length == n + 1, "nobody came")
            elif here:
                assert isinstance(which, int)
                here.pop(which % len(here)).go()
            stands(here)
    finally:
        for visitor in here:
            visitor.go()
    assert not line.length


def test_first_come_first_served_and_the_position_counts_down() -> None:
    line = Line()
    here = []
    for n in range(8):
        here.append(Visitor(line, frozenset("a")))
        soon(lambda n=n: line.length == n + 1, "nobody came")
    last = here[-1]
    soon(lambda: last.heard[-1:] == [7], "the last was not told")
    for n, visitor in enumerate(here):
        soon(lambda v=visitor: v.running, f"{n} is not served")
        assert [v.running for v in here].count(True) == 1
        visitor.go()
    told = list(dict.fromkeys(last.heard))
    assert told == sorted(told, reverse=True) and told[0] == 7 and 0 not in told


def test_one_who_is_cancelled_lets_the_next_ahead_at_once() -> None:
    line = Line()
    first = Visitor(line, frozenset("a"))
    soon(lambda: first.running, "nobody runs")
    both = Visitor(line, frozenset("ab"))
    soon(lambda: both.heard[-1:] == [1], "it does not wait")
    other = Visitor(line, frozenset("b"))
    soon(lambda: other.heard[-1:] == [1], "it went ahead of an earlier one")
    both.go()
    soon(lambda: other.running, "it still waits for one who left")
    assert not both.running and first.running
    first.go()
    other.go()


def test_two_models_in_any_order_never_block_each_other() -> None:
    line, held = Line(), dict.fromkeys("abc", 0)
    wrong: list[str] = []

    def work(own: str) -> None:
        for _ in range(150):
            with line.turn(own):
                for name in own:
                    held[name] += 1
                    if held[name] != 1:
                        wrong.append(name)
                for name in own:
                    held[name] -= 1

    threads = [threading.Thread(target=work, args=(own,), daemon=True) for own in ("ab", "ba", "bc", "ca", "a", "cb")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
        assert not thread.is_alive(), "two of them wait for each other"
    assert not wrong and not line.length


def test_a_turn_that_fails_ends() -> None:
    line = Line()
    with pytest.raises(ZeroDivisionError), line.turn("a"):
        _ = 1 / 0
    with line.turn(None):
        pass
    assert not line.length


def test_a_turn_within_a_turn() -> None:
    line = Line()
    with line.turn("ab"):
        with line.turn("a"), line.turn("a"):
            assert line.length == 1
        with pytest.raises(RuntimeError, match="outer"), line.turn("ac"):
            pass
        with pytest.raises(RuntimeError, match="outer"), line.turn(None):
            pass
    with line.turn(None), line.turn("x"), line.turn(None):
        pass
    assert not line.length
    with line.turn("ac"):  # it has forgotten the outer one
        pass
