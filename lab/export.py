"""A lens report as files, and the request as a command line or Python that gives the same report."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from lab import labels
from models.errors import LabError
from probes.base import Report
from probes.logit_lens import LensConfig

if TYPE_CHECKING:
    import plotly.graph_objects as go

LENS_COLUMNS = (
    "model", "prompt", "position", "token_id", "token", "layer", "kl_nats", "entropy_nats",
    "top_id", "top_probability", "target_id", "target_rank", "target_probability",
    "settle_layer", "next_token_loss_nats",
)  # fmt: skip


def lens_rows(report: Report) -> Iterator[dict[str, Any]]:
    """One row for each model, position and layer, with the names of LENS_COLUMNS; what was not asked is None.

    `position` counts within its prompt; `token` is the visible label, `prompt` the index into config.prompts.
    """
    for lens in report.result.models:
        index = lens.prompt_index
        position = np.arange(len(index)) - np.searchsorted(index, index)  # prompts follow each other
        losses = lens.next_token_loss
        for pos in range(len(index)):
            start, end = int(lens.char_start[pos]), int(lens.char_end[pos])
            raw = report.config.prompts[int(index[pos])].encode()[start:end]
            token = labels.label(raw) if end > start else lens.token_texts[pos]
            for layer, name in enumerate(lens.layer_names):
                has_top, has_target = lens.top_ids is not None, lens.target_id is not None
                values = (
                    lens.name,
                    int(index[pos]),
                    int(position[pos]),
                    int(lens.token_ids[pos]),
                    token,
                    name,
                    float(lens.kl[layer][pos]),
                    float(lens.entropy[layer][pos]),
                    int(lens.top_ids[layer][pos][0]) if has_top else None,
                    float(lens.top_probs[layer][pos][0]) if has_top else None,
                    lens.target_id,
                    int(lens.target_rank[layer][pos]) if has_target else None,
                    float(lens.target_prob[layer][pos]) if has_target else None,
                    lens.layer_names[int(lens.settle_depth[pos])],
                    None if np.isnan(losses[pos]) else float(losses[pos]),
                )
                yield dict(zip(LENS_COLUMNS, values, strict=True))


def lens_csv(report: Report) -> str:
    """The rows of `lens_rows` as CSV with a header."""
    out = io.StringIO()
    writer = csv.DictWriter(out, LENS_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lens_rows(report))
    return out.getvalue()


def no_png() -> str | None:
    """Why no PNG can be drawn here, or None if one can."""
    from choreographer.browsers.chromium import Chromium

    return None if Chromium.find_browser(skip_local=False) else "A PNG needs Chrome or Chromium on this machine."


def png(figure: go.Figure, scale: float = 2.0) -> bytes:
    """The figure as a PNG, drawn by Chrome or Chromium; LabError where there is none."""
    try:
        image: bytes = figure.to_image(format="png", scale=scale, width=figure.layout.width or 1000)
    except Exception as error:  # kaleido's own classes, or whatever the browser's start raises
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise LabError(
            f"The PNG could not be drawn ({reason}): it needs Chrome or Chromium on this machine; "
            "use CSV or JSON without it."
        ) from error
    return image


def command_line(config: LensConfig, texts: str = "texts.txt") -> str:
    """The shell command of a request; several prompts are read from the file `texts`, one a line."""
    parts = ["engram-lab probe lens", f"--model={shlex.quote(config.models[0])}"]
    parts += [f"--against={shlex.quote(name)}" for name in config.models[1:]]
    if config.detail:
        parts += [f"--prompt={shlex.quote(prompt)}" for prompt in config.prompts]
    else:
        parts.append(f"--prompts={shlex.quote(texts)}")
    if config.target is not None:
        parts.append(f"--target={shlex.quote(config.target)}")
    if config.detail:
        parts.append(f"--top-k={config.top_k}")
    parts += [f"--seed={config.seed}", f"--bootstrap={config.bootstrap}", "--json=-"]
    return " \\\n  ".join(parts)


def python(config: LensConfig, texts: str = "texts.txt") -> str:
    """A Python program of a request; several prompts are read from the file `texts`, one a line."""
    options = [f"models={config.models!r}"]
    head = ""
    if config.detail:
        options.append(f"prompts={config.prompts!r}")
    else:
        head = "from pathlib import Path\n\n"
        options.append("prompts=tuple(line.strip() for line in lines if line.strip())")
    fields = ("target", "top_k", "seed", "bootstrap", "detail")
    options += [f"{name}={getattr(config, name)!r}" for name in fields]
    body = "".join(f"    {option},\n" for option in options)
    read = "" if config.detail else f'lines = Path({texts!r}).read_text(encoding="utf-8").splitlines()\n'
    return (
        f"{head}from models.handle import open_model\n"
        "from probes import logit_lens\n"
        "from probes.logit_lens import LensConfig\n\n"
        f"{read}config = LensConfig(\n{body})\n"
        "report = logit_lens.run([open_model(name) for name in config.models], config)\n"
        "for lens in report.result.models:\n"
        "    print(lens.name, dict(zip(lens.layer_names, lens.mean_kl)))\n"
    )
