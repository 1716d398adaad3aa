"""The reference of the probes of a KV cache. What each figure is, their modules' DEFINITIONS say."""

from __future__ import annotations

from engram_lab.lab.fronts.entry import NOTES, Entry, arxiv

ROPE = arxiv("2104.09864", "Su et al. 2021, RoFormer")
SCORE = r"\ s = \mathrm{logit}(\text{new answer}) - \mathrm{logit}(\text{old answer})"
RECOVERY = (
    r"\mathrm{recovery} = \frac{s_\text{edited} - s_\text{old}}{s_\text{new} - s_\text{old}},\qquad" + SCORE
)  # fmt: skip
RATIO = ("\\mathrm{recovery}", "how much of the new answer an edit brings", "0: as the old prompt, 1: as the new")
LOGITS = ("s", "the score: by how much the new answer leads the old one at the last token, by first tokens", "logits")
CLEAN = (r"s_\text{old},\ s_\text{new}", "the score in the clean runs of the old and the new prompt", "logits")
ORACLE = "The clean runs of both prompts, first of all: where the model gets one wrong, no claim is made (“oracle”). "

CACHE = {
    "kv swap": Entry(
        page="kv",
        asks="How much of a prompt's keys and values must come from another for the answer to be the other's?",
        formula=RECOVERY,
        symbols=(RATIO, LOGITS, CLEAN, (r"s_\text{edited}", "the score on the edited cache", "logits")),
        sources=(NOTES,),
        controls=ORACLE + "Nothing swapped and everything swapped, which must give the clean runs bit for bit; as many "
        "positions at random.",
        not_shown="that a model needs what an edit replaces (see the knock-outs), or that keys and values that never "
        "occurred together mean what they meant apart: recovery may be below 0 or above 1. The best positions are "
        "chosen on the run that is shown, so they are an upper end. One scenario is an anecdote.",
        example="--model smollm2-135m --scenario home-city --align split --json -",
    ),
    "kv map": Entry(
        page="kv",
        asks="At which position, in which layer, does a cache hold the answer?",
        formula=(
            r"\mathrm{recovery}_{G,p} = \frac{s_{G,p} - s_\text{old}}{s_\text{new} - s_\text{old}},\qquad" + SCORE
        ),
        symbols=(
            RATIO,
            (
                "s_{G,p}",
                "the score with keys and values at position $p$ in the layers $G$ alone from the new",
                "logits",
            ),
            LOGITS,
            CLEAN,
        ),
        sources=(NOTES,),
        controls=ORACLE + "Positions at which both caches are equal, as before the field, change nothing.",
        not_shown="what several cells do together: each is swapped alone, and a map of small values may hide an answer "
        "that is held in many places at once.",
        example="--model smollm2-135m --scenario home-city --align split --groups 6 --json -",
    ),
    "kv knockout": Entry(
        page="kv",
        asks="Which part of a prompt's cache can the answer not do without?",
        formula=(
            r"\mathrm{margin} = \mathrm{logit}(\text{right answer}) - \mathrm{logit}(\text{other answer}),\qquad"
            r"\text{kept} \iff \mathrm{margin} > 0\ \text{and still the top token, if it was}"
        ),
        symbols=(
            (r"\mathrm{margin}", "by how much the right answer leads, by first tokens", "logits; below 0 it is wrong"),
            (r"\text{kept}", "whether the answer survives the knock-out", "yes or no"),
        ),
        sources=(NOTES,),
        controls=ORACLE + "Four ways to knock out: zero, the mean over positions, noise of the same mean and spread, "
        "another text's. Where they disagree, it is the way and not the part that broke the answer.",
        not_shown="that what survives is unused: a model may fall back on another place. A zeroed key still draws "
        "attention, so that knocking out many positions also dilutes the others.",
        example="--model smollm2-135m --scenario home-city --align split --json -",
    ),
    "kv erratum": Entry(
        page="kv",
        asks="Can a correction behind a stale cache stand for a new prefill, and what does that save?",
        formula=(
            RECOVERY.replace("edited", "corrected")
            + r",\qquad\mathrm{share} = \frac{\text{served}}{\text{served} + \text{computed}}"
        ),
        symbols=(
            RATIO,
            LOGITS,
            CLEAN,
            (r"s_\text{corrected}", "the score behind the correction and the question's end, said once more", "logits"),
            (r"\text{served},\ \text{computed}", "tokens from the cache, tokens that run", "tokens"),
        ),
        sources=(NOTES,),
        controls=ORACLE + "The question's end once more with no correction; an irrelevant correction; a wrong one; the "
        "new prompt with the same words behind it.",
        not_shown="that a longer conversation stays right: all wrong statements stay in the cache. The wording of the "
        "correction decides, and only one is tried at a time.",
        example="--model smollm2-135m --scenario home-city --align split --json -",
    ),
    "kv reasoning": Entry(
        page="kv",
        asks="With the field alone swapped, does a model that writes before it answers find the new answer?",
        formula=(
            r"\mathrm{recovery}_k = \frac{s_k - s_{\text{old},k}}{s_{\text{new},k} - s_{\text{old},k}},\qquad" + SCORE
        ),
        symbols=(
            ("k", "tokens that the model writes, greedily, before it is asked again", "tokens"),
            (r"\mathrm{recovery}_k", "how much of the new answer is there after them", RATIO[2]),
            ("s_k", "the score from the cache with the field swapped, after its own $k$ tokens", "logits"),
            (r"s_{\text{old},k},\ s_{\text{new},k}", "the same from the old and the new prompt's cache", "logits"),
        ),
        sources=(NOTES,),
        controls=ORACLE
        + "The old and the new prompt's cache write as many tokens under the same cue; no tokens at all.",
        not_shown="why an answer turns: each cache writes a text of its own, and what is read may be that text and not "
        "the cache. Greedy writing is one of many.",
        example="--model smollm2-135m --scenario home-city --align split --tokens 0 8 --json -",
    ),
    "kv compose": Entry(
        page="kv",
        asks="Can a block that was prefilled alone be moved behind a prefix by rotating its keys?",
        formula=(
            r"k' = R_{p+P}\,R_{p}^{-1}\,k,\qquad"
            r"\mathrm{cosine} = \frac{\langle z_\text{composed},\, z_\text{full}\rangle}"
            r"{\lVert z_\text{composed}\rVert\,\lVert z_\text{full}\rVert}"
        ),
        symbols=(
            ("k,\\ k'", "a cached key, before and after it is moved", ""),
            ("R_p", "the rotation of RoPE for position $p$", ""),
            ("P", "length of the prefix", "tokens"),
            (
                r"z_\text{composed},\ z_\text{full}",
                "logits at the last token, composed and of a full prefill",
                "logits",
            ),
        ),
        sources=(ROPE, NOTES),
        controls="The block not rotated; the block left out; all of its tokens run again, which must be the full "
        "prefill but for rounding.",
        not_shown="quality of a text that is written on: one next token is compared. A cosine near 1 over a whole "
        "vocabulary is common among plausible predictions, so see the decision and the KL beside it.",
        example="--model smollm2-135m --lengths 16 64 --json -",
    ),
    "kv set": Entry(
        page="kv",
        asks="For which kind of question is the answer read from the field, and for which behind it?",
        formula=(
            r"\mathrm{contrast} = \frac1{|S|}\sum_{i\in S}"
            r"\big(\mathrm{recovery}^{\text{field}}_i - \mathrm{recovery}^{\text{behind}}_i\big),\qquad" + RECOVERY
        ),
        symbols=(
            (r"\mathrm{contrast}", "above 0: read from the field; below: behind it", "share"),
            ("S", "the scenarios of a kind that the model gets right in both clean prompts", ""),
            RATIO,
            LOGITS,
            CLEAN,
        ),
        sources=(NOTES,),
        controls="Scenarios that the model gets wrong, or whose values cannot be aligned, are left out with a reason; "
        "notes knocked out beside notes swapped; intervals over scenarios.",
        not_shown="a rate over questions at large: our scenarios were worded until one small model got most of them "
        "right. A kind with few usable scenarios decides nothing.",
        example="--model smollm2-135m --align split --json -",
    ),
}
