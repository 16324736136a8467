#include "layer/layer.h"

#include "common/thread_memory.h"

namespace anybit {

Layer::Layer(const LayerLayout& layout, const Fields& fields, const Options& options)
    : ops_(options.ops != nullptr ? *options.ops : best_matmul_ops()), out_(layout.out), in_(layout.in) {
    if (in_ < 1 || out_ < 1 || in_ >= MAX_SIZE || out_ >= MAX_SIZE)
        refuse("a layer of " + std::to_string(out_) + " x " + std::to_string(in_) + ": expected 1 to 2^31 - 1");
    Options chosen = options;
    chosen.ops = &ops_;
    // Rounded inputs are for all tiles, or for none.
    chosen.int8_codebooks =
        options.int8_codebooks && std::all_of(layout.tiles.begin(), layout.tiles.end(), [](const TileLayout& tile) {
            return tile.format == "nested" || (tile.format == "codebook" && !tile.by_channel);
        });
    auto stored = std::make_shared<Stored>();
    stored->layout = layout;
    for (size_t i = 0; i < layout.tiles.size(); ++i) {
        const TileLayout& tile = layout.tiles[i];
        const std::string prefix = layout.tiles.size() > 1 ? std::to_string(i) + "." : "";
        const int64_t r = tile.rows == ALL ? out_ : tile.rows, c = tile.cols == ALL ? in_ : tile.cols;
        check_range(prefix + "rows", r, 1, out_);
        check_range(prefix + "cols", c, 1, in_);
        stored->tiles.push_back({prefix, bind_tile(tile, r, c, out_, fields, prefix, chosen)});
        for (const std::string& field : stored->tiles.back().second.repacked)
            stored->repacked.push_back(prefix + field);
        add_parts(tile, stored->tiles.back().second, fields, prefix, chosen.int8_codebooks);
    }
    if (layout.sparse >= 0) bind_sparse(*stored, fields, layout.sparse);
    if (layout.input_scale) {
        const auto found = fields.find("input_scale");
        if (found == fields.end()) refuse("field input_scale is missing");
        const auto* from = check("input_scale", found->second, {Type::f16, Type::u16}, {in_}).as<uint16_t>();
        for (int64_t j = 0; j < in_; ++j) stored->scale.push_back(baseline::half_to_float(from[j]));
    }
    stored_ = std::move(stored);
    alone_ = parts_are_alone();
    int8_group_size_ = common_group_size();
    int8_multiples_ =
        std::any_of(parts_.begin(), parts_.end(), [](const Part& p) { return p.tile->wants_multiples(); });
    kinds_ = token_kinds();
}

namespace {

// Refuse what is not a layer's own layout, but for the bits of its tile.
void check_level(const LayerLayout& stored, const LayerLayout& level) {
    const auto same = [](const char* what, auto own, auto given) {
        if (own != given)
            refuse(std::string("a level with another ") + what + " than its layer: " + std::to_string(given) +
                   ", expected " + std::to_string(own));
    };
    if (stored.tiles.size() != 1 || level.tiles.size() != 1) refuse("a layer of several tiles has one width");
    same("number of outputs", stored.out, level.out);
    same("number of inputs", stored.in, level.in);
    same("number of sparse weights", stored.sparse, level.sparse);
    same("input_scale", stored.input_scale, level.input_scale);
    const TileLayout &own = stored.tiles[0], &given = level.tiles[0];
    if (own.format != given.format)
        refuse("a level in the format " + given.format + " of a layer in the format " + own.format);
    same("number of rows", own.rows, given.rows);
    same("number of cols", own.cols, given.cols);
    same("by_channel", own.by_channel, given.by_channel);
    same("table_bits", own.table_bits, given.table_bits);
    same("number of kept channels", own.kept, given.kept);
    same("width of kept channels", own.kept_bits, given.kept_bits);
    same("gains", own.gains, given.gains);
}

} // namespace

Layer::Layer(const Layer& other, const LayerLayout& layout)
    : ops_(other.ops_), out_(other.out_), in_(other.in_), stored_(other.stored_), parts_(other.parts_),
      alone_(other.alone_), int8_group_size_(other.int8_group_size_), int8_multiples_(other.int8_multiples_),
      kinds_(other.kinds_) {
    check_level(stored_->layout, layout);
    auto tile = parts_[0].tile->at(layout.tiles[0]);
    if (tile == nullptr) refuse("a tile in the format " + layout.tiles[0].format + " has one width");
    parts_[0].tile = std::move(tile);
}

std::shared_ptr<const Layer> Layer::at(const LayerLayout& layout) const {
    return std::shared_ptr<const Layer>(new Layer(*this, layout));
}

namespace {

// Channels that a tile names, among `in`.
std::vector<int32_t> named_columns(const std::string& prefix, const Fields& fields, int64_t c, int64_t in) {
    const auto found = fields.find(prefix + "cols");
    if (found == fields.end()) refuse("field " + prefix + "cols is missing");
    const auto* from = check(prefix + "cols", found->second, {Type::i32}, {c}).as<int32_t>();
    std::vector<int32_t> columns(from, from + c);
    std::vector<bool> met(static_cast<size_t>(in));
    for (int32_t j : columns) {
        const bool there = j >= 0 && j < in;
        if (!there || met[static_cast<size_t>(j)])
            refuse(prefix + "cols hold " + std::to_string(j) + (there ? " twice" : "") +
                   ": expected different input channels from 0 to " + std::to_string(in - 1));
        met[static_cast<size_t>(j)] = true;
    }
    return columns;
}

std::shared_ptr<const Gather> gather_of(const std::vector<int32_t>* outer, const std::vector<int32_t>* inner) {
    if (outer == nullptr && inner == nullptr) return nullptr;
    std::vector<int32_t> columns = inner != nullptr ? *inner : *outer;
    if (inner != nullptr && outer != nullptr)
        for (int32_t& j : columns) j = (*outer)[static_cast<size_t>(j)];
    return std::make_shared<const Gather>(std::move(columns));
}

std::shared_ptr<const Rounding> rounding_of(const TileLayout& layout, int64_t c, const Fields& fields,
                                            const std::string& prefix, bool int8_codebook) {
    auto made = std::make_shared<Rounding>();
    if (int8_codebook) {
        made->group_size = CodebookByRow::INPUT_GROUP;
        made->multiples = true;
        made->clip.assign(static_cast<size_t>((c - 1) / made->group_size + 1), WHOLE_RANGE);
        return made;
    }
    if (layout.format != "group_int" || layout.act_bits == 16) return nullptr;
    check_range(prefix + "act_bits", layout.act_bits, 2, 8);
    made->bits = layout.act_bits;
    made->group_size = std::min(layout.group_size, c);
    const std::string field = prefix + (layout.act_static ? "act_scales" : "act_clip");
    const auto found = fields.find(field);
    if (found == fields.end()) refuse("field " + field + " is missing");
    const int64_t groups = (c - 1) / made->group_size + 1;
    const auto* from = check(field, found->second, {Type::f16, Type::u16}, {groups}).as<uint16_t>();
    (layout.act_static ? made->fixed : made->clip).assign(from, from + groups);
    return made;
}

} // namespace

void Layer::add_parts(const TileLayout& layout, const BoundTile& bound, const Fields& fields, const std::string& prefix,
                      bool int8_codebook) {
    const bool named = layout.cols != ALL;
    const std::vector<int32_t> columns =
        named ? named_columns(prefix, fields, layout.cols, in_) : std::vector<int32_t>();
    for (const BoundTile::Piece& piece : bound.pieces) {
        Part part{piece.tile, gather_of(named ? &columns : nullptr, piece.columns.get()), nullptr};
        part.rounding = rounding_of(layout, piece.tile->rounded(), fields, prefix, int8_codebook);
        const Part* last = parts_.empty() ? nullptr : &parts_.back();
        if (part.rounding != nullptr && last != nullptr && last->rounding != nullptr) {
            const bool same = (part.gather == nullptr) == (last->gather == nullptr) &&
                              (part.gather == nullptr || part.gather->columns() == last->gather->columns());
            part.rounds_alike = same && *part.rounding == *last->rounding;
        }
        parts_.push_back(std::move(part));
    }
}

namespace {

template <typename T>
std::vector<T> checked_columns(const Array& columns, int64_t in) {
    std::vector<T> made(columns.as<T>(), columns.as<T>() + columns.count());
    for (T column : made)
        if (static_cast<int64_t>(column) >= in)
            refuse("sparse.columns hold " + std::to_string(column) + ", expected 0 to " + std::to_string(in - 1));
    return made;
}

} // namespace

// The values are referenced, the indices copied.
void Layer::bind_sparse(Stored& stored, const Fields& fields, int64_t n) const {
    const auto field = [&](const std::string& name, std::initializer_list<Type> types, const Shape& shape) {
        const auto found = fields.find("sparse." + name);
        if (found == fields.end()) refuse("field sparse." + name + " is missing");
        return check("sparse." + name, found->second, types, shape);
    };
    const Array columns = field("columns", {Type::u16, Type::u32}, {n});
    const auto* ends = field("row_ptr", {Type::i32}, {out_ + 1}).as<int32_t>();
    stored.row_ptr.assign(ends, ends + out_ + 1);
    if (stored.row_ptr.front() != 0 || stored.row_ptr.back() != n ||
        !std::is_sorted(stored.row_ptr.begin(), stored.row_ptr.end()))
        refuse("sparse.row_ptr does not ascend from 0 to the number of values");
    const bool narrow = columns.type == Type::u16;
    if (narrow) stored.columns16 = checked_columns<uint16_t>(columns, in_);
    else stored.columns32 = checked_columns<uint32_t>(columns, in_);
    stored.values = field("values", {Type::f16, Type::u16}, {n});
    stored.sparse = {stored.values.as<uint16_t>(), narrow ? stored.columns16.data() : nullptr,
                     narrow ? nullptr : stored.columns32.data(), stored.row_ptr.data(), n == 0 ? 0 : out_};
}

bool Layer::parts_are_alone() const {
    std::vector<bool> met(static_cast<size_t>(out_));
    int64_t n = 0;
    for (const Part& part : parts_) {
        const Tile& tile = *part.tile;
        const int32_t* rows = tile.out_rows().data();
        if (tile.columns() != in_) return false;
        for (int64_t i = 0; i < tile.rows(); ++i, ++n) {
            auto own = met[static_cast<size_t>(rows != nullptr ? rows[i] : i)];
            if (own) return false;
            own = true;
        }
    }
    return n == out_;
}

int64_t Layer::common_group_size() const {
    if (!scale().empty() || sparse().rows > 0 || parts_.empty()) return 0;
    const int64_t size = parts_[0].tile->input_group_size();
    const auto alike = [size](const Part& part) {
        const bool plain = part.rounding == nullptr || part.rounding->is_plain(size);
        return part.gather == nullptr && part.tile->input_group_size() == size && plain;
    };
    return std::all_of(parts_.begin(), parts_.end(), alike) ? size : 0;
}

bool Layer::rounds_inputs() const {
    return std::any_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.rounding != nullptr; });
}

