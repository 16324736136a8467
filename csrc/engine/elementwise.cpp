// Norms, rotary embeddings, activations.
#include "engine/ops.h"

#include "engine/exponential.h"

namespace anybit::ANYBIT_ISA {
namespace {

// f(i, count) for vectors from i on, `count` of whose lanes are there.
template <typename F> inline void by_vectors(int64_t n, F&& f) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) f(i, LANES);
    if (i < n) f(i, static_cast<int>(n - i));
}
inline Floats load_some(const float* p, int count) {
    if (count == LANES) return load(p);
    float lanes[LANES] = {};
    for (int l = 0; l < count; ++l) lanes[l] = p[l];
    return load(lanes);
}
inline void store_some(float* p, Floats v, int count) {
    if (count == LANES) return store(p, v);
    for (int l = 0; l < count; ++l) p[l] = v[l];
}

float rms_norm(const float* x, const float* weight, int64_t n, float epsilon, float* y) {
    Floats squares{};
    by_vectors(n, [&](int64_t i, int count) {
        const Floats v = load_some(x + i, count);
        squares += v * v;
    });
    const float mean = reduce(squares) / static_cast<float>(n);
    const Floats scale = broadcast(1.0f / __builtin_sqrtf(mean + epsilon));
    by_vectors(n, [&](int64_t i, int count) {
        store_some(y + i, load_some(x + i, count) * scale * load_some(weight + i, count), count);
    });
    return mean;
}

void rotate(float* x, const float* cosines, const float* sines, int64_t half) {
    by_vectors(half, [&](int64_t i, int count) {
        const Floats first = load_some(x + i, count), second = load_some(x + half + i, count);
        const Floats c = load_some(cosines + i, count), s = load_some(sines + i, count);
        store_some(x + i, first * c - second * s, count);
        store_some(x + half + i, second * c + first * s, count);
    });
}

inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

// The error function as Abramowitz and Stegun 7.1.26 give it, with five coefficients: within 1.5e-7.
inline Floats error_function(Floats x) {
    const Floats size = x < 0 ? -x : x, t = 1.0f / (1.0f + 0.3275911f * size);
    const Floats p =
        t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    const Floats made = 1.0f - p * exponential(-size * size);
    return x < 0 ? -made : made;
}

template <typename F> inline void gated(const float* gate, const float* up, int64_t n, float* y, F&& activate) {
    by_vectors(n, [&](int64_t i, int count) {
        store_some(y + i, activate(load_some(gate + i, count)) * load_some(up + i, count), count);
    });
}

void gate(Activation activation, const float* g, const float* up, int64_t n, float* y) {
    switch (activation) {
    case Activation::silu: return gated(g, up, n, y, [](Floats x) { return x * sigmoid(x); });
    case Activation::gelu:
        return gated(g, up, n, y, [](Floats x) { return 0.5f * x * (1.0f + error_function(x * 0.70710678f)); });
    case Activation::gelu_tanh:
        return gated(g, up, n, y, [](Floats x) {
            return 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456f * (x + 0.044715f * x * x * x)));
        });
    case Activation::relu: return gated(g, up, n, y, [](Floats x) { return x < 0 ? Floats{} : x; }); // NaN stays
    }
}

void softcap(float* x, int64_t n, float cap) {
    by_vectors(n, [&](int64_t i, int count) {
        store_some(x + i, hyperbolic_tangent(load_some(x + i, count) / cap) * cap, count);
    });
}

// The symmetric conference matrix of Paley's, from the squares of the field of Q elements, 5 or 9 (those are a + b i
// with a, b < 3 and i * i = -1).
template <int Q> struct Conference {
    float signs[Q + 1][Q + 1] = {};

    constexpr Conference() {
        for (int x = 0; x < Q; ++x) {
            signs[0][x + 1] = signs[x + 1][0] = 1;
            for (int y = 0; y < Q; ++y) signs[x + 1][y + 1] = sign(x, y);
        }
    }
    // Whether x - y is a square, -1 or 1; 0 where they are the same.
    static constexpr float sign(int x, int y) {
        if (x == y) return 0;
        if (Q == 5) return (x - y) * (x - y) % 5 == 1 ? 1 : -1; // squares are 1 and 4, whose own square is 1
        return x % 3 == y % 3 || x / 3 == y / 3 ? 1 : -1;       // squares are 1, -1, i and -i
    }
};

// x [2 (Q + 1)] = x H, with Paley's second construction: pairs (u, v) of x become (C s + t, C t - s), where s = u + v
// and t = u - v.
template <int Q> void paley(float* x) {
    static constexpr Conference<Q> C;
    float s[Q + 1], t[Q + 1];
    for (int j = 0; j <= Q; ++j) {
        s[j] = x[2 * j] + x[2 * j + 1];
        t[j] = x[2 * j] - x[2 * j + 1];
    }
    for (int i = 0; i <= Q; ++i) {
        float u = t[i], v = -s[i];
        for (int j = 0; j <= Q; ++j) {
            u += C.signs[i][j] * s[j];
            v += C.signs[i][j] * t[j];
        }
        x[2 * i] = u;
        x[2 * i + 1] = v;
    }
}

void hadamard(float* x, int64_t n) {
    const int64_t power = n & -n, odd = n / power;
    const bool whole = power >= 4 && (odd == 3 || odd == 5);
    const int64_t size = whole ? n : power, least = whole ? 4 * odd : 1;
    const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(size));
    for (float* block = x; block < x + n; block += size) {
        for (int64_t i = 0; whole && i < size; i += least) odd == 3 ? paley<5>(block + i) : paley<9>(block + i);
        for (int64_t half = least; half < size; half *= 2)
            for (int64_t i = 0; i < size; i += 2 * half)
                for (int64_t j = i; j < i + half; ++j) {
                    const float a = block[j], b = block[j + half];
                    block[j] = a + b;
                    block[j + half] = a - b;
                }
        for (int64_t i = 0; i < size; ++i) block[i] *= scale;
    }
}

} // namespace

void add_elementwise(EngineOps& ops) {
    ops.rms_norm = rms_norm;
    ops.rotate = rotate;
    ops.gate = gate;
    ops.softcap = softcap;
    ops.hadamard = hadamard;
}

} // namespace anybit::ANYBIT_ISA
