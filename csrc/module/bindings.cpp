// The Python module anybit._native: functions on arrays, which it checks; it releases the GIL and splits the rows over
// threads. Layers are in layer_module.cpp, coded planes in coding_module.cpp. Types for mypy: src/anybit/_native.pyi.
#include "common/features.h"
#include "common/scratch.h"
#include "module/arrays.h"
#include "module/coding_module.h"
#include "module/engine_module.h"
#include "module/layer_module.h"
#include "quantize/attention.h"
#include "quantize/moments.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

using namespace anybit;

namespace {

constexpr int64_t KMEANS_WORK = 100; // multiply-adds that clustering costs per weight, about
constexpr int64_t NESTED_WORK = 100; // that nested codes cost per weight, or fitting their scales
constexpr float MAX_FLOAT = std::numeric_limits<float>::max();

// Scales or zeros of GPTQ: one number per weight, or one per row.
Matrix grid_matrix(const char* name, const Input& a, int64_t rows, int64_t columns) {
    if (a.ndim() == 1) check(name, a, {Type::f32}, {rows}, Layout::any);
    else check(name, a, {Type::f32}, {rows, columns}, Layout::any);
    return {static_cast<const float*>(a.data()), a.stride(0), a.ndim() == 1 ? 0 : a.stride(1)};
}

void check_pivots(const char* name, const float* hinv, int64_t stride, int64_t columns) {
    for (int64_t j = 0; j < columns; ++j) {
        const float pivot = hinv[j * (stride + 1)];
        if (!(pivot > 0.0f) || std::isinf(pivot))
            refuse(std::string(name) + "[" + std::to_string(j) + ", " + std::to_string(j) + "] is " +
                   std::to_string(pivot) + ", expected a positive number: raise the damping");
    }
}

void check_codes_fit(const GptqBlock& b) {
    for (int64_t i = 0; i < b.rows; ++i)
        if (!(b.maxq[i] >= 0.0f && b.maxq[i] <= 255.0f))
            refuse("maxq[" + std::to_string(i) + "] is " + std::to_string(b.maxq[i]) + ", expected 0 to 255");
}

void gptq_block(const Output& weight, const Input& hinv, const Input& scales, const Input& zeros, const Input& maxq,
                const Output& codes, const Output& error, int64_t threads, const std::optional<std::string>& isa) {
    const QuantizeOps& kernels = find_quantize_ops(isa);
    const int used = check_threads(threads);
    check("weight", weight, {Type::f32}, {-1, -1}, Layout::dense_rows);
    GptqBlock b{};
    b.rows = static_cast<int64_t>(weight.shape(0));
    b.columns = static_cast<int64_t>(weight.shape(1));
    check("hinv", hinv, {Type::f32}, {b.columns, b.columns}, Layout::dense_rows);
    check("maxq", maxq, {Type::f32}, {b.rows}, Layout::dense);
    check("codes", codes, {Type::u8}, {b.rows, b.columns}, Layout::dense);
    check("error", error, {Type::f32}, {b.rows, b.columns}, Layout::dense);
    b.scales = grid_matrix("scales", scales, b.rows, b.columns);
    b.zeros = grid_matrix("zeros", zeros, b.rows, b.columns);
    if (b.rows == 0 || b.columns == 0) return;
    b.weight = static_cast<float*>(weight.data());
    b.weight_stride = row_stride(b.rows, weight.stride(0), b.columns);
    b.hinv = static_cast<const float*>(hinv.data());
    b.hinv_stride = row_stride(b.columns, hinv.stride(0), b.columns);
    b.maxq = static_cast<const float*>(maxq.data());
    b.codes = static_cast<uint8_t*>(codes.data());
    b.error = static_cast<float*>(error.data());
    check_pivots("hinv", b.hinv, b.hinv_stride, b.columns);
    check_codes_fit(b);
    nb::gil_scoped_release release;
    const int64_t piece = piece_of(b.rows, GPTQ_ROWS, b.rows * b.columns * b.columns / 2, used);
    const int64_t floats = GPTQ_ROWS * b.columns;
    const Scratch scratch = make_scratch(((b.rows - 1) / piece + 1) * floats); // here: workers must not throw
    parallel_for(b.rows, piece, used, [&](int64_t begin, int64_t end) {
        kernels.gptq(b, scratch.get() + begin / piece * floats, begin, end);
    });
}

void check_values(const char* name, const float* data, int64_t rows, int64_t columns, int64_t stride, float low) {
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) {
            const float value = data[i * stride + j];
            if (!(value >= low && value <= MAX_FLOAT))
                refuse(std::string(name) + "[" + std::to_string(i) + ", " + std::to_string(j) + "] is " +
                       std::to_string(value) + ", expected a finite number" + (low == 0 ? " not below 0" : ""));
        }
}

