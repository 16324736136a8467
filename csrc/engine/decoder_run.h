// One step of a decoder, phase by phase.
#pragma once

#include "engine/centres.h"
#include "engine/decoder.h"

#include <cmath>
#include <cstring>

namespace anybit {

class Decoder::Run {
public:
    Run(Decoder& decoder, const DecoderWeights& weights, const Step& step, KvCache& cache, int threads)
        : spec_(decoder.spec_), ops_(decoder.ops_), weights_(weights), step_(step), cache_(cache), threads_(threads),
          arithmetic_{decoder.int8_inputs_, step.batch_invariant}, memory_(decoder.memory_), offsets_(decoder.offsets_),
          starts_(decoder.starts_), rows_(step.rows), codes_(cache.format().bits < 16), head_(spec_.head_size),
          padded_(padded(head_)), group_(spec_.heads / spec_.kv_heads) {}

    void run() {
        x_ = floats(spec_.hidden);
        normed_ = floats(spec_.hidden);
        attended_ = floats(spec_.heads * head_);
        keys_ = floats(spec_.kv_heads * head_);
        values_ = floats(spec_.kv_heads * head_);
        queries_ = floats(spec_.heads * head_);
        if (codes_) {
            hadamard_ = floats(padded_);
            digits_ = memory_.take<int8_t>(rows_ * spec_.heads * 2 * padded_);
            rounded_ = memory_.take<RoundedQuery>(rows_ * spec_.heads);
        }
        gate_ = floats(spec_.intermediate);
        up_ = floats(spec_.intermediate);
        for (int64_t r = 0; r < rows_; ++r) opens_ = opens_ || (codes_ && step_.positions[r] < PAGE);
        rope_angles();
        plan_attention();
        embed();
        for (size_t b = 0; b < spec_.blocks.size(); ++b) {
            attention(b);
            mlp(b);
        }
        finish();
    }

private:
    // Queries of some rows and a KV head over one split, which a thread takes together.
    struct Task {
        int64_t first, last; // rows
        int64_t split;
    };
    static constexpr int64_t TASK_ROWS = 16;

    // Rows whose parts of attention are in memory at a time.
    struct Strip {
        int64_t first, last;          // rows
        size_t first_task, last_task; // of these
        int64_t parts, work;          // of these, in all
    };
    static constexpr int64_t STRIP_NUMBERS = int64_t(1) << 24; // of parts, where one task has no more

    float* floats(int64_t columns) { return memory_.take<float>(rows_ * columns); }

    // f(row) for every row, of so much work each.
    template <typename F> void by_rows(int64_t work, F&& f) { for_tokens(rows_, work, threads_, f); }

    // ---- before the blocks

    // Cosines and sines of every row, for each kind of rotary embedding.
    void rope_angles() {
        for (const Rope& rope : spec_.ropes) {
            const auto half = static_cast<int64_t>(rope.frequencies.size());
            float* angles = memory_.take<float>(rows_ * 2 * half);
            by_rows(half * ANGLE_WORK, [&](int64_t r) {
                float *cosines = angles + r * 2 * half, *sines = cosines + half;
                for (int64_t i = 0; i < half; ++i) {
                    const float angle =
                        static_cast<float>(step_.positions[r]) * rope.frequencies[static_cast<size_t>(i)];
                    cosines[i] = std::cos(angle) * rope.scale;
                    sines[i] = std::sin(angle) * rope.scale;
                }
            });
            angles_.push_back(angles);
        }
    }

    void embed() {
        const std::vector<int64_t> ids(step_.tokens, step_.tokens + rows_);
        weights_.embedding->rows(ids.data(), rows_, x_);
        if (spec_.embedding_scale != 1)
            for (int64_t i = 0; i < rows_ * spec_.hidden; ++i) x_[i] *= spec_.embedding_scale;
    }

    // The pages that a block has of a sequence.
    const int32_t* pages_of(size_t b, int32_t sequence) const {
        return (cache_.windowed(b) ? step_.window_pages : step_.pages) + sequence * step_.row_pages;
    }

    // The first position that a row attends to through a window; 0: all before.
    int64_t begin_of(int64_t row, int64_t window) const {
        const int64_t end = step_.positions[row] + 1;
        return window > 0 && window < end ? end - window : 0;
    }

