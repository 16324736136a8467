// Format "codebook" by rows times many tokens of 8 bits, by AVX-512's dot products of bytes, a lane for each row. Sums
// are exact, so the bits are those of gemv. AMX and AVX2 have ways of their own (codebook_by_row_tiles.cpp,
// codebook_by_row_gemm_int8.cpp).
//
// Two blocks of rows are decoded at a time, a block of columns of them. A vector of a panel has four columns of each
// row, so nothing is added up across lanes. It meets the same four inputs of each token. Sums of 32 inputs, a group,
// are multiplied by its factor and join in 32 bits; after SHORT_RUN groups they join in 64.
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
// Sums of 64 bits hold so many products of the largest entry, code and factor.
static_assert(MOST_COLUMNS <= INT64_MAX / (int64_t(255) * (CodebookByRow::WORD + 1) * 128 * MOST_MULTIPLES));

// ---- inputs: those of a token, then the factors of their groups

int64_t factors_at(const CodebookByRow& c) { return ceil_div(c.words, 2) * BYTES; }

// An odd number of cache lines, lest tokens compete for places in the caches.
int64_t token_bytes(const CodebookByRow& c) { return ((ceil_div(c.words, 2) + ceil_div(c.words, LANES)) | 1) * BYTES; }

int64_t input_bytes(const CodebookByRow& c, int64_t tokens) { return tokens * token_bytes(c); }

// Two groups, inputs s, 8 + s, 16 + s and 24 + s of each side by side: vector s of codes has those weights in a lane.
inline __m512i by_phases(__m512i inputs) {
    uint8_t pairs[BYTES]; // of inputs 8 apart, within 16
    uint16_t quads[BYTES / 2];
    for (int i = 0; i < BYTES; ++i) pairs[i] = static_cast<uint8_t>(i % 2 * 8 + i % 16 / 2);
    for (int i = 0; i < BYTES / 2; ++i) quads[i] = static_cast<uint16_t>(i / 16 * 16 + i % 2 * 8 + i % 16 / 2);
    return _mm512_permutexvar_epi16(load_as<__m512i>(quads), _mm512_shuffle_epi8(inputs, load_as<__m512i>(pairs)));
}

void prepare_many(const CodebookByRow& c, const int8_t* codes, const float* scales, int64_t k, int8_t* x,
                  WholeInputs::Token& token) {
    const int64_t tails = (blocks_of(c) - (tails_of(c) > 0)) * PHASES * BYTES; // begin there, in order
    token = {find_unit(scales, c.words), 0};
    x += k * token_bytes(c);
    for (int64_t j = 0; j < c.columns; j += BYTES) {
        const int64_t left = c.columns - j;
        const auto there = left >= BYTES ? ~__mmask64(0) : (__mmask64(1) << left) - 1;
        const __m512i inputs = _mm512_maskz_loadu_epi8(there, codes + j);
        _mm512_storeu_si512(x + j, j < tails ? by_phases(inputs) : inputs);
    }
    auto* factors = reinterpret_cast<int32_t*>(x + factors_at(c));
    for (int64_t g = 0; g < c.words; g += LANES)
        token.sum += find_factors(codes, c.columns, scales, token.unit, g, factors + g);
}

// ---- weights

// What a product wants memory for. Vector 8 g + s of a panel has, of each row and of group g, columns s, 8 + s, 16 + s
// and 24 + s; in a row's tails columns 4 s to 4 s + 3. Of entries of two bytes the second ones come behind the first.
template <int EACH> struct Memory {
    Codes panel[EACH][GEMM_BLOCKS][VECTORS];
    Floats found[EACH][PHASES][LANES]; // a block's centroids: vectors of codes, of each row
    int64_t sums[BATCH][ROWS];
    Floats kept[BATCH]; // sums of a block's kept channels
    char held[Held::MEMORY];
};
static_assert(sizeof(Memory<2>) <= GEMM_MEMORY);

