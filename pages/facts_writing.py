"""Pieces of the page on facts: users, their table, writing, and undoing verified by bits."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import streamlit as st
import torch

from engram_lab.lab.app import asked, page, runner
from engram_lab.lab.app.fact_users import FIRST, User, Written, apart, take_up, users
from engram_lab.lab.ask import facts as facts_files
from engram_lab.lab.ask import texts
from engram_lab.lab.ask.parts import METHOD, STEPS, UNRELATED_TEXTS
from engram_lab.lab.draw import labels
from engram_lab.models.errors import DataError, LabError
from engram_lab.models.handle import Handle
from engram_lab.models.overlay import Fact, Overlay, Stack, check_overlay, load_overlay, prepare
from engram_lab.models.tables import addresses
from engram_lab.probes.answers import behind
from engram_lab.probes.base import Report
from engram_lab.probes.facts.check import CheckConfig
from engram_lab.probes.facts.locality import table_digest
from engram_lab.probes.facts.sets import StatedFact, Writing, batches, logits_of, write
from engram_lab.probes.facts.writing import encode_facts

COLUMNS = ("trigger", "answer")


def the_model() -> Handle | None:
    """The first chosen model that has a memory; if none has, how to get one."""
    opened = runner.handles(runner.chosen_models())
    found = next((handle for handle in opened if handle.engram_layers), None)
    if found is None:
        st.info(
            f"{labels.markdown(opened[0].name)} has no memory to write to: choose one that has, such as engram-mini, "
            "or give it an empty one with `engram-lab graft --base MODEL --layer N --out DIR` and choose that folder."
        )
    return found


# --- Users and their table -------------------------------------------------------------------------------------------


def _add_user(handle: Handle) -> None:
    name = st.session_state["facts_new_user"].strip()
    if name and name not in users(handle):
        users(handle)[name] = User(name, apart(handle)[:FIRST])
        st.session_state.update({"facts_new_user": "", "facts_user": name, "facts_said": None})


def _remove_user(handle: Handle, name: str) -> None:
    del users(handle)[name]
    st.session_state["facts_user"] = next(iter(users(handle)))
    st.session_state["facts_said"] = None


def the_user(handle: Handle) -> User:
    """The users with how much each has written, and the chosen one; LabError for a name that is taken."""
    known = users(handle)
    take_up(handle, known)
    names = list(known)
    page.keep_within("facts_user", names, names[0])

    def amount(own: User) -> str:
        written = own.written.get(handle.fingerprint)
        return f"{len(written.overlay.facts)} facts written" if written else "nothing written"

    with st.container(horizontal=True, vertical_alignment="bottom"):  # wraps where the window is narrow
        chosen = st.radio(
            "User", names, key="facts_user", captions=[amount(own) for own in known.values()], horizontal=True
        )
        st.text_input(
            "New user", key="facts_new_user", placeholder="a name, then Enter", on_change=_add_user, args=(handle,),
            width=190,
        )  # fmt: skip
        st.button(
            f"Remove {labels.markdown(chosen)}", key="facts_remove", icon=":material/person_remove:",
            on_click=_remove_user, args=(handle, chosen), disabled=len(known) < 2,
            help="With the facts and what is written; one user has to stay.",
        )  # fmt: skip
    taken = st.session_state["facts_new_user"].strip()
    if taken:  # a new one is taken up, and the box emptied, before this
        raise LabError(f"There is a user {taken} already: give another name.")
    known[chosen].ten = apart(handle)[:FIRST]
    return known[chosen]


def the_table(user: User) -> tuple[StatedFact, ...]:
    """The editable table, and what fills it; LabError for a file or a line that is none."""
    box = st.container()
    persona = facts_files.persona()
    offered = (
        (FIRST, "Ten facts", user.ten, "The first ten that each have an address of their own."),
        (len(persona), "All fifty", persona, "Of those that share an address the model can say only one."),
    )
    with st.container(horizontal=True, vertical_alignment="bottom"):
        for count, words, facts, which in offered:
            st.button(
                words, key=f"facts_{count}", icon=":material/playlist_add:", on_click=user.take, args=(facts,),
                help=f"Of the facts about Maya that we wrote, with paraphrases and neighbours. {which}",
            )  # fmt: skip
        st.download_button(
            "This table", facts_files.written(user.now or user.facts), facts_files.FILE, "application/x-ndjson",
            key="facts_save", on_click="ignore", icon=":material/download:",
        )  # fmt: skip
    with st.expander("Bring your own facts"):
        file = st.file_uploader(
            'A .jsonl with "trigger" and "answer" (and "paraphrases", "neighbours", "composition") on each line, or a '
            ".csv with these columns",
            type=["jsonl", "csv"],
            key=f"facts_file.{user.name}",
        )
    if file is not None and file.file_id != user.file:
        user.take(facts_files.read(file.getvalue(), file.name))
        user.file = file.file_id
    key = f"facts_table.{user.name}.{user.version}"
    if key not in st.session_state:  # it was not shown for a while: its edits are in `now` alone
        user.facts = user.now or user.facts
    given = pd.DataFrame([(own.trigger, own.answer) for own in user.facts], columns=COLUMNS, dtype="string")
    typed = box.data_editor(
        given, key=key, num_rows="dynamic", hide_index=True, height=300,
        column_config={
            "trigger": st.column_config.TextColumn(width=320, help="What is to be answered, as it is typed."),
            "answer": st.column_config.TextColumn(help="What follows it; a space before it is added."),
        },
    )  # fmt: skip
    user.now = stated([tuple(row) for row in typed.fillna("").itertuples(index=False)], user.facts)
    return user.now


def stated(rows: Sequence[Sequence[str]], known: Sequence[StatedFact]) -> tuple[StatedFact, ...]:
    """Rows (trigger, answer) of the table as facts; empty rows are left out. DataError for half a row.

    A trigger that is known keeps its paraphrases and neighbours; with another answer it loses what needs the old one.
    """
    by_trigger = {own.trigger: own for own in known}
    found = []
    for n, (trigger, answer) in enumerate(((str(a).strip(), str(b).strip()) for a, b in rows), 1):
        if bool(trigger) != bool(answer):
            missing = "answer" if trigger else "trigger"
            raise DataError(f"Row {n} of the table has no {missing}: fill it in, or delete the row.")
        if not trigger:
            continue
        answer, own = behind(trigger, answer), by_trigger.get(trigger)
        same = own is not None and own.answer == answer
        found.append(
            own if own is not None and same
            else StatedFact(trigger, answer) if own is None
            else StatedFact(trigger, answer, own.paraphrases, own.neighbours, None, own.id)
        )  # fmt: skip
    return tuple(found)


def the_writing(handle: Handle, user: User) -> Writing:
    """How the facts are to be written."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        layers = list(handle.engram_layers)
        page.keep_within("facts_layer", layers, layers[-1])
        layer = st.selectbox(
            "Memory layer", layers, index=len(layers) - 1, key="facts_layer", bind="query-params", width=150,
            help="The block that reads the rows; the deepest one by default.",
        )  # fmt: skip
        method = asked.choice(METHOD)
        steps = asked.number(STEPS, width=130, disabled=method != "optimised")
    return Writing(user.name, int(layer), method, steps)


