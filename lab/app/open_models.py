"""The models that are in memory: each opened once for all sessions, at most so many, the others' memory given back.

A script leases the models it uses for the length of its run. One that nobody leases stays open until its place is
needed; the least recently used goes first, and it is gone before the next is read, so that the two are never there
together. A model in use is never closed.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engram_lab.lab.app import shortage
from engram_lab.lab.app.line import TICK, Line
from engram_lab.lab.app.settings import settings
from engram_lab.models import listing
from engram_lab.models.errors import LabError

if TYPE_CHECKING:
    from engram_lab.models.handle import Handle

PATIENCE = 60.0  # seconds that a script waits for a place
OPENING = "opening"  # what is opened needs this in the line: transformers keeps settings of the process meanwhile


def stamp(name: str) -> tuple[str, int]:
    """Where a model's files are and when the newest was written, so that one trained further is opened anew."""
    for path in (listing.SHIPPED / name, listing.fetched(name), Path(name).expanduser()):
        if path.is_file():
            return str(path), path.stat().st_mtime_ns
        if path.is_dir():
            return str(path), max((file.stat().st_mtime_ns for file in path.iterdir()), default=0)
    return name, 0


@dataclass(eq=False)
class _Place:
    """A place in memory; `handle` is None while the model is read into it."""

    key: tuple[str, int]
    name: str
    handle: Handle | None = None
    failed: bool = False
    leases: int = 0
    used: int = 0


@dataclass(frozen=True)
class _Reserved:
    """Leased places in the order asked for, those of them to be filled, and the models that leave for these."""

    places: list[_Place]
    mine: list[_Place]
    leaving: list[Handle]


