"""Scenarios: two prompts that differ in one field, and their tokens, matched position by position.

Axes: pos (tokens of a prompt; both prompts have as many). A prompt of n tokens has n - 1 positions that an edit of its
cache can reach: the last token runs again on what was edited (models.kv). What comes of it: probes.kv.effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np

from engram_lab.models.errors import AlignmentError, DataError, PromptError, TargetError, first_line
from engram_lab.models.handle import Handle
from engram_lab.probes.answers import behind
from engram_lab.probes.base import Array, Record, role
from engram_lab.probes.spans import spans_of, texts_of

FIELD = "{field}"
ALIGN = ("refuse", "split")
_MARK = "\ue000"  # stands for the field while a chat template is filled in


@dataclass(frozen=True, eq=False)
class Scenario(Record):
    """A template with one {field}, two values for it, and the answer that each should give. DataError if not so.

    `chat`: the filled template is a user's message in the model's chat template, and the answer the reply. An answer
    gets or loses the space before it as the prompt's end needs (see `answer_ids`). erratum and the rest are
    for probes that append text.
    """

    template: str
    old: str
    new: str
    answer_old: str
    answer_new: str
    id: str = "own"
    kind: str = "own"
    question: str = ""
    distractors: str = ""
    erratum: str = ""
    irrelevant: str = ""
    wrong: str = ""
    third: str = ""
    chat: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (n := self.template.count(FIELD)) != 1:
            raise DataError(f"The template of scenario {self.id} has {n} times {FIELD}; it must have it once.")
        if not (self.old and self.new) or self.old == self.new:
            raise DataError(f"Scenario {self.id} needs two different values that are not empty.")
        if not (self.answer_old.strip() and self.answer_new.strip()) or self.answer_old == self.answer_new:
            raise DataError(f"Scenario {self.id} needs two different answers that are not empty.")


@dataclass(frozen=True, eq=False)
class Pair(Record):
    """A scenario as the model gets it: two prompts whose tokens differ only inside the field.

    The tokens of the field are those that hold a byte of a value, and those between that differ because the tokenizer
    merged over the value's edge (then `extended`). `split`: a value was written in more tokens than the tokenizer
    would, so that both have as many. Answers are (old, new).
    """

    text_old: str
    text_new: str
    token_texts_old: tuple[str, ...]  # [pos], a byte that is no whole character as \xNN
    token_texts_new: tuple[str, ...]
    token_ids_old: Annotated[np.ndarray, Array("pos", dtype="int64")]
    token_ids_new: Annotated[np.ndarray, Array("pos", dtype="int64")]
    char_start_old: Annotated[np.ndarray, Array("pos", unit="bytes of the old prompt in UTF-8", dtype="int64")]
    char_end_old: Annotated[np.ndarray, Array("pos", unit="bytes of the old prompt in UTF-8", dtype="int64")]
    char_start_new: Annotated[np.ndarray, Array("pos", unit="bytes of the new prompt in UTF-8", dtype="int64")]
    char_end_new: Annotated[np.ndarray, Array("pos", unit="bytes of the new prompt in UTF-8", dtype="int64")]
    field_start: int  # first position of the field
    field_stop: int  # the position behind its last
    extended: bool
    split: bool
    answer_ids: tuple[int, int] = field(metadata=role("name"))  # first tokens, which are what is compared
    answer_texts: tuple[str, str]  # of these tokens
    answer_lengths: tuple[int, int]  # tokens of the whole answers

    @property
    def n_tokens(self) -> int:
        """Tokens of each prompt."""
        return len(self.token_ids_old)

    @property
    def n_editable(self) -> int:
        """Positions that an edit can reach: all but the last."""
        return self.n_tokens - 1

    @property
    def field(self) -> tuple[int, ...]:
        """Positions of the field."""
        return tuple(range(self.field_start, self.field_stop))

    @property
    def downstream(self) -> tuple[int, ...]:
        """Positions behind the field that an edit can reach."""
        return tuple(range(self.field_stop, self.n_editable))

    @property
    def ids_old(self) -> tuple[int, ...]:
        """The old prompt's tokens."""
        return tuple(self.token_ids_old.tolist())

    @property
    def ids_new(self) -> tuple[int, ...]:
        """The new prompt's tokens."""
        return tuple(self.token_ids_new.tolist())


