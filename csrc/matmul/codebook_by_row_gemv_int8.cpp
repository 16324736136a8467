// Format "codebook" by rows times few tokens of 8 bits: gemv. Tables are of bytes, and sums are exact.
//
// Lane l of a vector meets the 32 weights from 32 l on: the inputs of each such group have a factor of their own.
#include "matmul/codebook_by_row_gemv.h"
#include "matmul/codebook_by_row_whole.h"
#include "matmul/ops.h"
#if defined(__AVX512F__)
#include "matmul/codebook_by_row_bytes.h"
#endif

namespace anybit::ANYBIT_ISA {
namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)
// sums[i] += the dot product of four centroids, less BYTE_ZERO, with four inputs.
inline Ints dot_centred(Ints sums, Codes centred, const int8_t* x) {
    const auto from = load_as<__m256i>(x);
    const __m256i size = _mm256_abs_epi8(from), turned = _mm256_sign_epi8(reinterpret_cast<__m256i>(centred), from);
#if defined(__AVXVNNI__)
    return reinterpret_cast<Ints>(_mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(sums), size, turned));
#else
    return sums + reinterpret_cast<Ints>(_mm256_madd_epi16(_mm256_maddubs_epi16(size, turned), _mm256_set1_epi16(1)));
#endif
}
#endif

#if defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512F__)
constexpr int32_t CENTRE = CodebookByRow::BYTE_ZERO; // centred, they fit pairs of 16 bits that are signed

inline Ints dot_centroids(Ints sums, Codes centroids, const int8_t* x) { return dot_centred(sums, centroids, x); }
#else
constexpr int32_t CENTRE = 0;

inline Ints dot_centroids(Ints sums, Codes centroids, const int8_t* x) {
    return dot(sums, centroids, load_as<Bytes>(x));
}
#endif

// ---- what centroids are multiplied as -----------------------------------------------------------------------------

// Bytes, with inputs of 8 bits: sums are exact.
template <int B, int M> class WholeCentroids {
public:
    using Given = WholeInputs;
    static constexpr bool THREE = true, IN_HALVES = HALVES;
    using Total = WholeSums;
    static constexpr int64_t MOST_BLOCKS = 32;

    static void fold_planes(const CodebookByRow&, Codes (&)[B]) {}
    static WholeInputs skip(const CodebookByRow& c, const WholeInputs& in, int64_t k) { return tokens_from(c, in, k); }

protected:
    WholeCentroids(const CodebookByRow& c, const WholeInputs& in)
        : x_(in.x), factors_(in.factors), block_stride_(in.block_stride), last_(blocks_of(c) - 1) {}

    const int8_t* inputs(int64_t k, int64_t b, int64_t s) const {
        return x_ + b * block_stride_ + (k * PHASES + s) * BYTES;
    }
    const int8_t* tail_inputs(int64_t k, int64_t t) const { return inputs(k, last_, t); }
    Ints factors(int64_t k, int64_t b) const { return load_as<Ints>(factors_of(k, b)); }
    Ints factors_of_tail(int64_t k, int64_t t) const { return tail_factors(factors_of(k, last_), t); }

private:
    const int32_t* factors_of(int64_t k, int64_t b) const {
        return factors_ + b * (block_stride_ / CodebookByRow::INPUT_GROUP) + k * LANES;
    }

    const int8_t* x_;
    const int32_t* factors_;
    int64_t block_stride_, last_;
};

#if !defined(__AVX512F__) // with it: codebook_by_row_bytes.h
// One token's are of 64 bits at once: to widen them at the end of a row takes longer than it saves.
template <int M> struct ByteSums {
    using Sums = ShortSums;
};
template <> struct ByteSums<1> {
    using Sums = WholeSums;
};

