// Layers in Python: their description and arrays as they come, and products on the pool's threads.
#include "module/layer_module.h"

#include "layer/centroids.h"
#include "layer/run.h"
#include "module/arrays.h"
#include "module/tensor.h"

#define ANYBIT_ISA baseline
#include "matmul/whole.h"
#undef ANYBIT_ISA

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

using namespace anybit;

namespace {

// ---- descriptions

// What a dictionary says, of a kind that is checked.
class Description {
public:
    Description(nb::dict entries, std::string name) : entries_(std::move(entries)), name_(std::move(name)) {}

    int64_t number(const char* key, std::optional<int64_t> absent = std::nullopt) const {
        const nb::object found = get(key, absent.has_value());
        if (!found.is_valid()) return *absent;
        return whole(found, key);
    }
    bool flag(const char* key, std::optional<bool> absent = std::nullopt) const {
        const nb::object found = get(key, absent.has_value());
        if (!found.is_valid()) return *absent;
        if (!nb::isinstance<nb::bool_>(found)) refuse(name_ + ": " + key + " is neither true nor false");
        return nb::cast<bool>(found);
    }
    std::string text(const char* key) const {
        const nb::object found = get(key, false);
        std::string made; // half a surrogate pair is a str, too, and no text
        if (!nb::isinstance<nb::str>(found) || !nb::try_cast(found, made)) refuse(name_ + ": " + key + " is no text");
        return made;
    }
    template <typename T> std::vector<T> numbers(const char* key) const {
        std::vector<T> made;
        for (const nb::handle& item : nb::cast<nb::sequence>(sequence(key)))
            made.push_back(static_cast<T>(whole(item, key)));
        return made;
    }
    nb::object sequence(const char* key) const {
        nb::object found = get(key, false);
        if (!nb::isinstance<nb::list>(found) && !nb::isinstance<nb::tuple>(found))
            refuse(name_ + ": " + key + " is no list");
        return found;
    }

private:
    nb::object get(const char* key, bool may_be_absent) const {
        if (entries_.contains(key)) return entries_[key];
        if (!may_be_absent) refuse(name_ + " has no " + key);
        return nb::object();
    }
    int64_t whole(nb::handle value, const char* key) const {
        int64_t made = 0;
        if (nb::isinstance<nb::bool_>(value) || !nb::isinstance<nb::int_>(value) || !nb::try_cast(value, made) ||
            made < 0 || made >= MAX_SIZE)
            refuse(name_ + ": " + key + " is no number from 0 to 2^31 - 1");
        return made;
    }

