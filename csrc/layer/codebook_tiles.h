// Tiles in format "codebook": by input channel, in the kernels' order or as they are stored, and by rows.
#pragma once

#include "layer/lookup_tile.h"
#include "layer/packed_tile.h"

namespace anybit {

// Tables of codebooks, [n, entries]: float16 as they are stored, or float32.
struct Table {
    Array stored;              // float16; or
    std::vector<float> floats; // decoded
    int64_t entries = 0;

    float operator()(int64_t row, int64_t e) const {
        const int64_t at = row * entries + e;
        return floats.empty() ? baseline::half_to_float(stored.as<uint16_t>()[at]) : floats[static_cast<size_t>(at)];
    }
};

// A tile in format "codebook" by input channel, in the kernels' order.
class ChannelTile final : public PackedTile<CodebookByChannel> {
public:
    // planes [bits, channels, rows / 32 rounded up]; of more than FLOAT_BITS bits, a table that is stored as float16.
    ChannelTile(const MatmulOps& ops, int bits, int64_t rows, int64_t channels, const uint32_t* planes,
                const Table& table, int threads)
        : PackedTile(ops) {
        t_.bits = bits;
        t_.rows = rows_ = rows;
        t_.columns = columns_ = channels;
        const auto room = static_cast<size_t>(kernels().columns(t_) * CodebookByChannel::entries(bits) + 1);
        if (bits > CodebookByChannel::FLOAT_BITS) halves_.assign(room, 0);
        else table_.assign(room, 0.0f);
        for (int64_t j = 0; j < channels; ++j)
            for (int64_t e = 0; e < table.entries; ++e) {
                const auto at = static_cast<size_t>(j * CodebookByChannel::entries(bits) + e);
                if (halves_.empty()) table_[at] = table(j, e);
                else halves_[at] = table.stored.as<uint16_t>()[j * table.entries + e];
            }
        bytes_ = make_weights(kernels().bytes(t_));
        const CodebookByChannel::Packed to{bytes_.get()};
        by_blocks(threads,
                  [&](int64_t begin, int64_t end) { kernels().interleave(t_, {planes}, to, nullptr, begin, end); });
        t_.bytes = to.bytes;
        t_.table = table_.data();
        t_.halves = halves_.data();
        table_planes_.resize(static_cast<size_t>(kernels().table_planes_bytes(t_)));
        if (table_planes_.empty()) return;
        kernels().table_planes(t_, table_planes_.data());
        t_.planes = table_planes_.data();
    }

    // Planes are zeros before.
    void restore(uint32_t* planes, int threads) const {
        by_blocks(
            threads, [&](int64_t begin, int64_t end) { kernels().restore(t_, {planes}, nullptr, begin, end); },
            CodebookByChannel::WHOLE_ROWS / ops_.lanes);
    }

private:
    // Up to 6 bits a channel's entries are looked up in registers: fewer tokens are worth rounding for.
    int64_t few(Numbers inputs) const override {
        const int64_t most = Tile::few(inputs);
        if (inputs != Numbers::bf16 || t_.bits > CodebookByChannel::FLOAT_BITS) return most;
        return std::min(GEMV_TOKENS, 2 * most);
    }

    Weights bytes_;
    std::vector<float> table_;
    std::vector<uint16_t> halves_;
    std::vector<uint8_t> table_planes_;
};

// A tile in format "codebook" by input channel as it is stored, where no order of the kernels' own takes its table.
class StoredChannelTile final : public Tile {
public:
    StoredChannelTile(const MatmulOps& ops, int bits, int64_t rows, int64_t channels, const Array& planes, Table table)
        : Tile(ops), planes_(planes), table_(std::move(table)) {
        rows_ = rows;
        columns_ = channels;
        c_.bits = bits;
        c_.rows = channels;
        c_.columns = rows;
        c_.words = (rows + 31) / 32;
        c_.entries = table_.entries;
        for (int64_t p = 0; p < bits; ++p) c_.planes[p] = planes.as<uint32_t>() + p * channels * c_.words;
        if (table_.floats.empty()) c_.table16 = table_.stored.as<uint16_t>();
        else c_.table32 = table_.floats.data();
    }

    std::optional<Way> way(int64_t tokens, Numbers inputs) const override {
        if (inputs != Numbers::f32) return std::nullopt;
        Way way{Way::Kernel::by_word, inputs};
        way.direct = tokens > few(inputs);
        way.unit = way.direct ? GEMM_BLOCKS * ops_.lanes : WORD;
        way.own = way.direct ? 0 : lines(c_.words * WORD * 4);
        return way;
    }
    int64_t bytes(const Way&, int64_t tokens) const override { return tokens * columns_ * 4; }
    void arrange(const Way&, const void* x, const float*, const float*, int64_t k, int64_t, char* to) const override {
        std::copy_n(static_cast<const float*>(x), columns_, reinterpret_cast<float*>(to) + k * columns_);
    }
    void multiply(const Way& way, const TileInputs& x, const Outputs& y, int64_t begin, int64_t end,
                  char* own) const override {
        const CodebookByWordOps& kernels = ops_.codebook_by_word;
        const Inputs<float> inputs{x.floats(), x.tokens, x.stride, nullptr};
        const int64_t size = way.direct ? ops_.lanes : WORD, last = (end + size - 1) / size;
        if (way.direct) return kernels.gemm_by_channel(c_, inputs, y, begin / size, last);
        kernels.gemv_by_channel(c_, inputs, y.sums, y.stride, reinterpret_cast<float*>(own), begin / size, last);
    }

    void dequantize(float* out, int threads) const override {
        const Scratch turned = make_scratch(rows_ * columns_);
        decode_rows(ops_, c_, turned.get(), threads);
        for_tokens(rows_, columns_, threads, [&](int64_t i) {
            for (int64_t j = 0; j < columns_; ++j) out[i * columns_ + j] = turned.get()[j * rows_ + i];
        });
    }

private:
    static constexpr int64_t WORD = 32; // rows

    Array planes_;
    Table table_;
    CodebookByWord c_{};
};

} // namespace anybit
