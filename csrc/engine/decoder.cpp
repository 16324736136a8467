#include "engine/decoder.h"

#include "engine/decoder_run.h"

#include <cmath>

namespace anybit {
namespace {

void check_size(const std::string& name, size_t size, int64_t expected, bool may_be_empty) {
    if (may_be_empty && size == 0) return;
    if (static_cast<int64_t>(size) != expected)
        refuse(name + " has " + std::to_string(size) + " numbers, expected " + std::to_string(expected));
}

void check_shape(const std::string& name, const SharedLayer& layer, int64_t out, int64_t in) {
    if (layer == nullptr) refuse(name + " is missing");
    if (layer->out() != out || layer->in() != in)
        refuse(name + " is " + std::to_string(layer->out()) + " x " + std::to_string(layer->in()) + ", expected " +
               std::to_string(out) + " x " + std::to_string(in));
}

void check_index(const char* name, int64_t row, int64_t value, int64_t end) {
    if (value < 0 || value >= end)
        refuse(std::string(name) + "[" + std::to_string(row) + "] is " + std::to_string(value) + ", expected 0 to " +
               std::to_string(end - 1));
}

} // namespace

void DecoderSpec::check() const {
    for (const auto& [name, size] :
         {std::pair("vocabulary", vocabulary), std::pair("hidden", hidden), std::pair("intermediate", intermediate),
          std::pair("heads", heads), std::pair("kv_heads", kv_heads), std::pair("head_size", head_size)})
        check_range(name, size, 1, int64_t(1) << 24);
    if (heads % kv_heads != 0)
        refuse(std::to_string(heads) + " heads are no multiple of " + std::to_string(kv_heads) + " kv_heads");
    if (blocks.empty()) refuse("the description has no blocks");
    for (const Rope& rope : ropes)
        if (rope.frequencies.empty() || static_cast<int64_t>(rope.frequencies.size()) * 2 > head_size)
            refuse("a rope of " + std::to_string(rope.frequencies.size()) + " frequencies, expected 1 to half of " +
                   std::to_string(head_size));
    check_size("final_norm", final_norm.size(), hidden, false);
    for (size_t i = 0; i < blocks.size(); ++i) {
        const BlockSpec& b = blocks[i];
        const std::string at = "block " + std::to_string(i) + ": ";
        check_range(at + "window", b.window, 0, MAX_SIZE);
        check_range(at + "rope", b.rope, -1, static_cast<int64_t>(ropes.size()) - 1);
        for (const auto* norm : {&b.attention_norm, &b.post_attention_norm, &b.mlp_norm, &b.post_mlp_norm})
            check_size(at + "a norm", norm->size(), hidden, true);
        for (const auto* norm : {&b.q_norm, &b.k_norm})
            check_size(at + "a norm of heads", norm->size(), head_size, true);
        check_size(at + "q_bias", b.q_bias.size(), heads * head_size, true);
        check_size(at + "k_bias", b.k_bias.size(), kv_heads * head_size, true);
        check_size(at + "v_bias", b.v_bias.size(), kv_heads * head_size, true);
        for (const auto* bias : {&b.o_bias, &b.down_bias})
            check_size(at + "o_bias or down_bias", bias->size(), hidden, true);
        for (const auto* bias : {&b.gate_bias, &b.up_bias})
            check_size(at + "gate_bias or up_bias", bias->size(), intermediate, true);
    }
}

Decoder::Decoder(DecoderSpec spec, bool int8_inputs, const EngineOps& ops)
    : spec_(std::move(spec)), int8_inputs_(int8_inputs), ops_(ops) {
    spec_.check();
    for (const Rope& rope : spec_.ropes) {
        const size_t half = rope.frequencies.size();
        std::vector<float> made(2 * half * PAGE);
        for (size_t i = 0; i < half; ++i)
            for (size_t place = 0; place < PAGE; ++place) {
                const float angle = static_cast<float>(place) * rope.frequencies[i];
                made[i * PAGE + place] = std::cos(angle);
                made[(i + half) * PAGE + place] = std::sin(angle);
            }
        offsets_.push_back(std::move(made));
    }
    starts_.resize(spec_.ropes.size());
}

// Have angles of so many pages.
void Decoder::reach(int64_t pages) {
    for (size_t r = 0; r < spec_.ropes.size(); ++r) {
        const Rope& rope = spec_.ropes[r];
        std::vector<float>& starts = starts_[r];
        const size_t numbers = 2 * rope.frequencies.size(), wanted = static_cast<size_t>(pages) * numbers;
        if (wanted > starts.capacity()) starts.reserve(std::max(wanted, 2 * starts.size()));
        while (starts.size() < wanted) {
            const auto first = static_cast<float>(starts.size() / numbers * PAGE);
            for (float frequency : rope.frequencies) starts.push_back(std::cos(first * frequency) * rope.scale);
            for (float frequency : rope.frequencies) starts.push_back(std::sin(first * frequency) * rope.scale);
        }
    }
}

size_t Decoder::add_level(DecoderWeights weights) {
    const int64_t own = spec_.heads * spec_.head_size, shared = spec_.kv_heads * spec_.head_size;
    check_shape("the embedding", weights.embedding, spec_.vocabulary, spec_.hidden);
    check_shape("the head", weights.head, spec_.vocabulary, spec_.hidden);
    if (!weights.embedding->has_rows())
        refuse("the embedding's rows cannot be looked up: it is stored in several tiles");
    if (weights.blocks.size() != spec_.blocks.size())
        refuse(std::to_string(weights.blocks.size()) + " blocks, expected " + std::to_string(spec_.blocks.size()));
    for (size_t i = 0; i < weights.blocks.size(); ++i) {
        const DecoderWeights::Block& b = weights.blocks[i];
        const std::string at = "block " + std::to_string(i) + ": ";
        check_shape(at + "q", b.q, own, spec_.hidden);
        check_shape(at + "k", b.k, shared, spec_.hidden);
        check_shape(at + "v", b.v, shared, spec_.hidden);
        check_shape(at + "o", b.o, spec_.hidden, own);
        check_shape(at + "gate", b.gate, spec_.intermediate, spec_.hidden);
        check_shape(at + "up", b.up, spec_.intermediate, spec_.hidden);
        check_shape(at + "down", b.down, spec_.hidden, spec_.intermediate);
    }
    const std::lock_guard<std::mutex> lock(alone_);
    levels_.push_back(std::move(weights));
    return levels_.size() - 1;
}

void Decoder::check(const Step& step, const KvCache& cache) const {
    if (cache.blocks() != static_cast<int64_t>(spec_.blocks.size()) || cache.kv_heads() != spec_.kv_heads ||
        cache.format().head_size != spec_.head_size)
        refuse("the KV-cache was made for another model");
    for (int64_t r = 0; r < step.rows; ++r) {
        check_index("tokens", r, step.tokens[r], spec_.vocabulary);
        check_index("positions", r, step.positions[r], step.row_pages * PAGE);
        check_index("sequences", r, step.sequences[r], step.sequences_count);
        const bool goes_on = r > 0 && step.sequences[r] == step.sequences[r - 1];
        if (!goes_on) {
            for (int64_t before = 0; before + 1 < r; ++before)
                if (step.sequences[before] == step.sequences[r])
                    refuse("rows of sequence " + std::to_string(step.sequences[r]) + " do not stand together");
        } else if (step.positions[r] != step.positions[r - 1] + 1)
            refuse("positions of sequence " + std::to_string(step.sequences[r]) + " do not follow one another");
        const int64_t pages = step.sequences[r] * step.row_pages;
        for (int64_t p = pages + (goes_on ? step.positions[r] / PAGE : 0); p <= pages + step.positions[r] / PAGE; ++p) {
            if (cache.pages(false) > 0) check_index("pages", p, step.pages[p], cache.pages(false));
            if (cache.pages(true) > 0) check_index("window_pages", p, step.window_pages[p], cache.pages(true));
        }
    }
    for (int64_t i = 0; i < step.wanted_count; ++i) check_index("wanted", i, step.wanted[i], step.rows);
}

void Decoder::step(const Step& step, size_t level, KvCache& cache, int threads) {
    const std::lock_guard<std::mutex> lock(alone_);
    if (level >= levels_.size())
        refuse("level " + std::to_string(level) + " is none of " + std::to_string(levels_.size()));
    check(step, cache);
    if (step.rows == 0) return;
    reach(*std::max_element(step.positions, step.positions + step.rows) / PAGE + 1);
    const Workspace::Frame frame(memory_);
    Run(*this, levels_[level], step, cache, threads).run();
}

} // namespace anybit