    // Where each row's parts of attention begin, through the widest window, and what threads take.
    void plan_attention() {
        int64_t window = spec_.blocks[0].window;
        for (const BlockSpec& block : spec_.blocks)
            window = window == 0 || block.window == 0 ? 0 : std::max(window, block.window);
        for (int64_t r = 0; r < rows_; ++r) first_split_.push_back(begin_of(r, window) / SPLIT);
        int64_t most = 0;
        for (int64_t first = 0, last; first < rows_; first = last) {
            int64_t parts = 0;
            for (last = first; last < rows_ && last - first < TASK_ROWS; ++last) {
                if (step_.sequences[last] != step_.sequences[first]) break;
                parts_begin_.push_back(parts);
                parts += (step_.positions[last] / SPLIT - first_split(last) + 1) * spec_.heads;
            }
            if (strips_.empty() || (strips_.back().parts + parts) * part() > STRIP_NUMBERS)
                strips_.push_back({first, first, tasks_.size(), tasks_.size(), 0, 0});
            Strip& strip = strips_.back();
            for (int64_t r = first; r < last; ++r) parts_begin_[static_cast<size_t>(r)] += strip.parts;
            for (int64_t split = first_split(first); split <= step_.positions[last - 1] / SPLIT; ++split)
                tasks_.push_back({first, last, split});
            strip.work += static_cast<int64_t>(tasks_.size() - strip.last_task) * (last - first) * SPLIT;
            strip.last = last;
            strip.last_task = tasks_.size();
            strip.parts += parts;
            most = std::max(most, strip.parts);
        }
        parts_ = memory_.take<float>(most * part());
    }
    int64_t first_split(int64_t row) const { return first_split_[static_cast<size_t>(row)]; }
    int64_t part() const { return PART + padded_; }
    float* part_of(int64_t row, int64_t split, int64_t head) const {
        const int64_t begin = parts_begin_[static_cast<size_t>(row)];
        return parts_ + (begin + (split - first_split(row)) * spec_.heads + head) * part();
    }

    // ---- attention

    void attention(size_t b) {
        const BlockSpec& block = spec_.blocks[b];
        const DecoderWeights::Block& w = weights_.blocks[b];
        const float* from = normed(block.attention_norm, [b] {
            return b == 0 ? std::string("the embedding") : "the MLP of block " + std::to_string(b - 1);
        });
        multiply({{*w.q, from, queries_}, {*w.k, from, keys_}, {*w.v, from, values_}}, rows_, arithmetic_, memory_,
                 threads_);
        const auto store_if = [&](bool opening) {
            by_rows((spec_.heads + spec_.kv_heads) * head_ * HEAD_WORK, [&](int64_t r) {
                if ((step_.positions[r] < PAGE) == opening || !opens_) rope_and_store(block, b, r);
            });
        };
        store_if(opens_);
        if (opens_) { // the first pages of texts before the others, which depend on them
            by_rows(spec_.kv_heads * head_ * PAGE * CENTRE_WORK, [&](int64_t r) {
                if (step_.positions[r] == PAGE - 1) compute_centre(block, b, r);
            });
            store_if(false);
        }
        for (const Strip& strip : strips_) {
            // One pass over keys and values for all queries of a KV head.
            const auto tasks = static_cast<int64_t>(strip.last_task - strip.first_task), units = tasks * spec_.kv_heads;
            const int64_t piece = piece_of(units, 1, strip.work * spec_.heads * head_ * 2, threads_);
            parallel_for(units, std::max(int64_t(1), piece), threads_, [&](int64_t begin, int64_t end) {
                for (int64_t u = begin; u < end; ++u)
                    attend_split(block, b, tasks_[strip.first_task + static_cast<size_t>(u % tasks)], u / tasks);
            });
            for_tokens(strip.last - strip.first, spec_.heads * head_ * HEAD_WORK, threads_,
                       [&](int64_t r) { combine_splits(block, strip.first + r); });
        }
        add(*w.o, attended_, block.o_bias, block.post_attention_norm);
    }

