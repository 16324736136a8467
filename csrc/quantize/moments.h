// Second moments of bfloat16 activations; see moments.cpp. Only where `cpu_features` has AVX512-BF16.
#pragma once

#include <cstdint>

namespace anybit {

constexpr int64_t MOMENT_PANEL = 48; // columns that are packed and multiplied together

// Panel `panel` of x [tokens, columns] (bf16 bits, row stride in elements): out [ceil(tokens / 2), MOMENT_PANEL]
// holds token pairs, the even token in the low half, zeros beyond the matrix.
void pack_moments(const uint16_t* x, int64_t stride, int64_t tokens, int64_t columns, int64_t panel, uint32_t* out);

// h [columns, columns] += the block (panel i, panel j) of X^T X, and its mirror image; i <= j.
void add_moments(const uint32_t* panels, int64_t pairs, int64_t columns, int64_t i, int64_t j, float* h);

} // namespace anybit
