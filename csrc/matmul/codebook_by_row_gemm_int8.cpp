// Format "codebook" by rows times many tokens of 8 bits, by AVX2's products of 16 bits. Sums are exact, so the bits are
// those of gemv. AMX has a way of its own (codebook_by_row_tiles.cpp), as has AVX-512 with VNNI
// (codebook_by_row_lanes.cpp).
//
// An input is its group's factor times its code: a number of 16 bits. Centroids are decoded to as many, a chunk of
// columns of some rows at a time, and meet all tokens; those of two bytes byte by byte.
#if !defined(__AVX2__) || defined(__AVX512F__)
#error "for AVX2 and AVX-VNNI only: CMakeLists.txt"
#endif
#include "common/thread_memory.h"
#include "matmul/codebook_by_row_whole.h"
#include "matmul/ops.h"
#include "matmul/outputs.h"
#include "matmul/unroll.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int64_t ROWS = GEMM_BLOCKS * LANES; // that are decoded at a time
constexpr int64_t BLOCK = PHASES * BYTES;     // columns
constexpr int64_t CHUNK = 2 * BLOCK;          // columns that are decoded at a time: 16 KB of numbers of 16 bits, which
                                              // the first cache holds, and sums of so many products fit 32 bits
constexpr int64_t QUAD = 4;                   // rows whose sums are in registers
constexpr int PAIR = 2;                       // tokens
constexpr int64_t LEAST_TOKENS = 3;           // of fewer, gemv takes less time
constexpr int64_t MOST_COLUMNS = int64_t(1) << 20;
static_assert(CHUNK * CodebookByRow::MOST_BYTE * (128 * MOST_MULTIPLES) <= INT32_MAX);
// Sums of 64 bits become float64 as long as they have no more than 51.
static_assert(MOST_COLUMNS * CodebookByRow::MOST_BYTE * (CodebookByRow::WORD + 1) <
              (int64_t(1) << 51) / (128 * MOST_MULTIPLES));

int64_t input_bytes(const CodebookByRow& c, int64_t tokens) { return tokens * blocks_of(c) * BLOCK * 2; }

void prepare_many(const CodebookByRow& c, const int8_t* codes, const float* scales, int64_t k, int8_t* x,
                  WholeInputs::Token& token) {
    const int64_t groups = ceil_div(c.columns, CodebookByRow::INPUT_GROUP), blocks = blocks_of(c);
    const float unit = find_unit(scales, groups);
    auto* to = reinterpret_cast<int16_t*>(x) + k * blocks * BLOCK;
    for (int64_t b = 0; b < blocks; ++b) {
        Codes block[PHASES];
        order_inputs(c, codes, b, block);
        int16_t factors[BYTES] = {}; // of the inputs that a vector of codes meets
        for (int64_t l = 0, g = b * LANES; l < LANES && g < groups; ++l, ++g)
            for (int64_t i = 0; i < 4; ++i) factors[4 * l + i] = static_cast<int16_t>(factor_of(scales[g], unit));
        for (int64_t s = 0; s < PHASES; ++s, to += BYTES)
            for (int64_t m = 0; m < BYTES; ++m)
                to[m] = static_cast<int16_t>(static_cast<int8_t>(block[s][m]) * factors[m]);
    }
    token = {unit, 0}; // centroids are centred: nothing has to be taken off
}

// ---- weights

typedef int16_t Panel[ROWS][CHUNK];

