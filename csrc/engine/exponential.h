// Fused multiply-add, exp and tanh on vectors.
#pragma once

#include "common/simd.h"

namespace anybit::ANYBIT_ISA {
namespace {

// a b + c, rounded once where the processor can. The compiler may not choose where (CMakeLists.txt): it would choose
// anew for every number of queries, and then bits would depend on that.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

inline Floats greater(Floats a, Floats b) { return a > b ? a : b; }
inline Floats lesser(Floats a, Floats b) { return a < b ? a : b; }

// e^x within 2 units in the last place: 2^k times a polynomial of the rest (Cephes' coefficients). 0 below -87, the
// largest finite power above 88; NaN stays one.
inline Floats exponential(Floats x) {
    const Floats low = broadcast(-87.33f), high = broadcast(88.72f);
    const auto under = x < low;
    const Floats y = lesser(greater(low, x), high); // NaN becomes `high`; the last line puts it back
    const Floats whole = fused(y, broadcast(1.44269504f), broadcast(0x1.8p23f)) - 0x1.8p23f;
    const Floats r = fused(whole, broadcast(2.12194440e-4f), fused(whole, broadcast(-0.693359375f), y));
    Floats p = broadcast(1.9875691500e-4f);
    p = fused(p, r, broadcast(1.3981999507e-3f));
    p = fused(p, r, broadcast(8.3334519073e-3f));
    p = fused(p, r, broadcast(4.1665795894e-2f));
    p = fused(p, r, broadcast(1.6666665459e-1f));
    p = fused(p, r, broadcast(5.0000001201e-1f));
    p = fused(p, r * r, r) + 1.0f;
    const Ints power = (__builtin_convertvector(whole, Ints) + 126) << 23; // half of it: 2^128 is no float
    const Floats made = p * reinterpret_cast<Floats>(power) * 2.0f;
    const Floats flushed = under ? Floats{} : made;
    return x == x ? flushed : x;
}

inline Floats hyperbolic_tangent(Floats x) {
    // (1 - e^-2|x|) / (1 + e^-2|x|) loses digits near 0, where x - x^3 / 3 + 2 x^5 / 15 has them all.
    const Floats size = x < 0 ? -x : x, e = exponential(size * -2.0f);
    const Floats far = (1.0f - e) / (1.0f + e), square = x * x;
    const Floats near = size * (1.0f + square * (square * 0.133333333f - 0.333333333f));
    const Floats made = size < 0.04f ? near : far;
    return x < 0 ? -made : made;
}

} // namespace
} // namespace anybit::ANYBIT_ISA
