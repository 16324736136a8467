// Format "codebook" by rows: the codes of a row are looked up in its table (codebook_tables.h), of bytes that meet
// activations of 8 bits, of bfloat16 or of floats.
//
// The stored planes are read as they lie; it is the activations that are put in the order of the vectors, once per
// call. With bytes, lane l of a vector meets the 32 weights from 32 l on: the activations of each such group have a
// scale of their own.
#include "matmul/codebook_tables.h"

#include "matmul/gemm.h"
#include "matmul/ops.h"
#include "matmul/transpose.h"
#include "matmul/unroll.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int CHAINS = 4; // sums under way at once: a dot product takes as many cycles or more
#if defined(__AVX512F__)
constexpr int MOST_TOKENS = 4; // in registers at once
#else
constexpr int MOST_TOKENS = 2;
#endif

// Blocks that a token's inputs fill: 32 * LANES codes each.
inline int64_t blocks_of(const CodebookByRow& c) { return ceil_div(4 * c.words, BYTES); }

// sums[i] += the dot product of four centroids with four activations, the centroids less CENTRE.
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

// ---- what centroids are multiplied as: M tokens with the codes of a row, block by block ---------------------------

// Bytes, with activations of 8 bits.
template <int B, int M> class ByBytes {
public:
    using Input = int8_t;
    static constexpr int64_t MOST_BLOCKS = 32; // whose activations stay close while rows take turns

    ByBytes(const CodebookByRow& c, const Inputs<int8_t>& in, int64_t row)
        : table_(c.table + (row << B)), x_(in.x), scales_(in.scales), blocks_(blocks_of(c)) {}

    void add(const Codes (&code)[PHASES], int64_t b, Floats (&total)[M]) const {
        Ints sums[CHAINS][M] = {};
        for (int64_t s = 0; s < PHASES; ++s) {
            const Codes weights = table_(code[s]);
            for (int64_t k = 0; k < M; ++k) {
                const int8_t* x = x_ + ((k * blocks_ + b) * PHASES + s) * BYTES;
                sums[s % CHAINS][k] = dot_centroids(sums[s % CHAINS][k], weights, x);
            }
        }
        for (int64_t k = 0; k < M; ++k) {
            Ints sum = sums[0][k];
            for (int i = 1; i < CHAINS; ++i) sum += sums[i][k];
            total[k] += to_float(sum) * load(scales_ + (k * blocks_ + b) * LANES);
        }
    }

    static float finish(const CodebookByRow& c, const Inputs<int8_t>& in, int64_t row, int64_t k, float sum) {
        return c.scales[row] * (sum - static_cast<float>(CodebookByRow::BYTE_ZERO - CENTRE) * in.weighted[k]);
    }

    static Inputs<int8_t> skip(const CodebookByRow& c, const Inputs<int8_t>& in, int64_t tokens) {
        return {in.x + tokens * in.stride,
                in.tokens - tokens,
                in.stride,
                in.scales + tokens * blocks_of(c) * LANES,
                nullptr,
                in.weighted + tokens};
    }

private:
    Table<B> table_;
    const int8_t* x_;
    const float* scales_;
    int64_t blocks_;
};

// Activations of T in the kernels' order, and nothing to do at the end.
template <typename X> struct Plain {
    using Input = X;
    static constexpr int64_t MOST_BLOCKS = 32 / sizeof(X);

    static float finish(const CodebookByRow& c, const Inputs<X>&, int64_t row, int64_t, float sum) {
        return c.row_scale(row) * sum;
    }

    static Inputs<X> skip(const CodebookByRow&, const Inputs<X>& in, int64_t tokens) {
        return {in.x + tokens * in.stride, in.tokens - tokens, in.stride, nullptr};
    }
};

