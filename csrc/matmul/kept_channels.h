// Channels of a nested tile that have no codes in planes: rows of them as floats.
#pragma once

#include "matmul/formats.h"
#include "matmul/transpose.h"

namespace anybit::ANYBIT_ISA {
namespace {

static_assert(LANES <= KeptChannels::BEHIND);

constexpr int64_t CHANNEL_AHEAD = 64; // rows, of which a channel's codes are fetched

// `count` codes, up to LANES, from j on, as floats; zeros behind them. There are j before them.
inline Floats load_codes(const int8_t* codes, int64_t j, int64_t count) {
    const int8_t* from = codes + j;
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const __m128i there = _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << count) - 1), from);
    return reinterpret_cast<Floats>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(there)));
#elif defined(__AVX2__)
    int64_t there = 0;
    if (j + count >= LANES) // codes before them are shifted out
        there = static_cast<int64_t>(load_as<uint64_t>(from + count - LANES) >> (8 * (LANES - count)));
    else __builtin_memcpy(&there, from, static_cast<size_t>(count));
    return reinterpret_cast<Floats>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(there))));
#else
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    Bytes there{};
    __builtin_memcpy(&there, from, static_cast<size_t>(count));
    return __builtin_convertvector(there, Floats);
#endif
}

// Channels j to j + count, up to LANES, of a row; zeros behind them.
inline Floats load_kept(const KeptChannels& kept, int64_t row, int64_t j, int64_t count) {
    const int64_t at = row * kept.channels + j;
    if (kept.codes == nullptr) return load_halves(PartialHalves(kept.halves + at, count).halves);
    const Floats codes = load_codes(kept.codes, at, count), sizes = codes < 0 ? -codes : codes;
    return codes * sizes * (load(kept.scales + j) * kept.row_scales[row]);
}

// LANES codes as floats.
inline Floats load_codes(const int8_t* codes) {
#if defined(__AVX512F__)
    return reinterpret_cast<Floats>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(codes))));
#elif defined(__AVX2__)
    return reinterpret_cast<Floats>(
        _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)))));
#else
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    return __builtin_convertvector(load_as<Bytes>(codes), Floats);
#endif
}

// What load_kept gives, of up to LANES rows: a vector for each of `count` channels, a lane for each row. Lanes of rows
// that are missing may hold what lies behind the others.
inline void load_channels(const KeptChannels& kept, int64_t row, int64_t rows, int64_t j, int64_t count,
                          Floats (&channels)[LANES]) {
    if (kept.by_channel != nullptr) {
        const Floats own = load(kept.row_scales + row);
        for (int64_t i = 0; i < count; ++i) {
            const int8_t* from = kept.by_channel + (j + i) * kept.stride + row;
            __builtin_prefetch(from + CHANNEL_AHEAD);
            const Floats codes = load_codes(from), sizes = codes < 0 ? -codes : codes;
            channels[i] = codes * sizes * (own * kept.scales[j + i]);
        }
        return;
    }
    for (int64_t l = 0; l < LANES; ++l) channels[l] = l < rows ? load_kept(kept, row + l, j, count) : Floats{};
    transpose(channels);
}

} // namespace
} // namespace anybit::ANYBIT_ISA
