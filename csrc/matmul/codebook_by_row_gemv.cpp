// Format "codebook" by rows times few tokens of floats or of bfloat16: gemv.
#include "matmul/codebook_by_row_gemv.h"
#include "matmul/kept_channels.h"
#include "matmul/ops.h"

namespace anybit::ANYBIT_ISA {
namespace {

// ---- what centroids are multiplied as -----------------------------------------------------------------------------

// Inputs of type X in the kernels' order.
template <typename X> struct Plain {
    using Given = Inputs<X>;
    static constexpr bool THREE = false, IN_HALVES = false;
    using Total = Floats;
    using Sums = Floats;
    static constexpr int MOST = MOST_TOKENS;
    static constexpr int64_t MOST_BLOCKS = 32 / sizeof(X);

    template <int B> static void fold_planes(const CodebookByRow& c, Codes (&plane)[B]) { fold_floats(c, plane); }

    static Inputs<X> skip(const CodebookByRow& c, const Inputs<X>& in, int64_t tokens) {
        return {in.x + tokens * in.stride, in.tokens - tokens, in.stride, nullptr, in.kept + tokens * c.kept.channels};
    }
};

// Floats, exactly.
template <typename Table, int M> class ByTable : public Plain<float> {
public:
    ByTable(const CodebookByRow& c, const Inputs<float>& in, int64_t row)
        : table_(c.table, c.kind(row)), x_(in.x), blocks_(blocks_of(c)) {}

    void add(const Codes (&code)[PHASES], int64_t b, Floats (&total)[M]) const {
        Floats sums[4][M] = {};
#pragma GCC unroll 8
        for (int64_t s = 0; s < PHASES; ++s) {
            Floats weights[4];
            table_(code[s], weights);
#pragma GCC unroll 8
            for (int64_t k = 0; k < M; ++k)
                for (int j = 0; j < 4; ++j)
                    sums[j][k] += weights[j] * load(x_ + ((k * blocks_ + b) * PHASES + s) * BYTES + j * LANES);
        }
        for (int64_t k = 0; k < M; ++k) total[k] += (sums[0][k] + sums[1][k]) + (sums[2][k] + sums[3][k]);
    }

    void add_tail(Codes code, int64_t t, Floats (&total)[M]) const {
        Floats weights[4];
        table_(code, weights);
        for (int64_t k = 0; k < M; ++k) {
            const float* x = x_ + ((k + 1) * blocks_ - 1) * PHASES * BYTES + t * BYTES;
            for (int j = 0; j < 4; ++j) total[k] += weights[j] * load(x + j * LANES);
        }
    }

private:
    Table table_;
    const float* x_;
    int64_t blocks_;
};
template <int B, int M> using FloatCentroids = ByTable<FloatTable<B>, M>;
template <int B, int M> using MirroredCentroids = ByTable<MirroredFloats<B>, M>;

#ifdef __AVX2__
// Pairs of bfloat16.
template <int B, int M> class PairedCentroids : public Plain<uint16_t> {
public:
    PairedCentroids(const CodebookByRow& c, const Inputs<uint16_t>& in, int64_t row)
        : table_(c.table, c.kind(row)), x_(in.x), blocks_(blocks_of(c)) {}

    void add(const Codes (&code)[PHASES], int64_t b, Floats (&total)[M]) const {
        Floats sums[2][M] = {};
        for (int64_t s = 0; s < PHASES; ++s) {
            Codes weights[2];
            table_(code[s], weights);
            for (int64_t k = 0; k < M; ++k)
                for (int64_t v = 0; v < 2; ++v) {
                    const uint16_t* pairs = x_ + ((k * blocks_ + b) * PHASES + s) * BYTES + v * BYTES / 2;
                    sums[v][k] = dot_pairs(sums[v][k], weights[v], load_as<Codes>(pairs));
                }
        }
        for (int64_t k = 0; k < M; ++k) total[k] += sums[0][k] + sums[1][k];
    }

    void add_tail(Codes code, int64_t t, Floats (&total)[M]) const {
        Codes weights[2];
        table_(code, weights);
        for (int64_t k = 0; k < M; ++k) {
            const uint16_t* pairs = x_ + ((k + 1) * blocks_ - 1) * PHASES * BYTES + t * BYTES;
            for (int64_t v = 0; v < 2; ++v)
                total[k] = dot_pairs(total[k], weights[v], load_as<Codes>(pairs + v * BYTES / 2));
        }
    }

private:
    HalfTable<B> table_;
    const uint16_t* x_;
    int64_t blocks_;
};
#endif

// ---- rows ---------------------------------------------------------------------------------------------------------

// Up to LANES numbers, zeros behind them.
inline Floats load_first(const float* x, int64_t count) {
#if defined(__AVX512F__)
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), x);
#else
    Floats made{};
    __builtin_memcpy(&made, x, static_cast<size_t>(count) * 4);
    return made;
#endif
}

