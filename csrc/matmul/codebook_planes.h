// From bitplanes to codes.
//
// A vector of each plane holds the bits of 8 * BYTES weights: byte m, bit s belongs to weight 8 m + s. Shifting and
// merging turns the planes into eight vectors whose byte m has the code of weight 8 m + s in its low bits, and junk
// above them that the lookup does not see.
#pragma once

#include "common/dot_int8.h"

namespace anybit::ANYBIT_ISA {
namespace {

typedef uint16_t Pairs __attribute__((vector_size(BYTES)));

constexpr int64_t PHASES = 8; // vectors of codes that a vector of each plane becomes

// Shifts within pairs of bytes: the bits that cross into the neighbour are junk or masked by whoever shifts.
template <int N> inline Codes left(Codes v) { return reinterpret_cast<Codes>(reinterpret_cast<Pairs>(v) << N); }
template <int N> inline Codes right(Codes v) { return reinterpret_cast<Codes>(reinterpret_cast<Pairs>(v) >> N); }

inline Codes merge(int mask, Codes where_set, Codes elsewhere) {
#if defined(__AVX512F__)         // GCC would take two instructions
    constexpr int SELECT = 0xca; // of each bit of the first operand: the second where it is set, else the third
    return reinterpret_cast<Codes>(_mm512_ternarylogic_epi32(reinterpret_cast<__m512i>(fill(mask)),
                                                             reinterpret_cast<__m512i>(where_set),
                                                             reinterpret_cast<__m512i>(elsewhere), SELECT));
#else
    return (where_set & fill(mask)) | (elsewhere & fill(~mask));
#endif
}

// Bytes in which fields of N bits of `low` and `high` take turns: the first ones, third ones ... of both into `even`,
// the others into `odd`. `mask` has the first, third ... field of a byte.
template <int N> inline void take_turns(int mask, Codes low, Codes high, Codes& even, Codes& odd) {
#if defined(__AVX512F__) // where a merge is one instruction
    even = merge(mask, low, left<N>(high));
    odd = merge(mask, right<N>(low), high);
#else
    const Codes changed = (right<N>(low) ^ high) & fill(mask); // swapped, with two instructions less
    even = low ^ left<N>(changed);
    odd = high ^ changed;
#endif
}

// The codes of a block in their low B bits, from its planes (the least significant first).
template <int B> inline void codes_of(const Codes (&plane)[B], Codes (&code)[PHASES]) {
    constexpr int P = (B + 1) / 2, Q = (B + 3) / 4;
    Codes even[P], odd[P]; // fields of 2 bits
    for (int i = 0; i < P; ++i) {
        const Codes low = plane[2 * i];
        if (2 * i + 1 < B) take_turns<1>(0x55, low, plane[2 * i + 1], even[i], odd[i]);
        else even[i] = low, odd[i] = right<1>(low);
    }
    if constexpr (B <= 2) {
        code[0] = even[0], code[2] = right<2>(even[0]), code[4] = right<4>(even[0]), code[6] = right<6>(even[0]);
        code[1] = odd[0], code[3] = right<2>(odd[0]), code[5] = right<4>(odd[0]), code[7] = right<6>(odd[0]);
    } else {
        Codes field[4][Q]; // of 4 bits: phase s in the low half of the byte, phase s + 4 in the high one
        for (int i = 0; i < Q; ++i)
            for (int o = 0; o < 2; ++o) {
                const Codes low = (o == 0 ? even : odd)[2 * i];
                if (2 * i + 1 < P)
                    take_turns<2>(0x33, low, (o == 0 ? even : odd)[2 * i + 1], field[o][i], field[o + 2][i]);
                else field[o][i] = low, field[o + 2][i] = right<2>(low);
            }
        for (int s = 0; s < 4; ++s) {
            const Codes low = field[s][0], high = field[s][Q - 1];
            if constexpr (Q == 1) code[s] = low, code[s + 4] = right<4>(low);
            else take_turns<4>(0x0f, low, high, code[s], code[s + 4]);
        }
    }
}

} // namespace
} // namespace anybit::ANYBIT_ISA