    // A row's queries, keys and values, as the cache has them.
    void rope_and_store(const BlockSpec& block, size_t b, int64_t r) const {
        const float* angles = block.rope < 0 ? nullptr : angles_[static_cast<size_t>(block.rope)];
        const int64_t half =
            block.rope < 0 ? 0 : static_cast<int64_t>(spec_.ropes[static_cast<size_t>(block.rope)].frequencies.size());
        const auto prepare = [&](float* x, int64_t head, const std::vector<float>& bias,
                                 const std::vector<float>& norm) {
            for (int64_t i = 0; i < head_ && !bias.empty(); ++i) x[i] += bias[static_cast<size_t>(head * head_ + i)];
            if (!norm.empty()) ops_.rms_norm(x, norm.data(), head_, spec_.epsilon, x);
            if (angles != nullptr) ops_.rotate(x, angles + r * 2 * half, angles + (r * 2 + 1) * half, half);
        };
        for (int64_t h = 0; h < spec_.heads; ++h) {
            float* x = queries_ + (r * spec_.heads + h) * head_;
            prepare(x, h, block.q_bias, block.q_norm);
            for (int64_t i = 0; i < head_; ++i) x[i] *= spec_.softmax_scale;
            if (!codes_) continue;
            float* turned = hadamard_ + r * padded_;
            for (int64_t i = 0; i < padded_; ++i) turned[i] = i < head_ ? x[i] : 0;
            ops_.hadamard(turned, head_);
            const int64_t at = r * spec_.heads + h;
            rounded_[at] = ops_.round_query(turned, padded_, digits_ + at * 2 * padded_);
        }
        const int32_t position = step_.positions[r];
        const int32_t page = pages_of(b, step_.sequences[r])[position / PAGE];
        for (int64_t h = 0; h < spec_.kv_heads; ++h) {
            float *key = keys_ + (r * spec_.kv_heads + h) * head_, *value = values_ + (r * spec_.kv_heads + h) * head_;
            prepare(key, h, block.k_bias, block.k_norm);
            for (int64_t i = 0; i < head_ && !block.v_bias.empty(); ++i)
                value[i] += block.v_bias[static_cast<size_t>(h * head_ + i)];
            subtract_centre(centres(block, b, step_.sequences[r], h), position, key, head_);
            if (codes_) {
                ops_.hadamard(key, head_);
                ops_.hadamard(value, head_);
            }
            ops_.store(cache_.format(), cache_.page(page, static_cast<int64_t>(b), h), position % PAGE, key, value);
        }
    }

    // What is subtracted from a KV head's keys of a sequence.
    Centres centres(const BlockSpec& block, size_t b, int32_t sequence, int64_t h) const {
        Centres made;
        const float* bias = block.k_bias.empty() || !block.k_norm.empty() ? nullptr : block.k_bias.data() + h * head_;
        if (codes_) {
            made.first = bias;
            made.others = cache_.centre(pages_of(b, sequence)[0], static_cast<int64_t>(b), h);
        } else if (bias != nullptr && needs_centre(bias, head_)) made.first = made.others = bias;
        if (block.rope < 0) return made;
        const auto rope = static_cast<size_t>(block.rope);
        made.starts = starts_[rope].data();
        made.offsets = offsets_[rope].data();
        made.half = static_cast<int64_t>(spec_.ropes[rope].frequencies.size());
        return made;
    }

    // The centre of what follows the first page of a text, whose last row this is: the mean of the page's keys as they
    // are read, before their rotary embedding.
    void compute_centre(const BlockSpec& block, size_t b, int64_t r) const {
        const int32_t page = pages_of(b, step_.sequences[r])[0];
        float* key = hadamard_ + r * padded_;
        for (int64_t h = 0; h < spec_.kv_heads; ++h) {
            const Centres from = centres(block, b, step_.sequences[r], h);
            float* mean = cache_.centre(page, static_cast<int64_t>(b), h);
            for (int64_t i = 0; i < head_; ++i) mean[i] = 0;
            for (int64_t place = 0; place < PAGE; ++place) {
                ops_.load_key(cache_.format(), cache_.page(page, static_cast<int64_t>(b), h), place, key);
                ops_.hadamard(key, head_);
                for (int64_t i = 0, j = from.half; i < from.half; ++i, ++j) {
                    const float* angles = from.offsets + place;
                    const float cosine = angles[i * PAGE], sine = angles[j * PAGE], x = key[i], y = key[j];
                    mean[i] += x * cosine + y * sine;
                    mean[j] += y * cosine - x * sine;
                }
                for (int64_t i = 2 * from.half; i < head_; ++i) mean[i] += key[i];
            }
            const float scale = block.rope < 0 ? 1 : spec_.ropes[static_cast<size_t>(block.rope)].scale;
            for (int64_t i = 0; i < head_; ++i)
                mean[i] = mean[i] / (static_cast<float>(PAGE) * (i < 2 * from.half ? scale : 1)) +
                          (from.first == nullptr ? 0 : from.first[i]);
        }
    }