class OpenModels:
    """The open models of one process; `opener` reads one, `most` says how many there may be."""

    def __init__(
        self,
        line: Line,
        opener: Callable[[str], Handle] | None = None,
        most: Callable[[], int] = lambda: settings().models,
    ) -> None:
        self._line, self._opener, self._most = line, opener or _open, most
        self._changed = threading.Condition()
        self._places: dict[tuple[str, int], _Place] = {}
        self._waiting: list[object] = []  # for a place, in order of coming
        self._clock = itertools.count(1)

    def lease(
        self,
        names: Sequence[str],
        held: int = 0,
        on_wait: Callable[[int], None] | None = None,
        patience: float = PATIENCE,
    ) -> list[Handle]:
        """The open models of different names, all of them at once, which stay open until they are released.

        `held` is how many more the caller has leased. While it waits `on_wait` is told how many wait before; what it
        raises ends the waiting. Raises LabError where more are asked for than there are places or none becomes free
        within `patience` seconds, and whatever opening raises.
        """
        most = self._most()
        if held + len(names) > most:
            raise LabError(
                f"This needs {held + len(names)} models at once, and this server keeps {most} in memory: choose "
                "nothing to compare with, or start it with a larger number, such as `engram-lab app --models 3`."
            )
        while True:
            reserved = self._reserve(names, most, on_wait or _nothing, time.monotonic() + patience)
            done = False
            try:
                self._close(reserved.leaving)
                for place in reserved.mine:
                    handle = self._read(place.name, on_wait)
                    with self._changed:
                        place.handle = handle
                        self._changed.notify_all()
                done = all(self._arrived(place, on_wait or _nothing) for place in reserved.places)
            finally:
                self._settle(reserved, done)
            if done:
                return [place.handle for place in reserved.places if place.handle is not None]
            # Another session failed to open one of them: see for ourselves why.

    def release(self, handles: Sequence[Handle]) -> None:
        """End the leases of these models, which stay open for the next."""
        with self._changed:
            for place in self._places.values():
                place.leases -= sum(place.handle is handle for handle in handles)
            self._changed.notify_all()

    def names(self) -> list[str]:
        """What is open, by name."""
        with self._changed:
            return sorted(place.name for place in self._places.values() if place.handle is not None)

    def close(self) -> None:
        """Close all that are open, used or not: for the end of a process, or of a test."""
        with self._changed:
            places, self._places = list(self._places.values()), {}
        self._close([place.handle for place in places if place.handle is not None])

    def _reserve(self, names: Sequence[str], most: int, on_wait: Callable[[int], None], until: float) -> _Reserved:
        me = object()
        try:
            while True:
                with self._changed:
                    keys = [stamp(name) for name in names]
                    missing = [key for key in keys if key not in self._places]
                    if missing and me not in self._waiting:
                        self._waiting.append(me)
                    before = self._waiting.index(me) if missing else 0
                    reserved = None if before else self._take(list(zip(keys, names, strict=True)), most)
                if reserved is not None:
                    return reserved
                if time.monotonic() > until:
                    raise LabError(
                        f"All {most} models that this server keeps in memory ({', '.join(self.names())}) have been in "
                        "use for a while: try again in a moment, or use one of these."
                    )
                on_wait(before)
                with self._changed:
                    self._changed.wait(TICK)
        finally:
            with self._changed:
                if me in self._waiting:
                    self._waiting.remove(me)
                    self._changed.notify_all()

    def _take(self, wanted: Sequence[tuple[tuple[str, int], str]], most: int) -> _Reserved | None:
        """What `_reserve` gives, if there are places now; only inside the lock."""
        keys = {key for key, _ in wanted}
        missing = keys - self._places.keys()
        idle = [place for key, place in self._places.items() if not place.leases and key not in keys]
        # Those whose files have changed since are of no more use; then the least recently used.
        idle.sort(key=lambda place: (stamp(place.name) == place.key, place.used))
        over = max(len(self._places) + len(missing) - most, 0) if missing else 0
        if over > len(idle):
            return None
        leaving = [self._places.pop(place.key) for place in idle[:over]]
        for key, name in wanted:
            self._places.setdefault(key, _Place(key, name))
        places = [self._places[key] for key, _ in wanted]
        for place in places:
            place.leases += 1
            place.used = next(self._clock)
        mine = [place for place in dict.fromkeys(places) if place.key in missing]
        return _Reserved(places, mine, [place.handle for place in leaving if place.handle is not None])

    def _arrived(self, place: _Place, on_wait: Callable[[int], None]) -> bool:
        """Wait until a place has its model; False where whoever reads it could not."""
        while True:
            with self._changed:
                if place.handle is not None or place.failed:
                    return not place.failed
            on_wait(0)
            with self._changed:
                if place.handle is None and not place.failed:
                    self._changed.wait(TICK)

    def _settle(self, reserved: _Reserved, done: bool) -> None:
        """Give up places that were not filled and, unless all is done, the leases."""
        with self._changed:
            for place in reserved.mine:
                if place.handle is None:
                    place.failed = True
                    self._places.pop(place.key, None)
            if not done:
                for place in reserved.places:
                    place.leases -= 1
            self._changed.notify_all()

    def _read(self, name: str, on_wait: Callable[[int], None] | None) -> Handle:
        # One at a time; and alone where the default dtype of the process, which every run uses, changes meanwhile.
        with self._line.turn({OPENING} if _in_float32() else None, on_wait), shortage.told(f"Opening {name}"):
            return self._opener(name)

    def _close(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            handle.close()
        if handles:
            shortage.free_memory()


def _nothing(before: int) -> None:
    """Somebody who waits without a word."""


def _in_float32() -> bool:
    """Whether models are opened in the default dtype of torch, as they always are on a CPU unless asked otherwise."""
    import torch

    from engram_lab.models import loading

    dtype, device = settings().dtype, loading.choose_device(settings().device)
    return loading.choose_dtype(dtype, device, torch.bfloat16) == torch.get_default_dtype()


def _open(name: str) -> Handle:
    from engram_lab.models.handle import open_model

    return open_model(name, device=settings().device, dtype=settings().dtype)