int64_t Layer::few_tokens(Numbers inputs) const {
    int64_t few = BATCH;
    for (const Part& part : parts_) {
        const Tile& tile = *part.tile;
        const bool rounds = inputs != Numbers::i8 && part.rounding != nullptr && tile.way(1, Numbers::i8).has_value();
        few = std::min(few, rounds ? std::min(tile.most_rounded(inputs), tile.alike(Numbers::i8)) : tile.alike(inputs));
    }
    return stored_->sparse.rows > 0 ? std::min(few, GEMV_TOKENS) : few;
}

// Numbers of tokens that plans tell apart.
std::vector<int64_t> Layer::token_kinds() const {
    const int64_t few = ops_.gemv_tokens_bf16;
    std::vector<int64_t> kinds{
        few, std::min(GEMV_TOKENS, 2 * few), 2 * few, GEMV_TOKENS, 2 * GEMV_TOKENS, ops_.gemv_tokens_int8};
    if (ops_.codebook_by_row.whole.gemm != nullptr) kinds.push_back(ops_.codebook_by_row.whole.least - 1);
    std::sort(kinds.begin(), kinds.end());
    kinds.erase(std::unique(kinds.begin(), kinds.end()), kinds.end());
    return kinds;
}

void Layer::unpack(const Fields& fields, int threads) const {
    for (const auto& [prefix, bound] : stored_->tiles)
        if (bound.unpack) bound.unpack(fields, threads);
}