// Entries of a byte.
template <int B, int M> class ByteCentroids : public WholeCentroids<B, M> {
public:
    using Sums = typename ByteSums<M>::Sums;
    static constexpr int MOST = MOST_TOKENS;

    ByteCentroids(const CodebookByRow& c, const WholeInputs& in, int64_t row)
        : WholeCentroids<B, M>(c, in), table_(c.table + (c.kind(row) << B), CENTRE) {}
#if defined(__AVX2__)
    ByteCentroids(const CodebookByRow& c, const WholeInputs& in, int64_t lower, int64_t upper)
        : WholeCentroids<B, M>(c, in), table_(c.table + (c.kind(lower) << B), c.table + (c.kind(upper) << B), CENTRE) {}
#endif

    void add(const Codes (&code)[PHASES], int64_t b, Sums (&total)[M]) const {
        Ints sums[2][M] = {}; // chains of a token
#pragma GCC unroll 8          // so that codes and sums stay in registers
        for (int64_t s = 0; s < PHASES; ++s) {
            const Codes weights = table_(code[s]);
#pragma GCC unroll 8
            for (int64_t k = 0; k < M; ++k)
                sums[s % 2][k] = dot_centroids(sums[s % 2][k], weights, this->inputs(k, b, s));
        }
#pragma GCC unroll 8
        for (int64_t k = 0; k < M; ++k) total[k].add(sums[0][k] + sums[1][k], this->factors(k, b));
    }

    void add_tail(Codes code, int64_t t, Sums (&total)[M]) const {
        const Codes weights = table_(code);
#pragma GCC unroll 8
        for (int64_t k = 0; k < M; ++k)
            total[k].add(dot_centroids(Ints{}, weights, this->tail_inputs(k, t)), this->factors_of_tail(k, t));
    }

    static constexpr int32_t EXCESS = CodebookByRow::BYTE_ZERO - CENTRE; // of every entry, in steps

private:
    Table<B> table_;
};
#endif

