// few_heads.py in one pass: which drafted tokens some dropout head says, for one step on a CPU.
//
// The questions and their answers are those of few_heads.py, which says why they suffice; nodes are
// visited from the root in the order of what they may lead to. A token's rivals are found block by
// block: what a head's dropped dimensions took from a block's tokens lies between what the least
// and the greatest weights of the block in each of these dimensions would have taken, and hardly
// any block's greatest clean logit can make up for the difference. In the others a head's own
// logits are told of the tokens that could. Where rounding leaves a doubt, whole products decide: see the end.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../numbers.h"

namespace {

// To the nearest number of the model's dtype, ties to even.
inline float rounded(float x, const float*) { return x; }
inline float rounded(float x, const Bfloat16*) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits += 0x7fff + ((bits >> 16) & 1);
    bits &= 0xffff0000;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

inline float epsilon(const float*) { return 0x1p-23f; }
inline float epsilon(const Bfloat16*) { return 0x1p-7f; }

}  // namespace

// Mirrored by few_heads_native.py. All tensors are contiguous.
struct Step {
    int64_t rows, nodes, parents, heads, size, vocab;
    int64_t mask_nodes;  // masks a row: one for each node, or one for all
    const void* weight;  // [vocab, size]
    const void* least;     // [size, blocks], of the weights of each block in each dimension
    const void* greatest;  // [size, blocks]
    const float* bias;     // [vocab], or null
    const void* logits;   // [rows, nodes, vocab], clean
    const void* hidden;   // [rows, nodes, size], the LM head's input
    const float* uniforms;      // [rows, mask_nodes, heads, size]
    const float* rates;         // [parents, heads]
    const int64_t* parent_row;  // [parents], row by row
    const int64_t* parent_node;
    const int64_t* slot;    // [rows, nodes], which of the parents each node's is
    const int64_t* above;   // [rows, nodes], the parent node, -1 where there is none
    const int64_t* tokens;  // [rows, nodes]
    const int64_t* choice;  // [rows, nodes], the clean head's
    const uint8_t* also;      // [rows, nodes], accepted without a look, or null
    const uint8_t* eligible;  // [rows, nodes], null: look at every node
    uint8_t* accepted;        // [rows, nodes], the answer
};

namespace {

constexpr int64_t block = 32;  // tokens; target.py's BLOCK. The last of a vocabulary may have fewer

// Tokens that may be looked at for one head of one node: beyond it a whole product, which all of a
// step's heads share, is cheaper.
constexpr int64_t most_rivals = 1000;

enum class Verdict { loses, wins, doubtful };

template <class T>
class Looker {
public:
    explicit Looker(const Step& step)
        : s(step),
          inputs(step.parents * step.heads * step.size),
          dropped(step.parents * step.heads),
          scales(step.parents * step.heads),
          blocks((step.vocab + block - 1) / block),
          peaks(step.parents),
          reach(blocks),
          values(step.rows * step.nodes * step.heads),
          maybe(step.rows * step.nodes * step.heads, 0) {}

    // Whether every verdict is beyond doubt.
    bool run() {
        disturb();
        compete();
        for (int64_t row = 0; row < s.rows; ++row) {
            if (s.eligible ? !descend(row) : !look_at_all(row)) return false;
        }
        return true;
    }

private:
    const Step& s;
    std::vector<float> inputs;                 // [parents, heads, size], disturbed
    std::vector<std::vector<int>> dropped;     // [parents, heads], dimensions
    std::vector<float> scales;                 // [parents, heads], 1 / (1 - p)
    int64_t blocks;
    std::vector<std::vector<float>> peaks;     // [parents, blocks], made when asked for
    std::vector<float> reach;                  // [blocks], of the (node, head) that is looked at
    std::vector<float> values;                 // [rows, nodes, heads], heads' logits of the node
    std::vector<uint8_t> maybe;                // [rows, nodes, heads]: none nearby is likelier

    static const T* typed(const void* data) { return static_cast<const T*>(data); }
    static float at_least_one(float x) { return std::max(std::fabs(x), 1.0f); }

    int64_t at(int64_t parent) const { return s.parent_row[parent] * s.nodes + s.parent_node[parent]; }

    // The heads' inputs (eq. 2), as torch rounds them.
    void disturb() {
        for (int64_t parent = 0; parent < s.parents; ++parent) {
            const T* hidden = typed(s.hidden) + at(parent) * s.size;
            const int64_t mask = s.parent_row[parent] * s.mask_nodes +
                                 (s.mask_nodes > 1 ? s.parent_node[parent] : 0);
            for (int64_t head = 0; head < s.heads; ++head) {
                const int64_t which = parent * s.heads + head;
                const float rate = s.rates[which];
                const float scale = rounded(1.0f / (1.0f - rate), hidden);
                const float* uniform = s.uniforms + (mask * s.heads + head) * s.size;
                float* input = inputs.data() + which * s.size;
                scales[which] = scale;
                for (int64_t d = 0; d < s.size; ++d) {
                    input[d] = uniform[d] < rate ? 0.0f : rounded(wide(hidden[d]) * scale, hidden);
                }
                // No branch: which dimensions are dropped, no processor can guess.
                std::vector<int>& own = dropped[which];
                own.resize(s.size);
                int64_t count = 0;
                for (int64_t d = 0; d < s.size; ++d) {
                    own[count] = static_cast<int>(d);
                    count += uniform[d] < rate;
                }
                own.resize(count);
            }
        }
    }