// The kept channels of a row times M tokens.
template <int M> void add_kept(const CodebookByRow& c, const float* x, int64_t row, Floats (&total)[M]) {
    const int64_t n = c.kept.channels;
    for (int64_t j = 0; j < n; j += LANES) {
        const int64_t left = least(LANES, n - j);
        const Floats weights = load_kept(c.kept, row, j, left);
        for (int64_t k = 0; k < M; ++k) total[k] += weights * load_first(x + k * n + j, left);
    }
}

// Outputs += rows' sums of floats and their kept channels.
template <int M, typename X>
void finish_rows(const CodebookByRow& c, const Inputs<X>& in, const Floats (&total)[CodebookByRow::TOGETHER][M],
                 float* y, int64_t y_stride, int64_t k, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        Floats own[M];
        for (int i = 0; i < M; ++i) own[i] = total[row - first][i] * c.row_scale(row);
        add_kept<M>(c, in.kept, row, own);
        for (int i = 0; i < M; ++i)
            y[(k + i) * y_stride + (c.out_rows == nullptr ? row : c.out_rows[row])] += reduce(own[i]);
    }
}

// What `gemv_bits` calls to add sums to outputs.
inline auto adds_to(const CodebookByRow& c, float* y, int64_t y_stride) {
    return [&c, y, y_stride](const auto& from, const auto& total, int64_t k, int64_t first, int64_t last) {
        finish_rows(c, from, total, y, y_stride, k, first, last);
    };
}

void gemv_f32(const CodebookByRow& c, const Inputs<float>& in, float* y, int64_t y_stride, int64_t begin, int64_t end) {
    const auto finish = adds_to(c, y, y_stride);
    by_width(c.bits, [&](auto bits) {
        constexpr int B = bits.value;
        if constexpr (looks_up_mirrored(B))
            if (c.mirrored) return gemv_bits<MirroredCentroids, B>(c, in, begin, end, finish);
        if constexpr (floating(B) != Floating::none) gemv_bits<FloatCentroids, B>(c, in, begin, end, finish);
    });
}

#ifdef __AVX2__
void gemv_bf16(const CodebookByRow& c, const Inputs<uint16_t>& in, float* y, int64_t y_stride, int64_t begin,
               int64_t end) {
    const auto finish = adds_to(c, y, y_stride);
    by_width(c.bits, [&](auto bits) {
        if constexpr (looks_up_halves(bits.value)) gemv_bits<PairedCentroids, bits.value>(c, in, begin, end, finish);
    });
}
#endif

// A token's inputs as the vectors of T meet them: `place` says which byte of the codes a lane of a vector has.
template <typename T>
void arrange(const CodebookByRow& c, const T* x, int64_t (*place)(int64_t, int64_t), int64_t lanes, T* out) {
    int64_t at[BYTES];
    for (int64_t i = 0; i < BYTES; ++i) at[i] = PHASES * place(i / lanes, i % lanes);
    const int64_t blocks = blocks_of(c), whole = blocks - (tails_of(c) > 0);
    for (int64_t b = 0; b < blocks; ++b)
        for (int64_t s = 0; s < PHASES; ++s)
            for (int64_t i = 0; i < BYTES; ++i) {
                const int64_t own = b < whole ? at[i] + s : at[i] / PHASES + s * BYTES; // a tail's in their order
                const int64_t j = b * PHASES * BYTES + own;
                *out++ = j < c.columns ? x[j] : T(0);
            }
}

int64_t columns(const CodebookByRow& c) { return blocks_of(c) * PHASES * BYTES; }

TableForm f32_form(int bits, bool mirrored) {
    if (mirrored && looks_up_mirrored(bits)) return TableForm::mirrored;
    switch (floating(bits)) {
    case Floating::none: return TableForm::none;
    case Floating::bytes: return TableForm::bytes;
    default: return TableForm::whole;
    }
}

void prepare_f32(const CodebookByRow& c, const float* x, float* out, float*) {
    if (c.mirrored && looks_up_mirrored(c.bits)) return arrange(c, x, MirroredFloats<2>::place, LANES, out);
    const bool bytes = floating(c.bits) == Floating::bytes; // gathered entries lie as whole ones
    arrange(c, x, bytes ? ByteFloats<1>::place : WholeFloats<1>::place, LANES, out);
}

#ifdef __AVX2__
TableForm bf16_form(int bits) {
    if (!looks_up_halves(bits)) return TableForm::none;
    return bits <= MOST_WHOLE_HALVES ? TableForm::whole : TableForm::bytes;
}

void prepare_bf16(const CodebookByRow& c, const uint16_t* x, uint16_t* out, float*) {
    const auto place = c.bits <= MOST_WHOLE_HALVES ? WholeHalves<1>::place : ByteHalves<1>::place;
    arrange(c, x, place, 2 * LANES, out);
}
#endif

} // namespace

void add_codebook_by_row_gemv(MatmulOps& ops) {
    CodebookByRowOps& own = ops.codebook_by_row;
    own.columns = columns;
    own.f32_form = f32_form;
    own.f32.prepare = prepare_f32;
    own.f32.gemv = gemv_f32;
#ifdef __AVX2__
    own.bf16_form = bf16_form;
    own.bf16.prepare = prepare_bf16;
    own.bf16.gemv = gemv_bf16;
#endif
}

} // namespace anybit::ANYBIT_ISA
