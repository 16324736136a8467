// Format "codebook" by rows times few tokens: gemv of 8-bit inputs (tables are of bytes), of bfloat16 and of floats.
//
// It is the inputs that are put in the order of the vectors, once per call. With bytes, lane l of a vector meets the 32
// weights from 32 l on: the inputs of each such group have a factor of their own.
#include "matmul/codebook_by_row_whole.h"
#include "matmul/ops.h"
#include "matmul/transpose.h"
#include "matmul/unroll.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int CHAINS = 4; // sums under way at once: a dot product takes as many cycles or more
#if defined(__AVX512F__)
constexpr int MOST_TOKENS = 4;  // in registers at once
constexpr int MOST_ROUNDED = 8; // the same, where inputs are rounded
#else
constexpr int MOST_TOKENS = 2;
constexpr int MOST_ROUNDED = 2;
#endif

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
    const int64_t n = c.kept_columns;
    for (int64_t j = 0; j < n; j += LANES) {
        const int64_t left = least(LANES, n - j);
        const Floats weights = load_halves(PartialHalves(c.kept + row * n + j, left).halves);
        for (int64_t k = 0; k < M; ++k) total[k] += weights * load_first(x + k * n + j, left);
    }
}

// Outputs of some tokens: sums that are added to.
struct Sums {
    float* y;
    int64_t stride;
};

// ---- what centroids are multiplied as: M tokens with the codes of a row, block by block ---------------------------

// Bytes, with inputs of 8 bits: sums are exact.
template <int B, int M> class WholeCentroids {
public:
    using Given = WholeInputs;
    using To = Outputs;
    static constexpr bool THREE = true; // tokens at once
    using Total = WholeSums;
    static constexpr int MOST = MOST_ROUNDED;
    static constexpr int64_t MOST_BLOCKS = 32; // whose inputs stay close while rows take turns

    static void fold_planes(const CodebookByRow&, Codes (&)[B]) {}
    static WholeInputs skip(const CodebookByRow& c, const WholeInputs& in, int64_t tokens) {
        return {in.x + tokens * in.stride,
                in.tokens - tokens,
                in.stride,
                in.factors + tokens * (in.stride / CodebookByRow::INPUT_GROUP),
                in.token + tokens,
                in.kept + tokens * c.kept_columns};
    }

protected:
    WholeCentroids(const CodebookByRow& c, const WholeInputs& in)
        : x_(in.x), factors_(in.factors), blocks_(blocks_of(c)) {}

    const int8_t* inputs(int64_t k, int64_t b, int64_t s) const {
        return x_ + ((k * blocks_ + b) * PHASES + s) * BYTES;
    }
    const int8_t* tail_inputs(int64_t k, int64_t t) const { return inputs(k + 1, 0, t) - PHASES * BYTES; }
    Ints factors(int64_t k, int64_t b) const { return load_as<Ints>(factors_ + (k * blocks_ + b) * LANES); }
    Ints factors_of_tail(int64_t k, int64_t t) const {
        return tail_factors(factors_ + ((k + 1) * blocks_ - 1) * LANES, t);
    }

private:
    const int8_t* x_;
    const int32_t* factors_;
    int64_t blocks_;
};

// Entries of a byte.
template <int B, int M> class ByteCentroids : public WholeCentroids<B, M> {
public:
    ByteCentroids(const CodebookByRow& c, const WholeInputs& in, int64_t row)
        : WholeCentroids<B, M>(c, in), table_(c.table + (c.kind(row) << B), CENTRE) {}

    void add(const Codes (&code)[PHASES], int64_t b, WholeSums (&total)[M]) const {
        constexpr int OWN = M > 4 ? 1 : 2; // chains of sums
        Ints sums[OWN][M] = {};
#pragma GCC unroll 8 // so that codes and sums stay in registers
        for (int64_t s = 0; s < PHASES; ++s) {
            const Codes weights = table_(code[s]);
#pragma GCC unroll 8
            for (int64_t k = 0; k < M; ++k)
                sums[s % OWN][k] = dot_centroids(sums[s % OWN][k], weights, this->inputs(k, b, s));
        }
        for (int64_t k = 0; k < M; ++k) {
            Ints sum = sums[0][k];
            for (int i = 1; i < OWN; ++i) sum += sums[i][k];
            total[k].add(sum, this->factors(k, b));
        }
    }

    void add_tail(Codes code, int64_t t, WholeSums (&total)[M]) const {
        const Codes weights = table_(code);
        for (int64_t k = 0; k < M; ++k)
            total[k].add(dot_centroids(Ints{}, weights, this->tail_inputs(k, t)), this->factors_of_tail(k, t));
    }

    static constexpr int32_t EXCESS = CodebookByRow::BYTE_ZERO - CENTRE; // of every entry, in steps

private:
    Table<B> table_;
};

