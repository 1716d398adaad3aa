"""Training text to memory-mapped tokens, and packed batches that depend on nothing but a seed and a step.

Axes: batch, pos. A prepared folder holds tokens.bin and held_out.bin (little-endian ids, each document led by the
start token), their *.lengths.bin (uint32 tokens a document), the tokenizer and data.json.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from engram_lab.models.errors import DataError
from engram_lab.models.files import whole

START, PAD = "<|endoftext|>", "<|pad|>"
HELD_OUT_SHARE = 200  # one document in so many is never trained on
SPLITS = ("tokens", "held_out")


@dataclass(frozen=True)
class DataInfo:
    """What was prepared: sources (file names), documents and tokens of each split, the seed-free split rule."""

    sources: tuple[str, ...]
    max_characters: int
    documents: int
    tokens: int
    held_out_documents: int
    held_out_tokens: int
    vocab_size: int
    dtype: str


def open_text(path: Path) -> Iterator[str]:
    """Lines of a text file, `.xz` and `.gz` unpacked on the way. Raises DataError."""
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            yield from file
    except FileNotFoundError:
        raise DataError(f"There is no text file {path}.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}): convert it first.") from None
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise DataError(f"{path} could not be read: {error}.") from None


def file_documents(path: Path) -> Iterator[str]:
    """Documents of a text file; a blank line ends one."""
    for filled, lines in itertools.groupby(open_text(path), key=lambda line: bool(line.strip())):
        if filled:
            yield "".join(lines).rstrip("\n")


def dataset_documents(name: str) -> Iterator[str]:
    """Documents of a Hugging Face dataset, NAME or NAME:CONFIG, train split, column `text`. Raises DataError."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError("Reading a dataset by name needs the package `datasets`: pip install datasets.") from None
    base, _, config = name.partition(":")
    try:
        for row in load_dataset(base, config or None, split="train", streaming=True):
            yield row["text"]
    except KeyError:
        raise DataError(f"The dataset {name} has no column `text`: export it to a text file.") from None
    except Exception as error:  # datasets raises many kinds for a missing or unreachable set
        raise DataError(f"The dataset {name} could not be read: {str(error).splitlines()[0]}") from None


def documents(texts: Sequence[Path], dataset: str | None, max_characters: int) -> Iterator[str]:
    """All documents in order, each cut to `max_characters`."""
    sources: list[Iterable[str]] = [file_documents(path) for path in texts]
    if dataset:
        sources.append(dataset_documents(dataset))
    return (text[:max_characters] for text in itertools.chain.from_iterable(sources))


