"""Files that a user brought: kept while the page is left, and put back with a kept run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import streamlit as st

from engram_lab.lab.app import reopened
from engram_lab.lab.draw import labels
from engram_lab.models.errors import DataError

LARGEST_UPLOAD = 4  # MB; of a text set and the like


@dataclass(frozen=True)
class Upload:
    """A file that the user brought."""

    name: str
    data: bytes


def upload(label: str, key: str, on_change: Callable[[], None] | None = None, **options: Any) -> Upload | None:
    """A file that the user brought, now or before the page was left, or that came with a reopened run."""
    options.setdefault("max_upload_size", LARGEST_UPLOAD)
    st.file_uploader(label, key=key, on_change=_uploaded, args=(key, on_change), **options)
    kept: tuple[str, bytes] | None = st.session_state.get(f"kept.{key}")
    if kept is None:
        return None
    reopened.state().files[key] = kept
    if st.session_state.get(key) is None:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.caption(f"{labels.markdown(kept[0])}, {len(kept[1]):,} bytes, is in use.")
            st.button("Remove", key=f"drop_{key}", icon=":material/close:", on_click=_drop, args=(key, on_change))
    return _small(*kept)


def _uploaded(key: str, on_change: Callable[[], None] | None) -> None:
    """Keep what was brought, as the uploader itself forgets it when the page is left."""
    file = st.session_state[key]
    if file is None:
        _drop(key, on_change)
        return
    st.session_state[f"kept.{key}"] = (file.name, file.getvalue())
    if on_change is not None:
        on_change()


def _small(name: str, data: bytes) -> Upload:
    """The upload; DataError for one that is too large, which else only the browser refuses."""
    if len(data) > LARGEST_UPLOAD << 20:
        raise DataError(f"{name} has {len(data) / 2**20:.1f} MB: bring one of at most {LARGEST_UPLOAD} MB.")
    return Upload(name, data)


def _drop(key: str, on_change: Callable[[], None] | None) -> None:
    st.session_state.pop(f"kept.{key}", None)
    if on_change is not None:
        on_change()


def upload_many(label: str, key: str, most: int = 8, **options: Any) -> list[Upload]:
    """Several files, as `upload` has one; LabError for more than `most`."""
    options.setdefault("max_upload_size", LARGEST_UPLOAD)
    st.file_uploader(label, key=key, accept_multiple_files=True, on_change=_uploaded_many, args=(key,), **options)
    names = [name for name in (f"{key}.{n}" for n in range(most + 1)) if f"kept.{name}" in st.session_state]
    kept = {name: st.session_state[f"kept.{name}"] for name in names}
    if len(kept) > most:
        raise DataError(f"These are more than {most} files: take some away.")
    reopened.state().files |= kept
    if kept and not st.session_state.get(key):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.caption(f"{labels.markdown(', '.join(name for name, _ in kept.values()))}: in use.")
            st.button("Remove", key=f"drop_{key}", icon=":material/close:", on_click=_drop_many, args=(key,))
    return [_small(*file) for file in kept.values()]


def _uploaded_many(key: str) -> None:
    _drop_many(key)
    for n, file in enumerate(st.session_state[key]):
        st.session_state[f"kept.{key}.{n}"] = (file.name, file.getvalue())


def _drop_many(key: str) -> None:
    for name in [name for name in st.session_state if str(name).startswith(f"kept.{key}.")]:
        del st.session_state[name]