// The panels of so many blocks of rows, from row `first` on, and of block b of columns.
template <int B, int EACH>
void decode_block(const CodebookByRow& c, int64_t first, int64_t blocks, int64_t b, Memory<EACH>& memory) {
    const int64_t bytes = 4 * c.words, at = b * BYTES, tails = b == blocks_of(c) - 1 ? tails_of(c) : 0;
    for (int64_t r = 0; r < blocks; ++r) {
        for (int64_t i = 0; i < LANES; ++i) {
            const int64_t row = least(first + r * LANES + i, c.rows - 1); // sums of what lies behind it go nowhere
            const RowLookup<B, EACH> tables(c, row);
            const RowPlanes<B> planes(c, row);
            const auto put = [&](int64_t s, Codes code) {
                Codes found[EACH];
                tables(code, found);
                for (int e = 0; e < EACH; ++e) memory.found[e][s][i] = reinterpret_cast<Floats>(found[e]);
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
        // Lane l of a whole block's vector is group l; of a tail's, each half is a group.
        for (int e = 0; e < EACH; ++e)
            for (int64_t s = 0; s < (tails > 0 ? tails : PHASES); ++s) {
                Floats(&turned)[LANES] = memory.found[e][s];
                transpose(turned);
                for (int64_t l = 0; l < LANES; ++l)
                    memory.panel[e][r][tails > 0 ? s * LANES + l : l * PHASES + s] = reinterpret_cast<Codes>(turned[l]);
            }
    }
}

// ---- products

// Eight sums of 32 bits, TIMES as many, join those of 64, or are the first.
template <int32_t TIMES> inline void join_eight(__m256i sums, bool fresh, int64_t* to) {
    __m512i all = _mm512_cvtepi32_epi64(sums);
    if constexpr (TIMES != 1) all = _mm512_mul_epi32(all, _mm512_set1_epi64(TIMES));
    _mm512_storeu_si512(to, fresh ? all : _mm512_add_epi64(all, _mm512_loadu_si512(to)));
}

// R blocks of rows, whose panels lie VECTORS apart, times M tokens, whose inputs and factors lie `stride` bytes apart:
// up to SHORT_RUN groups.
template <int R, int M, int32_t TIMES>
void multiply(const Codes* panel, int64_t groups, const int8_t* x, const int8_t* factors, int64_t stride, bool fresh,
              int64_t (*sums)[ROWS]) {
    Ints all[R][M] = {};
    for (int64_t g = 0; g < groups; ++g) {
        Ints own[R][M] = {};
#pragma GCC unroll 8
        for (int64_t s = 0; s < PHASES; ++s)
            for (int k = 0; k < M; ++k) {
                const Bytes four = broadcast_four(x + k * stride + g * GROUP + 4 * s);
                for (int r = 0; r < R; ++r) own[r][k] = dot(own[r][k], panel[r * VECTORS + g * PHASES + s], four);
            }
        for (int k = 0; k < M; ++k) {
            const Ints factor = load_as<int32_t>(factors + k * stride + 4 * g) - Ints{};
            for (int r = 0; r < R; ++r) all[r][k] += own[r][k] * factor;
        }
    }
    for (int k = 0; k < M; ++k)
        for (int r = 0; r < R; ++r) {
            const auto both = reinterpret_cast<__m512i>(all[r][k]);
            join_eight<TIMES>(_mm512_castsi512_si256(both), fresh, sums[k] + r * LANES);
            join_eight<TIMES>(_mm512_extracti64x4_epi64(both, 1), fresh, sums[k] + r * LANES + 8);
        }
}

// All tokens with the panels of block b of columns.
template <int R, int EACH>
void multiply_block(const CodebookByRow& c, const WholeInputs& in, int64_t b, Memory<EACH>& memory) {
    const int64_t stride = token_bytes(c), end = least(GROUPS, c.words - b * GROUPS);
    const auto use = [&](auto m, int64_t k) {
        const int8_t* const token = in.x + k * stride;
        for (int64_t g = 0; g < end; g += SHORT_RUN) {
            const auto run = [&](auto times, int e, bool fresh) {
                const int64_t group = b * GROUPS + g;
                multiply<R, m.value, times.value>(memory.panel[e][0] + g * PHASES, least(SHORT_RUN, end - g),
                                                  token + group * GROUP, token + factors_at(c) + group * 4, stride,
                                                  fresh, memory.sums + k);
            };
            const bool fresh = b == 0 && g == 0;
            if constexpr (EACH == 2) run(Number<CodebookByRow::WORD>{}, 0, fresh);
            run(Number<1>{}, EACH - 1, EACH == 1 && fresh);
        }
    };
    int64_t k = 0;
    for (; k + TOKENS <= in.tokens; k += TOKENS) use(Number<TOKENS>{}, k);
    by_tokens<4>(in.tokens, use, k);
}

// Kept channels of a block of rows times all tokens, summed as sum_kept does.
inline void multiply_kept(const CodebookByRow& c, const WholeInputs& in, int64_t row, int64_t rows, Floats* sums) {
    const int64_t n = c.kept.channels;
    for (int64_t j = 0; j < n; j += LANES) {
        const int64_t here = least(LANES, n - j);
        Floats channel[LANES];
        load_channels(c.kept, row, rows, j, here, channel);
        by_tokens<8>(in.tokens, [&](auto m, int64_t k) {
            Floats own[m.value] = {};
            if (j > 0)
                for (int t = 0; t < m.value; ++t) own[t] = sums[k + t];
            add_channels<m.value>(channel, here, in.kept + k * n + j, n, own);
            for (int t = 0; t < m.value; ++t) sums[k + t] = own[t];
        });
    }
}

// The sums of a block of rows, which lie from `at` on, go where outputs say. `first`: the row that outputs begin with.
template <int EACH>
void finish_block(const CodebookByRow& c, const WholeInputs& in, const Outputs& y, int64_t first, int64_t block,
                  int64_t at, Memory<EACH>& memory) {
    const bool kept = c.kept.channels > 0;
    Places places = find_places(y, block, c.rows);
    places.first -= first;
    __m512d steps[2];
    for (int h = 0; h < 2; ++h) steps[h] = whole_steps(c, block * LANES + h * 8, places.count - h * 8);
    if (kept) multiply_kept(c, in, block * LANES, places.count, memory.kept);
    for (int64_t k = 0; k < in.tokens; ++k) {
        const __m512i excess = _mm512_set1_epi64(ENTRY_EXCESS<EACH> * in.token[k].sum);
        const __m256 unit = _mm256_set1_ps(in.token[k].unit);
        __m256 halves[2];
        for (int h = 0; h < 2; ++h) {
            const auto sums = load_as<__m512i>(memory.sums[k] + at + h * 8);
            halves[h] = whole_values(_mm512_sub_epi64(sums, excess), steps[h], unit);
        }
        const auto values =
            reinterpret_cast<Floats>(_mm512_insertf32x8(_mm512_castps256_ps512(halves[0]), halves[1], 1));
        finish(y, k, places, kept ? memory.kept[k] + values : values);
    }
}

template <int B, int EACH>
void gemm_rows(const CodebookByRow& c, const WholeInputs& in, const Outputs& y, int64_t begin, int64_t end) {
    auto& memory = *static_cast<Memory<EACH>*>(thread_memory(sizeof(Memory<EACH>)));
    Held held(y, in.tokens, begin * LANES, memory.held);
    for (int64_t block = begin; block < end; block += GEMM_BLOCKS) {
        const int64_t blocks = least(GEMM_BLOCKS, end - block);
        for (int64_t b = 0; b < blocks_of(c); ++b) {
            decode_block<B, EACH>(c, block * LANES, blocks, b, memory);
            if (blocks == GEMM_BLOCKS) multiply_block<GEMM_BLOCKS>(c, in, b, memory);
            else multiply_block<1>(c, in, b, memory);
        }
        for (int64_t r = 0; r < blocks; ++r)
            finish_block<EACH>(c, in, held.outputs(), held.first(), block + r, r * LANES, memory);
        held.write_if_full(least((block + blocks) * LANES, c.rows), least(end - block - blocks, GEMM_BLOCKS) * LANES);
    }
}

void gemm_whole(const CodebookByRow& c, const WholeInputs& in, const Outputs& y, int64_t begin, int64_t end) {
    by_entries(c, [&](auto bits, auto each) { gemm_rows<bits.value, each.value>(c, in, y, begin, end); });
}

} // namespace

void add_codebook_by_row_lanes(MatmulOps& ops) {
    WholeOps& own = ops.codebook_by_row.whole;
    own.least = LEAST_TOKENS;
    own.most_columns = MOST_COLUMNS;
    own.bytes = input_bytes;
    own.beside = 1;
    own.prepare_many = prepare_many;
    own.gemm = gemm_whole;
}

} // namespace anybit::ANYBIT_ISA
