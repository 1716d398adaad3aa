"""The HTML page of a session: what stands in it, that it is escaped, and that nothing else may run."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from engram_lab.lab.fronts import figures as figures_of
from engram_lab.lab.fronts import front
from engram_lab.lab.sessions import Store, open_store
from engram_lab.lab.sessions import report as report_html
from engram_lab.lab.sessions.report import html_report, markdown
from engram_lab.models import listing
from engram_lab.models.handle import Handle
from engram_lab.probes import gates, rows
from engram_lab.probes import lens as lens_probe
from engram_lab.probes.base import Report
from engram_lab.probes.gates import GatesConfig
from engram_lab.probes.lens import LensConfig
from engram_lab.probes.rows import RowsConfig
from tests.models import tiny

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\"'&{{ 7 * 7 }}"


class Page(HTMLParser):
    """The tags of a page with their attributes, the text of its scripts, and all text outside of them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.text += data

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = open_store(f"sqlite:///{tmp_path / 'store.db'}", tmp_path)
    yield found
    found.dispose()


def figures(page: Page) -> list[tuple[Any, Any]]:
    """(light, dark) of each figure."""
    stored = [
        json.loads(text)
        for text, attributes in zip(page.scripts, page.of("script"), strict=True)
        if attributes.get("type") == "application/json"
    ]
    return list(zip(stored[::2], stored[1::2], strict=True))


def test_the_page_holds_the_session(store: Store, report: Report, set_report: Report, pair: list[Handle]) -> None:
    store.save(report, "The mill", note="It *settles* early.", tags=["river"], seconds=12.345)
    store.save(set_report, "The mill")
    page = Page(html_report(store, "The mill", pair))
    assert "The mill · Engram Lab" in page.text and "river" in page.text and "took 12.3 s" in page.text
    assert [a["href"] for a in page.of("a")] == ["#run-1", "#run-2"]
    assert [s["id"] for s in page.of("section")] == ["run-1", "run-2"]
    for text in (
        report.protocol.models[0].fingerprint, "engram-lab probe lens", "lens.run(", front("lens").DEFINITIONS["kl"],
        " ".join(map(str, report.protocol.prompt_ids[0][0])), report.config.prompts[0], store.session("The mill").name,
    ):  # fmt: skip
        assert text in page.text
    drawn = figures(page)
    own = front("lens").figure(report, "light", pair)
    light, dark = drawn[0]
    assert light["layout"]["title"]["text"] == own.layout.title.text
    line = next(t for t in light["data"] if t["name"] == "engram-mini (◆ memory)")
    assert line["marker"]["symbol"] == ["circle", "circle", "diamond", "circle"], "block 1 reads the memory"
    assert line["y"] == pytest.approx(report.result.models[0].mean_kl)
    assert (
        light["layout"]["template"]["layout"]["paper_bgcolor"] != dark["layout"]["template"]["layout"]["paper_bgcolor"]
    )
    titles = [light["layout"]["title"]["text"] for light, _ in drawn]
    assert len(titles) == len(figures_of(report, "light", pair)) + len(figures_of(set_report, "light", pair))
    assert sum("at each layer and position" in title for title in titles) == 2, "a map for each model"


def test_a_long_table_is_cut(store: Store, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_html, "MOST_ROWS", 100)
    store.save(report, "One")
    page = html_report(store, "One", ())
    assert sum(1 for _ in front("lens").rows(report)) > 100
    body = page[page.index("Numbers: the first 100 rows") :]
    assert body.count("<tr>") == 1 + 100
    assert f"<td>{float(report.result.models[0].kl[0, 0]):.6g}</td>" in body


def test_hostile_text_stays_text(
    store: Store, twins: dict[str, PreTrainedModel], tokenizer: PreTrainedTokenizerFast
) -> None:
    handle = Handle(twins["engram-mini"], tokenizer, HOSTILE)
    report = lens_probe.run([handle], LensConfig((HOSTILE,), (HOSTILE,), top_k=2))
    short = HOSTILE[:60]
    store.save(report, HOSTILE, note=HOSTILE, tags=[short], seconds=1)
    page = Page(html_report(store, HOSTILE, [handle]))
    assert page.of("img") == [] and page.of("iframe") == []
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert len(page.scripts) == 2 + 2 * len(figures(page))
    assert page.text.count(HOSTILE) >= 5, "name twice, model, prompt, note"
    assert "49" not in page.text[: page.text.index("Run 1 of 1")], "no template of the session's is run"
    assert HOSTILE in json.dumps(figures(page)[0][0]).replace("\\", "") or "&lt;/script" in json.dumps(figures(page)[0])


