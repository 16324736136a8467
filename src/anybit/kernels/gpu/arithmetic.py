"""What kernels of several formats compute with: products and roundings that are right in Triton's interpreter, too."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, sums):
    """`sums + a @ b` in the type of the sums; float32 inputs are not rounded to tf32."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    return tl.dot(a, b, sums, input_precision="ieee", out_dtype=sums.dtype)


@triton.jit
def side_by_side(tiles):
    """A tuple of 1, 2, 4 or 8 tiles [m, n] as one, [m, n of all], the columns of the first first."""
    if len(tiles) == 1:
        return tiles[0]
    elif len(tiles) == 2:
        return _pair(tiles[0], tiles[1])
    elif len(tiles) == 4:
        return _pair(_pair(tiles[0], tiles[1]), _pair(tiles[2], tiles[3]))
    else:
        return _pair(
            _pair(_pair(tiles[0], tiles[1]), _pair(tiles[2], tiles[3])),
            _pair(_pair(tiles[4], tiles[5]), _pair(tiles[6], tiles[7])),
        )


@triton.jit
def _pair(a, b):
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def rounded(values, TYPE: tl.constexpr):
    """Values float32 in another type, to nearest even."""
    if INTERPRETED and tl.bfloat16 == TYPE:  # it would cut them off
        bits = values.to(tl.uint32, bitcast=True)
        values = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return values.to(TYPE)
