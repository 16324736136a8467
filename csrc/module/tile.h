// What every tile of stored weights has that is bound to the kernels of one instruction set.
#pragma once

#include "module/arrays.h"
#define ANYBIT_ISA baseline
#include "common/simd.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace anybit {

// Output rows of a tile, in any order. Copied, not referenced: what was checked here stays what the kernel indexes
// with.
class OutRows {
public:
    void copy(const Input& rows, int64_t n) {
        check("rows", rows, {Type::i32}, {n}, Layout::dense);
        const int32_t* from = static_cast<const int32_t*>(rows.data());
        rows_.assign(from, from + n);
        std::vector<int32_t> sorted = rows_;
        std::sort(sorted.begin(), sorted.end());
        for (int64_t i = 0; i < n; ++i)
            if (sorted[i] < 0 || (i > 0 && sorted[i] == sorted[i - 1]))
                refuse("rows hold " + std::to_string(sorted[i]) + (sorted[i] < 0 ? "" : " twice") +
                       ": expected different output rows from 0");
        last_ = n == 0 ? -1 : sorted.back();
        ascend_ = sorted == rows_;
        given_ = true;
    }
    void check_below(int64_t out) const {
        if (last_ >= out)
            refuse("y has " + std::to_string(out) + " columns, but rows go up to " + std::to_string(last_));
    }
    bool given() const { return given_; }
    bool ascend() const { return ascend_; }
    const int32_t* data() const { return given_ ? rows_.data() : nullptr; }

private:
    bool given_ = false, ascend_ = false;
    int32_t last_ = -1; // the largest
    std::vector<int32_t> rows_;
};

// Activations [count, columns]: float32, or the bit patterns of bfloat16.
struct Tokens {
    const void* data;
    bool bf16;
    int64_t count, stride; // elements from one token to the next

    const float* floats(int64_t k) const { return static_cast<const float*>(data) + k * stride; }
    const uint16_t* halves(int64_t k) const { return static_cast<const uint16_t*>(data) + k * stride; }
};

struct IntTokens {
    const int8_t* codes; // [count, columns]
    const float* scales; // [count, input groups]
    int64_t count;
};

// Tables of `stored` entries `value(row, e)` each, with room for `entries`, as T: float32, or uint16_t for bfloat16;
// those of a mirrored table as float16.
template <typename T, typename V>
std::vector<uint8_t> lay_tables(int64_t rows, int64_t stored, int64_t entries, TableForm form, V&& value) {
    const int64_t size = form == TableForm::mirrored ? 2 : sizeof(T);
    std::vector<uint8_t> made(static_cast<size_t>(rows * entries * size));
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t e = 0; e < stored; ++e) {
            const float own = value(row, e);
            uint32_t word;
            std::memcpy(&word, &own, 4);
            if (form == TableForm::mirrored) word = baseline::to_half(own);
            else if (size == 2) word = baseline::to_bf16(own);
            for (int64_t i = 0; i < size; ++i) {
                const int64_t at = form == TableForm::bytes || form == TableForm::mirrored
                                       ? (row * size + i) * entries + e
                                       : (row * entries + e) * size + i;
                made[static_cast<size_t>(at)] = static_cast<uint8_t>(word >> 8 * i);
            }
        }
    return made;
}

class Tile {
public:
    Tile(const Tile&) = delete; // the kernels' view points into the object
    virtual ~Tile() = default;

    // y[:, rows] += x @ W.T
    void matmul(const Input& x, const Output& y, int64_t threads) const {
        const int used = check_threads(threads);
        const int64_t m = size_of("x", x, 0, 2);
        if (takes_bf16(m)) check("x", x, {Type::f32, Type::bf16, Type::u16}, {m, columns_}, Layout::dense_rows);
        else check("x", x, {Type::f32}, {m, columns_}, Layout::dense_rows);
        const int64_t out = check_y(y, m);
        const Tokens tokens{x.data(), type_of(x.dtype()) != Type::f32, m, row_stride(m, x.stride(0), columns_)};
        float* to = static_cast<float*>(y.data());
        nb::gil_scoped_release release;
        add_product(tokens, {to, out}, used);
    }

