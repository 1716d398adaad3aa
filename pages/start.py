"""The first page: what an Engram is, the two models that ship, and a first experiment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import streamlit as st

from lab import card, labels, runner, texts, training_figures

DIAGRAM = """
<div class="diagram"><svg viewBox="0 0 880 268" role="img" aria-label="The last two and three tokens are hashed to
rows of a table; the rows, weighted by a gate that looks at the residual stream, are added to it before attention.">
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0 L8 4 L0 8 Z"/></marker></defs>
<g><rect class="plain" x="20" y="22" width="52" height="30" rx="5"/><text class="token" x="46" y="42"
text-anchor="middle">the</text>
<rect class="plain" x="78" y="22" width="88" height="30" rx="5"/><text class="token" x="122" y="42"
text-anchor="middle">·capital</text>
<rect class="memory" x="172" y="22" width="46" height="30" rx="5"/><text class="token" x="195" y="42"
text-anchor="middle">·of</text>
<rect class="memory" x="224" y="22" width="56" height="30" rx="5"/><text class="token" x="252" y="42"
text-anchor="middle">·the</text>
<rect class="memory" x="286" y="22" width="80" height="30" rx="5"/><text class="token" x="326" y="42"
text-anchor="middle">·United</text></g>
<path d="M224 60 V68 H366 V60"/><text class="quiet" x="295" y="85" text-anchor="middle">last two tokens</text>
<path d="M172 94 V102 H366 V94"/><text class="quiet" x="269" y="119" text-anchor="middle">last three tokens</text>
<path d="M374 68 C430 68 430 84 470 84" marker-end="url(#tip)"/>
<path d="M374 102 C430 102 430 94 470 94" marker-end="url(#tip)"/><text class="quiet" x="420" y="60"
text-anchor="middle">hashed</text>
<g><rect class="memory" x="478" y="20" width="112" height="132" rx="6"/>
<path d="M478 42 H590 M478 64 H590 M478 108 H590 M478 130 H590"/>
<rect class="memory" x="478" y="64" width="112" height="22"/><rect class="memory" x="478" y="108" width="112"
height="22"/><text class="quiet" x="534" y="168" text-anchor="middle">tables of rows</text></g>
<path d="M598 88 H668" marker-end="url(#tip)"/>
<g><circle class="gate" cx="700" cy="88" r="26"/><text x="700" y="93" text-anchor="middle">gate</text></g>
<text class="quiet" x="740" y="84">0 shut</text><text class="quiet" x="740" y="102">1 open</text>
<path d="M660 224 C660 180 672 150 686 118" marker-end="url(#tip)" stroke-dasharray="4 4"/>
<path d="M712 114 V212" marker-end="url(#tip)"/>
<path d="M20 226 H700" marker-end="url(#tip)"/><circle class="gate" cx="712" cy="226" r="11"/>
<text x="712" y="231" text-anchor="middle">+</text><path d="M724 226 H760" marker-end="url(#tip)"/>
<rect class="plain" x="766" y="208" width="98" height="36" rx="6"/><text x="815" y="231"
text-anchor="middle">attention …</text>
<text class="quiet" x="20" y="216">residual stream at “·United”, on its way into a block with a memory</text>
<text class="quiet" x="20" y="250">the dense twin: the same blocks, only this line</text>
</svg></div>
"""

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
            st.metric("Active", f"{parameters['active_per_token'] / 1e6:.2f} M", help="Parameters used for a token.")
            st.metric("Tables", f"{parameters['table'] / 1e6:.2f} M", help="Parameters that are rows to look up.")
        st.caption(
            f"{facts['tokens'] / 1e6:.2f} M training tokens, {facts['steps']:,} steps; "
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
st.html(DIAGRAM)
st.markdown(
    "The last two and three tokens are hashed to rows of large tables. What the rows hold is added to the residual "
    "stream, as far as a **gate** lets it: it compares what was read with what the model is about to say. So common "
    "phrases need not be worked out by the lower layers. If that is true, an Engram should **settle its prediction "
    "earlier** than its twin. The logit lens puts that to the test."
)

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
    left, right = st.columns(2)
    finished = {name: training[name] for name in cards if not name.endswith("-early")}
    left.plotly_chart(training_figures.loss_over_training(finished, mode), theme=None, key="loss")
    right.plotly_chart(training_figures.lens_over_training(first, training[first], mode), theme=None, key="kl")
    st.plotly_chart(training_figures.gates_over_training(first, training[first], mode), theme=None, key="gates")
