"""The handle: the one object through which a model is run, traced or not.

Axes: layer (0 is the residual before block 0, named "embed"), batch, pos, d_model, vocab.
Every forward of a module, traced or not, happens under that module's lock and in inference mode,
because nnsight is not safe across threads. nnsight compiles a trace from the text of its file: models/tracing.py.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import nnsight
import torch
from nnsight import Envoy, NNsight
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engram_lab.models import loading
from engram_lab.models.errors import CheckpointError, LabError, NotFiniteError, PromptError, TargetError, first_line
from engram_lab.models.layouts import Layout, find_layout
from engram_lab.models.pieces import TokenBytes
from engram_lab.models.tracing import pin_source
from engram_lab.models.weightfiles import module_fingerprint

pin_source(__file__)
T = TypeVar("T")
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_locks_guard = threading.Lock()


def _lock_of(module: nn.Module) -> threading.RLock:
    """The one lock of a raw module, however many handles wrap it."""
    with _locks_guard:
        return _locks.setdefault(module, threading.RLock())


# What configurations call the number of tokens that a model takes.
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_UNLIMITED = 1 << 20  # tokens of a model that puts no limit to them: BLOOM, Mamba


def _context(config: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of tokens that a model takes; of one without positions, what its tokenizer says, or _UNLIMITED."""
    named = [getattr(config, name, None) for name in _CONTEXT]
    found = next((value for value in named if isinstance(value, int) and value > 0), 0)
    said = tokenizer.model_max_length  # a very large number where nothing was said
    return found or (int(said) if 0 < said < 10**9 else _UNLIMITED)


class _StreamsError(Exception):
    """Blocks that hand on several streams."""


@dataclass(frozen=True)
class Residuals:
    """The residual stream of one forward: states [layer, batch, pos, d_model], logits [batch, pos, vocab]."""

    states: Tensor
    logits: Tensor