    // y[:, rows] += (x * scales by group) @ W.T
    void int_matmul(const Input& x, const Input& scales, const Output& y, int64_t threads) const {
        const int used = check_threads(threads);
        if (!takes_ints())
            refuse("this tile has no integer kernel: codebooks by row have one, and groups of up to " +
                   std::to_string(MAX_INT_GROUP) + " columns, whose sums cannot leave 32 bits");
        const int64_t m = size_of("x", x, 0, 2);
        check("x", x, {Type::i8}, {m, columns_}, Layout::dense);
        check("scales", scales, {Type::f32}, {m, input_groups()}, Layout::dense);
        const int64_t out = check_y(y, m);
        const IntTokens tokens{static_cast<const int8_t*>(x.data()), static_cast<const float*>(scales.data()), m};
        float* to = static_cast<float*>(y.data());
        nb::gil_scoped_release release;
        add_int_product(tokens, {to, out}, used);
    }

    virtual bool takes_bf16(int64_t) const { return false; } // whether `matmul` takes bfloat16 of so many tokens
    virtual bool takes_ints() const { return false; }        // whether there is `int_matmul`
    // Whether that takes less time than `matmul` of the same tokens, in bfloat16 or not.
    virtual bool prefers_ints(int64_t, bool) const { return takes_ints(); }

    // The same without checks and without the GIL.
    virtual void add_product(const Tokens& x, const Outputs& y, int threads) const = 0;
    virtual void add_int_product(const IntTokens&, const Outputs&, int) const {}
    // Whether products of so many tokens take outputs that are not plain.
    virtual bool finishes(int64_t tokens, bool bf16) const { return tokens > few(bf16); }
    virtual bool finishes_ints(int64_t) const { return false; }
    virtual int64_t input_groups() const { return 0; } // of `int_matmul`
    virtual int64_t input_group_size() const { return 0; }
    int64_t rows() const { return rows_; }
    const int32_t* out_rows() const { return out_rows_.data(); } // null: all, in order
    int64_t columns() const { return columns_; }

    void check_out(int64_t out) const {
        if (out_rows_.given()) out_rows_.check_below(out);
        else if (out != rows_) refuse("y has " + std::to_string(out) + " columns, expected " + std::to_string(rows_));
    }

protected:
    // Of more tokens than this, weights are decoded once for all.
    int64_t few(bool bf16) const { return bf16 ? kernels_.gemv_tokens_bf16 : GEMV_TOKENS; }

    explicit Tile(const std::optional<std::string>& isa) : kernels_(find_matmul_ops(isa)) {}

    // Products of few tokens with inputs that the kernels want arranged, their sums by group beside them.
    template <typename T>
    void add_few(const T& tile, const Ops<T>& ops, const Tokens& x, const Outputs& y, int threads) const {
        const int64_t m = x.count, width = ops.columns(tile);
        const Scratch scratch = make_scratch(m * (width + tile.groups));
        float *floats = scratch.get(), *sums = floats + m * width;
        auto* halves = reinterpret_cast<uint16_t*>(floats);
        for (int64_t k = 0; k < m; ++k)
            if (x.bf16) ops.bf16.prepare(tile, x.halves(k), halves + k * width, sums + k * tile.groups);
            else ops.f32.prepare(tile, x.floats(k), floats + k * width, sums + k * tile.groups);
        by_blocks(
            threads,
            [&](int64_t begin, int64_t end) {
                if (x.bf16) ops.bf16.gemv(tile, {halves, m, width, sums}, y.sums, y.stride, begin, end);
                else ops.f32.gemv(tile, {floats, m, width, sums}, y.sums, y.stride, begin, end);
            },
            GEMM_BLOCKS);
    }

    // Many tokens' inputs, padded, each row of `stride` elements, 0 to its end.
    struct Many {
        Scratch data; // float32, or bfloat16
        int64_t count, stride;
        bool bf16;
        const uint16_t* halves() const { return reinterpret_cast<const uint16_t*>(data.get()); }
    };

    // Each token's inputs, which `pad(from, to)` copies to `width` elements.
    template <typename P> Many pad_many(const Tokens& x, int64_t width, P&& pad, int threads) const {
        const int64_t m = x.count, stride = odd_lines(width, x.bf16 ? 2 : 4);
        Many padded{make_scratch(x.bf16 ? m * stride / 2 : m * stride), m, stride, x.bf16};
        float* floats = padded.data.get();
        auto* halves = reinterpret_cast<uint16_t*>(floats);
        for_tokens(m, width, threads, [&](int64_t k) {
            if (x.bf16) {
                pad(x.halves(k), halves + k * stride);
                std::fill_n(halves + k * stride + width, stride - width, uint16_t(0));
            } else {
                pad(x.floats(k), floats + k * stride);
                std::fill_n(floats + k * stride + width, stride - width, 0.0f);
            }
        });
        return padded;
    }

