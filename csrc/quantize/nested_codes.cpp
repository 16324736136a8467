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

// A row's choices as a binary tree: node `(1 << b) + q` is code q of b bits, and its children are the codes of a bit
// more that begin with it.
struct Tree {
    const float* entries;         // of node k at [k - 2]
    float bounds[2 << MOST_BITS]; // of node k: halfway between its entry and that of the node before

    void set_shape(const float* shape, int bits) {
        entries = shape;
        for (int k = 3; k < 2 << bits; ++k) bounds[k] = 0.5f * (shape[k - 3] + shape[k - 2]);
    }
    // Of the first b bits of a code.
    float entry(int code, int b, int bits) const { return entries[(((1 << bits) + code) >> (bits - b)) - 2]; }
};

// Inlined wherever they are called, so that a constant `bits` unrolls all loops over widths.
#define SPECIALIZED inline __attribute__((always_inline))

// Of z and weights at widths 1 to `bits`, the code of most bits that costs least among these: `best`, if it is none
// below 0; the nearest of each width, and its nearest children downwards. A cost is the weighted squared error at all
// widths. Candidates go down the tree side by side, as each step of one needs the step before. Those that meet are not
// left out: a branch that is often foreseen wrongly takes longer.
SPECIALIZED int choose(const Tree& tree, const float* z, const float* weights, int bits, int best) {
    int nodes[MOST_BITS];
    float costs[MOST_BITS], least = 0;
    const auto cost = [&](int b, int node) {
        const float miss = z[b - 1] - tree.entries[node - 2];
        return weights[b - 1] * (miss * miss);
    };
    int chosen = (1 << bits) + (best < 0 ? 0 : best);
    for (int from = 0; from < bits; ++from) nodes[from] = 1, costs[from] = 0;
#pragma GCC unroll 8
    for (int b = 1; b <= bits; ++b) {
#pragma GCC unroll 8
        for (int from = 1; from <= bits; ++from) {
            const int at = b > from ? b : from, right = 2 * nodes[from - 1] + 1;
            const int node = right - !(z[at - 1] > tree.bounds[right << (at - b)]);
            nodes[from - 1] = node;
            costs[from - 1] += cost(b, node);
        }
        least += cost(b, chosen >> (bits - b));
    }
    bool found = best >= 0;
    for (int from = 0; from < bits; ++from) {
        if (weights[from] == 0.0f) continue;
        const bool less = !found || costs[from] < least;
        chosen = less ? nodes[from] : chosen;
        least = less ? costs[from] : least;
        found = true;
    }
    return chosen - (1 << bits);
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

// to[i] += factor * row[i] for i > j, and maybe for some up to j, which nobody reads any more: whole vectors.
inline void add_behind(float* to, float factor, const float* row, int64_t j, int64_t n) {
    int64_t i = (j + 1) & -LANES;
    const Floats factors = broadcast(factor);
    for (; i + LANES <= n; i += LANES) store(to + i, load(to + i) + factors * load(row + i));
    for (; i < n; ++i) to[i] += factor * row[i];
}

SPECIALIZED void code_rows(const NestedBlock& n, int bits, int64_t begin, int64_t end) {
    float targets[MOST_BITS][NESTED_COLUMNS];
    Tree tree;
    for (int64_t row = begin; row < end; ++row) {
        tree.set_shape(n.tables + n.shapes[row] * ((2 << bits) - 2), bits);
        const float scale = n.scales[row], divisor = scale > 0.0f ? scale : 1.0f;
        for (int b = 0; b < bits; ++b)
            for (int64_t j = 0; j < n.columns; ++j)
                targets[b][j] = n.targets[b * n.width_stride + row * n.row_stride + j];
        for (int64_t j = 0; j < n.columns; ++j) {
            const float* inverse = n.inverse + j * n.inverse_stride;
            float z[MOST_BITS];
            for (int b = 0; b < bits; ++b) z[b] = targets[b][j] / divisor;
            const int code = choose(tree, z, n.weights + row * bits, bits, -1);
            n.codes[row * n.columns + j] = static_cast<uint8_t>(code);
            for (int b = 0; b < bits; ++b) {
                const float value = scale * tree.entry(code, b + 1, bits);
                const float error = (targets[b][j] - value) / inverse[j];
                n.errors[(b * n.rows + row) * n.columns + j] = error;
                add_behind(targets[b], -error, inverse, j, n.columns);
            }
        }
    }
}

SPECIALIZED void descend_rows(const NestedDescent& n, int bits, int64_t begin, int64_t end) {
    float slopes[MOST_BITS][NESTED_COLUMNS];
    Tree tree;
    for (int64_t row = begin; row < end; ++row) {
        tree.set_shape(n.tables + n.shapes[row] * ((2 << bits) - 2), bits);
        const float scale = n.scales[row], divisor = scale > 0.0f ? scale : 1.0f;
        uint8_t* codes = n.codes + row * n.columns;
        for (int b = 0; b < bits; ++b)
            for (int64_t j = 0; j < n.columns; ++j) slopes[b][j] = n.slopes[(b * n.rows + row) * n.columns + j];
        for (int64_t j = 0; j < n.columns; ++j) {
            const float* hessian = n.hessian + j * n.hessian_stride;
            const int old = codes[j];
            float z[MOST_BITS], before[MOST_BITS];
            for (int b = 0; b < bits; ++b) {
                before[b] = scale * tree.entry(old, b + 1, bits);
                z[b] = (before[b] - slopes[b][j] / hessian[j]) / divisor;
            }
            const int code = choose(tree, z, n.weights + row * bits, bits, old);
            if (code == old) continue;
            codes[j] = static_cast<uint8_t>(code);
            const float weight = n.weight[row * n.weight_stride + j];
            for (int b = 0; b < bits; ++b) {
                const float value = scale * tree.entry(code, b + 1, bits), step = value - before[b];
                if (step == 0.0f) continue;
                n.errors[b * n.width_stride + row * n.row_stride + j] = value - weight;
                n.losses[row * bits + b] += step * (2.0f * slopes[b][j] + step * hessian[j]);
                add_behind(slopes[b], step, hessian, j, n.columns);
            }
        }
    }
}

void nested_codes(const NestedBlock& n, int64_t begin, int64_t end) {
    if (n.bits == MOST_BITS) return code_rows(n, MOST_BITS, begin, end);
    code_rows(n, n.bits, begin, end);
}

void nested_descent(const NestedDescent& n, int64_t begin, int64_t end) {
    if (n.bits == MOST_BITS) return descend_rows(n, MOST_BITS, begin, end);
    descend_rows(n, n.bits, begin, end);
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