namespace {

// Put a tile's rows [r, c] where they belong in a matrix of `in` columns.
template <typename X> void place_row(const Part& part, const float* from, int64_t in, int64_t row, X* to) {
    const auto as = [](float value) {
        if constexpr (sizeof(X) == 2) return baseline::to_bf16(value);
        else return value;
    };
    X* own = to + row * in;
    for (int64_t j = 0; j < part.tile->columns(); ++j)
        own[part.gather == nullptr ? j : part.gather->columns()[static_cast<size_t>(j)]] = as(from[j]);
}

} // namespace

template <typename X> void Layer::dequantize_as(X* out, int threads) const {
    const bool plain = stored_->scale.empty() && stored_->sparse.rows == 0;
    if (sizeof(X) == 2 && !plain) {
        const Scratch made = make_scratch(out_ * in_);
        dequantize_as(made.get(), threads);
        for_tokens(out_, in_, threads, [&](int64_t i) {
            ops_.to_bfloat16(made.get() + i * in_, in_, reinterpret_cast<uint16_t*>(out) + i * in_);
        });
        return;
    }
    if (!alone()) std::fill_n(out, out_ * in_, X(0)); // rows or channels may have no tile
    for (const Part& part : parts_) {
        const Tile& tile = *part.tile;
        const bool whole = part.gather == nullptr && !tile.out_rows().given() && tile.rows() == out_;
        if constexpr (sizeof(X) == 2) {
            if (whole && tile.dequantize_bf16(out, threads)) continue;
        } else if (whole) {
            tile.dequantize(out, threads);
            continue;
        }
        const Scratch made = make_scratch(tile.rows() * tile.columns());
        tile.dequantize(made.get(), threads);
        const int32_t* rows = tile.out_rows().data();
        for_tokens(tile.rows(), tile.columns(), threads, [&](int64_t i) {
            place_row(part, made.get() + i * tile.columns(), in_, rows != nullptr ? rows[i] : i, out);
        });
    }
    if constexpr (sizeof(X) == 4)
        if (!plain) add_sparse_and_scale(out, threads);
}

