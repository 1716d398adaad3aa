"""Text behind a prompt whose cache is at hand: which tokens it adds, how the question is asked again, how long it took.

Axes: pos. A prompt ends where its answer comes, so that whatever is said behind it is followed by the end of the
question once more (`tail`), and the model answers there:
    prompt (from the cache) + "\\n" + what is said + "\\n" + tail
In a chat template what is said and the tail are a user's new turn, and the tokens that the template puts behind the
first turn for the reply are dropped from the cache, as the conversation goes on without a reply.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engram_lab.models.errors import PromptError, first_line
from engram_lab.models.handle import Handle
from engram_lab.probes.kv.scenario import FIELD, Scenario, encode, prompt_ids

_MARK = "\ue000"  # stands for a turn's text while a chat template is filled in
ROUNDS = 3  # of each measurement of time, of which the shortest counts


def seconds(*works: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """The shortest of ROUNDS runs of each, in seconds of the clock; they take turns, so that a busy spell hits all."""
    best = [float("inf")] * len(works)
    for _ in range(ROUNDS):
        for n, work in enumerate(works):
            began = clock()
            work()
            best[n] = min(best[n], clock() - began)
    return best


def tail(scenario: Scenario) -> str:
    """The end of the question: the last line behind the field.

    Where the field stands in that line, what follows the last sentence that ends behind the field, and without such
    a sentence all behind the field. The template's white space at its end stays.
    """
    behind = scenario.template.partition(FIELD)[2]
    body = behind.rstrip()
    found = body.rpartition("\n")[2] if "\n" in body else re.split(r"[.!?]\s+", body)[-1]
    asked = found.lstrip() + behind[len(body) :]
    if not asked.strip():
        raise PromptError(
            f"There is no text behind the field of scenario {scenario.id} that could be repeated as its question: "
            "end the template with the beginning of the answer's sentence."
        )
    return asked


@dataclass(frozen=True)
class Added:
    """What to run behind a cached text: its first `kept` tokens stay, `ids` follow."""

    kept: int
    ids: tuple[int, ...]

    def after(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The whole text's tokens."""
        return (*ids[: self.kept], *self.ids)


def added(
    handle: Handle, scenario: Scenario, value: str, said: Sequence[str | None], ids: Sequence[int], least: int
) -> Added:
    """The last of `said` behind `ids`, the tokens of the prompt with `value` and all before it; None says nothing.

    The tokens are those of the whole text. Where the tokenizer merges over the end of the cached text, or a chat
    template's turn ends otherwise than its prompt, the last cached tokens are dropped and run as they are now; at
    `least` so many have to stay. Raises PromptError, also for a text longer than the context.
    """
    whole, before = (_ids(handle, scenario, value, own) for own in (said, said[:-1]))
    common = next((n for n, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
    kept = len(ids) - (len(before) - common)  # values split by hand have more tokens than `before`, further ahead
    if kept < least:
        raise PromptError(
            f"{handle.name} reads the prompt of scenario {scenario.id} in other tokens once text follows it, so its "
            "cache cannot be gone on from."
        )
    return Added(kept, tuple(whole[common:]))


def closing(handle: Handle, scenario: Scenario) -> tuple[int, ...]:
    """Tokens behind a text that the model wrote, which ask again: a line end and the tail, or a user's new turn.

    They do not depend on what was written, so that every run has the same; in a chat template they end the reply.
    """
    asked = tail(scenario)
    if not scenario.chat:
        return behind(handle, asked, f"\n{asked}")
    turns = [("user", scenario.template.replace(FIELD, scenario.old)), ("assistant", _MARK), ("user", asked)]
    text = _filled(handle, turns)
    if text.count(_MARK) != 1:
        raise PromptError(f"The chat template of {handle.name} does not hold a reply as it was written.")
    return encode(handle, text.partition(_MARK)[2], True)


def behind(handle: Handle, text: str, more: str) -> tuple[int, ...]:
    """Tokens of `more` where it follows `text`; its own, without special tokens, where the tokenizer merges the two."""
    alone, whole = (encode(handle, own, True) for own in (text, text + more)) if text else ((), ())
    if text and whole[: len(alone)] == alone:
        return whole[len(alone) :]
    return encode(handle, more, True)


def _ids(handle: Handle, scenario: Scenario, value: str, said: Sequence[str | None]) -> tuple[int, ...]:
    text, ids = prompt_ids(handle, scenario, value)
    if not said:
        return ids
    turns = ["\n".join([*([own] if own is not None else []), tail(scenario)]) for own in said]
    if scenario.chat:
        first = ("user", scenario.template.replace(FIELD, value))
        text = _filled(handle, [first, *(("user", own) for own in turns)])
    else:
        text = "\n".join([text, *turns])
    return encode(handle, text, scenario.chat)


def _filled(handle: Handle, turns: Sequence[tuple[str, str]]) -> str:
    messages = [{"role": role, "content": text} for role, text in turns]
    try:
        text = handle.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # whatever a template raises
        raise PromptError(
            f"The chat template of {handle.name} takes no further turn here ({first_line(error)}): run the scenario "
            "without chat."
        ) from error
    return str(text)
