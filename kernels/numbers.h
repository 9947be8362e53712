// The number types of the buffers, float16 and bfloat16 as bare 16-bit words, so that no CUDA
// header is needed. Rounding is to nearest, ties to even; beyond the largest value to infinity;
// subnormals are kept; NaN stays NaN (which NaN is not promised).
#pragma once
typedef long long int64;  // offsets are 64-bit everywhere

#ifndef __CUDACC__
#include "host.h"
#else
__device__ inline unsigned short half_bits(float x) {
    unsigned short h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
}
__device__ inline float half_value(unsigned short h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
}
#endif

struct float16 { unsigned short bits; };
struct bfloat16 { unsigned short bits; };

template <class T> struct Number {  // float, double, int, long long: themselves
    __device__ static T value(T x) { return x; }
    template <class X> __device__ static T rounded(X x) { return (T)x; }
};
template <> struct Number<float16> {
    __device__ static float value(float16 x) { return half_value(x.bits); }
    __device__ static float16 rounded(float x) { return {half_bits(x)}; }
};
template <> struct Number<bfloat16> {
    __device__ static float value(bfloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }
    __device__ static bfloat16 rounded(float x) {
        const unsigned u = __float_as_uint(x);
        if ((u & 0x7fffffffu) > 0x7f800000u) return {(unsigned short)(u >> 16 | 0x40u)};  // NaN
        return {(unsigned short)((u + 0x7fffu + (u >> 16 & 1u)) >> 16)};
    }
};
template <class T> __device__ inline auto value(T x) { return Number<T>::value(x); }
template <class T, class X> __device__ inline T rounded(X x) { return Number<T>::rounded(x); }
