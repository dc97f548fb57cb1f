// The greatest number of each row and its first place, for numbers as a model writes them.

#include <algorithm>
#include <cstdint>

#include "numbers.h"

namespace {

constexpr int64_t block = 2048;  // numbers that are read again to find the place

template <class T>
auto greatest(const T* row, int64_t size) {
    auto most = ordered(row[0]);
    for (int64_t i = 1; i < size; ++i) most = std::max(most, ordered(row[i]));
    return most;
}

template <class T>
int64_t place(const T* row, int64_t size) {
    int64_t best = 0;
    auto most = greatest(row, std::min(block, size));
    for (int64_t begin = block; begin < size; begin += block) {
        const auto found = greatest(row + begin, std::min(block, size - begin));
        if (found > most) {
            best = begin;
            most = found;
        }
    }
    while (ordered(row[best]) != most) ++best;
    return best;
}

template <class T>
void places(const void* numbers, int64_t rows, int64_t size, int64_t threads, int64_t* found) {
    const T* first = static_cast<const T*>(numbers);
#pragma omp parallel for num_threads(threads) if (rows >= 2 * threads)
    for (int64_t row = 0; row < rows; ++row) found[row] = place(first + row * size, size);
}

}  // namespace

// numbers: [rows, size], contiguous, none of them NaN. found: [rows].
extern "C" void argmax_float32(const void* numbers, int64_t rows, int64_t size, int64_t threads,
                               int64_t* found) {
    places<float>(numbers, rows, size, threads, found);
}
extern "C" void argmax_bfloat16(const void* numbers, int64_t rows, int64_t size, int64_t threads,
                                int64_t* found) {
    places<Bfloat16>(numbers, rows, size, threads, found);
}
