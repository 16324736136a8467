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

constexpr int64_t ROWS = LANES;           // that are decoded at a time
constexpr int64_t BLOCK = PHASES * BYTES; // columns
constexpr int64_t CHUNK = 4 * BLOCK;      // columns that are decoded at a time: 16 KB of numbers of 16 bits, which the
                                          // first cache holds; sums of half as many products fit 32 bits
constexpr int64_t HALF = BYTES / 4;       // numbers of 16 bits in half a vector
constexpr int64_t QUAD = 4;               // rows whose sums are in registers
constexpr int PAIR = 2;                   // tokens
constexpr int64_t LEAST_TOKENS = 3;       // of fewer, gemv takes less time
static_assert(CHUNK / 2 * CodebookByRow::MOST_BYTE * (128 * MOST_MULTIPLES) <= INT32_MAX);

// Numbers that each phase of a block has, in vectors of 8, where so many bytes of a plane are left: fewer in a last
// block of which there is a part.
inline int64_t phase_size(int64_t left) { return least(BYTES, ceil_div(left, HALF) * HALF); }

int64_t input_bytes(const CodebookByRow& c, int64_t tokens) { return tokens * blocks_of(c) * BLOCK * 2; }

void prepare_many(const CodebookByRow& c, const int8_t* codes, const float* scales, int64_t k, int8_t* x,
                  WholeInputs::Token& token) {
    const int64_t groups = ceil_div(c.columns, CodebookByRow::INPUT_GROUP), blocks = blocks_of(c);
    const float unit = find_unit(scales, groups);
    auto* to = reinterpret_cast<int16_t*>(x) + k * blocks * BLOCK; // at the end a part of a block may be left
    for (int64_t b = 0; b < blocks; ++b) {
        Codes block[PHASES];
        order_inputs(c, codes, b, block);
        int16_t factors[BYTES] = {}; // of the inputs that a vector of codes meets
        for (int64_t l = 0, g = b * LANES; l < LANES && g < groups; ++l, ++g)
            for (int64_t i = 0; i < 4; ++i) factors[4 * l + i] = static_cast<int16_t>(factor_of(scales[g], unit));
        const int64_t size = phase_size(4 * c.words - b * BYTES);
        for (int64_t s = 0; s < PHASES; ++s, to += size) // what lies beyond, the next phase replaces
            for (int64_t m = 0; m < BYTES; ++m)
                to[m] = static_cast<int16_t>(static_cast<int8_t>(block[s][m]) * factors[m]);
    }
    token = {unit, 0}; // centroids are centred: nothing has to be taken off
}

// ---- weights

typedef int16_t Panel[ROWS][CHUNK];

// The centroids of a row's block at `at` bytes, `size` numbers of each phase, of each byte of its entries.
template <typename Lookup, int B, int EACH>
inline void decode_block(const Lookup& lookup, const RowPlanes<B>& planes, int64_t at, int64_t left, int64_t size,
                         int16_t* const (&to)[EACH]) {
    Codes plane[B], code[PHASES];
    planes.load(at, present(left), plane);
    if constexpr (Lookup::FOLDS) fold(plane);
    codes_of<B>(plane, code);
#pragma GCC unroll 8
    for (int64_t s = 0; s < PHASES; ++s) {
        Codes found[EACH];
        lookup(code[s], found);
        for (int e = 0; e < EACH; ++e) {
            const auto own = reinterpret_cast<__m256i>(found[e]);
            auto* own_to = reinterpret_cast<__m256i*>(to[e] + s * size);
            _mm256_storeu_si256(own_to, _mm256_cvtepi8_epi16(_mm256_castsi256_si128(own)));
            if (size > BYTES / 2) // what lies beyond, the next phase replaces
                _mm256_storeu_si256(own_to + 1, _mm256_cvtepi8_epi16(_mm256_extracti128_si256(own, 1)));
        }
    }
}

