// Nested codes with compensated errors: one code per weight whose leading bits are good codes at every width.
//
// Every width has targets of its own: the weights, and in them what its own errors on earlier columns ask for, as in
// GPTQ (Frantar et al. 2022, algorithm 1). A column's code is chosen for all widths together, by the weighted sum of
// their squared errors. Entries of a row are its scale times those of a shape, which many rows share.
//
// `nested_descent` goes over the columns again: one after the other, each code is chosen anew where all others stay
// (cyclic coordinate descent, as in LNQ of arXiv:2505.07004, with the objective of all widths).
//
// Plain IEEE operations in one order and no contraction: every instruction set gives the same bits.
#include "quantize/ops.h"
#include "common/simd.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int MOST_BITS = 8;

// The tables of one shape by width: `of[b][q]`, ascending.
struct Shape {
    const float* of[MOST_BITS + 1];
    Shape(const float* tables, int low, int high) {
        for (int b = 0; b <= MOST_BITS; ++b) {
            of[b] = tables;
            if (b >= low && b <= high) tables += 1 << b;
        }
    }
};

inline int nearest(const float* table, int bits, float z) {
    int q = 0;
    for (int k = bits - 1; k >= 0; --k) {
        const int next = q + (1 << k);
        q = z > 0.5f * (table[next - 1] + table[next]) ? next : q;
    }
    return q;
}

// The weighted squared error of a code at all widths.
inline float cost_of(const Shape& shape, const float* z, const float* weights, int low, int high, int code) {
    float cost = 0;
    for (int b = low; b <= high; ++b) {
        const float miss = z[b - low] - shape.of[b][code >> (high - b)];
        cost += weights[b - low] * (miss * miss);
    }
    return cost;
}

// Whether `nearest` would give q.
inline bool is_nearest(const float* table, int bits, float z, int q) {
    return (q == 0 || z > 0.5f * (table[q - 1] + table[q])) &&
           (q + 1 == 1 << bits || !(z > 0.5f * (table[q] + table[q + 1])));
}

// The code at the widest that costs least among these: `best`, if it is none below 0; the nearest of each width, and
// its nearest children downwards. Where the last of them meets the nearest of a width, it is also what comes of that
// one.
int choose(const Shape& shape, const float* z, const float* weights, int low, int high, int best) {
    bool found = best >= 0;
    float least_cost = found ? cost_of(shape, z, weights, low, high, best) : 0.0f;
    int last = -1; // at the widest
    for (int from = low; from <= high; ++from) {
        if (weights[from - low] == 0.0f) continue;
        if (last >= 0 && is_nearest(shape.of[from], from, z[from - low], last >> (high - from))) continue;
        int code = nearest(shape.of[from], from, z[from - low]);
        for (int b = from + 1; b <= high; ++b) {
            const float* pair = shape.of[b] + 2 * code;
            code = 2 * code + (z[b - low] > 0.5f * (pair[0] + pair[1]));
        }
        last = code;
        const float cost = cost_of(shape, z, weights, low, high, code);
        if (!found || cost < least_cost) best = code, least_cost = cost, found = true;
    }
    return best;
}

// sum_j importance[j] min_k (w[j] - scale table[k])^2
float misfit(const float* w, const float* importance, int64_t n, const float* table, int entries, float scale) {
    Floats sum{};
    for (int64_t j = 0; j < n; j += LANES) {
        const Floats x = load(w + j);
        Floats closest = broadcast(3e38f);
        for (int k = 0; k < entries; ++k) {
            const Floats miss = x - broadcast(scale * table[k]), square = miss * miss;
            closest = square < closest ? square : closest;
        }
        sum += load(importance + j) * closest;
    }
    return reduce(sum);
}

void nested_codes(const NestedBlock& n, int64_t begin, int64_t end) {
    const int widths = n.high - n.low + 1, entries = (2 << n.high) - (1 << n.low);
    float targets[MOST_BITS][NESTED_COLUMNS];
    for (int64_t row = begin; row < end; ++row) {
        const Shape shape(n.tables + n.shapes[row] * entries, n.low, n.high);
        const float scale = n.scales[row], divisor = scale > 0.0f ? scale : 1.0f;
        for (int b = 0; b < widths; ++b)
            for (int64_t j = 0; j < n.columns; ++j)
                targets[b][j] = n.targets[b * n.width_stride + row * n.row_stride + j];
        for (int64_t j = 0; j < n.columns; ++j) {
            const float* inverse = n.inverse + j * n.inverse_stride;
            float z[MOST_BITS];
            for (int b = 0; b < widths; ++b) z[b] = targets[b][j] / divisor;
            const int code = choose(shape, z, n.weights + row * widths, n.low, n.high, -1);
            n.codes[row * n.columns + j] = static_cast<uint8_t>(code);
            for (int b = 0; b < widths; ++b) {
                const int bits = n.low + b;
                const float value = scale * shape.of[bits][code >> (n.high - bits)];
                const float error = (targets[b][j] - value) / inverse[j];
                n.errors[(b * n.rows + row) * n.columns + j] = error;
                for (int64_t i = j + 1; i < n.columns; ++i) targets[b][i] -= error * inverse[i];
            }
        }
    }
}

