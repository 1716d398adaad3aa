"""The tuned lens (Belrose et al., arXiv 2303.08112): an affine translator for each layer before the logit lens.

A translator maps h to h + A h + b. It starts at zero, where it is the logit lens, and is trained on
KL(p_final || p_translated), both through the model's own final norm and head. Axes: layer (all but the last, which
needs none), pos, d_model, vocab.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engram_lab.models import listing, loading
from engram_lab.models.errors import CheckpointError, DataError, LabError
from engram_lab.models.files import whole
from engram_lab.models.handle import Handle
from engram_lab.models.optim import Muon
from engram_lab.probes.base import Array, Record
from engram_lab.probes.fit_text import FitText, line_digests, windows_of
from engram_lab.probes.lens_math import lens_statistics

FILE = "tuned_lens.safetensors"
WINDOW, ROWS = 128, 4  # tokens of a sequence, sequences of a step
POSITIONS = 256  # of these, drawn for the loss of a step: the head costs more than the model
HELD_OUT = 32  # sequences on which the fit is judged
WARM_UP = 10  # steps
MATRIX_RATE, BIAS_RATE = 0.05, 0.02  # of Muon, and of Adam in units of the layer's root mean square
_KEY = "engram_lab.tuned_lens"


class NoTranslatorsError(LabError):
    """A model for which no tuned lens has been fitted."""


def tokens_for(steps: int) -> int:
    """The tokens of so many steps, so that each is read once."""
    return steps * ROWS * WINDOW


@dataclass(frozen=True, eq=False)
class FitConfig(Record):
    """How long to fit, on how many tokens of text; `seed` draws documents and positions. Raises LabError."""

    steps: int = 300
    tokens: int = tokens_for(300)
    max_characters: int = 4000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "tokens", "max_characters"):
            if getattr(self, name) < 1:
                raise LabError(f"{name.replace('_', ' ')} is {getattr(self, name)}; it must be 1 or more.")
        if self.seed < 0:
            raise LabError(f"The seed is {self.seed}; it must be 0 or more.")


@dataclass(frozen=True, eq=False)
class FitInfo(Record):
    """What translators were fitted on, and what that gave on held-out documents of the same text."""

    fingerprint: str  # of the model
    config: FitConfig
    texts: tuple[str, ...]  # names of files
    text_digest: str  # 16 hex characters of the sha256 over the token ids of the fit
    tokens: int  # read by the fit, each `steps * ROWS * WINDOW / tokens` times
    documents: int
    held_out_documents: int
    held_out_positions: int
    logit_kl: Annotated[np.ndarray, Array("layer", unit="nats", dtype="float64")]  # held out, before
    tuned_kl: Annotated[np.ndarray, Array("layer", unit="nats", dtype="float64")]  # held out, after


@dataclass(frozen=True)
class Translators:
    """Translators of one model: weight [layer, d_model, d_model], bias [layer, d_model], float32.

    `lines` holds a digest of every line of the text of the fit.
    """

    weight: Tensor
    bias: Tensor
    info: FitInfo
    lines: np.ndarray

    def apply(self, states: Tensor) -> Tensor:
        """states [layer + 1, ..., d_model] translated, in their dtype; the last layer is passed on as it is."""
        out = states.clone()
        for n, (weight, bias) in enumerate(
            zip(self.weight.to(states.device), self.bias.to(states.device), strict=True)
        ):
            state = states[n].float()
            out[n] = (state + (state @ weight.T + bias)).to(states.dtype)
        return out

    def seen(self, prompts: Iterable[str]) -> int:
        """How many of the prompts are lines of the text of the fit, so that a figure on them says too much."""
        return int(np.isin(line_digests(prompts), self.lines).sum())


def places(handle: Handle) -> list[Path]:
    """Where the translators of a model are looked for: the user's own first, then those beside its weights."""
    found = [listing.cache_folder() / "lenses" / f"{handle.fingerprint}.safetensors"]
    for folder in (listing.SHIPPED / handle.name, Path(handle.name).expanduser()):
        if (folder / "config.json").is_file():
            found.append(folder / FILE)
            break
    return found


def find(handle: Handle) -> Path | None:
    """The file with the model's translators, or None."""
    return next((path for path in places(handle) if path.is_file()), None)