void kmeans(const Input& weight, const std::optional<Input>& importance, int64_t seed_bits, int64_t bits,
            const Output& codes, const Output& centroids, int64_t threads, const std::optional<std::string>& isa) {
    const QuantizeOps& kernels = find_quantize_ops(isa);
    const int used = check_threads(threads);
    if (seed_bits < 1 || seed_bits > bits || bits > 8)
        refuse("seed_bits and bits are " + std::to_string(seed_bits) + " and " + std::to_string(bits) +
               ", expected 1 <= seed_bits <= bits <= 8");
    check("weight", weight, {Type::f32}, {-1, -1}, Layout::dense_rows);
    Clustering c{};
    c.rows = static_cast<int64_t>(weight.shape(0));
    c.columns = static_cast<int64_t>(weight.shape(1));
    check("codes", codes, {Type::u8}, {c.rows, c.columns}, Layout::dense);
    check("centroids", centroids, {Type::f32}, {c.rows, (2 << bits) - (1 << seed_bits)}, Layout::dense);
    if (c.rows == 0 || c.columns == 0) return;
    c.seed_bits = static_cast<int>(seed_bits);
    c.bits = static_cast<int>(bits);
    c.weight = static_cast<const float*>(weight.data());
    c.weight_stride = row_stride(c.rows, weight.stride(0), c.columns);
    if (importance) {
        const bool shared = importance->ndim() == 1;
        if (shared) check("importance", *importance, {Type::f32}, {c.columns}, Layout::dense);
        else check("importance", *importance, {Type::f32}, {c.rows, c.columns}, Layout::dense_rows);
        c.importance = static_cast<const float*>(importance->data());
        c.importance_stride = shared ? 0 : row_stride(c.rows, importance->stride(0), c.columns);
        check_values("importance", c.importance, shared ? 1 : c.rows, c.columns, c.importance_stride, 0);
    }
    check_values("weight", c.weight, c.rows, c.columns, c.weight_stride, -MAX_FLOAT);
    c.codes = static_cast<uint8_t*>(codes.data());
    c.centroids = static_cast<float*>(centroids.data());
    nb::gil_scoped_release release;
    const int64_t piece = piece_of(c.rows, 1, c.rows * c.columns * KMEANS_WORK, used);
    const int64_t floats = (kernels.kmeans_scratch(c.columns, c.seed_bits) / 64 + 1) * 16;
    const Scratch scratch = make_scratch(((c.rows - 1) / piece + 1) * floats);
    parallel_for(c.rows, piece, used, [&](int64_t begin, int64_t end) {
        kernels.kmeans(c, reinterpret_cast<char*>(scratch.get() + begin / piece * floats), begin, end);
    });
}

// A copy of shapes, which index tables of so many: what is checked stays what is read.
std::vector<uint8_t> checked_shapes(const Input& shapes, int64_t kinds) {
    const auto* from = static_cast<const uint8_t*>(shapes.data());
    std::vector<uint8_t> made(from, from + shapes.size());
    for (size_t i = 0; i < made.size(); ++i)
        if (made[i] >= kinds) refuse("shapes[" + std::to_string(i) + "] is not below " + std::to_string(kinds));
    return made;
}

