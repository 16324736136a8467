"""Products and roundings that Triton's interpreter, which has no bfloat16, would get wrong."""

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
def rounded(values, TYPE: tl.constexpr):
    """Values float32 in another type, to nearest even."""
    if INTERPRETED and tl.bfloat16 == TYPE:  # it would cut them off
        bits = values.to(tl.uint32, bitcast=True)
        values = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return values.to(TYPE)
