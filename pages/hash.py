"""From typed text to rows of the memory, step by step; and the published example worked through."""

from __future__ import annotations

import numpy as np
import pandas as pd
import streamlit as st
import torch
from torch import Tensor

from engram_lab.lab.app import page, runner
from engram_lab.lab.draw import hash_steps, labels
from engram_lab.models import ngrams
from engram_lab.models.errors import LabError
from engram_lab.models.hashing import NgramHash
from engram_lab.models.tables import memories

PAGE = {
    "title": "Hash",
    "icon": "tag",
    "section": "Memory",
    "place": 6,
    "asks": "How does a text become rows, step by step?",
}


def main() -> None:
    """The model's own hash, where there is one, and the example, which needs no model."""
    st.title("Hash")
    st.markdown(
        "The memory finds its rows without looking at meaning: tokens become **canonical ids**, the last few of them "
        "are multiplied and XORed into one **mix**, and the mix modulo a **prime** is the row. Here is every step."
    )
    prompt = page.prompt_box()
    try:
        own_hash(prompt)
    except LabError as error:
        st.error(f"{labels.markdown(str(error))} The example below needs no model.", icon=":material/error:")
    example()


def own_hash(prompt: str) -> None:
    """Every step for the chosen position and layer of the chosen model."""
    place = page.choose_place(prompt)
    handle, name_of = place.handle, page.namer(place.handle)
    config = handle.model.config
    with runner.turn([handle], "the hash of this prompt"):
        lookback = ngrams.lookbacks(handle, torch.tensor([place.ids]))[0]
    names = ngrams.canonical_texts(handle, lookback.flatten().tolist())
    canonical_map = ngrams.engram_model(handle).canonical_ids.cpu().numpy()
    memory = memories(handle)[handle.engram_layers.index(place.layer)]

    st.subheader("1 · Raw tokens to canonical ids")
    st.markdown(
        "Tokens whose texts are alike after normalising (case, accents, surrounding spaces and Unicode forms are taken "
        f"off) share one canonical id: {len(handle.tokenizer):,} raw ids become "
        f"{config.engram_compressed_vocab_size:,}. Tokens that are no whole characters keep an id of their own."
    )
    # One row for each position: what it is, what it becomes, and what else becomes that.
    st.dataframe(
        pd.DataFrame(
            {
                "position": range(len(place.ids)),
                "raw id": list(place.ids),
                "token": [name_of(i) for i in place.ids],
                "canonical text": [labels.label(names[i].encode()) for i in lookback[:, 0].tolist()],
                "canonical id": lookback[:, 0].tolist(),
                "raw tokens that share it": [
                    hash_steps.sharers(np.flatnonzero(canonical_map == i).tolist(), name_of)
                    for i in lookback[:, 0].tolist()
                ],
            }
        ),
        hide_index=True,
        key="canonical",
    )

    st.subheader("2 · What each position looks back to")
    pad = int(canonical_map[config.engram_pad_token_id])
    st.markdown(
        f"The n-grams of a position end with it, up to {config.engram_max_ngram_size} tokens. Before the start of the "
        f"text stands the canonical id {pad} of the padding token."
    )
    st.dataframe(
        pd.DataFrame(
            {
                "position": range(len(place.ids)),
                **{
                    hash_steps.back_name(back): [
                        f"{labels.label(names[i].encode())}  ({i})" for i in lookback[:, back].tolist()
                    ]
                    for back in range(lookback.shape[1])
                },
            }
        ),
        hide_index=True,
        key="lookback",
    )

    st.subheader(f"3 · Multiply and XOR: position {place.position}, layer {place.layer}")
    st.markdown(
        "Every layer has its own odd multipliers, drawn from its number and the seed "
        f"{config.engram_seed}. All heads of an order share one mix."
    )
    steps_of(memory.hash, lookback, place.position)


def steps_of(hash_: NgramHash, lookback: Tensor, position: int, key: str = "own") -> None:
    """Products, mixes and rows of one position of lookback [pos, back]."""
    steps = ngrams.hash_steps(hash_, lookback)
    st.code(hash_steps.working(hash_, lookback, position), language="text")
    st.markdown(
        "The mix modulo the head's number of rows is the row in the head; the heads lie one behind the other in one "
        "table, so the rows of those before it are added."
    )
    st.dataframe(
        pd.DataFrame(hash_steps.rows_of(hash_, steps, position)), hide_index=True, height="content", key=f"{key}_rows"
    )
    st.markdown(f"Position {position}: **{hash_steps.in_words(steps, position)}**")


def example() -> None:
    """The published example, or the user's own numbers."""
    st.header("The published example, worked through")
    st.markdown("Small numbers that can be checked by hand. Change any of them.")
    a, b, c, d = st.columns([3, 2, 3, 1])
    typed = {
        "ids": a.text_input("Canonical ids", hash_steps.EXAMPLE["ids"], key="ids", bind="query-params"),
        "multipliers": b.text_input(
            "Multipliers", hash_steps.EXAMPLE["multipliers"], key="multipliers", bind="query-params",
            help="The first is that of the token itself, the next that of the one before it.",
        ),
        "sizes": c.text_input(
            "Table sizes", hash_steps.EXAMPLE["sizes"], key="sizes", bind="query-params",
            help="Rows of each head: those of the 2-grams, a semicolon, those of the 3-grams.",
        ),
        "pad": d.text_input("Padding", hash_steps.EXAMPLE["pad"], key="pad", bind="query-params"),
    }  # fmt: skip
    try:
        hash_, lookback = hash_steps.example(**typed)
    except LabError as error:
        st.error(labels.markdown(str(error)), icon=":material/error:")
        return
    odd = hash_steps.not_prime(typed["sizes"])
    if odd:
        st.caption(f"{', '.join(map(str, odd))}: no prime. The head sizes of a model are primes, all different.")
    last = len(lookback) - 1
    page.keep_within("at", range(len(lookback)), last)
    at = st.number_input("Position in the example", 0, last, last, key="at", bind="query-params", width=220)
    steps_of(hash_, lookback, int(at), "example")
    with st.expander("Every position of the example", expanded=True):
        steps = ngrams.hash_steps(hash_, lookback)
        st.dataframe(pd.DataFrame(hash_steps.positions_of(steps, lookback)), hide_index=True, key="example_positions")


main()