# --- Tokens --------------------------------------------------------------------------------------------------------


def frame(handle: Handle, scenario: Scenario) -> tuple[str, str]:
    """The text before and behind the field, the chat template filled in; PromptError if the model has none."""
    if not scenario.chat:
        before, _, behind = scenario.template.partition(FIELD)
        return before, behind
    message = {"role": "user", "content": scenario.template.replace(FIELD, _MARK)}
    if not getattr(handle.tokenizer, "chat_template", None):
        raise PromptError(f"{handle.name} has no chat template: run the scenario without chat.")
    try:
        text = handle.tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    except Exception as error:  # whatever a template raises
        raise PromptError(f"The chat template of {handle.name} cannot be filled in ({first_line(error)}).") from error
    if not isinstance(text, str) or text.count(_MARK) != 1:
        raise PromptError(f"The chat template of {handle.name} does not hold the message once, as it was written.")
    before, _, behind = text.partition(_MARK)
    return before, behind


def prompt_ids(handle: Handle, scenario: Scenario, value: str) -> tuple[str, tuple[int, ...]]:
    """(text, ids) of the prompt with `value` in the field; a chat template brings its own specials. PromptError."""
    before, behind = frame(handle, scenario)
    return before + value + behind, encode(handle, before + value + behind, scenario.chat)


