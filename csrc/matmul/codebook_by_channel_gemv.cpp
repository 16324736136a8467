// Format "codebook" by input channel times few tokens: gemv. One multiply-add with the channel's input follows a
// lookup. AVX2 permutes bytes faster than floats: there four blocks of rows are looked up at once, as the two bytes of
// float16.
#include "matmul/codebook_by_channel.h"
#include "matmul/codebook_tables.h"
#include "matmul/ops.h"
#include "matmul/unroll.h"

namespace anybit::ANYBIT_ISA {
namespace {

inline void add_rows(const CodebookByChannel& t, int64_t block, Floats sums, float* y) {
    const int64_t first = block * LANES, rows = least(LANES, t.rows - first);
    if (rows == LANES) return store(y + first, load(y + first) + sums);
    for (int64_t l = 0; l < rows; ++l) y[first + l] += sums[l];
}

// The cells `first` to `last` of R blocks of rows, and M tokens at once. A sum runs over the channels in order,
// whatever R and M are.
template <int BITS, int R, int M>
void gemv_blocks(const CodebookByChannel& t, const float* x, int64_t x_stride, float* y, int64_t y_stride,
                 int64_t block, int64_t first, int64_t last) {
    constexpr int64_t COLUMNS = cell_columns(BITS), SIZE = cell_vectors(BITS) * BYTES;
    const uint8_t* from = t.bytes + block * block_bytes(t);
    Floats sum[R][M] = {};
    for (int64_t c = first; c < last; ++c) {
        Codes code[R][COLUMNS / 4];
        for (int r = 0; r < R; ++r) cell_codes<BITS>(from + r * block_bytes(t) + c * SIZE, code[r]);
        for (int s = 0; s < COLUMNS / 4; ++s)
            for (int b = 0; b < 4; ++b) {
                const int64_t channel = c * COLUMNS + 4 * s + b;
                const auto table = table_of<BITS>(t, channel);
                for (int r = 0; r < R; ++r) {
                    const Floats w = table(reinterpret_cast<Ints>(code[r][s]) >> 8 * b);
                    for (int k = 0; k < M; ++k) sum[r][k] += w * broadcast(x[k * x_stride + channel]);
                }
            }
    }
    for (int r = 0; r < R; ++r)
        for (int k = 0; k < M; ++k) add_rows(t, block + r, sum[r][k], y + k * y_stride);
}

#ifdef ANYBIT_LOOKS_UP_HALVES
constexpr int64_t ROWS = 4 * LANES; // looked up at once: a byte each

// Vectors of four blocks, whose lanes are rows and hold a byte of each of four columns, become vectors of those
// columns. Lane l of block r is their byte l / 4 * 16 + 4 r + l % 4.
inline void by_column(Codes (&v)[4]) {
    const __m256i order = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, //
                                           0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m256i four[4];
    for (int r = 0; r < 4; ++r) four[r] = _mm256_shuffle_epi8(reinterpret_cast<__m256i>(v[r]), order);
    const __m256i low[2] = {_mm256_unpacklo_epi32(four[0], four[1]), _mm256_unpacklo_epi32(four[2], four[3])};
    const __m256i high[2] = {_mm256_unpackhi_epi32(four[0], four[1]), _mm256_unpackhi_epi32(four[2], four[3])};
    v[0] = reinterpret_cast<Codes>(_mm256_unpacklo_epi64(low[0], low[1]));
    v[1] = reinterpret_cast<Codes>(_mm256_unpackhi_epi64(low[0], low[1]));
    v[2] = reinterpret_cast<Codes>(_mm256_unpacklo_epi64(high[0], high[1]));
    v[3] = reinterpret_cast<Codes>(_mm256_unpackhi_epi64(high[0], high[1]));
}

// The weights [channels, ROWS] of a cell in four blocks, as float16; from its codes and planes.
template <int BITS>
inline void look_up_cell(const uint8_t* from, int64_t stride, const uint8_t* table, uint16_t* halves) {
    constexpr int COLUMNS = static_cast<int>(cell_columns(BITS)), VECTORS = static_cast<int>(cell_vectors(BITS));
    Codes v[4][VECTORS], code[COLUMNS];
    for (int i = 0; i < VECTORS; ++i, from += BYTES) {
        Codes four[4];
        for (int r = 0; r < 4; ++r) {
            prefetch(from + r * stride);
            four[r] = load_as<Codes>(from + r * stride);
        }
        by_column(four);
        for (int b = 0; b < 4; ++b) v[b][i] = four[b];
    }
    for (int b = 0; b < 4; ++b) {
        Codes every_fourth[COLUMNS / 4];
        cell_codes<BITS>(v[b], every_fourth);
        for (int s = 0; s < COLUMNS / 4; ++s) code[4 * s + b] = every_fourth[s];
    }
    for (int j = 0; j < COLUMNS; ++j) {
        Codes index = code[j], byte[2] = {}, made[2];
        for (int i = 0; i < 1 << (BITS - 4); ++i, table += 32) { // as Table does it
            for (int k = 0; k < 2; ++k) byte[k] ^= shuffle(repeat(load_as<__m128i>(table + 16 * k)), index);
            index = sixteen_down(index);
        }
        interleave<1>(byte[0], byte[1], made[0], made[1]);
        for (int i = 0; i < 2; ++i) __builtin_memcpy(halves + j * ROWS + i * ROWS / 2, made + i, BYTES);
    }
}

// sums += weights of so many channels times x, of M tokens.
template <int M>
inline void add_channels(const uint16_t* halves, int64_t channels, const float* x, int64_t x_stride, Floats* sums) {
    Floats sum[M][4];
    for (int k = 0; k < M; ++k)
        for (int r = 0; r < 4; ++r) sum[k][r] = sums[4 * k + r];
    for (int64_t j = 0; j < channels; ++j)
        for (int r = 0; r < 4; ++r) {
            const Floats w = load_halves(halves + j * ROWS + r * LANES); // converted as they are loaded: no shuffle
            for (int k = 0; k < M; ++k) sum[k][r] += w * broadcast(x[k * x_stride + j]);
        }
    for (int k = 0; k < M; ++k)
        for (int r = 0; r < 4; ++r) sums[4 * k + r] = sum[k][r];
}

constexpr int64_t MOST_TOKENS = 16; // that meet weights looked up once

// The same as gemv_blocks, of four blocks and so many tokens.
template <int BITS>
void gemv_halves(const CodebookByChannel& t, const float* x, int64_t x_stride, int64_t tokens, float* y,
                 int64_t y_stride, int64_t block, int64_t first, int64_t last) {
    constexpr int64_t COLUMNS = cell_columns(BITS), SIZE = cell_vectors(BITS) * BYTES;
    const int64_t stride = block_bytes(t);
    uint16_t halves[COLUMNS * ROWS];
    Floats sums[4 * MOST_TOKENS] = {};
    for (int64_t c = first; c < last; ++c) {
        look_up_cell<BITS>(t.bytes + block * stride + c * SIZE, stride,
                           t.planes + c * COLUMNS * 2 * CodebookByChannel::entries(BITS), halves);
        by_tokens<2>(tokens, [&](auto m, int64_t k) {
            add_channels<m.value>(halves, COLUMNS, x + k * x_stride + c * COLUMNS, x_stride, sums + 4 * k);
        });
    }
    for (int64_t k = 0; k < tokens; ++k)
        for (int r = 0; r < 4; r += 2) { // the first and the last rows of two blocks
            const auto a = reinterpret_cast<__m256>(sums[4 * k + r]), b = reinterpret_cast<__m256>(sums[4 * k + r + 1]);
            add_rows(t, block + r, reinterpret_cast<Floats>(_mm256_permute2f128_ps(a, b, 0x20)), y + k * y_stride);
            add_rows(t, block + r + 1, reinterpret_cast<Floats>(_mm256_permute2f128_ps(a, b, 0x31)), y + k * y_stride);
        }
}
#endif

constexpr int64_t TILE_BYTES = 256 << 10; // of tables that all rows meet before the next ones: they stay in the cache

template <int BITS>
void gemv_bits(const CodebookByChannel& t, const Inputs<float>& in, float* y, int64_t y_stride, int64_t begin,
               int64_t end) {
    constexpr int64_t ENTRY = BITS <= CodebookByChannel::FLOAT_BITS ? 4 : 2;
    constexpr int64_t TILE = TILE_BYTES / (ENTRY * CodebookByChannel::entries(BITS) * cell_columns(BITS)); // cells
    const int64_t cells = cells_of(t), stride = in.stride;
    for (int64_t first = 0; first < cells; first += TILE)
        for (int64_t block = begin; block < end;) {
            const int64_t blocks = end - block >= 4 ? 4 : 1, last = least(cells, first + TILE);
#ifdef ANYBIT_LOOKS_UP_HALVES
            if constexpr (BITS >= 4 && BITS <= CodebookByChannel::FLOAT_BITS)
                if (blocks == 4 && t.planes != nullptr) {
                    for (int64_t k = 0; k < in.tokens; k += MOST_TOKENS)
                        gemv_halves<BITS>(t, in.x + k * stride, stride, least(MOST_TOKENS, in.tokens - k),
                                          y + k * y_stride, y_stride, block, first, last);
                    block += blocks;
                    continue;
                }
#endif
            by_tokens<4>(in.tokens, [&](auto m, int64_t k) {
                constexpr int R = m.value == 4 ? 2 : 4; // eight sums fit the registers of every instruction set
                const float* from = in.x + k * stride;
                float* to = y + k * y_stride;
                if (blocks == 1) gemv_blocks<BITS, 1, m.value>(t, from, stride, to, y_stride, block, first, last);
                else
                    for (int64_t b = block; b < block + blocks; b += R)
                        gemv_blocks<BITS, R, m.value>(t, from, stride, to, y_stride, b, first, last);
            });
            block += blocks;
        }
}

void gemv(const CodebookByChannel& t, const Inputs<float>& in, float* y, int64_t y_stride, int64_t begin, int64_t end) {
    by_width(t.bits, [&](auto bits) { gemv_bits<bits.value>(t, in, y, y_stride, begin, end); });
}

} // namespace

void add_codebook_by_channel_gemv(MatmulOps& ops) { ops.codebook_by_channel.f32.gemv = gemv; }

} // namespace anybit::ANYBIT_ISA
