// Format "codebook" by rows times many tokens of 8 bits, by AVX-512's dot products of bytes. Sums are exact, so the
// bits are those of gemv. AMX has a way of its own (codebook_by_row_tiles.cpp), and so has AVX2
// (codebook_by_row_gemm_int8.cpp).
//
// Two blocks of rows are decoded at a time, a block of columns of them. A vector of a panel has four columns, a lane
// for each row, so nothing is added up across lanes. It meets the same four inputs of each token. Sums of 32 inputs, a
// group, are multiplied by its factor and join in 32 bits; after SHORT_RUN groups they join in 64.
#if !defined(__AVX512VNNI__) || defined(__AMX_INT8__)
#error "for AVX-512 with VNNI only: CMakeLists.txt"
#endif
#include "common/thread_memory.h"
#include "matmul/codebook_by_row_whole.h"
#include "matmul/held_outputs.h"
#include "matmul/ops.h"
#include "matmul/outputs.h"
#include "matmul/transpose.h"
#include "matmul/unroll.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int64_t ROWS = GEMM_BLOCKS * LANES; // that are decoded at a time
constexpr int64_t GROUP = CodebookByRow::INPUT_GROUP;
constexpr int64_t GROUPS = PHASES * BYTES / GROUP; // of a block of columns
constexpr int64_t VECTORS = GROUPS * PHASES;       // of a block of rows and one of columns
constexpr int TOKENS = 6;                          // in registers at once
constexpr int64_t LEAST_TOKENS = 17;               // of fewer, gemv takes less time
constexpr int64_t MOST_COLUMNS = INT32_MAX;

// A token's inputs and then the factors of their groups, in whole cache lines.
int64_t token_bytes(const CodebookByRow& c) { return ceil_div(c.words * (GROUP + 4), BYTES) * BYTES; }

int64_t input_bytes(const CodebookByRow& c, int64_t tokens) { return tokens * token_bytes(c); }

// Two groups of inputs as vectors of a whole block of columns meet them: of each, four of the same phase together.
inline __m512i by_phases(__m512i inputs) {
    uint8_t pairs[BYTES]; // of inputs 8 apart, within 16
    uint16_t quads[BYTES / 2];
    for (int i = 0; i < BYTES; ++i) pairs[i] = static_cast<uint8_t>(i % 2 * 8 + i % 16 / 2);
    for (int i = 0; i < BYTES / 2; ++i) quads[i] = static_cast<uint16_t>(i / 16 * 16 + i % 2 * 8 + i % 16 / 2);
    return _mm512_permutexvar_epi16(load_as<__m512i>(quads), _mm512_shuffle_epi8(inputs, load_as<__m512i>(pairs)));
}

void prepare_many(const CodebookByRow& c, const int8_t* codes, const float* scales, int64_t k, int8_t* x,
                  WholeInputs::Token& token) {
    const int64_t last = (blocks_of(c) - (tails_of(c) > 0)) * PHASES * BYTES; // tails begin there, in order
    token = {find_unit(scales, c.words), 0};
    x += k * token_bytes(c);
    for (int64_t j = 0; j < c.columns; j += BYTES) {
        const int64_t left = c.columns - j;
        const auto there = left >= BYTES ? ~__mmask64(0) : (__mmask64(1) << left) - 1;
        const __m512i inputs = _mm512_maskz_loadu_epi8(there, codes + j);
        _mm512_mask_storeu_epi32(x + j, c.words * GROUP - j >= BYTES ? 0xffff : 0xff,
                                 j < last ? by_phases(inputs) : inputs);
    }
    for (int64_t g = 0; g < c.words; g += LANES) {
        int32_t factors[LANES];
        token.sum += find_factors(codes, c.columns, scales, token.unit, g, factors);
        __builtin_memcpy(x + c.words * GROUP + g * 4, factors, static_cast<size_t>(least(LANES, c.words - g)) * 4);
    }
}

// ---- weights

// What a product wants memory for; of entries of two bytes the second ones come behind the first.
template <int EACH> struct Own {
    Codes panel[EACH][GEMM_BLOCKS][VECTORS]; // eight vectors are a group
    Floats found[EACH][PHASES][LANES];       // centroids of a block of rows, vectors of codes of each row
    int64_t sums[BATCH][ROWS];
    Floats kept[BATCH]; // sums of a block's kept channels
    char held[Held::MEMORY];
};
static_assert(sizeof(Own<2>) <= GEMM_MEMORY);