// Floats, exactly.
template <typename Table, int M> class ByTable : public Plain<float> {
public:
    ByTable(const CodebookByRow& c, const Inputs<float>& in, int64_t row)
        : table_(c.table, c.kind(row)), x_(in.x), blocks_(blocks_of(c)) {}

    void add(const Codes (&code)[PHASES], int64_t b, Floats (&total)[M]) const {
        Floats sums[4][M] = {};
#if !defined(__AVX512F__)
#pragma GCC unroll 8 // so that codes need not be stored
#endif
        for (int64_t s = 0; s < PHASES; ++s) {
            Floats weights[4];
            table_(code[s], weights);
            for (int64_t k = 0; k < M; ++k)
                for (int j = 0; j < 4; ++j)
                    sums[j][k] += weights[j] * load(x_ + ((k * blocks_ + b) * PHASES + s) * BYTES + j * LANES);
        }
        for (int64_t k = 0; k < M; ++k) total[k] += (sums[0][k] + sums[1][k]) + (sums[2][k] + sums[3][k]);
    }

private:
    Table table_;
    const float* x_;
    int64_t blocks_;
};
template <int B, int M> using ByFloats = ByTable<FloatTable<B>, M>;
template <int B, int M> using ByMirroredFloats = ByTable<MirroredFloats<B>, M>;

#ifdef __AVX2__
// Pairs of bfloat16.
template <int B, int M> class ByPairs : public Plain<uint16_t> {
public:
    ByPairs(const CodebookByRow& c, const Inputs<uint16_t>& in, int64_t row)
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

private:
    HalfTable<B> table_;
    const uint16_t* x_;
    int64_t blocks_;
};
#endif

// ---- rows ---------------------------------------------------------------------------------------------------------

// Bytes of a plane from `from` on, of which `left`, a multiple of 4, lie in the row; those behind are 0 and meet
// activations of 0.
inline Codes load_plane(const uint8_t* from, int64_t left) {
    if (left >= BYTES) return load_as<Codes>(from);
#if defined(__AVX512F__)
    return reinterpret_cast<Codes>(_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << left / 4) - 1), from));
#else
    Codes bytes{};
    __builtin_memcpy(&bytes, from, static_cast<size_t>(left));
    return bytes;
#endif
}

inline const uint8_t* plane_bytes(const CodebookByRow& c, int p) {
    return reinterpret_cast<const uint8_t*>(c.planes[p]);
}

// Codes of the upper half of a mirrored table become those of the entries opposite, below their highest bit.
template <int B> inline void fold(const CodebookByRow& c, Codes (&plane)[B]) {
    if constexpr (looks_up_mirrored(B))
        if (c.mirrored)
            for (int p = 0; p < B - 1; ++p) plane[p] ^= plane[B - 1];
}

// Up to CodebookByRow::TOGETHER rows, tile by tile of columns: the activations of a tile stay close, and what the same
// row needs next is fetched meanwhile.
template <template <int, int> typename By, int B, int M>
void gemv_rows(const CodebookByRow& c, const Inputs<typename By<B, M>::Input>& in, float* y, int64_t y_stride,
               int64_t first, int64_t last) {
    const int64_t bytes = 4 * c.words, blocks = blocks_of(c);
    const int64_t tile = ceil_div(blocks, ceil_div(blocks * M, By<B, M>::MOST_BLOCKS)); // as equal as can be
    Floats total[CodebookByRow::TOGETHER][M] = {};
    for (int64_t begin = 0; begin < blocks; begin += tile) {
        const int64_t end = least(blocks, begin + tile);
        const int64_t next = end < blocks ? tile * BYTES : CodebookByRow::TOGETHER * bytes - begin * BYTES;
        for (int64_t row = first; row < last; ++row) {
            const By<B, M> sums(c, in, row);
            Floats own[M];
            for (int k = 0; k < M; ++k) own[k] = total[row - first][k];
            for (int64_t b = begin; b < end; ++b) {
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
            for (int k = 0; k < M; ++k) total[row - first][k] = own[k];
        }
    }
    for (int64_t row = first; row < last; ++row)
        for (int64_t k = 0; k < M; ++k)
            y[k * y_stride + (c.out_rows == nullptr ? row : c.out_rows[row])] +=
                By<B, M>::finish(c, in, row, k, reduce(total[row - first][k]));
}

template <template <int, int> typename By, int B>
void gemv_bits(const CodebookByRow& c, const Inputs<typename By<B, 1>::Input>& in, float* y, int64_t y_stride,
               int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += CodebookByRow::TOGETHER) {
        const int64_t last = least(end, first + CodebookByRow::TOGETHER);
        by_tokens<MOST_TOKENS>(in.tokens, [&](auto m, int64_t k) {
            gemv_rows<By, B, m.value>(c, By<B, 1>::skip(c, in, k), y + k * y_stride, y_stride, first, last);
        });
    }
}

