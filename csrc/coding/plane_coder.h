// Entropy coding of bitplanes in files: a plane's bits given the planes above it (docs/formats.md, "Coded planes").
//
// A bit of plane p says whether a weight lies in the inner or the outer half of the cell that the planes above name.
// Inner halves are the likelier ones, by how much depends on the row's shape and on the cell: each (plane, shape, cell)
// is a class with a probability of its own. The bits of a class form bytes, and the bytes of all classes are one stream
// of a range coder (rANS, Duda, arXiv:1311.2540), in the order in which a reader of the planes asks for them.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace anybit {

constexpr int FIRST_CODED = 2, LAST_CODED = 4; // planes: the first is a sign, those below the last are noise
constexpr int CODED_SHAPES = 16;
constexpr int CLASSES = CODED_SHAPES * ((1 << (LAST_CODED - 1)) - 1);

// Rows of one plane, and of the planes above it: bits of 32 columns to a word, the first in the lowest bit.
struct PlaneRows {
    int plane;                                         // FIRST_CODED to LAST_CODED
    std::array<const uint32_t*, LAST_CODED - 1> above; // [rows, words] each, the first plane - 1 of them
    const uint8_t* shapes;                             // [rows], below CODED_SHAPES
    int64_t rows, columns;
    int64_t words() const { return (columns + 31) / 32; }
};

// How likely bytes of eight bits are, each 1 in `ones` of 256 cases: whole numbers that add up to 2^16.
class ByteFrequencies {
public:
    explicit ByteFrequencies(int ones); // 1 to 255; 128: all bytes alike

    // Bytes are in the order of how many ones they have, and of their value among those with as many.
    uint32_t frequency(uint8_t byte) const;
    uint32_t start(uint8_t byte) const;
    // The byte whose range a slot, below 2^16, is in; the slot's place in it, and its length.
    uint8_t byte_at(uint32_t slot, uint32_t& within, uint32_t& frequency) const;

private:
    struct Count {        // bytes of as many ones
        uint64_t inverse; // of the frequency, times 2^32, rounded up
        uint32_t start;
        uint16_t frequency, first; // of each; the place of the first in their order
    };
    static constexpr int COARSE_BITS = 10;
    std::array<Count, 9> counts_;
    std::array<uint8_t, 1 << (16 - COARSE_BITS)> coarse_; // the count at the beginning of so many slots
};

// The stream of some planes, made in the order in which they are written.
class PlaneWriter {
public:
    void write(const PlaneRows& rows, const uint32_t* plane);
    std::vector<uint8_t> finish();

private:
    struct Class {
        int64_t bits = 0, ones = 0;
        int64_t last = -1; // its byte that has room
    };
    struct Symbol {
        uint8_t of, byte;
    };
    void put(int of, uint32_t bits, int count);
    std::array<Class, CLASSES> classes_;
    std::vector<Symbol> symbols_;
};

// What such a stream holds. It reads nothing beyond its end, whatever is in it.
class PlaneReader {
public:
    // fast: by instructions for it, where the processor has them.
    PlaneReader(const uint8_t* data, int64_t size, bool fast = true);

    // Fill rows of a plane; false where the stream is damaged: then what is in them means nothing.
    bool read(const PlaneRows& rows, uint32_t* plane);
    bool at_end() const; // exactly, with nothing left over

private:
    struct Class {
        uint64_t bits = 0; // the lowest comes next
        int left = 0;
        int table = -1; // in tables_; -1: its probability is still to come
    };
    struct Stream {
        const uint8_t *next, *end;
        uint32_t state = 0;
        bool good = true;

        uint8_t byte_of(const ByteFrequencies& table);
    };
    using Scatter = uint32_t(uint32_t bits, uint32_t mask);
    template <Scatter scatter_bits> void read_rows(const PlaneRows& rows, uint32_t* plane);
    void read_fast(const PlaneRows& rows, uint32_t* plane);
    uint32_t take(Class& of, int bits, Stream& from); // up to 32
    const bool fast_;
    Stream stream_;
    std::array<Class, CLASSES> classes_;
    std::vector<ByteFrequencies> tables_;
};

} // namespace anybit
