"""The fused loss against autograd, Muon against torch's and against the singular value decomposition."""

import torch
from torch import nn

from engram_lab.models.optim import LinearCrossEntropy, Muon, orthogonalise


def test_fused_loss_and_gradients_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    n = LinearCrossEntropy.CHUNK_CPU + 37  # one whole chunk and a part of one
    hidden = torch.randn(n, 8, requires_grad=True)
    weight = torch.randn(50, 8, requires_grad=True)
    labels = torch.randint(0, 50, (n,))
    fused = LinearCrossEntropy.apply(hidden, weight, labels)
    (3 * fused).backward()
    assert hidden.grad is not None and weight.grad is not None
    got = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    plain = nn.functional.cross_entropy(hidden @ weight.T, labels)
    (3 * plain).backward()
    torch.testing.assert_close(fused, plain)
    torch.testing.assert_close(got[0], hidden.grad)
    torch.testing.assert_close(got[1], weight.grad)


def test_orthogonalise_keeps_the_singular_vectors_and_flattens_the_values() -> None:
    torch.manual_seed(1)
    for shape in [(3, 12, 20), (3, 20, 12)]:
        matrices = torch.randn(shape)
        out = orthogonalise(matrices, (3.4445, -4.7750, 2.0315), 5, 1e-7)
        for matrix, flat in zip(matrices, out, strict=True):
            u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
            values = u.T @ flat @ vh.T  # diagonal, as the iteration only changes the singular values
            torch.testing.assert_close(values, values.diag().diag(), atol=1e-4, rtol=0)
            assert values.diag().min() > 0.5 and values.diag().max() < 1.3


def test_muon_takes_the_steps_of_torch_muon() -> None:
    torch.manual_seed(2)
    start = [torch.randn(12, 20), torch.randn(12, 20), torch.randn(20, 12)]
    gradients = [[torch.randn_like(p) for p in start] for _ in range(3)]
    results = []
    for kind in (Muon, torch.optim.Muon):
        params = [nn.Parameter(p.clone()) for p in start]
        optimizer = kind(params, lr=0.02, momentum=0.95, weight_decay=0.05)
        for step in gradients:
            for p, gradient in zip(params, step, strict=True):
                p.grad = gradient.clone()
            optimizer.step()
        results.append(params)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)  # torch's runs in bf16
