"""Plain PyTorch versions of every kernel: what runs where no fast one exists, and the oracle in tests."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from anybit.formats import GroupInt, GroupIntLayout
from anybit.formats.bits import safe, split_groups
from anybit.formats.weight import PackedWeight, QuantizedWeight, unpack


def matmul(x: Tensor, weight: PackedWeight) -> Tensor:
    """`x [..., in] @ W^T -> [..., out]` in the dtype of x, inputs and weight dequantized in float32."""
    dense = dequantize(weight).to(device=x.device, dtype=x.dtype)
    return torch.nn.functional.linear(round_inputs(x, weight), dense)


def quantize_activations(
    x: Tensor,  # float32 [m, c]
    bits: int,  # 2..8
    group_size: int,
    clip: Tensor | None,  # float16 [groups]; None: the scales are
    fixed: Tensor | None,  # float16 [groups]
) -> tuple[Tensor, Tensor]:
    """Symmetric activations: codes int8 [m, c] and scales float32 [m, groups], `x ~ scale * code`.

    A scale is the group's largest magnitude times `clip`, over `2**(bits - 1) - 1`; codes round half to even and reach
    down to `-2**(bits - 1)`.
    """
    groups, top = split_groups(x, group_size), 2 ** (bits - 1) - 1
    if fixed is None:
        assert clip is not None
        scale = groups.abs().amax(-1) * clip.float() / top
    else:
        scale = fixed.float().expand(groups.shape[:2])
    scale = torch.where(groups.isfinite().all(-1), scale, torch.nan)  # NaN and Inf have no code
    codes = (groups / safe(scale)[..., None]).clamp(-top - 1, top).nan_to_num(-top - 1).round()
    return codes.flatten(1)[:, : x.shape[1]].to(torch.int8), scale.contiguous()


def round_activations(x: Tensor, tile: GroupIntLayout, fields: Mapping[str, Tensor]) -> Tensor:
    """Inputs [m, c] of a tile as it sees them: rounded and scaled back, float32."""
    size = tile.group_size
    codes, scales = quantize_activations(
        x.float(), tile.act_bits, size, fields.get("act_clip"), fields.get("act_scales")
    )
    group = torch.arange(x.shape[1], device=x.device) // size
    return codes.float() * scales[:, group]


def round_inputs(x: Tensor, weight: PackedWeight) -> Tensor:
    """What takes the place of inputs x [..., in] when a layer multiplies with its dense matrix, in the dtype of x."""
    if not weight.layout.rounds_inputs:
        return x
    flat = x.reshape(-1, x.shape[-1]).float()
    scale = weight.tensors.get("input_scale")
    flat = flat if scale is None else flat * scale.float()
    made = flat.clone()
    for tile in weight.layout.placed():
        if not isinstance(tile.layout, GroupIntLayout) or not tile.layout.rounds_inputs:
            continue
        fields = weight.of_tile(tile)
        cols = fields.get("cols")
        if cols is None:
            made = round_activations(flat, tile.layout, fields)
            break  # tiles by rows read the same
        made[:, cols.long()] = round_activations(flat[:, cols.long()], tile.layout, fields)
    made = made if scale is None else made / scale.float()
    return made.to(x.dtype).view(x.shape)


def int_matmul(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """`x [m, in] @ W^T -> [m, out]` in float32, integers where activations are quantized: the two-step dequantization.

    Step 1, in integers and exact: `sum_j (code - zero) * x_code` over each group. Step 2: the scales of weight and
    activations, and the sum over groups (MixLLM, arXiv:2412.14590, section 3.3).
    """
    x = x.float() if weight.input_scale is None else x.float() * weight.input_scale.float()
    y = torch.zeros(len(x), weight.shape[0], device=x.device)
    for tile in weight.tiles:
        part = x if tile.cols is None else x[:, tile.cols.long()]
        if not isinstance(tile, GroupInt) or tile.act_bits == 16:
            product = part @ tile.dequantize().T
        else:
            codes, scales = quantize_activations(
                part, tile.act_bits, tile.group_size, tile.act_clip, tile.act_scales
            )
            sums = group_sums(codes, tile)
            product = (sums.float() * scales[:, None] * tile.scales.float()).sum(-1)
        rows = slice(None) if tile.rows is None else tile.rows.long()
        y[:, rows] += product
    if weight.sparse is not None:
        weight.sparse.add_product(x, y)
    return y


def group_sums(x: Tensor, tile: GroupInt) -> Tensor:
    """Step 1: `sum_j (code - zero) x_j` over every group, integers [m, r, groups], of x int8 [m, c]."""
    dtype = torch.int32 if tile.group_size <= 2**16 else torch.int64  # what no sum can leave
    zero = 2 ** (tile.bits - 1) if tile.zeros is None else tile.zeros.to(dtype)[..., None]
    inputs = split_groups(x.to(dtype), tile.group_size)  # padding inputs are 0
    weights = split_groups(tile.codes.to(dtype), tile.group_size) - zero
    return torch.bmm(inputs.transpose(0, 1), weights.permute(1, 2, 0)).permute(1, 2, 0)


def dequantize(weight: PackedWeight) -> Tensor:
    """The dense matrix, float32 [out, in]."""
    return unpack(weight).dequantize()


def gptq_block(
    weight: Tensor,  # float32 [rows, n], compensated in place
    inverse: Tensor,  # float32 [n, n], this block of the upper Cholesky factor of the inverse Hessian
    scale: Tensor,  # float32 [rows]
    zero: Tensor,  # float32 [rows]
    top: Tensor,  # float32 [rows], largest code
) -> tuple[Tensor, Tensor]:
    """Quantize the columns of one block left to right, spreading each column's error to those after it.

    Returns:
        codes uint8 [rows, n] and errors float32 [rows, n], the latter divided by the factor's diagonal
        (GPTQ, algorithm 1: what the columns after the block are compensated with).
    """
    codes, errors = torch.empty_like(weight), torch.empty_like(weight)
    divisor, empty = safe(scale), scale == 0
    for i in range(weight.shape[1]):
        w = weight[:, i]
        ratio = torch.where(empty, 0.0, w / divisor)  # without a grid, whatever compensation added is lost
        q = (torch.round(ratio) + zero).clamp(min=0).minimum(top)
        error = (w - scale * (q - zero)) / inverse[i, i]
        weight[:, i + 1 :] -= (
            error[:, None] * inverse[i, i + 1 :]
        )  # not addr_, which fuses: other bits than csrc
        codes[:, i], errors[:, i] = q, error
    return codes.to(torch.uint8), errors


def nested_codes(
    targets: Tensor,  # float32 [widths, rows, n]; of 1 bit, 2 bits, ...
    inverse: Tensor,  # float32 [n, n], upper triangular
    tables: Tensor,  # float32 [shapes, 2 + 4 + ... + 2**widths]
    kinds: Tensor,  # uint8 [rows]: shapes
    scales: Tensor,  # float32 [rows]
    weights: Tensor,  # float32 [rows, widths]
) -> tuple[Tensor, Tensor]:
    """One code per weight for all widths from 1 bit up: see `cpu.nested_codes`."""
    targets = targets.clone()
    codes = torch.empty(targets.shape[1:], dtype=torch.uint8, device=targets.device)
    errors = torch.empty_like(targets)
    search = _CodeSearch(tables, kinds, weights)
    divisor = torch.where(scales > 0, scales, 1.0)
    for j in range(targets.shape[2]):
        code = search.best(targets[:, :, j] / divisor)
        error = (targets[:, :, j] - scales * search.entries(code)) / inverse[j, j]
        targets[:, :, j + 1 :] -= error[..., None] * inverse[j, j + 1 :]
        codes[:, j], errors[:, :, j] = code, error
    return codes, errors


def nested_descent(  # noqa: PLR0913 - what the algorithm reads and changes
    slopes: Tensor,  # float32 [widths, rows, n]
    hessian: Tensor,  # float32 [n, n]
    weight: Tensor,  # float32 [rows, n]
    tables: Tensor,  # float32 [shapes, 2 + 4 + ... + 2**widths]
    kinds: Tensor,  # uint8 [rows]: shapes
    scales: Tensor,  # float32 [rows]
    weights: Tensor,  # float32 [rows, widths]
    codes: Tensor,  # uint8 [rows, n], changed
    errors: Tensor,  # float32 [widths, rows, n], changed
    losses: Tensor,  # float32 [rows, widths], changed
) -> None:
    """Choose nested codes anew, one column after the other: see `cpu.nested_descent`."""
    slopes = slopes.clone()
    search = _CodeSearch(tables, kinds, weights)
    divisor = torch.where(scales > 0, scales, 1.0)
    for j in range(slopes.shape[2]):
        old = codes[:, j].long()
        before = scales * search.entries(old)
        code = search.best((before - slopes[:, :, j] / hessian[j, j]) / divisor, old)
        value = scales * search.entries(code)
        step = value - before
        losses += (step * (2.0 * slopes[:, :, j] + step * hessian[j, j])).T
        errors[:, :, j] = torch.where(step == 0, errors[:, :, j], value - weight[:, j])
        slopes[:, :, j + 1 :] += step[..., None] * hessian[j, j + 1 :]
        codes[:, j] = code


class _CodeSearch:
    """The best code of every row for targets at all widths."""

    def __init__(self, tables: Tensor, kinds: Tensor, weights: Tensor) -> None:
        self._widths = weights.shape[1]
        self._of_width = [
            tables[kinds.long(), 2**b - 2 : 2 ** (b + 1) - 2] for b in range(1, self._widths + 1)
        ]  # [rows, 2**b]
        self._middles = [(0.5 * (t[:, :-1] + t[:, 1:])).contiguous() for t in self._of_width]
        self._weights = weights

    def best(self, z: Tensor, known: Tensor | None = None) -> Tensor:
        """int64 [rows] for z [widths, rows], in units of a row's scale; `known` [rows] where none costs less."""
        chosen = torch.empty(z.shape[1], 0, dtype=torch.int64, device=z.device)  # candidates [rows, c]
        out_of_reach = []  # of a row, the nearest at a width that counts nothing
        for own, middle, weight in zip(z, self._middles, self._weights.T):
            chosen = 2 * chosen + (own[:, None] > middle.gather(1, 2 * chosen))  # their better children
            chosen = torch.cat(
                [chosen, torch.searchsorted(middle, own[:, None])], 1
            )  # and the nearest of all
            out_of_reach.append(weight == 0)
        left_out = torch.stack(out_of_reach, 1)
        if known is not None:
            chosen = torch.cat([known[:, None], chosen], 1)
            left_out = torch.cat([torch.zeros_like(left_out[:, :1]), left_out], 1)
        cost = torch.zeros(chosen.shape, device=z.device)
        for at, (own, table) in enumerate(zip(z, self._of_width)):
            miss = own[:, None] - table.gather(1, chosen >> (self._widths - 1 - at))
            cost = cost + self._weights[:, at, None] * (miss * miss)
        cost = cost.masked_fill(left_out, torch.inf)
        return chosen.gather(1, cost.argmin(1, keepdim=True))[:, 0]

    def entries(self, code: Tensor) -> Tensor:
        """Of the tables at every width, [widths, rows]."""
        return torch.stack(
            [
                t.gather(1, code[:, None] >> (self._widths - 1 - at))[:, 0]
                for at, t in enumerate(self._of_width)
            ]
        )


