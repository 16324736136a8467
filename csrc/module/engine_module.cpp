// The engine in Python: descriptions and arrays as they come, checked.
#include "module/engine_module.h"

#include "engine/decoder.h"
#include "module/arrays.h"
#include "module/layer_module.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

using namespace anybit;

namespace {

// A dictionary all of whose entries are read: what nobody asks for is refused.
class Entries {
public:
    Entries(nb::dict entries, std::string name) : entries_(std::move(entries)), name_(std::move(name)) {}

    template <typename T> T get(const char* key) {
        if (!entries_.contains(key)) refuse(name_ + " has no " + key);
        ++read_;
        T made{};
        if (!nb::try_cast(nb::object(entries_[key]), made)) refuse(name_ + ": " + key + " is of another type");
        return made;
    }
    void get(const char* key, int64_t& to) { to = get<int64_t>(key); }
    void get(const char* key, float& to) { to = static_cast<float>(get<double>(key)); }
    // float32 [n], copied; absent: none.
    void get(const char* key, std::vector<float>& to) {
        if (!entries_.contains(key)) return;
        const auto given = get<Input>(key);
        check(key, given, {Type::f32}, {-1}, Layout::dense);
        const auto* from = static_cast<const float*>(given.data());
        to.assign(from, from + given.size());
    }
    void finish() const {
        if (entries_.size() != read_) refuse(name_ + " has entries that nobody knows");
    }

private:
    nb::dict entries_;
    std::string name_;
    size_t read_ = 0;
};

Activation activation(const std::string& name) {
    if (name == "silu") return Activation::silu;
    if (name == "gelu") return Activation::gelu;
    if (name == "gelu_tanh") return Activation::gelu_tanh;
    if (name == "relu") return Activation::relu;
    refuse("activation '" + name + "' is unknown: silu, gelu, gelu_tanh or relu");
}

BlockSpec block_spec(Entries entries) {
    BlockSpec made;
    entries.get("window", made.window);
    entries.get("rope", made.rope);
    entries.get("attention_norm", made.attention_norm);
    entries.get("post_attention_norm", made.post_attention_norm);
    entries.get("mlp_norm", made.mlp_norm);
    entries.get("post_mlp_norm", made.post_mlp_norm);
    entries.get("q_norm", made.q_norm);
    entries.get("k_norm", made.k_norm);
    entries.get("q_bias", made.q_bias);
    entries.get("k_bias", made.k_bias);
    entries.get("v_bias", made.v_bias);
    entries.get("o_bias", made.o_bias);
    entries.get("gate_bias", made.gate_bias);
    entries.get("up_bias", made.up_bias);
    entries.get("down_bias", made.down_bias);
    entries.finish();
    return made;
}

DecoderSpec decoder_spec(const nb::dict& description) {
    Entries entries(description, "the description");
    DecoderSpec made;
    entries.get("vocabulary", made.vocabulary);
    entries.get("hidden", made.hidden);
    entries.get("intermediate", made.intermediate);
    entries.get("heads", made.heads);
    entries.get("kv_heads", made.kv_heads);
    entries.get("head_size", made.head_size);
    entries.get("epsilon", made.epsilon);
    entries.get("softmax_scale", made.softmax_scale);
    entries.get("attention_softcap", made.attention_softcap);
    entries.get("embedding_scale", made.embedding_scale);
    entries.get("logit_softcap", made.logit_softcap);
    entries.get("final_norm", made.final_norm);
    made.activation = activation(entries.get<std::string>("activation"));
    for (const auto& item : entries.get<std::vector<nb::dict>>("ropes")) {
        Entries rope(item, "a rope");
        Rope own;
        rope.get("frequencies", own.frequencies);
        rope.get("scale", own.scale);
        rope.finish();
        made.ropes.push_back(std::move(own));
    }
    for (const auto& item : entries.get<std::vector<nb::dict>>("blocks"))
        made.blocks.push_back(block_spec({item, "block " + std::to_string(made.blocks.size())}));
    entries.finish();
    return made;
}

class BoundCache {
public:
    BoundCache(int64_t blocks, int64_t kv_heads, int64_t head_size, int bits, int64_t pages,
               const std::vector<bool>& windowed, int64_t window_pages)
        : cache(checked(blocks, kv_heads, head_size, bits, pages, {windowed, window_pages})) {}

    KvCache cache;

private:
    static KvCache checked(int64_t blocks, int64_t kv_heads, int64_t head_size, int bits, int64_t pages,
                           Windowed windowed) {
        check_range("blocks", blocks, 1, int64_t(1) << 16);
        check_range("kv_heads", kv_heads, 1, int64_t(1) << 16);
        check_range("head_size", head_size, 1, int64_t(1) << 12);
        return {blocks, kv_heads, head_size, bits, pages, std::move(windowed)};
    }
};

class BoundDecoder {
public:
    BoundDecoder(const nb::dict& description, bool int8_inputs, const std::optional<std::string>& isa)
        : decoder_(decoder_spec(description), int8_inputs, find_engine_ops(isa)) {}

    size_t add_level(nb::handle embedding, nb::handle head, const std::vector<std::vector<nb::object>>& blocks) {
        DecoderWeights weights{native_layer(embedding), native_layer(head), {}};
        for (const auto& b : blocks) {
            if (b.size() != 7) refuse("a block has " + std::to_string(b.size()) + " matrices, expected 7");
            weights.blocks.push_back({native_layer(b[0]), native_layer(b[1]), native_layer(b[2]), native_layer(b[3]),
                                      native_layer(b[4]), native_layer(b[5]), native_layer(b[6])});
        }
        return decoder_.add_level(std::move(weights));
    }

