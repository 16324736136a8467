// Format "codebook" by rows: the codes of a row are looked up in its table (codebook_tables.h, codebook_tables_wide.h).
// The stored planes are read as they lie.
#pragma once

#include "matmul/codebook_tables_wide.h"
#include "matmul/formats.h"

namespace anybit::ANYBIT_ISA {
namespace {

// Blocks that a token's inputs fill: 32 * LANES codes each.
inline int64_t blocks_of(const CodebookByRow& c) { return ceil_div(4 * c.words, BYTES); }

// Bytes of a plane from `from` on, of which `left`, a multiple of 4, lie in the row; those behind are 0 and meet
// inputs of 0.
inline Codes load_plane(const uint8_t* from, int64_t left) {
    if (left >= BYTES) return load_as<Codes>(from);
#if defined(__AVX512F__)
    return reinterpret_cast<Codes>(_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << left / 4) - 1), from));
#else
    Codes bytes{};
    __builtin_memcpy(&bytes, from, static_cast<size_t>(left));
    return bytes;
#endif
}

inline const uint8_t* plane_bytes(const CodebookByRow& c, int p) {
    return reinterpret_cast<const uint8_t*>(c.planes[p]);
}

// Codes of the upper half of a mirrored table become those of the entries opposite, below their highest bit.
template <int B> inline void fold(const CodebookByRow& c, Codes (&plane)[B]) {
    if constexpr (looks_up_mirrored(B))
        if (c.mirrored)
            for (int p = 0; p < B - 1; ++p) plane[p] ^= plane[B - 1];
}

} // namespace
} // namespace anybit::ANYBIT_ISA
