"""One fair line for all that runs models: first come, first served, and whoever shares no model need not wait.

A ticket names what it needs and may go ahead once no earlier ticket, waiting or running, needs any of it. It waits for
all of its models at once and holds none meanwhile, so two requests for the same two models cannot block each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager

TICK = 0.3  # seconds between two words to somebody who waits


class _Ticket:
    """A place in the line; `needs` is None for everything."""

    def __init__(self, needs: frozenset[Hashable] | None) -> None:
        self.needs = needs

    def shares(self, other: _Ticket) -> bool:
        if self.needs is None or other.needs is None:
            return True
        return not self.needs.isdisjoint(other.needs)

    def covers(self, other: _Ticket) -> bool:
        return self.needs is None or (other.needs is not None and other.needs <= self.needs)


class Line:
    """The line of one process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tickets: list[_Ticket] = []  # in order of coming; those that run stay in until they are done
        self._own = threading.local()

    @property
    def length(self) -> int:
        """How many are in the line, those whose turn it is too."""
        return len(self._tickets)

    @contextmanager
    def turn(
        self,
        needs: Collection[Hashable] | None,
        on_wait: Callable[[int], None] | None = None,
        every: float = TICK,
    ) -> Iterator[None]:
        """Wait for everything in `needs` (None: for all others to be done), and have it until the block ends.

        While it waits `on_wait` is told, at least `every` seconds, how many are before; what it raises ends the
        waiting and frees the place. A thread whose turn it is may take turns within it, for no more than it has;
        RuntimeError for more, as that could wait for ever.
        """
        ticket = _Ticket(None if needs is None else frozenset(needs))
        outer: _Ticket | None = getattr(self._own, "ticket", None)
        if outer is not None:
            if not outer.covers(ticket):
                raise RuntimeError("A turn within a turn asks for models that the outer one does not have.")
            yield
            return
        try:
            with self._changed:
                self._tickets.append(ticket)
            self._wait(ticket, on_wait, every)
            self._own.ticket = ticket
            yield
        finally:
            self._own.ticket = None
            with self._changed:
                self._tickets.remove(ticket)
                self._changed.notify_all()

    def _before(self, ticket: _Ticket) -> int:
        """How many earlier ones need something that this one needs."""
        earlier = self._tickets[: self._tickets.index(ticket)]
        return sum(other.shares(ticket) for other in earlier)

    def _wait(self, ticket: _Ticket, on_wait: Callable[[int], None] | None, every: float) -> None:
        while True:
            with self._changed:
                before = self._before(ticket)
            if not before:
                return
            if on_wait is not None:
                on_wait(before)  # outside the lock: it draws, and it may raise
            with self._changed:
                if self._before(ticket) == before:
                    self._changed.wait(every)
