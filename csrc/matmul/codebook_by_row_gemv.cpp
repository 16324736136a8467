// Format "codebook" by rows times few tokens: gemv of 8-bit inputs (tables are of bytes), of bfloat16 and of floats.
//
// It is the inputs that are put in the order of the vectors, once per call. With bytes, lane l of a vector meets the 32
// weights from 32 l on: the inputs of each such group have a scale of their own.
#include "matmul/codebook_by_row.h"
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

// sums[i] += the dot product of four centroids with four inputs, the centroids less CENTRE.
#if defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512F__)
constexpr int32_t CENTRE = CodebookByRow::BYTE_ZERO; // centred, they fit pairs of 16 bits that are signed

inline Ints dot_centroids(Ints sums, Codes centroids, const int8_t* x) {
    const __m256i from = load_as<__m256i>(x),
                  centred = reinterpret_cast<__m256i>(centroids ^ fill(CodebookByRow::BYTE_ZERO));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(from), _mm256_sign_epi8(centred, from));
    return sums + reinterpret_cast<Ints>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
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

// The scales of the inputs that the lanes of a tail's sums meet: two groups of 32, of those of the last block.
inline Floats tail_scales(const float* scales, int64_t t) {
#if defined(__AVX512BW__)
    const auto second = static_cast<__mmask16>(0xff00);
    return _mm512_mask_mov_ps(_mm512_set1_ps(scales[2 * t]), second, _mm512_set1_ps(scales[2 * t + 1]));
#else
    (void)scales, (void)t;
    return Floats{};
#endif
}

// ---- what centroids are multiplied as: M tokens with the codes of a row, block by block ---------------------------

// Bytes, with inputs of 8 bits. A sum, less its excess, is in steps of the row's.
template <int B, int M> class ByteCentroids {
public:
    using Input = int8_t;
    static constexpr int64_t MOST_BLOCKS = 32; // whose inputs stay close while rows take turns

    ByteCentroids(const CodebookByRow& c, const Inputs<int8_t>& in, int64_t row)
        : table_(c.table + (c.kind(row) << B)), x_(in.x), scales_(in.scales), blocks_(blocks_of(c)) {}

    void add(const Codes (&code)[PHASES], int64_t b, Floats (&total)[M]) const {
        constexpr int OWN = M > 4 ? 2 : CHAINS; // integers: the sum is the same
        Ints sums[OWN][M] = {};
#pragma GCC unroll 8 // so that codes and sums stay in registers
        for (int64_t s = 0; s < PHASES; ++s) {
            const Codes weights = table_(code[s]);
#pragma GCC unroll 8
            for (int64_t k = 0; k < M; ++k) {
                const int8_t* x = x_ + ((k * blocks_ + b) * PHASES + s) * BYTES;
                sums[s % OWN][k] = dot_centroids(sums[s % OWN][k], weights, x);
            }
        }
        for (int64_t k = 0; k < M; ++k) {
            Ints sum = sums[0][k];
            for (int i = 1; i < OWN; ++i) sum += sums[i][k];
            total[k] += to_float(sum) * load(scales_ + (k * blocks_ + b) * LANES);
        }
    }

    void add_tail(Codes code, int64_t t, Floats (&total)[M]) const {
        const Codes weights = table_(code);
        for (int64_t k = 0; k < M; ++k) {
            const Ints sum = dot_centroids(Ints{}, weights, x_ + ((k + 1) * blocks_ - 1) * PHASES * BYTES + t * BYTES);
            total[k] += to_float(sum) * tail_scales(scales_ + ((k + 1) * blocks_ - 1) * LANES, t);
        }
    }

    static float step(const CodebookByRow& c, int64_t row) { return c.scales[c.kind(row)] * c.row_scale(row); }
    static float excess(const Inputs<int8_t>& in, int64_t k) {
        return static_cast<float>(CodebookByRow::BYTE_ZERO - CENTRE) * in.weighted[k];
    }

    static Inputs<int8_t> skip(const CodebookByRow& c, const Inputs<int8_t>& in, int64_t tokens) {
        return {in.x + tokens * in.stride,
                in.tokens - tokens,
                in.stride,
                in.scales + tokens * blocks_of(c) * LANES,
                nullptr,
                in.weighted + tokens,
                in.kept + tokens * c.kept_columns};
    }

private:
    Table<B> table_;
    const int8_t* x_;
    const float* scales_;
    int64_t blocks_;
};

