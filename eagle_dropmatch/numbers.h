// The numbers that models are made of, for all C++ here.

#pragma once

#include <cstdint>
#include <cstring>

struct Bfloat16 {
    uint16_t bits;
};

inline float wide(float x) { return x; }
inline float wide(Bfloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

// Integers in the order of the numbers, 0 and -0 alike, whose maximum the compiler finds by whole
// vectors; and back.
inline int32_t ordered(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits ^= (bits >> 31) & 0x7fffffff;
    return bits + (bits == -1);
}
inline int16_t ordered(Bfloat16 x) {
    int16_t bits = static_cast<int16_t>(x.bits);
    bits ^= (bits >> 15) & 0x7fff;
    return bits + (bits == -1);
}
inline float disordered(int32_t order) {
    order ^= (order >> 31) & 0x7fffffff;
    float out;
    std::memcpy(&out, &order, sizeof out);
    return out;
}
inline float disordered(int16_t order) {
    order ^= (order >> 15) & 0x7fff;
    return wide(Bfloat16{static_cast<uint16_t>(order)});
}
