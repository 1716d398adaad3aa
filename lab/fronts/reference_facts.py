"""The reference of the probes of written facts. What each figure is, their modules' DEFINITIONS say."""

from __future__ import annotations

from engram_lab.lab.fronts.entry import LORA, ROME, USER_AS_ENGRAM, Entry

WRITING = (
    r"e^{(0)} = s\, W_V^{+}\,\frac{\partial z_y}{\partial h_\text{last}},\qquad"
    r"\min_e\; -\ln p(y \mid \text{trigger};\, e) + \lambda\,\frac{\lVert e - e^{(0)}\rVert^2}{\lVert e^{(0)}\rVert^2}"
)
WRITTEN = (
    ("e", "the vectors of the rows that the trigger addresses, one behind the other; by formula $e^{(0)}$", ""),
    ("s", r"the scale with which $\lVert W_V e^{(0)}\rVert$ is a multiple of the residual's length", ""),
    ("W_V^{+}", "pseudo-inverse of the memory's value matrix", ""),
    ("z_y", "logit of the answer's token $y$", "logits"),
    (r"h_\text{last}", "the residual after the last block", ""),
    ("p", "what the model predicts with these rows", "probability"),
    (r"\lambda", "pull back to the start, `--pull`", "nats"),
)

FACTS = {
    "facts check": Entry(
        page="facts",
        asks="Can a user's facts be written into single rows, what else changes, and does undoing give every bit back?",
        formula=WRITING
        + r",\qquad\mathrm{KL} = \sum_x p_\text{before}(x)\, \ln \frac{p_\text{before}(x)}{p_\text{after}(x)}",
        symbols=(*WRITTEN, (r"\mathrm{KL}", "how far a prediction changed, where it may", "nats")),
        sources=(USER_AS_ENGRAM, ROME),
        controls="Paraphrases and neighbours; other prompts at the same address; texts that read no edited row, by "
        "equal bits; other users in one batch; undoing, by the tables' SHA-256 and by the logits' bits.",
        not_shown="that nothing else changes: texts that read an edited row do, and anyone who says a trigger gets the "
        "answer. Equal bits before a read are what causality gives any model. Facts about one invented person, worded "
        "by us, are no sample of what users say.",
        example="--model engram-mini --n-texts 20 --json -",
    ),
    "facts layers": Entry(
        page="facts",
        asks="In which memory layer do facts have to stand to be read?",
        formula=WRITING,
        symbols=WRITTEN,
        sources=(USER_AS_ENGRAM, ROME),
        controls="The same facts, written the same way, one memory layer after the other; the loss before each step.",
        not_shown="what a layer is for: rows are trained anew for each, so that a layer may look as good as another "
        "with a quite different vector.",
        example="--model engram-mini --json -",
    ),
    "facts density": Entry(
        page="facts",
        asks="How many facts does a memory take before they get in each other's way, and what do two users do?",
        formula=(
            r"\text{top-1}(n) = \frac1F\sum_{f=1}^{F}\Big[\forall t:\ y_{f,t} = "
            r"\arg\max_v\, p\big(v \mid \text{trigger}_f,\, y_{f,<t};\, E_{n}(f)\big)\Big]"
        ),
        symbols=(
            ("n", "facts that are written together", ""),
            ("F", "facts that are asked, each in the one group of $n$ that has it", ""),
            ("y_{f,t}", "token $t$ of the answer of fact $f$", ""),
            ("E_n(f)", "the rows that the group of fact $f$ was written into", ""),
            (r"\text{top-1}", "share of facts that the model says", "0 to 1"),
        ),
        sources=(USER_AS_ENGRAM,),
        controls="Facts with an alias in their group (one address, two answers) apart from the rest; two users with "
        "other facts, with the same triggers, in either order, and each with own rows in one batch.",
        not_shown="a capacity: which facts meet depends on the draw of groups, on how alike the triggers are, and on "
        "the size of the tables.",
        example="--model engram-mini --size 1 --size 10 --json -",
    ),
    "facts alternatives": Entry(
        page="facts",
        asks="What do rows do that LoRA, a prompt or retrieval do not, and the other way round?",
        formula=(
            r"\mathrm{size} = \frac1T\sum_t \big|\ell_t^{\text{method}} - \ell_t^{\text{model}}\big|,\qquad"
            r"\mathrm{more} = \frac{\mathrm{size}}{\mathrm{size}_\text{rows}},\qquad W' = W + 2\,BA"
        ),
        symbols=(
            (r"\ell_t", "cross-entropy of token $t$ of unrelated text", "nats"),
            ("T", "its tokens", ""),
            (r"\mathrm{size}", "how much a method changes that text, either way", "nats a token"),
            (r"\mathrm{more}", "against the rows", "times"),
            ("W,\\ W'", "a projection of queries, keys or values, and with its adapter", ""),
            ("B,\\ A", "the adapter's two matrices of low rank", ""),
        ),
        sources=(USER_AS_ENGRAM, LORA),
        controls="The model as it is; LoRA stopped at the rows' own loss; retrieval by TF-IDF with the same facts; "
        "paraphrases; intervals in pairs.",
        not_shown="the best that each could do: ranks, steps and rate of LoRA are those of the request, and prompt and "
        "retrieval depend on what a small model can read. Text behind a prompt stands at other positions, so that its "
        "bits cannot be equal.",
        example="--model engram-mini --rank 8 --n-texts 10 --json -",
    ),
}
