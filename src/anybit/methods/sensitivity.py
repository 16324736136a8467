"""Global precision search from gradients: which output rows or layers of the whole model deserve more bits.

MixLLM (arXiv:2412.14590, section 3.2): a row's salience is the change of the model's loss when that row alone is
rounded, estimated to first and second order from one backward pass per sample; rows of all layers are sorted in one
list. LLM-MQ (Li et al. 2023, section 3.2): a layer's is the first-order change at each width, and an integer program
chooses the widths. The method anybit ranks rows by what an error at their output costs (`output_moments`), on texts of
the model's own besides the given one, and embedding and head with them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from anybit.calibration.gradients import gradient_statistics, load_whole
from anybit.calibration.own_texts import MixedWindows, OwnTexts, most_varied, write_texts
from anybit.calibration.stats import ExpectedTokens, GradientStats, VocabularyStats
from anybit.calibration.streaming import StreamedModel
from anybit.checkpoint.files import unwritable, write_whole
from anybit.config import LayerSpec, TileSpec
from anybit.cost import Cost
from anybit.errors import InputError
from anybit.methods import mixllm, rounding
from anybit.methods import nested_codes as nested
from anybit.methods.anybit import OWN_TEXT_TOKENS, WRITTEN_PER_TAKEN, kinds_of_windows
from anybit.methods.method import Allocation, Search
from anybit.methods.rtn import RTN
from anybit.progress import Advance

SAMPLES_KEPT = 4  # samples between two savings
VOCABULARY = "vocabulary."  # before the names of what parts say of embedding and head

Shapes = Mapping[str, tuple[int, int]]
Delta = Callable[[str, int, int], Tensor]  # layer, first and last row -> the error of rounding them


def salient_rows(search: Search) -> dict[str, tuple[int, ...]]:
    """The output rows of every layer that get 8 bits, ascending (MixLLM, section 3.2).

    Args:
        search: the model, materialised by this call, and unquantized afterwards only if the search has one pass;
            MixLLM's options (`wide_rows` or `bits`: how many; `salience`, `search`, `group_size`).

    Raises:
        InputError: see `gradients.gradient_statistics`.
    """
    options, shapes = search.options, search.shapes
    share = options.wide_share
    if share in (0, 1):
        return {name: tuple(range(out)) if share else () for name, (out, _) in shapes.items()}
    steps = [mixllm.STEP * (k + 1) for k in range(options.passes - 1)] + [share]
    advance = search.report.task(
        f"salience of {sum(out for out, _ in shapes.values())} rows", len(search.tokens) * len(steps)
    )
    wide: dict[str, tuple[int, ...]] = {name: () for name in shapes}
    for i, upto in enumerate(steps):
        if i:
            _widen(search.streamed, wide, options.group_size)
        scores = _scores(search, f"pass-{i}", advance)
        for name, rows in wide.items():
            scores[name][list(rows)] = torch.inf  # chosen once, chosen for good
        wide = choose(scores, shapes, upto, by_rows=options.wide_rows is not None)
    return wide


def output_moments(search: Search) -> Allocation:
    """What a squared error at each output (in nats per token, float32 [out]) and token of every layer is worth.

    The loss of a token grows by `1/2 (g e)^2` for an error e at an output whose gradient is g, to second order and
    with the Fisher information in place of the Hessian; an error of expectation `E[e^2]` at every token costs
    `1/2 seq_len E[sum over tokens of g^2] E[e^2]`, g being the gradient of a sample's mean loss. Tokens count by the
    sum of `g^2` over a layer's outputs (as in GuidedQuant, arXiv:2505.07004, with one group of outputs). What is
    raised: see `salient_rows`.
    """
    search, mixed = _with_own_texts(search)
    search, picked = _of_gradients(search, mixed)
    shapes, (samples, length) = search.shapes, search.tokens.shape
    vocabulary = _vocabulary_shapes(search)
    advance = search.report.task(f"gradients at the outputs of {len(shapes)} layers", samples)

    def reduce(stats: GradientStats) -> Tensor:
        assert stats.output_moment is not None
        return torch.cat([stats.output_moment, stats.token_moment.flatten()])

    def size(name: str, samples: int) -> tuple[int, ...]:
        return (shapes[name][0] + samples * length,)

    parts = list(_parts(search, [], reduce, size, advance))
    outputs, weights = {}, {}
    for name, (out, _) in shapes.items():
        outputs[name] = torch.stack([part[name][:out] for part in parts]).sum(0) * (length / 2 / samples)
        moments = torch.cat([part[name][out:] for part in parts]).view(samples, length)
        mean = moments.double().mean()
        weight = (moments / mean).float() if mean > 0 else torch.ones_like(moments)
        weights[name] = dict(zip(picked, weight))
    summed = {name: torch.stack([part[name] for part in parts]).sum(0) for name in vocabulary}
    known = _vocabulary(summed, length)
    share = search.options.plain_share
    return Allocation(outputs=outputs, tokens=weights, plain_share=share, vocabulary=known, mixed=mixed)


def _vocabulary_shapes(search: Search) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what parts say of embedding and head, if they are to."""
    if not search.vocabulary:
        return {}
    return {VOCABULARY + name: tuple(t.shape) for name, t in _no_vocabulary(search).tensors().items()}


