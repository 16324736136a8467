// Format "codebook" by rows times few tokens of 8 bits, by AVX-512, where entries are bytes: one or two rows at a time.
//
// An input is loaded once for all rows that it meets. Codes are taken from their fields a vector at a time, so that two
// rows fit into the registers. Sums have 32 bits for as many blocks as those hold.
#pragma once

#include "matmul/codebook_by_row_whole.h"
#include "matmul/unroll.h"

#if !defined(__AVX512F__)
#error "for AVX-512 only"
#endif

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int MOST_BYTE_TOKENS = 8;       // in registers at once
constexpr int64_t BYTES_AHEAD = 2048;     // how far ahead a plane is fetched, at least
constexpr int64_t CLOSE_BYTE_BLOCKS = 48; // blocks whose inputs, 24 KB, stay in the first cache while rows take turns

// R rows times M tokens.
template <int B, int M, int R> class ByteRows {
public:
    ByteRows(const CodebookByRow& c, const WholeInputs& in, const int64_t (&rows)[R]) : c_(c), in_(in) {
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) {
            row_[r] = rows[r];
            planes_[r] = RowPlanes<B>(c, rows[r]);
            table_[r] = Table<B>(c.table + (c.kind(rows[r]) << B));
        }
    }

    // Have the lines `at` bytes behind the rows' beginnings come into the second cache, meanwhile: in the first they
    // would take the inputs' place.
    void fetch(int64_t at) const {
        for (const RowPlanes<B>& own : planes_) own.template fetch<2>(at);
    }

    // Block b, of whose planes `there` is stored.
    void add(int64_t b, Present there) {
        Fields<B> code[R];
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) {
            Codes plane[B];
            planes_[r].load(b * BYTES, there, plane);
            code[r] = Fields<B>(plane);
        }
        Ints own[R][M] = {};
#pragma GCC unroll 8 // so that phases are known, and codes and sums stay in registers
        for (int64_t s = 0; s < PHASES; ++s) {
            Codes weights[R];
            for (int r = 0; r < R; ++r) weights[r] = table_[r](code[r][s]);
            multiply(weights, in_.x + b * in_.block_stride + s * BYTES, own);
        }
        join(own, b, [](const int32_t* factors) { return load_as<Ints>(factors); });
    }

    // Tail t of block b, the last one.
    void add_tail(int64_t b, int64_t t) {
        Codes weights[R];
        for (int r = 0; r < R; ++r) weights[r] = table_[r](tail_codes<B>(c_, row_[r], b * BYTES + t * TAIL_BYTES));
        Ints own[R][M] = {};
        multiply(weights, in_.x + b * in_.block_stride + t * BYTES, own);
        join(own, b, [t](const int32_t* factors) { return tail_factors(factors, t); });
    }

    // Sums join the rows' totals, or are the first; the next blocks' begin anew.
    void settle(LongSums (*total)[M], bool more) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            for (int k = 0; k < M; ++k) {
                total[r][k].take(sums_[r][k], more);
                sums_[r][k] = Ints{};
            }
    }

private:
    // A vector of each row meets its inputs, the first token's at x.
    static void multiply(const Codes (&weights)[R], const int8_t* x, Ints (&own)[R][M]) {
#pragma GCC unroll 8
        for (int64_t k = 0; k < M; ++k) {
            auto inputs = load_as<Bytes>(x + k * PHASES * BYTES);
            if constexpr (R > 1) __asm__("" : "+v"(inputs)); // in a register: GCC would load it for each row
            for (int r = 0; r < R; ++r) own[r][k] = dot(own[r][k], weights[r], inputs);
        }
    }
    // Sums of block b, whose factors factors_of loads, join the others.
    template <typename F> void join(const Ints (&own)[R][M], int64_t b, F&& factors_of) {
        const int32_t* from = in_.factors + b * (in_.block_stride / CodebookByRow::INPUT_GROUP);
#pragma GCC unroll 8
        for (int k = 0; k < M; ++k) {
            const Ints factors = factors_of(from + k * LANES);
            for (int r = 0; r < R; ++r) sums_[r][k] += own[r][k] * factors;
        }
    }

    const CodebookByRow& c_;
    const WholeInputs& in_;
    int64_t row_[R];
    RowPlanes<B> planes_[R];
    Table<B> table_[R];
    Ints sums_[R][M] = {};
};

// Calls finish(totals) with the sums of up to CodebookByRow::TOGETHER rows and M tokens. Tile by tile of columns, so
// that the inputs of a tile stay close.
template <int B, int M, int R, typename F>
void gemv_byte_rows(const CodebookByRow& c, const WholeInputs& in, int64_t first, int64_t last, F&& finish) {
    static_assert(CodebookByRow::TOGETHER % R == 0); // so that what has no row has totals
    constexpr auto ALL = static_cast<Present>(-1);
    const int64_t bytes = 4 * c.words, blocks = blocks_of(c), whole = bytes / BYTES, tails = tails_of(c);
    const int64_t tile = equal_part(blocks, CLOSE_BYTE_BLOCKS / M);
    const int64_t ahead = ceil_div(BYTES_AHEAD, R * bytes) * R * bytes; // whole rows
    LongSums total[CodebookByRow::TOGETHER][M]; // begun by the first run, of which there always is one
    for (int64_t begin = 0; begin < blocks; begin += tile) {
        const int64_t end = least(blocks, begin + tile);
        for (int64_t row = first; row < last; row += R) {
            int64_t rows[R];
            for (int r = 0; r < R; ++r) rows[r] = least(row + r, last - 1); // what has no row goes nowhere
            ByteRows<B, M, R> sums(c, in, rows);
            for (int64_t b = begin; b < end;) {
                const int64_t run = b, to = least(end, run + SHORT_RUN);
                for (; b < least(to, whole); ++b) {
                    sums.fetch(b * BYTES + ahead);
                    sums.add(b, ALL);
                }
                if (b < to) { // the last block, of which there is a part
                    sums.fetch(b * BYTES + ahead);
                    if (tails == 0) sums.add(b, present(bytes - b * BYTES));
                    for (int64_t t = 0; t < tails; ++t) sums.add_tail(b, t);
                    ++b;
                }
                sums.settle(total + (row - first), run > 0);
            }
        }
    }
    finish(total);
}

// Whether two rows' codes, sums and tables fit into the registers.
template <int B, int M> constexpr bool in_pairs() {
#if defined(__AVX512VBMI__)
    return B <= 4 ? M <= 4 : B <= 6 && M <= 2;
#elif defined(__AVX512VNNI__)
    return B <= 4 && M <= 4;
#else // dot products take registers of their own
    return B <= 4 && M <= 2;
#endif
}

// Calls finish(inputs from token k on, totals [TOGETHER][M] of rows and tokens, k, first row, last row) for all rows
// begin <= i < end and tokens.
template <int B, typename F>
void gemv_bytes(const CodebookByRow& c, const WholeInputs& in, int64_t begin, int64_t end, F&& finish) {
    for (int64_t first = begin; first < end; first += CodebookByRow::TOGETHER) {
        const int64_t last = least(end, first + CodebookByRow::TOGETHER);
        by_tokens<MOST_BYTE_TOKENS, true>(in.tokens, [&](auto m, int64_t k) {
            constexpr int M = m.value;
            const WholeInputs from = tokens_from(c, in, k);
            gemv_byte_rows<B, M, in_pairs<B, M>() ? 2 : 1>(
                c, from, first, last, [&](const auto& total) { finish(from, total, k, first, last); });
        });
    }
}

} // namespace
} // namespace anybit::ANYBIT_ISA