// The same of codes [rows, columns] of up to `bits` bits.
std::vector<uint8_t> checked_codes(const Output& codes, int bits) {
    const auto rows = static_cast<int64_t>(codes.shape(0)), columns = static_cast<int64_t>(codes.shape(1));
    const int64_t stride = row_stride(rows, codes.stride(0), columns);
    const auto* from = static_cast<const uint8_t*>(codes.data());
    std::vector<uint8_t> made(static_cast<size_t>(rows * columns));
    for (int64_t i = 0; i < rows; ++i) std::copy_n(from + i * stride, columns, made.data() + i * columns);
    for (size_t at = 0; at < made.size(); ++at)
        if (made[at] >> bits != 0)
            refuse("codes[" + std::to_string(at / static_cast<size_t>(columns)) + ", " +
                   std::to_string(at % static_cast<size_t>(columns)) + "] is wider than the tables");
    return made;
}

void nested_codes(const Input& targets, const Input& inverse, const Input& tables, const Input& shapes,
                  const Input& scales, const Input& weights, const Output& codes, const Output& errors, int64_t threads,
                  const std::optional<std::string>& isa) {
    const QuantizeOps& kernels = find_quantize_ops(isa);
    const int used = check_threads(threads);
    check("targets", targets, {Type::f32}, {-1, -1, -1}, Layout::any);
    NestedBlock n{};
    const auto widths = static_cast<int64_t>(targets.shape(0));
    n.rows = static_cast<int64_t>(targets.shape(1));
    n.columns = static_cast<int64_t>(targets.shape(2));
    n.width_stride = targets.stride(0);
    n.row_stride = targets.stride(1);
    if (widths < 1 || widths > 8) refuse(std::to_string(widths) + " widths, expected 1 to 8");
    n.bits = static_cast<int>(widths);
    if (n.columns > NESTED_COLUMNS || (n.columns > 1 && targets.stride(2) != 1))
        refuse("targets must have up to " + std::to_string(NESTED_COLUMNS) + " contiguous columns");
    check("inverse", inverse, {Type::f32}, {n.columns, n.columns}, Layout::dense_rows);
    const int64_t kinds = size_of("tables", tables, 0, 2);
    check("tables", tables, {Type::f32}, {kinds, (2 << n.bits) - 2}, Layout::dense);
    check("shapes", shapes, {Type::u8}, {n.rows}, Layout::dense);
    check("scales", scales, {Type::f32}, {n.rows}, Layout::dense);
    check("weights", weights, {Type::f32}, {n.rows, widths}, Layout::dense);
    check("codes", codes, {Type::u8}, {n.rows, n.columns}, Layout::dense);
    check("errors", errors, {Type::f32}, {widths, n.rows, n.columns}, Layout::dense);
    if (n.rows == 0 || n.columns == 0) return;
    n.targets = static_cast<const float*>(targets.data());
    n.inverse = static_cast<const float*>(inverse.data());
    n.inverse_stride = row_stride(n.columns, inverse.stride(0), n.columns);
    n.tables = static_cast<const float*>(tables.data());
    const std::vector<uint8_t> own_shapes = checked_shapes(shapes, kinds);
    n.shapes = own_shapes.data();
    n.scales = static_cast<const float*>(scales.data());
    n.weights = static_cast<const float*>(weights.data());
    n.codes = static_cast<uint8_t*>(codes.data());
    n.errors = static_cast<float*>(errors.data());
    check_values("scales", n.scales, 1, n.rows, 0, 0);
    check_values("weights", n.weights, 1, n.rows * widths, 0, 0);
    check_pivots("inverse", n.inverse, n.inverse_stride, n.columns);
    nb::gil_scoped_release release;
    const int64_t piece = piece_of(n.rows, 1, n.rows * n.columns * NESTED_WORK, used);
    parallel_for(n.rows, piece, used, [&](int64_t begin, int64_t end) { kernels.nested_codes(n, begin, end); });
}

