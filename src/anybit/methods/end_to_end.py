"""End-to-end tuning of a nested model for all its sizes at once (`--tune`).

Codes stay. What is trained is what all sizes share: the scale of every row and of every kept channel, or its weights
of 16 bits. A step reads some windows, each at an average width drawn at random, whose model is a prefix of the order of
all planes, and goes along the gradient of the Kullback-Leibler divergence from what the unquantized model says of the
next token. It is the logarithm that counts, so that no width is traded for another.

The idea of training only scales of fixed codes end to end is EfficientQAT's (arXiv:2407.11062, section 3.3), there for
one width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from anybit.calibration.gradients import (
    LOGIT_CHUNK,
    ChunkLoss,
    final_hidden,
    gradient_of_embedding,
    head_loss,
    load_whole,
    logits_of,
    recomputed,
    reduced,
    soft_capped,
)
from anybit.calibration.moments import Activations
from anybit.calibration.streaming import StreamedModel
from anybit.checkpoint.files import unwritable, write_whole
from anybit.formats import Nested
from anybit.formats import tables as shapes
from anybit.formats.base import to_half
from anybit.formats.nested import weights_of_kept
from anybit.methods.ordering import Steps
from anybit.progress import SILENT, Silent

LOWEST = 2.1  # average width that is drawn, up to that of the artifact
EXAMINED = (2.3, 3.0, 4.2, 6.0)  # average widths at which held-out windows are looked at
WINDOWS = 2  # per step
TUNING_TOKENS = 1024  # of a window, at most
JUDGED = 4  # windows of a text that are held out
OTHER_TEXT = "builtin"  # held-out windows of which there are too, where it is not the one that is trained on
BETAS = (0.9, 0.95)  # of Adam
SCALE_RATE = 1e-3  # learning rates: of a scale's logarithm,
KEPT_RATE = 2e-3  # and of kept values, relative to their row's, or of their scales' logarithms
WARM_UP = 10  # steps
EXAMINATIONS = 3  # of held-out windows in the course of a training, besides the first
SAVED_EVERY = 10  # steps
FLOOR = 0.01  # nats per token that are too few to fight for: divergences count by their logarithm, this added
CHUNK = 1 << 22  # weights decoded at a time
REACH = math.log(2)  # how far a scale's logarithm may move
MOMENTS = ("exp_avg", "exp_avg_sq")  # what Adam keeps of every parameter
STATE = "state.safetensors"
BYTES_PER_WEIGHT = 1  # that codes take besides the model's own weights
WRITE_SECONDS = 6e-9  # of decoding a weight, on a thread


@dataclass(frozen=True)
class Training:
    """What there is to train with."""

    streamed: StreamedModel  # materialised, and its weights changed
    tile: Callable[[str], Nested]  # a nested matrix with all planes, by name
    matrices: Mapping[str, tuple[str, ...]]  # name -> modules that use it: a layer; embedding, head, or both
    steps: Steps  # the order of all planes
    highest: float  # average width that the artifact will have
    tokens: Tensor  # int64 [n, seq_len] to train on,
    held_out: Tensor  # and to judge by, [m, seq_len]
    count: int  # of steps
    seed: int
    folder: Path  # where the state is kept: a training that was interrupted goes on from there
    report: Silent = SILENT


class _Matrix:
    """A nested matrix [r, c], and which of all parameters are its own; rows as they are stored."""

    def __init__(self, name: str, tile: Nested, rows: int, values: int, device: torch.device) -> None:
        r, k = tile.kept_values.shape
        self.kept_scales = None if tile.kept_scales is None else tile.kept_scales.to(device).float()
        self.name, self.order, self.kept_columns = name, tile.order.to(device), tile.kept.to(device)
        self.scales, self.values = tile.scales.to(device).float(), tile.kept_values.to(device).float()
        self._gains = None if tile.gains is None else tile.gains.to(device)
        self.kept_size = _size(self.values)
        trained = k if tile.kept_scales is not None else r * k
        self.of_scales, self.of_kept = slice(rows, rows + r), slice(values, values + trained)
        codes = tile.codes.new_zeros(r, tile.codes.shape[1] + k)  # of 8 bits, rows as they are put out
        codes[:, tile.coded(codes.shape[1], tile.kept)] = tile.codes
        self._codes = codes[tile.order.argsort()].to(device)
        self._shapes, self._tables = tile.shapes.to(device, torch.int32), shapes.tables().to(device)

    def write(self, counts: Sequence[int], scales: Tensor, kept: Tensor, weight: Tensor) -> None:
        """Let `weight` [r, c] be the matrix with so many rows of every plane."""
        widths = torch.zeros_like(self._shapes)
        multiplied = torch.empty_like(scales, dtype=torch.float32)
        for bits, first, last in Nested.spans(counts):
            widths[first:last] = bits
            multiplied[first:last] = Nested.scales_at(scales, self._gains, bits)[first:last]
        begins = self._shapes * self._tables.shape[1] + 2**widths - 2  # of a row's table among all
        stored = self.order.argsort()  # number of each row that is put out, as it is stored
        step = max(1, CHUNK // self._codes.shape[1])
        for rows in (slice(a, a + step) for a in range(0, len(stored), step)):
            own = stored[rows]
            index = (self._codes[rows] >> (8 - widths[own, None]).to(torch.uint8)).to(torch.int32)
            index += begins[own, None]
            made = self._tables.flatten().index_select(0, index.flatten()).view(index.shape)
            made *= multiplied[own, None]
            made[:, self.kept_columns] = kept[own]
            weight[rows] = made


class _Student:
    """The model under training: parameters, as vectors of all matrices, and what they make of it.

    Args:
        training: see there. The whole model is loaded already.
    """

    def __init__(self, training: Training) -> None:
        self.model = training.streamed.model
        self.device = training.streamed.device
        self.matrices: dict[str, _Matrix] = {}
        self.of_module: dict[str, _Matrix] = {}
        rows = values = 0
        for name, modules in training.matrices.items():
            matrix = _Matrix(name, training.tile(name), rows, values, self.device)
            rows, values = matrix.of_scales.stop, matrix.of_kept.stop
            self.matrices[name] = matrix
            self.of_module |= dict.fromkeys(modules, matrix)
        sizes = {"scales": rows, "kept": values}
        self.parameters = {
            name: torch.zeros(size, device=self.device, requires_grad=True) for name, size in sizes.items()
        }
        self.gradients = {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    def stored(self) -> dict[str, Tensor]:
        """The tensors that the parameters stand for, by name, as an artifact stores them."""
        made = {}
        for matrix in self.matrices.values():
            made[f"{matrix.name}.scales"] = self._scales(matrix)
            if matrix.kept_scales is not None:
                made[f"{matrix.name}.kept_scales"] = self._kept_scales(matrix)
            elif len(matrix.kept_columns):
                made[f"{matrix.name}.kept_values"] = self._kept_values(matrix)
        return made

    @torch.no_grad()
    def _scales(self, matrix: _Matrix) -> Tensor:
        return to_half(matrix.scales * self.parameters["scales"][matrix.of_scales].exp())

    @torch.no_grad()
    def _kept(self, matrix: _Matrix) -> Tensor:
        """Kept weights, float32 [r, k]."""
        if matrix.kept_scales is None:
            return self._kept_values(matrix).float()
        return weights_of_kept(matrix.values, self._scales(matrix), self._kept_scales(matrix))

    @torch.no_grad()
    def _kept_values(self, matrix: _Matrix) -> Tensor:
        moved = self.parameters["kept"][matrix.of_kept].view_as(matrix.values) * matrix.kept_size
        return to_half(matrix.values + moved)

    @torch.no_grad()
    def _kept_scales(self, matrix: _Matrix) -> Tensor:
        assert matrix.kept_scales is not None
        return to_half(matrix.kept_scales * self.parameters["kept"][matrix.of_kept].exp())

    @torch.no_grad()
    def become(self, counts: Mapping[str, Sequence[int]]) -> None:
        """Let the model's weights be those with so many rows of every plane, and the parameters' scales and values."""
        for matrix in self.matrices.values():
            module = self.model.get_submodule(matrix.name)
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            matrix.write(counts[matrix.name], self._scales(matrix), self._kept(matrix), weight)

    @contextmanager
    def followed(self, blocks: nn.ModuleList) -> Iterator[list[Tensor]]:
        """For the length of a `with`, backward passes add to `gradients`; see `gradients.reduced` for what it gives."""
        layers = [
            name for name in self.of_module if not isinstance(self.model.get_submodule(name), nn.Embedding)
        ]
        with reduced(self.model, layers, self._reduce) as embedded, recomputed(blocks):
            yield embedded

    def _reduce(self, name: str, x: Tensor, out: Tensor, gradient: Tensor) -> None:
        """Add a layer's share of the gradients: of inputs [..., in], outputs and their gradient [..., out]."""
        matrix, bias = self.of_module[name], self.model.get_submodule(name).bias
        x, out, gradient = (t.reshape(-1, t.shape[-1]) for t in (x, out, gradient))
        of_outputs = (gradient * out).sum(0, dtype=torch.float32)
        if bias is not None:
            of_outputs -= bias * gradient.sum(0, dtype=torch.float32)
        self._add(matrix, of_outputs, (gradient.T @ x[:, matrix.kept_columns]).float())

    def add_embedded(self, tokens: Tensor, gradient: Tensor) -> None:
        """The same of the embedding: of what was looked up for tokens [n], and its gradient [n, hidden]."""
        embedding = self.model.get_input_embeddings()
        name = name_of(self.model, embedding)
        if name not in self.of_module:
            return
        matrix = self.of_module[name]
        of_outputs = torch.zeros(len(matrix.order), device=self.device)
        of_outputs.index_add_(0, tokens, (gradient * embedding.weight[tokens]).sum(1))
        of_kept = torch.zeros(len(matrix.order), len(matrix.kept_columns), device=self.device)
        of_kept.index_add_(0, tokens, gradient[:, matrix.kept_columns])
        self._add(matrix, of_outputs, of_kept)

    def _add(self, matrix: _Matrix, of_outputs: Tensor, of_kept: Tensor) -> None:
        """Add gradients, rows as they are put out: of the logarithms of whole outputs, and of kept weights.

        Kept weights of 16 bits do not move with their row's scale, those of 8 bits do.
        """
        by_scale, of_kept = of_outputs[matrix.order], of_kept[matrix.order]
        by_weight = of_kept * self._kept(matrix)
        if matrix.kept_scales is None:
            self.gradients["scales"][matrix.of_scales] += by_scale - by_weight.sum(1)
            self.gradients["kept"][matrix.of_kept] += (of_kept * matrix.kept_size).flatten()
        else:
            self.gradients["scales"][matrix.of_scales] += by_scale
            self.gradients["kept"][matrix.of_kept] += by_weight.sum(0)

    def collect(self, weight: float) -> None:
        """Add what was followed to the gradients of the parameters, times `weight`, and begin anew."""
        for name, parameter in self.parameters.items():
            own = self.gradients[name] * weight
            parameter.grad = own if parameter.grad is None else parameter.grad + own
            self.gradients[name].zero_()


