// A whole linear layer in one call: its tiles, what each reads of the inputs and how it rounds them, and its sparse
// part.
#pragma once

#include "module/tile.h"

namespace anybit {

// Memory for numbers on the way, kept from one part of a layer to the next.
template <typename T> class Room {
public:
    T* of(int64_t n) {
        if (n > size_) memory_ = make_scratch((n * static_cast<int64_t>(sizeof(T)) + 3) / 4);
        size_ = std::max(n, size_);
        return get();
    }
    T* get() const { return reinterpret_cast<T*>(memory_.get()); }

private:
    Scratch memory_;
    int64_t size_ = 0;
};

// Build it first, then share it: `add_tile` and the `set_` functions must not run beside `matmul`.
class Layer {
public:
    // isa: what rounds inputs and multiplies sparse weights; tiles have their own.
    Layer(int64_t out, int64_t in, const std::optional<std::string>& isa)
        : kernels_(find_matmul_ops(isa)), out_(out), in_(in) {
        if (in < 1 || out < 1 || in >= MAX_SIZE || out >= MAX_SIZE)
            refuse("a layer of " + std::to_string(out) + " x " + std::to_string(in) + ": expected 1 to 2^31 - 1");
    }
    Layer(const Layer&) = delete;

    // Multiply `tile` with the inputs `cols` (or all); act_bits: rounded by group to `clip` shares of their largest, or
    // to `fixed` scales, 0 where they are not.
    void add_tile(nb::object tile, const std::optional<Input>& cols, int64_t act_bits, int64_t group_size,
                  const std::optional<Input>& clip, const std::optional<Input>& fixed) {
        const Tile* bound = nullptr;
        if (!nb::try_cast(tile, bound) || bound == nullptr) refuse("tile is none of this module's tiles");
        Part part{tile, bound, {}, {}, 0, 0, {}, {}, false};
        part.tile->check_out(out_);
        const int64_t columns = part.tile->columns();
        if (columns < 1) refuse("a tile without columns");
        if (!cols && columns != in_) refuse("a tile of " + std::to_string(columns) + " columns needs `cols`");
        if (cols) {
            check("cols", *cols, {Type::i32}, {columns}, Layout::dense);
            const auto* from = static_cast<const int32_t*>(cols->data());
            part.cols.assign(from, from + columns);
            for (int32_t j : part.cols)
                if (j < 0 || j >= in_)
                    refuse("cols hold " + std::to_string(j) + ", expected 0 to " + std::to_string(in_ - 1));
            part.runs = find_runs(part.cols);
        }
        if (act_bits != 0) {
            if (act_bits < 2 || act_bits > 8) refuse("act_bits is " + std::to_string(act_bits) + ", expected 2 to 8");
            if (group_size < 1) refuse("group_size is " + std::to_string(group_size) + ", expected at least 1");
            if (bool(clip) == bool(fixed)) refuse("give either clip or fixed");
            part.act_bits = static_cast<int>(act_bits);
            part.group_size = std::min(group_size, columns);
            const int64_t groups = (columns - 1) / part.group_size + 1;
            if (part.tile->takes_ints() && groups > 1 && group_size != part.tile->input_group_size())
                refuse("inputs in groups of " + std::to_string(group_size) + ", but the tile's are of " +
                       std::to_string(part.tile->input_group_size()));
            if (part.tile->takes_ints() && groups != part.tile->input_groups())
                refuse("inputs in " + std::to_string(groups) + " groups, but the tile has " +
                       std::to_string(part.tile->input_groups()));
            const Input& given = clip ? *clip : *fixed;
            check(clip ? "clip" : "fixed", given, {Type::f16, Type::u16}, {groups}, Layout::dense);
            const auto* from = static_cast<const uint16_t*>(given.data());
            (clip ? part.clip : part.fixed).assign(from, from + groups);
            const Part* last = parts_.empty() ? nullptr : &parts_.back();
            part.rounds_alike = last != nullptr && last->cols == part.cols && last->act_bits == part.act_bits &&
                                last->group_size == part.group_size && last->clip == part.clip &&
                                last->fixed == part.fixed && last->tile->takes_ints() == part.tile->takes_ints();
        }
        by_rows_ = by_rows_ && columns == in_;
        met_.resize(static_cast<size_t>(out_));
        const int32_t* rows = part.tile->out_rows();
        for (int64_t i = 0; by_rows_ && i < part.tile->rows(); ++i) {
            auto met = met_[static_cast<size_t>(rows != nullptr ? rows[i] : i)];
            by_rows_ = !met;
            met = true;
            ++rows_met_;
        }
        parts_.push_back(std::move(part));
    }

