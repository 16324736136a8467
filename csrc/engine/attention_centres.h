// Scores of what was subtracted from keys (`Centres`).
#pragma once

#include "engine/attention.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int64_t PAIRS = 64; // of a centre's numbers that are turned together

// What the centres of some pages, turned as the pages' keys are, give with queries: scores of all their tokens.
template <int COUNT> class CentreScores {
public:
    CentreScores(const KvPages& kv, const Query* queries, int64_t begin, int64_t end) {
        const Centres& from = kv.centres;
        for (int64_t p = begin; p < end; ++p) {
            const float* centre = centre_of(kv, p);
            for (int k = 0; k < COUNT; ++k) { // numbers that are not turned
                float sum = 0;
                for (int64_t i = 2 * from.half; i < kv.format.head_size && centre != nullptr; ++i)
                    sum += queries[k].plain[i] * centre[i];
                for (int v = 0; v < VECTORS; ++v) store(scores_[p][k] + v * LANES, broadcast(sum));
            }
        }
        for (int64_t first = 0; first < from.half; first += PAIRS) {
            const int64_t n = least(PAIRS, from.half - first);
            for (int64_t p = begin; p < end; ++p) turn(kv, queries, p, first, n);
            int64_t p = begin;
            for (; p + PAGES <= end; p += PAGES) add<PAGES>(from, p, first, n);
            for (; p < end; ++p) add<1>(from, p, first, n);
        }
    }

    Floats at(int64_t page, int query, int v) const { return load(scores_[page][query] + v * LANES); }

private:
    static constexpr int SUMS = 8;                                                  // in registers
    static constexpr int FIT = SUMS / (COUNT * VECTORS), PAGES = FIT < 1 ? 1 : FIT; // that share what is loaded

    static const float* centre_of(const KvPages& kv, int64_t p) {
        return kv.first == 0 && p == 0 ? kv.centres.first : kv.centres.others;
    }

    // Products of queries with a page's centre, as it is turned at the page's first position: what goes with cosines
    // and with sines of the places within the page.
    void turn(const KvPages& kv, const Query* queries, int64_t p, int64_t first, int64_t n) {
        const Centres& from = kv.centres;
        const float* a = centre_of(kv, p);
        if (a == nullptr) {
            for (int k = 0; k < COUNT; ++k)
                for (int64_t i = 0; i < n; ++i) along_[p][k][i] = across_[p][k][i] = 0;
            return;
        }
        a += first;
        const float *b = a + from.half, *cosine = from.starts + p * 2 * from.half + first, *sine = cosine + from.half;
        float x[PAIRS], y[PAIRS];
        for (int64_t i = 0; i < n; ++i) {
            x[i] = a[i] * cosine[i] - b[i] * sine[i];
            y[i] = b[i] * cosine[i] + a[i] * sine[i];
        }
        for (int k = 0; k < COUNT; ++k) {
            const float *q = queries[k].plain + first, *r = q + from.half;
            for (int64_t i = 0; i < n; ++i) {
                along_[p][k][i] = q[i] * x[i] + r[i] * y[i];
                across_[p][k][i] = r[i] * x[i] - q[i] * y[i];
            }
        }
    }

    // Scores of N pages from p on += those products times cosines and sines.
    template <int N> void add(const Centres& from, int64_t p, int64_t first, int64_t n) {
        Floats sums[N][COUNT][VECTORS];
        for (int j = 0; j < N; ++j)
            for (int k = 0; k < COUNT; ++k)
                for (int v = 0; v < VECTORS; ++v) sums[j][k][v] = at(p + j, k, v);
        const float *cosines = from.offsets + first * PAGE, *sines = cosines + from.half * PAGE;
        for (int64_t i = 0; i < n; ++i)
            for (int v = 0; v < VECTORS; ++v) {
                const Floats c = load(cosines + i * PAGE + v * LANES), s = load(sines + i * PAGE + v * LANES);
                for (int j = 0; j < N; ++j)
                    for (int k = 0; k < COUNT; ++k) {
                        sums[j][k][v] = fused(broadcast(along_[p + j][k][i]), c, sums[j][k][v]);
                        sums[j][k][v] = fused(broadcast(across_[p + j][k][i]), s, sums[j][k][v]);
                    }
            }
        for (int j = 0; j < N; ++j)
            for (int k = 0; k < COUNT; ++k)
                for (int v = 0; v < VECTORS; ++v) store(scores_[p + j][k] + v * LANES, sums[j][k][v]);
    }

    static constexpr int64_t MOST_PAGES = SPLIT / PAGE;

    float scores_[MOST_PAGES][COUNT][PAGE];
    float along_[MOST_PAGES][COUNT][PAIRS], across_[MOST_PAGES][COUNT][PAIRS];
};

// Of keys that nothing was subtracted from.
template <int COUNT> struct NoCentres {
    NoCentres(const KvPages&, const Query*, int64_t, int64_t) {}
    Floats at(int64_t, int, int) const { return Floats{}; }
};

} // namespace
} // namespace anybit::ANYBIT_ISA
