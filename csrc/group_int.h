// What the float and the integer kernels of format "group int" both ask of a tile.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace anybit::ANYBIT_ISA {
namespace {

inline float scale_of(const GroupInt& t, int64_t row, int64_t g) { return half_to_float(t.scales[row * t.groups + g]); }

inline int zero_of(const GroupInt& t, int64_t row, int64_t g) {
    return t.zeros == nullptr ? 1 << (t.bits - 1) : t.zeros[row * t.groups + g];
}

inline int64_t out_row(const GroupInt& t, int64_t row) { return t.out_rows == nullptr ? row : t.out_rows[row]; }

} // namespace
} // namespace anybit::ANYBIT_ISA
