"""Facts of a user in a low-rank adapter (LoRA, arXiv 2106.09685): what rows of a memory are compared with.

Each projection W that makes queries, keys or values becomes W + 2 B A (alpha is twice the rank), with A [rank, in]
drawn as a linear layer's weights and B [out, rank] zero at first, trained by Adam on all facts at once, on the mean
cross-entropy of the answers' tokens, as the rows are. The adapter sits in a twin: other modules around the same
weights, so that nothing is ever put into the model of a handle.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engram_lab.models.errors import LabError
from engram_lab.models.grafting import twin
from engram_lab.models.handle import Handle
from engram_lab.probes.base import Progress

# What makes queries, keys and values, by family; of one family all of a block's have to be there.
PROJECTIONS = (
    {"q_proj", "k_proj", "v_proj"}, {"query_key_value"}, {"c_attn"}, {"Wqkv"}, {"qkv_proj"},
    {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj"}, {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"},
)  # fmt: skip
AT_ONCE = 32  # facts in one forward
Coded = Sequence[tuple[tuple[int, ...], tuple[int, ...]]]  # (ids of the trigger, ids of the answer) of each fact


@dataclass(frozen=True, eq=False)
class Adapter:
    """A twin with a trained adapter; `loss` is the mean cross-entropy before each step and behind the last, in nats."""

    model: PreTrainedModel
    rank: int
    loss: tuple[float, ...]
    seconds: float  # that training it took

    def parameters(self) -> dict[str, Tensor]:
        """A and B of every projection, by name."""
        return {name: own.detach() for name, own in self.model.named_parameters() if ".lora_" in name}

    def to_bytes(self) -> bytes:
        """The adapter as a safetensors file, in the numbers that it was trained in."""
        return safetensors.torch.save({name: own.cpu().contiguous() for name, own in self.parameters().items()})

    def logits(self, ids: Tensor) -> Tensor:
        """[batch, pos, vocab] of ids [batch, pos]; nobody else runs the twin, so that it needs no lock."""
        with torch.inference_mode():
            found: Tensor = self.model(input_ids=ids, use_cache=False).logits
            return found


def train_adapters(
    handle: Handle,
    coded: Coded,
    stops: Sequence[float],
    *,
    rank: int,
    steps: int,
    rate: float,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Adapter]:
    """One training, of which an adapter is kept for each of `stops`: that of the first mean loss so low, in nats.

    It ends with the lowest stop, or behind `steps` steps; what was not reached by then is kept as it ended.
    LabError for a model whose projections are not found, and for a training that gives no finite numbers.
    """
    report = progress or (lambda done, what: None)
    told = f"{handle.name}: training LoRA of rank {rank} on {len(coded)} facts"
    report(0.0, told)
    began = time.perf_counter()
    model = _adapted(handle, rank, seed)
    trained = {name: own for name, own in model.named_parameters() if ".lora_" in name}
    optimiser = torch.optim.Adam(trained.values(), lr=rate)
    batches, losses, kept = list(_batches(coded, handle.device)), [], {}
    tokens = sum(len(answer) for _, answer in coded)
    with torch.inference_mode(False), torch.enable_grad():
        for step in range(steps + 1):
            optimiser.zero_grad()
            total = 0.0
            for n, (inputs, targets, wanted) in enumerate(batches):
                report((step + n / len(batches)) / (steps + 1), told)
                logits = model(**inputs, use_cache=False, logits_to_keep=targets.shape[1]).logits.float()
                nats = nn.functional.cross_entropy(logits[wanted], targets[wanted], reduction="sum") / tokens
                nats.backward()
                total += nats.item()
            losses.append(total)
            if not math.isfinite(total):
                raise LabError(f"LoRA of rank {rank} on {handle.name} gave no finite numbers: lower the rate.")
            for stop in stops:
                if stop not in kept and (total <= stop or step == steps):
                    state = {name: own.detach().clone() for name, own in trained.items()}
                    kept[stop] = state, tuple(losses), time.perf_counter() - began
            if len(kept) == len(set(stops)):
                break
            optimiser.step()
        found = []
        for stop in stops:
            state, loss, seconds = kept[stop]
            own = _adapted(handle, rank, seed)
            with torch.no_grad():
                for name, weight in own.named_parameters():
                    if name in state:
                        weight.copy_(state[name])
            found.append(Adapter(own.requires_grad_(False), rank, loss, seconds))
    report(1.0, told)
    return found


def _adapted(handle: Handle, rank: int, seed: int) -> PreTrainedModel:
    """A twin of the handle's model with an adapter that does nothing yet."""
    from peft import LoraConfig, inject_adapter_in_model

    with handle.running():
        model = twin(handle.model).eval()
    # The twin shares the very parameters; its own may be frozen and given gradients without anybody seeing it.
    own: dict[int, nn.Parameter] = {}
    with torch.inference_mode(False):
        for module in model.modules():
            for name, shared in module._parameters.items():
                if shared is not None:
                    module._parameters[name] = own.setdefault(
                        id(shared), nn.Parameter(shared.detach(), requires_grad=False)
                    )
        names = _projections(handle, model)
        config = LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules=names,
            fan_in_fan_out=isinstance(model.get_submodule(names[0]), Conv1D),
        )
        with torch.random.fork_rng(devices=[]):  # peft draws from everybody's generator
            inject_adapter_in_model(config, model)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if ".lora_A" in name:
                    bound = 1 / math.sqrt(weight.shape[1])
                    drawn = torch.rand(weight.shape, generator=generator) * (2 * bound) - bound
                    weight.copy_(drawn)
    return model.eval()


def _projections(handle: Handle, model: PreTrainedModel) -> list[str]:
    names = [name for name, _ in model.named_modules() if name.startswith(f"{handle.layout.blocks}.")]
    there = {name.rpartition(".")[2] for name in names}
    for kind in sorted(PROJECTIONS, key=len, reverse=True):
        if kind <= there:
            return [name for name in names if name.rpartition(".")[2] in kind]
    raise LabError(f"{handle.name} has no projections of queries, keys and values under the names this lab knows.")


def _batches(coded: Coded, device: torch.device) -> Iterator[tuple[dict[str, Tensor], Tensor, Tensor]]:
    """(inputs, left-padded; targets [fact, token] of the last positions; which of these are answers, bool)."""
    for first in range(0, len(coded), AT_ONCE):
        chosen = [((*trigger, *answer[:-1]), answer) for trigger, answer in coded[first : first + AT_ONCE]]
        longest, last = max(len(ids) for ids, _ in chosen), max(len(answer) for _, answer in chosen)
        ids, mask = torch.zeros(2, len(chosen), longest, dtype=torch.int64)
        targets = torch.zeros(len(chosen), last, dtype=torch.int64)
        wanted = torch.zeros(len(chosen), last, dtype=torch.bool)
        for n, (text, answer) in enumerate(chosen):
            ids[n, longest - len(text) :] = torch.tensor(text)
            mask[n, longest - len(text) :] = 1
            targets[n, last - len(answer) :] = torch.tensor(answer)
            wanted[n, last - len(answer) :] = True
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}
        yield {name: own.to(device) for name, own in inputs.items()}, targets.to(device), wanted.to(device)
