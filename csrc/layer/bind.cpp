// Stored tiles of every format (docs/formats.md), checked and put into the kernels' order.
#include "layer/bind.h"

#include "layer/codebook_tiles.h"

namespace anybit {
namespace {

// ---- "group int"

// Checks codes of any padding, and returns the bytes of a row of them.
int64_t check_codes(const std::string& name, const Array& codes, int bits, int64_t r, int64_t c) {
    const int64_t row_bytes = codes.shape.empty() ? 0 : codes.shape.back();
    check(name, codes, BYTES, is_packed(bits) ? Shape{r, row_bytes} : Shape{bits, r, row_bytes});
    const int64_t needed = packed_bytes(c, is_packed(bits) ? bits : 1);
    if (row_bytes < needed)
        refuse(name + " have " + std::to_string(row_bytes) + " bytes a row, but " + std::to_string(c) +
               " columns need " + std::to_string(needed));
    return row_bytes;
}

} // namespace

GroupInt group_int_sizes(int bits, int64_t group_size, int64_t r, int64_t c) {
    GroupInt sizes{};
    sizes.bits = bits;
    sizes.rows = r;
    sizes.columns = c;
    sizes.group_size = std::min(group_size, c);
    sizes.groups = (c - 1) / sizes.group_size + 1;
    return sizes;
}

namespace {

BoundTile bind_group_int(const TileLayout& layout, int64_t r, int64_t c, OutRows rows, const TileFields& fields,
                         const std::string& prefix, const Layer::Options& options) {
    check_range("bits", layout.bits, 1, 8);
    check_range("group_size", layout.group_size, 1, INT64_MAX);
    const GroupInt sizes = group_int_sizes(layout.bits, layout.group_size, r, c);
    const int bits = layout.bits;
    const Array& codes = fields.any("codes");
    GroupInt::Stored from{};
    from.row_bytes = check_codes(prefix + "codes", codes, bits, r, c);
    from.codes = codes.as<uint8_t>();
    from.scales = fields.of("scales", HALF, {r, sizes.groups}).as<uint16_t>();
    std::vector<uint8_t> zeros(layout.symmetric ? 0 : static_cast<size_t>(r * sizes.groups));
    if (!layout.symmetric) {
        const int64_t row_bytes = packed_bytes(sizes.groups, is_packed(bits) ? bits : 1);
        const Shape shape = is_packed(bits) ? Shape{r, row_bytes} : Shape{bits, r, row_bytes};
        unpack_codes(fields.of("zeros", BYTES, shape).as<uint8_t>(), bits, r, sizes.groups, zeros.data());
        from.zeros = zeros.data();
    }
    auto tile = std::make_shared<const GroupIntTile>(*options.ops, sizes, from, std::move(rows), options.threads);
    BoundTile bound{{{tile, nullptr}}, {"codes", "scales"}, nullptr};
    if (!layout.symmetric) bound.repacked.emplace_back("zeros");
    bound.unpack = [tile, sizes, bits, prefix, symmetric = layout.symmetric](const Fields& to, int threads) {
        const TileFields own(to, prefix);
        const Array& made = own.any("codes");
        const int64_t row_bytes = check_codes(prefix + "codes", made, bits, sizes.rows, sizes.columns);
        std::vector<uint8_t> points(symmetric ? 0 : static_cast<size_t>(sizes.rows * sizes.groups));
        zero(made); // padding
        tile->restore({made.as<uint8_t>(), own.of("scales", HALF, {sizes.rows, sizes.groups}).as<uint16_t>(),
                       symmetric ? nullptr : points.data(), row_bytes},
                      threads);
        if (symmetric) return;
        const Array& packed = own.any("zeros");
        const int64_t zero_bytes = packed_bytes(sizes.groups, is_packed(bits) ? bits : 1);
        check(prefix + "zeros", packed, BYTES,
              is_packed(bits) ? Shape{sizes.rows, zero_bytes} : Shape{bits, sizes.rows, zero_bytes});
        zero(packed);
        pack_codes(points.data(), bits, sizes.rows, sizes.groups, packed.as<uint8_t>());
    };
    return bound;
}

// ---- "codebook"

StoredTable stored_table(const TileLayout& layout, int width, int64_t n, int64_t m, const TileFields& fields) {
    StoredTable made;
    made.n = n;
    made.bits = layout.table_bits;
    made.entries = layout.by_channel ? std::min(int64_t(1) << width, m) : int64_t(1) << width;
    const std::string field = "codebook_" + std::to_string(width);
    if (made.bits == 16) {
        made.table = fields.of(field, HALF, {n, made.entries});
        return made;
    }
    if (made.bits != 4 && made.bits != 8)
        refuse("table_bits is " + std::to_string(made.bits) + ", expected 4, 8 or 16");
    made.table = fields.of(field, BYTES, {n, packed_bytes(made.entries, made.bits)});
    made.scale = fields.of("codebook_scale", HALF, {n});
    made.minimum = fields.of("codebook_min", HALF, {n});
    return made;
}

BoundTile bind_channels(const TileLayout& layout, int64_t r, int64_t c, const Array& planes, const StoredTable& stored,
                        const std::string& prefix, const Layer::Options& options) {
    if (layout.rows != ALL) refuse("a codebook by channel holds all output rows: leave rows out");
    const MatmulOps& ops = *options.ops;
    const int bits = layout.bits;
    Table table{stored.table, {}, stored.entries};
    if (stored.bits != 16) table.floats = stored.decode();
    if (bits > CodebookByChannel::FLOAT_BITS && stored.bits != 16)
        return {
            {{std::make_shared<const StoredChannelTile>(ops, bits, r, c, planes, std::move(table)), nullptr}}, {}, {}};
    auto tile = std::make_shared<const ChannelTile>(ops, bits, r, c, planes.as<uint32_t>(), table, options.threads);
    BoundTile bound{{{tile, nullptr}}, {"planes"}, nullptr};
    bound.unpack = [tile, bits, r, c, prefix](const Fields& to, int threads) {
        const Array& made = TileFields(to, prefix).of("planes", WORDS, {bits, c, (r + 31) / 32});
        zero(made);
        tile->restore(made.as<uint32_t>(), threads);
    };
    return bound;
}

BoundTile bind_codebook(const TileLayout& layout, int64_t r, int64_t c, OutRows rows, const TileFields& fields,
                        const std::string& prefix, const Layer::Options& options) {
    const std::vector<int>& widths = layout.widths;
    if (widths.empty() || widths.back() != layout.bits || !std::is_sorted(widths.begin(), widths.end()))
        refuse("widths of a codebook must ascend to its bits");
    check_range("widths", widths.front(), 1, 8);
    check_range("widths", widths.back(), 1, 8);
    const int64_t n = layout.by_channel ? c : r, m = layout.by_channel ? r : c, words = (m + 31) / 32;
    const Array& planes = fields.of("planes", WORDS, {layout.bits, n, words});
    if (layout.by_channel)
        return bind_channels(layout, r, c, planes, stored_table(layout, layout.bits, n, m, fields), prefix, options);
    auto bytes = std::make_shared<LookupBytes>();
    for (int p = 0; p < layout.bits; ++p)
        bytes->planes.push_back({planes.as<uint32_t>() + p * n * words, planes.type, {n, words}, planes.keeper});
    bytes->coded = c;
    bytes->out_rows = std::move(rows);
    std::vector<std::pair<int, std::shared_ptr<const Centroids>>> tables;
    for (int width : widths)
        tables.emplace_back(width,
                            std::make_shared<const RowTables>(*options.ops, stored_table(layout, width, n, m, fields),
                                                              width, options.int8_codebooks));
    const std::vector<int64_t> counts(static_cast<size_t>(layout.bits), r);
    auto tile = std::make_shared<LookupTile>(*options.ops, std::move(bytes), tables.back().second, counts);
    tile->widths = std::move(tables);
    return {{{std::move(tile), nullptr}}, {}, {}};
}

// ---- "nested"

BoundTile bind_nested(const TileLayout& layout, int64_t r, int64_t c, int64_t out, const TileFields& fields,
                      const Layer::Options& options) {
    if (options.tables == nullptr || &options.tables->ops() != options.ops)
        refuse("a nested tile needs the tables of its shapes, for its instruction set");
    if (options.int8_codebooks != options.tables->takes_int8())
        refuse("a nested tile with inputs of 8 bits needs tables rounded for them, and others need exact ones");
    const std::vector<int64_t>& counts = layout.counts;
    check_range("the number of planes", static_cast<int64_t>(counts.size()), 1, 8);
    check_range("kept", layout.kept, 0, c - 1);
    if (layout.kept_bits != 8 && layout.kept_bits != 16)
        refuse("kept_bits is " + std::to_string(layout.kept_bits) + ", expected 8 or 16");
    auto bytes = std::make_shared<LookupBytes>();
    bytes->coded = c - layout.kept;
    const int64_t words = (bytes->coded + 31) / 32;
    for (size_t p = 0; p < counts.size(); ++p) {
        if (counts[p] < 1 || counts[p] > (p == 0 ? r : counts[p - 1]) || counts[0] != r)
            refuse("counts of planes do not fall from the number of rows");
        bytes->planes.push_back(fields.of("plane_" + std::to_string(p + 1), WORDS, {counts[p], words}));
    }
    bytes->scales = fields.floats("scales", {r});
    if (layout.gains) {
        const auto* gains = fields.of("gains", BYTES, {r}).as<uint8_t>();
        bytes->gained2.reserve(static_cast<size_t>(r));
        bytes->gained3.reserve(static_cast<size_t>(r));
        const auto gain = [](int steps) { return 1.0f + static_cast<float>(steps) / 64; };
        for (int64_t i = 0; i < r; ++i) {
            const float scale = bytes->scales[static_cast<size_t>(i)];
            bytes->gained2.push_back(scale * gain(gains[i] & 15));
            bytes->gained3.push_back(scale * gain(gains[i] >> 4));
        }
    }
    bytes->kinds = fields.bytes("shapes", 4, 1, r);
    for (uint8_t kind : bytes->kinds)
        if (kind >= options.tables->count()) refuse("shapes hold " + std::to_string(kind) + ", which there is not");
    bytes->out_rows = OutRows(fields.index("order", r, r), out);
    BoundTile bound;
    if (layout.kept > 0) {
        const bool codes = layout.kept_bits == 8;
        bytes->kept = fields.of("kept_values", codes ? CODES : HALF, {r, layout.kept});
        if (codes) {
            bytes->kept_scales = fields.floats("kept_scales", {layout.kept});
            for (float& scale : bytes->kept_scales) scale *= 0x1p-14f; // KEPT_UNIT of formats/nested.py
            bytes->kept_scales.resize(static_cast<size_t>(layout.kept + KeptChannels::BEHIND));
            if (options.int8_codebooks) bytes->turn_kept();
        }
        std::vector<bool> is_kept(static_cast<size_t>(c));
        const std::vector<int32_t> kept = fields.index("kept", layout.kept, c);
        for (int32_t j : kept) {
            if (j < 0 || j >= c || is_kept[static_cast<size_t>(j)])
                refuse("kept holds " + std::to_string(j) + ", expected different channels from 0 to " +
                       std::to_string(c - 1));
            is_kept[static_cast<size_t>(j)] = true;
        }
        std::vector<int32_t> channels;
        for (int64_t j = 0; j < c; ++j)
            if (!is_kept[static_cast<size_t>(j)]) channels.push_back(static_cast<int32_t>(j));
        channels.insert(channels.end(), kept.begin(), kept.end());
        bound.pieces = {{nullptr, std::make_shared<const std::vector<int32_t>>(std::move(channels))}};
    } else bound.pieces = {{nullptr, nullptr}};
    bound.pieces[0].tile = std::make_shared<const LookupTile>(*options.ops, std::move(bytes), options.tables, counts);
    return bound;
}

} // namespace

BoundTile bind_tile(const TileLayout& layout, int64_t r, int64_t c, int64_t out, const Fields& stored,
                    const std::string& prefix, const Layer::Options& options) {
    const TileFields fields(stored, prefix);
    OutRows rows = rows_of(layout, r, out, fields);
    if (layout.format == "group_int") return bind_group_int(layout, r, c, std::move(rows), fields, prefix, options);
    if (layout.format == "codebook") return bind_codebook(layout, r, c, std::move(rows), fields, prefix, options);
    if (layout.format == "float16") {
        Array values = fields.of("values", {Type::f16, Type::bf16, Type::u16}, {r, c});
        if (values.type == Type::u16) values.type = Type::bf16; // NumPy has no other word for its bits
        return {{{std::make_shared<const Float16Tile>(*options.ops, values, std::move(rows)), nullptr}}, {}, {}};
    }
    if (layout.format != "two_four" && layout.format != "nested")
        refuse("no kernel for tiles in the format " + layout.format);
    if (layout.rows != ALL) refuse("a tile in the format " + layout.format + " holds all rows");
    if (layout.format == "two_four") return bind_two_four(layout, r, c, fields, prefix, options);
    return bind_nested(layout, r, c, out, fields, options);
}

} // namespace anybit