def _size(values: Tensor) -> Tensor:
    """Root mean square of the last dimension, which stays."""
    return values.square().mean(-1, keepdim=True).sqrt() if values.numel() else values.new_zeros(())


class _Teacher:
    """The unquantized model: what its head reads, window by window, and its head."""

    @torch.no_grad()
    def __init__(self, training: Training, student_head: bool) -> None:
        model = training.streamed.model
        windows = [*training.tokens, *training.held_out]
        self.model = model
        self.hidden = Activations(len(windows), training.folder, device=training.streamed.device)
        advance = training.report.task("what the unquantized model says", len(windows))
        for i, window in enumerate(windows):
            self.hidden.put(i, final_hidden(model, window[None].to(training.streamed.device)))
            advance(1)
        head = model.get_output_embeddings()
        self.weight, self.bias = head.weight, head.bias
        if student_head:
            self.weight = head.weight.detach().clone()

    def log_probabilities(self, window: int, part: slice) -> Tensor:
        """Of the next token after some positions of a window, float32 [positions, vocabulary]."""
        hidden = self.hidden.get(window)[0, part]
        logits = nn.functional.linear(hidden, self.weight, self.bias).float()
        return soft_capped(self.model, logits).log_softmax(-1)


def end_to_end(training: Training) -> dict[str, Tensor]:
    """Train scales of rows and of kept channels, or kept channels of 16 bits, for all widths at once.

    Args:
        training: see there.

    Returns:
        the tensors that change, by name: those that are best on the held-out windows, which may be those there were.

    Raises:
        InputError: the disk is full.
    """
    return _Run(training).all_steps()