def check_request(handle: Handle, facts: tuple[StatedFact, ...], writing: Writing) -> CheckConfig:
    """The request of "facts check", with unrelated texts. Raises LabError."""
    ours = texts.held_out()
    first = min(UNRELATED_TEXTS.default, len(ours))
    n = asked.number(UNRELATED_TEXTS, high=len(ours), value=first, width=160)
    return CheckConfig((handle.name,), facts, writing, ours[:n])


# --- Writing and undoing ---------------------------------------------------------------------------------------------


def check(handle: Handle, user: User) -> tuple[Report, Written] | None:
    """The report of what was asked for, and the overlay; None if nothing was, or it was cancelled. Raises LabError."""
    config = user.asked.get(handle.fingerprint)
    if config is None:
        return None
    try:
        report = runner.run("facts check", config)
        if report is None:
            return None
        if handle.fingerprint not in user.written:
            with st.spinner("Keeping the rows …"), runner.turn([handle]):
                found = _reopened(handle, config, user.kept) if user.kept is not None else None
                user.written[handle.fingerprint] = found or _written(handle, config)
            st.rerun()  # the list of users stands above
    except LabError:
        user.forget(handle)
        raise
    return report, user.written[handle.fingerprint]


def _written(handle: Handle, config: CheckConfig) -> Written:
    """The overlay of a request, with the state of the model before it."""
    overlay, _ = write(handle, config.facts, config.writing)
    return _beside(handle, config, overlay)


