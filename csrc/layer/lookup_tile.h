// Tiles of codes as bitplanes whose rows are looked up in tables: formats "codebook" by row, and "nested", whose rows
// are of falling width. Both are read as they are stored.
#pragma once

#include "layer/centroids.h"

namespace anybit {

// out [rows, columns] = the entries that codes stand for.
inline void decode_rows(const MatmulOps& ops, const CodebookByWord& c, float* out, int threads) {
    const int64_t piece = std::max(int64_t(1), piece_of(c.rows, 1, c.rows * c.columns, threads)), line = c.words * 32;
    const Scratch scratch = make_scratch(((c.rows - 1) / piece + 1) * line);
    parallel_for(c.rows, piece, threads, [&](int64_t begin, int64_t end) {
        ops.codebook_by_word.dequantize(c, out, scratch.get() + begin / piece * line, begin, end);
    });
}

// What tiles of all widths share.
struct LookupBytes {
    std::vector<Array> planes;      // uint32 [rows that have the bit, words], the most significant first
    int64_t coded = 0;              // channels that have codes; those that are kept follow
    Array kept;                     // [rows, channels] float16, or int8 codes (KeptChannels); none: no shape
    std::vector<float> kept_scales; // [channels], those stored times 2^-14; BEHIND zeros follow
    // Codes of kept channels by channel, for inputs of 8 bits, which meet a lane for each row; or nothing.
    std::vector<int8_t> kept_by_channel;
    int64_t kept_stride = 0;
    std::vector<uint8_t> kinds; // nested: [rows]
    std::vector<float> scales;  // nested: [rows]
    // Nested, with gains: scales times those of 1 and 2 bits, and of 3. Or nothing.
    std::vector<float> gained2, gained3;
    OutRows out_rows;

    void turn_kept();
    const std::vector<float>& scales_at(int bits) const {
        const std::vector<float>& gained = bits < 3 ? gained2 : gained3;
        return bits > 3 || gained.empty() ? scales : gained;
    }
};

class LookupTile final : public Tile {
public:
    // counts: rows of every plane, of as many planes as there are bits in the widest row.
    LookupTile(const MatmulOps& ops, std::shared_ptr<const LookupBytes> bytes,
               std::shared_ptr<const Centroids> centroids, const std::vector<int64_t>& counts)
        : Tile(ops), bytes_(std::move(bytes)), centroids_(std::move(centroids)) {
        rows_ = counts[0];
        out_rows_ = bytes_->out_rows;
        if (const Array& kept = bytes_->kept; !kept.shape.empty()) {
            kept_.channels = kept.shape[1];
            if (kept.type == Type::i8) {
                kept_.codes = kept.as<int8_t>();
                kept_.by_channel = bytes_->kept_by_channel.empty() ? nullptr : bytes_->kept_by_channel.data();
                kept_.stride = bytes_->kept_stride;
                kept_.scales = bytes_->kept_scales.data();
                kept_.row_scales = bytes_->scales.data();
            } else kept_.halves = kept.as<uint16_t>();
        }
        columns_ = bytes_->coded + kept_.channels;
        for (size_t bits = counts.size(); bits > 0; --bits) {
            const int64_t first = bits < counts.size() ? counts[bits] : 0, last = counts[bits - 1];
            if (first < last) spans_.push_back(span(static_cast<int>(bits), first, last));
        }
        find_forms(f32_, Numbers::f32);
        if (ops.codebook_by_row.bf16_form != nullptr) find_forms(bf16_, Numbers::bf16);
    }

