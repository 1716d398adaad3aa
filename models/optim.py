"""What training needs beyond torch.optim: Muon that is fast where bf16 is not, and a fused output loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def fast_bf16(device: torch.device) -> bool:
    """Whether bf16 matrix products are faster than fp32 ones on `device`; on a CPU that takes AVX512-BF16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return device.type == "cpu" and supported is not None and bool(supported())


def orthogonalise(update: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz iteration of Muon (Jordan, 2024) on a stack of matrices [n, rows, columns], in their dtype."""
    a, b, c = coefficients
    tall = update.shape[-2] > update.shape[-1]
    x = update.mT if tall else update
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Muon):
    """torch.optim.Muon with equal shapes orthogonalised together, in fp32 where bf16 has no hardware.

    torch's own step casts to bf16, which on a CPU without AVX512-BF16 costs more than the whole backward pass.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for shape, params in by_shape.items():
                updates = torch.stack([self._momentum(p, group) for p in params])
                if fast_bf16(updates.device):
                    updates = updates.bfloat16()
                updates = orthogonalise(updates, group["ns_coefficients"], group["ns_steps"], group["eps"])
                lr = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5  # "original" in torch.optim.Muon
                for p, update in zip(params, updates.to(params[0].dtype), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-lr)

    def _momentum(self, p: nn.Parameter, group: dict[str, Any]) -> Tensor:
        assert p.grad is not None
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        buffer = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
        return p.grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer


class LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy (nats) of hidden @ weight.T against labels, without ever holding all logits.

    The gradients are made on the way forward, chunk by chunk while the logits are still in cache.
    """

    CHUNK_CPU, CHUNK_ACCELERATOR = 256, 4096  # rows

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """hidden [n, d_model], weight [vocab, d_model], labels [n] -> scalar."""
        n = hidden.shape[0]
        cpu = hidden.device.type == "cpu"
        chunk = LinearCrossEntropy.CHUNK_CPU if cpu else LinearCrossEntropy.CHUNK_ACCELERATOR
        hidden_grad, weight_grad = torch.empty_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, n, chunk):
            h, y = hidden[start : start + chunk], labels[start : start + chunk, None]
            p = torch.softmax((h @ weight.T).float(), dim=-1)
            # Below the smallest normal float the loss is cut to 87 nats; training never sees it again.
            total -= p.gather(-1, y).clamp_min_(torch.finfo(p.dtype).tiny).log_().sum()
            p = p.scatter_add_(-1, y, p.new_full(y.shape, -1.0)).to(hidden.dtype)
            hidden_grad[start : start + chunk] = p @ weight
            weight_grad.addmm_(p.T, h)
        hidden_grad, weight_grad = hidden_grad / n, weight_grad / n
        ctx.save_for_backward(hidden_grad, weight_grad)
        return total / n

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * grad, weight_grad * grad, None
