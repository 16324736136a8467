// Format "codebook" by rows times few tokens: rows take turns, tile by tile of columns. What centroids are multiplied
// as is a class of the file that includes this.
//
// It is the inputs that are put in the order of the vectors, once per call; weights are read as they are stored.
#pragma once

#include "matmul/codebook_by_row.h"
#include "matmul/unroll.h"

namespace anybit::ANYBIT_ISA {
namespace {

// Tokens in registers at once.
#if defined(__AVX512F__)
constexpr int MOST_TOKENS = 4; // entries of bytes have more (codebook_by_row_bytes.h)
#else
constexpr int MOST_TOKENS = 2;
#endif

// A tile's sums go on from a row's total, and are the total at its end. Those of another kind begin anew.
template <typename Sums> inline void resume(Sums& own, const Sums& total, bool more) { own = more ? total : Sums{}; }
template <typename Sums> inline void settle(const Sums& own, Sums& total, bool) { total = own; }
template <typename Sums, typename Total> inline void resume(Sums& own, const Total&, bool) { own = Sums{}; }
template <typename Sums, typename Total> inline void settle(const Sums& own, Total& total, bool more) {
    own.settle(total, more);
}

// Blocks of a row whose sums fit.
template <typename Sums> constexpr int64_t RUN = Sums::RUN;
template <> constexpr int64_t RUN<Floats> = INT32_MAX;

// Calls finish(totals) with the sums of up to CodebookByRow::TOGETHER rows and M tokens. Tile by tile of columns: the
// inputs of a tile stay close, and what the same row needs next is fetched meanwhile.
template <template <int, int> typename By, int B, int M, typename F>
void gemv_rows(const CodebookByRow& c, const typename By<B, M>::Given& in, int64_t first, int64_t last, F&& finish) {
    using Total = typename By<B, M>::Total;
    using Sums = typename By<B, M>::Sums;
    const int64_t bytes = 4 * c.words, blocks = blocks_of(c), tails = tails_of(c);
    const bool halves = By<B, M>::IN_HALVES && ends_in_halves(c);
    const int64_t whole = blocks - (tails > 0 || halves);
    const int64_t tile = equal_part(blocks, least(By<B, M>::MOST_BLOCKS / M, RUN<Sums>));
    Total total[CodebookByRow::TOGETHER][M]; // begun by the first tile, of which there always is one
    for (int64_t begin = 0; begin < blocks; begin += tile) {
        const int64_t end = least(blocks, begin + tile);
        const int64_t next = end < blocks ? tile * BYTES : CodebookByRow::TOGETHER * bytes - begin * BYTES;
        for (int64_t row = first; row < last; ++row) {
            const By<B, M> sums(c, in, row);
            const RowPlanes<B> planes(c, row);
            Sums own[M];
#pragma GCC unroll 8 // so that sums stay in registers
            for (int k = 0; k < M; ++k) resume(own[k], total[row - first][k], begin > 0);
            for (int64_t b = begin; b < least(end, whole); ++b) {
                Codes plane[B], code[PHASES];
                planes.fetch(b * BYTES + next);
                planes.load(b * BYTES, present(bytes - b * BYTES), plane);
                By<B, M>::fold_planes(c, plane);
                codes_of<B>(plane, code);
                sums.add(code, b, own);
            }
            if constexpr (MOST_TAILS > 0)
                for (int64_t t = 0; t < (end == blocks ? tails : 0); ++t)
                    sums.add_tail(tail_codes<B>(c, row, whole * BYTES + t * TAIL_BYTES), t, own);
#pragma GCC unroll 8
            for (int k = 0; k < M; ++k) settle(own[k], total[row - first][k], begin > 0);
        }
    }
    if constexpr (By<B, M>::IN_HALVES)
        if (halves)
            for (int64_t row = first; row < last; row += 2) {
                const int64_t other = row + 1 < last ? row + 1 : row, rest = bytes - whole * BYTES;
                Codes plane[B], code[PHASES];
                load_halves_of(RowPlanes<B>(c, row), RowPlanes<B>(c, other), whole * BYTES, rest, plane);
                By<B, M>::fold_planes(c, plane);
                codes_of<B>(plane, code);
                Sums both[M] = {};
                Total none[M] = {};
                By<B, M>(c, in, row, other).add(code, whole, both);
                for (int k = 0; k < M; ++k)
                    both[k].split(total[row - first][k], other > row ? total[other - first][k] : none[k]);
            }
    finish(total);
}

// Calls finish(inputs from token k on, totals [TOGETHER][M] of rows and tokens, k, first row, last row) for all rows
// begin <= i < end and tokens. By<B, M> is what the codes of a row are multiplied as, block by block:
//   Given, skip(c, in, k): inputs, and those from token k on;
//   MOST, THREE: tokens at once, and whether three are;
//   MOST_BLOCKS: whose inputs stay close while rows take turns;
//   Sums, add(code, block, sums), add_tail(codes, tail, sums): sums of up to RUN<Sums> blocks of a row;
//   Total: sums of all of them;
//   fold_planes: what is done with planes before they become codes;
//   IN_HALVES: whether inputs are prepared for `ends_in_halves`. Then there is a constructor for two rows, whose codes
//   are in the halves of vectors, and Sums has `split`.
template <template <int, int> typename By, int B, typename F>
void gemv_bits(const CodebookByRow& c, const typename By<B, 1>::Given& in, int64_t begin, int64_t end, F&& finish) {
    for (int64_t first = begin; first < end; first += CodebookByRow::TOGETHER) {
        const int64_t last = least(end, first + CodebookByRow::TOGETHER);
        by_tokens<By<B, 1>::MOST, By<B, 1>::THREE>(in.tokens, [&](auto m, int64_t k) {
            const auto from = By<B, 1>::skip(c, in, k);
            gemv_rows<By, B, m.value>(c, from, first, last,
                                      [&](const auto& total) { finish(from, total, k, first, last); });
        });
    }
}

} // namespace
} // namespace anybit::ANYBIT_ISA