// Centroids of ROWS rows, in `count` blocks of columns; of entries of two bytes the second ones follow.
template <typename Lookup, int B, int EACH>
void decode_rows(const CodebookByRow& c, int64_t first, int64_t column_block, int64_t count, Panel* panels) {
    const int64_t bytes = 4 * c.words;
    for (int64_t i = 0; i < ROWS; ++i) {
        const int64_t row = least(first + i, c.rows - 1); // sums of what lies behind the last row go nowhere
        const Lookup lookup(c, row);
        const RowPlanes<B> planes(c, row);
        for (int64_t b = 0; b < count; ++b) {
            const int64_t at = (column_block + b) * BYTES, left = bytes - at;
            int16_t* to[EACH];
            for (int e = 0; e < EACH; ++e) to[e] = panels[e][i] + b * BLOCK;
            planes.fetch(at + ROWS * bytes);
            if (left >= BYTES) decode_block<Lookup, B, EACH>(lookup, planes, at, BYTES, BYTES, to);
            else decode_block<Lookup, B, EACH>(lookup, planes, at, left, phase_size(left), to);
        }
    }
}

// ---- products

inline void add_dots(__m256i& sums, __m256i a, __m256i b) {
#if defined(__AVXVNNI__)
    sums = _mm256_dpwssd_avx_epi32(sums, a, b);
#else
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
#endif
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
        const __m256i halves = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
        const __m256i lower = _mm256_cvtepi32_epi64(_mm256_castsi256_si128(halves)),
                      upper = _mm256_cvtepi32_epi64(_mm256_extracti128_si256(halves, 1)),
                      factors = _mm256_set1_epi64x(factor);
        __m256i made = _mm256_add_epi64(_mm256_mul_epi32(lower, factors), _mm256_mul_epi32(upper, factors));
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
        const Quad weights{load_as<__m256i>(panel[0] + j), load_as<__m256i>(panel[1] + j),
                           load_as<__m256i>(panel[2] + j), load_as<__m256i>(panel[3] + j)};
        first.add(weights, load_as<__m256i>(x + j));
        if constexpr (M == 2) second.add(weights, load_as<__m256i>(x + stride + j));
    } while ((j += BYTES / 2) < columns);
    first.add_to(sums, factor, fresh);
    if constexpr (M == 2) second.add_to(sums + ROWS, factor, fresh);
}

// What exact sums of a block of rows stand for, of one token.
inline Floats values_of(const int64_t* sums, const __m256d (&steps)[2], float unit) {
    const __m128 units = _mm_set1_ps(unit), lower = whole_values(load_as<__m256i>(sums), steps[0], units),
                 upper = whole_values(load_as<__m256i>(sums + 4), steps[1], units);
    return reinterpret_cast<Floats>(_mm256_set_m128(upper, lower));
}

// The sums of a block of rows go where outputs say.
void finish_block(const CodebookByRow& c, const WholeInputs& in, const Outputs& y, int64_t block, const int64_t* sums) {
    const Places places = find_places(y, block, c.rows);
    const int64_t row = block * LANES;
    const __m256d steps[2] = {whole_steps(c, row, places.count), whole_steps(c, row + 4, places.count - 4)};
    by_tokens<4>(in.tokens, [&](auto m, int64_t k) {
        Floats kept[m.value] = {};
        if (c.kept.channels > 0) sum_kept<m.value>(c, in.kept + k * c.kept.channels, row, places.count, kept);
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
    for (int64_t block = begin; block < end; ++block) {
        const int64_t rows = least(ROWS, c.rows - block * LANES);
        for (int64_t b = 0; b < blocks; b += CHUNK / BLOCK) {
            const int64_t here = least(CHUNK / BLOCK, blocks - b);
            const int64_t columns = (here - 1) * BLOCK + PHASES * phase_size(4 * c.words - (b + here - 1) * BYTES);
            decode_rows<Lookup, B, EACH>(c, block * LANES, b, here, panels);
            by_tokens<PAIR>(in.tokens, [&](auto m, int64_t k) {
                for (int e = 0; e < EACH; ++e)
                    for (int64_t r = 0; r < rows; r += QUAD)
                        multiply<m.value>(panels[e] + r, x + k * stride + b * BLOCK, stride, columns,
                                          e + 1 < EACH ? CodebookByRow::WORD : 1, b == 0 && e == 0,
                                          sums + k * ROWS + r);
            });
        }
        finish_block(c, in, y, block, sums);
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
    own.most_columns = INT64_MAX;
    own.bytes = input_bytes;
    own.beside = 1;
    own.prepare_many = prepare_many;
    own.gemm = gemm_whole;
}

} // namespace anybit::ANYBIT_ISA