    nb::dict entries_;
    std::string name_;
};

TileLayout tile_layout(const Description& tile) {
    TileLayout made;
    made.format = tile.text("format");
    made.rows = tile.number("rows", ALL);
    made.cols = tile.number("cols", ALL);
    if (made.format == "group_int") {
        made.bits = static_cast<int>(tile.number("bits"));
        made.group_size = tile.number("group_size");
        made.symmetric = tile.flag("symmetric");
        made.act_bits = static_cast<int>(tile.number("act_bits", 16));
        made.act_static = tile.flag("act_static", false);
    } else if (made.format == "codebook") {
        made.bits = static_cast<int>(tile.number("bits"));
        made.widths = tile.numbers<int>("widths");
        made.by_channel = tile.flag("by_channel");
        made.table_bits = static_cast<int>(tile.number("table_bits"));
    } else if (made.format == "two_four") {
        made.narrow = tile.number("narrow");
        made.group_size = tile.number("group_size");
    } else if (made.format == "nested") {
        made.counts = tile.numbers<int64_t>("counts");
        made.kept = tile.number("kept");
        made.kept_bits = static_cast<int>(tile.number("kept_bits", 16));
        made.gains = tile.flag("gains", false);
    }
    return made;
}

LayerLayout layer_layout(const nb::dict& entries) {
    const Description layer(entries, "the layer");
    const auto shape = layer.numbers<int64_t>("shape");
    if (shape.size() != 2) refuse("the layer: shape is not [out, in]");
    LayerLayout made{shape[0], shape[1], {}, layer.number("sparse", -1), layer.flag("input_scale", false)};
    for (const nb::handle& tile : nb::cast<nb::sequence>(layer.sequence("tiles"))) {
        if (!nb::isinstance<nb::dict>(tile)) refuse("the layer: a tile is no dictionary");
        made.tiles.push_back(tile_layout({nb::cast<nb::dict>(tile), "tile " + std::to_string(made.tiles.size())}));
    }
    return made;
}

// ---- arrays

// A contiguous array on the CPU, kept by its object.
template <typename A> Array as_array(const std::string& name, nb::handle object) {
    A given;
    if (!nb::try_cast(object, given)) throw nb::type_error((name + " is no array").c_str());
    const auto is_cpu = given.device_type() == nb::device::cpu::value;
    if (!is_cpu || (given.size() > 0 && !is_dense(given, given.ndim())))
        refuse(name + " is " + TYPE_NAMES[int(type_of(given.dtype()))] + " " + words(given.shape_ptr(), given.ndim()) +
               " with strides " + words(given.stride_ptr(), given.ndim()) + (is_cpu ? "" : " on another device") +
               ", expected it contiguous on the CPU");
    Array made;
    made.data = const_cast<void*>(static_cast<const void*>(given.data()));
    made.type = type_of(given.dtype());
    made.shape.assign(given.shape_ptr(), given.shape_ptr() + given.ndim());
    made.keeper = std::make_shared<A>(std::move(given));
    return made;
}

template <typename A> Fields as_fields(const nb::dict& arrays) {
    Fields fields;
    for (const auto& [key, value] : arrays) {
        const auto name = nb::cast<std::string>(key);
        fields.emplace(name, as_array<A>(name, value));
    }
    return fields;
}

// ---- layers

// Scales of a layer whose sums of rounded inputs are exact; one that is no number makes its token's outputs none.
void check_multiples(const float* scales, int64_t tokens, int64_t groups) {
    for (int64_t k = 0; k < tokens; ++k, scales += groups) {
        const float unit = baseline::find_unit(scales, groups);
        for (int64_t g = 0; g < groups && unit == unit; ++g)
            if (static_cast<float>(baseline::factor_of(scales[g], unit)) * unit != scales[g])
                refuse("scales hold " + std::to_string(scales[g]) +
                       ": expected whole multiples, up to 255, of a power of two");
    }
}

struct BoundTables {
    std::shared_ptr<const Tables> tables;

    BoundTables(nb::object values, const std::optional<std::string>& isa, bool int8)
        : tables(std::make_shared<const Tables>(find_matmul_ops(isa), as_array<Input>("tables", values), int8)) {}
};

class BoundLayer {
public:
    BoundLayer(const nb::dict& layout, const nb::dict& fields, bool int8_codebooks, const BoundTables* tables,
               int64_t threads, const std::optional<std::string>& isa) {
        const LayerLayout stored = layer_layout(layout);
        const Fields arrays = as_fields<Input>(fields);
        Layer::Options options;
        options.ops = &find_matmul_ops(isa);
        options.int8_codebooks = int8_codebooks;
        if (tables != nullptr) options.tables = tables->tables;
        options.threads = check_threads(threads);
        nb::gil_scoped_release release;
        layer_ = std::make_shared<const Layer>(stored, arrays, options);
    }
    explicit BoundLayer(std::shared_ptr<const Layer> layer) : layer_(std::move(layer)) {}

    BoundLayer at(const nb::dict& layout) const { return BoundLayer(layer_->at(layer_layout(layout))); }
    const std::vector<std::string>& repacked() const { return layer_->repacked(); }
    int64_t int8_group_size() const { return layer_->int8_group_size(); }
    bool takes_codes() const { return layer_->takes_codes(); }
    bool rounds_inputs() const { return layer_->rounds_inputs(); }