// Entries of two bytes, with inputs of 8 bits: a sum of each byte.
template <int B, int M> class WordCentroids {
public:
    using Input = int8_t;
    static constexpr int64_t MOST_BLOCKS = ByteCentroids<B, M>::MOST_BLOCKS;

    WordCentroids(const CodebookByRow& c, const Inputs<int8_t>& in, int64_t row)
        : high_(c.table + (2 * c.kind(row) << B)), low_(c.table + ((2 * c.kind(row) + 1) << B)), x_(in.x),
          scales_(in.scales), blocks_(blocks_of(c)) {}

    void add(const Codes (&code)[PHASES], int64_t b, Floats (&total)[M]) const {
        Ints high[2][M] = {}, low[2][M] = {};
#pragma GCC unroll 8
        for (int64_t s = 0; s < PHASES; ++s) {
            const Codes above = high_(code[s]), below = low_(code[s]);
#pragma GCC unroll 8
            for (int64_t k = 0; k < M; ++k) {
                const int8_t* x = x_ + ((k * blocks_ + b) * PHASES + s) * BYTES;
                high[s % 2][k] = dot_centroids(high[s % 2][k], above, x);
                low[s % 2][k] = dot_centroids(low[s % 2][k], below, x);
            }
        }
        for (int64_t k = 0; k < M; ++k) { // below 2^29: a lane has 32 products of at most 2^15
            const Ints sum = (high[0][k] + high[1][k]) * CodebookByRow::WORD + (low[0][k] + low[1][k]);
            total[k] += to_float(sum) * load(scales_ + (k * blocks_ + b) * LANES);
        }
    }

    void add_tail(Codes code, int64_t t, Floats (&total)[M]) const {
        const Codes above = high_(code), below = low_(code);
        for (int64_t k = 0; k < M; ++k) {
            const int8_t* x = x_ + ((k + 1) * blocks_ - 1) * PHASES * BYTES + t * BYTES;
            const Ints sum = dot_centroids(Ints{}, above, x) * CodebookByRow::WORD + dot_centroids(Ints{}, below, x);
            total[k] += to_float(sum) * tail_scales(scales_ + ((k + 1) * blocks_ - 1) * LANES, t);
        }
    }

    static float step(const CodebookByRow& c, int64_t row) { return ByteCentroids<B, 1>::step(c, row); }
    static float excess(const Inputs<int8_t>& in, int64_t k) { return static_cast<float>(CENTRES) * in.weighted[k]; }

    static Inputs<int8_t> skip(const CodebookByRow& c, const Inputs<int8_t>& in, int64_t tokens) {
        return ByteCentroids<B, 1>::skip(c, in, tokens);
    }

private:
    static constexpr int32_t CENTRES = (CodebookByRow::WORD + 1) * (CodebookByRow::BYTE_ZERO - CENTRE);

    Table<B> high_, low_;
    const int8_t* x_;
    const float* scales_;
    int64_t blocks_;
};

// Activations of T in the kernels' order.
template <typename X> struct Plain {
    using Input = X;
    static constexpr int64_t MOST_BLOCKS = 32 / sizeof(X);

    static float step(const CodebookByRow& c, int64_t row) { return c.row_scale(row); }
    static float excess(const Inputs<X>&, int64_t) { return 0; }

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

// The kept channels of a row times M tokens.
template <int M> void add_kept(const CodebookByRow& c, const float* x, int64_t row, Floats (&total)[M]) {
    const int64_t n = c.kept_columns;
    for (int64_t j = 0; j < n; j += LANES) {
        const int64_t left = least(LANES, n - j);
        const Floats weights = load_halves(PartialHalves(c.kept + row * n + j, left).halves);
        for (int64_t k = 0; k < M; ++k) total[k] += weights * load_first(x + k * n + j, left);
    }
}

// Up to CodebookByRow::TOGETHER rows, tile by tile of columns: the inputs of a tile stay close, and what the same
// row needs next is fetched meanwhile.
template <template <int, int> typename By, int B, int M>
void gemv_rows(const CodebookByRow& c, const Inputs<typename By<B, M>::Input>& in, float* y, int64_t y_stride,
               int64_t first, int64_t last) {
    const int64_t bytes = 4 * c.words, blocks = blocks_of(c), tails = tails_of(c), whole = blocks - (tails > 0);
    const int64_t tile = ceil_div(blocks, ceil_div(blocks * M, By<B, M>::MOST_BLOCKS)); // as equal as can be
    Floats total[CodebookByRow::TOGETHER][M] = {};
    for (int64_t begin = 0; begin < blocks; begin += tile) {
        const int64_t end = least(blocks, begin + tile);
        const int64_t next = end < blocks ? tile * BYTES : CodebookByRow::TOGETHER * bytes - begin * BYTES;
        for (int64_t row = first; row < last; ++row) {
            const By<B, M> sums(c, in, row);
            Floats own[M];
            for (int k = 0; k < M; ++k) own[k] = total[row - first][k];
            for (int64_t b = begin; b < least(end, whole); ++b) {
                Codes plane[B], code[PHASES];
                for (int p = 0; p < B; ++p) {
                    const uint8_t* from = plane_bytes(c, B - 1 - p) + row * bytes + b * BYTES;
                    __builtin_prefetch(from + next);
                    plane[p] = load_plane(from, bytes - b * BYTES);
                }
                fold<B>(c, plane);
                codes_of<B>(plane, code);
                sums.add(code, b, own);
            }
            if constexpr (MOST_TAILS > 0)
                for (int64_t t = 0; t < (end == blocks ? tails : 0); ++t)
                    sums.add_tail(tail_codes<B>(c, row, whole * BYTES + t * TAIL_BYTES), t, own);
            for (int k = 0; k < M; ++k) total[row - first][k] = own[k];
        }
    }
    for (int64_t row = first; row < last; ++row) {
        const float step = By<B, M>::step(c, row);
        Floats(&own)[M] = total[row - first];
        for (int k = 0; k < M; ++k) own[k] *= step;
        add_kept<M>(c, in.kept, row, own);
        for (int64_t k = 0; k < M; ++k)
            y[k * y_stride + (c.out_rows == nullptr ? row : c.out_rows[row])] +=
                reduce(own[k]) - step * By<B, M>::excess(in, k);
    }
}

template <template <int, int> typename By, int B>
void gemv_bits(const CodebookByRow& c, const Inputs<typename By<B, 1>::Input>& in, float* y, int64_t y_stride,
               int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += CodebookByRow::TOGETHER) {
        const int64_t last = least(end, first + CodebookByRow::TOGETHER);
        constexpr int MOST =
            sizeof(typename By<B, 1>::Input) == 1 && B <= CodebookByRow::MOST_BYTE_BITS ? MOST_ROUNDED : MOST_TOKENS;
        by_tokens<MOST>(in.tokens, [&](auto m, int64_t k) {
            gemv_rows<By, B, m.value>(c, By<B, 1>::skip(c, in, k), y + k * y_stride, y_stride, first, last);
        });
    }
}

