// The greatest number of each row and its first place, for numbers as a model writes them.

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

// Integers in the order of the floats that they are the bits of, 0 and -0 alike.
struct Bfloat16 {
    using Bits = int16_t;
    static Bits order(Bits bits) {
        const Bits ordered = bits ^ ((bits >> 15) & 0x7fff);
        return ordered + (ordered == -1);
    }
};
struct Float32 {
    using Bits = int32_t;
    static Bits order(Bits bits) {
        const Bits ordered = bits ^ ((bits >> 31) & 0x7fffffff);
        return ordered + (ordered == -1);
    }
};

constexpr int64_t block = 2048;  // numbers that are read again to find the place

template <class T>
typename T::Bits greatest(const typename T::Bits* row, int64_t size) {
    typename T::Bits most = T::order(row[0]);
    for (int64_t i = 1; i < size; ++i) most = std::max(most, T::order(row[i]));
    return most;
}

template <class T>
int64_t place(const typename T::Bits* row, int64_t size) {
    int64_t best = 0;
    typename T::Bits most = 0;
    for (int64_t begin = 0; begin < size; begin += block) {
        const auto found = greatest<T>(row + begin, std::min(block, size - begin));
        if (begin == 0 || found > most) {
            best = begin;
            most = found;
        }
    }
    while (T::order(row[best]) != most) ++best;
    return best;
}

template <class T>
void places(const void* numbers, int64_t rows, int64_t size, int64_t threads, int64_t* found) {
    const auto* first = static_cast<const typename T::Bits*>(numbers);
#pragma omp parallel for num_threads(threads) if (rows >= 2 * threads)
    for (int64_t row = 0; row < rows; ++row) found[row] = place<T>(first + row * size, size);
}

}  // namespace

// numbers: [rows, size], contiguous, none of them NaN. found: [rows].
extern "C" void argmax_float32(const void* numbers, int64_t rows, int64_t size, int64_t threads,
                               int64_t* found) {
    places<Float32>(numbers, rows, size, threads, found);
}
extern "C" void argmax_bfloat16(const void* numbers, int64_t rows, int64_t size, int64_t threads,
                                int64_t* found) {
    places<Bfloat16>(numbers, rows, size, threads, found);
}
