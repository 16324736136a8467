// Tiles of format "group int" as the kernels read them: the lanes of a vector are rows.
//
// LANES rows lie together. In each of their groups of columns, cells of `cell_columns` columns follow each other; a
// cell is `bits * cell_columns / 32` vectors of 4 * LANES bytes, of which lane l belongs to row l:
//   8 bits: byte k of vector s is the code of column 4 s + k;
//   else a code is cut into fields of 4, 2 and 1 bits (the low bits first: 5 = 4 + 1, 6 = 4 + 2), each field in vectors
//   of its own: bits 4 h.. of byte k of the nth vector of 4-bit fields are those of column 8 n + 4 h + k, and likewise
//   with 16 columns to a vector of 2-bit fields and 32 to one of single bits.
// So four columns of all rows come out of a few shifts and masks, one broadcast of four inputs meets them, and a row's
// sum stays in its lane. Groups are padded to whole cells, rows to whole lanes; padding codes meet inputs of 0 or rows
// that nobody writes.
#pragma once

#include "common/dot_int8.h"
#include "matmul/formats.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int64_t cell_columns(int bits) { return bits < 8 && bits % 2 == 1 ? 32 : 16; }
constexpr int64_t cell_vectors(int bits) { return bits * cell_columns(bits) / 32; }

inline int64_t cells_of(const GroupInt& t) { return ceil_div(least(t.group_size, t.columns), cell_columns(t.bits)); }
inline int64_t group_bytes(const GroupInt& t) { return cells_of(t) * cell_vectors(t.bits) * BYTES; }

// Shift the halves of 4-byte lanes: bits that cross into the neighbouring byte are masked by whoever shifts.
typedef uint16_t Pairs __attribute__((vector_size(BYTES)));

template <int N> inline Codes shifted(Codes v) { // left by N, or right by -N
    if constexpr (N > 0) return reinterpret_cast<Codes>(reinterpret_cast<Pairs>(v) << N);
    else if constexpr (N < 0) return reinterpret_cast<Codes>(reinterpret_cast<Pairs>(v) >> -N);
    else return v;
}

// The codes of a cell's columns 4 S to 4 S + 3.
template <int BITS, int S> inline Codes codes_at(const Codes (&v)[cell_vectors(BITS)]) {
    constexpr int FOURS = BITS & 4 ? static_cast<int>(cell_columns(BITS)) / 8 : 0;
    constexpr int TWOS = BITS & 2 ? static_cast<int>(cell_columns(BITS)) / 16 : 0;
    constexpr int TWO_AT = BITS & 4, ONE_AT = BITS & 6; // where the fields begin in a code
    if constexpr (BITS == 8) return v[S];
    Codes code{};
    if constexpr (FOURS > 0) code = shifted<-4 * (S % 2)>(v[S / 2]) & fill(15);
    if constexpr (TWOS > 0) code |= shifted<TWO_AT - 2 * (S % 4)>(v[FOURS + S / 4]) & fill(3 << TWO_AT);
    if constexpr (BITS % 2 == 1) code |= shifted<ONE_AT - S>(v[FOURS + TWOS]) & fill(1 << ONE_AT);
    return code;
}

template <int... I> struct Numbers {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> {
    using type = Numbers<I...>;
};

template <int BITS, int... S>
inline void cell_codes(const Codes (&v)[cell_vectors(BITS)], Codes (&code)[sizeof...(S)], Numbers<S...>) {
    ((code[S] = codes_at<BITS, S>(v)), ...);
}

template <int BITS>
inline void cell_codes(const Codes (&v)[cell_vectors(BITS)], Codes (&code)[cell_columns(BITS) / 4]) {
    cell_codes<BITS>(v, code, typename Count<static_cast<int>(cell_columns(BITS) / 4)>::type{});
}

// All codes of the cell at `from`, four columns to a vector.
template <int BITS> inline void cell_codes(const uint8_t* from, Codes (&code)[cell_columns(BITS) / 4]) {
    Codes v[cell_vectors(BITS)];
    for (int64_t i = 0; i < cell_vectors(BITS); ++i) {
        prefetch(from + i * BYTES);
        v[i] = load_as<Codes>(from + i * BYTES);
    }
    cell_codes<BITS>(v, code);
}

// The codes of a row into lane 0 of the cell at `cell`: another lane's cell begins 4 bytes on.
constexpr uint32_t FOUR_BYTES = 0x01010101u;

template <int BITS> inline void put_cell(const uint8_t* codes, uint8_t* cell) {
    constexpr int COLUMNS = static_cast<int>(cell_columns(BITS)), VECTORS = static_cast<int>(cell_vectors(BITS));
    constexpr int FOURS = BITS < 8 && (BITS & 4) ? COLUMNS / 8 : 0, TWOS = BITS & 2 ? COLUMNS / 16 : 0;
    uint32_t word[VECTORS] = {};
    for (int s = 0; s < COLUMNS / 4; ++s) {
        const auto four = load_as<uint32_t>(codes + 4 * s);
        if (BITS == 8) word[s] = four;
        if (FOURS > 0) word[s / 2] |= (four & 15 * FOUR_BYTES) << 4 * (s % 2);
        if (TWOS > 0) word[FOURS + s / 4] |= (four >> (BITS & 4) & 3 * FOUR_BYTES) << 2 * (s % 4);
        if (BITS % 2 == 1) word[FOURS + TWOS] |= (four >> (BITS & 6) & FOUR_BYTES) << s;
    }
    for (int v = 0; v < VECTORS; ++v) __builtin_memcpy(cell + v * BYTES, word + v, 4);
}

// Scales and zero points come in streams of their own, a few bytes a group, which hardware is too slow to follow.
constexpr int64_t GROUPS_AHEAD = 8;

// The scales of LANES rows in a group.
inline Floats load_scales(const GroupInt& t, int64_t block, int64_t g) {
    const uint16_t* from = t.scales + (block * t.groups + g) * LANES;
    __builtin_prefetch(from + GROUPS_AHEAD * LANES);
    return load_halves(from);
}

// The zero points of LANES rows in a group.
inline Ints load_zeros(const GroupInt& t, int64_t block, int64_t g) {
    if (t.zeros == nullptr) return (1 << (t.bits - 1)) - Ints{};
    const uint8_t* from = t.zeros + (block * t.groups + g) * LANES;
    __builtin_prefetch(from + GROUPS_AHEAD * LANES);
    return load_bytes(from);
}

// y[out row] += a lane each, for the rows of a block.
inline void add_lanes(const GroupInt& t, int64_t block, Floats sums, float* y) {
    const int64_t first = block * LANES, rows = least(LANES, t.rows - first);
    if (t.out_rows == nullptr && rows == LANES) return store(y + first, load(y + first) + sums);
    for (int64_t l = 0; l < rows; ++l) y[t.out_rows == nullptr ? first + l : t.out_rows[first + l]] += sums[l];
}

} // namespace
} // namespace anybit::ANYBIT_ISA
