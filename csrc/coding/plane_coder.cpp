#include "coding/plane_coder.h"

#include <algorithm>

namespace anybit {

namespace {

constexpr uint32_t LOWEST = 1u << 23; // of a coder's state, which is below 2^31 between bytes
constexpr int FREQUENCY_BITS = 16;
constexpr int UNIFORM = 128;

// Bytes by how many ones they have, then by value.
struct ByteOrder {
    std::array<uint8_t, 256> bytes{}, ranks{}; // rank: among those with as many ones
    std::array<uint8_t, 256> counts{};
    std::array<int, 10> firsts{};
    constexpr ByteOrder() {
        int at = 0;
        for (int count = 0; count <= 8; ++count) {
            firsts[count] = at;
            for (int byte = 0; byte < 256; ++byte) {
                int ones = 0;
                for (int bit = 0; bit < 8; ++bit) ones += byte >> bit & 1;
                if (ones != count) continue;
                counts[byte] = static_cast<uint8_t>(count);
                ranks[byte] = static_cast<uint8_t>(at - firsts[count]);
                bytes[at++] = static_cast<uint8_t>(byte);
            }
        }
        firsts[9] = at;
    }
};

constexpr ByteOrder ORDER;

// The first class of a plane's rows of a shape; the cell is added.
int first_class(int plane, int shape) {
    const int cells = 1 << (plane - 2);
    return CODED_SHAPES * (cells - 1) + shape * cells;
}

// The cells of 32 weights: the planes between the first and this one, as they are on the positive side.
class Cells {
public:
    // word: of the rows; left: columns from its first one on.
    Cells(const PlaneRows& rows, int64_t word, int64_t left)
        : sign(rows.above[0][word]), there(left >= 32 ? ~0u : (1u << left) - 1), plane_(rows.plane),
          second_(rows.plane > 2 ? rows.above[1][word] ^ sign : 0),
          third_(rows.plane > 3 ? rows.above[2][word] ^ sign : 0) {}

    int count() const { return 1 << (plane_ - 2); }
    // The weights in a cell.
    uint32_t weights(int cell) const {
        if (plane_ == 2) return there;
        if (plane_ == 3) return there & (cell == 1 ? second_ : ~second_);
        return there & (cell >> 1 == 1 ? second_ : ~second_) & ((cell & 1) == 1 ? third_ : ~third_);
    }

