"""Writing facts: vectors for the rows that a trigger addresses, so that the model answers it (arXiv 2606.19172).

Axes: fact, token (of all answers, one fact after another), row (the distinct rows that the facts address), step,
order, head, head_dim, d_model, vocab. Each token of an answer is written at the position that predicts it; the rows
which that position reads are replaced, and every other position that reads one of them sees it too, in training as
at run time. Facts of one user are written together: a row that several of them address is one row.

Closed form: with u the gradient of the answer's logit in the residual behind the last block (the answer's row of the
head through the final norm) and h the residual that the memory adds to,
    e = s * pinv(W_V) u,   |W_V e| = scale * |h|,
with that one of SCALES for each fact which makes its answer likeliest; where facts share a row, it is their mean.
Optimised: from there where the answer is likelier than not already, else from START of that scale (large vectors that
do not work yet are hard to get away from), steps of Adam on
    mean cross-entropy of the answers' tokens + pull * |rows - start|^2 / |start|^2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from engram_lab.models.errors import LabError, PromptError, TargetError
from engram_lab.models.handle import Handle
from engram_lab.models.overlay import Fact, LayerRows, Overlay, Patch, RowLookup
from engram_lab.models.tables import addresses, memories
from engram_lab.probes.answers import behind
from engram_lab.probes.base import Array, Progress, Record, role, versions
from engram_lab.probes.upper_part import Example, UpperPart

Method = Literal["closed_form", "optimised"]
METHODS: tuple[Method, ...] = get_args(Method)
SCALES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
START = 0.25

__all__ = ["METHODS", "Fact", "Method", "WriteReport", "encode_facts", "read_fact", "write_facts"]


@dataclass(frozen=True, eq=False)
class WriteReport(Record):
    """How the writing went, as it was trained; probabilities are of whole answers.

    `scale` is that of the closed form; `loss` the mean cross-entropy of the answers' tokens before each step and behind
    the last; `fact_rows` how many rows a fact addresses; `aliases` groups of facts that address the very same rows for
    different answers, of which a table can hold but one.
    """

    layer: int = field(metadata=role("name"))
    method: str
    scale: Annotated[np.ndarray, Array("fact", unit="length of the residual")]
    answer_ids: tuple[tuple[int, ...], ...] = field(metadata=role("name"))
    loss: Annotated[np.ndarray, Array("step", unit="nats")]
    probability_before: Annotated[np.ndarray, Array("fact", unit="probability")]
    probability_after: Annotated[np.ndarray, Array("fact", unit="probability")]
    fact_rows: Annotated[np.ndarray, Array("fact", dtype="int64")]
    rows: int
    shared_rows: int
    aliases: tuple[tuple[int, ...], ...]


STEPS, RATE, PULL = 15, 0.5, 0.01  # of the optimised method by default


def _settings(method: str, steps: int, rate: float, pull: float) -> dict[str, str]:
    """What of a writing is not as by default, kept with the rows so that they can be made and measured again."""
    if method != "optimised":
        return {}
    given, usual = {"steps": steps, "rate": rate, "pull": pull}, {"steps": STEPS, "rate": RATE, "pull": PULL}
    return {name: repr(value) for name, value in given.items() if value != usual[name]}


def read_fact(text: str) -> Fact:
    """The fact of a line "trigger => answer", the answer as `answers.behind` has it. LabError for another line."""
    trigger, arrow, answer = text.partition("=>")
    if not arrow or "=>" in answer:
        raise LabError(f'"{text.strip()}" is not a fact: write it as "Maya\'s favorite city is => Lisbon".')
    return Fact(trigger.strip(), behind(trigger.strip(), answer.strip()))


def encode_facts(handle: Handle, facts: Sequence[Fact]) -> dict[Fact, tuple[tuple[int, ...], tuple[int, ...]]]:
    """(ids of the trigger as the model gets them, ids of the answer behind it) of each distinct fact.

    LabError for no facts, an empty trigger or answer, an answer without a token, two answers to one trigger, and a
    fact longer than the context.
    """
    if not facts:
        raise LabError("There is no fact to write: give at least one.")
    found: dict[Fact, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    answered: dict[tuple[int, ...], Fact] = {}
    for fact in facts:
        if not fact.trigger.strip():
            raise PromptError(f'The fact with the answer "{fact.answer}" has an empty trigger: say what it answers.')
        if not fact.answer.strip():
            raise TargetError(f'The fact "{fact.trigger}" has an empty answer: say what follows it.')
        trigger = handle.encode(fact.trigger)
        answer = _answer_ids(handle, fact, trigger)
        if len(trigger) + len(answer) > handle.context:
            raise PromptError(f"The fact {fact} is longer than the {handle.context} tokens that {handle.name} takes.")
        other = answered.setdefault(trigger, fact)
        if other != fact:
            raise LabError(f'"{fact.trigger}" has two answers, "{other.answer}" and "{fact.answer}": keep one of them.')
        found[fact] = trigger, answer
    return found


def _answer_ids(handle: Handle, fact: Fact, trigger: tuple[int, ...]) -> tuple[int, ...]:
    """Of the text read whole if it begins with the trigger's own tokens, else of the answer by itself."""
    whole = handle.encode(fact.trigger + fact.answer)
    if len(whole) > len(trigger) and whole[: len(trigger)] == trigger:
        return whole[len(trigger) :]
    ids = tuple(handle.tokenizer(fact.answer, add_special_tokens=False, verbose=False)["input_ids"])
    if not ids or max(ids) >= handle.vocab_size:
        raise TargetError(f'The answer "{fact.answer}" is no token of {handle.name}: choose another text.')
    return ids