// Centroids of ROWS rows, in `count` blocks of columns; of entries of two bytes the second ones follow.
template <typename Lookup, int B, int EACH>
void decode_rows(const CodebookByRow& c, int64_t first, int64_t column_block, int64_t count, Panel* panels) {
    const int64_t bytes = 4 * c.words;
    for (int64_t i = 0; i < ROWS; ++i) {
        const int64_t row = least(first + i, c.rows - 1); // sums of what lies behind the last row go nowhere
        const Lookup lookup(c, row);
        const RowPlanes<B> planes(c, row);
        for (int64_t b = 0; b < count; ++b) {
            const int64_t at = (column_block + b) * BYTES;
            Codes plane[B], code[PHASES];
            planes.fetch(at + ROWS * bytes);
            planes.load(at, present(bytes - at), plane);
            if constexpr (Lookup::FOLDS) fold(plane);
            codes_of<B>(plane, code);
#pragma GCC unroll 8
            for (int64_t s = 0; s < PHASES; ++s) {
                Codes found[EACH];
                lookup(code[s], found);
                for (int e = 0; e < EACH; ++e) {
                    const auto own = reinterpret_cast<__m256i>(found[e]);
                    auto* to = reinterpret_cast<__m256i*>(panels[e][i] + b * BLOCK + s * BYTES);
                    _mm256_storeu_si256(to, _mm256_cvtepi8_epi16(_mm256_castsi256_si128(own)));
                    _mm256_storeu_si256(to + 1, _mm256_cvtepi8_epi16(_mm256_extracti128_si256(own, 1)));
                }
            }
        }
    }
}

// ---- products

// Has a vector stay in one register: GCC would load it again for every use, and copy sums back and forth.
inline void keep(__m256i& v) { __asm__("" : "+x"(v)); }

inline __m256i load_pairs(const int16_t* from) {
    auto loaded = load_as<__m256i>(from);
    keep(loaded);
    return loaded;
}

inline void add_dots(__m256i& sums, __m256i a, __m256i b) {
#if defined(__AVXVNNI__)
    sums = _mm256_dpwssd_avx_epi32(sums, a, b);
#else
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
#endif
    keep(sums);
}

// Sums of four rows and one token. No array: GCC keeps those in memory.
struct Quad {
    __m256i a{}, b{}, c{}, d{};

    void add(const Quad& weights, __m256i x) {
        add_dots(a, weights.a, x);
        add_dots(b, weights.b, x);
        add_dots(c, weights.c, x);
        add_dots(d, weights.d, x);
    }
    // sums[r] += factor times the total of row r; or it is that, at first.
    void add_to(int64_t* sums, int32_t factor, bool fresh) const {
        const __m256i all = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
        const __m128i totals = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
        __m256i made = _mm256_mul_epi32(_mm256_cvtepi32_epi64(totals), _mm256_set1_epi64x(factor));
        if (!fresh) made = _mm256_add_epi64(made, load_as<__m256i>(sums));
        __builtin_memcpy(sums, &made, sizeof made);
    }
};

// The dot products of four rows of a panel with M tokens, of at least one column.
template <int M>
void multiply(const int16_t (*panel)[CHUNK], const int16_t* x, int64_t stride, int64_t columns, int32_t factor,
              bool fresh, int64_t* sums) {
    Quad first, second;
    int64_t j = 0;
    do {
        const Quad weights{load_pairs(panel[0] + j), load_pairs(panel[1] + j), load_pairs(panel[2] + j),
                           load_pairs(panel[3] + j)};
        first.add(weights, load_pairs(x + j));
        if constexpr (M == 2) second.add(weights, load_pairs(x + stride + j));
    } while ((j += BYTES / 2) < columns);
    first.add_to(sums, factor, fresh);
    if constexpr (M == 2) second.add_to(sums + ROWS, factor, fresh);
}

// What exact sums of a block of rows stand for, of one token.
inline Floats values_of(const int64_t* sums, const double* steps, float unit) {
    const __m256i shift = _mm256_set1_epi64x(0x4338000000000000); // the bits of 1.5 x 2^52
    __m128 halves[2];
    for (int i = 0; i < 2; ++i) {
        const __m256i moved = _mm256_add_epi64(load_as<__m256i>(sums + 4 * i), shift);
        const __m256d whole = _mm256_sub_pd(_mm256_castsi256_pd(moved), _mm256_castsi256_pd(shift));
        halves[i] = _mm256_cvtpd_ps(_mm256_mul_pd(whole, _mm256_loadu_pd(steps + 4 * i)));
    }
    return reinterpret_cast<Floats>(_mm256_set_m128(halves[1], halves[0])) * broadcast(unit);
}

