// Format "two_four": 2-bit channels and 4-bit ones, each a tile of the kernels'.
#include "layer/bind.h"

namespace anybit {
namespace {

constexpr int64_t BLOCK = 16;                                  // channels that have one width
constexpr int64_t ALIGN = 4;                                   // bytes of a row of codes
constexpr int64_t UNIT_NARROW = 48;                            // 2-bit channels of a unit of 128 bits and a grid
constexpr int UNIT_CODES = 16, UNIT_REST = 4, UNIT_FIRST = 12; // bytes: in `codes` and `rest`; of 2 bits in `codes`

struct TwoFourSizes {
    int64_t r, c, narrow, wide, groups, parts, group_size;
    bool aligned; // three 2-bit blocks to each 4-bit block, stored in units

    TwoFourSizes(const TileLayout& layout, int64_t rows, int64_t columns)
        : r(rows), c(columns), narrow(layout.narrow), wide(c - narrow), group_size(layout.group_size) {
        if (group_size != 8 && group_size != 16)
            refuse("group_size is " + std::to_string(group_size) + ", expected 8 or 16");
        check_range("narrow", narrow, 0, c);
        groups = narrow / BLOCK * (BLOCK / group_size) + (narrow % BLOCK + group_size - 1) / group_size;
        parts = (r + TwoFour::SCALE_ROWS - 1) / TwoFour::SCALE_ROWS;
        aligned = group_size == BLOCK && c % BLOCK == 0 && narrow == 3 * wide;
    }
    int64_t units() const { return wide / BLOCK; }
    int64_t wide_bytes() const { return (packed_bytes(wide, 4) + ALIGN - 1) / ALIGN * ALIGN; }
};

// Both kinds of codes, and the grids of 2-bit groups, a byte each but for those of 4 bits, which stay packed.
struct TwoFourCodes {
    std::vector<uint8_t> narrow, zeros, scale_codes; // [r, narrow], [r, groups], [r, groups]
    std::vector<uint8_t> wide;                       // [r, wide_bytes]