void nested_descent(const Input& slopes, const Input& hessian, const Input& weight, const Input& tables,
                    const Input& shapes, const Input& scales, const Input& weights, const Output& codes,
                    const Output& errors, const Output& losses, int64_t threads,
                    const std::optional<std::string>& isa) {
    const QuantizeOps& kernels = find_quantize_ops(isa);
    const int used = check_threads(threads);
    NestedDescent n{};
    const int64_t widths = size_of("slopes", slopes, 0, 3);
    n.rows = size_of("slopes", slopes, 1, 3);
    n.columns = size_of("slopes", slopes, 2, 3);
    if (widths < 1 || widths > 8) refuse(std::to_string(widths) + " widths, expected 1 to 8");
    if (n.columns > NESTED_COLUMNS) refuse("slopes have more than " + std::to_string(NESTED_COLUMNS) + " columns");
    n.bits = static_cast<int>(widths);
    check("slopes", slopes, {Type::f32}, {widths, n.rows, n.columns}, Layout::dense);
    check("hessian", hessian, {Type::f32}, {n.columns, n.columns}, Layout::dense_rows);
    check("weight", weight, {Type::f32}, {n.rows, n.columns}, Layout::dense_rows);
    const int64_t kinds = size_of("tables", tables, 0, 2);
    check("tables", tables, {Type::f32}, {kinds, (2 << n.bits) - 2}, Layout::dense);
    check("shapes", shapes, {Type::u8}, {n.rows}, Layout::dense);
    check("scales", scales, {Type::f32}, {n.rows}, Layout::dense);
    check("weights", weights, {Type::f32}, {n.rows, widths}, Layout::dense);
    check("codes", codes, {Type::u8}, {n.rows, n.columns}, Layout::dense_rows);
    check("errors", errors, {Type::f32}, {widths, n.rows, n.columns}, Layout::dense_rows);
    check("losses", losses, {Type::f32}, {n.rows, widths}, Layout::dense);
    if (n.rows == 0 || n.columns == 0) return;
    n.slopes = static_cast<const float*>(slopes.data());
    n.hessian = static_cast<const float*>(hessian.data());
    n.hessian_stride = row_stride(n.columns, hessian.stride(0), n.columns);
    n.weight = static_cast<const float*>(weight.data());
    n.weight_stride = row_stride(n.rows, weight.stride(0), n.columns);
    n.tables = static_cast<const float*>(tables.data());
    const std::vector<uint8_t> own_shapes = checked_shapes(shapes, kinds);
    n.shapes = own_shapes.data();
    n.scales = static_cast<const float*>(scales.data());
    n.weights = static_cast<const float*>(weights.data());
    std::vector<uint8_t> own_codes = checked_codes(codes, n.bits);
    n.codes = own_codes.data();
    n.errors = static_cast<float*>(errors.data());
    n.width_stride = errors.stride(0);
    n.row_stride = errors.stride(1);
    n.losses = static_cast<float*>(losses.data());
    check_values("scales", n.scales, 1, n.rows, 0, 0);
    check_values("weights", n.weights, 1, n.rows * widths, 0, 0);
    check_pivots("hessian", n.hessian, n.hessian_stride, n.columns);
    nb::gil_scoped_release release;
    const int64_t piece = piece_of(n.rows, 1, n.rows * n.columns * NESTED_WORK, used);
    parallel_for(n.rows, piece, used, [&](int64_t begin, int64_t end) { kernels.nested_descent(n, begin, end); });
    auto* to = static_cast<uint8_t*>(codes.data());
    const int64_t stride = row_stride(n.rows, codes.stride(0), n.columns);
    for (int64_t i = 0; i < n.rows; ++i) std::copy_n(n.codes + i * n.columns, n.columns, to + i * stride);
}

