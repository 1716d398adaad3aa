"""The users of the page on facts: what each types and has written, and how a kept run puts it back.

All of it is in the browser's session; models and reports are shared, and never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import streamlit as st

from engram_lab.lab.app import reopened
from engram_lab.lab.ask import facts as facts_files
from engram_lab.lab.fronts import FRONTS
from engram_lab.models.errors import LabError
from engram_lab.models.handle import Handle
from engram_lab.models.overlay import Fact, Overlay
from engram_lab.probes import module_of
from engram_lab.probes.facts.addresses import address_groups
from engram_lab.probes.facts.check import CheckConfig
from engram_lab.probes.facts.sets import StatedFact

FIRST = 10  # facts of the persona that a user begins with


@dataclass
class Written:
    """A user's facts as they are written for one model, and what undoing them has to give back."""

    config: CheckConfig
    facts: tuple[Fact, ...]  # as written; the overlay has those that were not undone
    overlay: Overlay
    tables: tuple[str, ...]  # SHA-256, before anything was written
    bare: tuple[str, ...]  # [fact] of the logits at each trigger, before
    undone: list[Fact] = field(default_factory=list)


@dataclass
class User:
    """One user of this browser's session: the table, and what is written by the model's fingerprint."""

    name: str
    facts: tuple[StatedFact, ...]  # as the table was given them
    now: tuple[StatedFact, ...] = ()  # with what was typed into it
    version: int = 0  # of the table, ends its key
    file: str = ""  # the last one that was read
    ten: tuple[StatedFact, ...] = ()  # of the persona, that the table may begin with
    kept: bytes | None = None  # of a reopened run, the overlay that goes with what is asked
    asked: dict[str, CheckConfig] = field(default_factory=dict)
    written: dict[str, Written] = field(default_factory=dict)

    def take(self, facts: Sequence[StatedFact]) -> None:
        """Another table."""
        self.facts = self.now = tuple(facts)
        self.version += 1

    def forget(self, handle: Handle) -> None:
        """Nothing is written for this model any more."""
        self.kept = None
        self.asked.pop(handle.fingerprint, None)
        self.written.pop(handle.fingerprint, None)


def apart(handle: Handle) -> tuple[StatedFact, ...]:
    """The facts of the persona without those that have the address of an earlier one: each can be learned by itself.

    Of facts that share an address only one can be said, as the model reads the same rows for both.
    """
    found: dict[str, tuple[StatedFact, ...]] = st.session_state.setdefault("facts_apart", {})
    if handle.fingerprint not in found:
        persona = facts_files.persona()
        try:
            groups = address_groups(handle, handle.engram_layers[-1], persona)
        except LabError:  # a model that cannot read them says so when they are written
            groups = [[n] for n in range(len(persona))]
        found[handle.fingerprint] = tuple(persona[group[0]] for group in groups)
    return found[handle.fingerprint]


def users(handle: Handle) -> dict[str, User]:
    """The users of this browser's session: two at first, each with ten facts of the persona."""
    if "facts_users" not in st.session_state:
        known = apart(handle)
        made = [User("maya", known[:FIRST]), User("quinn", known[FIRST : 2 * FIRST])]
        st.session_state["facts_users"] = {own.name: own for own in made}
    found: dict[str, User] = st.session_state["facts_users"]
    return found


# --- Kept and reopened -----------------------------------------------------------------------------------------------


def attachments(handle: Handle, user: User) -> dict[str, bytes]:
    """What is kept with a run of the check: the overlay as it is now."""
    own = user.written.get(handle.fingerprint)
    return {} if own is None else {"overlay": own.overlay.to_bytes()}


def take_up(handle: Handle, known: dict[str, User]) -> None:
    """Put back the requests of reopened runs, before the page draws its users.

    The user of that name gets its facts as the table, and it is asked for as if the button had been pressed. With
    the overlay that was kept nothing is written again, if it is one of these facts for this very model.
    """
    requests, reopened.state().facts = reopened.state().facts, []
    for config, overlay in requests:
        st.session_state.update({"facts_user": config.writing.user, "facts_said": None})
        user = known.setdefault(config.writing.user, User(config.writing.user, ()))
        user.take(config.facts)
        if config.models != (handle.name,):
            continue
        if isinstance(config, CheckConfig):
            user.forget(handle)
            user.asked[handle.fingerprint], user.kept = config, overlay
        else:
            facts = (name for name in FRONTS if name.startswith("facts "))
            (probe,) = (name for name in facts if module_of(name).CONFIG is type(config))
            st.session_state.setdefault("facts_sets", {})[probe] = config