    void step(const Input& tokens, const Input& positions, const Input& sequences, const Input& pages,
              const Input& wanted, const Output& logits, size_t level, BoundCache& cache, int64_t threads,
              const std::optional<Input>& window_pages, bool batch_invariant) {
        const int used = check_threads(threads);
        const auto index = [](const char* name, const Input& given, int64_t n) {
            check(name, given, {Type::i32}, {n}, Layout::dense);
            const auto* from = static_cast<const int32_t*>(given.data());
            return std::vector<int32_t>(from, from + given.size()); // what is checked stays what is read
        };
        const int64_t rows = size_of("tokens", tokens, 0, 1), asked = size_of("wanted", wanted, 0, 1);
        const int64_t count = size_of("pages", pages, 0, 2), row_pages = size_of("pages", pages, 1, 2);
        check_range("rows", rows, 0, MOST_ROWS);
        check("logits", logits, {Type::f32}, {asked, decoder_.spec().vocabulary}, Layout::dense);
        const auto own_tokens = index("tokens", tokens, rows), own_positions = index("positions", positions, rows);
        const auto own_sequences = index("sequences", sequences, rows), own_wanted = index("wanted", wanted, asked);
        const auto own_pages = table("pages", pages, count, row_pages);
        const auto own_window_pages =
            window_pages ? table("window_pages", *window_pages, count, row_pages) : std::vector<int32_t>();
        const Step step{own_tokens.data(),
                        own_positions.data(),
                        own_sequences.data(),
                        rows,
                        own_pages.data(),
                        window_pages ? own_window_pages.data() : own_pages.data(),
                        count,
                        row_pages,
                        own_wanted.data(),
                        asked,
                        static_cast<float*>(logits.data()),
                        batch_invariant};
        nb::gil_scoped_release release;
        decoder_.step(step, level, cache.cache, used);
    }

private:
    static std::vector<int32_t> table(const char* name, const Input& given, int64_t rows, int64_t columns) {
        check(name, given, {Type::i32}, {rows, columns}, Layout::dense);
        const auto* from = static_cast<const int32_t*>(given.data());
        return {from, from + rows * columns};
    }

    static constexpr int64_t MOST_ROWS = 1 << 14; // of a step: prompts come in chunks

    Decoder decoder_;
};

} // namespace

void add_engine(nb::module_& m) {
    m.attr("PAGE_TOKENS") = PAGE;
    m.def(
        "engine_isas", [] { return isa_names(engine_ops); },
        "The instruction sets that this machine has kernels of the engine in, the best last.");
    nb::exception<Decoder::NotFinite>(m, "NotFiniteError", PyExc_ArithmeticError);
    nb::class_<BoundCache>(m, "KvCache", "Pages of keys and values.")
        .def(
            nb::init<int64_t, int64_t, int64_t, int, int64_t, const std::vector<bool>&, int64_t>(), nb::arg("blocks"),
            nb::arg("kv_heads"), nb::arg("head_size"), nb::arg("bits"), nb::arg("pages"),
            nb::arg("windowed") = std::vector<bool>(), nb::arg("window_pages") = 0,
            "pages of PAGE_TOKENS tokens; bits: 16, 8 or 4; windowed [blocks]: which blocks have window_pages of their\n"
            "own instead. Memory is taken as pages are written.")
        .def_prop_ro("pages", [](const BoundCache& c) { return c.cache.pages(false); })
        .def_prop_ro("page_bytes", [](const BoundCache& c) { return c.cache.page_bytes(false); })
        .def_prop_ro("window_pages", [](const BoundCache& c) { return c.cache.pages(true); })
        .def_prop_ro("window_page_bytes", [](const BoundCache& c) { return c.cache.page_bytes(true); });
    nb::class_<BoundDecoder>(m, "Decoder", "A decoder-only transformer on stored layers.")
        .def(
            nb::init<const nb::dict&, bool, const std::optional<std::string>&>(), nb::arg("description"),
            nb::arg("int8_inputs"), nb::arg("isa") = nb::none(),
            "description: see csrc/engine/decoder.h; int8_inputs: inputs of layers that allow it are rounded to 8 bits;\n"
            "isa: one of `engine_isas` instead of the best, for what lies between the layers.")
        .def("add_level", &BoundDecoder::add_level, nb::arg("embedding"), nb::arg("head"), nb::arg("blocks"),
             "Matrices at one level; blocks: q, k, v, o, gate, up and down of each. Returns the level's number.")
        .def(
            "step", &BoundDecoder::step, nb::arg("tokens").noconvert(), nb::arg("positions").noconvert(),
            nb::arg("sequences").noconvert(), nb::arg("pages").noconvert(), nb::arg("wanted").noconvert(),
            nb::arg("logits").noconvert(), nb::arg("level"), nb::arg("cache"), nb::arg("threads"),
            nb::arg("window_pages").noconvert().none() = nb::none(), nb::arg("batch_invariant") = true,
            "Run tokens at positions of sequences, int32 [rows] each; pages int32 [sequences, n], and window_pages of the\n"
            "blocks that have their own, default: the same; logits float32 [wanted, vocabulary] of the rows `wanted`;\n"
            "batch_invariant: every token has the bits that it has alone.");
}
