// Tables of centroids in the forms in which kernels look them up.
#pragma once

#include "layer/tile.h"

#include <cmath>
#include <cstring>
#include <mutex>

namespace anybit {

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

// What a tile of codes by row looks its codes up in.
class Centroids {
public:
    virtual ~Centroids() = default;

    // Whether bfloat16 inputs, or rounded ones, meet codes of a width.
    virtual bool takes_bf16(int bits, bool many) const = 0;
    virtual bool takes_int8() const = 0;
    // How tables lie for few tokens.
    virtual TableForm form(int bits, Numbers inputs) const = 0;
    // Give a codebook the tables that products of these inputs look up, of many tokens or of few.
    virtual void fill(CodebookByRow& c, Numbers inputs, bool many) const = 0;
    // And for what is decoded word by word.
    virtual void fill(CodebookByWord& c) const = 0;
};

// The tables of all shapes, for nested tiles, as the kernels of one instruction set look them up: made once for all
// layers.
class Tables final : public Centroids {
public:
    // tables float32 [shapes, 2 + 4 + ... + 256]; int8: rounded, for inputs of 8 bits, to whole steps of each shape and
    // width: as many as a byte has, or from `MOST_BYTE_BITS` on two bytes.
    Tables(const MatmulOps& ops, const Array& tables, bool int8) : ops_(ops), int8_(int8) {
        check_range("the number of shapes", tables.shape.empty() ? 0 : tables.shape[0], 1, 256);
        count_ = tables.shape[0];
        check("tables", tables, {Type::f32}, {count_, ENTRIES});
        std::vector<float> rounded;
        if (int8) rounded = round_to_steps(tables.as<float>());
        const float* from = int8 ? rounded.data() : tables.as<float>();
        for (int64_t kind = 0; kind < count_; ++kind)
            for (int b = 1; b <= 8; ++b) {
                const float *first = from + kind * ENTRIES + (1 << b) - 2, *last = first + (1 << b) - 1;
                for (; first < last; ++first, --last)
                    mirrored_ &= baseline::is_half(*first) && *last == -*first; // neither a NaN
            }
        for (int b = 1; b <= 8; ++b) {
            plain_[b] = laid<uint32_t>(from, b, TableForm::whole);
            floats_[b] = laid<uint32_t>(from, b, form(b, Numbers::f32));
            if (ops.codebook_by_row.bf16.gemm != nullptr) halves_[b] = laid<uint16_t>(from, b, form(b, Numbers::bf16));
        }
    }

    int64_t count() const { return count_; }
    const MatmulOps& ops() const { return ops_; }

    // Of any width, as a tile's rows are.
    bool takes_bf16(int, bool) const override { return ops_.codebook_by_row.bf16.gemm != nullptr; }
    bool takes_int8() const override { return int8_; }
    TableForm form(int bits, Numbers inputs) const override {
        const CodebookByRowOps& kernels = ops_.codebook_by_row;
        return inputs == Numbers::bf16 ? kernels.bf16_form(bits) : kernels.f32_form(bits, mirrored_);
    }
    void fill(CodebookByRow& c, Numbers inputs, bool many) const override {
        if (inputs == Numbers::i8) {
            c.table = bytes_[c.bits].data();
            c.scales = steps_[c.bits].data();
            c.two_bytes = c.bits > CodebookByRow::MOST_BYTE_BITS;
            c.mirrored = steps_mirrored_;
            return;
        }
        const bool halves = inputs == Numbers::bf16;
        c.table = (!halves ? floats_ : many ? plain_ : halves_)[c.bits].data();
        c.mirrored = mirrored_;
    }
    void fill(CodebookByWord& c) const override {
        c.table32 = reinterpret_cast<const float*>(plain_[c.bits].data());
        c.entries = int64_t(1) << c.bits;
    }

private:
    static constexpr int64_t ENTRIES = 510;

    template <typename T> std::vector<uint8_t> laid(const float* from, int bits, TableForm form) const {
        const int64_t entries = int64_t(1) << bits, room = form == TableForm::mirrored ? entries / 2 : entries;
        return lay_tables<T>(count_, room, room, form,
                             [&](int64_t kind, int64_t e) { return from[kind * ENTRIES + entries - 2 + e]; });
    }