void nested_descent(const NestedDescent& n, int64_t begin, int64_t end) {
    const int widths = n.high - n.low + 1, entries = (2 << n.high) - (1 << n.low);
    float slopes[MOST_BITS][NESTED_COLUMNS];
    for (int64_t row = begin; row < end; ++row) {
        const Shape shape(n.tables + n.shapes[row] * entries, n.low, n.high);
        const float scale = n.scales[row], divisor = scale > 0.0f ? scale : 1.0f;
        uint8_t* codes = n.codes + row * n.columns;
        for (int b = 0; b < widths; ++b)
            for (int64_t j = 0; j < n.columns; ++j) slopes[b][j] = n.slopes[(b * n.rows + row) * n.columns + j];
        for (int64_t j = 0; j < n.columns; ++j) {
            const float* hessian = n.hessian + j * n.hessian_stride;
            const int old = codes[j];
            float z[MOST_BITS], before[MOST_BITS];
            for (int b = 0; b < widths; ++b) {
                before[b] = scale * shape.of[n.low + b][old >> (widths - 1 - b)];
                z[b] = (before[b] - slopes[b][j] / hessian[j]) / divisor;
            }
            const int code = choose(shape, z, n.weights + row * widths, n.low, n.high, old);
            if (code == old) continue;
            codes[j] = static_cast<uint8_t>(code);
            const float weight = n.weight[row * n.weight_stride + j];
            for (int b = 0; b < widths; ++b) {
                const float value = scale * shape.of[n.low + b][code >> (widths - 1 - b)], step = value - before[b];
                if (step == 0.0f) continue;
                n.errors[b * n.width_stride + row * n.row_stride + j] = value - weight;
                n.losses[row * widths + b] += step * (2.0f * slopes[b][j] + step * hessian[j]);
                for (int64_t i = j + 1; i < n.columns; ++i) slopes[b][i] += step * hessian[i];
            }
        }
    }
}

void nested_fit(const NestedFit& f, float* scratch, int64_t begin, int64_t end) {
    constexpr float coarse[] = {0.6f, 0.8f, 1.0f, 1.25f, 1.6f};
    const int64_t padded = ceil_div(f.columns, LANES) * LANES;
    float *w = scratch, *importance = scratch + padded;
    for (int64_t j = 0; j < padded; ++j) {
        w[j] = 0;
        importance[j] = j < f.columns ? f.importance[j] : 0.0f;
    }
    for (int64_t row = begin; row < end; ++row) {
        double squares = 0;
        for (int64_t j = 0; j < f.columns; ++j) {
            w[j] = f.weight[row * f.weight_stride + j];
            squares += static_cast<double>(w[j]) * w[j];
        }
        const float size = static_cast<float>(__builtin_sqrt(squares / static_cast<double>(f.columns)));
        const auto miss = [&](int shape, float scale) {
            return misfit(w, importance, f.columns, f.tables + shape * f.entries, f.entries, scale);
        };
        int shape = 0;
        float scale = size, best = miss(0, size);
        const auto take = [&](int s, float to) {
            const float cost = miss(s, to);
            if (!(cost < best)) return false;
            best = cost, shape = s, scale = to;
            return true;
        };
        for (int s = 0; s < f.shapes; ++s)
            for (const float ratio : coarse) take(s, size * ratio);
        for (float step = 1.1f; step > 1.02f; step = 1.0f + 0.5f * (step - 1.0f)) {
            while (scale < 8 * size && take(shape, scale * step)) {}
            while (scale > size / 8 && take(shape, scale / step)) {}
        }
        for (int s = shape > 0 ? shape - 1 : 0, last = shape; s <= last + 1 && s < f.shapes; ++s) take(s, scale);
        f.chosen[row] = static_cast<uint8_t>(shape);
        f.scales[row] = scale;
    }
}

} // namespace

void add_nested_codes(QuantizeOps& ops) {
    ops.nested_codes = nested_codes;
    ops.nested_descent = nested_descent;
    ops.nested_fit = nested_fit;
}

} // namespace anybit::ANYBIT_ISA
