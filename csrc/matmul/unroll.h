// Numbers that kernels know when they are compiled: widths of codes, tokens and blocks of rows that are in registers at
// once.
#pragma once

#include "common/simd.h"

namespace anybit::ANYBIT_ISA {
namespace {

template <int N> struct Number {
    static constexpr int value = N;
};

// use(Number<BITS>) for a width of 1 to 8.
template <typename F> inline auto by_width(int bits, F&& use) {
    switch (bits) {
    case 1: return use(Number<1>{});
    case 2: return use(Number<2>{});
    case 3: return use(Number<3>{});
    case 4: return use(Number<4>{});
    case 5: return use(Number<5>{});
    case 6: return use(Number<6>{});
    case 7: return use(Number<7>{});
    default: return use(Number<8>{});
    }
}

// use(Number<M>, first) for the tokens `first` to `first + M`: MOST at a time, the rest by halves of it, or by THREE.
template <int MOST, bool THREE = false, typename F>
inline void by_tokens(int64_t tokens, F&& use, int64_t first = 0) {
    for (; tokens - first >= MOST; first += MOST) use(Number<MOST>{}, first);
    if constexpr (THREE && MOST == 4)
        if (tokens - first == 3) return use(Number<3>{}, first);
    if constexpr (MOST > 1) by_tokens<MOST / 2, THREE>(tokens, use, first);
}

// use(Number<R>, Number<M>, block, first) for blocks of rows: several tokens meet one at a time, one token two where
// PAIRS, so that two lines of memory are under way and not one.
template <int MOST, bool PAIRS, typename F>
inline void by_blocks(int64_t tokens, int64_t begin, int64_t end, F&& use) {
    int64_t block = begin;
    if (PAIRS && tokens == 1)
        for (; block + 2 <= end; block += 2) use(Number<2>{}, Number<1>{}, block, 0);
    for (; block < end; ++block)
        by_tokens<MOST>(tokens, [&](auto m, int64_t first) { use(Number<1>{}, m, block, first); });
}

} // namespace
} // namespace anybit::ANYBIT_ISA