// Entries of two bytes: a sum of each.
template <int B, int M> class WordCentroids : public WholeCentroids<B, M> {
public:
    static constexpr int MOST = MOST_TOKENS;

    WordCentroids(const CodebookByRow& c, const WholeInputs& in, int64_t row)
        : WholeCentroids<B, M>(c, in), high_(c.table + (2 * c.kind(row) << B), CENTRE),
          low_(c.table + ((2 * c.kind(row) + 1) << B), CENTRE) {}

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
        for (int64_t k = 0; k < M; ++k) // below 2^29: a lane has 32 products of at most 2^15
            total[k].add((high[0][k] + high[1][k]) * CodebookByRow::WORD + (low[0][k] + low[1][k]),
                         this->factors(k, b));
    }

    void add_tail(Codes code, int64_t t, WholeSums (&total)[M]) const {
        const Codes above = high_(code), below = low_(code);
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
    static constexpr int MOST = MOST_TOKENS;

    MirroredWordCentroids(const CodebookByRow& c, const WholeInputs& in, int64_t row)
        : WholeCentroids<B, M>(c, in), lookup_(c, row) {}

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
        for (int64_t k = 0; k < M; ++k) total[k].add(high[k] * CodebookByRow::WORD + low[k], this->factors(k, b));
    }

    static constexpr int32_t EXCESS = 0;

private:
    MirroredWords<B> lookup_;
};
#endif

