// Tiles whose blocks of rows are read by the kernels of one format, with inputs that are padded or arranged: formats
// "group int", "two_four" (its 2-bit channels), "codebook" by input channel, and "float16".
#pragma once

#include "layer/tile.h"

#include <type_traits>

namespace anybit {

inline const GroupIntOps& kernels_of(const MatmulOps& ops, const GroupInt&) { return ops.group_int; }
inline const PackedOps<TwoFour>& kernels_of(const MatmulOps& ops, const TwoFour&) { return ops.two_four; }
inline const CodebookByChannelOps& kernels_of(const MatmulOps& ops, const CodebookByChannel&) {
    return ops.codebook_by_channel;
}
inline const Ops<Float16>& kernels_of(const MatmulOps& ops, const Float16&) { return ops.float16; }

template <typename T> class PackedTile : public Tile {
public:
    std::optional<Way> way(int64_t tokens, Numbers inputs) const override {
        switch (inputs) {
        case Numbers::f32: return way_of(kernels().f32, inputs, tokens);
        case Numbers::bf16: return way_of(kernels().bf16, inputs, tokens);
        default: return takes_int8() ? way_of(kernels().int8, inputs, tokens) : std::nullopt;
        }
    }

    int64_t input_group_size() const override {
        if constexpr (GROUPED) return takes_int8() ? t_.group_size : 0;
        return 0;
    }

    int64_t bytes(const Way& way, int64_t tokens) const override { return room(way, tokens).bytes; }

    void arrange(const Way& way, const void* x, const float* scales, const float*, int64_t k, int64_t tokens,
                 char* to) const override {
        const Room at = room(way, tokens);
        switch (way.inputs) {
        case Numbers::f32: return arrange_as(kernels().f32, way, static_cast<const float*>(x), k, at, to);
        case Numbers::bf16: return arrange_as(kernels().bf16, way, static_cast<const uint16_t*>(x), k, at, to);
        case Numbers::i8: break;
        }
        const int64_t n = groups();
        auto* sums = reinterpret_cast<int32_t*>(to + at.sums) + k * n;
        kernels().int8.prepare(t_, static_cast<const int8_t*>(x), nullptr,
                               {reinterpret_cast<int8_t*>(to) + k * at.stride, nullptr, sums});
        std::copy_n(scales, n, reinterpret_cast<float*>(to + at.scales) + k * n);
    }

    void multiply(const Way& way, const TileInputs& x, const Outputs& y, int64_t begin, int64_t end,
                  char*) const override {
        const Room at = room(way, x.tokens);
        const auto* from = static_cast<const char*>(x.data);
        const int64_t stride = way.direct ? x.stride : at.stride;
        const bool rows = std::is_same_v<T, Float16> && way.kernel == Way::Kernel::gemv;
        const int64_t first = rows ? begin : begin / ops_.lanes, last = rows ? end : blocks_of(end);
        const auto run = [&](const auto& product, const auto& inputs) {
            if (way.kernel == Way::Kernel::gemv) product.gemv(t_, inputs, y.sums, y.stride, first, last);
            else product.gemm(t_, inputs, y, first, last);
        };
        const auto* sums = reinterpret_cast<const float*>(from + at.sums);
        switch (way.inputs) {
        case Numbers::f32: return run(kernels().f32, Inputs<float>{x.floats(), x.tokens, stride, sums});
        case Numbers::bf16: return run(kernels().bf16, Inputs<uint16_t>{x.halves(), x.tokens, stride, sums});
        case Numbers::i8:
            return run(kernels().int8,
                       Inputs<int8_t>{x.codes(), x.tokens, stride, reinterpret_cast<const float*>(from + at.scales),
                                      reinterpret_cast<const int32_t*>(from + at.sums)});
        }
    }

    void dequantize(float* out, int threads) const override {
        by_blocks(threads, [&](int64_t begin, int64_t end) { kernels().dequantize(t_, out, begin, end); });
    }

protected:
    explicit PackedTile(const MatmulOps& ops) : Tile(ops) {}

    const auto& kernels() const { return kernels_of(ops_, t_); }

    virtual bool takes_int8() const { return false; }

    T t_{};

private:
    static constexpr bool GROUPED = std::is_same_v<T, GroupInt> || std::is_same_v<T, TwoFour>;
    static constexpr bool PLAIN = std::is_same_v<T, Float16>; // float32 inputs are read as they are

    template <typename P> std::optional<Way> way_of(const P& product, Numbers inputs, int64_t tokens) const {
        const bool many = tokens > few(inputs);
        if (many ? product.gemm == nullptr : product.gemv == nullptr) return std::nullopt;
        Way way{many ? Way::Kernel::gemm : Way::Kernel::gemv, inputs};
        way.direct = PLAIN && inputs == Numbers::f32;
        const int64_t blocks = many ? GEMM_BLOCKS : PLAIN ? 1 : std::is_same_v<T, CodebookByChannel> ? 4 : GEMM_BLOCKS;
        way.unit = blocks * ops_.lanes;
        return way;
    }

    int64_t groups() const {
        if constexpr (GROUPED) return t_.groups;
        return 0;
    }

    // Where arranged inputs of some tokens lie: rows of a stride, then sums by group, then scales by group.
    struct Room {
        int64_t width, stride; // numbers
        int64_t sums, scales, bytes;
    };
    Room room(const Way& way, int64_t tokens) const {
        if (way.direct) return {};
        Room room{};
        room.width = PLAIN ? columns_ + columns_ % 2 : kernels().columns(t_);
        const int64_t size = size_of(way.inputs), of_groups = lines(tokens * groups() * 4);
        const bool apart = way.kernel == Way::Kernel::gemm || way.inputs == Numbers::i8;
        room.stride = apart ? odd_lines(room.width, size) : room.width;
        room.sums = lines(tokens * room.stride * size + (way.inputs == Numbers::i8 ? INTS_BEHIND : 0));
        room.scales = room.sums + of_groups;
        room.bytes = room.scales + (way.inputs == Numbers::i8 ? of_groups : 0);
        return room;
    }

    template <typename P, typename X>
    void arrange_as(const P& product, const Way& way, const X* x, int64_t k, const Room& at, char* to) const {
        X* out = reinterpret_cast<X*>(to) + k * at.stride;
        if (way.kernel == Way::Kernel::gemv && product.prepare != nullptr)
            return product.prepare(t_, x, out, reinterpret_cast<float*>(to + at.sums) + k * groups());
        X* const end = out + at.stride;
        if constexpr (std::is_same_v<T, GroupInt>) {
            for (int64_t g = 0, room = at.width / t_.groups; g < t_.groups; ++g, out += room) {
                const int64_t first = g * t_.group_size, count = std::min(t_.group_size, columns_ - first);
                std::fill(std::copy_n(x + first, count, out), out + room, X(0));
            }
        } else out = std::copy_n(x, columns_, out);
        std::fill(out, end, X(0));
    }
};

} // namespace anybit
