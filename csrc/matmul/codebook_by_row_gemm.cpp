// Format "codebook" by rows times many tokens: gemm, for which panels of weights are looked up.
#include "matmul/codebook_by_row.h"
#include "matmul/gemm.h"
#include "matmul/kept_channels.h"
#include "matmul/ops.h"
#include "matmul/unroll.h"

namespace anybit::ANYBIT_ISA {
namespace {

// Columns that many tokens meet: those of whole words, then an even number of kept ones.
inline int64_t gemm_columns(const CodebookByRow& c) { return 32 * c.words + c.kept.channels + c.kept.channels % 2; }

// Weights of a block of columns of LANES rows, whose table is as a Table wants it; whole floats where there is none.
template <int B, typename Table>
void decode_block(const CodebookByRow& c, int64_t block, int64_t column, Floats* panel) {
    const int64_t bytes = 4 * c.words, at = column / PHASES;
    Floats values[LANES][PHASES][4];
    for (int64_t lane = 0; lane < LANES; ++lane) {
        const int64_t row = least(block * LANES + lane, c.rows - 1); // nobody reads lanes behind the last row
        Codes plane[B], code[PHASES];
        for (int p = 0; p < B; ++p)
            plane[p] = load_plane(plane_bytes(c, B - 1 - p) + row * bytes + at, present(bytes - at));
        fold_floats(c, plane);
        codes_of<B>(plane, code);
        if constexpr (floating(B) != Floating::none) {
            const Table table(c.table, c.kind(row));
            const float scale = c.row_scale(row);
            for (int64_t s = 0; s < PHASES; ++s) {
                table(code[s], values[lane][s]);
                for (Floats& value : values[lane][s]) value *= scale;
            }
        } else {
            const auto* table = reinterpret_cast<const float*>(c.table) + (c.kind(row) << B);
            const float scale = c.row_scale(row);
            for (int64_t s = 0; s < PHASES; ++s)
                for (int64_t m = 0; m < BYTES; ++m)
                    panel[PHASES * m + s][lane] = scale * table[code[s][m] & ((1 << B) - 1)];
        }
    }
    if constexpr (floating(B) != Floating::none)
        for (int64_t s = 0; s < PHASES; ++s)
            for (int64_t v = 0; v < 4; ++v) {
                Floats rows[LANES];
                for (int64_t lane = 0; lane < LANES; ++lane) rows[lane] = values[lane][s][v];
                transpose(rows);
                for (int64_t l = 0; l < LANES; ++l) panel[PHASES * Table::place(v, l) + s] = rows[l];
            }
}

template <int B> void decode_floats(const CodebookByRow& c, int64_t block, int64_t column, Floats* panel) {
    if constexpr (looks_up_mirrored(B))
        if (c.mirrored) return decode_block<B, MirroredFloats<B>>(c, block, column, panel);
    return decode_block<B, FloatTable<B>>(c, block, column, panel);
}

// What is left of a panel from `column` on when its coded columns are there: put(i, columns, n) for the kept ones that
// are columns i to i + n of it. Returns how many columns there are.
template <typename F> int64_t decode_kept(const CodebookByRow& c, int64_t block, int64_t column, F&& put) {
    const int64_t n = least(PANEL, gemm_columns(c) - column), coded = 32 * c.words, row = block * LANES;
    for (int64_t i = coded > column ? coded - column : 0; i < n; i += LANES) {
        const int64_t j = column + i - coded;
        Floats some[LANES] = {}; // and the column that makes their number even
        load_channels(c.kept, row, least(LANES, c.rows - row), j, least(LANES, c.kept.channels - j), some);
        put(i, some, least(LANES, n - i));
    }
    return n;
}

int64_t decode_panel(const CodebookByRow& c, int64_t block, int64_t column, Floats* panel) {
    if (column < 32 * c.words) by_width(c.bits, [&](auto bits) { decode_floats<bits.value>(c, block, column, panel); });
    return decode_kept(c, block, column, [&](int64_t i, const Floats* columns, int64_t n) {
        for (int64_t j = 0; j < n; ++j) panel[i + j] = columns[j];
    });
}

#ifdef __AVX512BF16__
// A row's table in bfloat16: as it is stored, or floats times the row's scale.
template <int B> HalfTable<B> half_table(const CodebookByRow& c, int64_t row) {
    if (c.halves) return HalfTable<B>(c.table, c.kind(row));
    constexpr int64_t ENTRIES = 1 << B;
    const auto* from = reinterpret_cast<const float*>(c.table) + c.kind(row) * ENTRIES;
    const auto scale = reinterpret_cast<__m512>(broadcast(c.row_scale(row)));
    uint8_t made[B < 5 ? 64 : 2 * ENTRIES];
    for (int64_t e = 0; e < ENTRIES; e += 2 * LANES) {
        constexpr auto MASK = static_cast<__mmask16>((1 << (B < 4 ? ENTRIES : LANES)) - 1);
        const __m512 low = _mm512_maskz_loadu_ps(MASK, from + e);
        const __m512 high = B < 5 ? _mm512_setzero_ps() : _mm512_loadu_ps(from + e + (B < 5 ? 0 : LANES));
        const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high * scale, low * scale));
        if constexpr (B <= MOST_WHOLE_HALVES) __builtin_memcpy(made + 2 * e, &both, sizeof both);
        else {
            const __m256i bytes[] = {_mm512_cvtepi16_epi8(both), _mm512_cvtepi16_epi8(_mm512_srli_epi16(both, 8))};
            for (int i = 0; i < 2; ++i) __builtin_memcpy(made + i * ENTRIES + e, bytes + i, sizeof bytes[i]);
        }
    }
    return HalfTable<B>(made, 0);
}

