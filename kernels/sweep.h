// sweep: visit elements 0 .. n-1, each once, N at a time where all arrays are aligned for it.
//
//     |. . .|====|====|====|====|. .|      . one element   ==== N elements, one access per array
//     0    head                tail  n
//
// The threads given by `lanes` share the work: group g belongs to thread g modulo their number
// (grid-stride), so any number of blocks is right. body(width, i) handles elements
// i .. i+width-1; `width` is a compile-time constant, N or 1. When the arrays do not come into
// alignment at the same element, head is n: all elements go one by one, still coalesced.
#pragma once
#include "numbers.h"

struct Lanes { int64 first, step; };
__device__ inline Lanes of_grid() {
    return {blockIdx.x * (int64)blockDim.x + threadIdx.x, gridDim.x * (int64)blockDim.x};
}
__device__ inline Lanes of_block() { return {(int64)threadIdx.x, (int64)blockDim.x}; }

template <int N> struct Width { __device__ constexpr operator int() const { return N; } };
template <int N, class T> struct alignas(N * sizeof(T)) Vector { T at[N]; };

template <int N, class T> __device__ inline Vector<N, T> load(Width<N>, const T* p) {
    return *reinterpret_cast<const Vector<N, T>*>(p);
}
template <int N, class T> __device__ inline void store(T* p, const Vector<N, T>& v) {
    *reinterpret_cast<Vector<N, T>*>(p) = v;
}

template <class T> __device__ inline int64 position(const T* p) {  // address in elements
    return (int64)(reinterpret_cast<unsigned long long>(p) / sizeof(T));
}
template <int N, class T, class... Rest>
__device__ inline int64 aligned_from(int64 n, const T* array, const Rest*... rest) {
    const int64 head = (N - position(array) % N) % N;
    const bool all = (true && ... && ((position(rest) + head) % N == 0));
    return all && head < n ? head : n;
}

template <int N, class Body, class... T>
__device__ inline void sweep(Lanes lanes, int64 n, Body body, const T*... arrays) {
    const int64 head = aligned_from<N>(n, arrays...), groups = (n - head) / N;
    const int64 tail = head + groups * N, singles = n - groups * N;
    for (int64 g = lanes.first; g < groups; g += lanes.step) body(Width<N>(), head + g * N);
    for (int64 s = lanes.first; s < singles; s += lanes.step)
        body(Width<1>(), s < head ? s : tail + (s - head));
}