// Centroids of so many blocks of rows, from row `first` on, in block b of columns.
template <int B, int EACH> void decode_block(const CodebookByRow& c, int64_t first, int64_t blocks, int64_t b,
                                             Own<EACH>& own) {
    const int64_t bytes = 4 * c.words, at = b * BYTES, tails = b == blocks_of(c) - 1 ? tails_of(c) : 0;
    for (int64_t r = 0; r < blocks; ++r) {
        for (int64_t i = 0; i < LANES; ++i) {
            const int64_t row = least(first + r * LANES + i, c.rows - 1); // sums of what lies behind it go nowhere
            const uint8_t* entries = c.table + (c.kind(row) * EACH << B);
            const Table<B> high(entries), low(entries + (EACH == 2 ? 1 << B : 0));
            const RowPlanes<B> planes(c, row);
            const auto put = [&](int64_t s, Codes code) {
                own.found[0][s][i] = reinterpret_cast<Floats>(high(code));
                if constexpr (EACH == 2) own.found[1][s][i] = reinterpret_cast<Floats>(low(code));
            };
            planes.fetch(at + ROWS * bytes);
            for (int64_t t = 0; t < tails; ++t) put(t, tail_codes<B>(c, row, at + t * TAIL_BYTES));
            if (tails > 0) continue;
            Codes plane[B], code[PHASES];
            planes.load(at, present(bytes - at), plane);
            codes_of<B>(plane, code);
#pragma GCC unroll 8
            for (int64_t s = 0; s < PHASES; ++s) put(s, code[s]);
        }
        // Lanes of a vector of codes are of as many groups, those of a tail of two.
        const int64_t vectors = tails > 0 ? tails : PHASES, lane = tails > 0 ? 1 : PHASES;
        for (int e = 0; e < EACH; ++e)
            for (int64_t s = 0; s < vectors; ++s) {
                Floats(&turned)[LANES] = own.found[e][s];
                transpose(turned);
                Codes* to = own.panel[e][r] + s * (tails > 0 ? LANES : 1);
                for (int64_t l = 0; l < LANES; ++l) to[l * lane] = reinterpret_cast<Codes>(turned[l]);
            }
    }
}

// ---- products

// Eight sums of 32 bits, times WEIGHT, join those of 64, or are the first.
template <int32_t WEIGHT> inline void join_eight(__m256i sums, bool fresh, int64_t* to) {
    __m512i all = _mm512_cvtepi32_epi64(sums);
    if constexpr (WEIGHT != 1) all = _mm512_mul_epi32(all, _mm512_set1_epi64(WEIGHT));
    _mm512_storeu_si512(to, fresh ? all : _mm512_add_epi64(all, _mm512_loadu_si512(to)));
}

// R blocks of rows of a panel times M tokens: so many groups, up to SHORT_RUN, from `first` on.
template <int R, int M, int32_t WEIGHT>
void multiply(const Codes (*panel)[VECTORS], int64_t first, int64_t groups, const int8_t* x, const int8_t* factors,
              int64_t stride, bool fresh, int64_t (*sums)[ROWS]) {
    Ints all[R][M] = {};
    for (int64_t g = first; g < first + groups; ++g) {
        Ints own[R][M] = {};
#pragma GCC unroll 8
        for (int64_t s = 0; s < PHASES; ++s)
            for (int k = 0; k < M; ++k) {
                const Bytes four = broadcast_four(x + k * stride + g * GROUP + 4 * s);
                for (int r = 0; r < R; ++r) own[r][k] = dot(own[r][k], panel[r][g * PHASES + s], four);
            }
        for (int k = 0; k < M; ++k) {
            const Ints factor = load_as<int32_t>(factors + k * stride + 4 * g) - Ints{};
            for (int r = 0; r < R; ++r) all[r][k] += own[r][k] * factor;
        }
    }
    for (int k = 0; k < M; ++k)
        for (int r = 0; r < R; ++r) {
            const auto both = reinterpret_cast<__m512i>(all[r][k]);
            join_eight<WEIGHT>(_mm512_castsi512_si256(both), fresh, sums[k] + r * LANES);
            join_eight<WEIGHT>(_mm512_extracti64x4_epi64(both, 1), fresh, sums[k] + r * LANES + 8);
        }
}

// All tokens with the panels of block b of columns.
template <int R, int EACH>
void multiply_block(const CodebookByRow& c, const WholeInputs& in, int64_t b, Own<EACH>& own) {
    const int64_t stride = token_bytes(c), end = least(GROUPS, c.words - b * GROUPS);
    by_tokens<TOKENS>(in.tokens, [&](auto m, int64_t k) {
        const int8_t *x = in.x + k * stride + b * GROUPS * GROUP, *factors = in.x + k * stride + c.words * GROUP;
        factors += b * GROUPS * 4;
        for (int64_t g = 0; g < end; g += SHORT_RUN) {
            const auto run = [&](auto weight, int e, bool fresh) {
                multiply<R, m.value, weight.value>(own.panel[e], g, least(SHORT_RUN, end - g), x, factors, stride,
                                                   fresh, own.sums + k);
            };
            const bool fresh = b == 0 && g == 0;
            if constexpr (EACH == 2) run(Number<CodebookByRow::WORD>{}, 0, fresh);
            run(Number<1>{}, EACH - 1, EACH == 1 && fresh);
        }
    });
}