    // Weights beside the tiles: the values are referenced, the indices copied.
    void set_sparse(Input values, Input columns, Input row_ptr) {
        const int64_t n = size_of("values", values, 0, 1);
        check("values", values, {Type::f16, Type::u16}, {n}, Layout::dense);
        check("columns", columns, {Type::u16, Type::u32}, {n}, Layout::dense);
        check("row_ptr", row_ptr, {Type::i32}, {out_ + 1}, Layout::dense);
        const auto* from = static_cast<const int32_t*>(row_ptr.data());
        std::vector<int32_t> ends(from, from + out_ + 1);
        if (ends.front() != 0 || ends.back() != n || !std::is_sorted(ends.begin(), ends.end()))
            refuse("row_ptr does not ascend from 0 to the number of values");
        const bool narrow = type_of(columns.dtype()) == Type::u16;
        auto narrow_columns = checked_columns<uint16_t>(columns, narrow ? n : 0);
        auto wide_columns = checked_columns<uint32_t>(columns, narrow ? 0 : n);
        row_ptr_ = std::move(ends); // nothing is refused from here on
        columns16_ = std::move(narrow_columns);
        columns32_ = std::move(wide_columns);
        values_ = values;
        sparse_ = {static_cast<const uint16_t*>(values.data()), narrow ? columns16_.data() : nullptr,
                   narrow ? nullptr : columns32_.data(), row_ptr_.data(), n == 0 ? 0 : out_};
    }

    // What the inputs are multiplied with first, float32 [in].
    void set_input_scale(const Input& scale) {
        check("scale", scale, {Type::f32}, {in_}, Layout::dense);
        const auto* from = static_cast<const float*>(scale.data());
        scale_.assign(from, from + in_);
    }

    // y [m, out] = x [m, in] @ W.T, both float32, or both bfloat16 (or its bits as uint16).
    void matmul(const Input& x, const Output& y, int64_t threads) const {
        const int used = check_threads(threads);
        const int64_t m = size_of("x", x, 0, 2);
        check("x", x, {Type::f32, Type::bf16, Type::u16}, {m, in_}, Layout::dense);
        const bool bf16 = type_of(x.dtype()) != Type::f32;
        if (bf16) check("y", y, {Type::bf16, Type::u16}, {m, out_}, Layout::dense);
        else check("y", y, {Type::f32}, {m, out_}, Layout::dense);
        const void* from = x.data();
        void* to = y.data();
        nb::gil_scoped_release release;
        // Many tokens in turns, so that what lies between takes no more memory the more they are; none is of few.
        const int64_t turns = m <= BATCH ? 1 : (m - 1) / (BATCH - 32) + 1;
        for (int64_t i = 0; i < turns; ++i) {
            const int64_t first = m * i / turns / 32 * 32,
                          n = (i + 1 == turns ? m : m * (i + 1) / turns / 32 * 32) - first;
            if (bf16)
                multiply_bf16(static_cast<const uint16_t*>(from) + first * in_, n,
                              static_cast<uint16_t*>(to) + first * out_, used);
            else
                multiply_floats(static_cast<const float*>(from) + first * in_, n,
                                static_cast<float*>(to) + first * out_, used);
        }
    }

private:
    struct Run { // inputs beside each other
        int32_t first, count;
    };

