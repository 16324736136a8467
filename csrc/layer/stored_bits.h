// Codes of 1 to 8 bits as files hold them (src/anybit/formats/bits.py), a byte each, and back.
#pragma once

#include <cstdint>

namespace anybit {

// Widths whose codes lie beside each other, low bits first; all others are bitplanes, most significant first.
constexpr bool is_packed(int bits) { return bits == 2 || bits == 4 || bits == 8; }

constexpr int64_t packed_bytes(int64_t columns, int bits) { return (columns * bits + 7) / 8; }

// rows of codes of a width that divides 8 -> [rows, columns]; a row takes `row_bytes`, or the least number.
inline void unpack_bits(const uint8_t* from, int bits, int64_t rows, int64_t columns, uint8_t* to,
                        int64_t row_bytes = 0) {
    const int64_t stride = row_bytes != 0 ? row_bytes : packed_bytes(columns, bits), per_byte = 8 / bits;
    for (int64_t i = 0; i < rows; ++i, from += stride)
        for (int64_t j = 0; j < columns; ++j)
            *to++ = static_cast<uint8_t>(from[j / per_byte] >> j % per_byte * bits & ((1 << bits) - 1));
}

// And back, into zeros.
inline void pack_bits(const uint8_t* from, int bits, int64_t rows, int64_t columns, uint8_t* to,
                      int64_t row_bytes = 0) {
    const int64_t stride = row_bytes != 0 ? row_bytes : packed_bytes(columns, bits), per_byte = 8 / bits;
    for (int64_t i = 0; i < rows; ++i, to += stride)
        for (int64_t j = 0; j < columns; ++j)
            to[j / per_byte] = static_cast<uint8_t>(to[j / per_byte] | *from++ << j % per_byte * bits);
}

// The same of any width from 1 to 8: packed, or planes [bits, rows, bytes].
inline void unpack_codes(const uint8_t* from, int bits, int64_t rows, int64_t columns, uint8_t* to) {
    if (is_packed(bits)) return unpack_bits(from, bits, rows, columns, to);
    const int64_t row_bytes = packed_bytes(columns, 1);
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) {
            int code = 0;
            for (int p = 0; p < bits; ++p) code = code << 1 | (from[(p * rows + i) * row_bytes + j / 8] >> j % 8 & 1);
            *to++ = static_cast<uint8_t>(code);
        }
}

// Into zeros.
inline void pack_codes(const uint8_t* from, int bits, int64_t rows, int64_t columns, uint8_t* to) {
    if (is_packed(bits)) return pack_bits(from, bits, rows, columns, to);
    const int64_t row_bytes = packed_bytes(columns, 1);
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j, ++from)
            for (int p = 0; p < bits; ++p) {
                uint8_t& byte = to[(p * rows + i) * row_bytes + j / 8];
                byte = static_cast<uint8_t>(byte | (*from >> (bits - 1 - p) & 1) << j % 8);
            }
}

} // namespace anybit