// Kept channels of a block of rows times all tokens: one channel after another, as sum_kept does.
inline void multiply_kept(const CodebookByRow& c, const WholeInputs& in, int64_t row, int64_t rows, Floats* sums) {
    const int64_t n = c.kept.channels;
    for (int64_t j = 0; j < n; j += LANES) {
        const int64_t here = least(LANES, n - j);
        Floats channel[LANES];
        load_channels(c.kept, row, rows, j, here, channel);
        by_tokens<8>(in.tokens, [&](auto m, int64_t k) {
            Floats own[m.value] = {};
            for (int t = 0; t < m.value && j > 0; ++t) own[t] = sums[k + t];
            for (int64_t i = 0; i < here; ++i)
                for (int t = 0; t < m.value; ++t) own[t] += channel[i] * broadcast(in.kept[(k + t) * n + j + i]);
            for (int t = 0; t < m.value; ++t) sums[k + t] = own[t];
        });
    }
}

// The sums of a block of rows go where outputs say. `first`: the row that outputs begin with.
template <int EACH>
void finish_block(const CodebookByRow& c, const WholeInputs& in, const Outputs& y, int64_t first, int64_t block,
                  int64_t r, Own<EACH>& own) {
    constexpr int64_t CENTRES = (EACH == 2 ? CodebookByRow::WORD + 1 : 1) * CodebookByRow::BYTE_ZERO;
    const bool kept = c.kept.channels > 0;
    Places places = find_places(y, block, c.rows);
    places.first -= first;
    __m512d steps[2];
    for (int h = 0; h < 2; ++h) steps[h] = whole_steps(c, block * LANES + h * 8, places.count - h * 8);
    if (kept) multiply_kept(c, in, block * LANES, places.count, own.kept);
    for (int64_t k = 0; k < in.tokens; ++k) {
        const __m512i excess = _mm512_set1_epi64(CENTRES * in.token[k].sum);
        const __m256 unit = _mm256_set1_ps(in.token[k].unit);
        __m256 halves[2];
        for (int h = 0; h < 2; ++h) {
            const auto sums = load_as<__m512i>(own.sums[k] + r * LANES + h * 8);
            halves[h] = whole_values(_mm512_sub_epi64(sums, excess), steps[h], unit);
        }
        const auto values =
            reinterpret_cast<Floats>(_mm512_insertf32x8(_mm512_castps256_ps512(halves[0]), halves[1], 1));
        finish(y, k, places, kept ? own.kept[k] + values : values);
    }
}

template <int B, int EACH>
void gemm_rows(const CodebookByRow& c, const WholeInputs& in, const Outputs& y, int64_t begin, int64_t end) {
    auto& own = *static_cast<Own<EACH>*>(thread_memory(sizeof(Own<EACH>)));
    Held held(y, in.tokens, begin * LANES, own.held);
    for (int64_t block = begin; block < end; block += GEMM_BLOCKS) {
        const int64_t blocks = least(GEMM_BLOCKS, end - block);
        for (int64_t b = 0; b < blocks_of(c); ++b) {
            decode_block<B, EACH>(c, block * LANES, blocks, b, own);
            if (blocks == GEMM_BLOCKS) multiply_block<GEMM_BLOCKS>(c, in, b, own);
            else multiply_block<1>(c, in, b, own);
        }
        for (int64_t r = 0; r < blocks; ++r) finish_block<EACH>(c, in, held.outputs(), held.first(), block + r, r, own);
        held.write_if_full(least((block + blocks) * LANES, c.rows), least(end - block - blocks, GEMM_BLOCKS) * LANES);
    }
}

void gemm_whole(const CodebookByRow& c, const WholeInputs& in, const Outputs& y, int64_t begin, int64_t end) {
    by_width(c.bits, [&](auto bits) {
        constexpr int B = bits.value;
        if constexpr (B > CodebookByRow::MOST_BYTE_BITS)
            if (c.two_bytes) return gemm_rows<B, 2>(c, in, y, begin, end);
        gemm_rows<B, 1>(c, in, y, begin, end);
    });
}

} // namespace

void add_codebook_by_row_gemm_bytes(MatmulOps& ops) {
    WholeOps& own = ops.codebook_by_row.whole;
    own.least = LEAST_TOKENS;
    own.most_columns = MOST_COLUMNS;
    own.bytes = input_bytes;
    own.prepare_many = prepare_many;
    own.gemm = gemm_whole;
}

} // namespace anybit::ANYBIT_ISA
