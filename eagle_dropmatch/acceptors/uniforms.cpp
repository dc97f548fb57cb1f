// torch's uniform_ on a CPU, number for number: the Mersenne Twister (MT19937), of whose outputs the
// lower 24 bits make a float. torch draws one number after the other; whole rounds are vectors.

#include <algorithm>
#include <cstdint>

namespace {

constexpr int size = 624, ahead = 397;

class Twister {
public:
    explicit Twister(uint32_t seed) {
        state[0] = seed;
        for (int i = 1; i < size; ++i) {
            state[i] = 1812433253u * (state[i - 1] ^ (state[i - 1] >> 30)) + i;
        }
    }

    void fill(float* out, int64_t count) {
        for (int64_t begin = 0; begin < count; begin += size) {
            turn();
            const int64_t some = std::min<int64_t>(size, count - begin);
            for (int64_t i = 0; i < some; ++i) {
                uint32_t y = state[i];
                y ^= y >> 11;
                y ^= (y << 7) & 0x9d2c5680u;
                y ^= (y << 15) & 0xefc60000u;
                y ^= y >> 18;
                out[begin + i] = static_cast<float>(static_cast<int32_t>(y & 0xffffffu)) * 0x1p-24f;
            }
        }
    }

private:
    uint32_t state[size];

    static uint32_t mixed(uint32_t high, uint32_t low) {
        const uint32_t joined = (high & 0x80000000u) | (low & 0x7fffffffu);
        return (joined >> 1) ^ (low & 1 ? 0x9908b0dfu : 0);
    }

    void turn() {
        for (int i = 0; i < size - ahead; ++i) {
            state[i] = state[i + ahead] ^ mixed(state[i], state[i + 1]);
        }
        for (int i = size - ahead; i < size - 1; ++i) {
            state[i] = state[i + ahead - size] ^ mixed(state[i], state[i + 1]);
        }
        state[size - 1] = state[ahead - 1] ^ mixed(state[size - 1], state[0]);
    }
};

}  // namespace

// out: [rows, count], each row by a generator of its own seed.
extern "C" void uniforms_float32(const int64_t* seeds, int64_t rows, int64_t count, int64_t threads,
                                 float* out) {
#pragma omp parallel for num_threads(threads) if (rows >= 2 * threads)
    for (int64_t row = 0; row < rows; ++row) {
        Twister(static_cast<uint32_t>(seeds[row])).fill(out + row * count, count);
    }
}