class Handle:
    """A causal LM with its tokenizer, lock and nnsight wrapper, checked to be what it is shown as.

    `model` stays on its device and in its dtype; it is put in eval mode only while it runs. Raises
    CheckpointError if a part of the model is not found, if its final residual through norm and head is not
    bit for bit its logits, or if the bytes of its tokens cannot be told.

        >>> ids = handle.encode("The river")
        >>> stream = handle.residuals([ids]).states  # [layer, batch, pos, d_model], the embedding first
        >>> tuple(stream.shape) == (1 + handle.n_layers, 1, len(ids), handle.d_model)
        True
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        fingerprint: str | None = None,
    ) -> None:
        self.name = name
        self.layout: Layout = find_layout(model)
        self.lock = _lock_of(model)
        self._model: PreTrainedModel | None = model
        self._tokenizer: PreTrainedTokenizerBase | None = tokenizer
        self._bytes = TokenBytes(tokenizer)
        self._fingerprint = fingerprint
        embedding = model.get_submodule(self.layout.embedding).weight
        head = model.get_submodule(self.layout.head).weight
        assert isinstance(embedding, Tensor) and isinstance(head, Tensor)
        config = model.config.get_text_config()
        self.device: torch.device = embedding.device
        self.dtype: torch.dtype = embedding.dtype
        self.d_model: int = embedding.shape[1]
        self.vocab_size: int = head.shape[0]
        self.context: int = _context(config, tokenizer)
        self.engram_layers: tuple[int, ...] = tuple(sorted(getattr(config, "engram_layer_ids", None) or ()))
        self.n_parameters: int = sum(p.numel() for p in model.parameters())
        self.n_table_parameters: int = sum(
            p.numel() for name, p in model.named_parameters() if name.endswith(".memory.table.weight")
        )
        with self.lock:
            self._traced: NNsight | None = NNsight(model)
        self._blocks: list[Envoy] = list(self._traced.get(self.layout.blocks))
        self.n_layers: int = len(self._blocks)
        self.layer_names: tuple[str, ...] = ("embed", *map(str, range(self.n_layers)))
        self._validate()

    def __repr__(self) -> str:
        return f"Handle({self.name!r}, {self.n_layers} layers, {self.dtype}, {self.device})"

    @property
    def is_open(self) -> bool:
        """Whether the handle can be used: not closed."""
        return self._model is not None

    def _there(self, part: T | None) -> T:
        if part is None:
            raise LabError(f"The model {self.name} was closed; open it again.")
        return part

    @property
    def model(self) -> PreTrainedModel:
        """The raw module; run it only inside running(). LabError once the handle is closed."""
        return self._there(self._model)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer as transformers loaded it. LabError once the handle is closed."""
        return self._there(self._tokenizer)

    @property
    def traced(self) -> NNsight:
        """The nnsight wrapper of the raw module; trace it only inside running(), from a file. LabError if closed."""
        return self._there(self._traced)

    @property
    def blocks(self) -> list[Envoy]:
        """The decoder blocks of `traced`, in order."""
        return self._blocks

    @property
    def fingerprint(self) -> str:
        """16 hex characters of the sha256 over configuration and weights as stored, whatever they run in.

        For a module in memory it is computed from its tensors at the first use.
        """
        if self._fingerprint is None:
            with self.running():
                self._fingerprint = module_fingerprint(self.model)
        return self._fingerprint

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hold the module's lock, in inference mode and with the module in eval mode; may be nested."""
        with self.lock, torch.inference_mode():
            model = self.model
            training = model.training
            if training:
                model.eval()
            try:
                yield
            finally:
                if training:
                    model.train()

    def encode(self, text: str) -> tuple[int, ...]:
        """Exactly the ids that the model gets for `text`, with BOS where the tokenizer adds it.

        An end of text that a tokenizer adds is left off: a prompt is there to be continued, and behind an end the model
        would speak of another text.

        PromptError if the text is empty, not UTF-8, yields no token or one that the model has no row for, or
        is longer than the context.
        """
        if not isinstance(text, str) or not text:
            raise PromptError("The prompt is empty: type at least one character.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"The prompt is not valid text at character {error.start}: give it as UTF-8.") from error
        ids = tuple(self.tokenizer(text, truncation=False, verbose=False)["input_ids"])
        bare = self._bare(text)
        added = _ending(ids, self.tokenizer.eos_token_id) - _ending(bare, self.tokenizer.eos_token_id)
        ids = ids[: len(ids) - max(0, added)]
        if not ids or not bare:
            raise PromptError(f"The tokenizer of {self.name} makes no token of this prompt: type some text.")
        if max(ids) >= self.vocab_size:
            raise PromptError(
                f"The tokenizer gives the id {max(ids)}, but {self.name} has only {self.vocab_size} rows: "
                "it is the tokenizer of another model."
            )
        if len(ids) > self.context:
            raise PromptError(
                f'The prompt "{" ".join(text[:80].split())[:40]}…" is {len(ids)} tokens long; {self.name} takes at '
                f"most {self.context}: shorten it."
            )
        return ids

    def pieces(self, ids: Sequence[int], *, whole: bool = True) -> list[bytes]:
        """Each token's bytes; a special token gives its name. Those not special join to the text of `ids`.

        `whole=False` is for loose tokens, such as a top-k list: some tokenizers put a space before a text,
        which is taken off the first piece of a whole text only.
        """
        return self._bytes.join_ready(ids) if whole else [self._bytes.of(i) for i in ids]

    def is_special(self, token_id: int) -> bool:
        """True for a token that stands for no text (BOS and the like, rows of the model without a token)."""
        return self._bytes.is_special(token_id)

    def lossless(self, text: str, ids: Sequence[int]) -> bool:
        """Whether the pieces of `ids` spell `text`; a tokenizer that normalises changes or drops text."""
        wanted, pieces = text.encode(errors="surrogatepass"), self.pieces(ids)
        if b"".join(p for p, i in zip(pieces, ids, strict=True) if not self.is_special(i)) == wanted:
            return True
        # A special token's name typed in the text is text: leave out only what the tokenizer puts around it.
        bare = self._bare(text)
        inside = any(list(ids[n : n + len(bare)]) == bare for n in range(len(ids) - len(bare) + 1))
        return inside and b"".join(self.pieces(bare)) == wanted

    def _bare(self, text: str) -> list[int]:
        """The ids of `text` without those that the tokenizer puts around it."""
        return list(self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])

    def unembed(self, residual: Tensor) -> Tensor:
        """Logits [..., vocab] of residuals [..., d_model]: norm, head, soft cap; only inside running()."""
        return self.layout.unembed(self.model, residual)

    def residuals(self, ids: Tensor | Sequence[Sequence[int]], attention_mask: Tensor | None = None) -> Residuals:
        """One traced forward of ids [batch, pos]; torch.equal to the bare one.

        With `attention_mask` [batch, pos] (0 at padding) positions count the real tokens, as in generate().
        """
        inputs: dict[str, Tensor] = {"input_ids": torch.as_tensor(ids, dtype=torch.int64, device=self.device)}
        if attention_mask is not None:
            mask = attention_mask.to(self.device)
            inputs |= {"attention_mask": mask, "position_ids": (mask.long().cumsum(-1) - 1).clamp_min(0)}
        with self.running():
            traced, blocks = self.traced, self._blocks
            with traced.trace(**inputs, use_cache=False):
                stream = [blocks[0].input]
                for block in blocks:
                    output = block.output
                    stream.append(output[0] if isinstance(output, tuple) else output)
                logits = nnsight.save(traced.output.logits)
                nnsight.save(stream)
            return Residuals(torch.stack(stream), self.finite(logits, inputs["input_ids"], attention_mask))

    def finite(self, logits: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """The logits [batch, pos, vocab] behind the last tokens of ids [batch, pos], where all are numbers.

        A NaN in a state stays in the stream, so it is seen here, where every state that is shown has to pass. Raises
        NotFiniteError, which names the token whose embedding it is, or the first behind which it is met (attention
        takes a NaN to the positions before it, too: 0 times NaN is NaN); `mask` is 0 at padding.
        """
        bad = ~logits.sum(dim=-1, dtype=torch.float32).isfinite().cpu()
        if mask is not None:
            bad &= mask[:, -bad.shape[1] :].bool().cpu()
        if not bad.any():
            return logits
        row, position = (int(n) for n in bad.nonzero()[0])
        position += ids.shape[1] - bad.shape[1]
        embedded = self.model.get_input_embeddings()(ids[row].to(self.device)).isfinite().all(dim=-1)
        way = "its weights are damaged"
        if not embedded.all():
            position, way = int((~embedded).nonzero()[0]), "the row of this token in its embedding is damaged"
        token = self.pieces([int(ids[row, position])], whole=False)[0].decode(errors="replace")
        if self.dtype == torch.float16:
            way = "its numbers may be too large for float16: open it in bfloat16 or float32"
        raise NotFiniteError(f'{self.name} gives no numbers behind the token "{token}" (position {position}): {way}.')

    def _validate(self) -> None:
        """Compare the final residual through norm and head with the model's own logits, on a few ids."""
        length = min(6, self.context)
        ids = [[n * (self.vocab_size - 1) // length for n in range(length)]]
        try:
            with self.running():
                got = self.residuals(ids)
                if got.states.dim() != 4:
                    raise _StreamsError(got.states[0].numel() // (length * self.d_model))
                lens = self.unembed(got.states[-1])
        except NotFiniteError:
            raise
        except _StreamsError as error:
            raise CheckpointError(
                f"{self.name} carries {error} residual streams from block to block (hyper-connections), which this lab "
                "cannot show as one."
            ) from None
        except Exception as error:  # whatever the model's own code raises
            raise CheckpointError(f"{self.name} cannot run a forward pass: {first_line(error)}.") from error
        if not torch.equal(lens, got.logits):
            gap = (lens - got.logits).abs().max().item()
            raise CheckpointError(
                f"{self.name} does more to its last residual than {self.layout.final_norm} and "
                f"{self.layout.head} (the logits differ by up to {gap:.3g}), so a lens on it would be wrong."
            )

    def close(self) -> None:
        """Wait for the run in progress, then drop the weights; the handle cannot be used any more."""
        with self.lock:
            self._model = self._traced = self._tokenizer = None
            self._blocks = []
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def open_model(
    name: str,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> Handle:
    """Open a shipped name, a local folder, a hub id or a .gguf file.

    `device` is the best there is if not given; `dtype` float32, but bfloat16 on CUDA for a checkpoint stored
    in 16 bits. Raises UnknownModelError, CheckpointError, TokenizerMismatchError, or LabError for a device or
    dtype that there is not.
    """
    chosen = loading.choose_device(device)
    loading.choose_dtype(dtype, chosen, None)  # refuse nonsense before the weights are read
    path = loading.resolve(name, trust_remote_code)
    loaded = loading.load(path, chosen, dtype, trust_remote_code)
    return Handle(loaded.model, loaded.tokenizer, name.strip(), loaded.fingerprint)


def _ending(ids: Sequence[int], token_id: int | None) -> int:
    """How many ids in a row at the end are `token_id`."""
    return next((n for n, own in enumerate(reversed(ids)) if own != token_id), len(ids))


def single_token(handle: Handle, text: str) -> int:
    """The id of the one token whose bytes are exactly `text`, leading space included; else TargetError."""
    if not text:
        raise TargetError("The target is empty: type a text that is one token.")
    wanted = text.encode(errors="surrogatepass")
    ids = _bare_ids(handle, text)
    # A tokenizer that puts a space before a text reads " Paris" as two spaces, and "Paris" as " Paris".
    readings = [ids, _bare_ids(handle, text.removeprefix(" ")), _bare_ids(handle, " " + text)]
    single = {handle.pieces(reading, whole=False)[0]: reading[0] for reading in readings if len(reading) == 1}
    if wanted in single:
        return single[wanted]
    parts = ", ".join(f"{i} {_shown(p)}" for i, p in zip(ids, handle.pieces(ids, whole=False), strict=True))
    spaced = single.get(b" " + wanted)
    hint = f", while with a leading space it is one ({spaced})" if spaced is not None else ""
    raise TargetError(f'The target "{text}" is not one token for {handle.name} but {parts or "none"}{hint}.')


def _bare_ids(handle: Handle, text: str) -> list[int]:
    try:
        return handle._bare(text) if text else []
    except (UnicodeEncodeError, TypeError) as error:
        raise TargetError("The target is not valid text: give it as UTF-8.") from error


def _shown(piece: bytes) -> str:
    return f'"{piece.decode(errors="backslashreplace")}"'