    // A head's logit of one token, before it is rounded.
    float logit(const float* input, int64_t token) const {
        constexpr int lanes = 32;
        const T* weight = typed(s.weight) + token * s.size;
        float sums[lanes] = {};
        int64_t d = 0;
        for (; d + lanes <= s.size; d += lanes) {
            for (int lane = 0; lane < lanes; ++lane) {
                sums[lane] += input[d + lane] * wide(weight[d + lane]);
            }
        }
        float sum = s.bias ? s.bias[token] : 0.0f;
        for (; d < s.size; ++d) sum += input[d] * wide(weight[d]);
        for (float each : sums) sum += each;
        return sum;
    }

    // Each node against its siblings and the clean argmax.
    void compete() {
        std::vector<float> best(s.parents * s.heads);
        for (int64_t parent = 0; parent < s.parents; ++parent) {
            for (int64_t head = 0; head < s.heads; ++head) {
                const int64_t which = parent * s.heads + head;
                best[which] = logit(inputs.data() + which * s.size, s.choice[at(parent)]);
            }
        }
        each_child([&](int64_t node, int64_t parent) {
            for (int64_t head = 0; head < s.heads; ++head) {
                const int64_t which = parent * s.heads + head;
                const float value = logit(inputs.data() + which * s.size, s.tokens[node]);
                values[node * s.heads + head] = value;
                best[which] = std::max(best[which], value);
            }
        });
        each_child([&](int64_t node, int64_t parent) {
            bool accepted = s.also && s.also[node];
            for (int64_t head = 0; head < s.heads; ++head) {
                const int64_t which = parent * s.heads + head;
                if (s.rates[which] == 0.0f) {  // such a head says what the target says
                    accepted |= s.tokens[node] == s.choice[at(parent)];
                    continue;
                }
                const float slack = 2 * epsilon(typed(s.weight)) * at_least_one(best[which]);
                maybe[node * s.heads + head] = values[node * s.heads + head] >= best[which] - slack;
            }
            s.accepted[node] = accepted;
        });
    }

    template <class Work>
    void each_child(const Work& work) const {
        for (int64_t node = 0; node < s.rows * s.nodes; ++node) {
            if (s.above[node] >= 0) work(node, s.slot[node]);
        }
    }

    // The greatest clean logit of each block.
    const std::vector<float>& peaks_of(int64_t parent) {
        std::vector<float>& found = peaks[parent];
        if (!found.empty()) return found;
        const T* clean = typed(s.logits) + at(parent) * s.vocab;
        found.resize(blocks);
        for (int64_t number = 0; number < blocks; ++number) {
            const int64_t begin = number * block, length = std::min(block, s.vocab - begin);
            found[number] = length == block ? greatest_of_block(clean + begin)
                                            : greatest(clean + begin, length);
        }
        return found;
    }

    static float greatest(const T* numbers, int64_t length) {
        auto most = ordered(numbers[0]);
        for (int64_t i = 1; i < length; ++i) most = std::max(most, ordered(numbers[i]));
        return disordered(most);
    }

    // The same by whole vectors, of which each half is laid upon the other.
    static float greatest_of_block(const T* numbers) {
#ifdef __clang__
        return greatest(numbers, block);  // there the plain loop becomes the same
#else
        using Bits = decltype(ordered(*numbers));
        typedef Bits Vector __attribute__((vector_size(block * sizeof(Bits))));
        Vector most;
        std::memcpy(&most, numbers, sizeof most);
        constexpr Bits sign = 8 * sizeof(Bits) - 1, others = static_cast<Bits>(~(Bits{1} << sign));
        most ^= (most >> sign) & others;
        Vector place;
        for (int64_t i = 0; i < block; ++i) place[i] = static_cast<Bits>(i);
        for (Bits half = block / 2; half > 0; half /= 2) {
            const Vector turned = __builtin_shuffle(most, place ^ half);
            most = most > turned ? most : turned;
        }
        return disordered(static_cast<Bits>(most[0]));
#endif
    }