void gemv_int8(const CodebookByRow& c, const Inputs<int8_t>& in, float* y, int64_t y_stride, int64_t begin,
               int64_t end) {
    by_width(c.bits, [&](auto bits) { gemv_bits<ByBytes, bits.value>(c, in, y, y_stride, begin, end); });
}

void gemv_f32(const CodebookByRow& c, const Inputs<float>& in, float* y, int64_t y_stride, int64_t begin, int64_t end) {
    by_width(c.bits, [&](auto bits) {
        constexpr int B = bits.value;
        if constexpr (looks_up_mirrored(B))
            if (c.mirrored) return gemv_bits<ByMirroredFloats, B>(c, in, y, y_stride, begin, end);
        if constexpr (floating(B) != Floating::none) gemv_bits<ByFloats, B>(c, in, y, y_stride, begin, end);
    });
}

#ifdef __AVX2__
void gemv_bf16(const CodebookByRow& c, const Inputs<uint16_t>& in, float* y, int64_t y_stride, int64_t begin,
               int64_t end) {
    by_width(c.bits, [&](auto bits) {
        if constexpr (looks_up_halves(bits.value)) gemv_bits<ByPairs, bits.value>(c, in, y, y_stride, begin, end);
    });
}
#endif

// Columns that many tokens meet: those of whole words, then an even number of kept ones.
inline int64_t gemm_columns(const CodebookByRow& c) { return 32 * c.words + c.kept_columns + c.kept_columns % 2; }

// Weights of a block of columns of LANES rows, whose table is as a Table wants it; whole floats where there is none.
template <int B, typename Table>
void decode_block(const CodebookByRow& c, int64_t block, int64_t column, Floats* panel) {
    const int64_t bytes = 4 * c.words, at = column / PHASES;
    Floats values[LANES][PHASES][4];
    for (int64_t lane = 0; lane < LANES; ++lane) {
        const int64_t row = least(block * LANES + lane, c.rows - 1); // nobody reads lanes behind the last row
        Codes plane[B], code[PHASES];
        for (int p = 0; p < B; ++p) plane[p] = load_plane(plane_bytes(c, B - 1 - p) + row * bytes + at, bytes - at);
        fold<B>(c, plane);
        codes_of<B>(plane, code);
        if constexpr (floating(B) != Floating::none) {
            const Table table(c.table, c.kind(row));
            const float scale = c.row_scale(row);
            for (int64_t s = 0; s < PHASES; ++s) {
                table(code[s], values[lane][s]);
                for (Floats& value : values[lane][s]) value *= scale;
            }
        } else {
            const auto* table = reinterpret_cast<const float*>(c.table) + (c.kind(row) << B);
            const float scale = c.row_scale(row);
            for (int64_t s = 0; s < PHASES; ++s)
                for (int64_t m = 0; m < BYTES; ++m)
                    panel[PHASES * m + s][lane] = scale * table[code[s][m] & ((1 << B) - 1)];
        }
    }
    if constexpr (floating(B) != Floating::none)
        for (int64_t s = 0; s < PHASES; ++s)
            for (int64_t v = 0; v < 4; ++v) {
                Floats rows[LANES];
                for (int64_t lane = 0; lane < LANES; ++lane) rows[lane] = values[lane][s][v];
                transpose(rows);
                for (int64_t l = 0; l < LANES; ++l) panel[PHASES * Table::place(v, l) + s] = rows[l];
            }
}

