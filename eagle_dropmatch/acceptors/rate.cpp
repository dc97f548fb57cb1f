// heads.py's p_drop for one prompt in one pass: the tokens that compete at each position, what each
// dimension adds to their logits, and the bisection under fixed masks.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../numbers.h"

namespace {

constexpr int64_t members = 32;     // tokens of a group, whose greatest logit is looked at first
constexpr int64_t candidates = 32;  // tokens that compete at a position, heads.py's

}  // namespace

// Mirrored by rate_native.py. All tensors are contiguous.
struct Prompt {
    int64_t positions, heads, size, vocab, trials, threads;
    const void* logits;     // [positions, vocab], clean
    const void* hidden;     // [positions, size], the LM head's input
    const void* weight;     // [vocab, size]
    const float* bias;      // [vocab], or null
    const float* uniforms;  // [positions, heads, size]
    float agreement, ceiling;
};

namespace {

template <class T>
class Solver {
public:
    explicit Solver(const Prompt& prompt)
        : s(prompt),
          parts(s.positions * s.size * candidates),
          whole(s.positions * candidates),
          offset(s.positions * candidates, 0.0f) {}

    float run() {
#pragma omp parallel for num_threads(s.threads)
        for (int64_t position = 0; position < s.positions; ++position) prepare(position);
        if (share(s.ceiling) >= s.agreement) return s.ceiling;
        float low = 0.0f, high = s.ceiling;
        for (int64_t trial = 0; trial < s.trials; ++trial) {
            const float middle = (low + high) / 2;
            (share(middle) >= s.agreement ? low : high) = middle;
        }
        return low;
    }

private:
    const Prompt& s;
    std::vector<float> parts;   // [positions, size, candidates], what a dimension adds to a logit
    std::vector<float> whole;   // [positions, candidates], their sums
    std::vector<float> offset;  // [positions, candidates], the bias

    static const T* typed(const void* data) { return static_cast<const T*>(data); }

    void prepare(int64_t position) {
        std::vector<int64_t> ids = likeliest(typed(s.logits) + position * s.vocab);
        const T* hidden = typed(s.hidden) + position * s.size;
        const T* rows[candidates];
        float* sums = whole.data() + position * candidates;
        for (int64_t c = 0; c < candidates; ++c) {
            // A vocabulary of fewer tokens: its last one stands again where there is none.
            const int64_t id = ids[std::min<int64_t>(c, ids.size() - 1)];
            rows[c] = typed(s.weight) + id * s.size;
            if (s.bias) offset[position * candidates + c] = s.bias[id];
            sums[c] = 0.0f;
        }
        float* own = parts.data() + position * s.size * candidates;
        for (int64_t d = 0; d < s.size; ++d, own += candidates) {
            const float factor = wide(hidden[d]);
            for (int64_t c = 0; c < candidates; ++c) {
                own[c] = factor * wide(rows[c][d]);
                sums[c] += own[c];
            }
        }
    }

    // The tokens of the greatest logits, best first, the lower id on ties.
    std::vector<int64_t> likeliest(const T* logits) const {
        // A group holds every so manieth token, which compares whole vectors.
        const int64_t groups = (s.vocab + members - 1) / members;
        std::vector<float> peaks(groups, -INFINITY);
        for (int64_t begin = 0; begin < s.vocab; begin += groups) {
            const T* own = logits + begin;
            const int64_t length = std::min(groups, s.vocab - begin);
            for (int64_t number = 0; number < length; ++number) {
                peaks[number] = std::max(peaks[number], wide(own[number]));
            }
        }
        const int64_t wanted = std::min(candidates, s.vocab);
        // So many groups reach this, and so do as many tokens.
        float bar = -INFINITY;
        if (wanted <= groups) {
            std::vector<float> ordered = peaks;
            const auto last = ordered.begin() + wanted - 1;
            std::nth_element(ordered.begin(), last, ordered.end(), std::greater<float>());
            bar = *last;
        }
        std::vector<int64_t> found;
        for (int64_t number = 0; number < groups; ++number) {
            if (peaks[number] < bar) continue;
            for (int64_t v = number; v < s.vocab; v += groups) {
                if (wide(logits[v]) >= bar) found.push_back(v);
            }
        }
        const auto before = [&](int64_t a, int64_t b) {
            const float x = wide(logits[a]), y = wide(logits[b]);
            return x > y || (x == y && a < b);
        };
        std::partial_sort(found.begin(), found.begin() + wanted, found.end(), before);
        found.resize(wanted);
        return found;
    }

    // Of all (position, head) pairs, those whose head picks the clean argmax.
    float share(float rate) const {
        int64_t agreeing = 0;
#pragma omp parallel for num_threads(s.threads) reduction(+ : agreeing)
        for (int64_t position = 0; position < s.positions; ++position) {
            for (int64_t head = 0; head < s.heads; ++head) {
                agreeing += agrees(position, position * s.heads + head, rate);
            }
        }
        return static_cast<float>(agreeing) / (s.positions * s.heads);
    }

    bool agrees(int64_t position, int64_t pair, float rate) const {
        const float* uniform = s.uniforms + pair * s.size;
        const float* own = parts.data() + position * s.size * candidates;
        float lost[candidates] = {};
        for (int64_t d = 0; d < s.size; ++d) {
            if (!(uniform[d] < rate)) continue;
            const float* part = own + d * candidates;
            for (int64_t c = 0; c < candidates; ++c) lost[c] += part[c];
        }
        const float* sums = whole.data() + position * candidates;
        const float* shift = offset.data() + position * candidates;
        const float best = (sums[0] - lost[0]) / (1 - rate) + shift[0];
        for (int64_t c = 1; c < candidates; ++c) {
            if ((sums[c] - lost[c]) / (1 - rate) + shift[c] > best) return false;
        }
        return true;
    }
};

}  // namespace

extern "C" float rate_float32(const Prompt* prompt) { return Solver<float>(*prompt).run(); }
extern "C" float rate_bfloat16(const Prompt* prompt) { return Solver<Bfloat16>(*prompt).run(); }