def open_translators(handle: Handle, path: Path | None = None) -> Translators:
    """The translators of a model, from `path` or where they are found.

    Raises NoTranslatorsError if there are none, CheckpointError if they are damaged or those of other weights.
    """
    path = path or find(handle)
    again = f"engram-lab lens fit --model {handle.name} --text FILE"
    if path is None:
        raise NoTranslatorsError(f"No tuned lens has been fitted for {handle.name}: fit it with {again}.")
    try:
        with safe_open(path, "pt") as file:
            info = FitInfo.from_dict(json.loads((file.metadata() or {})[_KEY]))
            weight, bias, lines = (file.get_tensor(name) for name in ("weight", "bias", "lines"))
    except (LabError, OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a tuned lens ({loading.first_line(error)}): fit it with {again}."
        ) from None
    if info.fingerprint != handle.fingerprint:
        raise CheckpointError(
            f"{path} was fitted to the weights {info.fingerprint}, and {handle.name} has {handle.fingerprint}: "
            f"fit it anew with {again}."
        )
    shape = (handle.n_layers, handle.d_model)
    if tuple(weight.shape) != (*shape, handle.d_model) or tuple(bias.shape) != shape:
        raise CheckpointError(
            f"{path} has translators of the shape {list(weight.shape)}, where {handle.name} needs "
            f"{[*shape, handle.d_model]}: fit it anew with {again}."
        )
    if not (torch.isfinite(weight).all() and torch.isfinite(bias).all()):
        raise CheckpointError(f"{path} holds values that are not finite: fit it anew with {again}.")
    return Translators(weight.float(), bias.float(), info, lines.numpy())


def save(translators: Translators, path: Path) -> None:
    """Write translators, whole or not at all."""
    tensors = {
        "weight": translators.weight.contiguous(),
        "bias": translators.bias.contiguous(),
        "lines": torch.from_numpy(translators.lines.copy()),
    }
    _write(tensors, {_KEY: json.dumps(translators.info.to_dict())}, path)


