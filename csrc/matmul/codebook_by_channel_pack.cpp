// Format "codebook" by input channel: into the kernels' order and back, and dequantization.
#include "matmul/codebook_by_channel.h"
#include "matmul/ops.h"
#include "matmul/unroll.h"

namespace anybit::ANYBIT_ISA {
namespace {

template <int BITS> inline float entry_of(const CodebookByChannel& t, int64_t channel, uint8_t code) {
    const int64_t at = channel * CodebookByChannel::entries(BITS) + code;
    return BITS <= CodebookByChannel::FLOAT_BITS ? t.table[at] : half_to_float(t.halves[at]);
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

int64_t bytes(const CodebookByChannel& t) { return ceil_div(t.rows, LANES) * block_bytes(t); }

#ifdef ANYBIT_LOOKS_UP_HALVES
int64_t table_planes_bytes(const CodebookByChannel& t) {
    if (t.bits < 4 || t.bits > CodebookByChannel::FLOAT_BITS) return 0;
    const int64_t entries = columns_of(t) * CodebookByChannel::entries(t.bits);
    for (int64_t e = 0; e < entries; ++e)
        if (!is_half(t.table[e])) return 0;
    return 2 * entries;
}

void table_planes(const CodebookByChannel& t, uint8_t* planes) {
    const int64_t entries = columns_of(t) * CodebookByChannel::entries(t.bits);
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

void dequantize(const CodebookByChannel& t, float* out, int64_t begin, int64_t end) {
    by_width(t.bits, [&](auto bits) { dequantize_bits<bits.value>(t, out, begin, end); });
}

} // namespace

void add_codebook_by_channel_pack(MatmulOps& ops) {
    CodebookByChannelOps& own = ops.codebook_by_channel;
    own.columns = columns_of;
    own.dequantize = dequantize;
    own.bytes = bytes;
    own.interleave = interleave;
    own.restore = restore;
    own.table_planes_bytes = table_planes_bytes;
    own.table_planes = table_planes;
}

} // namespace anybit::ANYBIT_ISA