def test_only_the_scripts_of_the_page_may_run(store: Store, report: Report) -> None:
    store.save(report, "One")
    page = Page(html_report(store, "One", ()))
    policy = next(m["content"] for m in page.of("meta") if m.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    run = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text, attributes in zip(page.scripts, page.of("script"), strict=True)
        if "type" not in attributes
    ]
    assert rules["script-src"].split() == [f"'sha256-{digest}'" for digest in run]
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for tag, attributes in page.tags:
        address = attributes.get("src", attributes.get("href", ""))
        assert address.startswith(("#", "data:")) or not address, (tag, address)


def test_notes_are_markdown_without_html() -> None:
    page = markdown("**a** <b>x</b> [web](https://a.org/?a=1&b=2) ![pic](http://a.org/x.png)\n\n|h|\n|-|\n|1|")
    assert "<strong>a</strong> &lt;b&gt;x&lt;/b&gt;" in page and "<table>" in page
    assert [a["href"] for a in Page(page).of("a")] == ["https://a.org/?a=1&b=2", "http://a.org/x.png"]
    assert Page(page).of("img") == [], "a picture would ask the network for it"


@pytest.mark.parametrize(
    "link", ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "java\tscript:x", "vbscript:x", "data:text/html,x",
             "data:image/png;base64,x", "file:///etc/passwd", "//a.org", "../x", "&#106;avascript:alert(1)"],
)  # fmt: skip
def test_other_links_are_no_links(link: str) -> None:
    for text in (f"[x]({link})", f"![x]({link})", f"<{link}>", f"[x][1]\n\n[1]: {link}"):
        assert Page(markdown(text)).of("a") == [] and Page(markdown(text)).of("img") == []


def test_tokens_without_their_model_are_ids(store: Store, report: Report, pair: list[Handle]) -> None:
    """A model of that name with other weights may have another tokenizer: it names nothing."""
    other = Handle(tiny.make("llama", seed=9, max_position_embeddings=64), tiny.byte_level(bos=False), "dense-mini")
    store.save(report, "One")
    named = figures(Page(html_report(store, "One", pair)))
    for handles in ((), [other]):
        bare = figures(Page(html_report(store, "One", handles)))
        assert len(bare) == len(named)
        cells = [
            next(t for t in light["data"] if t["type"] == "heatmap") for light, _ in bare if "heatmap" in str(light)
        ]
        assert cells and all(cell.startswith("id ") for trace in cells for row in trace["text"] for cell in row)
    cells = [next(t for t in light["data"] if t["type"] == "heatmap") for light, _ in named if "heatmap" in str(light)]
    assert not any(cell.startswith("id ") for trace in cells for row in trace["text"] for cell in row)


def test_models_are_found_without_being_given(
    store: Store, report: Report, shipped: Path, pair: list[Handle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "SHIPPED", shipped)
    store.save(report, "One")
    with report_html.opened([report]) as found:
        assert sorted(handle.name for handle in found) == ["dense-mini", "engram-mini"]
        assert {h.name: h.fingerprint for h in found} == {h.name: h.fingerprint for h in pair}
    with pytest.raises(LookupError), report_html.opened([report]):
        raise LookupError  # of the block itself


def test_a_model_by_a_path_is_not_opened(store: Store, shipped: Path, pair: list[Handle]) -> None:
    path = str(shipped / "dense-mini")
    handle = Handle(pair[1].model, pair[1].tokenizer, path)
    report = lens_probe.run([handle], LensConfig((path,), ("The river",)))
    with report_html.opened([report]) as found:
        assert found == ()


def test_rows_and_gates_without_a_handle(store: Store, pair: list[Handle]) -> None:
    engram = pair[:1]
    found = rows.run(
        engram, RowsConfig(("engram-mini",), ("The river runs past",), text=("The river runs", "the old mill"))
    )
    written = gates.run(engram, GatesConfig(models=("engram-mini",), prompts=("The river runs",), target=" the"))
    bare, named = (front("rows").figure(found, "light", handles) for handles in ((), engram))
    same = [a == b for a, b in zip(bare.layout.yaxis.ticktext, named.layout.yaxis.ticktext, strict=True)]
    assert sum(same) >= len(same) // 2, "but for pieces of characters the report's own texts name the same"
    for report in (found, written):
        store.save(report, "Both")
    drawn = figures(Page(html_report(store, "Both", ())))
    titles = [light["layout"]["title"]["text"] for light, _ in drawn]
    assert titles[0] == "What came through" and sum("memory" in title for title in titles) >= 3
    assert all(light["layout"].get("width", 740) >= 740 for light, _ in drawn)


def test_a_session_without_runs(store: Store) -> None:
    from datetime import UTC, datetime

    store.add("Empty", "", (), datetime.now(UTC), [])
    assert "This session has no runs." in html_report(store, "Empty")
