"""The widgets of a request, drawn from its parts: words, bounds, default and key stand there once.

Each gives the value as the request has it. `box` is the container (None: the present one), and `layout` what else
Streamlit is told; bounds and defaults that only the model knows are handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import streamlit as st

from engram_lab.lab.ask.request import Choice, Number, Part, Switch

T = TypeVar("T")
Box = st.delta_generator.DeltaGenerator


def _in(box: Box | None) -> Any:
    return st if box is None else box


def _known(part: Part, layout: dict[str, Any]) -> dict[str, Any]:
    return {"key": part.key, "bind": "query-params", "help": part.tip} | layout


def number(
    part: Number,
    box: Box | None = None,
    low: int | None = None,
    high: int | None = None,
    value: int | None = None,
    **layout: Any,
) -> int:
    """A whole number, within the part's bounds unless others are given."""
    least, most = (part.low if low is None else low), (part.high if high is None else high)
    first = part.default if value is None else value
    return int(_in(box).number_input(part.label, least, most, first, part.step, **_known(part, layout)))


def switch(part: Switch, box: Box | None = None, value: bool | None = None, **layout: Any) -> bool:
    """On or off."""
    return _in(box).toggle(part.label, part.default if value is None else value, **_known(part, layout))


def choice(part: Choice, box: Box | None = None, **layout: Any) -> str:
    """One of the part's words, as the value that it stands for."""
    words = dict(part.words or {})
    first = next((word for word, value in words.items() if value == part.default), None)
    known = _known(part, layout)
    return words[_in(box).segmented_control(part.label, list(words), default=first, required=True, **known)]


def several(
    part: Part,
    offered: Sequence[T],
    box: Box | None = None,
    default: Sequence[T] | None = None,
    as_picked: bool = False,
    **layout: Any,
) -> list[T]:
    """Several of those offered, in their order or as picked; at first the part's default, unless another is given."""
    _keep_within(part, offered)
    first = [value for value in (part.default if default is None else default) if value in offered]
    chosen = _in(box).pills(part.label, offered, selection_mode="multi", default=first, **_known(part, layout))
    return _picked(chosen, offered, as_picked)


def _picked(chosen: Sequence[T], offered: Sequence[T], as_picked: bool) -> list[T]:
    return list(chosen) if as_picked else [value for value in offered if value in chosen]


def _keep_within(part: Part, offered: Sequence[Any]) -> None:
    """Drop what another request offered and this one does not."""
    key = str(part.key)
    if key in st.session_state:
        st.session_state[key] = [value for value in st.session_state[key] if value in offered]


def listed(part: Part, offered: Sequence[T], box: Box | None = None, as_picked: bool = False, **layout: Any) -> list[T]:
    """Several of many, in their order or as picked; at first none."""
    _keep_within(part, offered)
    chosen = _in(box).multiselect(part.label, offered, **_known(part, layout))
    return _picked(chosen, offered, as_picked)


def text(part: Part, box: Box | None = None, value: str | None = None, height: int | None = None, **layout: Any) -> str:
    """A text, in a box of this height (pixels) or on one line."""
    first, known = (part.default or "") if value is None else value, _known(part, layout)
    if height is None:
        return _in(box).text_input(part.label, first, **known)
    return _in(box).text_area(part.label, first, height=height, **known)