// Entries of two bytes: a sum of each.
template <int B, int M> class WordCentroids : public WholeCentroids<B, M> {
public:
    using Sums = WholeSums;
    static constexpr int MOST = MOST_TOKENS;

    WordCentroids(const CodebookByRow& c, const WholeInputs& in, int64_t row)
        : WholeCentroids<B, M>(c, in), high_(c.table + (2 * c.kind(row) << B), CENTRE),
          low_(c.table + ((2 * c.kind(row) + 1) << B), CENTRE) {}
#if defined(__AVX2__) && !defined(__AVX512F__)
    WordCentroids(const CodebookByRow& c, const WholeInputs& in, int64_t lower, int64_t upper)
        : WholeCentroids<B, M>(c, in),
          high_(c.table + (2 * c.kind(lower) << B), c.table + (2 * c.kind(upper) << B), CENTRE),
          low_(c.table + ((2 * c.kind(lower) + 1) << B), c.table + ((2 * c.kind(upper) + 1) << B), CENTRE) {}
#endif

    void add(const Codes (&code)[PHASES], int64_t b, WholeSums (&total)[M]) const {
        Ints high[2][M] = {}, low[2][M] = {};
#pragma GCC unroll 8
        for (int64_t s = 0; s < PHASES; ++s) {
            const Codes above = high_(code[s]), below = low_(code[s]);
#pragma GCC unroll 8
            for (int64_t k = 0; k < M; ++k) {
                const int8_t* x = this->inputs(k, b, s);
                high[s % 2][k] = dot_centroids(high[s % 2][k], above, x);
                low[s % 2][k] = dot_centroids(low[s % 2][k], below, x);
            }
        }
#pragma GCC unroll 8
        for (int64_t k = 0; k < M; ++k) // below 2^29: a lane has 32 products of at most 2^15
            total[k].add((high[0][k] + high[1][k]) * CodebookByRow::WORD + (low[0][k] + low[1][k]),
                         this->factors(k, b));
    }

    void add_tail(Codes code, int64_t t, WholeSums (&total)[M]) const {
        const Codes above = high_(code), below = low_(code);
#pragma GCC unroll 8
        for (int64_t k = 0; k < M; ++k) {
            const int8_t* x = this->tail_inputs(k, t);
            const Ints sum = dot_centroids(Ints{}, above, x) * CodebookByRow::WORD + dot_centroids(Ints{}, below, x);
            total[k].add(sum, this->factors_of_tail(k, t));
        }
    }

    static constexpr int32_t EXCESS = (CodebookByRow::WORD + 1) * (CodebookByRow::BYTE_ZERO - CENTRE);

private:
    Table<B> high_, low_;
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// The same of mirrored tables.
template <int B, int M> class MirroredWordCentroids : public WholeCentroids<B, M> {
public:
    using Sums = WholeSums;
    static constexpr int MOST = MOST_TOKENS;

    MirroredWordCentroids(const CodebookByRow& c, const WholeInputs& in, int64_t row)
        : WholeCentroids<B, M>(c, in), lookup_(c, row) {}
    MirroredWordCentroids(const CodebookByRow& c, const WholeInputs& in, int64_t lower, int64_t upper)
        : WholeCentroids<B, M>(c, in), lookup_(c, lower, upper) {}

    static void fold_planes(const CodebookByRow&, Codes (&plane)[B]) { fold(plane); }

    void add(const Codes (&code)[PHASES], int64_t b, WholeSums (&total)[M]) const {
        Ints high[M] = {}, low[M] = {};
#pragma GCC unroll 8
        for (int64_t s = 0; s < PHASES; ++s) {
            Codes found[2];
            lookup_(code[s], found);
            for (int64_t k = 0; k < M; ++k) {
                const int8_t* x = this->inputs(k, b, s);
                high[k] = dot_centred(high[k], found[0], x);
                low[k] = dot_centred(low[k], found[1], x);
            }
        }
#pragma GCC unroll 8
        for (int64_t k = 0; k < M; ++k) total[k].add(high[k] * CodebookByRow::WORD + low[k], this->factors(k, b));
    }

    static constexpr int32_t EXCESS = 0;

private:
    MirroredWords<B> lookup_;
};
#endif

// ---- rows ---------------------------------------------------------------------------------------------------------

// What rows' exact sums stand for, and their kept channels, go where outputs say, from token k on. Every entry is
// `excess` steps too large.
template <int M, typename Total>
void finish_rows(const CodebookByRow& c, const WholeInputs& in, int32_t excess,
                 const Total (&total)[CodebookByRow::TOGETHER][M], const Outputs& to, int64_t k, int64_t first,
                 int64_t last) {
    constexpr int64_t TOGETHER = CodebookByRow::TOGETHER;
    const int64_t rows = last - first;
    float values[M][TOGETHER];
#if defined(__AVX512DQ__)
    for (int64_t i = 0; i < rows; i += 8) {
        const __m512d steps = whole_steps(c, first + i, rows - i);
        for (int t = 0; t < M; ++t) {
            __m512i sums[8];
            for (int l = 0; l < 8; ++l) sums[l] = i + l < rows ? total[i + l][t].lanes() : __m512i{};
            const __m512i all = _mm512_sub_epi64(totals_of(sums), _mm512_set1_epi64(excess * in.token[t].sum));
            _mm256_storeu_ps(values[t] + i, whole_values(all, steps, _mm256_set1_ps(in.token[t].unit)));
        }
    }
#elif defined(__AVX2__) && !defined(__AVX512F__)
    for (int64_t i = 0; i < rows; i += 4) {
        const __m256d steps = whole_steps(c, first + i, rows - i);
        for (int t = 0; t < M; ++t) {
            __m256i sums[4];
            for (int l = 0; l < 4; ++l) sums[l] = i + l < rows ? total[i + l][t].lanes() : __m256i{};
            const __m256i all = _mm256_sub_epi64(totals_of(sums), _mm256_set1_epi64x(excess * in.token[t].sum));
            _mm_storeu_ps(values[t] + i, whole_values(all, steps, _mm_set1_ps(in.token[t].unit)));
        }
    }
#else
    for (int64_t i = 0; i < rows; ++i) {
        const double step = whole_step(c, first + i);
        for (int t = 0; t < M; ++t)
            values[t][i] = whole_value(total[i][t].total() - excess * in.token[t].sum, step, in.token[t].unit);
    }
#endif
    for (int64_t i = 0; i < rows && c.kept.channels > 0; i += LANES) {
        const int64_t here = least(LANES, rows - i);
        Floats kept[M] = {};
        sum_kept<M>(c, in.kept, first + i, here, kept);
        for (int t = 0; t < M; ++t)
            if (here == LANES) store(values[t] + i, kept[t] + load(values[t] + i));
            else
                for (int64_t l = 0; l < here; ++l) values[t][i + l] += kept[t][l];
    }
    for (int t = 0; t < M; ++t) {
        const int64_t token = (k + t) * to.stride;
        if (to.rows == nullptr && to.fresh && to.rounded == nullptr) {
            __builtin_memcpy(to.sums + token + first, values[t], static_cast<size_t>(rows) * 4);
            continue;
        }
        for (int64_t i = 0; i < rows; ++i) {
            const int64_t at = token + (to.rows == nullptr ? first + i : to.rows[first + i]);
            const float own = to.fresh ? values[t][i] : to.sums[at] + values[t][i];
            if (to.rounded == nullptr) to.sums[at] = own;
            else to.rounded[at] = to_bf16(own);
        }
    }
}

template <template <int, int> typename By, int B>
void gemv_width(const CodebookByRow& c, const WholeInputs& in, const Outputs& y, int64_t begin, int64_t end) {
    gemv_bits<By, B>(c, in, begin, end,
                     [&](const WholeInputs& from, const auto& total, int64_t k, int64_t first, int64_t last) {
                         finish_rows(c, from, By<B, 1>::EXCESS, total, y, k, first, last);
                     });
}

void gemv_whole(const CodebookByRow& c, const WholeInputs& in, const Outputs& y, int64_t begin, int64_t end) {
    by_width(c.bits, [&](auto bits) {
        constexpr int B = bits.value;
        if constexpr (B > CodebookByRow::MOST_BYTE_BITS) {
#if defined(__AVX2__) && !defined(__AVX512F__)
            if (c.two_bytes && c.mirrored) return gemv_width<MirroredWordCentroids, B>(c, in, y, begin, end);
#endif
            if (c.two_bytes) return gemv_width<WordCentroids, B>(c, in, y, begin, end);
        }
#if defined(__AVX512F__)
        gemv_bytes<B>(c, in, begin, end,
                      [&](const WholeInputs& from, const auto& total, int64_t k, int64_t first, int64_t last) {
                          finish_rows(c, from, CodebookByRow::BYTE_ZERO, total, y, k, first, last);
                      });
#else
        gemv_width<ByteCentroids, B>(c, in, y, begin, end);
#endif
    });
}

void prepare_whole(const CodebookByRow& c, const int8_t* codes, const float* scales, int64_t k, int64_t tokens,
                   int8_t* x, int32_t* factors, WholeInputs::Token& token) {
    token = {find_unit(scales, ceil_div(c.columns, CodebookByRow::INPUT_GROUP)), 0};
    for (int64_t b = 0; b < blocks_of(c); ++b) {
        Codes block[PHASES];
        order_inputs(c, codes, b, block);
        int32_t* own = factors + (b * tokens + k) * LANES;
        token.sum += find_factors(codes, c.columns, scales, token.unit, b * LANES, own);
        if (b == blocks_of(c) - 1 && ends_in_halves(c)) { // both halves have the same
            for (Codes& phase : block)
                __builtin_memcpy(reinterpret_cast<uint8_t*>(&phase) + BYTES / 2, &phase, BYTES / 2);
            __builtin_memcpy(own + LANES / 2, own, LANES / 2 * sizeof *own);
        }
        __builtin_memcpy(x + (b * tokens + k) * sizeof block, block, sizeof block);
    }
}

} // namespace

void add_codebook_by_row_gemv_int8(MatmulOps& ops) {
    WholeOps& own = ops.codebook_by_row.whole;
    own.prepare = prepare_whole;
    own.gemv = gemv_whole;
}

} // namespace anybit::ANYBIT_ISA