    void unpack(const nb::dict& fields, int64_t threads) const {
        const Fields arrays = as_fields<Output>(fields);
        const int used = check_threads(threads);
        nb::gil_scoped_release release;
        layer_->unpack(arrays, used);
    }

    // x [..., in] @ W.T in the dtype of x; None where x is not what `Tensor::of` takes, [..., in].
    nb::object matmul(nb::handle x, int64_t threads) const {
        const int used = check_threads(std::min(threads, MAX_THREADS)); // PyTorch may have more
        const std::optional<Tensor> from = Tensor::of(x);
        if (!from || from->columns != layer_->in()) return nb::none();
        nb::object made = from->new_empty(layer_->out());
        const std::optional<Tensor> own = Tensor::of(made); // none in a mode that makes other tensors
        if (!own) return nb::none();
        void* to = own->data;
        const bool bf16 = from->numbers == Numbers::bf16;
        nb::gil_scoped_release release;
        multiply(*layer_, from->rows, from->numbers, {from->data, layer_->in()}, bf16 ? Written::rounded : Written::set,
                 {bf16 ? nullptr : static_cast<float*>(to), bf16 ? static_cast<uint16_t*>(to) : nullptr, layer_->out()},
                 used);
        return made;
    }

    // What an engine asks for, on the pool's threads.
    void product(const Input& x, const std::optional<Input>& scales, const Output& y, bool add, int64_t threads) const {
        const int used = check_threads(threads);
        const int64_t m = size_of("x", x, 0, 2), in = layer_->in(), out = layer_->out();
        if (scales) check("x", x, {Type::i8}, {m, in}, Layout::dense_rows);
        else check("x", x, {Type::f32, Type::bf16, Type::u16}, {m, in}, Layout::dense_rows);
        if (add) check("y", y, {Type::f32}, {m, out}, Layout::dense_rows);
        else check("y", y, {Type::f32, Type::bf16, Type::u16}, {m, out}, Layout::dense_rows);
        const bool floats = type_of(y.dtype()) == Type::f32;
        LayerInputs from{x.data(), row_stride(m, x.stride(0), in)};
        if (scales) {
            if (int8_group_size() == 0) refuse(NO_INT8);
            check("scales", *scales, {Type::f32}, {m, (in - 1) / int8_group_size() + 1}, Layout::dense);
            from.scales = static_cast<const float*>(scales->data());
            if (layer_->int8_multiples()) check_multiples(from.scales, m, (in - 1) / int8_group_size() + 1);
        }
        const Numbers numbers = scales ? Numbers::i8 : type_of(x.dtype()) == Type::f32 ? Numbers::f32 : Numbers::bf16;
        const LayerOutputs to{floats ? static_cast<float*>(y.data()) : nullptr,
                              floats ? nullptr : static_cast<uint16_t*>(y.data()), row_stride(m, y.stride(0), out)};
        nb::gil_scoped_release release;
        multiply(*layer_, m, numbers, from, add ? Written::add : floats ? Written::set : Written::rounded, to, used);
    }

    void dequantize(const Output& out, int64_t threads) const {
        const int used = check_threads(threads);
        check("out", out, {Type::f32, Type::bf16, Type::u16}, {layer_->out(), layer_->in()}, Layout::dense);
        const bool floats = type_of(out.dtype()) == Type::f32;
        void* to = out.data();
        nb::gil_scoped_release release;
        if (floats) layer_->dequantize(static_cast<float*>(to), used);
        else layer_->dequantize(static_cast<uint16_t*>(to), used);
    }

    const std::shared_ptr<const Layer>& native() const { return layer_; }

