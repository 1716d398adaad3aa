"""What the reference says of one probe, and the papers that several of them name."""

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
