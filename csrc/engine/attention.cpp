// Attention over pages of the KV-cache, for the query heads that share a KV head: one pass over keys and values. Sums
// stay in registers for a page; the softmax is rescaled from page to page (Dao et al., FlashAttention, 2022).
#include "engine/attention_codes.h"
#include "engine/attention_halves.h"

namespace anybit::ANYBIT_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int TOGETHER = 4; // queries whose sums are in registers
#elif defined(__AVX2__)
constexpr int TOGETHER = 2;
#else
constexpr int TOGETHER = 1;
#endif

// What attention over pages of 16 bits, and over pages of codes, is made of.
template <template <int> typename Subtracted> struct OfHalves {
    using Page = HalfPage;
    template <int COUNT> using Centres = Subtracted<COUNT>;
    using Weights = FloatWeights;
};
template <int BITS> struct OfCodes {
    using Page = CodePage<BITS>;
    template <int COUNT> using Centres = CentreScores<COUNT>;
    using Weights = RoundedWeights;
};

// What a page's scores [PAGE] make of a query: weights of the page's values.
template <typename Page, typename Weights>
inline void weigh(const Page& page, const Query& query, int64_t first, float softcap, const float* scores,
                  Weights& weights) {
    const int64_t begin = query.begin - first, end = query.end - first;
    weights = Weights();
    if (begin >= PAGE || end <= 0) return; // no token of the page: nothing changes
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
    weights.factor = exponential(broadcast(before - largest))[0];
    Floats p[VECTORS], sum{};
    for (int v = 0; v < VECTORS; ++v) {
        p[v] = exponential(s[v] - largest);
        sum += p[v];
    }
    weights.set(page, p);
    *query.largest = largest;
    *query.sum = *query.sum * weights.factor + reduce(sum);
}

template <typename Of, int COUNT>
inline void attend_together(const KvPages& kv, const Query* queries, int64_t count) {
    if constexpr (COUNT > 1)
        if (count < COUNT) return attend_together<Of, COUNT - 1>(kv, queries, count);
    float scores[COUNT * PAGE];
    typename Of::Weights weights[COUNT];
    int64_t begin = queries[0].begin, end = queries[0].end;
    for (int k = 0; k < COUNT; ++k) {
        begin = least(begin, queries[k].begin);
        end = end > queries[k].end ? end : queries[k].end;
        *queries[k].largest = -__builtin_inff();
        *queries[k].sum = 0;
        for (int64_t i = 0; i < padded(kv.format.head_size); ++i) queries[k].out[i] = 0;
    }
    const int64_t first_page = (begin - kv.first) / PAGE, last_page = (end - kv.first + PAGE - 1) / PAGE;
    const typename Of::template Centres<COUNT> centres(kv, queries, first_page, last_page);
    for (int64_t p = first_page; p < last_page; ++p) {
        const int64_t first = kv.first + p * PAGE;
        const Span tokens{begin > first ? begin - first : 0, least(PAGE, end - first)};
        const typename Of::Page page(kv.format, kv.pages[p], kv.pages[p + 1]);
        multiply_keys<COUNT>(page, centres, p, queries, scores);
        for (int k = 0; k < COUNT; ++k) weigh(page, queries[k], first, kv.softcap, scores + k * PAGE, weights[k]);
        add_values<COUNT>(page, queries, weights, tokens);
    }
}

template <typename Of> void attend_as(const KvPages& kv, const Query* queries, int64_t count) {
    for (int64_t k = 0; k < count; k += TOGETHER)
        attend_together<Of, TOGETHER>(kv, queries + k, least(TOGETHER, count - k));
}

void attend(const KvPages& kv, const Query* queries, int64_t count) {
    if (kv.format.bits == 16 && kv.centres.others == nullptr) return attend_as<OfHalves<NoCentres>>(kv, queries, count);
    if (kv.format.bits == 16) return attend_as<OfHalves<CentreScores>>(kv, queries, count);
    if (kv.format.bits == 8) return attend_as<OfCodes<8>>(kv, queries, count);
    return attend_as<OfCodes<4>>(kv, queries, count);
}

void combine(const float* parts, int64_t stride, int64_t count, int64_t n, float* out) {
    float largest = parts[0];
    for (int64_t s = 1; s < count; ++s) largest = parts[s * stride] > largest ? parts[s * stride] : largest;
    float sum = 0;
    for (int64_t i = 0; i < n; ++i) out[i] = 0;
    for (int64_t s = 0; s < count; ++s) {
        const float* part = parts + s * stride;
        const float factor = exponential(broadcast(part[0] - largest))[0];
        sum += factor * part[1];
        for (int64_t i = 0; i < n; ++i) out[i] += factor * part[PART + i];
    }
    for (int64_t i = 0; i < n; ++i) out[i] /= sum;
}

} // namespace

void add_attention(EngineOps& ops) {
    ops.round_query = round_query;
    ops.attend = attend;
    ops.combine = combine;
}

} // namespace anybit::ANYBIT_ISA
