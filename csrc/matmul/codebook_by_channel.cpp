// Format "codebook" by input channel: lanes are output rows, laid out as codes of format "group int" (group_int.h)
// with the channels as columns. A channel's table of few bits fits a few registers, its weights for all lanes
// are permutations of them; of more bits, they are gathered. One multiply-add with the channel's input follows.
// AVX2 permutes bytes faster than floats: there four blocks of rows are looked up at once, as the two bytes of float16.
#include "matmul/gemm.h"
#include "matmul/group_int.h"
#include "matmul/codebook_tables.h"
#include "matmul/unroll.h"

namespace anybit::ANYBIT_ISA {
namespace {

int64_t cells_of(const CodebookByChannel& t) { return ceil_div(t.columns, cell_columns(t.bits)); }
int64_t block_bytes(const CodebookByChannel& t) { return cells_of(t) * cell_vectors(t.bits) * BYTES; }

#if defined(__AVX512F__)
constexpr int MOST_PERMUTED = 6; // bits
#elif defined(__AVX2__)
#define ANYBIT_LOOKS_UP_HALVES
constexpr int MOST_PERMUTED = 4; // four permutations and three choices take longer than gathering
#endif

#if defined(__AVX2__)
// A channel's table, ready to look up by the low bits of every lane: registers of it are permuted, one or two at a
// time, and the bits above choose among what they give.
template <int BITS> struct PermutedTable {
    static constexpr int PARTS = 1 << BITS <= LANES ? 1 : (1 << BITS) / LANES;
    Floats part[PARTS];

    explicit PermutedTable(const float* from) {
        for (int i = 0; i < PARTS; ++i) part[i] = load(from + i * LANES);
    }

    Floats operator()(Ints code) const {
#if defined(__AVX512F__)
        const auto index = reinterpret_cast<__m512i>(code);
        if constexpr (PARTS == 1) return _mm512_permutexvar_ps(index, part[0]);
        else {
            Floats found[PARTS / 2];
            for (int i = 0; i < PARTS / 2; ++i) found[i] = _mm512_permutex2var_ps(part[2 * i], index, part[2 * i + 1]);
            return chosen<5>(found, code);
        }
#else
        Floats found[PARTS];
        for (int i = 0; i < PARTS; ++i) found[i] = _mm256_permutevar8x32_ps(part[i], reinterpret_cast<__m256i>(code));
        return chosen<3>(found, code);
#endif
    }

private:
    // One of N, by the bits from BIT on.
    template <int BIT, int N> static Floats chosen(const Floats (&found)[N], Ints code) {
        if constexpr (N == 1) return found[0];
        else {
            Floats left[N / 2];
#if defined(__AVX512F__)
            const __mmask16 set = _mm512_test_epi32_mask(reinterpret_cast<__m512i>(code), _mm512_set1_epi32(1 << BIT));
            for (int i = 0; i < N / 2; ++i) left[i] = _mm512_mask_blend_ps(set, found[2 * i], found[2 * i + 1]);
#else
            const auto set = reinterpret_cast<Floats>(code << (31 - BIT)); // in the sign
            for (int i = 0; i < N / 2; ++i) left[i] = _mm256_blendv_ps(found[2 * i], found[2 * i + 1], set);
#endif
            return chosen<BIT + 1>(left, code);
        }
    }
};
#endif

// One whose entries are read one by one.
template <int BITS> struct ReadTable {
    const float* from;

    explicit ReadTable(const float* table) : from(table) {}

    Floats operator()(Ints code) const {
        const Ints index = code & ((1 << BITS) - 1);
#if defined(__AVX2__) && !defined(__AVX512F__)
        return _mm256_i32gather_ps(from, reinterpret_cast<__m256i>(index), 4);
#else
        Floats values;
        for (int l = 0; l < LANES; ++l) values[l] = from[index[l]];
        return values;
#endif
    }
};

// The same of float16; two more bytes behind it may be read.
template <int BITS> struct ReadHalves {
    const uint16_t* from;

    explicit ReadHalves(const uint16_t* table) : from(table) {}

    Floats operator()(Ints code) const {
        const Ints index = code & ((1 << BITS) - 1);
#if defined(__AVX512F__)
        const __m512i found = _mm512_i32gather_epi32(reinterpret_cast<__m512i>(index), from, 2);
        return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(found));
#elif defined(__AVX2__)
        const auto* words = reinterpret_cast<const int*>(from);
        const auto found = reinterpret_cast<Ints>(_mm256_i32gather_epi32(words, reinterpret_cast<__m256i>(index), 2));
        const auto low = reinterpret_cast<__m256i>(found & 0xffff);
        return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
#else
        Floats values;
        for (int l = 0; l < LANES; ++l) values[l] = half_to_float(from[index[l]]);
        return values;
#endif
    }
};

template <int BITS> inline auto table_of(const CodebookByChannel& t, int64_t channel) {
    const int64_t at = channel * CodebookByChannel::entries(BITS);
#if defined(__AVX2__)
    if constexpr (BITS <= MOST_PERMUTED) return PermutedTable<BITS>(t.table + at);
    else
#endif
        if constexpr (BITS <= CodebookByChannel::FLOAT_BITS)
        return ReadTable<BITS>(t.table + at);
    else return ReadHalves<BITS>(t.halves + at);
}

template <int BITS> inline float entry_of(const CodebookByChannel& t, int64_t channel, uint8_t code) {
    const int64_t at = channel * CodebookByChannel::entries(BITS) + code;
    return BITS <= CodebookByChannel::FLOAT_BITS ? t.table[at] : half_to_float(t.halves[at]);
}

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

template <int BITS>
void interleave_bits(const CodebookByChannel& t, const uint32_t* planes, uint8_t* bytes, int64_t begin, int64_t end) {
    constexpr int64_t COLUMNS = cell_columns(BITS), SIZE = cell_vectors(BITS) * BYTES;
    const int64_t words = ceil_div(t.rows, 32);
    for (int64_t block = begin; block < end; ++block)
        for (int64_t c = 0; c < cells_of(t); ++c) {
            uint8_t codes[LANES][COLUMNS] = {};
            const int64_t first = block * LANES; // LANES divides 32: a block lies in one word
            for (int64_t j = 0; j < least(COLUMNS, t.columns - c * COLUMNS); ++j)
                for (int p = 0; p < BITS; ++p) {
                    const uint32_t word = planes[(p * t.columns + c * COLUMNS + j) * words + first / 32] >> first % 32;
                    for (int64_t l = 0; l < LANES; ++l)
                        codes[l][j] = static_cast<uint8_t>(codes[l][j] << 1 | (word >> l & 1));
                }
            for (int64_t l = 0; l < LANES; ++l)
                put_cell<BITS>(codes[l], bytes + block * block_bytes(t) + c * SIZE + 4 * l);
        }
}

// Codes of a cell, lane by lane.
template <int BITS> void decode(const CodebookByChannel& t, int64_t block, int64_t c, uint8_t (&out)[LANES][32]) {
    constexpr int64_t COLUMNS = cell_columns(BITS);
    Codes code[COLUMNS / 4];
    cell_codes<BITS>(t.bytes + block * block_bytes(t) + c * cell_vectors(BITS) * BYTES, code);
    for (int64_t s = 0; s < COLUMNS / 4; ++s)
        for (int64_t l = 0; l < LANES; ++l)
            __builtin_memcpy(out[l] + 4 * s, reinterpret_cast<const uint8_t*>(code + s) + 4 * l, 4);
}

template <int BITS> void restore_bits(const CodebookByChannel& t, uint32_t* planes, int64_t begin, int64_t end) {
    constexpr int64_t COLUMNS = cell_columns(BITS);
    const int64_t words = ceil_div(t.rows, 32);
    for (int64_t block = begin; block < end; ++block)
        for (int64_t c = 0; c < cells_of(t); ++c) {
            uint8_t codes[LANES][32];
            decode<BITS>(t, block, c, codes);
            const int64_t first = block * LANES;
            for (int64_t j = 0; j < least(COLUMNS, t.columns - c * COLUMNS); ++j)
                for (int p = 0; p < BITS; ++p) {
                    uint32_t bits = 0;
                    for (int64_t l = 0; l < least(LANES, t.rows - first); ++l)
                        bits |= static_cast<uint32_t>(codes[l][j] >> (BITS - 1 - p) & 1) << (first % 32 + l);
                    planes[(p * t.columns + c * COLUMNS + j) * words + first / 32] |= bits;
                }
        }
}

template <int BITS> void dequantize_bits(const CodebookByChannel& t, float* out, int64_t begin, int64_t end) {
    constexpr int64_t COLUMNS = cell_columns(BITS);
    for (int64_t block = begin; block < end; ++block)
        for (int64_t c = 0; c < cells_of(t); ++c) {
            uint8_t codes[LANES][32];
            decode<BITS>(t, block, c, codes);
            for (int64_t l = 0; l < least(LANES, t.rows - block * LANES); ++l)
                for (int64_t j = 0; j < least(COLUMNS, t.columns - c * COLUMNS); ++j)
                    out[(block * LANES + l) * t.columns + c * COLUMNS + j] =
                        entry_of<BITS>(t, c * COLUMNS + j, codes[l][j]);
        }
}

template <int BITS> int64_t decode_cells(const CodebookByChannel& t, int64_t block, int64_t column, Floats* panel) {
    constexpr int64_t COLUMNS = cell_columns(BITS), SIZE = cell_vectors(BITS) * BYTES;
    const int64_t begin = column / COLUMNS, end = least(cells_of(t), begin + PANEL / COLUMNS);
    for (int64_t c = begin; c < end; ++c, panel += COLUMNS) {
        Codes code[COLUMNS / 4];
        cell_codes<BITS>(t.bytes + block * block_bytes(t) + c * SIZE, code);
        for (int s = 0; s < COLUMNS / 4; ++s)
            for (int b = 0; b < 4; ++b) {
                const auto table = table_of<BITS>(t, c * COLUMNS + 4 * s + b);
                panel[4 * s + b] = table(reinterpret_cast<Ints>(code[s]) >> 8 * b);
            }
    }
    return (end - begin) * COLUMNS;
}

int64_t decode_panel(const CodebookByChannel& t, int64_t block, int64_t column, Floats* panel) {
    return by_width(t.bits, [&](auto bits) { return decode_cells<bits.value>(t, block, column, panel); });
}

int64_t bytes(const CodebookByChannel& t) { return ceil_div(t.rows, LANES) * block_bytes(t); }

int64_t columns(const CodebookByChannel& t) { return cells_of(t) * cell_columns(t.bits); }

#ifdef ANYBIT_LOOKS_UP_HALVES
int64_t table_planes_bytes(const CodebookByChannel& t) {
    if (t.bits < 4 || t.bits > CodebookByChannel::FLOAT_BITS) return 0;
    const int64_t entries = columns(t) * CodebookByChannel::entries(t.bits);
    for (int64_t e = 0; e < entries; ++e)
        if (!is_half(t.table[e])) return 0;
    return 2 * entries;
}

void table_planes(const CodebookByChannel& t, uint8_t* planes) {
    const int64_t entries = columns(t) * CodebookByChannel::entries(t.bits);
    for (int64_t e = 0; e < entries; ++e) {
        int half = to_half(t.table[e]);
        if (e % CodebookByChannel::entries(t.bits) >= 16) half ^= to_half(t.table[e - 16]);
        for (int64_t k = 0; k < 2; ++k) planes[e / 16 * 32 + 16 * k + e % 16] = static_cast<uint8_t>(half >> 8 * k);
    }
}
#else
int64_t table_planes_bytes(const CodebookByChannel&) { return 0; }

void table_planes(const CodebookByChannel&, uint8_t*) {}
#endif

void interleave(const CodebookByChannel& t, const CodebookByChannel::Stored& from, const CodebookByChannel::Packed& to,
                uint8_t*, int64_t begin, int64_t end) {
    by_width(t.bits, [&](auto bits) { interleave_bits<bits.value>(t, from.planes, to.bytes, begin, end); });
}

void restore(const CodebookByChannel& t, const CodebookByChannel::Restored& to, uint8_t*, int64_t begin, int64_t end) {
    by_width(t.bits, [&](auto bits) { restore_bits<bits.value>(t, to.planes, begin, end); });
}

void gemv(const CodebookByChannel& t, const Inputs<float>& in, float* y, int64_t y_stride, int64_t begin, int64_t end) {
    by_width(t.bits, [&](auto bits) { gemv_bits<bits.value>(t, in, y, y_stride, begin, end); });
}

template <typename X>
void gemm(const CodebookByChannel& t, const Inputs<X>& in, const Outputs& y, int64_t begin, int64_t end) {
    gemm(t, decode_panel, columns(t), in, y, begin, end);
}

void dequantize(const CodebookByChannel& t, float* out, int64_t begin, int64_t end) {
    by_width(t.bits, [&](auto bits) { dequantize_bits<bits.value>(t, out, begin, end); });
}

} // namespace

void add_codebook_by_channel(MatmulOps& ops) {
    CodebookByChannelOps& own = ops.codebook_by_channel;
    own.columns = columns;
    own.f32 = {nullptr, gemv, gemm<float>};
#ifdef __AVX512BF16__
    own.bf16.gemm = gemm<uint16_t>;
#endif
    own.dequantize = dequantize;
    own.bytes = bytes;
    own.interleave = interleave;
    own.restore = restore;
    own.table_planes_bytes = table_planes_bytes;
    own.table_planes = table_planes;
}

} // namespace anybit::ANYBIT_ISA