// The sums of a block of rows go where outputs say.
void finish_block(const CodebookByRow& c, const WholeInputs& in, const Outputs& y, int64_t block, const int64_t* sums) {
    const Places places = find_places(y, block, c.rows);
    double steps[LANES] = {};
    for (int64_t i = 0; i < places.count; ++i) steps[i] = whole_step(c, block * LANES + i);
    by_tokens<4>(in.tokens, [&](auto m, int64_t k) {
        Floats kept[m.value] = {};
        if (c.kept.channels > 0) sum_kept<m.value>(c, in.kept + k * c.kept.channels, block * LANES, places.count, kept);
        for (int t = 0; t < m.value; ++t) {
            const Floats values = values_of(sums + (k + t) * ROWS, steps, in.token[k + t].unit);
            finish(y, k + t, places, c.kept.channels > 0 ? kept[t] + values : values);
        }
    });
}

template <typename Lookup, int B, int EACH>
void gemm_rows(const CodebookByRow& c, const WholeInputs& in, const Outputs& y, int64_t begin, int64_t end) {
    const int64_t blocks = blocks_of(c), stride = blocks * BLOCK;
    constexpr int64_t PANELS = EACH * sizeof(Panel), MEMORY = PANELS + BATCH * ROWS * 8;
    static_assert(MEMORY <= GEMM_MEMORY);
    auto* panels = static_cast<Panel*>(thread_memory(MEMORY));
    auto* sums = reinterpret_cast<int64_t*>(panels + EACH);
    const auto* x = reinterpret_cast<const int16_t*>(in.x);
    for (int64_t block = begin; block < end; block += GEMM_BLOCKS) {
        const int64_t rows = least(ROWS, least(end * LANES, c.rows) - block * LANES);
        for (int64_t b = 0; b < blocks; b += CHUNK / BLOCK) {
            const int64_t here = least(CHUNK / BLOCK, blocks - b);
            decode_rows<Lookup, B, EACH>(c, block * LANES, b, here, panels);
            by_tokens<PAIR>(in.tokens, [&](auto m, int64_t k) {
                for (int e = 0; e < EACH; ++e)
                    for (int64_t r = 0; r < rows; r += QUAD)
                        multiply<m.value>(panels[e] + r, x + k * stride + b * BLOCK, stride, here * BLOCK,
                                          e + 1 < EACH ? CodebookByRow::WORD : 1, b == 0 && e == 0,
                                          sums + k * ROWS + r);
            });
        }
        for (int64_t t = 0; t * LANES < rows; ++t) finish_block(c, in, y, block + t, sums + t * LANES);
    }
}

void gemm_whole(const CodebookByRow& c, const WholeInputs& in, const Outputs& y, int64_t begin, int64_t end) {
    by_entries(c, [&](auto bits, auto each) {
        constexpr int B = bits.value;
        if constexpr (each.value == 1) return gemm_rows<CentredBytes<B>, B, 1>(c, in, y, begin, end);
        else if (c.mirrored) return gemm_rows<MirroredWords<B>, B, 2>(c, in, y, begin, end);
        else return gemm_rows<CentredWords<B>, B, 2>(c, in, y, begin, end);
    });
}

} // namespace

void add_codebook_by_row_gemm_int8(MatmulOps& ops) {
    WholeOps& own = ops.codebook_by_row.whole;
    own.least = LEAST_TOKENS;
    own.most_columns = MOST_COLUMNS;
    own.bytes = input_bytes;
    own.prepare_many = prepare_many;
    own.gemm = gemm_whole;
}

} // namespace anybit::ANYBIT_ISA