void nested_fit(const Input& weight, const Input& importance, const Input& tables, const Output& shapes,
                const Output& scales, int64_t threads, const std::optional<std::string>& isa) {
    const QuantizeOps& kernels = find_quantize_ops(isa);
    const int used = check_threads(threads);
    check("weight", weight, {Type::f32}, {-1, -1}, Layout::dense_rows);
    NestedFit f{};
    f.rows = static_cast<int64_t>(weight.shape(0));
    f.columns = static_cast<int64_t>(weight.shape(1));
    check("importance", importance, {Type::f32}, {f.columns}, Layout::dense);
    f.shapes = static_cast<int>(size_of("tables", tables, 0, 2));
    f.entries = static_cast<int>(size_of("tables", tables, 1, 2));
    if (f.shapes < 1 || f.shapes > 256 || f.entries < 1 || f.entries > 256) refuse("tables are not 1 to 256 by 256");
    check("tables", tables, {Type::f32}, {f.shapes, f.entries}, Layout::dense);
    check("shapes", shapes, {Type::u8}, {f.rows}, Layout::dense);
    check("scales", scales, {Type::f32}, {f.rows}, Layout::dense);
    if (f.rows == 0 || f.columns == 0) return;
    f.weight = static_cast<const float*>(weight.data());
    f.weight_stride = row_stride(f.rows, weight.stride(0), f.columns);
    f.importance = static_cast<const float*>(importance.data());
    check_values("importance", f.importance, 1, f.columns, 0, 0);
    check_values("weight", f.weight, f.rows, f.columns, f.weight_stride, -MAX_FLOAT);
    f.tables = static_cast<const float*>(tables.data());
    f.chosen = static_cast<uint8_t*>(shapes.data());
    f.scales = static_cast<float*>(scales.data());
    nb::gil_scoped_release release;
    const int64_t piece = piece_of(f.rows, 1, f.rows * f.columns * NESTED_WORK, used), floats = 2 * (f.columns + 16);
    const Scratch scratch = make_scratch(((f.rows - 1) / piece + 1) * floats);
    parallel_for(f.rows, piece, used, [&](int64_t begin, int64_t end) {
        kernels.nested_fit(f, scratch.get() + begin / piece * floats, begin, end);
    });
}

void quantize_activations(const Input& x, const std::optional<Input>& clip, const std::optional<Input>& fixed,
                          int64_t bits, int64_t group_size, const Output& codes, const Output& scales,
                          const std::optional<std::string>& isa) {
    const MatmulOps& kernels = find_matmul_ops(isa);
    if (bits < 2 || bits > 8) refuse("bits is " + std::to_string(bits) + ", expected 2 to 8");
    if (group_size < 1) refuse("group_size is " + std::to_string(group_size) + ", expected at least 1");
    if (bool(clip) == bool(fixed)) refuse("give either clip or fixed");
    check("x", x, {Type::f32}, {-1, -1}, Layout::dense_rows);
    const int64_t m = static_cast<int64_t>(x.shape(0)), columns = static_cast<int64_t>(x.shape(1));
    const int64_t groups = columns == 0 ? 0 : (columns - 1) / group_size + 1;
    check("codes", codes, {Type::i8}, {m, columns}, Layout::dense);
    check("scales", scales, {Type::f32}, {m, groups}, Layout::dense);
    const Input& given = clip ? *clip : *fixed;
    check(clip ? "clip" : "fixed", given, {Type::f16, Type::u16}, {groups}, Layout::dense);
    const auto* table = static_cast<const uint16_t*>(given.data());
    const InputGrid grid{static_cast<int>(bits), columns, group_size, clip ? table : nullptr, clip ? nullptr : table};
    const int64_t stride = row_stride(m, x.stride(0), columns);
    const float* from = static_cast<const float*>(x.data());
    auto* q = static_cast<int8_t*>(codes.data());
    float* s = static_cast<float*>(scales.data());
    nb::gil_scoped_release release;
    for (int64_t k = 0; k < m; ++k) kernels.quantize_inputs(from + k * stride, grid, q + k * columns, s + k * groups);
}