def encode(handle: Handle, text: str, chat: bool) -> tuple[int, ...]:
    """Ids of a prompt: as the handle encodes it, or of a filled chat template, without a BOS put before it."""
    ids = handle.encode(text)
    if chat:
        ids = tuple(handle.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return ids


def answer_ids(handle: Handle, scenario: Scenario, text: str, ids: Sequence[int], answer: str) -> tuple[int, ...]:
    """Tokens of an answer behind the prompt `text` with `ids`; TargetError if the tokenizer merges it with the prompt.

    The answer stands behind the prompt as `answers.behind` has it; in a chat as it is.
    """
    whole = encode(handle, text + (answer if scenario.chat else behind(text, answer)), scenario.chat)
    if whole[: len(ids)] != tuple(ids) or len(whole) == len(ids):
        raise TargetError(
            f'The tokenizer of {handle.name} merges the answer "{answer}" with the end of the prompt of scenario '
            f"{scenario.id}: end the prompt in a whole word, and begin the answer with its space."
        )
    return whole[len(ids) :]


def prepare(handle: Handle, scenario: Scenario, align: str = "refuse") -> Pair:
    """The two prompts of a scenario, position by position.

    Values of different numbers of tokens are refused, or with `align` "split" the shorter one is written in more and
    smaller tokens, which changes nothing of the text; the oracle tells whether the model still reads it. Raises
    AlignmentError, PromptError or TargetError with the reason, before any forward.
    """
    if align not in ALIGN:
        raise AlignmentError(f'"{align}" is no way to align two values: use {" or ".join(ALIGN)}.')
    before, behind = frame(handle, scenario)
    texts = [before + value + behind for value in (scenario.old, scenario.new)]
    ids = [encode(handle, text, scenario.chat) for text in texts]
    answers = [answer_ids(handle, scenario, texts[0], ids[0], a) for a in (scenario.answer_old, scenario.answer_new)]
    if answers[0][0] == answers[1][0]:
        raise TargetError(
            f"Both answers of scenario {scenario.id} begin with the same token for {handle.name} "
            f"({answers[0][0]} {_shown(handle, answers[0][:1])}), and first tokens are compared: reword one."
        )
    spans = []
    for text, value, own in zip(texts, (scenario.old, scenario.new), ids, strict=True):
        start = len(before.encode())
        spans.append(_value_tokens(handle, text, own, start, start + len(value.encode())))
    head = min(_common(ids[0], ids[1]), *(span[0] for span in spans))
    tail = min(_common(ids[0][::-1], ids[1][::-1]), *(len(own) - span[1] for own, span in zip(ids, spans, strict=True)))
    fields = [own[head : len(own) - tail] for own in ids]
    if tail == 0:
        raise AlignmentError(
            f"The field of scenario {scenario.id} is at the end of the prompt for {handle.name}, and the last token "
            "runs again on whatever is swapped: put text behind the field."
        )
    extended = any((head, len(own) - tail) != span for own, span in zip(ids, spans, strict=True))
    split = len(fields[0]) != len(fields[1])
    if split:
        fields = _level(handle, scenario, fields, align)
        ids = [own[:head] + part + own[len(own) - tail :] for own, part in zip(ids, fields, strict=True)]
    old, new = (spans_of(handle, text, own) for text, own in zip(texts, ids, strict=True))
    first_tokens = [texts_of(handle.pieces(own[:1], whole=False))[0] for own in answers]
    return Pair(
        text_old=texts[0],
        text_new=texts[1],
        token_texts_old=texts_of(old.pieces),
        token_texts_new=texts_of(new.pieces),
        token_ids_old=np.array(ids[0], dtype=np.int64),
        token_ids_new=np.array(ids[1], dtype=np.int64),
        char_start_old=old.start,
        char_end_old=old.end,
        char_start_new=new.start,
        char_end_new=new.end,
        field_start=head,
        field_stop=head + len(fields[0]),
        extended=extended,
        split=split,
        answer_ids=(answers[0][0], answers[1][0]),
        answer_texts=(first_tokens[0], first_tokens[1]),
        answer_lengths=(len(answers[0]), len(answers[1])),
    )


def _value_tokens(handle: Handle, text: str, ids: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """First position and the one behind the last of the tokens that hold a byte of start..stop-1."""
    where = spans_of(handle, text, ids)
    if not where.lossless:
        raise AlignmentError(
            f"The tokenizer of {handle.name} changes the text, so the field's tokens cannot be told: use a model whose "
            "tokenizer keeps it."
        )
    inside = np.flatnonzero((where.end > start) & (where.start < stop))
    return int(inside[0]), int(inside[-1]) + 1


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning, which leaves at least a token of each."""
    n = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return min(n, len(one) - 1, len(other) - 1)


def _shown(handle: Handle, ids: Sequence[int]) -> str:
    return "|".join(texts_of(handle.pieces(ids, whole=False)))


def _level(handle: Handle, scenario: Scenario, fields: Sequence[tuple[int, ...]], align: str) -> list[tuple[int, ...]]:
    """The values' tokens with the shorter one split until both have as many; AlignmentError if that is not wanted."""
    told = " and ".join(f"{len(own)} ({_shown(handle, own)})" for own in fields)
    if align == "refuse":
        raise AlignmentError(
            f"The values of scenario {scenario.id} have different numbers of tokens for {handle.name}, {told}: choose "
            'values of equal length, or align them by "split".'
        )
    known: dict[bytes, int] = {}
    for i in reversed(range(handle.vocab_size)):
        if not handle.is_special(i):
            known[handle.pieces([i], whole=False)[0]] = i  # the lowest id, the most common token
    longest = max(map(len, fields))
    out = []
    for own in fields:
        tokens = list(own)
        while len(tokens) < longest:
            # Of all ways to split one token into two, that with the most common pieces.
            ways = [
                (max(known[piece[:cut]], known[piece[cut:]]), n, known[piece[:cut]], known[piece[cut:]])
                for n, piece in enumerate(handle.pieces(tokens, whole=False))
                for cut in range(1, len(piece))
                if piece[:cut] in known and piece[cut:] in known
            ]
            if not ways:
                raise AlignmentError(f"The values of scenario {scenario.id} ({told}) cannot be split to equal lengths.")
            _, n, first, second = min(ways)
            tokens[n : n + 1] = [first, second]
        out.append(tuple(tokens))
    return out