    void attend_split(const BlockSpec& block, size_t b, const Task& task, int64_t kv_head) const {
        const int64_t from = task.split * SPLIT;
        const int32_t* table = pages_of(b, step_.sequences[task.first]) + from / PAGE;
        const uint8_t* pages[SPLIT / PAGE + 1] = {};
        const int64_t left = step_.positions[task.last - 1] + 1 - from;
        for (int64_t p = 0; p <= SPLIT / PAGE; ++p)
            pages[p] = p * PAGE < left ? cache_.page(table[p], static_cast<int64_t>(b), kv_head) : pages[0];
        KvPages kv{cache_.format(), pages, from, spec_.attention_softcap,
                   centres(block, b, step_.sequences[task.first], kv_head)};
        if (kv.centres.half > 0) kv.centres.starts += from / PAGE * 2 * kv.centres.half;
        Query queries[QUERIES];
        int64_t count = 0;
        for (int64_t r = task.first; r < task.last; ++r) {
            const int64_t begin = std::max(begin_of(r, block.window), from);
            const int64_t end = std::min(int64_t(step_.positions[r]) + 1, from + SPLIT);
            if (begin >= end) continue;
            for (int64_t h = kv_head * group_; h < (kv_head + 1) * group_; ++h) {
                float* to = part_of(r, task.split, h);
                const int64_t at = r * spec_.heads + h;
                const RoundedQuery rounded = codes_ ? rounded_[at] : RoundedQuery();
                queries[count++] = {queries_ + at * head_, rounded, to + PART, to, to + 1, begin, end};
                if (count < QUERIES) continue;
                ops_.attend(kv, queries, count);
                count = 0;
            }
        }
        if (count > 0) ops_.attend(kv, queries, count);
    }

    void combine_splits(const BlockSpec& block, int64_t r) const {
        const int64_t first = begin_of(r, block.window) / SPLIT, last = step_.positions[r] / SPLIT;
        for (int64_t h = 0; h < spec_.heads; ++h) {
            float* to = attended_ + (r * spec_.heads + h) * head_;
            ops_.combine(part_of(r, first, h), spec_.heads * part(), last - first + 1, head_, to);
            if (codes_) ops_.hadamard(to, head_);
        }
    }

    // ---- the MLP

    void mlp(size_t b) {
        const BlockSpec& block = spec_.blocks[b];
        const DecoderWeights::Block& w = weights_.blocks[b];
        const float* from = normed(block.mlp_norm, [b] { return "the attention of block " + std::to_string(b); });
        multiply({{*w.gate, from, gate_}, {*w.up, from, up_}}, rows_, arithmetic_, memory_, threads_);
        const int64_t n = spec_.intermediate, pieces = (n + GATE_PIECE - 1) / GATE_PIECE, all = rows_ * pieces;
        parallel_for(all, piece_of(all, 1, rows_ * n * GATE_WORK, threads_), threads_, [&](int64_t begin, int64_t end) {
            for (int64_t u = begin; u < end; ++u) {
                const int64_t first = u % pieces * GATE_PIECE, count = std::min(GATE_PIECE, n - first);
                float *gate = gate_ + u / pieces * n + first, *up = up_ + u / pieces * n + first;
                for (int64_t i = 0; i < count && !block.gate_bias.empty(); ++i)
                    gate[i] += block.gate_bias[static_cast<size_t>(first + i)];
                for (int64_t i = 0; i < count && !block.up_bias.empty(); ++i)
                    up[i] += block.up_bias[static_cast<size_t>(first + i)];
                ops_.gate(spec_.activation, gate, up, count, gate);
            }
        });
        add(*w.down, gate_, block.down_bias, block.post_mlp_norm);
    }

    // ---- what both have

    // The residual, normed; `source` names what was added to it last.
    template <typename F> const float* normed(const std::vector<float>& norm, F&& source) {
        if (norm.empty()) return x_;
        std::atomic<bool> finite{true};
        by_rows(spec_.hidden * NORM_WORK, [&](int64_t r) {
            const float mean = ops_.rms_norm(x_ + r * spec_.hidden, norm.data(), spec_.hidden, spec_.epsilon,
                                             normed_ + r * spec_.hidden);
            if (!std::isfinite(mean)) finite = false;
        });
        if (!finite) throw NotFinite(source() + " gives NaN or Inf");
        return normed_;
    }