bool has_bfloat16_dot() {
#ifdef ANYBIT_X86
    const std::map<std::string, bool>& has = cpu_features();
    return has.at("avx512f") && has.at("avx512bw") && has.at("avx512vl") && has.at("avx512_bf16");
#else
    return false;
#endif
}

void moments(const Input& x, const Output& h, int64_t threads) {
    if (!has_bfloat16_dot()) refuse("moments needs AVX512-BF16, which this machine does not have");
    const int used = check_threads(threads);
    check("x", x, {Type::bf16, Type::u16}, {-1, -1}, Layout::dense_rows);
    const int64_t tokens = static_cast<int64_t>(x.shape(0)), columns = static_cast<int64_t>(x.shape(1));
    check("h", h, {Type::f32}, {columns, columns}, Layout::dense);
    if (tokens == 0 || columns == 0) return;
#ifdef ANYBIT_X86
    const int64_t stride = row_stride(tokens, x.stride(0), columns), pairs = (tokens + 1) / 2;
    const auto* from = static_cast<const uint16_t*>(x.data());
    float* to = static_cast<float*>(h.data());
    nb::gil_scoped_release release;
    const int64_t n = (columns + MOMENT_PANEL - 1) / MOMENT_PANEL, size = pairs * MOMENT_PANEL;
    const Scratch scratch = make_scratch(n * size);
    auto* panels = reinterpret_cast<uint32_t*>(scratch.get());
    parallel_for(n, 1, used, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) pack_moments(from, stride, tokens, columns, i, panels + i * size);
    });
    parallel_for(n * n, n, used, [&](int64_t begin, int64_t end) { // blocks below the diagonal mirror those above
        for (int64_t b = begin; b < end; ++b)
            if (b / n <= b % n) add_moments(panels, pairs, columns, b / n, b % n, to);
    });
#endif
}

// Pointer and strides of bfloat16 [heads, tokens, size].
Heads heads_of(const char* name, const Input& x, const Shape& shape) {
    check(name, x, {Type::bf16, Type::u16}, shape, Layout::dense_rows);
    return {static_cast<const uint16_t*>(x.data()), x.stride(0), x.stride(1)};
}

void causal_attention(const Input& q, const Input& k, const Input& v, double scale, const Output& out,
                      const Output& log_sums, int64_t threads) {
    if (!has_bfloat16_dot()) refuse("causal_attention needs AVX512-BF16, which this machine does not have");
    const int used = check_threads(threads);
    CausalAttention a{};
    a.queries = heads_of("q", q, {-1, -1, -1});
    a.heads = static_cast<int64_t>(q.shape(0)), a.tokens = static_cast<int64_t>(q.shape(1));
    a.size = static_cast<int64_t>(q.shape(2)), a.scale = static_cast<float>(scale);
    a.keys = heads_of("k", k, {-1, a.tokens, a.size});
    const auto shared = static_cast<int64_t>(k.shape(0));
    a.values = heads_of("v", v, {shared, a.tokens, a.size});
    if (a.size % 2 || a.size > MOST_HEAD_SIZE)
        refuse("q: expected heads of 2 to " + std::to_string(MOST_HEAD_SIZE) + " numbers, an even count");
    if (shared == 0 || a.heads % shared) refuse("q: expected a multiple of the heads of k");
    check("out", out, {Type::bf16, Type::u16}, {a.tokens, a.heads, a.size}, Layout::dense);
    check("log_sums", log_sums, {Type::f32}, {a.heads, a.tokens}, Layout::dense);
    if (a.heads == 0 || a.tokens == 0 || a.size == 0) return;
    a.shared = a.heads / shared;
    a.out = static_cast<uint16_t*>(out.data()), a.log_sums = static_cast<float*>(log_sums.data());
#ifdef ANYBIT_X86
    nb::gil_scoped_release release;
    if (!ready_to_attend()) throw std::bad_alloc(); // this thread; the others are asked
    const Scratch scratch = make_scratch(shared * (a.key_words() + a.value_words()));
    a.key_pairs = reinterpret_cast<uint32_t*>(scratch.get()), a.value_pairs = a.key_pairs + shared * a.key_words();
    parallel_for(shared, 1, used, [&](int64_t begin, int64_t end) {
        for (int64_t head = begin; head < end; ++head) pack_attention(a, head);
    });
    const auto work = [&](int64_t begin, int64_t end) { // the longest first
        for (int64_t i = begin; i < end; ++i) attend(a, i % a.heads, a.pieces() - 1 - i / a.heads);
    };
    parallel_for(a.heads * a.pieces(), 1, used, work, [] { return ready_to_attend(); });
#endif
}