    struct Part {
        nb::object keeper; // of the tile
        const Tile* tile;
        std::vector<int32_t> cols; // empty: all
        std::vector<Run> runs;     // the same, where that makes few
        int act_bits;              // 0: not rounded
        int64_t group_size;
        std::vector<uint16_t> clip, fixed;
        bool rounds_alike; // as the part before
    };

    void multiply_floats(const float* x, int64_t m, float* y, int threads) const {
        const int64_t size = m * in_;
        Scratch scaled;
        if (!scale_.empty()) {
            scaled = make_scratch(size);
            for_tokens(m, in_, threads, [&](int64_t k) {
                for (int64_t j = 0; j < in_; ++j) scaled.get()[k * in_ + j] = x[k * in_ + j] * scale_.data()[j];
            });
            x = scaled.get();
        }
        const bool fresh = begins(m, false);
        if (!fresh) clear(y, m, out_, threads);
        add(x, nullptr, m, {y, out_, fresh}, threads);
    }

    void multiply_bf16(const uint16_t* x, int64_t m, uint16_t* y, int threads) const {
        const int64_t size = m * in_;
        const bool wide = needs_floats(m), fresh = begins(m, true), last = ends(m, true);
        const int64_t between = alone() && fresh && last ? 0 : m * out_;
        const Scratch scratch = make_scratch((wide ? size : 0) + between + (scale_.empty() ? 0 : (size + 1) / 2));
        float *sums = scratch.get(), *floats = wide ? sums + between : nullptr;
        if (wide) for_tokens(m, in_, threads, [&](int64_t k) { baseline::widen(x + k * in_, in_, floats + k * in_); });
        if (!scale_.empty()) { // rounded again, as the weights would be that absorb the scales
            auto* halves = reinterpret_cast<uint16_t*>(floats + size);
            for_tokens(m, in_, threads, [&](int64_t k) {
                for (int64_t j = 0; j < in_; ++j) floats[k * in_ + j] *= scale_.data()[j];
                kernels_.to_bfloat16(floats + k * in_, in_, halves + k * in_);
            });
            x = halves;
        }
        if (!fresh) clear(sums, m, out_, threads);
        add(floats, x, m, {sums, out_, fresh, last ? y : nullptr}, threads);
        if (!last)
            for_tokens(m, out_, threads, [&](int64_t k) { kernels_.to_bfloat16(sums + k * out_, out_, y + k * out_); });
    }

    // Whether each part is all there is of its rows, and every row has one.
    bool alone() const { return by_rows_ && rows_met_ == out_; }

    // Whether the first part, or each that is alone, writes all sums, so that they need not be cleared.
    bool begins(int64_t m, bool bf16) const {
        return alone() ? all_finish(m, bf16) : !parts_.empty() && finishes(parts_.front(), m, bf16);
    }
    // Whether the last one, or each, rounds them.
    bool ends(int64_t m, bool bf16) const {
        if (sparse_.rows > 0) return false;
        return alone() ? all_finish(m, bf16) : !parts_.empty() && finishes(parts_.back(), m, bf16);
    }
    bool all_finish(int64_t m, bool bf16) const {
        return std::all_of(parts_.begin(), parts_.end(), [&](const Part& part) { return finishes(part, m, bf16); });
    }
    bool finishes(const Part& part, int64_t m, bool bf16) const {
        if (!alone() && part.tile->rows() != out_) return false;
        if (part.act_bits != 0 && part.tile->prefers_ints(m, bf16)) return part.tile->finishes_ints(m);
        return part.tile->finishes(m, bf16 && part.tile->takes_bf16(m));
    }

