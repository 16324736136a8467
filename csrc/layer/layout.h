// How a layer is stored, as config.json describes it: docs/formats.md has the bytes, src/anybit/formats/ the Python.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace anybit {

constexpr int64_t ALL = -1; // rows or columns that no tensor names

struct TileLayout {
    std::string format; // "group_int", "codebook", "float16", "two_four" or "nested"
    int64_t rows = ALL, cols = ALL;
    int bits = 16;               // group_int; codebook: of the widest table
    int64_t group_size = 0;      // group_int, two_four
    bool symmetric = false;      // group_int
    int act_bits = 16;           // group_int: what inputs are rounded to; 16: they are not
    bool act_static = false;     // group_int: by scales that are stored
    std::vector<int> widths;     // codebook: those that have a table, ascending
    bool by_channel = false;     // codebook
    int table_bits = 16;         // codebook: of an entry
    int64_t narrow = 0;          // two_four: channels of 2 bits
    std::vector<int64_t> counts; // nested: rows of every plane
    int64_t kept = 0;            // nested: channels that have no codes in planes
    int kept_bits = 16;          // nested: of a weight of theirs
    bool gains = false;          // nested: of rows of few bits
};

struct LayerLayout {
    int64_t out = 0, in = 0;
    std::vector<TileLayout> tiles;
    int64_t sparse = -1; // weights beside the tiles; -1: no such part
    bool input_scale = false;
};

} // namespace anybit
