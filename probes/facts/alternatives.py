"""A user's facts in the rows of a memory and in what else could hold them: LoRA, the prompt, retrieval.

Axes: method, prompt (every fact's trigger, then every fact's paraphrases), kind ("triggers", "paraphrases"), text
(unrelated), pos, vocab. All are read the same way: what the model predicts behind the prompt, the answer's tokens one
after another as if the earlier ones stood there. METHODS says what each method is.

Only the methods that put nothing before a text run it in the same shape as the model alone, and can give the same bits;
behind other text every position is another sum. A text for which nothing is retrieved is run as it is.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from engram_lab.models.engram import CACHE_ARGUMENT
from engram_lab.models.errors import DataError
from engram_lab.models.handle import Handle
from engram_lab.models.overlay import Overlay, prepare
from engram_lab.models.tables import memories
from engram_lab.probes.base import Progress, Protocol, Report, only, part
from engram_lab.probes.facts.alternatives_result import (
    AS_FAR,
    CLOSED,
    KINDS,
    METHODS,
    NOTHING,
    OPTIMISED,
    PROMPT,
    RETRIEVAL,
    AlternativesConfig,
    AlternativesResult,
    Drift,
    peft_version,
    prompts_of,
    summarise,
)
from engram_lab.probes.facts.lora import Adapter, Coded, train_adapters
from engram_lab.probes.facts.sets import StatedFact, Writing, encoded, logits_of, write

__all__ = [
    "METHODS",
    "AlternativesConfig",
    "AlternativesResult",
    "StatedFact",
    "Writing",
    "prompts_of",
    "run",
]

BATCH_TOKENS = 512  # in a forward, padding included: the logits of two methods are there at once
BATCH_BYTES = 256 << 20  # of the caches behind which texts run at once

CONFIG, RESULT = AlternativesConfig, AlternativesResult


@dataclass(frozen=True)
class _Text:
    """Ids of a text: special tokens that lead it, and the rest, of which every position is compared or read."""

    lead: tuple[int, ...]
    body: tuple[int, ...]


@dataclass
class _Method:
    """How a text is run: by `logits` (ids [batch, pos] to [batch, pos, vocab]), or by the model behind a prefix."""

    name: str
    logits: Callable[[Tensor], Tensor]
    stored: int = 0  # bytes
    seconds: float = float("nan")
    prefixes: Sequence[tuple[int, ...]] = ()  # [text] of prompts and unrelated texts; empty: none anywhere
    kept: dict[tuple[int, ...], DynamicCache] = field(default_factory=dict)  # the last prefix as it was run


def run(
    handles: Sequence[Handle], config: AlternativesConfig, progress: Progress | None = None
) -> Report[AlternativesConfig, AlternativesResult]:
    """Write the facts in every way, then ask for them and read unrelated texts: figures [kind, method], [method].

    LabError and DataError before the first forward.

        >>> facts = (StatedFact("The river runs past", " the sea"), StatedFact("Paris is the old", " mill"))
        >>> few = {"ranks": (2,), "lora_steps": 1, "bootstrap": 9}
        >>> report = run([handle], AlternativesConfig((handle.name,), facts, ("The mill runs past the river",), **few))
        >>> report.result.top1.shape == (len(report.result.kinds), len(report.result.methods))
        True
    """
    handle = only(handles)
    memories(handle)
    prompts = prompts_of(config.facts)
    coded = encoded(handle, prompts)
    answers = [answer for _, answer in coded]
    texts = [_split(handle, (*asked, *answer[:-1])) for asked, answer in coded]
    texts += [_split(handle, handle.encode(text)) for text in config.unrelated]
    for text, own in zip(config.unrelated, texts[len(prompts) :], strict=True):
        if len(own.body) < 2:
            raise DataError(f'The text "{text}" is one token for {handle.name}, which leaves nothing to score.')
    shares = [1, 3, *(8 for _ in config.ranks), 4, 6]
    ends = np.cumsum(shares) / sum(shares)
    parts = map(partial(part, progress), [0.0, *ends[:-1]], ends)
    methods, adapters, layer = _methods(handle, config, coded[: len(config.facts)], parts)
    more, n_told = _prefixed(handle, config, texts, methods[0])
    methods += more
    chance, rank = _recall(handle, methods, texts[: len(prompts)], answers, next(parts))
    drift = _drift(handle, methods, texts, len(prompts), next(parts))
    ids = [[(*text.lead, *text.body) for text in texts]]
    names = tuple(method.name for method in methods)
    retrieved = config.retrieved[: len(prompts)] or [()] * len(prompts)
    before = [method.prefixes[: len(prompts)] for method in methods]
    paraphrase = np.arange(len(prompts)) >= len(config.facts)
    result = AlternativesResult(
        methods=names,
        layer=layer,
        prompts=tuple(asked.prompt for _, asked in prompts),
        fact_of=np.array([n for n, _ in prompts]),
        paraphrase=paraphrase,
        answer_tokens=np.array([len(answer) for answer in answers]),
        probability=np.exp(chance),
        rank=rank,
        retrieved_own=np.array([n in own for (n, _), own in zip(prompts, retrieved, strict=True)]),
        kinds=KINDS,
        n_prompts=np.array([(~paraphrase).sum(), paraphrase.sum()]),
        tokens=drift.tokens,
        positions=drift.tokens + 1,
        text_change=drift.change,
        text_size=drift.size,
        text_kl=drift.kl,
        text_changed=drift.changed,
        loss=float(drift.loss.sum() / drift.tokens.sum()),
        **summarise(config, chance, rank, drift, names),
        changed=drift.changed.sum(1),
        n_positions=int(drift.tokens.sum() + len(drift.tokens)),
        bytes=np.array([method.stored for method in methods]),
        extra_tokens=np.array([sum(map(len, own)) / len(prompts) for own in before]),
        facts_in_prompt=n_told,
        lora_loss=tuple(adapter.loss for adapter in adapters),
        peft=peft_version(),
        seconds=np.array([method.seconds for method in methods]) if config.time else None,
    )
    return Report("facts alternatives", config, Protocol.of([handle], ids, config.seed), result)


def _split(handle: Handle, ids: Sequence[int]) -> _Text:
    n = 0
    while n < len(ids) - 1 and handle.is_special(ids[n]):
        n += 1
    return _Text(tuple(ids[:n]), tuple(ids[n:]))


def _methods(
    handle: Handle,
    config: AlternativesConfig,
    coded: Coded,
    parts: Iterator[Progress],
) -> tuple[list[_Method], list[Adapter], int]:
    """What puts nothing before a text: the model as it is, rows, LoRA; the adapters; the layer of the rows."""

    plain = partial(logits_of, handle, patch=None)

    def rows(name: str, overlay: Overlay, seconds: float) -> _Method:
        read = partial(logits_of, handle, patch=prepare(handle, overlay))
        return _Method(name, read, len(overlay.to_bytes()), seconds)

    methods, adapters, layer, learnt = [_Method(NOTHING, plain)], [], 0, 0.0
    for name, method in ((CLOSED, "closed_form"), (OPTIMISED, "optimised")):
        began = time.perf_counter()
        writing = replace(config.writing, method=method)
        overlay, report = write(handle, config.facts, writing, next(parts))
        methods.append(rows(name, overlay, time.perf_counter() - began))
        if name == config.reference:
            layer, learnt = report.layer, float(report.loss[-1])
    for rank in config.ranks:
        found = train_adapters(
            handle,
            coded,
            (config.lora_stop, max(config.lora_stop, learnt)),
            rank=rank,
            steps=config.lora_steps,
            rate=config.lora_rate,
            seed=config.seed,
            progress=next(parts),
        )
        for adapter, end in zip(found, ("", AS_FAR), strict=True):
            name = f"LoRA, rank {rank}{end}"
            methods.append(_Method(name, adapter.logits, len(adapter.to_bytes()), adapter.seconds))
        adapters += found
    return methods, adapters, layer


def _prefixed(
    handle: Handle, config: AlternativesConfig, texts: Sequence[_Text], plain: _Method
) -> tuple[list[_Method], int]:
    """The methods that put facts before a text, and how many facts fit there."""
    told = [f"{fact.trigger}{fact.answer}.\n" for fact in config.facts]
    stored = len("".join(told).encode())
    # By itself each, so that a line is the same tokens wherever it stands.
    lines = [tuple(handle.tokenizer(line, add_special_tokens=False, verbose=False)["input_ids"]) for line in told]
    room = handle.context - max(len(text.lead) + len(text.body) for text in texts)

    def before(numbers: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """(the ids of these facts, in this order, as many as fit; how many these are)."""
        ids: tuple[int, ...] = ()
        for n, number in enumerate(numbers):
            if len(ids) + len(lines[number]) > room:
                return ids, n
            ids += lines[number]
        return ids, len(numbers)

    whole, fitting = before(range(len(lines)))
    methods = [_Method(PROMPT, plain.logits, stored, prefixes=[whole] * len(texts))]
    if config.retrieved:
        fit = [own[: before(own)[1]] for own in config.retrieved]  # the best ones that fit
        methods.append(_Method(RETRIEVAL, plain.logits, stored, prefixes=[before(own[::-1])[0] for own in fit]))
    return methods, fitting


def _logits(
    handle: Handle, method: _Method, texts: Sequence[_Text], numbers: Sequence[int], plain: Tensor | None
) -> Tensor:
    """[text, pos, vocab] of the bodies of texts[numbers], padded to the longest; `plain` those of the model alone.

    Padding behind a text changes nothing before it: attention, hash and convolution all look back only.
    """
    longest = max(len(texts[n].body) for n in numbers)
    bodies = [[*texts[n].body, *[0] * (longest - len(texts[n].body))] for n in numbers]
    groups: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
    for place, n in enumerate(numbers):
        prefix = method.prefixes[n] if method.prefixes else ()
        groups.setdefault((bool(prefix), (*texts[n].lead, *prefix)), []).append(place)
    found = torch.empty(0) if plain is None else plain.clone()
    for (prefixed, ids), places in groups.items():
        if prefixed:
            out = _behind(handle, method, ids, [bodies[place] for place in places])
        elif method.prefixes and plain is not None:
            continue  # nothing is put before these: they are as they are
        else:
            whole = torch.tensor([[*ids, *bodies[place]] for place in places], device=handle.device)
            out = handle.finite(method.logits(whole), whole)[:, len(ids) :]
        if len(places) == len(numbers):
            return out
        if not len(found):
            found = out.new_empty(len(numbers), *out.shape[1:])
        found[torch.tensor(places, device=found.device)] = out
    return found


def _behind(handle: Handle, method: _Method, ids: tuple[int, ...], bodies: Sequence[Sequence[int]]) -> Tensor:
    """[text, pos, vocab] of bodies of one length behind the same ids, which are run once while they stay the same."""
    with handle.running():
        if ids not in method.kept:
            method.kept.clear()
            method.kept[ids] = DynamicCache(config=handle.model.config.get_text_config())
            first = torch.tensor([ids], device=handle.device)
            handle.model(input_ids=first, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: method.kept[ids]})
        kept = method.kept[ids]
        layers: list[Any] = kept.layers
        size = sum(own.numel() * own.element_size() for layer in layers for own in (layer.keys, layer.values))
        rows, found = max(1, BATCH_BYTES // size), []
        for start in range(0, len(bodies), rows):
            piece, cache = torch.tensor(bodies[start : start + rows], device=handle.device), copy.deepcopy(kept)
            cache.batch_repeat_interleave(len(piece))
            logits = handle.model(input_ids=piece, use_cache=True, **{CACHE_ARGUMENT: cache}).logits
            found.append(handle.finite(logits, piece))
        return torch.cat(found)


def _groups(texts: Sequence[_Text], numbers: Sequence[int]) -> Iterator[list[int]]:
    """Texts of like length together, at most BATCH_TOKENS with their padding; the same for the same lengths."""
    batch: list[int] = []
    for n in sorted(numbers, key=lambda i: (len(texts[i].lead) + len(texts[i].body), i)):
        if batch and (len(texts[n].lead) + len(texts[n].body)) * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(n)
    yield batch


def _recall(
    handle: Handle,
    methods: Sequence[_Method],
    texts: Sequence[_Text],
    answers: Sequence[tuple[int, ...]],
    progress: Progress,
) -> tuple[np.ndarray, np.ndarray]:
    """(log-probability, rank of the worst token) of the answers, each [method, prompt]."""
    chance = np.zeros((len(methods), len(texts)))
    rank = np.zeros((len(methods), len(texts)), dtype=np.int64)
    groups = list(_groups(texts, range(len(texts))))
    for m, method in enumerate(methods):
        for g, numbers in enumerate(groups):
            progress((m + g / len(groups)) / len(methods), f"{handle.name}: recall, {method.name}")
            with torch.inference_mode():
                logits = _logits(handle, method, texts, numbers, None)
                for place, n in enumerate(numbers):
                    end, answer = len(texts[n].body), torch.tensor(answers[n], device=logits.device)
                    own = logits[place, end - len(answer) : end].double()
                    chance[m, n] = own.log_softmax(-1).gather(1, answer.unsqueeze(1)).sum().item()
                    rank[m, n] = ranks(own, answer).max().item()
    return chance, rank


def ranks(logits: Tensor, ids: Tensor) -> Tensor:
    """How many tokens come before `ids` [token] in `logits` [token, vocab]; of equal ones the lower id comes first."""
    own = logits.gather(1, ids.unsqueeze(1))
    earlier = torch.arange(logits.shape[1], device=logits.device) < ids.unsqueeze(1)
    return ((logits > own) | ((logits == own) & earlier)).sum(-1)


def _drift(handle: Handle, methods: Sequence[_Method], texts: Sequence[_Text], first: int, progress: Progress) -> Drift:
    """How the texts from number `first` on are predicted, against methods[0]."""
    count, numbers = len(texts) - first, range(first, len(texts))
    loss, (change, size, kl) = np.zeros(count), np.zeros((3, len(methods), count))
    changed, done = np.zeros((len(methods), count), dtype=np.int64), 0
    for batch in _groups(texts, numbers):
        with torch.inference_mode():
            plain = _logits(handle, methods[0], texts, batch, None)
            log_probs = plain.double().log_softmax(-1)
            for place, n in enumerate(batch):
                loss[n - first] = -_gathered(log_probs[place], texts[n]).sum().item()
            for m, method in enumerate(methods[1:], 1):
                part = (done + len(batch) * m / len(methods)) / count
                progress(part, f"{handle.name}: unrelated text, {method.name}")
                other = _logits(handle, method, texts, batch, plain)
                for place, n in enumerate(batch):
                    length = len(texts[n].body)
                    differs = (other[place, :length] != plain[place, :length]).any(-1)
                    if not differs.any():
                        continue  # the same bits have the same loss
                    changed[m, n - first] = int(differs.sum())
                    now, was = other[place, :length].double().log_softmax(-1), log_probs[place, :length]
                    nats = _gathered(was, texts[n]) - _gathered(now, texts[n])
                    change[m, n - first], size[m, n - first] = nats.sum().item(), nats.abs().sum().item()
                    kl[m, n - first] = (was.exp() * (was - now)).sum().item()
        done += len(batch)
    progress(1.0, f"{handle.name}: unrelated text")
    return Drift(np.array([len(texts[n].body) - 1 for n in numbers]), loss, change, size, kl, changed)


def _gathered(log_probs: Tensor, text: _Text) -> Tensor:
    """Log-probability [pos] of every token of a text but the first."""
    following = torch.tensor(text.body[1:], device=log_probs.device)
    return log_probs[: len(following)].gather(1, following.unsqueeze(1)).squeeze(1)