// The same as `decode_block`, two columns to a vector.
template <int B> void decode_half_block(const CodebookByRow& c, int64_t block, int64_t column, Floats* panel) {
    typedef uint32_t Words __attribute__((vector_size(BYTES)));
    const int64_t bytes = 4 * c.words, at = column / PHASES;
    Floats values[PHASES / 2][2][2][LANES]; // pairs of phases, vectors of halves, whether even lanes of it or odd
    for (int64_t lane = 0; lane < LANES; ++lane) {
        const int64_t row = least(block * LANES + lane, c.rows - 1); // nobody reads lanes behind the last row
        Codes plane[B], code[PHASES];
        for (int p = 0; p < B; ++p) {
            const uint8_t* from = plane_bytes(c, B - 1 - p) + row * bytes + at;
            __builtin_prefetch(from + BYTES); // what the same row needs next
            plane[p] = load_plane(from, present(bytes - at));
        }
        codes_of<B>(plane, code);
        const HalfTable<B> table = half_table<B>(c, row);
        for (int64_t s = 0; s < PHASES; s += 2) {
            Codes first[2], second[2];
            table(code[s], first);
            table(code[s + 1], second);
            for (int64_t v = 0; v < 2; ++v) {
                const auto a = reinterpret_cast<Words>(first[v]), b = reinterpret_cast<Words>(second[v]);
                values[s / 2][v][0][lane] = reinterpret_cast<Floats>((a & 0xffff) | b << 16);
                values[s / 2][v][1][lane] = reinterpret_cast<Floats>(a >> 16 | (b & 0xffff0000));
            }
        }
    }
    for (int64_t s = 0; s < PHASES / 2; ++s)
        for (int64_t v = 0; v < 2; ++v)
            for (int64_t odd = 0; odd < 2; ++odd) {
                Floats(&rows)[LANES] = values[s][v][odd];
                transpose(rows);
                for (int64_t l = 0; l < LANES; ++l)
                    panel[PHASES / 2 * HalfTable<B>::place(v, 2 * l + odd) + s] = rows[l];
            }
}

int64_t decode_half_panel(const CodebookByRow& c, int64_t block, int64_t column, Floats* panel) {
    if (column < 32 * c.words)
        by_width(c.bits, [&](auto bits) { decode_half_block<bits.value>(c, block, column, panel); });
    return decode_kept(c, block, column, [&](int64_t i, const Floats* columns, int64_t n) {
        prepare_panel(panel + i / 2, columns, n, static_cast<const uint16_t*>(nullptr));
    });
}
#endif

void gemm_f32(const CodebookByRow& c, const Inputs<float>& in, const Outputs& y, int64_t begin, int64_t end) {
    gemm(c, decode_panel, gemm_columns(c), in, y, begin, end);
}

#ifdef __AVX512BF16__
void gemm_bf16(const CodebookByRow& c, const Inputs<uint16_t>& in, const Outputs& y, int64_t begin, int64_t end) {
    gemm<true>(c, decode_half_panel, gemm_columns(c), in, y, begin, end);
}
#endif

} // namespace

void add_codebook_by_row_gemm(MatmulOps& ops) {
    ops.codebook_by_row.f32.gemm = gemm_f32;
#ifdef __AVX512BF16__
    ops.codebook_by_row.bf16.gemm = gemm_bf16;
#endif
}

} // namespace anybit::ANYBIT_ISA