nb::dict features() {
    nb::dict d;
    for (const auto& [name, there] : cpu_features()) d[name.c_str()] = there;
    return d;
}

nb::dict matmul_needs() {
    nb::dict d;
    for (Isa isa : EVERY_ISA) d[isa_name(isa)] = nb::cast(isa_needs(isa));
    return d;
}

} // namespace

NB_MODULE(_native, m) {
    m.doc() = "Kernels of anybit for the CPU. Arrays of the wrong dtype, shape or layout raise ValueError, what is no\n"
              "array TypeError.";
    m.attr("MAX_THREADS") = MAX_THREADS;
    m.attr("MOST_HEAD_SIZE") = MOST_HEAD_SIZE;
    m.def("cpu_features", &features, "What this processor has of what kernels could use: {name: bool}.");
    m.def("isa", [] { return isa_name(best_quantize_ops().isa); }, "The instruction set chosen for this machine.");
    m.def(
        "matmul_isa", [] { return isa_name(best_matmul_ops().isa); },
        "How products with stored tiles run on this machine.");
    m.def(
        "few_tokens",
        [](bool bf16, const std::optional<std::string>& isa) {
            const MatmulOps& ops = find_matmul_ops(isa);
            return bf16 ? ops.gemv_tokens_bf16 : GEMV_TOKENS;
        },
        nb::arg("bf16"), nb::arg("isa") = nb::none(), "Tokens beyond which weights are decoded once for all.");
    m.def("matmul_needs", &matmul_needs,
          "What each way to multiply that was compiled needs of the processor, the best last: {name: names of\n"
          "`cpu_features`}.");
    m.def(
        "matmul_isas", [] { return isa_names(matmul_ops); },
        "The ways to multiply that this machine has, the best last.");
    m.def(
        "quantize_activations", &quantize_activations, nb::arg("x").noconvert(), nb::arg("clip").noconvert().none(),
        nb::arg("fixed").noconvert().none(), nb::arg("bits"), nb::arg("group_size"), nb::arg("codes").noconvert(),
        nb::arg("scales").noconvert(), nb::arg("isa") = nb::none(),
        "Round x float32 [m, n] to codes int8 [m, n] and scales float32 [m, groups]; clip or fixed float16 [groups].");
    m.def("has_bfloat16_dot", &has_bfloat16_dot,
          "Whether this machine has what `moments` and `causal_attention` need (AVX512-BF16).");
    m.def("causal_attention", &causal_attention, nb::arg("q").noconvert(), nb::arg("k").noconvert(),
          nb::arg("v").noconvert(), nb::arg("scale"), nb::arg("out").noconvert(), nb::arg("log_sums").noconvert(),
          nb::arg("threads"),
          "softmax(q k^T scale) v of q bfloat16 [heads, tokens, size], k and v [key heads, tokens, size], each query\n"
          "with the keys up to its own place; fills out bfloat16 [tokens, heads, size] and log_sums float32 [heads,\n"
          "tokens], the logarithm of the sum of the exponentials of a query's scores.");
    m.def("moments", &moments, nb::arg("x").noconvert(), nb::arg("h").noconvert(), nb::arg("threads"),
          "h += x.T @ x, summed in float32; x bfloat16 (or its bits as uint16) [tokens, n], h float32 [n, n].");
    m.def("gptq_block", &gptq_block, nb::arg("weight").noconvert(), nb::arg("hinv").noconvert(),
          nb::arg("scales").noconvert(), nb::arg("zeros").noconvert(), nb::arg("maxq").noconvert(),
          nb::arg("codes").noconvert(), nb::arg("error").noconvert(), nb::arg("threads"), nb::arg("isa") = nb::none(),
          "Quantize one block of columns by GPTQ: weight float32 [rows, n] is compensated in place, codes\n"
          "uint8 and error float32 [rows, n] are filled; hinv float32 [n, n] upper triangular, scales and\n"
          "zeros float32 [rows, n] or [rows], maxq float32 [rows].");
    m.def("kmeans", &kmeans, nb::arg("weight").noconvert(), nb::arg("importance").noconvert().none(),
          nb::arg("seed_bits"), nb::arg("bits"), nb::arg("codes").noconvert(), nb::arg("centroids").noconvert(),
          nb::arg("threads"), nb::arg("isa") = nb::none(),
          "Nested weighted k-means of the rows of weight float32 [rows, n]; importance float32 [rows, n], [n] or\n"
          "None; fills codes uint8 [rows, n] and centroids float32 [rows, sum of 2^b for b in seed_bits..bits].");
    m.def("nested_codes", &nested_codes, nb::arg("targets").noconvert(), nb::arg("inverse").noconvert(),
          nb::arg("tables").noconvert(), nb::arg("shapes").noconvert(), nb::arg("scales").noconvert(),
          nb::arg("weights").noconvert(), nb::arg("codes").noconvert(), nb::arg("errors").noconvert(),
          nb::arg("threads"), nb::arg("isa") = nb::none(),
          "One code per weight for all widths: targets float32 [widths, rows, n], inverse float32 [n, n] upper\n"
          "triangular, tables float32 [shapes, sum of 2^b], shapes uint8 and scales float32 [rows], weights float32\n"
          "[rows, widths]; fills codes uint8 [rows, n] and errors float32 [widths, rows, n].");
    m.def("nested_descent", &nested_descent, nb::arg("slopes").noconvert(), nb::arg("hessian").noconvert(),
          nb::arg("weight").noconvert(), nb::arg("tables").noconvert(), nb::arg("shapes").noconvert(),
          nb::arg("scales").noconvert(), nb::arg("weights").noconvert(), nb::arg("codes").noconvert(),
          nb::arg("errors").noconvert(), nb::arg("losses").noconvert(), nb::arg("threads"), nb::arg("isa") = nb::none(),
          "Choose the codes of nested_codes anew, column after column: slopes float32 [widths, rows, n], hessian\n"
          "float32 [n, n], weight float32 [rows, n], tables, shapes, scales and weights as there; changes codes uint8\n"
          "[rows, n], errors float32 [widths, rows, n] and losses float32 [rows, widths].");
    m.def("nested_fit", &nested_fit, nb::arg("weight").noconvert(), nb::arg("importance").noconvert(),
          nb::arg("tables").noconvert(), nb::arg("shapes").noconvert(), nb::arg("scales").noconvert(),
          nb::arg("threads"), nb::arg("isa") = nb::none(),
          "Shape uint8 and scale float32 [rows] of the rows of weight float32 [rows, n], importance float32 [n]:\n"
          "scale * tables[shape], float32 [shapes, entries], come closest.");
    add_coding(m);
    add_layer(m);
    add_engine(m);
}