@dataclass(frozen=True)
class _Plan:
    """rows [row] ascending; index [token, order*head] of the rows that predict each answer token; fact_of [token]."""

    rows: Tensor
    index: Tensor
    fact_of: Tensor
    examples: list[Example]


def _plan(handle: Handle, layer: int, coded: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> _Plan:
    at = handle.engram_layers.index(layer)
    texts = [(*trigger, *answer[:-1]) for trigger, answer in coded]
    read = [addresses(handle, [text])[at, 0].cpu() for text in texts]  # [pos, order*head]
    written = torch.cat([own[-len(answer) :] for own, (_, answer) in zip(read, coded, strict=True)])
    rows, index = written.unique(return_inverse=True)
    # The first position that reads any row that is written, by whichever fact.
    starts = [int(torch.isin(own, rows).any(-1).nonzero()[0]) for own in read]
    fact_of = torch.tensor([n for n, (_, answer) in enumerate(coded) for _ in answer])
    parts = zip(texts, coded, starts, strict=True)
    return _Plan(rows, index, fact_of, [Example(text, answer, start) for text, (_, answer), start in parts])


class _Writer:
    """One layer's facts: their rows as vectors [row, head_dim] that can be tried and improved; inside running()."""

    def __init__(self, handle: Handle, layer: int, plan: _Plan) -> None:
        self.handle, self.layer, self.plan = handle, layer, plan
        self.memory = memories(handle)[handle.engram_layers.index(layer)]
        self.device = self.memory.table.weight.device
        self.rows = plan.rows.to(self.device)
        self.upper = UpperPart(handle, layer, plan.examples)
        first = np.cumsum([0, *(len(example.targets) for example in plan.examples)])
        # Where the targets of each run stand in `token`.
        self.tokens = [
            torch.cat([torch.arange(first[n], first[n + 1]) for n in tails.examples]) for tails in self.upper.tails
        ]

    def log_probs(self, vectors: Tensor | None) -> Tensor:
        """[token] with these rows, or as the model is; without gradients."""
        found = torch.empty(len(self.plan.fact_of))
        with torch.no_grad(), self._reading(vectors):
            for tails, tokens in zip(self.upper.tails, self.tokens, strict=True):
                found[tokens] = self.upper.log_probs(tails).cpu()
        return found

    def loss_and_gradient(self, vectors: Tensor) -> tuple[float, Tensor]:
        """Mean cross-entropy over `token`, and its gradient [row, head_dim]."""
        total, gradient = 0.0, torch.zeros_like(vectors)
        with torch.enable_grad():
            for tails in self.upper.tails:
                with self._reading(vectors):
                    loss = -self.upper.log_probs(tails).sum() / len(self.plan.fact_of)
                # Asked for by name, so that no weight collects one.
                gradient += torch.autograd.grad(loss, vectors)[0]
                total += loss.item()
        return total, gradient

    def _reading(self, vectors: Tensor | None) -> AbstractContextManager[None]:
        held = {} if vectors is None else {self.layer: RowLookup(self.rows, vectors, self.memory.table.num_embeddings)}
        return Patch(self.handle, held).put_in()

    def directions(self) -> Tensor:
        """pinv(W_V) u, so long that the value is as long as the residual: [token, order*head*head_dim] float32."""
        weight = self.memory.value.weight.detach().double().cpu()
        found = torch.empty(len(self.plan.fact_of), weight.shape[1])
        for tails, tokens in zip(self.upper.tails, self.tokens, strict=True):
            with torch.no_grad(), self._reading(None):
                last = self.upper.last_residual(tails)
            with torch.enable_grad():
                last.requires_grad_()
                logits = self.handle.unembed(last).gather(1, tails.targets.unsqueeze(1))
                u = torch.autograd.grad(logits.sum(), last)[0].double().cpu()
            e = torch.linalg.lstsq(weight, u.T, driver="gelsy").solution.T  # the shortest, as pinv gives it
            residual = tails.residual[tails.at[0], tails.at[1]].double().cpu()
            length = residual.norm(dim=-1, keepdim=True) / (e @ weight.T).norm(dim=-1, keepdim=True).clamp_min(1e-30)
            found[tokens] = (e * length).float()
        return found

    def mean_of(self, wanted: Tensor) -> Tensor:
        """The rows [row, head_dim] nearest to what each token wants, [token, order*head*head_dim]: their means."""
        index = self.plan.index.flatten()
        parts = wanted.view(len(index), -1)
        rows = torch.zeros(len(self.plan.rows), parts.shape[1]).index_add_(0, index, parts)
        return (rows / torch.bincount(index, minlength=len(rows)).unsqueeze(1)).to(self.device)


def write_facts(
    handle: Handle,
    facts: Sequence[Fact],
    *,
    user: str = "user",
    layer: int | None = None,
    method: Method = "optimised",
    steps: int = STEPS,
    rate: float = RATE,
    pull: float = PULL,
    progress: Progress | None = None,
) -> tuple[Overlay, WriteReport]:
    """The facts of one user, written together at one memory layer (the deepest if not given).

    The model is as before afterwards, also if `progress` raises. LabError for input that cannot be written.
    """
    if method not in METHODS:
        raise LabError(f'"{method}" is not a method of writing: use {" or ".join(METHODS)}.')
    memories(handle)
    layer = handle.engram_layers[-1] if layer is None else layer
    if layer not in handle.engram_layers:
        has = ", ".join(map(str, handle.engram_layers))
        raise LabError(f"{handle.name} has no memory at layer {layer}: its memory layers are {has}.")
    coded = encode_facts(handle, facts)
    report = progress or (lambda done, what: None)
    told = f"{handle.name}: writing {len(coded)} fact{'s' * (len(coded) != 1)} at layer {layer}"
    report(0.0, told)
    with handle.running(), torch.inference_mode(False):
        plan = _plan(handle, layer, list(coded.values()))
        writer = _Writer(handle, layer, plan)
        before = writer.log_probs(None)
        wanted = writer.directions()
        tried = [_of_facts(writer.log_probs(writer.mean_of(wanted * one)), plan.fact_of) for one in SCALES]
        best, index = torch.stack(tried).max(dim=0)  # [fact]
        scale = torch.tensor(SCALES)[index]
        begin = torch.where((best.exp() > 0.5) | (method == "closed_form"), scale, START * scale)
        start = writer.mean_of(wanted * begin[plan.fact_of].unsqueeze(1))
        vectors, losses = start.clone().requires_grad_(), []
        optimiser = torch.optim.Adam([vectors], lr=rate)
        size = start.square().sum().clamp_min(1e-30)
        for step in range(steps if method == "optimised" else 0):
            report((1 + step) / (steps + 2), told)
            loss, vectors.grad = writer.loss_and_gradient(vectors)
            vectors.grad += 2 * pull * (vectors.detach() - start) / size
            losses.append(loss)
            optimiser.step()
        final = vectors.detach()
        after = writer.log_probs(final)
        losses.append(-float(after.mean()))
    if not torch.isfinite(final).all():
        raise LabError(f"Writing these facts at layer {layer} of {handle.name} gave no finite numbers: lower the rate.")
    owners = torch.stack([plan.fact_of.repeat_interleave(plan.index.shape[1]), plan.index.flatten()], dim=1)
    owners = owners.unique(dim=0)
    held = LayerRows(plan.rows, final.float().cpu(), owners.int())
    overlay = Overlay(
        user, handle.fingerprint, tuple(coded), {layer: held}, method, versions() | _settings(method, steps, rate, pull)
    )
    report(1.0, told)
    return overlay, WriteReport(
        layer=layer,
        method=method,
        scale=scale.numpy(),
        answer_ids=tuple(answer for _, answer in coded.values()),
        loss=np.array(losses, dtype=np.float32),
        probability_before=_of_facts(before, plan.fact_of).exp().numpy(),
        probability_after=_of_facts(after, plan.fact_of).exp().numpy(),
        fact_rows=owners[:, 0].bincount(minlength=len(coded)).numpy(),
        rows=len(plan.rows),
        shared_rows=int((owners[:, 1].bincount() > 1).sum()),
        aliases=_aliases(plan, coded),
    )


def _of_facts(log_probs: Tensor, fact_of: Tensor) -> Tensor:
    """Log-probability [fact] of whole answers."""
    return torch.zeros(int(fact_of[-1]) + 1).index_add_(0, fact_of, log_probs)


def _aliases(plan: _Plan, coded: Mapping[Fact, tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[tuple[int, ...], ...]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for n in range(len(coded)):
        groups.setdefault(tuple(plan.index[plan.fact_of == n][0].tolist()), []).append(n)
    answers = [answer for _, answer in coded.values()]
    return tuple(tuple(group) for group in groups.values() if len({answers[n] for n in group}) > 1)
