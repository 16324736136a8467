// Weighted k-means of the values of each row, in one dimension, where clusters are intervals of the sorted values.
//
// Seed clusters: dynamic programming over a part of the boundaries (exact where there are few), then all edges together
// move to better places near by, in ever smaller steps, until none does.
// Nested codes (Any-Precision, arXiv:2402.10517, section 4.2) cut every cluster in two at its best place, width after
// width. Everything reads prefix sums of the sorted values.
//
// Plain IEEE double operations in one order and no contraction: every instruction set gives the same bits.
#include "quantize/ops.h"
#include "common/simd.h"

namespace anybit::ANYBIT_ISA {
namespace {

constexpr int WIDE = 8; // doubles that a scan looks at together
typedef double Doubles __attribute__((vector_size(WIDE * 8)));
typedef int64_t Longs __attribute__((vector_size(WIDE * 8)));

constexpr int64_t MAX_CLUSTERS = 256;
constexpr int64_t KNOTS_PER_CLUSTER = 12, MORE_KNOTS = 64, MAX_KNOTS = KNOTS_PER_CLUSTER * MAX_CLUSTERS + MORE_KNOTS;
constexpr int MAX_PASSES = 100;
constexpr double UNREACHABLE = 1e300;
constexpr double LEAST_SHARE = 0x1p-24; // of importance, where a row's mean is 1

// The distinct values of one row in ascending order, with prefix sums of importance and importance times value.
// Point p lies between boundaries p and p + 1; boundaries are 0..count.
struct Points {
    uint64_t *sorted, *buffer; // [columns] value as an ordered integer in the high half, column in the low half
    float* value;              // [columns]
    double *mass, *moment;     // [columns + 1 + WIDE], beyond `count` padded with the last entry
    double origin;             // what moments are taken from
    int64_t count;
};

struct Cut {
    int64_t at;  // a boundary strictly inside the interval, or -1 if there is none
    double gain; // decrease of the weighted squared error over the interval's mass
};

// ---- one row in order -----------------------------------------------------------------------------------

// Floats as integers in the same order. -0 and 0 are equal floats and must be equal integers.
inline uint32_t ordered(float f) {
    f += 0.0f;
    const uint32_t bits = load_as<uint32_t>(&f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

inline float unordered(uint32_t key) {
    const uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
    return load_as<float>(&bits);
}

// Radix sort by the high halves, a byte at a time; stable, so equal values stay in column order.
void sort(uint64_t*& data, uint64_t*& buffer, int64_t n) {
    uint32_t start[4][256] = {};
    for (int64_t i = 0; i < n; ++i)
        for (int byte = 0; byte < 4; ++byte) ++start[byte][data[i] >> (32 + 8 * byte) & 255];
    for (int byte = 0; byte < 4; ++byte) {
        const int shift = 32 + 8 * byte;
        if (start[byte][data[0] >> shift & 255] == n) continue; // all alike in this byte
        uint32_t before = 0;
        for (uint32_t& count : start[byte]) {
            const uint32_t here = count;
            count = before;
            before += here;
        }
        for (int64_t i = 0; i < n; ++i) buffer[start[byte][data[i] >> shift & 255]++] = data[i];
        uint64_t* const swap = data;
        data = buffer;
        buffer = swap;
    }
}

// A point of next to no importance keeps the least share that prefix sums can tell from none; without any, all count
// alike. Values are taken from the row's mean, so that moments lose no digits to it.
void read_row(const Clustering& c, int64_t row, Points& p) {
    const float* w = c.weight + row * c.weight_stride;
    const float* importance = c.importance ? c.importance + row * c.importance_stride : nullptr;
    for (int64_t j = 0; j < c.columns; ++j) p.sorted[j] = uint64_t(ordered(w[j])) << 32 | uint64_t(j);
    sort(p.sorted, p.buffer, c.columns);
    double total = 0, sum = 0;
    for (int64_t j = 0; j < c.columns; ++j) {
        sum += w[j];
        if (importance) total += importance[j];
    }
    const double scale = total > 0 ? double(c.columns) / total : 0;
    p.origin = sum / double(c.columns);
    double mass = 0, moment = 0;
    int64_t n = 0;
    for (int64_t i = 0; i < c.columns; ++i) {
        const float x = unordered(uint32_t(p.sorted[i] >> 32));
        double share = scale > 0 ? importance[uint32_t(p.sorted[i])] * scale : 1;
        share = share > LEAST_SHARE ? share : LEAST_SHARE;
        if (n == 0 || x != p.value[n - 1]) {
            p.mass[n] = mass;
            p.moment[n] = moment;
            p.value[n++] = x;
        }
        mass += share;
        moment += share * (x - p.origin);
    }
    p.count = n;
    for (int64_t i = n; i <= n + WIDE; ++i) {
        p.mass[i] = mass;
        p.moment[i] = moment;
    }
}

// ---- cuts -----------------------------------------------------------------------------------------------

template <typename V> V shuffled(V v, const Longs& from) {
#if defined(__clang__)
    V made;
    for (int l = 0; l < 8; ++l) made[l] = v[from[l]];
    return made;
#else
    return __builtin_shuffle(v, from);
#endif
}

// The largest of the values and its place, the first of equal ones.
Cut largest(Doubles value, Longs place) {
    const Longs far = {4, 5, 6, 7, 0, 1, 2, 3}, near = {2, 3, 0, 1, 6, 7, 4, 5}, next = {1, 0, 3, 2, 5, 4, 7, 6};
    const Longs partners[] = {far, near, next};
    Doubles most = value;
    for (const Longs& partner : partners) {
        const Doubles other = shuffled(most, partner);
        most = other > most ? other : most;
    }
    place = value == most ? place : Longs{} + INT64_MAX;
    for (const Longs& partner : partners) {
        const Longs other = shuffled(place, partner);
        place = other < place ? other : place;
    }
    return {place[0], most[0]};
}

// With the interval's mean as origin, the left part's moment m and the masses l and r of both parts: cutting gains
// m^2 (1/l + 1/r), that is m^2 / (l r) times the interval's mass.
Cut best_cut(const Points& p, int64_t a, int64_t b) {
    if (b - a < 2) return {-1, 0};
    const double mass = p.mass[b] - p.mass[a], mean = (p.moment[b] - p.moment[a]) / mass;
    const Doubles from_mass = p.mass[a] - Doubles{}, from_moment = p.moment[a] - Doubles{};
    Doubles best = -1 - Doubles{};
    Longs where{}, at = (a + 1) - Longs{0, -1, -2, -3, -4, -5, -6, -7};
    for (int64_t t = a + 1; t < b; t += WIDE) {
        const Doubles left = load_as<Doubles>(p.mass + t) - from_mass;
        const Doubles m = load_as<Doubles>(p.moment + t) - from_moment - mean * left;
        const Doubles score = m * m / (left * (mass - left));
        const Longs better = (score > best) & (at < b) & (left > 0) & (mass - left > 0);
        best = better ? score : best;
        where = better ? at : where;
        at += WIDE;
    }
    return largest(best, where);
}

// ---- seed clusters: coarse, but all at once -------------------------------------------------------------

// Some of the boundaries, as dynamic programming sees them, and its tables.
struct Knots {
    int64_t* boundary;     // [MAX_KNOTS + 1]
    double *mass, *moment; // [MAX_KNOTS + 1 + WIDE], prefix sums at the knots
    double *before, *now;  // [MAX_KNOTS + 1 + WIDE], best total of c - 1 and of c clusters that end at a knot
    uint16_t* from;        // [MAX_CLUSTERS, MAX_KNOTS + 1], where the last of c clusters begins
    int64_t count;         // the last knot
};

// As many knots as `wanted`, spread evenly over the number of points, their importance and the range of their values:
// each alone would leave the bulk, the points that count or the tails without.
void place_knots(const Points& p, int64_t wanted, Knots& k) {
    k.count = 0;
    k.boundary[0] = 0;
    const double range = double(p.value[p.count - 1]) - p.value[0];
    const double by_count = 1 / double(p.count), by_mass = 1 / p.mass[p.count], by_value = range > 0 ? 1 / range : 0;
    double next = 0;
    for (int64_t i = 1; i < p.count; ++i) {
        const double way = double(i) * by_count + p.mass[i] * by_mass + (double(p.value[i]) - p.value[0]) * by_value;
        if (p.count > wanted && way * double(wanted) < 3 * next + 3) continue;
        next = way * double(wanted) / 3;
        k.boundary[++k.count] = i;
    }
    k.boundary[++k.count] = p.count;
    for (int64_t i = 0; i <= k.count + WIDE; ++i) {
        const int64_t at = k.boundary[least(i, k.count)];
        k.mass[i] = p.mass[at];
        k.moment[i] = p.moment[at];
        k.before[i] = k.now[i] = 0;
    }
}

// Where the last cluster of those that end at knot i begins best, among the knots low..high.
int64_t best_start(const Knots& k, int64_t i, int64_t low, int64_t high, double& total) {
    const Doubles mass = k.mass[i] - Doubles{}, moment = k.moment[i] - Doubles{};
    Doubles best = -UNREACHABLE - Doubles{};
    Longs where = low - Longs{}, at = low - Longs{0, -1, -2, -3, -4, -5, -6, -7};
    for (int64_t j = low; j <= high; j += WIDE) {
        const Doubles m = moment - load_as<Doubles>(k.moment + j), share = mass - load_as<Doubles>(k.mass + j);
        const Doubles score = m * m / share + load_as<Doubles>(k.before + j);
        const Longs better = (score > best) & (at <= high) & (share > 0);
        best = better ? score : best;
        where = better ? at : where;
        at += WIDE;
    }
    const Cut chosen = largest(best, where);
    total = chosen.gain;
    return chosen.at;
}

// The best edges among the knots. Starts ascend with ends (the cost is concave): every second end is searched between
// the starts of the ends around it, which were found before. O(knots log knots) for each cluster.
void best_edges(Knots& k, int64_t size, int64_t* edges) {
    for (int64_t i = 1; i <= k.count; ++i) k.now[i] = k.moment[i] * k.moment[i] / k.mass[i];
    for (int64_t c = 2; c <= size; ++c) {
        double* const swap = k.before;
        k.before = k.now;
        k.now = swap;
        uint16_t* const from = k.from + (c - 1) * (MAX_KNOTS + 1);
        const int64_t last = k.count - (size - c), first = c == size ? last : c; // a knot for each later cluster
        int64_t step = 1;
        while (2 * step <= last - first + 1) step *= 2;
        for (; step > 0; step /= 2)
            for (int64_t i = first + step - 1; i <= last; i += 2 * step) {
                const int64_t low = i - step >= first ? from[i - step] : c - 1;
                const int64_t high = i + step <= last ? from[i + step] : last - 1;
                from[i] = uint16_t(best_start(k, i, low, least(high, i - 1), k.now[i]));
            }
    }
    int64_t knot = k.count;
    for (int64_t c = size; c > 0; --c) {
        edges[c] = k.boundary[knot];
        knot = c > 1 ? k.from[(c - 1) * (MAX_KNOTS + 1) + knot] : 0;
    }
    edges[0] = 0;
}

// ---- seed clusters: fine, but near by -------------------------------------------------------------------

// Eight places around each edge, and the best choice of one place each.
struct Choice {
    Doubles mass, moment, total; // prefix sums at the places; best total of the clusters up to there
    Longs place, from;           // `from`: which place of the edge before
};

// Places `stride` points apart, `below` of them below the edge. Returns whether an edge moved.
bool choose(const Points& p, int64_t* edges, int64_t size, Choice* choice, int64_t stride, int64_t below) {
    for (int64_t c = 1; c < size; ++c) {
        Choice& now = choice[c];
        const int64_t low = c, high = p.count - (size - c); // every cluster keeps a point
        for (int l = 0; l < WIDE; ++l) {
            int64_t place = edges[c] + (l - below) * stride;
            place = place < low ? low : place > high ? high : place;
            now.place[l] = place;
            now.mass[l] = p.mass[place];
            now.moment[l] = p.moment[place];
        }
        if (c == 1) {
            now.total = now.moment * now.moment / now.mass;
            continue;
        }
        const Choice& before = choice[c - 1];
        now.total = -UNREACHABLE - Doubles{};
        now.from = Longs{};
        for (int l = 0; l < WIDE; ++l) {
            const Doubles mass = now.mass - before.mass[l], moment = now.moment - before.moment[l];
            const Doubles total = moment * moment / mass + before.total[l];
            const Longs better = (mass > 0) & (total > now.total);
            now.total = better ? total : now.total;
            now.from = better ? Longs{} + l : now.from;
        }
    }
    const Choice& end = choice[size - 1];
    const Doubles mass = p.mass[p.count] - end.mass, moment = p.moment[p.count] - end.moment;
    const Doubles total = moment * moment / mass + end.total;
    int64_t at = below; // where it is, unless another place is better
    for (int l = 0; l < WIDE; ++l)
        if (total[l] > total[at]) at = l;
    bool moved = false;
    for (int64_t c = size - 1; c >= 1; --c) {
        moved |= edges[c] != choice[c].place[at];
        edges[c] = choice[c].place[at];
        at = choice[c].from[at];
    }
    return moved;
}

// Move all edges together, in steps that shrink from the distance between knots to a point.
void refine(const Points& p, int64_t* edges, int64_t size, int64_t knots, Choice* choice) {
    int64_t stride = 1;
    while (stride * knots < p.count) stride *= 2;
    for (; stride > 0; stride /= 2)
        for (int pass = 0; pass < MAX_PASSES; ++pass) {
            const bool down = choose(p, edges, size, choice, stride, 4);
            const bool up = choose(p, edges, size, choice, stride, 3);
            if (!down && !up) break;
        }
}

// `size` clusters, or one per distinct value where there are fewer; edges [size + 1].
void cluster(const Points& p, Knots& k, Choice* choice, int64_t size, int64_t* edges) {
    const int64_t used = least(size, p.count);
    place_knots(p, least(MAX_KNOTS, KNOTS_PER_CLUSTER * used + MORE_KNOTS), k);
    best_edges(k, used, edges);
    if (k.count < p.count && used > 1) refine(p, edges, used, k.count, choice);
    for (int64_t c = used; c < size; ++c) edges[c + 1] = p.count;
}

// ---- nested codes ---------------------------------------------------------------------------------------

void write_centroids(const Points& p, const int64_t* edges, int64_t size, float* centroids) {
    float last = p.value[0];
    for (int64_t c = 0; c < size; ++c) {
        const int64_t a = edges[c], b = edges[c + 1];
        if (a < b) {
            last = float(p.origin + (p.moment[b] - p.moment[a]) / (p.mass[b] - p.mass[a]));
            last = last > p.value[a] ? last : p.value[a]; // whatever rounding does, means lie within and ascend
            last = last < p.value[b - 1] ? last : p.value[b - 1];
        }
        centroids[c] = last; // an empty cluster repeats the value before it
    }
}

// Cut every cluster in two; one that cannot be cut leaves its second half empty.
void halve(const Points& p, int64_t* edges, int64_t size) {
    for (int64_t c = size; c-- > 0;) {
        const int64_t a = edges[c], b = edges[c + 1], at = best_cut(p, a, b).at;
        edges[2 * c + 2] = b;
        edges[2 * c + 1] = at < 0 ? b : at;
    }
}

void write_codes(const Points& p, const int64_t* edges, int64_t size, int64_t columns, uint8_t* codes) {
    int64_t point = -1, c = 0;
    for (int64_t i = 0; i < columns; ++i) {
        const uint32_t key = uint32_t(p.sorted[i] >> 32);
        point += i == 0 || key != uint32_t(p.sorted[i - 1] >> 32);
        while (c + 1 < size && point >= edges[c + 1]) ++c;
        codes[uint32_t(p.sorted[i])] = uint8_t(c);
    }
}

// Everything a thread needs, in one piece of memory.
struct Workspace {
    Points points;
    Knots knots;
    Choice* choice;
    int64_t* edges;
};

template <typename T> void take(uintptr_t& at, int64_t n, T*& start) {
    start = reinterpret_cast<T*>(at);
    at += static_cast<uintptr_t>(ceil_div(n * int64_t(sizeof(T)), 64) * 64);
}

// Lay a workspace out from an address on; returns where it ends.
uintptr_t lay_out(uintptr_t at, int64_t columns, int seed_bits, Workspace& w) {
    take(at, columns, w.points.sorted);
    take(at, columns, w.points.buffer);
    take(at, columns, w.points.value);
    take(at, columns + 1 + WIDE, w.points.mass);
    take(at, columns + 1 + WIDE, w.points.moment);
    take(at, MAX_KNOTS + 1, w.knots.boundary);
    take(at, MAX_KNOTS + 1 + WIDE, w.knots.mass);
    take(at, MAX_KNOTS + 1 + WIDE, w.knots.moment);
    take(at, MAX_KNOTS + 1 + WIDE, w.knots.before);
    take(at, MAX_KNOTS + 1 + WIDE, w.knots.now);
    take(at, (int64_t(1) << seed_bits) * (MAX_KNOTS + 1), w.knots.from);
    take(at, MAX_CLUSTERS, w.choice);
    take(at, MAX_CLUSTERS + 1, w.edges);
    return at;
}

void kmeans(const Clustering& c, char* scratch, int64_t begin, int64_t end) {
    Workspace w;
    lay_out(reinterpret_cast<uintptr_t>(scratch), c.columns, c.seed_bits, w);
    Points& p = w.points;
    int64_t* const edges = w.edges;
    int64_t centroids = 0;
    for (int bits = c.seed_bits; bits <= c.bits; ++bits) centroids += int64_t(1) << bits;
    for (int64_t row = begin; row < end; ++row) {
        read_row(c, row, p);
        cluster(p, w.knots, w.choice, int64_t(1) << c.seed_bits, edges);
        float* out = c.centroids + row * centroids;
        for (int bits = c.seed_bits;; ++bits) {
            const int64_t size = int64_t(1) << bits;
            write_centroids(p, edges, size, out);
            out += size;
            if (bits == c.bits) {
                write_codes(p, edges, size, c.columns, c.codes + row * c.columns);
                break;
            }
            halve(p, edges, size);
        }
    }
}

int64_t kmeans_scratch(int64_t columns, int seed_bits) {
    Workspace w;
    return static_cast<int64_t>(lay_out(0, columns, seed_bits, w));
}

} // namespace

void add_kmeans(QuantizeOps& ops) {
    ops.kmeans_scratch = kmeans_scratch;
    ops.kmeans = kmeans;
}

} // namespace anybit::ANYBIT_ISA
