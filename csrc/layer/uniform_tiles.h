// Tiles of codes on a uniform grid, "group int" and the 2-bit channels of "two_four", and of 16-bit weights.
#pragma once

#include "layer/packed_tile.h"

namespace anybit {

// A tile in format "group int" in the kernels' order, which it holds.
class GroupIntTile final : public PackedTile<GroupInt> {
public:
    // Only the sizes of `sizes` are read.
    GroupIntTile(const MatmulOps& ops, const GroupInt& sizes, const GroupInt::Stored& from, OutRows out_rows,
                 int threads)
        : PackedTile(ops) {
        t_ = sizes;
        rows_ = t_.rows;
        columns_ = t_.columns;
        out_rows_ = std::move(out_rows);
        t_.out_rows = out_rows_.data();
        const int64_t entries = blocks() * ops.lanes * t_.groups;
        codes_ = make_weights(kernels().bytes(t_));
        grid_ = make_weights(entries * (from.zeros != nullptr ? 3 : 2));
        auto* scales = reinterpret_cast<uint16_t*>(grid_.get());
        auto* zeros = from.zeros != nullptr ? reinterpret_cast<uint8_t*>(scales + entries) : nullptr;
        const GroupInt::Packed to{codes_.get(), scales, zeros};
        with_scratch(threads, [&](uint8_t* scratch, int64_t begin, int64_t end) {
            kernels().interleave(t_, from, to, scratch, begin, end);
        });
        t_.codes = to.codes;
        t_.scales = to.scales;
        t_.zeros = to.zeros;
    }

    // Sums of a group's rounded inputs are exact, and groups come in one order.
    int64_t alike(Numbers inputs) const override {
        return inputs == Numbers::i8 ? BATCH : PackedTile<GroupInt>::alike(inputs);
    }

    // Codes are zeros before.
    void restore(const GroupInt::Restored& to, int threads) const {
        with_scratch(threads, [&](uint8_t* scratch, int64_t begin, int64_t end) {
            kernels().restore(t_, to, scratch, begin, end);
        });
    }

    bool dequantize_bf16(uint16_t* out, int threads) const override {
        by_blocks(threads, [&](int64_t begin, int64_t end) { kernels().dequantize_bf16(t_, out, begin, end); });
        return true;
    }

    bool has_rows() const override { return !out_rows_.given(); }
    void row(int64_t i, float* out) const override { kernels().dequantize_row(t_, i, out); }

private:
    bool takes_int8() const override { return t_.group_size <= MAX_INT_GROUP; }

    template <typename F> void with_scratch(int threads, F&& f) const {
        const int64_t step = piece_of(blocks(), 1, rows_ * columns_, threads), bytes = kernels().scratch(t_);
        const Scratch scratch = make_scratch(((blocks() + step - 1) / step * bytes + 3) / 4);
        parallel_for(blocks(), step, threads, [&](int64_t begin, int64_t end) {
            f(reinterpret_cast<uint8_t*>(scratch.get()) + begin / step * bytes, begin, end);
        });
    }

    Weights codes_, grid_; // codes; scales, then zeros
};

// The 2-bit channels of a tile in format "two_four" in the kernels' order.
class TwoFourTile final : public PackedTile<TwoFour> {
public:
    // Only the sizes of `sizes` are read; scales [rows / SCALE_ROWS, groups], rounded up, and zeros the same.
    TwoFourTile(const MatmulOps& ops, const TwoFour& sizes, const TwoFour::Stored& from, std::vector<float> scales,
                std::vector<uint8_t> zeros, int threads)
        : PackedTile(ops), scales_(std::move(scales)), zeros_(std::move(zeros)) {
        t_ = sizes;
        rows_ = t_.rows;
        columns_ = t_.columns;
        bytes_ = make_weights(kernels().bytes(t_));
        const TwoFour::Packed to{bytes_.get()};
        by_blocks(threads,
                  [&](int64_t begin, int64_t end) { kernels().interleave(t_, from, to, nullptr, begin, end); });
        t_.bytes = to.bytes;
        t_.scales = scales_.data();
        t_.zeros = zeros_.data();
    }

    void restore(const TwoFour::Restored& to, int threads) const {
        by_blocks(threads, [&](int64_t begin, int64_t end) { kernels().restore(t_, to, nullptr, begin, end); });
    }

private:
    Weights bytes_;
    std::vector<float> scales_;
    std::vector<uint8_t> zeros_;
};

// A tile in format "float16", or of bfloat16, bound to the array that holds it.
class Float16Tile final : public PackedTile<Float16> {
public:
    Float16Tile(const MatmulOps& ops, const Array& values, OutRows out_rows) : PackedTile(ops), values_(values) {
        out_rows_ = std::move(out_rows);
        rows_ = values.shape[0];
        columns_ = values.shape[1];
        t_ = {values.as<uint16_t>(), out_rows_.data(), rows_, columns_, values.type == Type::bf16};
    }

    void dequantize(float* out, int threads) const override {
        for_tokens(rows_, columns_, threads, [&](int64_t i) { row(i, out + i * columns_); });
    }

    bool has_rows() const override { return !out_rows_.given(); }
    void row(int64_t i, float* out) const override {
        const uint16_t* from = t_.values + i * columns_;
        if (t_.bf16) return baseline::widen(from, columns_, out);
        for (int64_t j = 0; j < columns_; ++j) out[j] = baseline::half_to_float(from[j]);
    }

private:
    // Decoding a block of few columns costs less than summing up rows.
    int64_t few(Numbers inputs) const override {
        return inputs == Numbers::f32 && columns_ <= NARROW ? 0 : Tile::few(inputs);
    }
    static constexpr int64_t NARROW = 64;

    Array values_;
};

} // namespace anybit