template <int B> void decode_floats(const CodebookByRow& c, int64_t block, int64_t column, Floats* panel) {
    if constexpr (looks_up_mirrored(B))
        if (c.mirrored) return decode_block<B, MirroredFloats<B>>(c, block, column, panel);
    return decode_block<B, FloatTable<B>>(c, block, column, panel);
}

// What is left of a panel from `column` on when its coded columns are there: put(i, columns, n) for the kept ones that
// are columns i to i + n of it. Returns how many columns there are.
template <typename F> int64_t decode_kept(const CodebookByRow& c, int64_t block, int64_t column, F&& put) {
    constexpr int64_t SOME = 2 * LANES;
    const int64_t n = least(PANEL, gemm_columns(c) - column), coded = 32 * c.words, row = block * LANES;
    for (int64_t i = coded > column ? coded - column : 0; i < n; i += SOME) {
        const int64_t j = column + i - coded;
        Floats some[SOME] = {};
        decode_halves<load_halves>(c.kept + row * c.kept_columns + j, c.kept_columns, least(LANES, c.rows - row),
                                   least(SOME, c.kept_columns - j), some);
        put(i, some, least(SOME, n - i));
    }
    return n;
}

int64_t decode_panel(const CodebookByRow& c, int64_t block, int64_t column, Floats* panel) {
    if (column < 32 * c.words) by_width(c.bits, [&](auto bits) { decode_floats<bits.value>(c, block, column, panel); });
    return decode_kept(c, block, column, [&](int64_t i, const Floats* columns, int64_t n) {
        for (int64_t j = 0; j < n; ++j) panel[i + j] = columns[j];
    });
}

#ifdef __AVX512BF16__
// A row's table in bfloat16: as it is stored, or floats times the row's scale.
template <int B> HalfTable<B> half_table(const CodebookByRow& c, int64_t row) {
    if (c.halves) return HalfTable<B>(c.table, c.kind(row));
    constexpr int64_t ENTRIES = 1 << B;
    const auto* from = reinterpret_cast<const float*>(c.table) + c.kind(row) * ENTRIES;
    const auto scale = reinterpret_cast<__m512>(broadcast(c.row_scale(row)));
    uint8_t made[B < 5 ? 64 : 2 * ENTRIES];
    for (int64_t e = 0; e < ENTRIES; e += 2 * LANES) {
        constexpr auto MASK = static_cast<__mmask16>((1 << (B < 4 ? ENTRIES : LANES)) - 1);
        const __m512 low = _mm512_maskz_loadu_ps(MASK, from + e);
        const __m512 high = B < 5 ? _mm512_setzero_ps() : _mm512_loadu_ps(from + e + (B < 5 ? 0 : LANES));
        const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high * scale, low * scale));
        if constexpr (B <= MOST_WHOLE_HALVES) __builtin_memcpy(made + 2 * e, &both, sizeof both);
        else {
            const __m256i bytes[] = {_mm512_cvtepi16_epi8(both), _mm512_cvtepi16_epi8(_mm512_srli_epi16(both, 8))};
            for (int i = 0; i < 2; ++i) __builtin_memcpy(made + i * ENTRIES + e, bytes + i, sizeof bytes[i]);
        }
    }
    return HalfTable<B>(made, 0);
}