    // The residual, with a layer's outputs added.
    void add(const Layer& layer, const float* from, const std::vector<float>& bias, const std::vector<float>& norm) {
        if (bias.empty() && norm.empty())
            return multiply({{layer, from, x_, true}}, rows_, arithmetic_, memory_, threads_);
        multiply({{layer, from, normed_}}, rows_, arithmetic_, memory_, threads_);
        by_rows(spec_.hidden * NORM_WORK, [&](int64_t r) {
            float *y = normed_ + r * spec_.hidden, *x = x_ + r * spec_.hidden;
            for (size_t i = 0; i < bias.size(); ++i) y[i] += bias[i];
            if (!norm.empty()) ops_.rms_norm(y, norm.data(), spec_.hidden, spec_.epsilon, y);
            for (int64_t i = 0; i < spec_.hidden; ++i) x[i] += y[i];
        });
    }

    // Logits of the rows that are wanted.
    void finish() {
        const int64_t n = step_.wanted_count, hidden = spec_.hidden,
                      last = static_cast<int64_t>(spec_.blocks.size()) - 1;
        if (n == 0) return;
        float* states = memory_.take<float>(n * hidden);
        for (int64_t i = 0; i < n; ++i) {
            const float mean = ops_.rms_norm(x_ + step_.wanted[i] * hidden, spec_.final_norm.data(), hidden,
                                             spec_.epsilon, states + i * hidden);
            if (!std::isfinite(mean)) throw NotFinite("the MLP of block " + std::to_string(last) + " gives NaN or Inf");
        }
        multiply({{*weights_.head, states, step_.logits}}, n, arithmetic_, memory_, threads_);
        std::atomic<bool> finite{true};
        const int64_t all = n * spec_.vocabulary, pieces = (all + GATE_PIECE - 1) / GATE_PIECE;
        parallel_for(pieces, piece_of(pieces, 1, all, threads_), threads_, [&](int64_t begin, int64_t end) {
            float* x = step_.logits + begin * GATE_PIECE;
            const int64_t count = std::min(end * GATE_PIECE, all) - begin * GATE_PIECE;
            if (!all_finite(x, count)) finite = false;
            if (spec_.logit_softcap > 0) ops_.softcap(x, count, spec_.logit_softcap);
        });
        if (!finite) throw NotFinite("the head gives NaN or Inf");
    }

    static bool all_finite(const float* x, int64_t n) {
        constexpr uint32_t EXPONENT = 0x7f800000;
        uint32_t found = 0;
        for (int64_t i = 0; i < n; ++i) {
            uint32_t bits;
            std::memcpy(&bits, x + i, sizeof bits);
            found |= (bits & EXPONENT) == EXPONENT ? 1 : 0;
        }
        return found == 0;
    }

    // Multiply-adds that some work costs as much as, about.
    static constexpr int64_t ANGLE_WORK = 128, HEAD_WORK = 64, CENTRE_WORK = 4, NORM_WORK = 2, GATE_WORK = 16;
    static constexpr int64_t GATE_PIECE = 512; // numbers that a thread takes at a time, at least
    static constexpr int64_t QUERIES = 64;     // that are asked together, at most

    const DecoderSpec& spec_;
    const EngineOps& ops_;
    const DecoderWeights& weights_;
    const Step& step_;
    KvCache& cache_;
    const int threads_;
    const Arithmetic arithmetic_;
    Workspace& memory_;
    const std::vector<std::vector<float>>&offsets_, &starts_;
    const int64_t rows_;
    const bool codes_; // the cache holds codes
    const int64_t head_, padded_, group_;

    float* x_ = nullptr; // [rows, hidden]: the residual
    float *normed_ = nullptr, *attended_ = nullptr, *keys_ = nullptr, *values_ = nullptr, *queries_ = nullptr;
    float *hadamard_ = nullptr, *gate_ = nullptr, *up_ = nullptr, *parts_ = nullptr;
    int8_t* digits_ = nullptr;        // [rows, heads, 2, padded], of a cache of codes
    RoundedQuery* rounded_ = nullptr; // [rows, heads]
    std::vector<float*> angles_;      // of each rope: [rows, 2, half]
    std::vector<Task> tasks_;
    std::vector<Strip> strips_;
    std::vector<int64_t> parts_begin_, first_split_; // of each row: within its strip, and the split that is first there
    bool opens_ = false; // whether a row belongs to the first page of its text, with a cache of codes
};

} // namespace anybit