    explicit TwoFourCodes(const TwoFourSizes& s)
        : narrow(static_cast<size_t>(s.r * s.narrow)), zeros(static_cast<size_t>(s.r * s.groups)),
          scale_codes(zeros.size()), wide(static_cast<size_t>(s.r * s.wide_bytes())) {}
};

// A unit's grid: 2 bits of each zero point, then codes of scales of 4, 3 and 3 bits.
constexpr int GRID_AT[] = {6, 10, 13}, GRID_MASK[] = {15, 7, 7};

TwoFourCodes read_units(const TwoFourSizes& s, const TileFields& fields) {
    TwoFourCodes made(s);
    const int64_t units = s.units();
    const auto* codes = fields.of("codes", BYTES, {s.r, units, UNIT_CODES}).as<uint8_t>();
    const auto* rest = fields.of("rest", BYTES, {s.r, units, UNIT_REST}).as<uint8_t>();
    const auto* grids = fields.of("grids", {Type::u16}, {s.r, units}).as<uint16_t>();
    for (int64_t i = 0; i < s.r; ++i)
        for (int64_t u = 0; u < units; ++u, codes += UNIT_CODES, rest += UNIT_REST, ++grids) {
            unpack_bits(codes, 2, 1, UNIT_NARROW, made.narrow.data() + i * s.narrow + u * UNIT_NARROW);
            uint8_t* wide = made.wide.data() + i * s.wide_bytes() + u * 8;
            std::memcpy(wide, codes + UNIT_FIRST, UNIT_CODES - UNIT_FIRST);
            std::memcpy(wide + UNIT_CODES - UNIT_FIRST, rest, UNIT_REST);
            for (int64_t g = 0; g < 3; ++g) {
                const auto at = static_cast<size_t>(i * s.groups + 3 * u + g);
                made.zeros[at] = static_cast<uint8_t>(*grids >> 2 * g & 3);
                made.scale_codes[at] = static_cast<uint8_t>(*grids >> GRID_AT[g] & GRID_MASK[g]);
            }
        }
    return made;
}

void write_units(const TwoFourSizes& s, const TwoFourCodes& from, const TileFields& fields) {
    const int64_t units = s.units();
    const Array& all = fields.of("codes", BYTES, {s.r, units, UNIT_CODES});
    auto* codes = all.as<uint8_t>();
    auto* rest = fields.of("rest", BYTES, {s.r, units, UNIT_REST}).as<uint8_t>();
    auto* grids = fields.of("grids", {Type::u16}, {s.r, units}).as<uint16_t>();
    zero(all);
    for (int64_t i = 0; i < s.r; ++i)
        for (int64_t u = 0; u < units; ++u, codes += UNIT_CODES, rest += UNIT_REST, ++grids) {
            pack_bits(from.narrow.data() + i * s.narrow + u * UNIT_NARROW, 2, 1, UNIT_NARROW, codes);
            const uint8_t* wide = from.wide.data() + i * s.wide_bytes() + u * 8;
            std::memcpy(codes + UNIT_FIRST, wide, UNIT_CODES - UNIT_FIRST);
            std::memcpy(rest, wide + UNIT_CODES - UNIT_FIRST, UNIT_REST);
            int grid = 0;
            for (int64_t g = 0; g < 3; ++g) {
                const auto at = static_cast<size_t>(i * s.groups + 3 * u + g);
                grid |= from.zeros[at] << 2 * g | from.scale_codes[at] << GRID_AT[g];
            }
            *grids = static_cast<uint16_t>(grid);
        }
}

TwoFourCodes read_two_four(const TwoFourSizes& s, const TileFields& fields) {
    if (s.aligned) return read_units(s, fields);
    TwoFourCodes made(s);
    if (s.narrow > 0) {
        made.narrow = fields.bytes("narrow_codes", 2, s.r, s.narrow, ALIGN);
        const auto rows = [&](const std::string& field, int bits) {
            const int64_t row_bytes = packed_bytes(s.groups, bits);
            std::vector<uint8_t> codes(static_cast<size_t>(s.r * s.groups));
            unpack_bits(fields.of(field, BYTES, {s.r, row_bytes}).as<uint8_t>(), bits, s.r, s.groups, codes.data());
            return codes;
        };
        made.zeros = rows("zeros", 2);
        made.scale_codes = rows("scale_codes", 4);
    }
    if (s.wide > 0) {
        const Array& wide = fields.of("wide_codes", BYTES, {s.r, s.wide_bytes()});
        std::memcpy(made.wide.data(), wide.data, made.wide.size());
    }
    return made;
}

void write_two_four(const TwoFourSizes& s, const TwoFourCodes& from, const TileFields& fields) {
    if (s.aligned) return write_units(s, from, fields);
    const auto write = [&](const std::string& field, int bits, int64_t columns, int64_t row_bytes,
                           const std::vector<uint8_t>& codes) {
        const Array& to = fields.of(field, BYTES, {s.r, row_bytes});
        zero(to);
        pack_bits(codes.data(), bits, s.r, columns, to.as<uint8_t>(), row_bytes);
    };
    if (s.narrow > 0) {
        write("narrow_codes", 2, s.narrow, (packed_bytes(s.narrow, 2) + ALIGN - 1) / ALIGN * ALIGN, from.narrow);
        write("zeros", 2, s.groups, packed_bytes(s.groups, 2), from.zeros);
        write("scale_codes", 4, s.groups, packed_bytes(s.groups, 4), from.scale_codes);
    }
    if (s.wide > 0)
        std::memcpy(fields.of("wide_codes", BYTES, {s.r, s.wide_bytes()}).data, from.wide.data(), from.wide.size());
}

std::shared_ptr<const TwoFourTile> bind_narrow(const TwoFourSizes& s, const TwoFourCodes& codes,
                                               const TileFields& fields, const Layer::Options& options) {
    TwoFour sizes{};
    sizes.rows = s.r;
    sizes.columns = s.narrow;
    sizes.group_size = s.group_size;
    sizes.groups = s.groups;
    const int64_t row_bytes = packed_bytes(s.groups, 4);
    std::vector<uint8_t> zeros(static_cast<size_t>(s.parts * s.groups));
    unpack_bits(fields.of("scale_zeros", BYTES, {s.parts, row_bytes}).as<uint8_t>(), 4, s.parts, s.groups,
                zeros.data());
    return std::make_shared<const TwoFourTile>(
        *options.ops, sizes, TwoFour::Stored{codes.narrow.data(), codes.zeros.data(), codes.scale_codes.data()},
        fields.floats("scale_scales", {s.parts, s.groups}), std::move(zeros), options.threads);
}

std::shared_ptr<const GroupIntTile> bind_wide(const TwoFourSizes& s, const TwoFourCodes& codes,
                                              const TileFields& fields, const Layer::Options& options) {
    const std::vector<uint8_t> zeros = fields.bytes("wide_zeros", 4, 1, s.r);
    const auto* scales = fields.of("wide_scales", HALF, {s.r}).as<uint16_t>();
    return std::make_shared<const GroupIntTile>(
        *options.ops, group_int_sizes(4, s.wide, s.r, s.wide),
        GroupInt::Stored{codes.wide.data(), scales, zeros.data(), s.wide_bytes()}, OutRows(), options.threads);
}

} // namespace

BoundTile bind_two_four(const TileLayout& layout, int64_t r, int64_t c, const TileFields& fields,
                        const std::string& prefix, const Layer::Options& options) {
    const TwoFourSizes s(layout, r, c);
    const std::vector<uint8_t> blocks = fields.bytes("blocks", 1, 1, (c + BLOCK - 1) / BLOCK);
    std::vector<int32_t> channels[2];
    for (int64_t j = 0; j < c; ++j) channels[blocks[static_cast<size_t>(j / BLOCK)]].push_back(static_cast<int32_t>(j));
    if (static_cast<int64_t>(channels[0].size()) != s.narrow)
        refuse(prefix + "blocks give " + std::to_string(channels[0].size()) + " channels 2 bits, expected " +
               std::to_string(s.narrow));
    const TwoFourCodes codes = read_two_four(s, fields);
    BoundTile bound;
    std::shared_ptr<const TwoFourTile> narrow;
    std::shared_ptr<const GroupIntTile> wide;
    const auto add = [&](std::shared_ptr<const Tile> tile, std::vector<int32_t>& own) {
        bound.pieces.push_back({std::move(tile), std::make_shared<const std::vector<int32_t>>(std::move(own))});
    };
    if (s.narrow > 0) add(narrow = bind_narrow(s, codes, fields, options), channels[0]);
    if (s.wide > 0) add(wide = bind_wide(s, codes, fields, options), channels[1]);
    if (s.aligned) bound.repacked = {"codes", "rest", "grids"};
    else if (s.narrow > 0) bound.repacked = {"narrow_codes", "zeros", "scale_codes"};
    if (!s.aligned && s.wide > 0) bound.repacked.emplace_back("wide_codes");
    bound.unpack = [s, narrow, wide, prefix](const Fields& to, int threads) {
        TwoFourCodes made(s);
        if (narrow != nullptr)
            narrow->restore({made.narrow.data(), made.zeros.data(), made.scale_codes.data()}, threads);
        std::vector<uint16_t> scales(static_cast<size_t>(s.r));
        std::vector<uint8_t> zeros(static_cast<size_t>(s.r));
        if (wide != nullptr) wide->restore({made.wide.data(), scales.data(), zeros.data(), s.wide_bytes()}, threads);
        write_two_four(s, made, TileFields(to, prefix));
    };
    return bound;
}

} // namespace anybit