def _beside(handle: Handle, config: CheckConfig, overlay: Overlay) -> Written:
    """An overlay with the state of the model without it."""
    facts = tuple(own.fact for own in config.facts)
    undone = [fact for fact in facts if fact not in overlay.facts]
    return Written(config, facts, overlay, table_digest(handle), logit_digests(handle, Stack(), facts), undone)


def _reopened(handle: Handle, config: CheckConfig, raw: bytes) -> Written | None:
    """What was kept as written, if it is what this request writes into this very model; else None."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "overlay"
        file.write_bytes(raw)
        try:
            overlay = load_overlay(file)
            check_overlay(handle, overlay)
        except LabError:
            return None
    layer = handle.engram_layers[-1] if config.writing.layer is None else config.writing.layer
    same = (overlay.user, overlay.method, list(overlay.layers)) == (config.writing.user, config.writing.method, [layer])
    facts = {own.fact for own in config.facts}
    return _beside(handle, config, overlay) if same and overlay.facts and facts.issuperset(overlay.facts) else None


def logit_digests(handle: Handle, overlays: Overlay | Stack, facts: Sequence[Fact]) -> tuple[str, ...]:
    """SHA-256 of all logits of each fact's trigger, with the overlays; the same batches for the same facts."""
    coded = encode_facts(handle, facts)
    prompts, patch = [coded[fact][0] for fact in facts], prepare(handle, overlays)
    found = [""] * len(facts)
    for numbers, ids in batches(handle, prompts):
        logits = logits_of(handle, ids, patch).cpu()
        for row, n in enumerate(numbers):
            raw = logits[row, : len(prompts[n])].contiguous().view(torch.uint8).numpy().tobytes()
            found[n] = hashlib.sha256(raw).hexdigest()
    return tuple(found)


@dataclass(frozen=True)
class Said:
    """What undoing gave: "success" only where all bits are those from before."""

    kind: str
    text: str


def edited(handle: Handle, overlays: Stack, ids: Sequence[int]) -> torch.Tensor:
    """How many of the rows that each position of ids [pos] reads are replaced, [pos] int64."""
    read = addresses(handle, [list(ids)])[:, 0].cpu()  # [layer, pos, order*head]
    hits = [torch.isin(read[handle.engram_layers.index(n)], overlays.rows(n)[0]).sum(-1) for n in overlays.layers()]
    return torch.stack(hits).sum(0) if hits else torch.zeros(len(ids), dtype=torch.int64)


def undo_fact(handle: Handle, user: User, fact: Fact) -> Said:
    """Take one fact out and compare every bit. LabError if it is not written."""
    own = user.written[handle.fingerprint]
    stack = Stack((own.overlay,)).without(user.name, fact)
    if not stack.overlays:
        return undo_users(handle, [user])
    before, after = (logit_digests(handle, one, own.facts) for one in (own.overlay, stack))
    n = own.facts.index(fact)
    others = [k for k, other in enumerate(own.facts) if other in stack.overlays[0].facts]
    kept = sum(before[k] == after[k] for k in others)
    tables = table_digest(handle) == own.tables
    reads = int(edited(handle, stack, encode_facts(handle, [fact])[fact][0]).sum())
    back = after[n] == own.bare[n]
    own.overlay = stack.overlays[0]
    own.undone.append(fact)
    said = f"{fact} is undone. {_tables(own.tables, tables)} "
    if back:
        said += "The logits of its trigger have the bits from before writing"
    elif reads:
        said += (
            f"Its trigger still reads {reads} rows that other facts have, so that its logits are not those from before"
        )
    else:
        said += "The logits of its trigger are not those from before, though it reads no row of another fact"
    said += f"; of {len(others)} other triggers {kept} have the bits from just before undoing."
    broken = not tables or (not back and not reads)
    return Said("error" if broken else "success" if back and kept == len(others) else "info", said)