// Activations of T in the kernels' order.
template <typename X> struct Plain {
    using Given = Inputs<X>;
    using To = Sums;
    static constexpr bool THREE = false;
    using Total = Floats;
    static constexpr int MOST = MOST_TOKENS;
    static constexpr int64_t MOST_BLOCKS = 32 / sizeof(X);

    template <int B> static void fold_planes(const CodebookByRow& c, Codes (&plane)[B]) { fold_floats(c, plane); }

    static Inputs<X> skip(const CodebookByRow& c, const Inputs<X>& in, int64_t tokens) {
        return {in.x + tokens * in.stride, in.tokens - tokens, in.stride, nullptr, in.kept + tokens * c.kept_columns};
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

// Outputs += rows' sums of floats and their kept channels.
template <typename By, int M, typename X>
void finish_rows(const CodebookByRow& c, const Inputs<X>& in, const Floats (&total)[CodebookByRow::TOGETHER][M],
                 const Sums& to, int64_t k, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        Floats own[M];
        for (int i = 0; i < M; ++i) own[i] = total[row - first][i] * c.row_scale(row);
        add_kept<M>(c, in.kept, row, own);
        for (int i = 0; i < M; ++i)
            to.y[(k + i) * to.stride + (c.out_rows == nullptr ? row : c.out_rows[row])] += reduce(own[i]);
    }
}

// What rows' exact sums stand for, and their kept channels, go where outputs say.
template <typename By, int M>
void finish_rows(const CodebookByRow& c, const WholeInputs& in, const WholeSums (&total)[CodebookByRow::TOGETHER][M],
                 const Outputs& to, int64_t k, int64_t first, int64_t last) {
    constexpr int64_t TOGETHER = CodebookByRow::TOGETHER;
    const int64_t rows = last - first;
    float values[M][TOGETHER];
    for (int t = 0; t < M; ++t) {
        const WholeInputs::Token& token = in.token[t];
        const int64_t excess = By::EXCESS * token.sum;
#if defined(__AVX512DQ__)
        for (int64_t i = 0; i < rows; i += 8) {
            __m512i sums[8];
            for (int l = 0; l < 8; ++l) sums[l] = total[i + l][t].lanes();
            const __m512i all = _mm512_sub_epi64(totals_of(sums), _mm512_set1_epi64(excess));
            _mm256_storeu_ps(values[t] + i,
                             whole_values(all, whole_steps(c, first + i, rows - i), _mm256_set1_ps(token.unit)));
        }
#else
        for (int64_t i = 0; i < rows; ++i)
            values[t][i] = whole_value(total[i][t].total() - excess, whole_step(c, first + i), token.unit);
#endif
    }
    for (int64_t i = 0; i < rows && c.kept_columns > 0; i += LANES) {
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

// Up to CodebookByRow::TOGETHER rows, tile by tile of columns: the inputs of a tile stay close, and what the same
// row needs next is fetched meanwhile.
template <template <int, int> typename By, int B, int M>
void gemv_rows(const CodebookByRow& c, const typename By<B, M>::Given& in, const typename By<B, M>::To& to, int64_t k,
               int64_t first, int64_t last) {
    using Total = typename By<B, M>::Total;
    const int64_t bytes = 4 * c.words, blocks = blocks_of(c), tails = tails_of(c), whole = blocks - (tails > 0);
    const int64_t tile = ceil_div(blocks, ceil_div(blocks * M, By<B, M>::MOST_BLOCKS)); // as equal as can be
    Total total[CodebookByRow::TOGETHER][M]; // begun by the first tile, of which there always is one
    for (int64_t begin = 0; begin < blocks; begin += tile) {
        const int64_t end = least(blocks, begin + tile);
        const int64_t next = end < blocks ? tile * BYTES : CodebookByRow::TOGETHER * bytes - begin * BYTES;
        for (int64_t row = first; row < last; ++row) {
            const By<B, M> sums(c, in, row);
            const RowPlanes<B> planes(c, row);
            Total own[M] = {};
            for (int k = 0; k < M && begin > 0; ++k) own[k] = total[row - first][k];
            for (int64_t b = begin; b < least(end, whole); ++b) {
                Codes plane[B], code[PHASES];
                planes.fetch(b * BYTES + next);
                planes.load(b * BYTES, present(bytes - b * BYTES), plane);
                By<B, M>::fold_planes(c, plane);
                codes_of<B>(plane, code);
                sums.add(code, b, own);
            }
            if constexpr (MOST_TAILS > 0)
                for (int64_t t = 0; t < (end == blocks ? tails : 0); ++t)
                    sums.add_tail(tail_codes<B>(c, row, whole * BYTES + t * TAIL_BYTES), t, own);
            for (int k = 0; k < M; ++k) total[row - first][k] = own[k];
        }
    }
    finish_rows<By<B, M>>(c, in, total, to, k, first, last);
}

template <template <int, int> typename By, int B>
void gemv_bits(const CodebookByRow& c, const typename By<B, 1>::Given& in, const typename By<B, 1>::To& to,
               int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += CodebookByRow::TOGETHER) {
        const int64_t last = least(end, first + CodebookByRow::TOGETHER);
        by_tokens<By<B, 1>::MOST, By<B, 1>::THREE>(in.tokens, [&](auto m, int64_t k) {
            gemv_rows<By, B, m.value>(c, By<B, 1>::skip(c, in, k), to, k, first, last);
        });
    }
}

void gemv_whole(const CodebookByRow& c, const WholeInputs& in, const Outputs& y, int64_t begin, int64_t end) {
    by_width(c.bits, [&](auto bits) {
        constexpr int B = bits.value;
        if constexpr (B > CodebookByRow::MOST_BYTE_BITS) {
#if defined(__AVX2__) && !defined(__AVX512F__)
            if (c.two_bytes && c.mirrored) return gemv_bits<MirroredWordCentroids, B>(c, in, y, begin, end);
#endif
            if (c.two_bytes) return gemv_bits<WordCentroids, B>(c, in, y, begin, end);
        }
        gemv_bits<ByteCentroids, B>(c, in, y, begin, end);
    });
}

void gemv_f32(const CodebookByRow& c, const Inputs<float>& in, float* y, int64_t y_stride, int64_t begin, int64_t end) {
    const Sums to{y, y_stride};
    by_width(c.bits, [&](auto bits) {
        constexpr int B = bits.value;
        if constexpr (looks_up_mirrored(B))
            if (c.mirrored) return gemv_bits<MirroredCentroids, B>(c, in, to, begin, end);
        if constexpr (floating(B) != Floating::none) gemv_bits<FloatCentroids, B>(c, in, to, begin, end);
    });
}

#ifdef __AVX2__
void gemv_bf16(const CodebookByRow& c, const Inputs<uint16_t>& in, float* y, int64_t y_stride, int64_t begin,
               int64_t end) {
    const Sums to{y, y_stride};
    by_width(c.bits, [&](auto bits) {
        if constexpr (looks_up_halves(bits.value)) gemv_bits<PairedCentroids, bits.value>(c, in, to, begin, end);
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

void prepare_whole(const CodebookByRow& c, const int8_t* codes, const float* scales, int8_t* x, int32_t* factors,
                   WholeInputs::Token& token) {
    const int64_t blocks = blocks_of(c), groups = ceil_div(c.columns, CodebookByRow::INPUT_GROUP);
    for (int64_t b = 0; b < blocks; ++b, x += PHASES * BYTES) {
        Codes block[PHASES];
        order_inputs(c, codes, b, block);
        __builtin_memcpy(x, block, sizeof block);
    }
    token = find_factors(codes, c.columns, scales, factors);
    for (int64_t l = groups; l < blocks * LANES; ++l) factors[l] = 0;
}

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
    own.whole.prepare = prepare_whole;
    own.whole.gemv = gemv_whole;
}

} // namespace anybit::ANYBIT_ISA