    // y[:, out rows] += what `product(outputs)` adds to outputs. Where rows are in no order, those of one block are all
    // over y, so that those of one token are put in place together.
    template <typename F> void place(int64_t m, const Outputs& y, int threads, F&& product) const {
        if (!out_rows_.given() || out_rows_.ascend())
            return product(Outputs{y.sums, y.stride, y.fresh, y.rounded, out_rows_.data()});
        const int32_t* rows = out_rows_.data();
        const bool halves = y.rounded != nullptr && y.fresh;
        const Scratch scratch = make_scratch(halves ? (m * rows_ + 1) / 2 : m * rows_);
        float* sums = scratch.get();
        auto* rounded = reinterpret_cast<uint16_t*>(sums);
        product(halves ? Outputs{nullptr, rows_, true, rounded} : Outputs{sums, rows_, true});
        for_tokens(m, rows_, threads, [&](int64_t k) {
            const int64_t from = k * rows_, to = k * y.stride;
            for (int64_t i = 0; i < rows_ && halves; ++i) y.rounded[to + rows[i]] = rounded[from + i];
            for (int64_t i = 0; i < rows_ && !halves; ++i) {
                const float sum = y.fresh ? sums[from + i] : y.sums[to + rows[i]] + sums[from + i];
                if (y.rounded == nullptr) y.sums[to + rows[i]] = sum;
                else y.rounded[to + rows[i]] = baseline::to_bf16(sum);
            }
        });
    }

    // Products of many tokens, of so many rows from `first` on.
    template <typename T>
    void multiply_padded(const T& tile, const Ops<T>& ops, int64_t first, int64_t rows, const Many& x, const Outputs& y,
                         int threads) const {
        Outputs to = y;
        if (to.rows != nullptr) to.rows += first;
        else if (to.sums != nullptr) to.sums += first;
        if (to.rows == nullptr && to.rounded != nullptr) to.rounded += first;
        const int64_t blocks = (rows + kernels_.lanes - 1) / kernels_.lanes;
        const int64_t piece = piece_of(blocks, GEMM_BLOCKS, x.count * rows * columns_, threads);
        parallel_for(blocks, piece, threads, [&](int64_t begin, int64_t end) {
            if (x.bf16) ops.bf16.gemm(tile, {x.halves(), x.count, x.stride, nullptr}, to, begin, end);
            else ops.f32.gemm(tile, {x.data.get(), x.count, x.stride, nullptr}, to, begin, end);
        });
    }

    // All of that.
    template <typename T, typename P>
    void add_many(const T& tile, const Ops<T>& ops, const Tokens& x, int64_t width, P&& pad, const Outputs& y,
                  int threads) const {
        const Many padded = pad_many(x, width, pad, threads);
        place(x.count, y, threads,
              [&](const Outputs& to) { multiply_padded(tile, ops, 0, rows_, padded, to, threads); });
    }

    // Inputs as they are, then zeros.
    auto plain(int64_t width) const {
        return [this, width](const auto* from, auto* to) {
            std::copy_n(from, columns_, to);
            std::fill_n(to + columns_, width - columns_, 0);
        };
    }

    // f(begin, end) for all blocks of `lanes` rows, ranges beginning at multiples of `whole`.
    template <typename F> void by_blocks(int threads, F&& f, int64_t whole = 1, int64_t tokens = 1) const {
        parallel_for(blocks(), piece(threads, whole, tokens), threads, f);
    }
    int64_t blocks() const { return (rows_ + kernels_.lanes - 1) / kernels_.lanes; }
    int64_t piece(int threads, int64_t whole = 1, int64_t tokens = 1) const {
        return std::max(int64_t(1), piece_of(blocks(), whole, tokens * rows_ * columns_, threads));
    }

    static constexpr int64_t NARROW = 64; // 16-bit columns up to which decoding a block costs less than summing up rows

    const MatmulOps& kernels_;
    int64_t rows_ = 0, columns_ = 0; // of the matrix
    OutRows out_rows_;

private:
    // Checks outputs of m tokens and returns their number.
    int64_t check_y(const Output& y, int64_t m) const {
        check("y", y, {Type::f32}, {m, out_rows_.given() ? -1 : rows_}, Layout::dense);
        const int64_t out = static_cast<int64_t>(y.shape(1));
        check_out(out);
        return out;
    }
};

} // namespace anybit