    bool has_rows() const { return layer_->has_rows(); }
    void rows(const Input& ids, const Output& out) const {
        const int64_t n = size_of("ids", ids, 0, 1);
        check("ids", ids, {Type::i64}, {n}, Layout::dense);
        check("out", out, {Type::f32}, {n, layer_->in()}, Layout::dense);
        const auto* from = static_cast<const int64_t*>(ids.data());
        const std::vector<int64_t> wanted(from, from + n); // what is checked stays what is read
        auto* to = static_cast<float*>(out.data());
        nb::gil_scoped_release release;
        layer_->rows(wanted.data(), n, to);
    }

private:
    std::shared_ptr<const Layer> layer_;
};

} // namespace

std::shared_ptr<const Layer> native_layer(nb::handle object) {
    const BoundLayer* found = nullptr;
    if (!nb::try_cast(object, found) || found == nullptr) throw nb::type_error("a matrix is no anybit._native.Layer");
    return found->native();
}

void add_layer(nb::module_& m) {
    nb::class_<BoundTables>(m, "Tables", "The tables of all shapes, for nested tiles.")
        .def(nb::init<nb::object, const std::optional<std::string>&, bool>(), nb::arg("tables"),
             nb::arg("isa") = nb::none(), nb::arg("int8") = false,
             "tables float32 [shapes, 2 + 4 + ... + 256]; int8: for layers that round inputs to 8 bits.");
    nb::class_<BoundLayer>(m, "Layer", "A linear layer's stored arrays, checked and bound to kernels.")
        .def(nb::init<const nb::dict&, const nb::dict&, bool, const BoundTables*, int64_t,
                      const std::optional<std::string>&>(),
             nb::arg("layout"), nb::arg("fields"), nb::arg("int8_codebooks") = false,
             nb::arg("tables").none() = nb::none(), nb::arg("threads") = 1, nb::arg("isa") = nb::none(),
             "layout: as config.json describes the layer; fields: its stored arrays by field.")
        .def("at", &BoundLayer::at, nb::arg("layout"), "The same weights at fewer bits, nothing copied.")
        .def_prop_ro("repacked", &BoundLayer::repacked, "Fields that are held in an order of the kernels' own.")
        .def_prop_ro("int8_group_size", &BoundLayer::int8_group_size,
                     "Inputs that share a scale where `product` takes rounded ones; 0: it takes none.")
        .def_prop_ro("takes_codes", &BoundLayer::takes_codes,
                     "Whether the decoder gives it inputs of 8 bits where it may.")
        .def_prop_ro("rounds_inputs", &BoundLayer::rounds_inputs, "Whether it rounds inputs itself.")
        .def_prop_ro("has_rows", &BoundLayer::has_rows, "Whether there is `rows`.")
        .def("unpack", &BoundLayer::unpack, nb::arg("fields"), nb::arg("threads"),
             "Fill arrays of the fields `repacked` with what was given.")
        .def("matmul", &BoundLayer::matmul, nb::arg("x"), nb::arg("threads"),
             "x [..., in] @ W.T as a tensor of its dtype; None where x is not a contiguous torch.Tensor of float32 or\n"
             "bfloat16 [..., in] on the CPU whose memory is its numbers: no subclass, no tangent.")
        .def("product", &BoundLayer::product, nb::arg("x").noconvert(), nb::arg("scales").noconvert().none(),
             nb::arg("y").noconvert(), nb::arg("add"), nb::arg("threads"),
             "y [m, out] = x [m, in] @ W.T, or += if `add`; x float32, bfloat16 (or its bits as uint16), or int8 with\n"
             "scales float32 [m, groups], for codebooks whole multiples of a power of two; y float32 or bfloat16.")
        .def("dequantize", &BoundLayer::dequantize, nb::arg("out").noconvert(), nb::arg("threads"),
             "out [out, in] = W, float32 or bfloat16.")
        .def("rows", &BoundLayer::rows, nb::arg("ids").noconvert(), nb::arg("out").noconvert(),
             "out float32 [n, in] = W[ids], ids int64 [n].");
}
