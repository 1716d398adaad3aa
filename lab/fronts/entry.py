"""What the reference says of one probe, and what it says of several: papers, formulas, symbols."""

from __future__ import annotations

from dataclasses import dataclass


def arxiv(number: str, title: str) -> str:
    """A Markdown link to a paper."""
    return f"[{title}, arXiv {number}](https://arxiv.org/abs/{number})"


ENGRAM = arxiv("2601.07372", "Engram")
USER_AS_ENGRAM = arxiv("2606.19172", "User as Engram")
NOTES = arxiv("2606.17107", "Models take notes at prefill")
TUNED_LENS = arxiv("2303.08112", "Belrose et al. 2023, the tuned lens")
LOGIT_LENS = "nostalgebraist 2020, the logit lens"
CKA = arxiv("1905.00414", "Kornblith et al. 2019, CKA")
UNBIASED = arxiv("2010.15327", "Nguyen, Raghu and Kornblith 2021, CKA by unbiased HSIC")
HSIC = "Song et al. 2012, J. Mach. Learn. Res. 13, the unbiased estimator of HSIC"
ROME = arxiv("2202.05262", "Meng et al. 2022, ROME")
LORA = arxiv("2106.09685", "Hu et al. 2021, LoRA")
ROPE = arxiv("2104.09864", "Su et al. 2021, RoFormer")

# What several probes of a cache say of a score and of its recovery.
SCORE = r"\ s = \mathrm{logit}(\text{new answer}) - \mathrm{logit}(\text{old answer})"
RECOVERY = (
    r"\mathrm{recovery} = \frac{s_\text{edited} - s_\text{old}}{s_\text{new} - s_\text{old}},\qquad" + SCORE
)  # fmt: skip
RATIO = ("\\mathrm{recovery}", "how much of the new answer an edit brings", "0: as the old prompt, 1: as the new")
LOGITS = ("s", "the score: by how much the new answer leads the old one at the last token, by first tokens", "logits")
CLEAN = (r"s_\text{old},\ s_\text{new}", "the score in the clean runs of the old and the new prompt", "logits")
ORACLE = "The clean runs of both prompts, first of all: where the model gets one wrong, no claim is made (“oracle”). "

# How a fact is written: formula and symbols.
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

# What several probes' DEFINITIONS have in common: of the effect of an edit, and of facts that were written.
EFFECTS = {
    "score": "Logit of the new answer's first token minus that of the old answer's, at the last token.",
    "recovery": "(edited score - old score) / (new score - old score): 0 is the old prompt's run, 1 the new one's.",
    "flip": "Whether the leader of the two answers is another one than in the old prompt's clean run.",
    "cosine": "Cosine of the edited run's logits with the reference's, over the whole vocabulary.",
    "kl": "KL(reference || edited) in nats over the whole vocabulary.",
    "oracle": "The new answer leads the old one in the new prompt's clean run, and the old one in the old prompt's.",
}
FACTS = {
    "top-1": "Share of facts whose answer the model says: each token of it is the likeliest, given those before.",
    "top-5": "The same with each token among the five likeliest.",
    "probability": "Mean probability of the whole answer.",
    "efficacy": "Share of facts whose answer's first token is likelier than the rival: the token, other than it, that "
    "was likeliest before writing (ROME's efficacy score; an invented person has no true answer to be the rival).",
    "paraphrase": "Efficacy at other wordings of the facts, each with its own rival.",
    "specificity": "Share of neighbours, prompts about something else with an answer of their own, where that answer's "
    "first token is likelier than the fact's (ROME's neighbourhood score); not told where the two are one token.",
    "same answer": "Share of neighbours whose likeliest next token is the one from before.",
    "interval": "95 % percentile bootstrap over facts, drawn whole with all their items.",
}


def rows(formula: str) -> str:
    r"""A formula with each statement, parted by \qquad, in a row of its own; in one they are wider than a page."""
    return r"\begin{gathered} " + r" \\[6pt] ".join(formula.split(r"\qquad")) + r" \end{gathered}"


@dataclass(frozen=True)
class Entry:
    """One probe.

    `symbols` are (LaTeX, what it is, unit or range; "" for none), in the order of the formula. `meaning` is Markdown
    for the page, "" where the probe's DEFINITIONS say it. `controls` and `not_shown` are Markdown; `not_shown` goes on
    behind "It does not show". `sources` are Markdown. `example` are the options of a command that runs as it is.
    """

    page: str  # in pages/ and in the URL
    asks: str
    formula: str
    symbols: tuple[tuple[str, str, str], ...]
    sources: tuple[str, ...]
    controls: str
    not_shown: str
    example: str
    meaning: str = ""