def _no_vocabulary(search: Search, device: torch.device | str = "meta") -> VocabularyStats:
    """Of no sample yet."""
    model, length = search.streamed.model, search.tokens.shape[1]
    rows, hidden = model.get_input_embeddings().weight.shape
    return VocabularyStats.empty(rows, hidden, length, device)


def _vocabulary(summed: Mapping[str, Tensor], length: int) -> VocabularyStats | None:
    """From the sums of all parts."""
    if not summed:
        return None
    return VocabularyStats.of({name.removeprefix(VOCABULARY): t for name, t in summed.items()}, length)


def _with_own_texts(search: Search) -> tuple[Search, MixedWindows | None]:
    """The search over windows of which the last are texts that the model writes by itself, as many to a window as it
    has room for. They take the place of others of the text where it has enough. Parts are kept in a folder that these
    windows name.
    """
    options, (given, seq_len) = search.options, search.tokens.shape
    of_text, windows = kinds_of_windows(options.windows, options.own_texts, given)
    if not windows:
        return search, None
    length = min(OWN_TEXT_TOKENS, seq_len)
    search.report.say(
        f"takes {of_text} windows of the text, and {windows} of texts that the model writes by itself"
    )
    written = _written(search, windows * math.ceil(seq_len / length), length)
    own = written.tokens.reshape(windows, -1)[:, :seq_len]
    others = search.tokens[_spread(given, of_text)]
    mixed = MixedWindows(torch.cat([others, own]), windows, written.expected)
    folder = search.folder
    if folder is not None:
        folder /= hashlib.sha256(mixed.tokens.numpy().tobytes()).hexdigest()[:16]
    return replace(search, tokens=mixed.tokens, folder=folder), mixed


def _written(search: Search, texts: int, length: int) -> OwnTexts:
    """Texts of the model's own, those left out that repeat themselves most; kept in the folder like the parts.

    What the model expects is over all that it wrote.
    """
    count, seed = math.ceil(WRITTEN_PER_TAKEN * texts), search.options.seed
    rows = search.streamed.model.get_input_embeddings().weight.shape[0]
    sizes = {"tokens": (count, length)} | {field.name: (rows,) for field in fields(ExpectedTokens)}

    def make() -> Mapping[str, Tensor]:
        advance = search.report.task(f"{count} texts of the model's own", count * (length - 1))
        made = write_texts(search.streamed, count, length, seed, advance)
        return {"tokens": made.tokens, **vars(made.expected)}

    found = dict(_kept(search, f"own-texts-{count}-{length}-{seed}", sizes, make))
    return OwnTexts(most_varied(found.pop("tokens"), texts), ExpectedTokens(**found))


def _of_gradients(search: Search, mixed: MixedWindows | None) -> tuple[Search, list[int]]:
    """The search over those of the samples whose gradients are taken, and their numbers: of each kind its share."""
    samples, share = search.options.gradient_samples, search.options.own_texts
    own = 0 if mixed is None else mixed.own_windows
    of_text = len(search.tokens) - own
    wanted = min(own, kinds_of_windows(samples, share, of_text)[1])
    picked = [*_spread(of_text, samples - wanted), *(of_text + i for i in _spread(own, wanted))]
    return replace(search, tokens=search.tokens[picked]), picked