class _Run:
    """A training under way."""

    def __init__(self, training: Training) -> None:
        self.training, self.file = training, training.folder / STATE
        training.folder.mkdir(parents=True, exist_ok=True)
        load_whole(training.streamed, training.report)
        head = name_of(training.streamed.model, training.streamed.model.get_output_embeddings())
        self.teacher = _Teacher(training, any(head in modules for modules in training.matrices.values()))
        self.student = _Student(training)
        rates = {"scales": SCALE_RATE, "kept": KEPT_RATE}
        groups = [
            {"params": [parameter], "full_rate": rates[name]}
            for name, parameter in self.student.parameters.items()
        ]
        self.optimizer = torch.optim.Adam(groups, lr=0.0, betas=BETAS)
        self.best = {name: p.detach().clone() for name, p in self.student.parameters.items()}
        self.history: list[float] = []  # what held-out windows gave, first before any step
        self.draws = _draws(training)

    def all_steps(self) -> dict[str, Tensor]:
        training = self.training
        begun = self._resume()
        advance = training.report.task("tunes for all widths at once", training.count)
        advance(begun)
        if not self.history:
            self._examine()
        for step in range(begun, training.count):
            self._step(step)
            if step + 1 in _examinations(training.count):
                self._examine()
            if (step + 1) % SAVED_EVERY == 0 or step + 1 == training.count:
                self._save(step + 1)
            advance(1)
        training.report.say(
            f"tuning takes the divergence on held-out windows to {math.exp(min(self.history) - self.history[0]):.2f} "
            "of what it was (geometric mean over widths)"
        )
        self._take(self.best)
        return self.student.stored()

    def _step(self, step: int) -> None:
        student, blocks = self.student, self.training.streamed.blocks
        self.optimizer.zero_grad()
        for window, bits in self.draws[step]:
            student.become(self._counts(bits))
            tokens = self.training.tokens[window].to(student.device)
            with student.followed(blocks) as embedded:
                hidden = final_hidden(student.model, tokens[None])[0]
                divergence = head_loss(student.model, hidden, self._chunk_loss(window))
                divergence.backward()
                student.add_embedded(tokens, gradient_of_embedding(student.model, embedded[0]))
                student.collect(1 / (WINDOWS * (float(divergence.detach()) + FLOOR)))  # of its logarithm
        for group in self.optimizer.param_groups:
            group["lr"] = group["full_rate"] * _rate(step, self.training.count)
        self.optimizer.step()
        with torch.no_grad():
            student.parameters["scales"].clamp_(-REACH, REACH)
            for matrix in student.matrices.values():
                if matrix.kept_scales is not None:
                    student.parameters["kept"][matrix.of_kept].clamp_(-REACH, REACH)

    def _counts(self, bits: float) -> Mapping[str, Sequence[int]]:
        steps = self.training.steps
        return steps.counts(steps.upto(bits))

    def _chunk_loss(self, window: int) -> ChunkLoss:
        def divergence(part: slice, _: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
            wanted, own = self.teacher.log_probabilities(window, part), logits.log_softmax(-1)
            probability = wanted.exp()
            loss = (probability * (wanted - own)).sum()
            return loss, own.exp_().sub_(probability)

        return divergence

    @torch.no_grad()
    def _examine(self) -> None:
        """Note how far held-out windows are from the unquantized model; keep what is best."""
        found = [math.log(self._divergence(bits) + FLOOR) for bits in _examined(self.training.highest)]
        self.history.append(sum(found) / len(found))
        if self.history[-1] <= min(self.history):
            self.best = {name: p.detach().clone() for name, p in self.student.parameters.items()}

    def _divergence(self, bits: float) -> float:
        """Mean over the tokens of held-out windows."""
        self.student.become(self._counts(bits))
        total, first = 0.0, len(self.training.tokens)
        for i, tokens in enumerate(self.training.held_out):
            hidden = final_hidden(self.student.model, tokens[None].to(self.student.device))[0]
            loss = self._chunk_loss(first + i)
            for a in range(0, len(hidden), LOGIT_CHUNK):
                part = slice(a, a + LOGIT_CHUNK)
                total += float(loss(part, hidden[part], logits_of(self.student.model, hidden[part]))[0])
        return total / self.training.held_out.numel()

    def _take(self, parameters: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.student.parameters.items():
                parameter.copy_(parameters[name])

    def _save(self, step: int) -> None:
        """Keep the state after so many steps, whole or not at all.

        Raises:
            InputError: the disk is full or refuses the file; the state before stays.
        """
        tensors = {f"best.{name}": t for name, t in self.best.items()}
        for name, parameter in self.student.parameters.items():
            state = self.optimizer.state[parameter]
            tensors[f"now.{name}"] = parameter.detach()
            tensors |= {f"{moment}.{name}": state[moment] for moment in MOMENTS}
        tensors["history"] = torch.tensor(self.history, dtype=torch.float64)
        tensors["step"] = torch.tensor([step])
        dense = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        try:
            write_whole(self.file, lambda unfinished: save_file(dense, unfinished), mode=0o644)
        except (OSError, SafetensorError) as error:
            raise unwritable(self.file, error, "the state of the tuning before is kept") from error

    def _resume(self) -> int:
        """Take over a state that was kept, and say after how many steps it was; 0 where there is none, or damage."""
        try:
            kept = load_file(self.file, device=str(self.student.device))
            step, history = int(kept["step"]), kept["history"].tolist()
            found = {
                name: [kept[f"{kind}.{name}"] for kind in ("now", "best", *MOMENTS)]
                for name in self.student.parameters
            }
        except (OSError, SafetensorError, KeyError, ValueError):
            return 0
        if any(t.shape != self.student.parameters[name].shape for name, of in found.items() for t in of):
            return 0
        for name, (now, best, *moments) in found.items():
            parameter = self.student.parameters[name]
            with torch.no_grad():
                parameter.copy_(now)
            self.best[name] = best
            self.optimizer.state[parameter] = dict(zip(MOMENTS, moments)) | {
                "step": torch.tensor(float(step))
            }
        self.history = history
        self.training.report.say(f"resumes: {step} of {self.training.count} steps of tuning are done")
        return step


def work(count: int, seq_len: int) -> tuple[int, int, int]:
    """Of a training of so many steps: tokens that pass forward through the blocks, backward counted as one more, and
    through the head; and how often all weights are decoded.
    """
    if not count:
        return 0, 0, 0
    length = min(seq_len, TUNING_TOKENS)
    trained, judged, examined = (
        count * WINDOWS * length,
        2 * JUDGED * length,
        (EXAMINATIONS + 1) * len(EXAMINED),
    )
    blocks = (1 + 3) * trained + (1 + examined) * judged  # blocks run again for the backward pass
    return blocks, 3 * trained + 2 * examined * judged, count * WINDOWS + examined


def name_of(model: Any, module: nn.Module | None) -> str | None:
    return next((name for name, m in model.named_modules() if m is module), None)


def parted(windows: int, held_out: int) -> tuple[list[int], list[int]]:
    """Windows to train on and, evenly spread, to hold out: so many, or half of a few."""
    out = [(2 * i + 1) * windows // (2 * n) for n in [min(held_out, windows // 2)] for i in range(n)]
    return [i for i in range(windows) if i not in out], out


def _draws(training: Training) -> list[list[tuple[int, float]]]:
    """Of every step: windows, each with an average width; every window once before any is read again."""
    generator = torch.Generator().manual_seed(training.seed)
    needed, count = training.count * WINDOWS, len(training.tokens)
    rounds = -(-needed // count)
    order = torch.cat([torch.randperm(count, generator=generator) for _ in range(rounds)])[:needed]
    shares = (torch.rand(training.count, WINDOWS, generator=generator) + torch.arange(WINDOWS)) / WINDOWS
    low = min(LOWEST, training.highest)
    widths = (low * (training.highest / low) ** shares).tolist()
    windows = order.view(-1, WINDOWS).tolist()
    return [list(zip(*pair)) for pair in zip(windows, widths)]


def _examined(highest: float) -> list[float]:
    """Average widths that held-out windows are looked at."""
    return [bits for bits in EXAMINED if bits <= highest] or [highest]


def _examinations(count: int) -> set[int]:
    """After how many steps held-out windows are looked at."""
    return {round(count * (i + 1) / EXAMINATIONS) for i in range(EXAMINATIONS)}


def _rate(step: int, count: int) -> float:
    """Share of the full learning rate: a linear rise, then half a cosine."""
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / count))
