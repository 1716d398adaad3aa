"""The models that a command, a sweep or a replay has open: each opened once, the least recently used closed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from engram_lab.models.errors import LabError

if TYPE_CHECKING:
    from engram_lab.models.handle import Handle


@dataclass(frozen=True)
class ModelKey:
    """A model and how it is opened: what models.handle.open_model takes."""

    name: str
    device: str | None = None
    dtype: str | None = None
    trust_remote_code: bool = False


class Pool:
    """Open models, at most `most` (None: any number) but for more that one `get` asks for; closed at the end.

        with Pool(most=3) as pool:
            first, second = pool.get([ModelKey("engram-mini"), ModelKey("dense-mini")])

    Its calls are for one thread; a handle that it gives is safe in any, until the pool closes it. A model that could
    not be opened is not tried again: asking for it raises the same error.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._open: dict[ModelKey, Handle] = {}  # the last used last
        self._broken: dict[ModelKey, LabError] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, keys: Sequence[ModelKey], later: Sequence[ModelKey] | None = None) -> list[Handle]:
        """The handles of `keys`, in their order; a key named twice gives the same handle twice.

        Of the others as many stay open as there is room for: the soonest of `later`, or the last used where it is not
        given. Raises what opening raises, a LabError; before that the others are closed, whose memory it may need.
        """
        others = [*reversed(self._open)] if later is None else [key for key in later if key in self._open]
        wanted = dict.fromkeys(keys)
        room = None if self._most is None else max(self._most, len(wanted))
        self.keep(list(dict.fromkeys([*wanted, *others]))[:room])
        for key in wanted:
            handle = self._open.pop(key, None)
            self._open[key] = self._opened(key, wanted) if handle is None else handle
        return [self._open[key] for key in keys]

    def keep(self, keys: Iterable[ModelKey]) -> None:
        """Close all but these."""
        wanted = set(keys)
        for key in [key for key in self._open if key not in wanted]:
            self._open.pop(key).close()

    def close(self) -> None:
        """Close them all; the pool can be used again."""
        self.keep(())

    def _opened(self, key: ModelKey, wanted: Iterable[ModelKey]) -> Handle:
        from engram_lab.models.handle import open_model  # torch is needed only now

        if key in self._broken:
            raise self._broken[key]
        try:
            return open_model(**asdict(key))
        except LabError:
            self.keep(wanted)
        try:
            return open_model(**asdict(key))
        except LabError as error:
            self._broken[key] = error
            raise