void Layer::add_sparse_and_scale(float* dense, int threads) const {
    const SparseRows& s = stored_->sparse;
    for_tokens(out_, in_, threads, [&](int64_t i) {
        float* row = dense + i * in_;
        for (int64_t n = s.rows > 0 ? s.row_ptr[i] : 0, end = s.rows > 0 ? s.row_ptr[i + 1] : 0; n < end; ++n)
            row[s.columns16 != nullptr ? s.columns16[n] : s.columns32[n]] += baseline::half_to_float(s.values[n]);
        for (size_t j = 0; j < stored_->scale.size(); ++j) row[j] *= stored_->scale[j];
    });
}

void Layer::dequantize(float* out, int threads) const { dequantize_as(out, threads); }
void Layer::dequantize(uint16_t* out, int threads) const { dequantize_as(out, threads); }

bool Layer::has_rows() const {
    return parts_.size() == 1 && alone() && parts_[0].tile->has_rows() && stored_->scale.empty() &&
           stored_->sparse.rows == 0;
}

void Layer::rows(const int64_t* ids, int64_t n, float* out) const {
    if (!has_rows()) refuse("single rows are those of a layer of one tile over all of it: dequantize this one");
    const Part& part = parts_[0];
    for (int64_t i = 0; i < n; ++i) {
        if (ids[i] < 0 || ids[i] >= out_)
            refuse("row " + std::to_string(ids[i]) + " of a layer of " + std::to_string(out_) + " rows");
    }
    std::vector<float> made(part.gather == nullptr ? 0 : static_cast<size_t>(in_));
    for (int64_t i = 0; i < n; ++i) {
        if (part.gather == nullptr) {
            part.tile->row(ids[i], out + i * in_);
            continue;
        }
        part.tile->row(ids[i], made.data());
        place_row(part, made.data(), in_, i, out);
    }
}

void warm_thread() { thread_memory(GEMM_MEMORY); }

} // namespace anybit