    // Whether anything reads bfloat16 inputs as floats, all of them at a time.
    bool needs_floats(int64_t m) const {
        if (!scale_.empty() || sparse_.rows > 0) return true;
        return std::any_of(parts_.begin(), parts_.end(),
                           [m](const Part& part) { return part.act_bits == 0 && !part.tile->takes_bf16(m); });
    }

    // y += the product of inputs in both precisions; halves may be null, floats where nothing needs them. If sums are
    // to be fresh, or rounded, the first part makes them, the last one rounds them, and those that are alone do both.
    void add(const float* floats, const uint16_t* halves, int64_t m, const Outputs& all, int threads) const {
        Room<int8_t> codes;
        Room<float> scales, gathered;
        Room<uint16_t> gathered_halves;
        for (const Part& part : parts_) {
            const int64_t columns = part.tile->columns();
            const bool first = alone() || &part == &parts_.front(), last = alone() || &part == &parts_.back();
            const Outputs y{all.sums, all.stride, all.fresh && first, last ? all.rounded : nullptr};
            if (part.act_bits != 0) {
                if (!part.rounds_alike) round(part, floats, halves, m, codes, scales, threads);
                if (part.tile->prefers_ints(m, halves != nullptr)) {
                    part.tile->add_int_product({codes.get(), scales.get(), m}, y, threads);
                    continue;
                }
                const float* rounded = restore(part, m, codes.get(), scales.get(), gathered, threads);
                if (halves != nullptr && part.tile->takes_bf16(m)) {
                    uint16_t* to = gathered_halves.of(m * columns);
                    for_tokens(m, columns, threads, [&](int64_t k) {
                        kernels_.to_bfloat16(rounded + k * columns, columns, to + k * columns);
                    });
                    part.tile->add_product({to, true, m, columns}, y, threads);
                } else part.tile->add_product({rounded, false, m, columns}, y, threads);
            } else if (halves != nullptr && part.tile->takes_bf16(m))
                part.tile->add_product({gather(part, halves, m, gathered_halves, threads), true, m, columns}, y,
                                       threads);
            else part.tile->add_product({gather(part, floats, m, gathered, threads), false, m, columns}, y, threads);
        }
        if (sparse_.rows == 0) return;
        const int64_t lanes = kernels_.lanes, blocks = (m + lanes - 1) / lanes;
        const int64_t piece = piece_of(out_, lanes, m * static_cast<int64_t>(row_ptr_.back()) * SPARSE_WORK, threads);
        if (m <= GEMV_TOKENS)
            return parallel_for(out_, piece, threads, [&](int64_t begin, int64_t end) {
                kernels_.sparse.f32.gemv(sparse_, {floats, m, in_, nullptr}, all.sums, out_, begin, end);
            });
        const Scratch turned = make_scratch(blocks * in_ * lanes);
        for_tokens(blocks, in_ * lanes, threads, [&](int64_t b) {
            const float* from = floats + b * lanes * in_;
            float* to = turned.get() + b * lanes * in_;
            const int64_t there = std::min(lanes, m - b * lanes);
            for (int64_t j = 0; j < in_; ++j, to += lanes)
                for (int64_t l = 0; l < lanes; ++l) to[l] = l < there ? from[l * in_ + j] : 0.0f;
        });
        parallel_for(out_, piece, threads, [&](int64_t begin, int64_t end) {
            kernels_.sparse.f32.gemm(sparse_, {turned.get(), m, in_, nullptr}, {all.sums, out_}, begin, end);
        });
    }

    static std::vector<Run> find_runs(const std::vector<int32_t>& cols) {
        std::vector<Run> runs;
        for (int32_t j : cols)
            if (runs.empty() || j != runs.back().first + runs.back().count) runs.push_back({j, 1});
            else ++runs.back().count;
        if (runs.size() * LEAST_RUN > cols.size()) runs.clear();
        return runs;
    }

