// Inputs on their way to kernels: rounded to 8 bits or fewer, or to bfloat16.
#include "matmul/ops.h"

#include "common/simd.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr float ROUND = 0x1.8p23f; // adding and subtracting it rounds to nearest even, below 2^22

void quantize_inputs(const float* x, const InputGrid& grid, int8_t* codes, float* scales) {
    const float top = static_cast<float>((1 << (grid.bits - 1)) - 1), low = -top - 1;
    const int64_t groups = ceil_div(grid.columns, grid.group_size);
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = g * grid.group_size, end = least(grid.columns, begin + grid.group_size);
        int32_t largest = 0; // sizes of floats are in the order of their bits, NaN and Inf above all others
        for (int64_t j = begin; j < end; ++j) {
            const int32_t size = load_as<int32_t>(x + j) & INT32_MAX;
            largest = size > largest ? size : largest;
        }
        const auto most = load_as<float>(&largest);
        float scale = grid.fixed != nullptr ? half_to_float(grid.fixed[g]) : most * half_to_float(grid.clip[g]) / top;
        if (!(most < __builtin_inff())) scale = __builtin_nanf(""); // NaN and Inf have no code
        scales[g] = scale;
        const float divisor = scale == 0 ? 1 : scale;
        for (int64_t j = begin; j < end; ++j) {
            float q = x[j] / divisor;
            q = q > low ? q : low; // NaN too
            q = q < top ? q : top;
            codes[j] = static_cast<int8_t>(static_cast<int32_t>((q + ROUND) - ROUND));
        }
    }
}

void to_bfloat16(const float* x, int64_t n, uint16_t* bf16) {
    for (int64_t i = 0; i < n; ++i) bf16[i] = to_bf16(x[i]);
}

} // namespace

void add_inputs(MatmulOps& ops) {
    ops.quantize_inputs = quantize_inputs;
    ops.to_bfloat16 = to_bfloat16;
}

} // namespace anybit::ANYBIT_ISA
