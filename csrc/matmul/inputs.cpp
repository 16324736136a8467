// What lies between kernels: inputs rounded to 8 bits or fewer or to bfloat16, and outputs put in order.
#include "matmul/ops.h"

#include "matmul/whole.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr float ROUND = 0x1.8p23f; // adding and subtracting it rounds to nearest even, below 2^22

// A scale of every group: the share of its largest that is clipped to, or what is known beforehand.
void find_scales(const float* x, const InputGrid& grid, float top, float* scales) {
    const int64_t groups = ceil_div(grid.columns, grid.group_size);
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = g * grid.group_size, end = least(grid.columns, begin + grid.group_size);
        int32_t largest = 0; // sizes of floats are in the order of their bits, NaN and Inf above all others
        for (int64_t j = begin; j < end; ++j) {
            const int32_t size = load_as<int32_t>(x + j) & INT32_MAX;
            largest = size > largest ? size : largest;
        }
        const auto most = load_as<float>(&largest);
        scales[g] = grid.fixed != nullptr ? half_to_float(grid.fixed[g]) : most * half_to_float(grid.clip[g]) / top;
        if (!(most < __builtin_inff())) scales[g] = __builtin_nanf(""); // NaN and Inf have no code
    }
}

// Multiples of a unit that reach a scale; it has at most 256.
inline int32_t multiples(float scale, float unit) {
    const float exact = scale / unit;
    const auto below = static_cast<int32_t>(exact);
    return below + (static_cast<float>(below) < exact);
}

void round_up_to_multiples(float* scales, int64_t groups) {
    const float largest = largest_scale(scales, groups);
    if (!(largest < __builtin_inff())) return; // all that comes of it is NaN
    float unit = unit_of(largest);
    if (multiples(largest, unit) > MOST_MULTIPLES) unit *= 2;
    for (int64_t g = 0; g < groups; ++g) scales[g] = static_cast<float>(multiples(scales[g], unit)) * unit;
}

void quantize_inputs(const float* x, const InputGrid& grid, int8_t* codes, float* scales) {
    const float top = static_cast<float>((1 << (grid.bits - 1)) - 1), low = -top - 1;
    const int64_t groups = ceil_div(grid.columns, grid.group_size);
    find_scales(x, grid, top, scales);
    if (grid.multiples) round_up_to_multiples(scales, groups);
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = g * grid.group_size, end = least(grid.columns, begin + grid.group_size);
        const float divisor = scales[g] == 0 ? 1 : scales[g];
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

void put_in_order(const float* __restrict from, const int32_t* order, int64_t n, bool set, float* __restrict to) {
    if (set)
        for (int64_t i = 0; i < n; ++i) to[i] = from[order[i]];
    else
        for (int64_t i = 0; i < n; ++i) to[i] += from[order[i]];
}

} // namespace

void add_inputs(MatmulOps& ops) {
    ops.quantize_inputs = quantize_inputs;
    ops.to_bfloat16 = to_bfloat16;
    ops.put_in_order = put_in_order;
}

} // namespace anybit::ANYBIT_ISA