def nested_fit(
    weight: Tensor,  # float32 [rows, n]
    importance: Tensor,  # float32 [n]
    tables: Tensor,  # float32 [shapes, entries]
) -> tuple[Tensor, Tensor]:
    """The shape uint8 and the scale float32 [rows] of each row: see `cpu.nested_fit`."""
    size = weight.square().mean(1).sqrt()

    def misfit(kind: Tensor, scale: Tensor) -> Tensor:
        closest = torch.full_like(weight, torch.inf)
        for entry in tables[kind].T:
            closest = torch.minimum(closest, (weight - (scale * entry)[:, None]).square_())
        return closest @ importance

    kind = torch.zeros(len(weight), dtype=torch.int64, device=weight.device)
    scale, best = size.clone(), misfit(kind, size)

    def take(other: Tensor, to: Tensor, tried: Tensor | bool = True) -> Tensor:
        """Whether each row that is tried gets better, and has changed."""
        cost = misfit(other, to)
        better = (cost < best) & tried
        for now, new in ((kind, other), (scale, to), (best, cost)):
            now.copy_(torch.where(better, new, now))
        return better

    for shape in range(len(tables)):
        for ratio in (0.6, 0.8, 1.0, 1.25, 1.6):
            take(torch.full_like(kind, shape), size * ratio)
    for step in (1.1, 1.05, 1.025):
        for factor in (step, 1 / step):
            better = torch.ones_like(kind, dtype=torch.bool)
            while better.any():
                within = scale < 8 * size if factor > 1 else scale > size / 8
                better = take(kind.clone(), scale * factor, better & within)
    fitted = kind.clone()
    for shift in (-1, 1):
        take((fitted + shift).clamp(0, len(tables) - 1), scale.clone())
    return kind.to(torch.uint8), scale
