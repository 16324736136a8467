// What binding the formats' tiles has in common: their stored arrays, checked.
#pragma once

#include "layer/layer.h"
#include "layer/stored_bits.h"
#include "layer/uniform_tiles.h"

#include <cstring>

namespace anybit {

using Types = std::initializer_list<Type>;
inline constexpr Types HALF = {Type::f16, Type::u16}, WORDS = {Type::u32, Type::i32}, BYTES = {Type::u8},
                       CODES = {Type::i8};

// The stored arrays of one tile.
class TileFields {
public:
    TileFields(const Fields& fields, const std::string& prefix) : fields_(fields), prefix_(prefix) {}

    const Array& any(const std::string& field) const {
        const auto found = fields_.find(prefix_ + field);
        if (found == fields_.end()) refuse("field " + prefix_ + field + " is missing");
        return found->second;
    }
    const Array& of(const std::string& field, Types types, const Shape& shape) const {
        return check(prefix_ + field, any(field), types, shape);
    }
    // Numbers below `size`: uint16 where they fit that, else int32.
    std::vector<int32_t> index(const std::string& field, int64_t n, int64_t size) const {
        if (size > 65536) {
            const auto* from = of(field, {Type::i32}, {n}).as<int32_t>();
            return std::vector<int32_t>(from, from + n);
        }
        const auto* from = of(field, {Type::u16}, {n}).as<uint16_t>();
        return std::vector<int32_t>(from, from + n);
    }
    std::vector<float> floats(const std::string& field, const Shape& shape) const {
        const Array& array = of(field, HALF, shape);
        std::vector<float> made(static_cast<size_t>(array.count()));
        for (size_t i = 0; i < made.size(); ++i) made[i] = baseline::half_to_float(array.as<uint16_t>()[i]);
        return made;
    }
    // Codes of a width that divides 8, packed along rows, a byte each.
    std::vector<uint8_t> bytes(const std::string& field, int bits, int64_t rows, int64_t columns,
                               int64_t align = 1) const {
        const int64_t row_bytes = (packed_bytes(columns, bits) + align - 1) / align * align;
        const Shape shape = rows == 1 && align == 1 ? Shape{row_bytes} : Shape{rows, row_bytes};
        std::vector<uint8_t> made(static_cast<size_t>(rows * columns));
        unpack_bits(of(field, BYTES, shape).as<uint8_t>(), bits, rows, columns, made.data(), row_bytes);
        return made;
    }

private:
    const Fields& fields_;
    const std::string& prefix_;
};

// Rows of a tile that names them.
inline OutRows rows_of(const TileLayout& layout, int64_t r, int64_t out, const TileFields& fields) {
    if (layout.rows == ALL) return {};
    const auto* from = fields.of("rows", {Type::i32}, {r}).as<int32_t>();
    return OutRows(std::vector<int32_t>(from, from + r), out);
}

inline void zero(const Array& array) {
    std::memset(array.data, 0, static_cast<size_t>(array.count() * size_of(array.type)));
}

GroupInt group_int_sizes(int bits, int64_t group_size, int64_t r, int64_t c);

BoundTile bind_two_four(const TileLayout& layout, int64_t r, int64_t c, const TileFields& fields,
                        const std::string& prefix, const Layer::Options& options);

} // namespace anybit