void gemv_int8(const CodebookByRow& c, const Inputs<int8_t>& in, float* y, int64_t y_stride, int64_t begin,
               int64_t end) {
    by_width(c.bits, [&](auto bits) {
        constexpr int B = bits.value;
        if constexpr (B > CodebookByRow::MOST_BYTE_BITS)
            if (c.two_bytes) return gemv_bits<WordCentroids, B>(c, in, y, y_stride, begin, end);
        gemv_bits<ByteCentroids, B>(c, in, y, y_stride, begin, end);
    });
}

void gemv_f32(const CodebookByRow& c, const Inputs<float>& in, float* y, int64_t y_stride, int64_t begin, int64_t end) {
    by_width(c.bits, [&](auto bits) {
        constexpr int B = bits.value;
        if constexpr (looks_up_mirrored(B))
            if (c.mirrored) return gemv_bits<MirroredCentroids, B>(c, in, y, y_stride, begin, end);
        if constexpr (floating(B) != Floating::none) gemv_bits<FloatCentroids, B>(c, in, y, y_stride, begin, end);
    });
}

#ifdef __AVX2__
void gemv_bf16(const CodebookByRow& c, const Inputs<uint16_t>& in, float* y, int64_t y_stride, int64_t begin,
               int64_t end) {
    by_width(c.bits, [&](auto bits) {
        if constexpr (looks_up_halves(bits.value))
            gemv_bits<PairedCentroids, bits.value>(c, in, y, y_stride, begin, end);
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

void prepare_int8(const CodebookByRow& c, const int8_t* x, const float* scales,
                  const InputOps<CodebookByRow, int8_t>::Prepared& to) {
    const int64_t blocks = blocks_of(c), whole = blocks - (tails_of(c) > 0);
    int8_t* codes = to.x;
    for (int64_t b = 0; b < blocks; ++b)
        for (int64_t s = 0; s < PHASES; ++s)
            for (int64_t m = 0; m < BYTES; ++m) {
                const int64_t j = b * PHASES * BYTES + (b < whole ? PHASES * m + s : m + s * BYTES);
                *codes++ = j < c.columns ? x[j] : int8_t(0);
            }
    float weighted = 0;
    for (int64_t l = 0; l < blocks * LANES; ++l) {
        const int64_t begin = l * CodebookByRow::INPUT_GROUP,
                      end = least(c.columns, begin + CodebookByRow::INPUT_GROUP);
        int32_t own = 0;
        for (int64_t j = begin; j < end; ++j) own += x[j];
        to.scales[l] = begin < c.columns ? scales[l] : 0.0f;
        weighted += to.scales[l] * static_cast<float>(own);
    }
    *to.weighted = weighted;
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
    own.int8.prepare = prepare_int8;
    own.int8.gemv = gemv_int8;
}

} // namespace anybit::ANYBIT_ISA