    const uint32_t sign, there; // there: the weights that are no padding

private:
    const int plane_;
    const uint32_t second_, third_;
};

static_assert(LAST_CODED == 4, "Cells has the planes that are above the last coded one");

int count_of(uint32_t word) { return __builtin_popcount(word); }

// The bits of a word at the places of a mask, side by side.
uint32_t gather(uint32_t word, uint32_t mask) {
    uint32_t made = 0;
    for (uint32_t bit = 1; mask != 0; mask &= mask - 1, bit <<= 1)
        if ((word & mask & (0 - mask)) != 0) made |= bit;
    return made;
}

// And back.
uint32_t scatter(uint32_t bits, uint32_t mask) {
    uint32_t made = 0;
    for (; mask != 0; mask &= mask - 1, bits >>= 1) made |= (mask & (0 - mask)) & (0 - (bits & 1));
    return made;
}

// Whether one instruction counts bits and one scatters them, and fast: on the first Zens the latter is slower than the
// loop.
bool has_fast_bits() {
#ifdef ANYBIT_X86
    static const bool there =
        __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt") && !__builtin_cpu_is("amdfam17h");
    return there;
#else
    return false;
#endif
}

} // namespace

ByteFrequencies::ByteFrequencies(int ones) {
    const uint64_t one = static_cast<uint64_t>(ones), zero = 256 - one;
    uint32_t sum = 0;
    std::array<uint32_t, 9> frequencies;
    for (int count = 0; count <= 8; ++count) {
        uint64_t product = 1; // below 2^64, as one and zero are below 256
        for (int bit = 0; bit < 8; ++bit) product *= bit < count ? one : zero;
        frequencies[count] = std::max<uint32_t>(1, static_cast<uint32_t>(product >> (64 - FREQUENCY_BITS)));
        sum += frequencies[count] * static_cast<uint32_t>(ORDER.firsts[count + 1] - ORDER.firsts[count]);
    }
    // The likeliest byte, which is the only one of its count, gets what is left.
    frequencies[ones < UNIFORM ? 0 : 8] += (1u << FREQUENCY_BITS) - sum;
    uint32_t start = 0;
    for (int count = 0; count <= 8; ++count) {
        const uint64_t frequency = frequencies[count];
        counts_[count] = {((uint64_t{1} << 32) + frequency - 1) / frequency, start, static_cast<uint16_t>(frequency),
                          static_cast<uint16_t>(ORDER.firsts[count])};
        const uint32_t end =
            start + frequencies[count] * static_cast<uint32_t>(ORDER.firsts[count + 1] - ORDER.firsts[count]);
        for (uint32_t at = (start + (1u << COARSE_BITS) - 1) >> COARSE_BITS; at << COARSE_BITS < end; ++at)
            coarse_[at] = static_cast<uint8_t>(count);
        start = end;
    }
}

uint32_t ByteFrequencies::frequency(uint8_t byte) const { return counts_[ORDER.counts[byte]].frequency; }

uint32_t ByteFrequencies::start(uint8_t byte) const {
    const Count& count = counts_[ORDER.counts[byte]];
    return count.start + ORDER.ranks[byte] * count.frequency;
}

inline uint8_t ByteFrequencies::byte_at(uint32_t slot, uint32_t& within, uint32_t& frequency) const {
    const Count* count = &counts_[coarse_[slot >> COARSE_BITS]];
    while (count < &counts_[8] && slot >= count[1].start) ++count;
    frequency = count->frequency;
    within = slot - count->start;
    const auto rank = static_cast<uint32_t>(within * count->inverse >> 32); // slots are few: this is exact
    within -= rank * frequency;
    return ORDER.bytes[count->first + rank];
}

void PlaneWriter::put(int of, uint32_t bits, int count) {
    Class& to = classes_[of];
    to.ones += count_of(bits);
    while (count > 0) {
        const int used = static_cast<int>(to.bits % 8), some = std::min(count, 8 - used);
        if (used == 0) {
            to.last = static_cast<int64_t>(symbols_.size());
            symbols_.push_back({static_cast<uint8_t>(of), 0});
        }
        symbols_[to.last].byte |= static_cast<uint8_t>((bits & ((1u << some) - 1)) << used);
        to.bits += some;
        bits >>= some;
        count -= some;
    }
}

void PlaneWriter::write(const PlaneRows& rows, const uint32_t* plane) {
    const int64_t words = rows.words();
    for (int64_t i = 0; i < rows.rows; ++i) {
        const int first = first_class(rows.plane, rows.shapes[i]);
        for (int64_t word = i * words; word < (i + 1) * words; ++word) {
            const Cells cells(rows, word, rows.columns - 32 * (word - i * words));
            const uint32_t outer = plane[word] ^ cells.sign;
            for (int cell = 0; cell < cells.count(); ++cell) {
                const uint32_t weights = cells.weights(cell);
                put(first + cell, gather(outer, weights), count_of(weights));
            }
        }
    }
}

std::vector<uint8_t> PlaneWriter::finish() {
    std::array<int, CLASSES> ones{};
    std::array<int64_t, CLASSES> firsts;
    firsts.fill(-1);
    for (int of = 0; of < CLASSES; ++of) {
        const Class& c = classes_[of];
        if (c.bits == 0) continue;
        ones[of] = static_cast<int>(std::clamp<int64_t>((512 * c.ones + c.bits) / (2 * c.bits), 1, 255));
        const int used = static_cast<int>(c.bits % 8);
        if (used != 0 && ones[of] >= UNIFORM) symbols_[c.last].byte |= static_cast<uint8_t>(0xff << used); // likelier
    }
    for (size_t i = symbols_.size(); i-- > 0;) firsts[symbols_[i].of] = static_cast<int64_t>(i);
    std::vector<ByteFrequencies> tables;
    for (int of = 0; of < CLASSES; ++of) tables.emplace_back(ones[of] == 0 ? UNIFORM : ones[of]);
    const ByteFrequencies uniform(UNIFORM);
    std::vector<uint8_t> made; // from its end to its beginning: a reader gets last what was put first
    uint32_t state = LOWEST;
    const auto code = [&](const ByteFrequencies& table, uint8_t byte) {
        const uint32_t frequency = table.frequency(byte);
        while (state >= ((LOWEST >> FREQUENCY_BITS) << 8) * frequency) {
            made.push_back(static_cast<uint8_t>(state));
            state >>= 8;
        }
        state = (state / frequency << FREQUENCY_BITS) + state % frequency + table.start(byte);
    };
    for (size_t i = symbols_.size(); i-- > 0;) {
        const Symbol symbol = symbols_[i];
        code(tables[symbol.of], symbol.byte);
        if (firsts[symbol.of] == static_cast<int64_t>(i)) code(uniform, static_cast<uint8_t>(ones[symbol.of]));
    }
    for (int byte = 0; byte < 4; ++byte) made.push_back(static_cast<uint8_t>(state >> (8 * byte)));
    std::reverse(made.begin(), made.end());
    return made;
}

PlaneReader::PlaneReader(const uint8_t* data, int64_t size, bool fast)
    : fast_(fast && has_fast_bits()), stream_{data, data + size} {
    for (int byte = 0; byte < 4 && stream_.next < stream_.end; ++byte)
        stream_.state = stream_.state << 8 | *stream_.next++;
    stream_.good = size >= 4 && stream_.state >= LOWEST && stream_.state < 1u << 31;
    tables_.reserve(CLASSES + 1);
    tables_.emplace_back(UNIFORM);
}

bool PlaneReader::at_end() const { return stream_.good && stream_.next == stream_.end && stream_.state == LOWEST; }

inline uint8_t PlaneReader::Stream::byte_of(const ByteFrequencies& table) {
    uint32_t within, frequency;
    const uint8_t byte = table.byte_at(state & ((1u << FREQUENCY_BITS) - 1), within, frequency);
    state = frequency * (state >> FREQUENCY_BITS) + within; // 2^7 at least
    const int wanted = (state < LOWEST) + (state < LOWEST >> 8);
    if (end - next >= 2) {
        const uint32_t two = static_cast<uint32_t>(next[0] << 8 | next[1]);
        state = state << (8 * wanted) | two >> (16 - 8 * wanted);
        next += wanted;
        return byte;
    }
    while (state < LOWEST) {
        if (next == end) {
            good = false;
            state = LOWEST;
            break;
        }
        state = state << 8 | *next++;
    }
    return byte;
}

inline uint32_t PlaneReader::take(Class& of, int bits, Stream& from) {
    for (; of.left < bits; of.left += 8) {
        if (of.table < 0) {
            const int ones = from.byte_of(tables_[0]);
            from.good = from.good && ones > 0;
            of.table = static_cast<int>(tables_.size());
            tables_.emplace_back(std::max(ones, 1));
        }
        of.bits |= static_cast<uint64_t>(from.byte_of(tables_[of.table])) << of.left;
    }
    const auto made = static_cast<uint32_t>(of.bits & ((uint64_t{1} << bits) - 1));
    of.bits >>= bits;
    of.left -= bits;
    return made;
}

template <PlaneReader::Scatter scatter_bits>
__attribute__((always_inline)) inline void PlaneReader::read_rows(const PlaneRows& rows, uint32_t* plane) {
    const int64_t words = rows.words();
    Stream from = stream_; // in registers: a word of the plane could be any of its numbers
    for (int64_t i = 0; i < rows.rows && from.good; ++i) {
        Class* classes = classes_.data() + first_class(rows.plane, rows.shapes[i]);
        for (int64_t word = i * words; word < (i + 1) * words; ++word) {
            const Cells cells(rows, word, rows.columns - 32 * (word - i * words));
            uint32_t outer = 0;
            for (int cell = 0; cell < cells.count(); ++cell) {
                const uint32_t weights = cells.weights(cell);
                outer |= scatter_bits(take(classes[cell], count_of(weights), from), weights);
            }
            plane[word] = (outer ^ cells.sign) & cells.there;
        }
    }
    stream_ = from;
}

#ifdef ANYBIT_X86
#define ANYBIT_FAST_BITS __attribute__((target("bmi2,popcnt")))
ANYBIT_FAST_BITS static uint32_t scatter_fast(uint32_t bits, uint32_t mask) {
    return __builtin_ia32_pdep_si(bits, mask);
}

ANYBIT_FAST_BITS void PlaneReader::read_fast(const PlaneRows& rows, uint32_t* plane) {
    read_rows<scatter_fast>(rows, plane);
}
#else
void PlaneReader::read_fast(const PlaneRows& rows, uint32_t* plane) { read_rows<scatter>(rows, plane); }
#endif

bool PlaneReader::read(const PlaneRows& rows, uint32_t* plane) {
    if (fast_) read_fast(rows, plane);
    else read_rows<scatter>(rows, plane);
    return stream_.good;
}

} // namespace anybit
