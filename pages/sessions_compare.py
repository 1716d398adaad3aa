"""Two kept runs of one probe side by side, and what is different between them."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from engram_lab.lab.app import page, reopened, runner
from engram_lab.lab.draw import labels
from engram_lab.lab.sessions import RunInfo, SessionInfo
from engram_lab.pages.sessions_list import figure, short
from engram_lab.probes.base import Report


def comparison(session: SessionInfo) -> None:
    """Two runs of one probe side by side, and their difference."""
    runs = {labelled(session, n, run): run for n, run in enumerate(session.runs, 1)}
    others = [other for other in reopened.store().sessions() if other.id != session.id]
    every = runs | {labelled(other, n, run): run for other in others for n, run in enumerate(other.runs, 1)}
    able = [name for name, run in runs.items() if sum(o.probe == run.probe for o in every.values()) > 1]
    st.subheader("Compare two runs", anchor=False)
    if not able:
        st.caption("There is no second run of any of its probes to compare with: keep one more.")
        return
    left, right = st.columns(2)
    page.keep_within("compare_a", able, able[0])
    a = left.selectbox("A", able, key="compare_a")
    same = [name for name, run in every.items() if run.probe == runs[a].probe and name != a]
    page.keep_within("compare_b", same, same[0])
    b = right.selectbox("B", same, key="compare_b")
    if not st.toggle("Compare them", key="compare", bind="query-params"):
        return
    one, two = (reopened.kept_report(every[name]) for name in (a, b))
    from engram_lab.lab.sessions import difference  # its rules name a probe's classes

    for column, report, name in zip(st.columns(2), (one, two), "AB", strict=True):
        drawn = figure(report)
        drawn.update_layout(width=None)
        column.plotly_chart(drawn, theme=None, key=f"side_{name}", config={"displayModeBar": False})
    differing(one, two)
    offered = {difference.label(one, two, path): path for path in difference.measures(one, two)}
    if offered:
        page.keep_within("measure_of", list(offered), next(iter(offered)))
        path = offered[st.selectbox("Difference of", list(offered), key="measure_of", width=420)]
        drawn = difference.difference(one, two, path, runner.mode())
        st.plotly_chart(drawn, theme=None, key="difference", config={"displayModeBar": False})
    refused = difference.refused(one, two)
    if refused:
        with st.expander(f"What cannot be subtracted ({len(refused)})", expanded=not offered):
            st.markdown("\n".join(f"- {labels.markdown(reason)}" for reason in refused.values()))
    table = difference.scalars(one, two)
    if len(table):
        st.dataframe(table, hide_index=True)


def labelled(session: SessionInfo, n: int, run: RunInfo) -> str:
    """A run of any session, in a word."""
    return f"{session.name} · {n} · {run.probe}"


def differing(one: Report, two: Report) -> None:
    """What the requests and the protocols have differently."""
    a, b = (report.config.to_dict() | {
        "fingerprints": [m.fingerprint for m in report.protocol.models], **report.protocol.versions,
    } for report in (one, two))  # fmt: skip
    rows = [{"of the request": key, "A": short(a.get(key)), "B": short(b.get(key))} for key in a | b
            if a.get(key) != b.get(key)]  # fmt: skip
    if rows:
        st.dataframe(pd.DataFrame(rows), hide_index=True)
    else:
        st.caption("Both have the same request, weights and versions.")
