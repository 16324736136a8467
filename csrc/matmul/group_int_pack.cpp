// Format "group int": into the kernels' order and back, and dequantization.
#include "matmul/group_int.h"
#include "matmul/ops.h"
#include "matmul/unroll.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int64_t CHUNK = 512; // columns of all lanes that are decoded to bytes at a time

// ---- stored rows: codes of 2, 4 and 8 bits side by side, others in bitplanes ------------------------------

bool is_packed(int bits) { return bits == 2 || bits == 4 || bits == 8; }

// Byte t of the result is bit t of `byte`.
uint64_t spread_bits(uint8_t byte) {
    const uint64_t picked = byte * 0x0101010101010101u & 0x8040201008040201u; // bit t left standing in byte t
    return (picked + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
}

// Codes of a whole row; room for `columns` rounded up to a multiple of 8.
void unpack_row(const GroupInt& t, const GroupInt::Stored& from, int64_t row, uint8_t* codes) {
    const uint8_t* bytes = from.codes + row * from.row_bytes;
    const int64_t n = ceil_div(t.columns * (is_packed(t.bits) ? t.bits : 1), 8);
    if (t.bits == 8) __builtin_memcpy(codes, bytes, static_cast<size_t>(n));
    else if (is_packed(t.bits)) {
        const int per_byte = 8 / t.bits, mask = (1 << t.bits) - 1;
        for (int64_t i = 0; i < n; ++i)
            for (int k = 0; k < per_byte; ++k) codes[i * per_byte + k] = bytes[i] >> (k * t.bits) & mask;
    } else
        for (int64_t i = 0; i < n; ++i) {
            uint64_t eight = 0;
            for (int p = 0; p < t.bits; ++p) eight = eight << 1 | spread_bits(bytes[p * t.rows * from.row_bytes + i]);
            __builtin_memcpy(codes + i * 8, &eight, 8);
        }
}

// The inverse; codes beyond the columns are 0.
void pack_row(const GroupInt& t, const uint8_t* codes, int64_t row, int64_t row_bytes, uint8_t* to) {
    uint8_t* bytes = to + row * row_bytes;
    const int64_t n = ceil_div(t.columns * (is_packed(t.bits) ? t.bits : 1), 8);
    if (t.bits == 8) __builtin_memcpy(bytes, codes, static_cast<size_t>(n));
    else if (is_packed(t.bits)) {
        const int per_byte = 8 / t.bits;
        for (int64_t i = 0; i < n; ++i) {
            int byte = 0;
            for (int k = 0; k < per_byte; ++k) byte |= codes[i * per_byte + k] << (k * t.bits);
            bytes[i] = static_cast<uint8_t>(byte);
        }
    } else
        for (int p = 0; p < t.bits; ++p)
            for (int64_t i = 0; i < n; ++i) {
                int byte = 0;
                for (int k = 0; k < 8; ++k) byte |= (codes[i * 8 + k] >> (t.bits - 1 - p) & 1) << k;
                bytes[p * t.rows * row_bytes + i] = static_cast<uint8_t>(byte);
            }
}

template <int BITS> void interleave_block(const GroupInt& t, const uint8_t* rows, int64_t stride, int64_t block,
                                          uint8_t* codes) {
    constexpr int64_t COLUMNS = cell_columns(BITS), SIZE = cell_vectors(BITS) * BYTES;
    const int64_t cells = cells_of(t);
    uint8_t* cell = codes + block * t.groups * cells * SIZE;
    for (int64_t g = 0; g < t.groups; ++g)
        for (int64_t c = 0; c < cells; ++c, cell += SIZE) {
            const int64_t begin = g * t.group_size + c * COLUMNS;
            const int64_t left = least(t.columns - begin, t.group_size - c * COLUMNS);
            for (int64_t l = 0; l < LANES; ++l) {
                uint8_t own[COLUMNS] = {};
                if (left > 0)
                    __builtin_memcpy(own, rows + l * stride + begin, static_cast<size_t>(least(left, COLUMNS)));
                put_cell<BITS>(own, cell + 4 * l);
            }
        }
}

// Codes of the cells `first` to `first + n` of a group: lane l's at out[l * CHUNK].
template <int BITS>
void decode_cells(const GroupInt& t, int64_t block, int64_t g, int64_t first, int64_t n, uint8_t* out) {
    constexpr int64_t COLUMNS = cell_columns(BITS);
    const uint8_t* cell = t.codes + (block * t.groups + g) * group_bytes(t) + first * cell_vectors(BITS) * BYTES;
    for (int64_t c = 0; c < n; ++c, cell += cell_vectors(BITS) * BYTES) {
        Codes code[COLUMNS / 4];
        cell_codes<BITS>(cell, code);
        for (int64_t s = 0; s < COLUMNS / 4; ++s)
            for (int64_t l = 0; l < LANES; ++l)
                __builtin_memcpy(out + l * CHUNK + c * COLUMNS + 4 * s,
                                 reinterpret_cast<const uint8_t*>(code + s) + 4 * l, 4);
    }
}

// `use(lane codes, group, first column of the chunk, columns)` for all columns of a block of rows.
template <int BITS, typename F> void for_codes(const GroupInt& t, int64_t block, F&& use) {
    constexpr int64_t COLUMNS = cell_columns(BITS), STEP = CHUNK / COLUMNS;
    uint8_t codes[LANES * CHUNK];
    for (int64_t g = 0; g < t.groups; ++g) {
        const int64_t begin = g * t.group_size, count = least(t.columns - begin, t.group_size);
        for (int64_t c = 0; c * COLUMNS < count; c += STEP) {
            decode_cells<BITS>(t, block, g, c, least(STEP, ceil_div(count, COLUMNS) - c), codes);
            use(codes, g, begin + c * COLUMNS, least(count - c * COLUMNS, CHUNK));
        }
    }
}

// ---- dequantization ----------------------------------------------------------------------------------------

// Weights of one lane's codes.
void to_weights(const uint8_t* codes, int zero, float scale, int64_t count, float* out) {
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) store(out + j, to_float(load_bytes(codes + j) - zero) * scale);
    for (; j < count; ++j) out[j] = static_cast<float>(codes[j] - zero) * scale;
}

