// Attention over pages of the KV-cache, for the query heads that share a KV head: one pass over keys and values. Sums
// stay in registers for a page; the softmax is rescaled from page to page (Dao et al., FlashAttention, 2022).
#include "engine/ops.h"

#include "engine/exponential.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int VECTORS = PAGE / LANES; // of a page's tokens
#if defined(__AVX512F__)
constexpr int TOGETHER = 4; // queries whose sums are in registers
constexpr int WAYS = 2;     // sums of one score
#elif defined(__AVX2__)
constexpr int TOGETHER = 2;
constexpr int WAYS = 1;
#else
constexpr int TOGETHER = 1;
constexpr int WAYS = 1;
#endif
constexpr int MOST = 4;       // vectors of a head's values whose sums are
constexpr int LINE = 64;      // bytes of a line of the caches
constexpr int64_t PAIRS = 64; // of a centre's numbers that are turned together

uint16_t round_to_half(float value) {
#ifdef __F16C__
    return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#else
    const auto all = load_as<uint32_t>(&value);
    const uint32_t sign = all >> 16 & 0x8000u, size = all & 0x7fffffffu;
    if (size > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
    if (size >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (size < 0x38800000u) { // no normal number of 16 bits: the sum with 1/2 is rounded where its last bit is
        const float sum = load_as<float>(&size) + 0.5f;
        return static_cast<uint16_t>(sign | (load_as<uint32_t>(&sum) - 0x3f000000u));
    }
    return static_cast<uint16_t>(sign | (size + 0xfffu + (size >> 13 & 1u) - 0x38000000u) >> 13);
#endif
}

// ---- writing

// Codes of n numbers, and the scale and minimum that give them back: as `QuantizedStates.of` (formats/states.py).
struct Grid {
    float scale, least, top;
    uint16_t scale_bits, least_bits;

    Grid(const float* x, int64_t n, int bits) : top(static_cast<float>((1 << bits) - 1)) {
        float low = MOST_HALF, high = -MOST_HALF;
        bool finite = true;
        for (int64_t i = 0; i < n; ++i) {
            low = x[i] < low ? x[i] : low;
            high = x[i] > high ? x[i] : high;
            finite = finite && x[i] - x[i] == 0;
        }
        low = low > -MOST_HALF ? low : -MOST_HALF;
        high = high < MOST_HALF ? high : MOST_HALF;
        least_bits = round_to_half(low);
        least = half_to_float(least_bits);
        const float spread = high > least ? high - least : 0.0f;
        scale_bits = round_to_half(spread / top);
        if (half_to_float(scale_bits) * top < spread) ++scale_bits; // never down: the range stays covered
        if (!finite) scale_bits = NOT_A_NUMBER;
        scale = half_to_float(scale_bits);
    }
    uint8_t code(float x) const {
        float q = scale > 0 ? (x - least) / scale : 0.0f;
        q = q > 0 ? q : 0.0f;
        q = q < top ? q : top;
        return static_cast<uint8_t>(static_cast<int32_t>((q + 0x1.8p23f) - 0x1.8p23f));
    }

private:
    static constexpr float MOST_HALF = 65504; // the largest float16
    static constexpr uint16_t NOT_A_NUMBER = 0x7e00;
};

template <int BITS> void store_codes(const KvFormat& format, uint8_t* page, int64_t slot, const float* key,
                                     const float* value) {
    const int64_t n = padded(format.head_size), half = n / 2;
    uint8_t* values = page + format.key_bytes();
    auto* scales = reinterpret_cast<uint16_t*>(values + format.value_bytes()) + slot;
    const Grid keys(key, format.head_size, BITS), own(value, format.head_size, BITS);
    scales[0] = keys.scale_bits;
    scales[PAGE] = keys.least_bits;
    scales[2 * PAGE] = own.scale_bits;
    scales[3 * PAGE] = own.least_bits;
    const auto code = [&](const Grid& grid, const float* x, int64_t i) {
        return i < format.head_size ? grid.code(x[i]) : uint8_t(0);
    };
    uint8_t* row = values + slot * n * BITS / 8;
    for (int64_t i = 0; i < (BITS == 8 ? n : half); ++i)
        if (BITS == 8) {
            page[i * PAGE + slot] = code(keys, key, i);
            row[i] = code(own, value, i);
        } else {
            page[i * PAGE + slot] = static_cast<uint8_t>(code(keys, key, i) | code(keys, key, i + half) << 4);
            row[i] = static_cast<uint8_t>(code(own, value, i) | code(own, value, i + half) << 4);
        }
}

void store(const KvFormat& format, uint8_t* page, int64_t slot, const float* key, const float* value) {
    if (format.bits == 8) return store_codes<8>(format, page, slot, key, value);
    if (format.bits == 4) return store_codes<4>(format, page, slot, key, value);
    const int64_t n = padded(format.head_size);
    auto* keys = reinterpret_cast<uint16_t*>(page);
    auto* row = reinterpret_cast<uint16_t*>(page + format.key_bytes()) + slot * n;
    for (int64_t i = 0; i < n; ++i) row[i] = i < format.head_size ? round_to_half(value[i]) : uint16_t(0);
    for (int64_t i = 0; i < format.head_size; ++i) keys[i * PAGE + slot] = round_to_half(key[i]);
}

template <int BITS> void load_codes(const KvFormat& format, const uint8_t* page, int64_t slot, float* key) {
    const int64_t half = padded(format.head_size) / 2;
    const auto* scales = reinterpret_cast<const uint16_t*>(page + format.key_bytes() + format.value_bytes()) + slot;
    const float scale = half_to_float(scales[0]), least = half_to_float(scales[PAGE]);
    for (int64_t i = 0; i < format.head_size; ++i) {
        const int code = BITS == 8  ? page[i * PAGE + slot]
                         : i < half ? page[i * PAGE + slot] & 15
                                    : page[(i - half) * PAGE + slot] >> 4;
        key[i] = static_cast<float>(code) * scale + least;
    }
}

void load_key(const KvFormat& format, const uint8_t* page, int64_t slot, float* key) {
    if (format.bits == 8) load_codes<8>(format, page, slot, key);
    else load_codes<4>(format, page, slot, key);
}

// ---- reading

// One page of a KV head.
template <int BITS> struct Page {
    const uint8_t *keys, *values;
    const uint16_t* scales;
    int64_t n;
    int64_t behind; // bytes from here to the page that comes next

    Page(const KvFormat& format, const uint8_t* page, const uint8_t* next)
        : keys(page), values(page + format.key_bytes()),
          scales(reinterpret_cast<const uint16_t*>(values + format.value_bytes())), n(padded(format.head_size)),
          behind(next - page) {}

    // Vector v of the tokens' numbers i.
    Floats key(int64_t i, int v) const {
        if constexpr (BITS == 16) return load_halves(reinterpret_cast<const uint16_t*>(keys) + i * PAGE + v * LANES);
        else if constexpr (BITS == 8) return to_float(load_bytes(keys + i * PAGE + v * LANES));
        else return nibbles(keys + (i < n / 2 ? i : i - n / 2) * PAGE + v * LANES, i >= n / 2);
    }
    // Vector v of the numbers of a token.
    Floats value(int64_t token, int64_t v) const {
        if constexpr (BITS == 16) return load_halves(reinterpret_cast<const uint16_t*>(values) + token * n + v * LANES);
        else if constexpr (BITS == 8) return to_float(load_bytes(values + token * n + v * LANES));
        else {
            const int64_t i = v * LANES, half = n / 2;
            return nibbles(values + token * half + (i < half ? i : i - half), i >= half);
        }
    }
    // The same numbers of the page that comes next will be read soon: pages lie too far apart for the processor to see.
    void expect_keys(int64_t i) const {
        const int64_t row = BITS == 4 && i >= n / 2 ? i - n / 2 : i;
        __builtin_prefetch(keys + behind + row * (BITS == 16 ? 2 : 1) * PAGE);
    }
    void expect_values(int64_t token, int64_t v) const {
        const uint8_t* at = values + behind + token * n * BITS / 8 + v * LANES * BITS / 8;
        for (int i = 0; i < MOST * LANES * BITS / 8; i += LINE) __builtin_prefetch(at + i);
    }
    Floats key_scale(int v) const { return load_halves(scales + v * LANES); }
    Floats key_least(int v) const { return load_halves(scales + PAGE + v * LANES); }
    Floats value_scale(int v) const { return load_halves(scales + 2 * PAGE + v * LANES); }
    Floats value_least(int v) const { return load_halves(scales + 3 * PAGE + v * LANES); }

private:
    static Floats nibbles(const uint8_t* p, bool high) {
        const Ints bytes = load_bytes(p);
        return to_float(high ? bytes >> 4 : bytes & 15);
    }
};

// scores [COUNT, PAGE] = keys times queries, whose numbers sum up to `all`; in WAYS sums, which do not wait for each
// other.
template <int BITS, int COUNT>
inline void multiply_keys(const Page<BITS>& page, int64_t head_size, const Query* queries, const float* all,
                          float* scores) {
    Floats sums[WAYS][COUNT][VECTORS] = {};
    const auto add = [&](int64_t i, Floats(&to)[COUNT][VECTORS]) {
        Floats keys[VECTORS];
        for (int v = 0; v < VECTORS; ++v) keys[v] = page.key(i, v);
        page.expect_keys(i);
        for (int k = 0; k < COUNT; ++k)
            for (int v = 0; v < VECTORS; ++v) to[k][v] = fused(broadcast(queries[k].q[i]), keys[v], to[k][v]);
    };
    int64_t i = 0;
    for (; i + WAYS <= head_size; i += WAYS)
        for (int w = 0; w < WAYS; ++w) add(i + w, sums[w]);
    for (; i < head_size; ++i) add(i, sums[0]);
    for (int k = 0; k < COUNT; ++k)
        for (int v = 0; v < VECTORS; ++v) {
            Floats sum = sums[0][k][v];
            for (int w = 1; w < WAYS; ++w) sum += sums[w][k][v];
            if (BITS < 16) sum = fused(sum, page.key_scale(v), page.key_least(v) * all[k]);
            store(scores + k * PAGE + v * LANES, sum);
        }
}

// scores [COUNT, PAGE] += the centre, turned as the page's keys are, times queries.
template <int COUNT> inline void add_centre(const KvPages& kv, int64_t p, const Query* queries, float* scores) {
    const Centres& from = kv.centres;
    const float* centre = kv.first == 0 && p == 0 ? from.first : from.others;
    if (centre == nullptr) return;
    Floats along[COUNT][VECTORS], across[COUNT][VECTORS] = {};
    for (int k = 0; k < COUNT; ++k) { // numbers that are not turned
        float sum = 0;
        for (int64_t i = 2 * from.half; i < kv.format.head_size; ++i) sum += queries[k].plain[i] * centre[i];
        for (int v = 0; v < VECTORS; ++v) along[k][v] = broadcast(sum);
    }
    for (int64_t first = 0; first < from.half; first += PAIRS) {
        const int64_t n = least(PAIRS, from.half - first);
        const float *a = centre + first, *b = a + from.half;
        const float *cosine = from.starts + p * 2 * from.half + first, *sine = cosine + from.half;
        float x[PAIRS], y[PAIRS], same[COUNT][PAIRS], other[COUNT][PAIRS]; // of the centre at the page's first position
        for (int64_t i = 0; i < n; ++i) {
            x[i] = a[i] * cosine[i] - b[i] * sine[i];
            y[i] = b[i] * cosine[i] + a[i] * sine[i];
        }
        for (int k = 0; k < COUNT; ++k) {
            const float *q = queries[k].plain + first, *r = q + from.half;
            for (int64_t i = 0; i < n; ++i) {
                same[k][i] = q[i] * x[i] + r[i] * y[i];
                other[k][i] = r[i] * x[i] - q[i] * y[i];
            }
        }
        const float *cosines = from.offsets + first * PAGE, *sines = cosines + from.half * PAGE;
        for (int64_t i = 0; i < n; ++i)
            for (int v = 0; v < VECTORS; ++v) {
                const Floats c = load(cosines + i * PAGE + v * LANES), s = load(sines + i * PAGE + v * LANES);
                for (int k = 0; k < COUNT; ++k) {
                    along[k][v] = fused(broadcast(same[k][i]), c, along[k][v]);
                    across[k][v] = fused(broadcast(other[k][i]), s, across[k][v]);
                }
            }
    }
    for (int k = 0; k < COUNT; ++k)
        for (int v = 0; v < VECTORS; ++v) {
            float* to = scores + k * PAGE + v * LANES;
            store(to, load(to) + (along[k][v] + across[k][v]));
        }
}

// What a page's scores [PAGE] make of a query: scores become weights of the values.
struct Weighing {
    float factor; // of what was summed before
    float least;  // sum of weights times the values' minima
};

inline float largest_of(Floats v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps(v);
#else
    float most = v[0];
    for (int l = 1; l < LANES; ++l) most = v[l] > most ? v[l] : most;
    return most;
#endif
}

template <int BITS>
inline Weighing weigh(const Page<BITS>& page, const Query& query, int64_t first, float softcap, float* scores) {
    const int64_t begin = query.begin - first, end = query.end - first;
    if (begin >= PAGE || end <= 0) { // no token of the page: nothing changes
        for (int v = 0; v < VECTORS; ++v) store(scores + v * LANES, Floats{});
        return {1.0f, 0.0f};
    }
    Ints lane{};
    for (int l = 0; l < LANES; ++l) lane[l] = l;
    Floats s[VECTORS], most = broadcast(-__builtin_inff());
    for (int v = 0; v < VECTORS; ++v) {
        s[v] = load(scores + v * LANES);
        if (softcap > 0) s[v] = hyperbolic_tangent(s[v] / softcap) * softcap;
        const Ints at = lane + v * LANES;
        const auto there =
            (at >= static_cast<int32_t>(begin < 0 ? 0 : begin)) & (at < static_cast<int32_t>(end > PAGE ? PAGE : end));
        s[v] = there ? s[v] : broadcast(-__builtin_inff());
        most = greater(s[v], most);
    }
    const float before = *query.largest, now = largest_of(most);
    const float largest = now > before ? now : before;
    const float factor = exponential(broadcast(before - largest))[0];
    Floats sum{}, least{};
    for (int v = 0; v < VECTORS; ++v) {
        const Floats p = exponential(s[v] - largest);
        sum += p;
        if (BITS < 16) { // what was never written may be NaN
            least += p > 0.0f ? p * page.value_least(v) : Floats{};
            store(scores + v * LANES, p > 0.0f ? p * page.value_scale(v) : Floats{});
        } else store(scores + v * LANES, p);
    }
    *query.largest = largest;
    *query.sum = *query.sum * factor + reduce(sum);
    return {factor, BITS < 16 ? reduce(least) : 0.0f};
}

// Tokens of a page.
struct Span {
    int64_t begin, end;
};

// out = out * factor + values times weights [COUNT, PAGE], for WIDTH vectors of a head from `v` on.
template <int BITS, int COUNT, int WIDTH>
inline void add_values(const Page<BITS>& page, const Query* queries, const Weighing* w, const float* weights,
                       Span tokens, int64_t v) {
    Floats sums[COUNT][WIDTH];
    for (int k = 0; k < COUNT; ++k)
        for (int i = 0; i < WIDTH; ++i)
            sums[k][i] = fused(load(queries[k].out + (v + i) * LANES), broadcast(w[k].factor), broadcast(w[k].least));
    for (int64_t t = tokens.begin; t < tokens.end; ++t) {
        Floats values[WIDTH];
        for (int i = 0; i < WIDTH; ++i) values[i] = page.value(t, v + i);
        page.expect_values(t, v);
        for (int k = 0; k < COUNT; ++k) {
            const Floats p = broadcast(weights[k * PAGE + t]);
            for (int i = 0; i < WIDTH; ++i) sums[k][i] = fused(p, values[i], sums[k][i]);
        }
    }
    for (int k = 0; k < COUNT; ++k)
        for (int i = 0; i < WIDTH; ++i) store(queries[k].out + (v + i) * LANES, sums[k][i]);
}

template <int BITS, int COUNT>
inline void attend_page(const KvPages& kv, int64_t p, const Query* queries, const float* all, Span tokens,
                        float* scores) {
    const Page<BITS> page(kv.format, kv.pages[p], kv.pages[p + 1]);
    multiply_keys<BITS, COUNT>(page, kv.format.head_size, queries, all, scores);
    if constexpr (BITS < 16) add_centre<COUNT>(kv, p, queries, scores);
    Weighing w[COUNT];
    for (int k = 0; k < COUNT; ++k) w[k] = weigh(page, queries[k], kv.first + p * PAGE, kv.softcap, scores + k * PAGE);
    const int64_t vectors = page.n / LANES;
    int64_t v = 0;
    for (; v + MOST <= vectors; v += MOST) add_values<BITS, COUNT, MOST>(page, queries, w, scores, tokens, v);
    for (; v < vectors; ++v) add_values<BITS, COUNT, 1>(page, queries, w, scores, tokens, v);
}

template <int BITS, int COUNT> void attend_together(const KvPages& kv, const Query* queries, int64_t count) {
    if constexpr (COUNT > 1)
        if (count < COUNT) return attend_together<BITS, COUNT - 1>(kv, queries, count);
    float scores[COUNT * PAGE], all[COUNT];
    int64_t begin = queries[0].begin, end = queries[0].end;
    for (int k = 0; k < COUNT; ++k) {
        begin = least(begin, queries[k].begin);
        end = end > queries[k].end ? end : queries[k].end;
        *queries[k].largest = -__builtin_inff();
        *queries[k].sum = 0;
        Floats sum{};
        for (int64_t i = 0; i < padded(kv.format.head_size); i += LANES) {
            store(queries[k].out + i, Floats{});
            sum += load(queries[k].q + i);
        }
        all[k] = reduce(sum);
    }
    for (int64_t p = (begin - kv.first) / PAGE; p * PAGE < end - kv.first; ++p) {
        const int64_t first = kv.first + p * PAGE;
        const Span tokens{begin > first ? begin - first : 0, least(PAGE, end - first)};
        attend_page<BITS, COUNT>(kv, p, queries, all, tokens, scores);
    }
}

template <int BITS> void attend_as(const KvPages& kv, const Query* queries, int64_t count) {
    for (int64_t k = 0; k < count; k += TOGETHER)
        attend_together<BITS, TOGETHER>(kv, queries + k, least(TOGETHER, count - k));
}

void attend(const KvPages& kv, const Query* queries, int64_t count) {
    if (kv.format.bits == 16) return attend_as<16>(kv, queries, count);
    if (kv.format.bits == 8) return attend_as<8>(kv, queries, count);
    return attend_as<4>(kv, queries, count);
}

void combine(const float* const* parts, int64_t count, int64_t n, float* out) {
    float largest = parts[0][0];
    for (int64_t s = 1; s < count; ++s) largest = parts[s][0] > largest ? parts[s][0] : largest;
    float sum = 0;
    for (int64_t i = 0; i < n; ++i) out[i] = 0;
    for (int64_t s = 0; s < count; ++s) {
        const float factor = exponential(broadcast(parts[s][0] - largest))[0];
        sum += factor * parts[s][1];
        for (int64_t i = 0; i < n; ++i) out[i] += factor * parts[s][PART + i];
    }
    for (int64_t i = 0; i < n; ++i) out[i] /= sum;
}

} // namespace

void add_attention(EngineOps& ops) {
    ops.store = store;
    ops.load_key = load_key;
    ops.attend = attend;
    ops.combine = combine;
}

} // namespace anybit::ANYBIT_ISA