def _write(tensors: dict[str, Tensor], metadata: dict[str, str], path: Path) -> None:
    """A safetensors file that takes the place of the old one at once; CheckpointError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as fresh:
            save_file(tensors, fresh, metadata)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} could not be written ({loading.first_line(error)}): use --out.") from None


class Fit:
    """One fit under way: `step()` until `done`, then `result()`; `store` and `resume` in between.

    The translators are trained about each layer's mean and in units of its root mean square about it, taken from the
    first sequences: layers of any scale then learn at one rate. Matrices by Muon, biases by Adam.
    """

    def __init__(self, handle: Handle, text: FitText, config: FitConfig) -> None:
        self.handle, self.text, self.config = handle, text, config
        length = min(WINDOW, handle.context)
        self.windows = windows_of(handle, text.fit, length, config.tokens)
        self.held_out = windows_of(handle, text.held_out, length, HELD_OUT * length)
        for found, what in ((self.windows, "fit"), (self.held_out, "held-out")):
            if not found:
                raise DataError(
                    f"{', '.join(text.names)} has no {what} document (one in 200 is held out): bring more text, "
                    "with a blank line after each document."
                )
        self.steps_done = 0
        self.mean, self.scale = self._moments()
        shape = (handle.n_layers, handle.d_model)
        self.weight = [torch.zeros(shape[1], shape[1], device=handle.device).requires_grad_() for _ in range(shape[0])]
        self.bias = torch.zeros(shape, device=handle.device).requires_grad_()
        self.optimizers = (
            Muon(self.weight, lr=MATRIX_RATE, weight_decay=0.0),
            torch.optim.Adam([self.bias], lr=BIAS_RATE, betas=(0.9, 0.98)),
        )
        digest = hashlib.sha256()
        for window in self.windows:
            digest.update(np.array(window, dtype="<u4").tobytes())
        self.text_digest = digest.hexdigest()[:16]

    @property
    def done(self) -> bool:
        """Whether all steps have been taken."""
        return self.steps_done >= self.config.steps

    def batch(self, step: int) -> list[list[int]]:
        """The sequences of a step: all of them in a seeded order, drawn anew for each pass."""
        n = len(self.windows)
        found = []
        for at in range(step * ROWS, (step + 1) * ROWS):
            order = np.random.default_rng([self.config.seed, at // n]).permutation(n)
            found.append(self.windows[order[at % n]])
        return found

    def forward(self, windows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """(states [layer + 1, pos, d_model], final logits [pos, vocab]) of the positions that the lens counts.

        That is all but padding and a special token that leads a document.
        """
        longest = max(map(len, windows))
        ids = torch.tensor([[*window, *[0] * (longest - len(window))] for window in windows])
        mask = torch.tensor([[1] * len(window) + [0] * (longest - len(window)) for window in windows])
        counted = mask.bool()
        for n, window in enumerate(windows):
            counted[n, 0] &= len(window) == 1 or not self.handle.is_special(window[0])
        got = self.handle.residuals(ids, None if mask.all() else mask)
        at = counted.to(self.handle.device)
        return got.states[:, at], got.logits[at]

    def _moments(self) -> tuple[Tensor, Tensor]:
        """(mean [layer, d_model], root mean square about it [layer]) over the first sequences."""
        with self.handle.running():
            states, _ = self.forward(self.windows[: 2 * ROWS])
            states = states[:-1].float()
            mean = states.mean(dim=1)
            scale = (states - mean[:, None]).square().mean(dim=(1, 2)).sqrt().clamp_min(1e-6)
        return mean.clone(), scale.clone()

    def step(self) -> list[float]:
        """Take one step; the loss of each layer in nats, before it."""
        step, config = self.steps_done, self.config
        with self.handle.running():
            states, logits = self.forward(self.batch(step))
            order = np.random.default_rng([config.seed, step, 1]).permutation(states.shape[1])[:POSITIONS]
            drawn = torch.from_numpy(np.sort(order)).to(states.device)
            losses, gradients = self.gradients(states[:-1, drawn].float(), logits[drawn].float())
        for parameter, gradient in zip([*self.weight, self.bias], gradients, strict=True):
            parameter.grad = gradient.clone()  # which may be used outside of inference mode
        rate = min(1.0, (step + 1) / WARM_UP) * (1 - step / config.steps)
        for optimizer, top in zip(self.optimizers, (MATRIX_RATE, BIAS_RATE), strict=True):
            optimizer.param_groups[0]["lr"] = top * rate
            optimizer.step()
        self.steps_done += 1
        return losses

    def gradients(self, states: Tensor, final: Tensor) -> tuple[list[float], list[Tensor]]:
        """(KL [layer] in nats, its gradients for each weight and for the bias), at states [layer, pos, d_model].

        By the logits the gradient of a mean KL is (p_translated - p_final) / positions; autograd takes it through
        head and norm, and the affine map is done by hand.
        """
        n = states.shape[1]
        log_p = final.log_softmax(dim=-1)
        p = log_p.exp()
        losses, weights, biases = [], [], []
        for layer, state in enumerate(states):
            centred = (state - self.mean[layer]) / self.scale[layer]
            with torch.inference_mode(False), torch.enable_grad():
                moved = centred @ self.weight[layer].detach().T + self.bias[layer].detach()
                translated = (state + self.scale[layer] * moved).clone().requires_grad_()
                logits = self.handle.unembed(translated.to(self.handle.dtype)).float()
                log_q = logits.detach().log_softmax(dim=-1)
                losses.append((p * (log_p - log_q)).sum(dim=-1).mean().item())
                by_logits = log_q.exp_().sub_(p).div_(n)
                (gradient,) = torch.autograd.grad(logits, translated, by_logits)
            gradient = gradient * self.scale[layer]
            weights.append(gradient.T @ centred)
            biases.append(gradient.sum(dim=0))
        return losses, [*weights, torch.stack(biases)]

    def translators(self) -> tuple[Tensor, Tensor]:
        """(weight [layer, d_model, d_model], bias [layer, d_model]) as applied to the states themselves, on the CPU."""
        weight = torch.stack([own.detach() for own in self.weight])
        bias = self.scale[:, None] * self.bias.detach() - torch.einsum("lij,lj->li", weight, self.mean)
        return weight.cpu(), bias.cpu()

    def result(self) -> Translators:
        """The translators with what they gave on held-out documents."""
        weight, bias = self.translators()
        zero = np.zeros(self.handle.n_layers)
        info = FitInfo(
            self.handle.fingerprint, self.config, self.text.names, self.text_digest, sum(map(len, self.windows)),
            len(self.text.fit), len(self.text.held_out), 0, zero, zero,
        )  # fmt: skip
        made = Translators(weight, bias, info, line_digests(self.text.fit))
        curves, positions = [], 0
        with self.handle.running():
            batches = [self.held_out[n : n + ROWS] for n in range(0, len(self.held_out), ROWS)]
            for batch in batches:
                states, _ = self.forward(batch)
                both = (states, made.apply(states))
                curves.append([lens_statistics(own, self.handle.unembed).kl[:-1].double().sum(dim=1) for own in both])
                positions += states.shape[1]
        logit_kl, tuned_kl = (
            torch.stack(own).sum(dim=0).cpu().numpy() / positions for own in zip(*curves, strict=True)
        )
        told = info.to_dict() | {"held_out_positions": positions, "logit_kl": logit_kl.tolist()}
        return Translators(weight, bias, FitInfo.from_dict(told | {"tuned_kl": tuned_kl.tolist()}), made.lines)

    def _request(self) -> dict[str, Any]:
        """What a checkpoint has to agree with."""
        return {"fingerprint": self.handle.fingerprint, "text": self.text_digest, "config": self.config.to_dict()}

    def store(self, path: Path) -> None:
        """Write what `resume` needs."""
        muon, adam = self.optimizers
        tensors = {"mean": self.mean, "scale": self.scale, "bias": self.bias.detach()}
        for name, value in adam.state[self.bias].items():
            tensors[f"adam.{name}"] = value
        for n, own in enumerate(self.weight):
            tensors[f"weight.{n}"] = own.detach()
            if own in muon.state:
                tensors[f"momentum.{n}"] = muon.state[own]["momentum_buffer"]
        state = {"request": self._request(), "step": self.steps_done}
        _write({k: v.cpu().contiguous() for k, v in tensors.items()}, {_KEY: json.dumps(state)}, path)

    def resume(self, path: Path) -> None:
        """Go on from what `store` wrote; CheckpointError if that is not there, damaged or of another request."""
        try:
            with safe_open(path, "pt") as file:
                state = json.loads((file.metadata() or {})[_KEY])
                tensors = {name: file.get_tensor(name).to(self.handle.device) for name in file.keys()}  # noqa: SIM118
            request, step = state["request"], state["step"]
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(f"There is no fit to resume in {path} ({loading.first_line(error)}).") from None
        if request != self._request():
            raise CheckpointError(f"The fit in {path} has another model, text or setting: start anew without --resume.")
        muon, adam = self.optimizers
        self.mean, self.scale, self.steps_done = tensors["mean"], tensors["scale"], step
        with torch.no_grad():
            self.bias.copy_(tensors["bias"])
            for n, own in enumerate(self.weight):
                own.copy_(tensors[f"weight.{n}"])
                if f"momentum.{n}" in tensors:
                    muon.state[own]["momentum_buffer"] = tensors[f"momentum.{n}"]
        moments = {name.removeprefix("adam."): value for name, value in tensors.items() if name.startswith("adam.")}
        if moments:
            adam.state[self.bias].update(moments | {"step": moments["step"].cpu()})


def fit(
    handle: Handle,
    text: FitText,
    config: FitConfig,
    checkpoint: Path | None = None,
    resume: bool = False,
    report: Callable[[int, list[float]], None] = lambda step, losses: None,
) -> Translators:
    """Fit the translators of a model. `report` gets the steps done and the loss of each layer, and may raise to
    stop: the fit is then stored in `checkpoint`, from which `resume` goes on to the same weights.
    """
    under_way = Fit(handle, text, config)
    if resume and checkpoint is not None:
        under_way.resume(checkpoint)
    while not under_way.done:
        losses = under_way.step()
        try:
            report(under_way.steps_done, losses)
        except BaseException:
            if checkpoint is not None:
                under_way.store(checkpoint)
            raise
    return under_way.result()
