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

// Bits of `shifted` where the mask is SET or not, of `other` elsewhere.
template <bool SET> inline Codes merge(int mask, Codes shifted, Codes other) {
#if defined(__AVX512F__) // GCC would take two instructions. The result takes the first operand's register
    return reinterpret_cast<Codes>(_mm512_ternarylogic_epi32(reinterpret_cast<__m512i>(shifted),
                                                             reinterpret_cast<__m512i>(fill(mask)),
                                                             reinterpret_cast<__m512i>(other), SET ? 0xe2 : 0xb8));
#else
    return (shifted & fill(SET ? mask : ~mask)) | (other & fill(SET ? ~mask : mask));
#endif
}

// Bytes in which fields of N bits of `low` and `high` take turns: the first ones, third ones ... of both into `even`,
// the others into `odd`. `mask` has the first, third ... field of a byte.
template <int N> inline void take_turns(int mask, Codes low, Codes high, Codes& even, Codes& odd) {
#if defined(__AVX512F__) // where a merge is one instruction
    even = merge<false>(mask, left<N>(high), low);
    odd = merge<true>(mask, right<N>(low), high);
#else
    const Codes changed = (right<N>(low) ^ high) & fill(mask); // swapped, with two instructions less
    even = low ^ left<N>(changed);
    odd = high ^ changed;
#endif
}

// The codes of a block on their way from its planes (the least significant first): fields of 4 bits, or of 2 where B is
// no more. The last step is taken for a vector when it is asked for: until then half the registers hold them all.
template <int B> class Fields {
public:
    Fields() = default; // not set, for arrays
    explicit Fields(const Codes (&plane)[B]) {
        constexpr int P = (B + 1) / 2;
        Codes even[P], odd[P]; // fields of 2 bits
        for (int i = 0; i < P; ++i) {
            const Codes low = plane[2 * i];
            if (2 * i + 1 < B) take_turns<1>(0x55, low, plane[2 * i + 1], even[i], odd[i]);
            else even[i] = low, odd[i] = right<1>(low);
        }
        if constexpr (B <= 2) {
            field_[0][0] = even[0], field_[1][0] = odd[0];
        } else { // of 4 bits: phase s in the low half of the byte, phase s + 4 in the high one
            for (int i = 0; i < PARTS; ++i)
                for (int o = 0; o < 2; ++o) {
                    const Codes low = (o == 0 ? even : odd)[2 * i];
                    if (2 * i + 1 < P)
                        take_turns<2>(0x33, low, (o == 0 ? even : odd)[2 * i + 1], field_[o][i], field_[o + 2][i]);
                    else field_[o][i] = low, field_[o + 2][i] = right<2>(low);
                }
        }
    }

    // The codes of phase s, which is known when loops are unrolled, in their low B bits.
    Codes operator[](int64_t s) const {
        constexpr int64_t FIELDS = B <= 2 ? 2 : 4;
        const Codes(&own)[PARTS] = field_[s % FIELDS];
        if constexpr (PARTS > 1)
            return s < 4 ? merge<false>(0x0f, left<4>(own[1]), own[0]) : merge<true>(0x0f, right<4>(own[0]), own[1]);
        else
            return reinterpret_cast<Codes>(reinterpret_cast<Pairs>(own[0]) >>
                                           static_cast<uint16_t>(s / FIELDS * FIELDS));
    }
    // Those of phases s and s + 4, which take no more instructions together, and fewer without AVX-512.
    void pair(int64_t s, Codes (&code)[PHASES]) const {
        if constexpr (PARTS == 1) code[s] = (*this)[s], code[s + 4] = (*this)[s + 4];
        else take_turns<4>(0x0f, field_[s][0], field_[s][1], code[s], code[s + 4]);
    }

private:
    static constexpr int PARTS = (B + 3) / 4;

    Codes field_[B <= 2 ? 2 : 4][PARTS];
};

// All codes of a block in their low B bits.
template <int B> inline void codes_of(const Codes (&plane)[B], Codes (&code)[PHASES]) {
    const Fields<B> fields(plane);
#pragma GCC unroll 4
    for (int64_t s = 0; s < PHASES / 2; ++s) fields.pair(s, code);
}

} // namespace
} // namespace anybit::ANYBIT_ISA