    // Whether a head's logit of a token beats the whole vocabulary.
    Verdict beats_all(int64_t node, int64_t head) {
        const int64_t parent = s.slot[node], which = parent * s.heads + head;
        const int64_t token = s.tokens[node];
        const T* hidden = typed(s.hidden) + at(parent) * s.size;
        const T* clean = typed(s.logits) + at(parent) * s.vocab;
        const float* input = inputs.data() + which * s.size;
        const float scale = scales[which], value = values[node * s.heads + head];
        const float slack = 3 * epsilon(clean) + s.size * 0x1p-23f;
        const float bar = (value - slack * at_least_one(value)) / scale;

        // (1 - p) times the heads' logits are the clean ones less what was dropped.
        const std::vector<float>& highest = peaks_of(parent);
        reach = highest;
        for (const int d : dropped[which]) {
            const float factor = -wide(hidden[d]);
            const T* extreme = typed(factor < 0 ? s.least : s.greatest) + d * blocks;
            for (int64_t number = 0; number < blocks; ++number) {
                const float most = factor * wide(extreme[number]);
                reach[number] += most + 0x1p-20f * std::fabs(most);
            }
        }
        for (int64_t number = 0; number < blocks; ++number) {
            reach[number] += most_of_bias(number, scale);
        }

        const float order = std::sqrt(static_cast<float>(s.size)) * 0x1p-22f;
        const float room = order * at_least_one(value);
        const float low = rounded(value - room, clean), high = rounded(value + room, clean);
        bool doubtful = false;
        int64_t rivals = 0;
        for (int64_t number = 0; number < blocks; ++number) {
            if (reach[number] < bar) continue;
            // What this block's greatest clean logit lacks, none of its tokens has.
            const float least = bar - (reach[number] - highest[number]);
            const int64_t begin = number * block, end = std::min(begin + block, s.vocab);
            for (int64_t rival = begin; rival < end; ++rival) {
                if (wide(clean[rival]) < least || rival == token) continue;
                if (++rivals > most_rivals) return Verdict::doubtful;
                const float theirs = logit(input, rival), their_room = order * at_least_one(theirs);
                const float worst = rounded(theirs - their_room, clean);
                const float best = rounded(theirs + their_room, clean);
                if (worst > high || (worst == high && rival < token)) return Verdict::loses;
                doubtful |= low < best || (low == best && rival < token);
            }
        }
        return doubtful ? Verdict::doubtful : Verdict::wins;
    }

    // A bias is not scaled: what it adds to (1 - p) times a head's logits is less than what it adds
    // to the clean ones. The most that this gives a token of the block.
    float most_of_bias(int64_t number, float scale) const {
        if (!s.bias) return 0.0f;
        const float* own = s.bias + number * block;
        const int64_t length = std::min(block, s.vocab - number * block);
        return *std::min_element(own, own + length) * (1.0f / scale - 1.0f);
    }

    bool hopeful(int64_t node) const {
        const uint8_t* own = maybe.data() + node * s.heads;
        return std::any_of(own, own + s.heads, [](uint8_t each) { return each; });
    }

    // Sets accepted[node]; false if rounding leaves it open.
    bool look(int64_t node) {
        if (s.accepted[node]) return true;
        std::vector<int64_t> order;
        const float* own = values.data() + node * s.heads;
        for (int64_t head = 0; head < s.heads; ++head) {
            if (maybe[node * s.heads + head]) order.push_back(head);
        }
        std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return own[a] > own[b]; });
        bool open = false;
        for (int64_t head : order) {
            const Verdict verdict = beats_all(node, head);
            if (verdict == Verdict::wins) {
                s.accepted[node] = 1;
                return true;
            }
            open |= verdict == Verdict::doubtful;
        }
        return !open;
    }

    bool look_at_all(int64_t row) {
        for (int64_t node = row * s.nodes; node < (row + 1) * s.nodes; ++node) {
            if (s.above[node] >= 0 && !look(node)) return false;
        }
        return true;
    }

    // Looks at all nodes that a longest path of accepted eligible nodes may hold.
    bool descend(int64_t row) {
        const int64_t first = row * s.nodes;
        std::vector<std::vector<int64_t>> children(s.nodes);
        std::vector<int64_t> tail(s.nodes, 0);  // nodes from here down that may be accepted
        const auto may = [&](int64_t node) {
            return s.eligible[first + node] && (s.accepted[first + node] || hopeful(first + node));
        };
        for (int64_t node = 0; node < s.nodes; ++node) {
            int64_t length = 0;
            for (int64_t up = node; s.above[first + up] >= 0 && may(up); up = s.above[first + up]) {
                tail[up] = std::max(tail[up], ++length);
            }
            if (length) children[s.above[first + node]].push_back(node);
        }
        for (auto& each : children) {
            std::stable_sort(each.begin(), each.end(),
                             [&](int64_t a, int64_t b) { return tail[a] > tail[b]; });
        }
        int64_t longest = 0;
        return walk(first, 0, 0, children, tail, longest);
    }

    bool walk(int64_t first, int64_t node, int64_t depth,
              const std::vector<std::vector<int64_t>>& children,
              const std::vector<int64_t>& tail, int64_t& longest) {
        longest = std::max(longest, depth);
        for (int64_t child : children[node]) {
            // An equally long path counts: which one is kept is decided by the draft's scores.
            if (depth + tail[child] < longest) break;
            if (!look(first + child)) return false;
            if (s.accepted[first + child] &&
                !walk(first, child, depth + 1, children, tail, longest)) {
                return false;
            }
        }
        return true;
    }
};

}  // namespace

// 1 where all verdicts are those of whole products; 0 where one could not be told without them, and
// then `accepted` holds nothing of use.
extern "C" int few_heads_float32(const Step* step) { return Looker<float>(*step).run(); }
extern "C" int few_heads_bfloat16(const Step* step) { return Looker<Bfloat16>(*step).run(); }
