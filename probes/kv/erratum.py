"""Errata: a correction behind a stale cache instead of a new prefill, once and in a chain.

Axes: variant (what is said behind the prompt), policy (after how many corrections all is prefilled anew), step
(corrections, one after the other). What runs is (probes.kv.append)
    cache of the old prompt + "\\n" + correction + "\\n" + the end of the question once more
and the answer is read at the last token. All of the prompt stays in the cache, its own end of the question too.
Recovery is that of probes.kv.effects; the share of tokens served is served / (served + computed).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from engram_lab.models.errors import LabError, TargetError
from engram_lab.models.handle import Handle
from engram_lab.models.kv import KV
from engram_lab.models.kv_runs import check_kv, prefill
from engram_lab.probes.base import Array, Progress, Protocol, Record, Report, Timing, only, role
from engram_lab.probes.kv.append import ROUNDS, Added, added, seconds
from engram_lab.probes.kv.effects import Effects, Oracle, effects, oracle, oracle_sentence, run_clean
from engram_lab.probes.kv.scenario import Pair, Scenario, answer_ids, prepare, prompt_ids
from engram_lab.probes.kv.swap import check_request

VALUE, BEFORE = "{value}", "{before}"
SAID = ("nothing", "erratum", "irrelevant", "wrong", "new prompt")


@dataclass(frozen=True, eq=False)
class ErratumConfig(Record):
    """A request: one model, a scenario with an erratum (and an irrelevant and a wrong one), and a chain.

    `chain` are (value, answer), one for each correction; if empty, `corrections` of them from the scenario: the new
    value, the old one, and so on, with the third between where the answers are the values themselves. `wording` is
    the correction of the chain, with {value} and, if it names it, {before} for the one that it replaces; if empty,
    it is the erratum with these for the new and the old value. `thresholds`: all is prefilled anew after every so
    many corrections; 0 is never, 1 every time. `time` measures seconds. Raises LabError.
    """

    models: tuple[str, ...]
    scenario: Scenario
    chain: tuple[tuple[str, str], ...] = ()
    corrections: int = 4
    wording: str = ""
    thresholds: tuple[int, ...] = (0, 2, 1)
    align: str = "refuse"
    time: bool = False

    def __post_init__(self) -> None:
        check_request(self.models, self.align)
        if not self.scenario.erratum.strip():
            raise LabError(f"Scenario {self.scenario.id} has no correction: write one as its erratum.")
        if self.wording and VALUE not in self.wording:
            raise LabError(f"The wording of a correction needs {VALUE}, where the new value goes.")
        if any(not value.strip() or not answer.strip() for value, answer in self.chain):
            raise LabError("Each correction of the chain needs a value and an answer that are not empty.")
        if self.corrections < 0 or any(m < 0 for m in self.thresholds):
            raise LabError("The number of corrections and the thresholds must be 0 or more.")
        if not self.thresholds or len(set(self.thresholds)) < len(self.thresholds):
            raise LabError("Name at least one threshold, each once; 0 is never to prefill anew.")


@dataclass(frozen=True, eq=False)
class Chain(Record):
    """Corrections one after the other, under each policy; DEFINITIONS of its front says what each figure is."""

    values: tuple[str, ...]  # [step]
    answers: tuple[str, ...]  # [step] due after it
    corrections: tuple[str, ...]  # [step] as worded
    thresholds: tuple[int, ...] = field(metadata=role("name"))  # [policy]
    anew: Annotated[np.ndarray, Array("policy", "step", dtype="bool")]  # prefilled at this step
    computed: Annotated[np.ndarray, Array("policy", "step", dtype="int64")]
    served: Annotated[np.ndarray, Array("policy", "step", dtype="int64")]
    share: Annotated[np.ndarray, Array("policy", "step", unit="share", dtype="float64")]  # up to this step
    full: Annotated[np.ndarray, Array("step", dtype="int64")]  # tokens of the prompt with the value
    right: Annotated[np.ndarray, Array("policy", "step", dtype="bool")]
    margin: Annotated[np.ndarray, Array("policy", "step", unit="logits", dtype="float64")]  # to the best other answer
    prob: Annotated[np.ndarray, Array("policy", "step", unit="probability", dtype="float64")]  # of the answer due
    said: tuple[str, ...] = field(metadata=role("prose"))  # [policy] in a sentence


@dataclass(frozen=True, eq=False)
class ErratumTiming(Timing):
    """Seconds for one correction, the caches being there."""

    append: float  # the correction and the question behind the stale cache
    full: float  # the corrected prompt from its start


@dataclass(frozen=True, eq=False)
class ErratumResult(Record):
    """One correction and its controls, and the chain; DEFINITIONS of its front says what each figure is."""

    name: str
    pair: Pair
    oracle: Oracle
    said: str = field(metadata=role("prose"))  # what the correction did, in a sentence
    variants: tuple[str, ...]  # [variant] of SAID
    texts: tuple[str, ...]  # [variant] what was said, without the question
    effects: Effects
    # first token of the third value as an answer; -1 if it is none, or begins as another answer
    third_id: int = field(metadata=role("name"))
    prob_third: Annotated[np.ndarray, Array("variant", unit="probability", dtype="float64")]  # NaN without one
    # the likeliest answer: 0 old, 1 new, 2 third
    leader: Annotated[np.ndarray, Array("variant", dtype="int64", role="name")]
    due: Annotated[
        np.ndarray, Array("variant", dtype="int64", role="name")
    ]  # the one that the text calls for; -1: a third one, not known
    computed: Annotated[np.ndarray, Array("variant", dtype="int64")]
    served: Annotated[np.ndarray, Array("variant", dtype="int64")]
    full: int  # tokens of a full recompute of the corrected prompt
    chain: Chain | None
    no_chain: str  # why there is none
    digests: tuple[str, str] = field(metadata=role("hash"))
    timing: ErratumTiming | None = None


CONFIG, RESULT = ErratumConfig, ErratumResult


def run(
    handles: Sequence[Handle], config: ErratumConfig, progress: Progress | None = None
) -> Report[ErratumConfig, ErratumResult]:
    """Corrections of one scenario appended to its stale cache, with controls, and a chain of them.

    All that cannot be served is refused before the first forward, as a LabError.

        >>> cards = Scenario("Paris is the {field} of France.\\nTokyo is the old", "capital", "river", " mill", " sea")
        >>> cards = Scenario(**{**vars(cards), "erratum": "It is the river."})
        >>> report = run([handle], ErratumConfig((handle.name,), cards, corrections=1, align="split"))
        >>> report.probe
        'kv erratum'
    """
    handle, scenario = only(handles), config.scenario
    pair = prepare(handle, scenario, config.align)
    said: dict[str, str | None] = {"nothing": None} | {
        name: filled(scenario, name) for name in SAID[1:4] if getattr(scenario, name).strip()
    }
    more = {
        name: added(handle, scenario, scenario.old, [text], pair.ids_old, pair.field_stop)
        for name, text in said.items()
    }
    more["new prompt"] = added(handle, scenario, scenario.new, [None], pair.ids_new, pair.field_stop)
    steps, why = _steps(handle, config, pair)
    third = _third(handle, scenario, pair)
    check_kv(handle)
    told = progress or (lambda fraction, doing: None)
    told(0.0, "clean runs")
    clean = run_clean(handle, pair)
    stale, donor = (prefill(handle, clean.last, kv).kv for kv in (clean.stale, clean.donor))
    logits: list[Tensor] = []
    for n, (name, own) in enumerate(more.items()):
        told(0.1 + 0.4 * n / len(more), f"correction: {name}")
        logits.append(_after(handle, donor if name == "new prompt" else stale, own)[1])
    got = effects((own[None] for own in logits), pair, clean, clean.new)
    answers = [*pair.answer_ids, *([third] if third >= 0 else [])]
    probs = torch.stack(logits).double().softmax(-1)[:, answers].cpu().numpy()
    chain = _chain(handle, config, pair, stale, steps, told) if steps else None
    clean.check()
    found = oracle(handle, pair, clean)
    result = ErratumResult(
        name=handle.name,
        pair=pair,
        oracle=found,
        said=_said(pair, found, got, tuple(more), more["erratum"]),
        variants=tuple(more),
        texts=tuple((said.get(name) or "") for name in more),
        effects=got,
        third_id=third,
        prob_third=probs[:, 2] if third >= 0 else np.full(len(more), np.nan),
        leader=probs.argmax(axis=1).astype(np.int64),
        due=np.array([_due(name, third) for name in more], dtype=np.int64),
        computed=np.array(
            [len(own.ids) + (pair.n_tokens if name == "new prompt" else 0) for name, own in more.items()],
            dtype=np.int64,
        ),
        served=np.array([0 if name == "new prompt" else own.kept for name, own in more.items()], dtype=np.int64),
        full=pair.n_tokens,
        chain=chain,
        no_chain=why,
        digests=clean.digests,
        timing=_timing(handle, pair, stale, more["erratum"]) if config.time else None,
    )
    ids = [pair.ids_old, pair.ids_new, *(own.ids for own in more.values())]
    return Report("kv erratum", config, Protocol.of(handles, [ids], 0), result)


def _after(handle: Handle, kv: KV, more: Added) -> tuple[KV, Tensor]:
    """(the cache with the text behind it, the logits [vocab] of its last token)."""
    run = prefill(handle, more.ids, kv.first(more.kept))
    return run.kv, run.logits[0, -1]


def _due(name: str, third: int) -> int:
    """The answer that a variant calls for: 0 old, 1 new, 2 third, -1 a third one that is not known."""
    return {"erratum": 1, "new prompt": 1, "wrong": 2 if third >= 0 else -1}.get(name, 0)


def filled(scenario: Scenario, name: str) -> str:
    """A correction of the scenario ("erratum", "irrelevant", "wrong"), {new}, {old} and {third} put in."""
    text: str = getattr(scenario, name)
    for value in ("new", "old", "third"):
        text = text.replace(f"{{{value}}}", getattr(scenario, value).strip())
    return text


def answers_are_values(scenario: Scenario) -> bool:
    """Whether the answers are the values of the field, so that a third value is an answer as well."""
    pairs = ((scenario.old, scenario.answer_old), (scenario.new, scenario.answer_new))
    return all(value.strip() == answer.strip() for value, answer in pairs)


def _third(handle: Handle, scenario: Scenario, pair: Pair) -> int:
    """The first token of the third answer; -1 if there is none of its own."""
    if not scenario.third.strip() or not answers_are_values(scenario):
        return -1
    ids = prompt_ids(handle, scenario, scenario.old)[1]
    first = answer_ids(handle, scenario, pair.text_old, ids, scenario.third)[0]
    return -1 if first in pair.answer_ids else first


def _timing(handle: Handle, pair: Pair, stale: KV, more: Added) -> ErratumTiming:
    append, full = seconds(
        lambda: prefill(handle, more.ids, stale.first(more.kept)), lambda: prefill(handle, pair.ids_new)
    )
    return ErratumTiming(ROUNDS, torch.get_num_threads(), append, full)


def _said(pair: Pair, found: Oracle, got: Effects, variants: Sequence[str], more: Added) -> str:
    """What the correction did; only where the model is right about both clean prompts."""
    if not found.both:
        return oracle_sentence(pair, found)
    n = variants.index("erratum")
    flips = "changes" if got.flip[n] else "does not change"
    shown = ", ".join(f"{name} {got.recovery[i]:.0%}" for i, name in enumerate(variants) if i != n)
    return (
        f"The correction behind the stale cache {flips} the answer and recovers {got.recovery[n]:.0%} of the change "
        f"({shown}), for {len(more.ids)} tokens computed; prefilling the corrected prompt takes {pair.n_tokens}."
    )


# --- A chain of corrections ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    value: str
    answer: str
    text: str
    first: int  # token of the answer


def derived(scenario: Scenario, corrections: int) -> tuple[tuple[str, str], ...]:
    """(value, answer) of a chain that a scenario is enough for: new, old, and the third if the answers are values."""
    known = [(scenario.new, scenario.answer_new), (scenario.old, scenario.answer_old)]
    if scenario.third.strip() and answers_are_values(scenario):
        known.append((scenario.third, scenario.third))
    return tuple(known[n % len(known)] for n in range(corrections))


def wording_of(scenario: Scenario) -> str:
    """The erratum with {value} for the new value and {before} for the old; "" if it does not name the new one."""
    marks = {"{new}": VALUE, "{old}": BEFORE, scenario.new.strip(): VALUE, scenario.old.strip(): BEFORE}
    longest = sorted(filter(None, marks), key=len, reverse=True)
    found = re.sub("|".join(rf"(?<!\w){re.escape(v)}(?!\w)" for v in longest), lambda m: marks[m[0]], scenario.erratum)
    return found if VALUE in found else ""


def _steps(handle: Handle, config: ErratumConfig, pair: Pair) -> tuple[list[_Step], str]:
    """The corrections of the chain, or why there is none."""
    scenario = config.scenario
    values = config.chain or derived(scenario, config.corrections)
    wording = config.wording or wording_of(scenario)
    if not values:
        return [], "No corrections were asked for."
    if not wording:
        return [], f"The erratum does not name the new value, so a chain needs a wording with {VALUE}."
    text, ids = prompt_ids(handle, scenario, scenario.old)
    firsts = {a: answer_ids(handle, scenario, text, ids, a)[0] for _, a in (*values, ("", scenario.answer_old))}
    if len(set(firsts.values())) < len(firsts):
        why = f"Two answers of the chain begin with the same token for {handle.name}, and first tokens are compared"
        if config.chain:
            raise TargetError(f"{why}: reword one.")
        return [], f"{why}."
    steps, before = [], scenario.old
    for value, answer in values:
        told = {VALUE: value.strip(), BEFORE: before.strip()}
        said = re.sub(r"\{value\}|\{before\}", lambda m, told=told: told[m[0]], wording)  # type: ignore[misc]
        steps.append(_Step(value, answer, said, firsts[answer]))
        before = value
    return steps, ""


def _chain(
    handle: Handle, config: ErratumConfig, pair: Pair, stale: KV, steps: Sequence[_Step], told: Progress
) -> Chain:
    """Every policy through all steps, from the old prompt's cache."""
    scenario, shape = config.scenario, (len(config.thresholds), len(steps))
    computed, served = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    anew, right = np.zeros(shape, bool), np.zeros(shape, bool)
    margin, prob = np.zeros(shape), np.zeros(shape)
    prompts = [prompt_ids(handle, scenario, step.value)[1] for step in steps]
    rivals = sorted({pair.answer_ids[0], *(step.first for step in steps)})
    for p, threshold in enumerate(config.thresholds):
        kv, ids, value = stale, pair.ids_old, scenario.old
        said: list[str | None] = []
        for n, step in enumerate(steps):
            told(0.5 + 0.5 * (p + n / len(steps)) / len(config.thresholds), f"chain, step {n + 1}")
            anew[p, n] = threshold > 0 and (n + 1) % threshold == 0
            if anew[p, n]:
                value, said, ids = step.value, [], prompts[n]
                run = prefill(handle, ids)
                kv, logits, computed[p, n] = run.kv, run.logits[0, -1], len(ids)
            else:
                said.append(step.text)
                more = added(handle, scenario, value, said, ids, 1)
                kv, logits = _after(handle, kv, more)
                computed[p, n], served[p, n], ids = len(more.ids), more.kept, more.after(ids)
            scores = logits.double()
            others = [own for own in rivals if own != step.first]
            margin[p, n] = float(scores[step.first] - scores[others].max()) if others else np.nan
            prob[p, n], right[p, n] = float(scores.softmax(-1)[step.first]), margin[p, n] > 0
    total = computed.cumsum(axis=1) + served.cumsum(axis=1)
    full = np.array([len(own) for own in prompts], dtype=np.int64)
    return Chain(
        values=tuple(step.value for step in steps),
        answers=tuple(step.answer for step in steps),
        corrections=tuple(step.text for step in steps),
        thresholds=config.thresholds,
        anew=anew,
        computed=computed,
        served=served,
        share=served.cumsum(axis=1) / total,
        full=full,
        right=right,
        margin=margin,
        prob=prob,
        said=tuple(
            f"{policy(m)}: right after {right[p].sum()} of {len(steps)} corrections, {computed[p].sum()} tokens "
            f"computed ({full.sum()} with a full prefill each time), {served[p].sum() / total[p, -1]:.0%} from cache."
            for p, m in enumerate(config.thresholds)
        ),
    )


def policy(threshold: int) -> str:
    """A threshold in words."""
    if threshold == 0:
        return "Corrections only"
    return "Prefilled every time" if threshold == 1 else f"Prefilled anew after every {threshold} corrections"