    // The inputs of a token that a part reads.
    template <typename T> static void pick(const Part& part, const T* from, T* to) {
        if (part.runs.empty())
            for (int32_t j : part.cols) *to++ = from[j];
        for (const Run& run : part.runs) to = std::copy_n(from + run.first, run.count, to);
    }

    template <typename T> const T* gather(const Part& part, const T* x, int64_t m, Room<T>& room, int threads) const {
        if (part.cols.empty()) return x;
        const auto columns = static_cast<int64_t>(part.cols.size());
        T* to = room.of(m * columns);
        for_tokens(m, columns, threads, [&](int64_t k) { pick(part, x + k * in_, to + k * columns); });
        return to;
    }

    // Codes and scales of the inputs that a part reads, of those in float32 where they are there.
    void round(const Part& part, const float* floats, const uint16_t* halves, int64_t m, Room<int8_t>& codes,
               Room<float>& scales, int threads) const {
        const int64_t columns = part.tile->columns(), groups = (columns - 1) / part.group_size + 1;
        const InputGrid grid{part.act_bits, columns, part.group_size, part.clip.empty() ? nullptr : part.clip.data(),
                             part.fixed.empty() ? nullptr : part.fixed.data()};
        int8_t* to = codes.of(m * columns);
        float* to_scales = scales.of(m * groups);
        for_tokens(m, columns, threads, [&](int64_t k) {
            const float* row = floats == nullptr ? nullptr : floats + k * in_;
            const uint16_t* half_row = floats == nullptr ? halves + k * in_ : nullptr;
            if (row == nullptr || !part.cols.empty()) {
                auto* own = static_cast<float*>(thread_memory(columns * 6, 1)); // and as many halves
                auto* picked = reinterpret_cast<uint16_t*>(own + columns);
                if (row != nullptr) pick(part, row, own);
                else {
                    if (!part.cols.empty()) pick(part, half_row, picked);
                    baseline::widen(part.cols.empty() ? half_row : picked, columns, own);
                }
                row = own;
            }
            kernels_.quantize_inputs(row, grid, to + k * columns, to_scales + k * groups);
        });
    }

    const float* restore(const Part& part, int64_t m, const int8_t* codes, const float* scales, Room<float>& room,
                         int threads) const {
        const int64_t columns = part.tile->columns(), groups = (columns - 1) / part.group_size + 1;
        float* x = room.of(m * columns);
        for_tokens(m, columns, threads, [&](int64_t k) {
            const int8_t* code = codes + k * columns;
            float* to = x + k * columns;
            for (int64_t g = 0; g < groups; ++g) {
                const float scale = scales[k * groups + g];
                for (int64_t j = g * part.group_size, end = std::min(columns, j + part.group_size); j < end; ++j)
                    to[j] = static_cast<float>(code[j]) * scale;
            }
        });
        return x;
    }

    template <typename T> std::vector<T> checked_columns(const Input& columns, int64_t n) const {
        const auto* from = static_cast<const T*>(columns.data());
        std::vector<T> made(from, from + n);
        for (T column : made)
            if (static_cast<int64_t>(column) >= in_)
                refuse("columns hold " + std::to_string(column) + ", expected 0 to " + std::to_string(in_ - 1));
        return made;
    }

    static constexpr size_t LEAST_RUN = 8;    // inputs beside each other, on average, that are copied as such
    static constexpr int64_t SPARSE_WORK = 8; // multiply-adds of a dense matrix that one here costs, about

    const MatmulOps& kernels_;
    int64_t out_, in_;
    std::vector<Part> parts_;
    std::vector<bool> met_; // rows that parts have
    int64_t rows_met_ = 0;
    bool by_rows_ = true; // no row has two parts
    std::vector<float> scale_;
    std::optional<Input> values_;
    std::vector<uint16_t> columns16_; // what was checked stays what the kernel indexes with
    std::vector<uint32_t> columns32_;
    std::vector<int32_t> row_ptr_;
    SparseRows sparse_{};
};

} // namespace anybit
