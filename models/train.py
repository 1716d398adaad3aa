"""Training an Engram or its dense twin: same backbone, same initial backbone weights, same batches in the same order.

Matrices go to Muon, embeddings, norms, convolutions and tables to Adam (tables at 5 x the rate, no decay). A run
depends on its configuration alone; a resumed run gives the weights of an uninterrupted one. Tokens are counted as
targets of the loss. Losses are mean cross-entropies in nats a token.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from engram_lab.models.data import PackedStream
from engram_lab.models.engram import GATES, EngramConfig, EngramForCausalLM, EngramModel
from engram_lab.models.errors import CheckpointError, DataError
from engram_lab.models.optim import LinearCrossEntropy, Muon, fast_bf16

GATE_BINS = 40


_FROM_ZERO = ("seed", "long_share", "muon_decay", "adam_lr", "muon_lr", "warmup_steps")  # settings that may be 0


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the weights, apart from the prepared text."""

    twin: bool = False
    n_layers: int = 10
    d_model: int = 128
    n_attention_heads: int = 4
    d_mlp: int = 288
    context: int = 512  # the last `long_share` of the steps; before that sequences are `short_context` long
    short_context: int = 256
    long_share: float = 0.15
    memory_layers: tuple[int, ...] = (1, 6)
    max_ngram: int = 3
    hash_heads: int = 8
    row_width: int = 16
    rows_per_head: int = 20_000
    gate: str = "demo"
    tokens: int = 10_039_296
    batch_tokens: int = 6144
    muon_lr: float = 0.02
    muon_decay: float = 0.05
    adam_lr: float = 3e-3
    table_lr_factor: float = 5.0
    warmup_steps: int = 50
    clip: float = 1.0
    seed: int = 0
    points: int = 12  # how often held-out loss, KL curve and gates are recorded on the way
    point_sequences: int = 24

    def __post_init__(self) -> None:
        """DataError for settings with which no model can be trained."""
        for name, value in asdict(self).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                least = 0 if name in _FROM_ZERO else 1 if isinstance(value, int) else 1e-12
                if not least <= value <= 1e12:  # NaN is in no range
                    raise DataError(f"--{name.replace('_', '-')} is {value}; it must be a number from {least:g} up.")
        if not 0 <= self.long_share <= 1:
            raise DataError(f"--long-share is {self.long_share}; it must be a share, 0 to 1.")
        if self.gate not in GATES:
            raise DataError(f'--gate is "{self.gate}"; it must be one of {", ".join(GATES)}.')
        if not 2 <= self.max_ngram <= 8:
            raise DataError(f"--max-ngram is {self.max_ngram}; it must be from 2 to 8.")
        bad = [layer for layer in self.memory_layers if not 0 <= layer < self.n_layers]
        if not self.twin and (bad or not self.memory_layers or len(set(self.memory_layers)) < len(self.memory_layers)):
            raise DataError(
                f"--memory-layers are {', '.join(map(str, self.memory_layers)) or 'none'}, and {self.n_layers} blocks "
                f"have the numbers 0 to {self.n_layers - 1}: name some of these, each once."
            )
        if self.seed >= 2**63:
            raise DataError(f"--seed is {self.seed}; it must be below 2**63.")
        for length in (self.context, self.short_context):
            if length < 1 or self.batch_tokens % length:
                raise DataError(f"The batch of {self.batch_tokens} tokens is no multiple of the context of {length}.")
        if self.tokens < self.batch_tokens:
            raise DataError(f"{self.tokens} tokens are less than one batch of {self.batch_tokens}.")
        if self.d_model % (2 * self.n_attention_heads):
            raise DataError(
                f"A width of {self.d_model} cannot be split into {self.n_attention_heads} heads of an even width."
            )

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.batch_tokens)

    def context_at(self, step: int) -> int:
        return self.context if step >= (1 - self.long_share) * self.steps else self.short_context

    def rate_at(self, step: int) -> float:
        """Warm-up, then linear to zero."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return warm * min(1.0, (self.steps - step) / max(1, self.steps - self.warmup_steps))


# (model, ids [batch, pos], position_ids) -> figures that a recorded point carries besides the loss
Measure = Callable[[PreTrainedModel, PreTrainedTokenizerBase, Tensor, Tensor], dict[str, Any]]


def build(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A fresh model; Engram and twin of one seed start from the same backbone weights."""
    backbone = {
        "vocab_size": len(tokenizer),
        "hidden_size": config.d_model,
        "intermediate_size": config.d_mlp,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_attention_heads,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(config.seed)
    dense = LlamaForCausalLM(LlamaConfig(**backbone))
    if config.twin:
        return dense
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.bos_token_id
    engram_config = EngramConfig(
        **backbone,
        engram_layer_ids=list(config.memory_layers),
        engram_max_ngram_size=config.max_ngram,
        engram_vocab_size=config.rows_per_head,
        engram_n_heads=config.hash_heads,
        engram_head_dim=config.row_width,
        engram_pad_token_id=pad,
        engram_seed=config.seed,
        engram_gate=config.gate,
    )
    canonical = engram_config.set_tokenizer(tokenizer)
    model = EngramForCausalLM(engram_config)
    model.load_state_dict(dense.state_dict(), strict=False)
    model.model.canonical_ids[: len(canonical)] = torch.from_numpy(canonical)
    return model


def parameter_groups(
    model: PreTrainedModel,
) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """(matrices for Muon, tables, the rest) of trainable parameters."""
    tables: list[Any] = [m.table.weight for m in model.model.memories()] if isinstance(model.model, EngramModel) else []
    table_ids, embedding_ids = set(map(id, tables)), {id(model.get_input_embeddings().weight)}
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for p in model.parameters():
        if id(p) not in table_ids:
            (matrices if p.ndim == 2 and id(p) not in embedding_ids else rest).append(p)
    return matrices, tables, rest


@torch.inference_mode()
def held_out_loss(model: PreTrainedModel, stream: PackedStream, length: int, sequences: int) -> tuple[float, int]:
    """(mean loss in nats, tokens) over the first sequences of a split, each of `length` tokens."""
    model.eval()
    total, count = 0.0, 0
    for i in range(min(sequences, (stream.total - 1) // length)):
        ids, labels, positions = (t.to(model.device) for t in stream.batch(i * length, 1, length))
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0].float()
        total += float(nn.functional.cross_entropy(logits, labels[0], reduction="sum"))
        count += labels.numel()
    return total / count, count


@torch.inference_mode()
def gate_histogram(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> dict[str, list[int]]:
    """Counts [bin] of gates over 0..1 by memory layer, for ids [batch, pos]."""
    found: dict[str, list[int]] = {}
    if not isinstance(model.model, EngramModel):
        return found
    hooks = []
    for name, memory in zip(model.config.engram_layer_ids, model.model.memories(), strict=True):

        def keep(_module: nn.Module, _inputs: Any, gate: Tensor, name: int = name) -> None:
            found[str(name)] = torch.histc(gate.float(), GATE_BINS, 0, 1).long().tolist()

        hooks.append(memory.gate.register_forward_hook(keep))
    try:
        model(input_ids=ids, position_ids=positions, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill that takes the place of `folder` only when it is whole. Raises CheckpointError."""
    fresh, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        yield fresh
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise CheckpointError(
            f"Could not write {folder} ({error}): what was saved before is intact; free space, then use --resume."
        ) from None


def save_half(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """The weights as a Hugging Face folder in bf16, the form that ships."""
    with replaced_folder(folder) as fresh:
        state = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in model.state_dict().items()}
        tied = model.config.tie_word_embeddings
        model.save_pretrained(
            fresh, state_dict={k: v for k, v in state.items() if not (tied and k == "lm_head.weight")}
        )
        config = json.loads((fresh / "config.json").read_text())
        (fresh / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2))
        tokenizer.save_pretrained(fresh)


class Trainer:
    """One run in `out`: `checkpoint/` to go on from, `points/` on the way, `log.jsonl`, and `final/` at the end."""

    def __init__(self, config: TrainConfig, data: Path, out: Path, measure: Measure | None = None) -> None:
        self.config, self.out, self.measure = config, out, measure
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
        self.model: Any = build(config, self.tokenizer)
        nn.Module.to(self.model, self.device)
        self.stream = PackedStream(data, "tokens", config.seed)
        self.held_out = PackedStream(data, "held_out", None)
        if min(self.stream.total, self.held_out.total) <= config.context:
            raise DataError(
                f"The text has {self.stream.total} training and {self.held_out.total} held-out tokens; each needs more "
                f"than the context of {config.context}: bring more text or a shorter --context."
            )
        matrices, tables, rest = parameter_groups(self.model)
        self.clipped = matrices + rest
        muon = Muon(matrices, lr=config.muon_lr, weight_decay=config.muon_decay)
        groups = [{"params": rest, "lr": config.adam_lr}]
        if tables:
            groups.append({"params": tables, "lr": config.adam_lr * config.table_lr_factor})
        adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.optimizers = (muon, adam)
        self.rates = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        self.step, self.seconds, self.points = 0, 0.0, list[dict[str, Any]]()

    def run(self, report: Callable[[dict[str, Any]], None], save_every: float = 300.0) -> Path:
        """Train to the end; returns the final folder.

        `report` gets a log line after each step and may raise to stop: the step is saved as `checkpoint/` then.
        Raises CheckpointError.
        """
        last_save = time.monotonic()
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            while self.step < self.config.steps:
                if self.step >= len(self.points) * self.config.steps / self.config.points:
                    self.record_point()
                line = self.train_step()
                with (self.out / "log.jsonl").open("a") as log:
                    log.write(json.dumps(line) + "\n")
                try:
                    report(line)
                except BaseException:
                    self.save()  # between two steps, so that resuming gives the same weights
                    raise
                if time.monotonic() - last_save > save_every:
                    self.save()
                    last_save = time.monotonic()
        except OSError as error:
            raise CheckpointError(f"Could not write into {self.out} ({error}): free space, then --resume.") from None
        self.record_point()
        self.save()
        return self.finish()

    def train_step(self) -> dict[str, Any]:
        """One optimizer step; returns its log line."""
        began = time.monotonic()
        config, step = self.config, self.step
        length = config.context_at(step)
        ids, labels, positions = (
            t.to(self.device)
            for t in self.stream.batch(step * config.batch_tokens, config.batch_tokens // length, length)
        )
        self.model.train()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=fast_bf16(self.device)):
            hidden = self.model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        loss = LinearCrossEntropy.apply(
            hidden.flatten(0, 1), self.model.lm_head.weight.to(hidden.dtype), labels.flatten()
        )
        loss.backward()
        nn.utils.clip_grad_norm_(self.clipped, config.clip)
        rate = config.rate_at(step)
        for optimizer, rates in zip(self.optimizers, self.rates, strict=True):
            for group, lr in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = lr * rate
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.seconds += time.monotonic() - began
        tokens = self.step * config.batch_tokens
        return {
            "step": self.step,
            "tokens": tokens,
            "loss": loss.item(),
            "rate": rate,
            "seconds": round(self.seconds, 2),
        }

    def record_point(self) -> None:
        """Held-out loss, gates and whatever `measure` adds, at the present step; keeps the weights in bf16."""
        config = self.config
        loss, tokens = held_out_loss(self.model, self.held_out, config.context, config.point_sequences)
        ids, _, positions = (t.to(self.device) for t in self.held_out.batch(0, 4, config.context))
        point = {
            "step": self.step,
            "tokens": self.step * config.batch_tokens,
            "held_out_loss": loss,
            "held_out_tokens": tokens,
            "gate_histogram": gate_histogram(self.model, ids, positions),
            **(self.measure(self.model, self.tokenizer, ids, positions) if self.measure else {}),
        }
        self.points.append(point)
        save_half(self.model, self.tokenizer, self.out / "points" / f"step-{self.step:06d}")

    def save(self) -> None:
        """Write `checkpoint/`: the model in full precision, loadable like any other, and what resuming needs."""
        with replaced_folder(self.out / "checkpoint") as fresh:
            self.model.save_pretrained(fresh)
            self.tokenizer.save_pretrained(fresh)
            names = {id(p): name for name, p in self.model.named_parameters()}
            state = {
                f"{names[id(p)]}/{key}": value.contiguous()
                for optimizer in self.optimizers
                for p, entry in optimizer.state.items()
                for key, value in entry.items()
            }
            save_file(state, fresh / "optimizer.safetensors")
            progress = {
                "config": asdict(self.config),
                "step": self.step,
                "seconds": self.seconds,
                "points": self.points,
            }
            (fresh / "trainer.json").write_text(json.dumps(progress))

    def resume(self) -> None:
        """Go on from `checkpoint/`. Raises CheckpointError where there is none or it belongs to another request."""
        folder = self.out / "checkpoint"
        if not folder.exists():
            folder = self.out / "checkpoint.old"  # killed between the two renames
        try:
            progress = json.loads((folder / "trainer.json").read_text())
            weights = load_file(folder / "model.safetensors")
            state = load_file(folder / "optimizer.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"There is no whole checkpoint to resume in {self.out} ({error}).") from None
        if progress["config"] != json.loads(json.dumps(asdict(self.config))):
            raise CheckpointError(f"The checkpoint in {self.out} has other settings: use another --out.")
        self.model.load_state_dict(weights, strict=False)
        self.model.tie_weights()
        owner = {name: (p, o) for o in self.optimizers for name, p in self._named(o)}
        for key, value in state.items():
            name, _, entry = key.rpartition("/")
            p, optimizer = owner[name]
            optimizer.state[p][entry] = value if entry == "step" else value.to(p.device)
        self.step, self.seconds, self.points = progress["step"], progress["seconds"], progress["points"]
        log = self.out / "log.jsonl"
        if log.exists():
            log.write_text("".join(log.read_text().splitlines(keepends=True)[: self.step]))

    def _named(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return ((name, p) for name, p in self.model.named_parameters() if id(p) in owned)

    def finish(self) -> Path:
        """Write `final/`: bf16 weights, and training.json with the held-out loss of those very weights."""
        folder = self.out / "final"
        save_half(self.model, self.tokenizer, folder)
        shipped = type(self.model).from_pretrained(folder, dtype=torch.float32).to(self.device)
        loss, tokens = held_out_loss(shipped, self.held_out, self.config.context, self.held_out.total)
        tables = sum(m.table.weight.numel() for m in shipped.model.memories()) if not self.config.twin else 0
        card = {
            "config": asdict(self.config),
            "steps": self.step,
            "tokens": self.step * self.config.batch_tokens,
            "seconds": round(self.seconds),
            "parameters": {"all": shipped.num_parameters(), "tables": tables},
            "held_out_loss": loss,
            "held_out_tokens": tokens,
            "points": self.points,
        }
        (folder / "training.json").write_text(json.dumps(card, indent=1))
        return folder