def _spread(samples: int, count: int) -> list[int]:
    """`count` of the first `samples` numbers, or all of them, evenly spaced."""
    count = min(samples, count)
    return [i * samples // count for i in range(count)]


def width_scores(search: Search) -> Allocation:
    """What every output row costs at widths 1 to 8, float32 [out, 8], by `score` of its nested codes without
    compensation: an alternative to `output_moments`. What is raised: see `salient_rows`.
    """
    search, mixed = _with_own_texts(search)
    search, _ = _of_gradients(search, mixed)
    shapes, widths = search.shapes, range(1, nested.BITS + 1)
    advance = search.report.task(
        f"scores of {sum(out for out, _ in shapes.values())} rows", len(search.tokens)
    )
    like = {name: torch.zeros(out, nested.BITS) for name, (out, _) in shapes.items()}
    fits: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def rounding(bits: int) -> Delta:
        def delta(name: str, first: int, last: int) -> Tensor:
            rows = _rows(search.streamed, name)[first:last].float()
            if (name, first) not in fits:
                fits[name, first] = nested.fit(rows)
            return nested.rounding(rows, *fits[name, first], bits).sub_(rows)

        return delta

    def reduce(stats: GradientStats) -> Tensor:
        return score(stats, search.options.salience).T.contiguous()

    deltas, vocabulary = [rounding(bits) for bits in widths], _vocabulary_shapes(search)
    like |= {name: torch.zeros(shape) for name, shape in vocabulary.items()}
    found = _mean(search, deltas, reduce, like, advance)
    samples, length = search.tokens.shape
    summed = {name: found.pop(name) * samples for name in vocabulary}
    known = _vocabulary(summed, length)
    return Allocation(outputs=found, vocabulary=known, mixed=mixed)


def layer_widths(
    search: Search,
    stored: Mapping[str, Sequence[int]],  # bytes of every layer at each of the method's widths
    limit: int,  # bytes of all of them
) -> dict[str, int]:
    """LLM-MQ's width of every layer: the least summed score whose average width is at most `bits`, within a
    number of stored bytes.

    A layer's score at a width is `mean_d |g_d . (Q(W) - W)|`, the first-order change of the loss. What is
    raised: see `salient_rows`.
    """
    options, shapes = search.options, search.shapes
    widths = tuple(options.widths_of.whole())
    advance = search.report.task(
        f"scores of {len(shapes)} layers at {len(widths)} widths", len(search.tokens)
    )
    deltas = [_rounding(search.streamed, bits, options.group_size) for bits in widths]
    like = {name: torch.zeros(len(widths)) for name in shapes}

    def reduce(stats: GradientStats) -> Tensor:
        return stats.products.sum(-1).abs().sum(-1)

    scores = _mean(search, deltas, reduce, like, advance)
    sizes = {name: out * in_ for name, (out, in_) in shapes.items()}
    return assign(scores, sizes, widths, options.bits, stored, limit)


def assign(
    scores: Mapping[str, Tensor],
    weights: Mapping[str, int],
    widths: Sequence[int],
    average: float,
    stored: Mapping[str, Sequence[int]] | None = None,
    limit: int = 0,
) -> dict[str, int]:
    """One width for each layer: the least sum of scores [widths] at an average width, by weights, of at most `average`.

    An integer program, solved exactly (HiGHS). Scores are made to fall with the width first: one that rises is noise.
    Where more bits cost nothing and there is room, a layer gets them.

    Args:
        stored: bytes of every layer at each width, which together may be `limit`; None: any.

    Raises:
        InputError: an average or a limit below the smallest widths.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # what only this method needs

    n, k = len(scores), len(widths)
    cost = np.concatenate([torch.cummin(s.double(), 0).values.numpy() for s in scores.values()])
    share = np.array([weights[name] for name in scores], dtype=float) / sum(weights[name] for name in scores)
    one_each = LinearConstraint(np.kron(np.eye(n), np.ones((1, k))), 1, 1)
    spent, budget = [np.kron(share, np.array(widths, dtype=float))], [average + 1e-9]
    if stored is not None:
        spent.append(np.concatenate([np.array(stored[name], dtype=float) for name in scores]) / max(limit, 1))
        budget.append(1 + 1e-12)
    within = LinearConstraint(np.stack(spent), -np.inf, budget)
    unit = cost / max(cost.max(), 1e-300)
    exact = {"mip_rel_gap": 0.0}
    result = milp(
        unit, integrality=np.ones(n * k), bounds=Bounds(0, 1), constraints=[one_each, within], options=exact
    )
    if result.x is None:
        least = "" if stored is None else f" in {limit} bytes"
        raise InputError(f"widths of {widths[0]} to {widths[-1]} bits have no average of {average:g}{least}")
    chosen = result.x.reshape(n, k).argmax(1)
    costs, spends = cost.reshape(n, k), [s.reshape(n, k) for s in spent]
    used = [float(s[np.arange(n), chosen].sum()) for s in spends]
    for i in range(n):
        while chosen[i] + 1 < k and costs[i, chosen[i] + 1] <= costs[i, chosen[i]]:
            more = [float(s[i, chosen[i] + 1] - s[i, chosen[i]]) for s in spends]
            if any(u + m > b for u, m, b in zip(used, more, budget)):
                break
            used = [u + m for u, m in zip(used, more)]
            chosen[i] += 1
    return {name: widths[int(i)] for name, i in zip(scores, chosen)}


def choose(
    scores: Mapping[str, Tensor], shapes: Shapes, share: float, by_rows: bool
) -> dict[str, tuple[int, ...]]:
    """The rows of the highest scores, up to a share of all rows, or (not `by_rows`) of all weights.

    Ties go to the earlier layer and row.
    """
    names = list(shapes)
    layer = torch.cat([torch.full((shapes[n][0],), i) for i, n in enumerate(names)])
    row = torch.cat([torch.arange(shapes[n][0]) for n in names])
    cost = torch.ones(len(row)) if by_rows else torch.tensor([shapes[n][1] for n in names])[layer].float()
    order = torch.argsort(torch.cat([scores[n] for n in names]), descending=True, stable=True)
    spent = cost.double()[order].cumsum(0)
    chosen = order[: int((spent <= share * float(cost.double().sum()) + 1e-6).sum())]
    found: dict[str, list[int]] = {name: [] for name in names}
    for index in chosen.sort().values.tolist():
        found[names[int(layer[index])]].append(int(row[index]))
    return {name: tuple(rows) for name, rows in found.items()}


def score(stats: GradientStats, kind: str) -> Tensor:
    """Sum over samples of each row's estimated change of loss, float32 [deltas, out].

    "full" is eq. 4, `|p + p^2 / 2|` with p the gradient times the rounding error of the whole row; "second-order"
    leaves the first term out; "diagonal" also takes the row's weights one by one, as a diagonal Fisher matrix would.
    """
    if kind == "diagonal":
        return stats.diagonal / 2
    second = stats.products.square() / 2
    return ((stats.products + second).abs() if kind == "full" else second).sum(1)


def _scores(search: Search, folder: str, advance: Advance) -> dict[str, Tensor]:
    """Salience of every row: the mean of `score` over samples; finished parts are kept in a folder of the search's."""
    like = {name: torch.zeros(out) for name, (out, _) in search.shapes.items()}

    def reduce(stats: GradientStats) -> Tensor:
        return score(stats, search.options.salience)[0]

    rounding_ = [_rounding(search.streamed, mixllm.NARROW, search.options.group_size)]
    kept = None if search.folder is None else search.folder / folder
    return _mean(replace(search, folder=kept), rounding_, reduce, like, advance)


def _mean(
    search: Search,
    deltas: Sequence[Delta],
    reduce: Callable[[GradientStats], Tensor],  # of the samples of a part, to a sum over them
    like: Mapping[str, Tensor],  # its shape for every layer
    advance: Advance,
) -> dict[str, Tensor]:
    """The mean over samples of what `reduce` sums."""
    total = {name: torch.zeros_like(t) for name, t in like.items()}

    def size(name: str, _: int) -> tuple[int, ...]:
        return tuple(like[name].shape)

    for found in _parts(search, deltas, reduce, size, advance):
        for name in total:
            total[name] += found[name]
    return {name: t / len(search.tokens) for name, t in total.items()}


def _parts(
    search: Search,
    deltas: Sequence[Delta],
    reduce: Callable[[GradientStats], Tensor],
    size: Callable[[str, int], tuple[int, ...]],  # of what `reduce` gives, by layer and number of samples
    advance: Advance,
) -> Iterator[Mapping[str, Tensor]]:
    """What `reduce` gives for every layer, for some samples at a time; finished parts are kept in the folder."""
    vocabulary = _vocabulary_shapes(search)
    for a in range(0, len(search.tokens), SAMPLES_KEPT):
        part = search.tokens[a : a + SAMPLES_KEPT]
        sizes = {name: size(name, len(part)) for name in search.shapes} | vocabulary

        def make(part: Tensor = part) -> Mapping[str, Tensor]:
            more = _no_vocabulary(search, search.streamed.device) if search.vocabulary else None
            stats = gradient_statistics(
                search.streamed, part, search.shapes, deltas=deltas, vocabulary=more, advance=advance
            )
            made = {name: reduce(s).cpu() for name, s in stats.items()}
            if more is not None:
                made |= {VOCABULARY + name: tensor.cpu() for name, tensor in more.tensors().items()}
            return made

        yield _kept(search, f"samples-{a}", sizes, make, partial(advance, len(part)))


def _kept(
    search: Search,
    name: str,
    sizes: Mapping[str, tuple[int, ...]],
    make: Callable[[], Mapping[str, Tensor]],
    skip: Callable[[], None] = lambda: None,  # called where it was there
) -> Mapping[str, Tensor]:
    """A part that was finished before, or made now; kept where the search has a folder."""
    file = None if search.folder is None else search.folder / f"{name}.safetensors"
    found = None if file is None else _read_part(file, sizes)
    if found is not None:
        skip()
        return found
    begun = Cost.clock()
    made = make()
    if file is not None:
        _write_part(file, made, Cost.since(begun))
    return made


def _write_part(file: Path, found: Mapping[str, Tensor], cost: Cost) -> None:
    """Keep a part, whole or not at all.

    Raises:
        InputError: the disk is full or refuses the file; parts that were finished stay.
    """
    metadata = {key: str(value) for key, value in asdict(cost).items()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, lambda unfinished: save_file(found, unfinished, metadata=metadata), mode=0o644)
    except (OSError, SafetensorError) as error:
        raise unwritable(file, error, "statistics of the samples before are kept") from error


def _read_part(file: Path, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor] | None:
    """A part that was finished before; None where it is missing or damaged."""
    try:
        found = load_file(file)
    except (OSError, SafetensorError):
        return None
    return found if {n: tuple(t.shape) for n, t in found.items()} == sizes else None


def _rounding(streamed: StreamedModel, bits: int, group_size: int) -> Delta:
    """The error of rounding rows of a layer, asymmetric, without clipping; made anew at each call."""
    spec = LayerSpec(RTN().resolve(), (TileSpec(bits, group_size),))

    def delta(name: str, first: int, last: int) -> Tensor:
        rows = _rows(streamed, name)[first:last].float()
        return rounding.quantize(rows, None, spec).dequantize().sub_(rows)

    return delta


def _rows(streamed: StreamedModel, name: str) -> Tensor:
    module = streamed.model.get_submodule(name)
    return module.weight.T if isinstance(module, Conv1D) else module.weight


@torch.no_grad()
def _widen(streamed: StreamedModel, wide: Mapping[str, tuple[int, ...]], group_size: int) -> None:
    """Round the rows chosen so far to 8 bits: the next pass's gradients are those of that model."""
    load_whole(streamed)
    spec = LayerSpec(RTN().resolve(), (TileSpec(mixllm.WIDE, group_size, symmetric=True),))
    for name, rows in wide.items():
        if rows:
            weight, index = _rows(streamed, name), torch.tensor(rows, device=streamed.device)
            weight[index] = rounding.quantize(weight[index].float(), None, spec).dequantize().to(weight.dtype)
