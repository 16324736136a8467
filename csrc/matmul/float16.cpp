// Format "float16": rows of 16-bit weights, and of bfloat16 to compare with.
#include "matmul/gemm.h"
#include "matmul/transpose.h"

namespace anybit::ANYBIT_ISA {
namespace {

struct Fp16 {
    static Floats load(const uint16_t* from) { return load_halves(from); }
};

struct Bf16 {
    static Floats load(const uint16_t* from) {
#if defined(__AVX512F__)
        return reinterpret_cast<Floats>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_as<__m256i>(from)), 16));
#elif defined(__AVX2__)
        return reinterpret_cast<Floats>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_as<__m128i>(from)), 16));
#else
        Ints bits;
        for (int l = 0; l < LANES; ++l) bits[l] = static_cast<int32_t>(static_cast<uint32_t>(from[l]) << 16);
        return reinterpret_cast<Floats>(bits);
#endif
    }
};

#if defined(__AVX512F__)
constexpr int TOGETHER_ROWS = 4; // which meet the same inputs while those are in registers
#else
constexpr int TOGETHER_ROWS = 2;
#endif

// R rows, `columns` apart.
template <typename Half, int R>
inline void dot_rows(const uint16_t* w, const float* x, int64_t columns, float (&dots)[R]) {
    Floats sum[R][4] = {};
    int64_t j = 0;
    for (; j + 4 * LANES <= columns; j += 4 * LANES)
        for (int r = 0; r < R; ++r) {
            const uint16_t* from = w + r * columns + j;
            prefetch(reinterpret_cast<const uint8_t*>(from));
            prefetch(reinterpret_cast<const uint8_t*>(from + 2 * LANES));
            for (int i = 0; i < 4; ++i) sum[r][i] += Half::load(from + i * LANES) * load(x + j + i * LANES);
        }
    for (; j < columns; j += LANES) {
        const auto left = static_cast<size_t>(least(LANES, columns - j));
        Floats floats{};
        __builtin_memcpy(&floats, x + j, left * 4);
        for (int r = 0; r < R; ++r)
            sum[r][0] += Half::load(PartialHalves(w + r * columns + j, static_cast<int64_t>(left)).halves) * floats;
    }
    for (int r = 0; r < R; ++r) dots[r] = reduce((sum[r][0] + sum[r][1]) + (sum[r][2] + sum[r][3]));
}

template <typename Half, int R>
void gemv_rows(const Float16& t, const Inputs<float>& in, float* y, int64_t y_stride, int64_t row) {
    for (int64_t k = 0; k < in.tokens; ++k) {
        float dots[R];
        dot_rows<Half>(t.values + row * t.columns, in.x + k * in.stride, t.columns, dots);
        for (int r = 0; r < R; ++r)
            y[k * y_stride + (t.out_rows == nullptr ? row + r : t.out_rows[row + r])] += dots[r];
    }
}

template <typename Half>
void gemv_half(const Float16& t, const Inputs<float>& in, float* y, int64_t y_stride, int64_t begin, int64_t end) {
    int64_t row = begin;
    for (; row + TOGETHER_ROWS <= end; row += TOGETHER_ROWS) gemv_rows<Half, TOGETHER_ROWS>(t, in, y, y_stride, row);
    for (; row < end; ++row) gemv_rows<Half, 1>(t, in, y, y_stride, row);
}

// The columns from `column` on of a block of rows, a lane for each row.
template <typename Half> int64_t decode_panel(const Float16& t, int64_t block, int64_t column, Floats* panel) {
    const int64_t n = least(PANEL, t.columns - column), first = block * LANES;
    decode_halves<Half::load>(t.values + first * t.columns + column, t.columns, least(LANES, t.rows - first), n, panel);
    return n;
}

// The same with an even number of columns, the last one of zeros where the tile's is odd.
template <typename Half> int64_t decode_even(const Float16& t, int64_t block, int64_t column, Floats* panel) {
    const int64_t n = decode_panel<Half>(t, block, column, panel);
    if (n % 2 != 0) panel[n] = Floats{};
    return n + n % 2;
}

void gemv(const Float16& t, const Inputs<float>& in, float* y, int64_t y_stride, int64_t begin, int64_t end) {
    if (t.bf16) gemv_half<Bf16>(t, in, y, y_stride, begin, end);
    else gemv_half<Fp16>(t, in, y, y_stride, begin, end);
}

void gemm_f32(const Float16& t, const Inputs<float>& in, const Outputs& y, int64_t begin, int64_t end) {
    gemm(t, t.bf16 ? decode_panel<Bf16> : decode_panel<Fp16>, t.columns, in, y, begin, end);
}

#ifdef __AVX512BF16__
void gemm_bf16(const Float16& t, const Inputs<uint16_t>& in, const Outputs& y, int64_t begin, int64_t end) {
    gemm(t, t.bf16 ? decode_even<Bf16> : decode_even<Fp16>, t.columns + t.columns % 2, in, y, begin, end);
}
#endif

} // namespace

void add_float16(MatmulOps& ops) {
    ops.float16.f32 = {nullptr, gemv, gemm_f32};
#ifdef __AVX512BF16__
    ops.float16.bf16.gemm = gemm_bf16;
#endif
}

} // namespace anybit::ANYBIT_ISA