def undo_users(handle: Handle, gone: Sequence[User]) -> Said:
    """Take all facts of these users out of the stack of all, and compare what they now get with what was before."""
    stack = Stack(tuple(own.written[handle.fingerprint].overlay for own in gone))
    for user in gone:
        stack = stack.without(user.name)
    equal = total = 0
    tables, first = True, gone[0].written[handle.fingerprint].tables
    for user in gone:
        own = user.written[handle.fingerprint]
        equal += sum(a == b for a, b in zip(logit_digests(handle, stack, own.facts), own.bare, strict=True))
        total += len(own.facts)
        tables &= table_digest(handle) == own.tables
        user.forget(handle)
    names = " and ".join(user.name for user in gone)
    return Said(
        "success" if tables and equal == total else "error",
        f"Everything of {names} is undone. {_tables(first, tables)} Of {total} triggers {equal} have, in every logit, "
        "the bits from before writing.",
    )


def _tables(digests: Sequence[str], same: bool) -> str:
    shown = hashlib.sha256("".join(digests).encode()).hexdigest()[:12]
    many, has = ("The table", "has") if len(digests) == 1 else (f"The {len(digests)} tables", "have")
    return f"{many} {'still' if same else 'no longer'} {has} the digest {shown}."


def the_undo(handle: Handle, user: User, own: Written) -> None:
    """Buttons that undo, and the download of what is written."""
    with st.container(horizontal=True, vertical_alignment="bottom"):
        facts = list(own.overlay.facts)
        page.keep_within("facts_undo", facts, facts[0])
        fact = st.selectbox("Written fact", facts, key="facts_undo", width=420)
        undone: Callable[[], Said] | None = None
        if st.button("Undo this fact", key="undo_fact", icon=":material/undo:"):
            undone = partial(undo_fact, handle, user, fact)
        if st.button(f"Undo {labels.markdown(user.name)}", key="undo_user", icon=":material/person_off:"):
            undone = partial(undo_users, handle, [user])
        if st.button("Undo everything", key="undo_all", icon=":material/delete_sweep:", help="Of all users, here."):
            every = [other for other in users(handle).values() if handle.fingerprint in other.written]
            undone = partial(undo_users, handle, every)
        st.download_button(
            "Overlay", own.overlay.to_bytes, f"{user.name}.safetensors", "application/octet-stream",
            key="facts_overlay", on_click="ignore", icon=":material/download:",
            help=f"{own.overlay.n_rows} rows with their facts, for this very model.",
        )  # fmt: skip
    if undone is not None:
        with runner.turn([handle]):
            st.session_state["facts_said"] = undone()
        st.rerun()  # the list of users stands above


def what_was_undone() -> None:
    """The last undo, in a sentence."""
    said: Said | None = st.session_state.get("facts_said")
    if said is not None:
        shown = {"success": st.success, "info": st.info, "error": st.error}[said.kind]
        shown(labels.markdown(said.text), icon=":material/check:" if said.kind == "success" else None)


def begin(handle: Handle, user: User, config: CheckConfig) -> None:
    """Ask for facts to be written, in place of what is."""
    user.forget(handle)
    user.asked[handle.fingerprint] = config
    st.session_state["facts_said"] = st.session_state["cancelled"] = None


def what_it_shows(own: Written, config: CheckConfig) -> None:
    """What has changed since the check that is shown."""
    if own.undone:
        st.caption(
            f"{len(own.undone)} of {len(own.facts)} facts undone since: the check below is of all of them as they were "
            "written, the view of any prompt and the overlay are of those that are left."
        )
    if own.config.to_dict() != config.to_dict():
        st.caption("The table or the settings have changed since: write again to check them.")