    // The entries as whole steps, of which `bytes_` and `steps_` get their forms.
    std::vector<float> round_to_steps(const float* tables);

    const MatmulOps& ops_;
    const bool int8_;
    int64_t count_ = 0;
    bool mirrored_ = true, steps_mirrored_ = true; // as in CodebookByRow, of floats and of `bytes_`
    std::vector<uint8_t> plain_[9], floats_[9], halves_[9], bytes_[9];
    std::vector<float> steps_[9]; // [shapes]
};

// A codebook's tables of one width as they are stored, [n, entries]: float16, or codes on a grid of each table's own.
struct StoredTable {
    Array table;          // float16, or uint8 with codes of `bits` bits
    Array scale, minimum; // float16 [n], where they are codes
    int bits = 16;        // of an entry
    int64_t n = 0, entries = 0;

    // As floats, minimum + scale * code.
    std::vector<float> decode() const;
};

// The tables of a codebook's rows at one width, laid out when a plan first wants them.
class RowTables final : public Centroids {
public:
    // rounded: to whole steps of which 127 reach the largest entry of a row, for inputs of 8 bits.
    RowTables(const MatmulOps& ops, StoredTable stored, int bits, bool rounded)
        : ops_(ops), stored_(std::move(stored)), bits_(bits), rounded_(rounded) {}

    bool takes_bf16(int bits, bool many) const override {
        const CodebookByRowOps& kernels = ops_.codebook_by_row;
        if (many) return kernels.bf16.gemm != nullptr;
        return kernels.bf16_form != nullptr && kernels.bf16_form(bits) != TableForm::none;
    }
    bool takes_int8() const override { return true; }
    TableForm form(int bits, Numbers inputs) const override {
        const CodebookByRowOps& kernels = ops_.codebook_by_row;
        return inputs == Numbers::bf16 ? kernels.bf16_form(bits) : kernels.f32_form(bits, false);
    }
    void fill(CodebookByRow& c, Numbers inputs, bool) const override {
        c.halves = inputs == Numbers::bf16;
        switch (inputs) {
        case Numbers::f32: c.table = laid<uint32_t>(floats_, form(bits_, inputs)); break;
        case Numbers::bf16: c.table = laid<uint16_t>(halves_, form(bits_, inputs)); break;
        case Numbers::i8:
            std::call_once(bytes_.made, [this] { make_bytes(); });
            c.table = bytes_.table.data();
            c.scales = byte_scales_.data();
        }
    }
    void fill(CodebookByWord& c) const override {
        const std::vector<float>& floats = decoded();
        c.entries = stored_.entries;
        if (floats.empty()) c.table16 = stored_.table.as<uint16_t>();
        else c.table32 = floats.data();
    }

private:
    struct Laid {
        std::once_flag made;
        std::vector<uint8_t> table;
    };

    // Nothing where the table is float16 as it is.
    const std::vector<float>& decoded() const;
    float entry(int64_t row, int64_t e) const {
        const int64_t at = row * stored_.entries + e;
        const std::vector<float>& floats = decoded();
        return floats.empty() ? baseline::half_to_float(stored_.table.as<uint16_t>()[at])
                              : floats[static_cast<size_t>(at)];
    }
    template <typename T> const uint8_t* laid(Laid& to, TableForm form) const {
        std::call_once(to.made, [&] {
            to.table = lay_tables<T>(stored_.n, stored_.entries, int64_t(1) << bits_, form,
                                     [this](int64_t row, int64_t e) { return entry(row, e); });
        });
        return to.table.data();
    }
    void make_bytes() const;

    const MatmulOps& ops_;
    const StoredTable stored_;
    const int bits_;
    const bool rounded_;
    mutable std::once_flag decoded_once_;
    mutable std::vector<float> decoded_;
    mutable Laid floats_, halves_, bytes_;
    mutable std::vector<float> byte_scales_;
};

} // namespace anybit
