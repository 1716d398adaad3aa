"""The first page: what an Engram is, the two models that ship, and a first experiment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import streamlit as st

from engram_lab.lab.app import catalogue, runner
from engram_lab.lab.ask import texts
from engram_lab.lab.command import card
from engram_lab.lab.draw import diagram, labels
from engram_lab.lab.draw import training as training_figures
from engram_lab.pages import sessions_list

PAGE = {
    "title": "Start",
    "icon": "explore",
    "section": "",
    "place": 0,
    "models": False,
}


def training_of(name: str) -> dict[str, Any]:
    """How a shipped model was trained: the points recorded on the way."""
    training: dict[str, Any] = json.loads((card.MODELS / name / "training.json").read_text(encoding="utf-8"))
    return training


def show_card(name: str, facts: dict[str, Any], config: dict[str, Any]) -> None:
    """One model: what it is, how large, how good."""
    parameters = facts["parameters"]
    memory = "memory in blocks " + " and ".join(map(str, config["memory_layers"]))
    with st.container(border=True, height="stretch"):
        st.markdown(f"#### {labels.markdown(name)}")
        st.caption(
            f"{config['n_layers']} Llama blocks, {config['d_model']} wide; "
            + (memory if parameters["table"] else "no memory")
        )
        with st.container(horizontal=True):
            st.metric("Held-out loss", f"{facts['held_out_loss_nats']:.3f}", help="Nats a token.")
            active = f"{parameters['active_per_token'] / 1e6:.2f} M"
            st.metric("Active", active, help="Parameters used for a token.")
        tables = f"{parameters['table'] / 1e6:.2f} M parameters in tables; " if parameters["table"] else ""
        st.caption(
            f"{tables}{facts['tokens'] / 1e6:.2f} M training tokens, {facts['steps']:,} steps; "
            f"loss on {facts['held_out_tokens']:,} held-out tokens"
        )


def open_lens(**values: str) -> None:
    """Fill in the lens page's request and go there."""
    st.session_state.update(values)
    st.switch_page(Path(__file__).with_name("lens.py"))


st.title("Engram Lab")
st.markdown(
    "Some language models carry an **Engram**: a memory that is looked up, not computed. This lab shows what "
    "such a memory does to a model's predictions, layer by layer, next to a twin that has none."
)
st.image(
    diagram.engram(runner.mode()),
    width=880,
    alt="The last two and three tokens are hashed to rows of a table; a gate weighs them and adds them to the stream.",
)
st.markdown(
    "The last two and three tokens are hashed to rows of large tables. What the rows hold is added to the residual "
    "stream, as far as a **gate** lets it: it weighs what was read against what the stream already holds. So common "
    "phrases need not be worked out by the lower layers. If that is true, an Engram should **settle its prediction "
    "earlier** than its twin. The logit lens puts that to the test."
)
st.subheader("What you can ask")
for page in catalogue.pages():
    if page.asks:
        with st.container(horizontal=True, vertical_alignment="center", gap="small"):
            with st.container(width=230):
                st.page_link(page.file)
            st.markdown(page.asks)
st.subheader("A first experiment")
st.markdown("Pick a prompt, and see at which layer each model knows how it goes on.")
examples = texts.examples()
columns = st.columns(3)
for n, example in enumerate(examples[:6]):
    with columns[n % 3].container(border=True, height="stretch"):
        st.markdown(f"**{labels.markdown(example['title'])}**  \n{labels.markdown(example['prompt'])} …")
        if st.button("Look inside", key=f"example_{n}", icon=":material/arrow_forward:"):
            open_lens(prompt=example["prompt"], mode=texts.ONE)
if st.button("Test the claim on our held-out sentences", key="open_set", icon=":material/query_stats:"):
    open_lens(mode=texts.SET)

if sessions_list.examples():
    st.subheader("Experiments to open")
    st.markdown("Kept by us, with notes on what to look at. Opening one shows what was kept; you can compute it again.")
    for column, path in zip(st.columns(len(sessions_list.examples())), sessions_list.examples(), strict=True):
        with column.container(border=True, height="stretch"):
            name, about = sessions_list.example(path)
            st.markdown(f"**{labels.markdown(name)}**  \n{labels.markdown(about)}")
            if st.button("Open", key=f"open_{path.stem}", icon=":material/bookmark:"):
                sessions_list.take_example(path)
                st.switch_page(Path(__file__).with_name("sessions.py"))

st.subheader("The models that ship")
cards = card.cards()
if not cards:
    st.info("No model ships with this installation, so there is no card to show.", icon=":material/info:")
else:
    st.markdown(
        "Trained by us, from nothing, on the same text in the same order, with the same blocks: equal computation "
        "for each token. The Engram has its tables on top. `early` is the Engram on the way, when its loss was "
        "that of the finished twin."
    )
    training = {name: training_of(name) for name in cards}
    for column, name in zip(st.columns(len(cards)), cards, strict=True):
        with column:
            show_card(name, cards[name], training[name]["config"])
    first = next(iter(cards))
    with st.expander("What they cannot do"):
        st.markdown("\n".join(f"- {labels.markdown(limit)}" for limit in cards[first]["limits"]))
        st.caption(labels.markdown(f"Text: {cards[first]['data']}"))
    st.subheader("How the memory learned")
    mode = runner.mode()
    finished = {name: training[name] for name in cards if not name.endswith("-early")}
    with st.container(horizontal=True):  # side by side where there is room
        loss = training_figures.loss_over_training(finished, mode)
        st.plotly_chart(loss, theme=None, width=470, key="loss")
        curves = training_figures.lens_over_training(first, training[first], mode)
        st.plotly_chart(curves, theme=None, width=470, key="kl")
    st.plotly_chart(training_figures.gates_over_training(first, training[first], mode), theme=None, key="gates")
