// A tile of stored weights in the hands of one instruction set's kernels: what the formats' tiles have in common.
#pragma once

#include "common/array.h"
#include "common/scratch.h"
#include "layer/layout.h"
#include "matmul/ops.h"

#define ANYBIT_ISA baseline
#include "common/simd.h"
#undef ANYBIT_ISA

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace anybit {

// What activations are: float32, the bit patterns of bfloat16, or codes of 8 bits beside scales.
enum class Numbers { f32, bf16, i8 };

inline int64_t size_of(Numbers numbers) { return numbers == Numbers::f32 ? 4 : numbers == Numbers::bf16 ? 2 : 1; }

// Output rows of a tile, all different, in any order. Copied, not referenced: what was checked here stays what the
// kernels index with.
class OutRows {
public:
    OutRows() = default;
    OutRows(std::vector<int32_t> rows, int64_t out)
        : rows_(std::make_shared<const std::vector<int32_t>>(std::move(rows))) {
        std::vector<int32_t> sorted = *rows_;
        std::sort(sorted.begin(), sorted.end());
        for (size_t i = 0; i < sorted.size(); ++i)
            if (sorted[i] < 0 || sorted[i] >= out || (i > 0 && sorted[i] == sorted[i - 1]))
                refuse("rows hold " + std::to_string(sorted[i]) +
                       (i > 0 && sorted[i] == sorted[i - 1] ? " twice" : "") +
                       ": expected different output rows from 0 to " + std::to_string(out - 1));
        ascend_ = sorted == *rows_;
        if (static_cast<int64_t>(rows_->size()) != out) return;
        auto inverse = std::make_shared<std::vector<int32_t>>(rows_->size());
        for (size_t i = 0; i < rows_->size(); ++i)
            (*inverse)[static_cast<size_t>((*rows_)[i])] = static_cast<int32_t>(i);
        inverse_ = std::move(inverse);
    }
    bool given() const { return rows_ != nullptr; }
    bool ascend() const { return ascend_; }
    const int32_t* data() const { return given() ? rows_->data() : nullptr; } // null: all, in order
    // Which row is which output's, where they are given and are all of them; else null.
    const int32_t* inverse() const { return inverse_ != nullptr ? inverse_->data() : nullptr; }

private:
    bool ascend_ = true;
    std::shared_ptr<const std::vector<int32_t>> rows_, inverse_;
};

// How a tile multiplies so many tokens that come in one form. A plan asks for it once and keeps it.
struct Way {
    enum class Kernel {
        gemv,    // few tokens: weights are decoded for some of them at a time; adds to sums
        gemm,    // many: decoded once for all; takes any outputs
        by_word, // few, or many, where vectors have no kernel: a word of each bitplane at a time; adds to sums
    };
    Kernel kernel;
    Numbers inputs;      // that it reads: those that came, or what they are turned into
    bool direct = false; // reads them where they lie; else from where `arrange` puts them
    int64_t unit = 1;    // rows that a thread takes together
    int64_t own = 0;     // bytes that each thread needs for itself
    bool whole = false;  // inputs are WholeInputs
    int64_t beside = 1;  // tokens that `arrange` puts into the same cache lines: a thread arranges all of them

    // Whether it takes outputs that are to be set or rounded.
    bool finishes() const { return kernel == Kernel::gemm || whole; }
};

// Inputs of some tokens as a way reads them: rows of `stride` numbers, or what `arrange` made.
struct TileInputs {
    const void* data;
    int64_t tokens, stride;

    const float* floats() const { return static_cast<const float*>(data); }
    const uint16_t* halves() const { return static_cast<const uint16_t*>(data); }
    const int8_t* codes() const { return static_cast<const int8_t*>(data); }
};

class Tile {
public:
    Tile(const Tile&) = delete; // the kernels' view points into the object
    virtual ~Tile() = default;

    // How it multiplies so many tokens, or nothing if it does not take such inputs.
    virtual std::optional<Way> way(int64_t tokens, Numbers inputs) const = 0;
    // Up to how many tokens rounded inputs take less time than others.
    virtual int64_t most_rounded([[maybe_unused]] Numbers instead) const { return BATCH; }
    // Tokens up to which each has the bits that it has alone.
    virtual int64_t alike(Numbers inputs) const { return few(inputs) > 0 ? few(inputs) : BATCH; }
    // Inputs that share a scale where it takes rounded ones from its caller; 0: it does not.
    virtual int64_t input_group_size() const { return 0; }
    // Whether the scales of rounded ones must be whole multiples of one number (InputGrid::multiples).
    virtual bool wants_multiples() const { return false; }
    // How many of its inputs are rounded, the first ones, where its layer rounds.
    virtual int64_t rounded() const { return columns_; }

    // Bytes of arranged inputs.
    virtual int64_t bytes(const Way&, int64_t) const { return 0; }
    // Put token k of so many into the kernels' order: x [columns], and where it is rounded a scale for each group and,
    // if its layer rounded it, the inputs as they were. Any thread may take any token.
    virtual void arrange(const Way&, const void*, const float*, const float*, int64_t, int64_t, char*) const {}
    // The product with the rows begin <= i < end, `begin` a multiple of the way's unit (or where `unit_row` says),
    // added to `y.sums` or finished as `y` says; `y.rows` are the tile's, or null if its rows lie side by side in `y`.
    virtual void multiply(const Way&, const TileInputs& x, const Outputs& y, int64_t begin, int64_t end,
                          char* own) const = 0;
    // The first row of a unit.
    virtual int64_t unit_row(const Way& way, int64_t unit) const { return std::min(unit * way.unit, rows_); }
    virtual int64_t units(const Way& way) const { return (rows_ + way.unit - 1) / way.unit; }

    // out float32 [rows, columns] = the weights.
    virtual void dequantize(float* out, int threads) const = 0;
    // The same rounded to bfloat16, if there is a shorter way than by float32.
    virtual bool dequantize_bf16(uint16_t*, int) const { return false; }
    // Whether single rows can be had, and row i [columns] of them.
    virtual bool has_rows() const { return false; }
    virtual void row(int64_t, float*) const {}

    // The same weights at fewer bits, nothing copied; null: it has one width.
    virtual std::shared_ptr<const Tile> at(const TileLayout&) const { return nullptr; }

    int64_t rows() const { return rows_; }
    int64_t columns() const { return columns_; }
    const OutRows& out_rows() const { return out_rows_; }

protected:
    explicit Tile(const MatmulOps& ops) : ops_(ops) {}

    // Of more tokens than this, weights are decoded once for all.
    virtual int64_t few(Numbers inputs) const {
        return inputs == Numbers::f32    ? GEMV_TOKENS
               : inputs == Numbers::bf16 ? ops_.gemv_tokens_bf16
                                         : ops_.gemv_tokens_int8;
    }

    int64_t blocks() const { return (rows_ + ops_.lanes - 1) / ops_.lanes; }

    // f(begin, end) for all blocks of `lanes` rows, on the pool: for what happens once.
    template <typename F> void by_blocks(int threads, F&& f, int64_t whole = 1) const {
        parallel_for(blocks(), std::max(int64_t(1), piece_of(blocks(), whole, rows_ * columns_, threads)), threads, f);
    }

    // Rows of a unit that blocks of lanes share.
    int64_t blocks_of(int64_t row) const { return (row + ops_.lanes - 1) / ops_.lanes; }

    const MatmulOps& ops_;
    int64_t rows_ = 0, columns_ = 0; // of the matrix
    OutRows out_rows_;
};

// Memory that can be cut: each piece begins at a cache line.
constexpr int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

} // namespace anybit