void store_weights(const uint8_t* codes, int zero, float scale, int64_t count, float* out) {
    to_weights(codes, zero, scale, count, out);
}

void store_weights(const uint8_t* codes, int zero, float scale, int64_t count, uint16_t* out) {
    float w[CHUNK];
    to_weights(codes, zero, scale, count, w);
    for (int64_t j = 0; j < count; ++j) out[j] = to_bf16(w[j]);
}

int zero_of(const GroupInt& t, int64_t block, int64_t g, int64_t lane) {
    return t.zeros == nullptr ? 1 << (t.bits - 1) : t.zeros[(block * t.groups + g) * LANES + lane];
}

// Rows begin_row <= i < end_row of a block, at out + (i - first) * columns.
template <int BITS, typename T>
void dequantize_rows(const GroupInt& t, int64_t block, int64_t begin, int64_t end, T* out) {
    for_codes<BITS>(t, block, [&](const uint8_t* codes, int64_t g, int64_t column, int64_t count) {
        for (int64_t l = begin; l < end; ++l) {
            const float scale = half_to_float(t.scales[(block * t.groups + g) * LANES + l]);
            store_weights(codes + l * CHUNK, zero_of(t, block, g, l), scale, count,
                          out + (l - begin) * t.columns + column);
        }
    });
}

template <typename T> void dequantize_lanes(const GroupInt& t, int64_t block, int64_t begin, int64_t end, T* out) {
    by_width(t.bits, [&](auto bits) { dequantize_rows<bits.value>(t, block, begin, end, out); });
}

template <int BITS> void restore_block(const GroupInt& t, int64_t block, uint8_t* rows, int64_t stride) {
    for_codes<BITS>(t, block, [&](const uint8_t* codes, int64_t, int64_t column, int64_t count) {
        for (int64_t l = 0; l < LANES; ++l)
            __builtin_memcpy(rows + l * stride + column, codes + l * CHUNK, static_cast<size_t>(count));
    });
}

template <typename T> void dequantize(const GroupInt& t, T* out, int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
        dequantize_lanes(t, block, 0, least(LANES, t.rows - block * LANES), out + block * LANES * t.columns);
}

void dequantize_row(const GroupInt& t, int64_t row, float* out) {
    dequantize_lanes(t, row / LANES, row % LANES, row % LANES + 1, out);
}

// ---- all of it ----------------------------------------------------------------------------------------------------

int64_t row_room(const GroupInt& t) { return ceil_div(t.columns, 8) * 8; }

int64_t bytes(const GroupInt& t) { return ceil_div(t.rows, LANES) * t.groups * group_bytes(t); }

int64_t scratch_bytes(const GroupInt& t) { return LANES * row_room(t); }

int64_t columns(const GroupInt& t) { return t.groups * cells_of(t) * cell_columns(t.bits); }

void interleave(const GroupInt& t, const GroupInt::Stored& from, const GroupInt::Packed& to, uint8_t* scratch,
                int64_t begin, int64_t end) {
    const int64_t room = row_room(t);
    for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * LANES, lanes = least(LANES, t.rows - first);
        for (int64_t l = 0; l < LANES; ++l) {
            if (l < lanes) unpack_row(t, from, first + l, scratch + l * room);
            else __builtin_memset(scratch + l * room, 0, static_cast<size_t>(room));
            for (int64_t g = 0; g < t.groups; ++g) {
                const int64_t own = (block * t.groups + g) * LANES + l, at = (first + l) * t.groups + g;
                to.scales[own] = l < lanes ? from.scales[at] : uint16_t(0);
                if (to.zeros != nullptr) to.zeros[own] = l < lanes ? from.zeros[at] : uint8_t(0);
            }
        }
        by_width(t.bits, [&](auto bits) { interleave_block<bits.value>(t, scratch, room, block, to.codes); });
    }
}

void restore(const GroupInt& t, const GroupInt::Restored& to, uint8_t* scratch, int64_t begin, int64_t end) {
    const int64_t room = row_room(t);
    for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * LANES;
        __builtin_memset(scratch, 0, static_cast<size_t>(LANES * room));
        by_width(t.bits, [&](auto bits) { restore_block<bits.value>(t, block, scratch, room); });
        for (int64_t l = 0; l < least(LANES, t.rows - first); ++l) {
            pack_row(t, scratch + l * room, first + l, to.row_bytes, to.codes);
            for (int64_t g = 0; g < t.groups; ++g) {
                const int64_t from = (block * t.groups + g) * LANES + l, at = (first + l) * t.groups + g;
                to.scales[at] = t.scales[from];
                if (to.zeros != nullptr) to.zeros[at] = t.zeros[from];
            }
        }
    }
}

} // namespace

void add_group_int_pack(MatmulOps& ops) {
    GroupIntOps& own = ops.group_int;
    own.columns = columns;
    own.bytes = bytes;
    own.scratch = scratch_bytes;
    own.interleave = interleave;
    own.restore = restore;
    own.dequantize = dequantize<float>;
    own.dequantize_bf16 = dequantize<uint16_t>;
    own.dequantize_row = dequantize_row;
}

} // namespace anybit::ANYBIT_ISA
