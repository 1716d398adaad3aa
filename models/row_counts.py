"""How often each row of a model's tables was read over a text: counted once, kept as safetensors, found again.

A file holds for each memory layer L `hits.L` and `ngrams.L`, [row] in the order of the table: how often the row was
read, and by how many distinct n-grams. Its metadata, as JSON, tell the fingerprint of the model, the text, its length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from engram_lab.models import listing
from engram_lab.models.canonical import tokenizer_sha256
from engram_lab.models.data import PackedStream
from engram_lab.models.errors import DataError, LabError
from engram_lab.models.files import whole
from engram_lab.models.handle import Handle
from engram_lab.models.ngrams import Batch, count_ngrams, row_counts
from engram_lab.models.tables import memories
from engram_lab.models.train import TrainConfig

ABOUT = "row_counts"  # the key of the metadata
FOLDER = "row_hits"  # beside the folder of the shipped models, which is read for weights


@dataclass(frozen=True)
class RowCounts:
    """Reads of the rows of the model `fingerprint`: hits and ngrams [row] for each memory layer.

    `distinct` is the number of distinct n-grams of each order 2..N, `sources` says which text was read.
    """

    fingerprint: str
    sources: tuple[str, ...]
    tokens: int
    distinct: tuple[int, ...]
    hits: dict[int, np.ndarray]
    ngrams: dict[int, np.ndarray]

    def save(self, file: Path) -> None:
        """Write the file, whole or not at all, each array as the narrowest dtype that holds it."""
        arrays = {f"hits.{layer}": _narrow(hits) for layer, hits in self.hits.items()}
        arrays |= {f"ngrams.{layer}": _narrow(ngrams) for layer, ngrams in self.ngrams.items()}
        about = {name: getattr(self, name) for name in ("fingerprint", "sources", "tokens", "distinct")}
        with whole(file) as fresh:
            # One entry, as safetensors writes several in an order of chance.
            save_file(arrays, fresh, metadata={ABOUT: json.dumps(about)})


def _narrow(values: np.ndarray) -> np.ndarray:
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))


def load(file: Path) -> RowCounts:
    """Read a file of counts; DataError if it is none."""
    try:
        with safe_open(file, framework="numpy") as stored:
            about = json.loads((stored.metadata() or {})[ABOUT])
            arrays = {name: stored.get_tensor(name).astype(np.int64) for name in stored.keys()}  # noqa: SIM118
        layers = sorted(int(name.removeprefix("hits.")) for name in arrays if name.startswith("hits."))
        return RowCounts(
            about["fingerprint"],
            tuple(about["sources"]),
            about["tokens"],
            tuple(about["distinct"]),
            {layer: arrays[f"hits.{layer}"] for layer in layers},
            {layer: arrays[f"ngrams.{layer}"] for layer in layers},
        )
    except FileNotFoundError:
        raise DataError(f"There is no file of row counts {file}: make one with engram-lab rows count.") from None
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise DataError(f"{file} is no file of row counts ({error}): make one with engram-lab rows count.") from None


def shipped(fingerprint: str) -> RowCounts | None:
    """The counts over its training text that ship for a model, None if none do."""
    for file in sorted((listing.SHIPPED.parent / FOLDER).glob("*.safetensors")):
        with safe_open(file, framework="numpy") as stored:
            about = json.loads((stored.metadata() or {}).get(ABOUT, "{}"))
        if about.get("fingerprint") == fingerprint:
            return load(file)
    return None


def count(
    handle: Handle,
    batches: Iterable[Batch],
    sources: Iterable[str],
    progress: Callable[[int], None] | None = None,
) -> RowCounts:
    """Count the rows that the model reads over the batches. Raises LabError for a model without memory."""
    modules = dict(zip(handle.engram_layers, memories(handle), strict=True))
    grams, tokens = count_ngrams(handle, batches, progress)
    if not tokens:
        raise DataError("The text holds no token: give a file with some text.")
    counted = {layer: row_counts(memory.hash, grams) for layer, memory in modules.items()}
    return RowCounts(
        handle.fingerprint,
        tuple(sources),
        tokens,
        tuple(map(len, grams)),
        {layer: hits for layer, (hits, _) in counted.items()},
        {layer: ngrams for layer, (_, ngrams) in counted.items()},
    )


@dataclass(frozen=True)
class TrainingRun:
    """The tokens that a training run saw: the folder of its data and what its training.json says."""

    config: TrainConfig
    steps: int
    stream: PackedStream
    sources: tuple[str, ...]

    @classmethod
    def open(cls, run: Path, handle: Handle) -> TrainingRun:
        """The run in a folder of `engram-lab train`; DataError if it is none, or of another tokenizer."""
        from transformers import AutoTokenizer

        try:
            said = json.loads((run / "engram" / "final" / "training.json").read_text(encoding="utf-8"))
            info = json.loads((run / "data" / "data.json").read_text(encoding="utf-8"))
            stored = said["config"]
            config = TrainConfig(**{**stored, "memory_layers": tuple(stored["memory_layers"])})
            sources = (*info["sources"], f"in the order of seed {config.seed}")
            stream = PackedStream(run / "data", "tokens", config.seed)
            tokenizer = AutoTokenizer.from_pretrained(run / "data" / "tokenizer")
        except (LabError, OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{run} is no finished run of engram-lab train ({error}): name its --out folder.") from None
        if tokenizer_sha256(tokenizer) != tokenizer_sha256(handle.tokenizer):
            raise DataError(f"The run in {run} has another tokenizer than {handle.name}: name the model that it gave.")
        return cls(config, said["steps"], stream, sources)

    @property
    def tokens(self) -> int:
        return self.steps * self.config.batch_tokens

    def batches(self, tokens: int | None = None, steps_at_once: int = 16) -> Iterator[Batch]:
        """What the model was trained on, step by step as in models/train.py; whole steps up to `tokens`."""
        size = self.config.batch_tokens
        steps = self.steps if tokens is None else min(self.steps, tokens // size)
        waiting: list[Batch] = []
        for step in range(steps):
            length = self.config.context_at(step)
            ids, _, positions = self.stream.batch(step * size, size // length, length)
            if (waiting and waiting[0][0].shape[1] != length) or len(waiting) == steps_at_once:
                yield _joined(waiting)
                waiting = []
            waiting.append((ids, positions))
        if waiting:
            yield _joined(waiting)


def _joined(batches: list[Batch]) -> Batch:
    ids, positions = zip(*batches, strict=True)
    return torch.cat(ids), torch.cat(positions)