// The same as `decode_block`, two columns to a vector.
template <int B> void decode_half_block(const CodebookByRow& c, int64_t block, int64_t column, Floats* panel) {
    typedef uint32_t Words __attribute__((vector_size(BYTES)));
    const int64_t bytes = 4 * c.words, at = column / PHASES;
    Floats values[PHASES / 2][2][2][LANES]; // pairs of phases, vectors of halves, whether even lanes of it or odd
    for (int64_t lane = 0; lane < LANES; ++lane) {
        const int64_t row = least(block * LANES + lane, c.rows - 1); // nobody reads lanes behind the last row
        Codes plane[B], code[PHASES];
        for (int p = 0; p < B; ++p) {
            const uint8_t* from = plane_bytes(c, B - 1 - p) + row * bytes + at;
            __builtin_prefetch(from + BYTES); // what the same row needs next
            plane[p] = load_plane(from, bytes - at);
        }
        codes_of<B>(plane, code);
        const HalfTable<B> table = half_table<B>(c, row);
        for (int64_t s = 0; s < PHASES; s += 2) {
            Codes first[2], second[2];
            table(code[s], first);
            table(code[s + 1], second);
            for (int64_t v = 0; v < 2; ++v) {
                const auto a = reinterpret_cast<Words>(first[v]), b = reinterpret_cast<Words>(second[v]);
                values[s / 2][v][0][lane] = reinterpret_cast<Floats>((a & 0xffff) | b << 16);
                values[s / 2][v][1][lane] = reinterpret_cast<Floats>(a >> 16 | (b & 0xffff0000));
            }
        }
    }
    for (int64_t s = 0; s < PHASES / 2; ++s)
        for (int64_t v = 0; v < 2; ++v)
            for (int64_t odd = 0; odd < 2; ++odd) {
                Floats(&rows)[LANES] = values[s][v][odd];
                transpose(rows);
                for (int64_t l = 0; l < LANES; ++l)
                    panel[PHASES / 2 * HalfTable<B>::place(v, 2 * l + odd) + s] = rows[l];
            }
}

int64_t decode_half_panel(const CodebookByRow& c, int64_t block, int64_t column, Floats* panel) {
    if (column < 32 * c.words)
        by_width(c.bits, [&](auto bits) { decode_half_block<bits.value>(c, block, column, panel); });
    return decode_kept(c, block, column, [&](int64_t i, const Floats* columns, int64_t n) {
        prepare_panel(panel + i / 2, columns, n, static_cast<const uint16_t*>(nullptr));
    });
}
#endif

// A token's activations as the vectors of T meet them: `place` says which byte of the codes a lane of a vector has.
template <typename T>
void arrange(const CodebookByRow& c, const T* x, int64_t (*place)(int64_t, int64_t), int64_t lanes, T* out) {
    int64_t at[BYTES];
    for (int64_t i = 0; i < BYTES; ++i) at[i] = PHASES * place(i / lanes, i % lanes);
    for (int64_t b = 0; b < blocks_of(c); ++b)
        for (int64_t s = 0; s < PHASES; ++s)
            for (int64_t i = 0; i < BYTES; ++i) {
                const int64_t j = b * PHASES * BYTES + at[i] + s;
                *out++ = j < c.columns ? x[j] : T(0);
            }
}

int64_t columns(const CodebookByRow& c) { return blocks_of(c) * PHASES * BYTES; }

void prepare_int8(const CodebookByRow& c, const int8_t* x, const float* scales,
                  const Products<CodebookByRow, int8_t>::Prepared& to) {
    const int64_t blocks = blocks_of(c);
    int8_t* codes = to.x;
    for (int64_t b = 0; b < blocks; ++b)
        for (int64_t s = 0; s < PHASES; ++s)
            for (int64_t m = 0; m < BYTES; ++m) {
                const int64_t j = PHASES * (b * BYTES + m) + s;
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

void gemm_f32(const CodebookByRow& c, const Inputs<float>& in, const Outputs& y, int64_t begin, int64_t end) {
    gemm(c, decode_panel, gemm_columns(c), in, y, begin, end);
}

#ifdef __AVX512BF16__
void gemm_bf16(const CodebookByRow& c, const Inputs<uint16_t>& in, const Outputs& y, int64_t begin, int64_t end) {
    gemm<true>(c, decode_half_panel, gemm_columns(c), in, y, begin, end);
}
#endif

} // namespace

void add_codebook_by_row(MatmulOps& ops) {
    CodebookByRowOps& own = ops.codebook_by_row;
    own.columns = columns;
    own.f32_form = f32_form;
    own.f32 = {prepare_f32, gemv_f32, gemm_f32};
#ifdef __AVX2__
    own.bf16_form = bf16_form;
    own.bf16 = {prepare_bf16, gemv_bf16, nullptr};
#endif
#ifdef __AVX512BF16__
    own.bf16.gemm = gemm_bf16;
#endif
    own.int8 = {prepare_int8, gemv_int8, nullptr};
}

} // namespace anybit::ANYBIT_ISA