    std::optional<Way> way(int64_t tokens, Numbers inputs) const override {
        const WholeOps& whole = ops_.codebook_by_row.whole;
        const bool rounded = inputs == Numbers::i8;
        const bool many = rounded
                              ? whole.gemm != nullptr && tokens >= whole.least && bytes_->coded <= whole.most_columns
                              : tokens > few(inputs);
        if (rounded && !centroids_->takes_int8()) return std::nullopt;
        Way way{many ? Way::Kernel::gemm : Way::Kernel::gemv, inputs};
        way.whole = rounded;
        way.unit = many ? GEMM_BLOCKS * ops_.lanes : WHOLE_ROWS;
        if (rounded && many) way.beside = whole.beside;
        if (inputs == Numbers::f32 && !many) way.own = lines(line() * 4);
        for (const Span& span : spans_) {
            if (inputs == Numbers::bf16 && !centroids_->takes_bf16(span.c.bits, many)) return std::nullopt;
            CodebookByRow made = span.c; // so that no product waits for tables
            centroids_->fill(made, inputs, many);
        }
        return way;
    }
    // Without a gemm of such inputs, decoding the exact weights once for all tokens takes no longer beyond.
    int64_t most_rounded(Numbers instead) const override {
        return ops_.codebook_by_row.whole.gemm != nullptr ? BATCH : 2 * few(instead);
    }
    // Sums of rounded inputs are exact.
    int64_t alike(Numbers inputs) const override { return inputs == Numbers::i8 ? BATCH : few(inputs); }
    int64_t input_group_size() const override {
        return centroids_->takes_int8() && kept_.channels == 0 ? CodebookByRow::INPUT_GROUP : 0;
    }
    bool wants_multiples() const override { return true; }
    int64_t rounded() const override { return bytes_->coded; }

    int64_t bytes(const Way& way, int64_t tokens) const override { return room(way, tokens).bytes; }
    void arrange(const Way& way, const void* x, const float* scales, const float* exact, int64_t k, int64_t tokens,
                 char* to) const override;
    void multiply(const Way& way, const TileInputs& x, const Outputs& y, int64_t begin, int64_t end,
                  char* own) const override;
    // Many tokens: no unit lies in rows of two widths, whose blocks begin anew.
    int64_t units(const Way& way) const override;
    int64_t unit_row(const Way& way, int64_t unit) const override;

    void dequantize(float* out, int threads) const override;
    bool has_rows() const override { return !out_rows_.given() || out_rows_.inverse() != nullptr; }
    void row(int64_t i, float* out) const override;
    std::shared_ptr<const Tile> at(const TileLayout& layout) const override;

    // Of a codebook: the tables of each of its widths.
    std::vector<std::pair<int, std::shared_ptr<const Centroids>>> widths;

private:
    struct Span { // the rows of one width, without tables
        CodebookByRow c;
        int64_t first;
    };
    // How few tokens meet the tables of each span, and in which form inputs are arranged for it: the different forms
    // are numbered.
    struct Forms {
        std::vector<TableForm> tables;
        std::vector<size_t> numbers;
        std::vector<size_t> first; // span of each form
    };
    // Where arranged inputs of some tokens lie.
    struct Room {
        int64_t stride;                      // numbers that a token has
        int64_t form;                        // bytes of each form that few tokens have
        int64_t factors, token, kept, bytes; // where what follows the inputs begins, and all
    };

    Span span(int bits, int64_t first, int64_t last) const;
    float kept_weight(int64_t row, int64_t j) const; // rows as they are stored
    // Outputs += kept channels of rows of a span, for instruction sets whose `gemv` does not add them.
    void add_kept(size_t span, const Inputs<float>& x, const Outputs& y, int64_t from, int64_t to) const;
    CodebookByWord by_word(const CodebookByRow& c) const;
    void find_forms(Forms& forms, Numbers inputs) const;
    const Forms& forms_of(const Way& way) const { return way.inputs == Numbers::bf16 ? bf16_ : f32_; }
    Room room(const Way& way, int64_t tokens) const;
    void multiply_whole(const Way& way, const TileInputs& x, Outputs y, const Span& span, int64_t from,
                        int64_t to) const;
    void multiply_few(const Way& way, const TileInputs& x, const Outputs& y, size_t span, int64_t from, int64_t to,
                      char* own) const;
    void multiply_many(const Way& way, const TileInputs& x, Outputs y, const Span& span, int64_t from,
                       int64_t to) const;

    int64_t line() const { return spans_[0].c.words * 32; }
    int64_t width() const { return ops_.codebook_by_row.columns(spans_[0].c); }

    static constexpr int64_t WHOLE_ROWS = 16; // that `gemv` and blocks of lanes both split at
    static_assert(WHOLE_ROWS % CodebookByRow::TOGETHER == 0);

    std::shared_ptr<const LookupBytes> bytes_;
    std::shared_ptr<const Centroids> centroids_;
    std::vector<Span> spans_; // the widest first
    Forms f32_, bf16_;
    KeptChannels kept_{};
};

} // namespace anybit