def is_held_out(text: str) -> bool:
    """The fixed split: by a digest of the document, so that it is the same in any order and on any machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % HELD_OUT_SHARE == 0


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose encoding starts with the start token; id 0 pads, id 1 starts and ends documents."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, START], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", pair=f"{START} $A {START} $B", special_tokens=[(START, bpe.token_to_id(START))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=START, eos_token=START, pad_token=PAD, padding_side="left"
    )


def prepare(
    out: Path,
    texts: Sequence[Path],
    dataset: str | None = None,
    tokenizer: str | None = None,
    vocab_size: int = 8192,
    tokenizer_documents: int = 12_000,
    max_characters: int = 8_000,
    progress: Callable[[str], None] = lambda message: None,
) -> DataInfo:
    """Tokenize once into `out`; a folder that was prepared from the same text is taken as it is.

    Raises DataError for a folder that another text was prepared in, and for a text that is not there.
    """
    for path in texts:
        if not path.is_file():
            raise DataError(f"There is no text file {path}: name one that is there.")
    sources = tuple([path.name for path in texts] + ([dataset] if dataset else []))
    asked = _digest(texts, dataset, tokenizer, vocab_size, max_characters)
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out, progress):
        if (out / "data.json").exists():
            return _prepared(out, sources, asked)
        if not sources:
            raise DataError("No text to train on: name files with --text, or a dataset with --dataset.")
        return _tokenize(
            out, texts, dataset, tokenizer, vocab_size, tokenizer_documents, max_characters, progress, sources, asked
        )


def _digest(
    texts: Sequence[Path], dataset: str | None, tokenizer: str | None, vocab_size: int, max_characters: int
) -> str:
    """A hex digest of all that decides the tokens: the bytes of the files, and how they are cut."""
    digest = hashlib.sha256(json.dumps([dataset, tokenizer, vocab_size, max_characters]).encode())
    for path in texts:
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _prepared(out: Path, sources: tuple[str, ...], asked: str) -> DataInfo:
    """What a folder was prepared from; DataError if something else is asked for now."""
    stored = json.loads((out / "data.json").read_text(encoding="utf-8"))
    known = stored.pop("request", None)
    info = DataInfo(**{**stored, "sources": tuple(stored["sources"])})
    if sources and (known != asked if known is not None else info.sources != sources):
        raise DataError(
            f"{out} was prepared from {', '.join(info.sources)}, and other text, or the same cut otherwise, is asked "
            "for now: name another folder for --out, or leave --text out to go on with what is there."
        )
    return info


@contextmanager
def _alone(out: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """No other process prepares this folder meanwhile: two arms that are started at once share what the first makes."""
    lock = filelock.FileLock(out / ".preparing")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        progress(f"another command prepares {out}: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _tokenize(
    out: Path,
    texts: Sequence[Path],
    dataset: str | None,
    tokenizer: str | None,
    vocab_size: int,
    tokenizer_documents: int,
    max_characters: int,
    progress: Callable[[str], None],
    sources: tuple[str, ...],
    asked: str,
) -> DataInfo:
    bpe: PreTrainedTokenizerBase
    if tokenizer:
        bpe = AutoTokenizer.from_pretrained(tokenizer)
        if bpe.bos_token_id is None:
            raise DataError(f"The tokenizer {tokenizer} has no start token, which has to lead every document.")
    else:
        progress("training the tokenizer")
        # Every k-th document, so that a corpus in alphabetical or page order is sampled evenly.
        n_documents = sum(1 for _ in documents(texts, dataset, max_characters))
        stride = max(1, n_documents // tokenizer_documents)
        bpe = train_tokenizer(itertools.islice(documents(texts, dataset, max_characters), 0, None, stride), vocab_size)
    bpe.save_pretrained(out / "tokenizer")
    start = bpe.bos_token_id
    dtype = np.dtype("<u2" if len(bpe) <= 2**16 else "<u4")
    counts = {split: [0, 0] for split in SPLITS}
    files = {split: (out / f"{split}.bin", out / f"{split}.lengths.bin") for split in SPLITS}
    handles = {split: [path.open("wb") for path in pair] for split, pair in files.items()}
    stream = documents(texts, dataset, max_characters)
    try:
        while batch := list(itertools.islice(stream, 1000)):
            encoded = bpe(batch, add_special_tokens=False)["input_ids"]
            for text, ids in zip(batch, encoded, strict=True):
                split = SPLITS[is_held_out(text)]
                handles[split][0].write(np.asarray([start, *ids], dtype=dtype).tobytes())
                handles[split][1].write(np.asarray([len(ids) + 1], dtype="<u4").tobytes())
                counts[split][0] += 1
                counts[split][1] += len(ids) + 1
            progress(f"tokenizing: {counts['tokens'][1] / 1e6:.1f} M tokens")
    finally:
        for handle in itertools.chain.from_iterable(handles.values()):
            handle.close()
    if not counts["tokens"][0]:
        raise DataError(f"No document found in {', '.join(map(str, texts)) or dataset}.")
    if not counts["held_out"][0]:
        raise DataError(
            f"The text has {counts['tokens'][0]} documents and none falls into the held-out split (one in "
            f"{HELD_OUT_SHARE}): bring more documents, each ended by a blank line."
        )
    info = DataInfo(
        sources,
        max_characters,
        counts["tokens"][0],
        counts["tokens"][1],
        counts["held_out"][0],
        counts["held_out"][1],
        len(bpe),
        dtype.str,
    )
    with whole(out / "data.json") as fresh:  # last: its presence says the folder is complete
        fresh.write_text(json.dumps({**asdict(info), "request": asked}, indent=1), encoding="utf-8")
    return info


class PackedStream:
    """The documents of one split in a seeded order, laid end to end; the order is drawn anew for each pass."""

    def __init__(self, folder: Path, split: str, seed: int | None) -> None:
        dtype = json.loads((folder / "data.json").read_text())["dtype"]
        self.tokens = np.memmap(folder / f"{split}.bin", dtype=dtype, mode="r")
        self.lengths = np.fromfile(folder / f"{split}.lengths.bin", dtype="<u4").astype(np.int64)
        self.offsets = np.cumsum(self.lengths) - self.lengths
        self.total, self.seed = int(self.lengths.sum()), seed
        self._epoch = -1
        self._order = self._ends = np.empty(0, dtype=np.int64)

    def _shuffle(self, epoch: int) -> None:
        if epoch != self._epoch:
            order = np.arange(len(self.lengths))
            if self.seed is not None:
                np.random.default_rng([self.seed, epoch]).shuffle(order)
            self._epoch, self._order, self._ends = epoch, order, np.cumsum(self.lengths[order])

    def sequence(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, position within its own document), each [length], from stream token `start` on."""
        ids: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        stop = start + length
        while start < stop:
            epoch, inner = divmod(start, self.total)
            self._shuffle(epoch)
            k = int(np.searchsorted(self._ends, inner, side="right"))
            document = self._order[k]
            inner -= int(self._ends[k] - self.lengths[document])
            take = min(stop - start, int(self.lengths[document]) - inner)
            ids.append(self.tokens[self.offsets[document] + inner :][:take])
            positions.append(np.arange(take))  # a document cut by the sequence start counts from there
            start += take
        return np.concatenate(ids).astype(np.int64), np.concatenate(positions)

    def batch(self, first: int, size: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """(ids, labels, position_ids), each [batch, pos] int64: `size` sequences laid end to end from token `first`."""
        starts = range(first, first + size * length, length)
        ids, positions = (
            torch.from_numpy(np.stack(part))
            for part in zip(*(self.sequence(s, length + 1) for s in starts), strict=True)
        )
        return ids[:, :-1], ids[:, 1:], positions[:, :-1]
