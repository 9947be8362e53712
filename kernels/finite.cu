// *overflow = 1 if any of n values is infinite or NaN, else it stays as it was (the caller clears
// it). Run on the sum, the answer is the same on all ranks, since the sum's bits are.
#include "sweep.h"

__device__ inline bool finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

template <class T> __device__ inline void find(int* overflow, const T* values, int64 n) {
    sweep<16 / sizeof(T)>(of_grid(), n, [=](auto width, int64 i) {
        const auto x = load(width, values + i);
        bool all = true;
        for (int k = 0; k < width; ++k) all = all && finite(value(x.at[k]));
        if (!all) *overflow = 1;  // every thread that writes writes the same
    }, values);
}

#define FINITE(name, T) \
    extern "C" __global__ void finite_##name(int* overflow, const T* values, int64 n) { \
        find(overflow, values, n); \
    }
FINITE(float32, float)
FINITE(float16, float16)
FINITE(bfloat16, bfloat16)
