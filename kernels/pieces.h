// A list of tensors and one flat buffer, cut into pieces of bounded length, each inside one
// tensor; one block works on one piece, so 161 tensors of 64 to 2.4 million elements keep every
// multiprocessor busy. refimpl/kernels.py makes the table.
//
//     tensor 0          tensor 1                            tensors[t] + offset
//     |-p0-|-p1-|p2|    |-p3-|-p4|                               |
//     |-p0-|-p1-|p2|-p3-|-p4|          flat buffer          flat + start
#pragma once
#include "sweep.h"

struct Piece {
    int64 start, offset;  // first element: in the flat buffer, in its tensor
    int tensor, length;
};

// base + i, behind a cast: with plain pointer arithmetic NVRTC 13 splits the vector stores to it.
template <class T> __device__ inline T* part(T* base, int64 i) {
    return reinterpret_cast<T*>(reinterpret_cast<unsigned long long>(base) + i * sizeof(T));
}

template <class Work>
__device__ inline void for_my_pieces(const Piece* pieces, int64 count, Work work) {
    for (int64 p = blockIdx.x; p < count; p += gridDim.x) work(pieces[p], p);
}

// The sum of x over the threads of the block, a binary tree; blockDim.x is a power of two <= 256.
__device__ inline double block_sum(double x) {
    __shared__ double sums[256];
    sums[threadIdx.x] = x;
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
    const double sum = sums[0];
    __syncthreads();  // sums may be written again only after all have read
    return sum;
}
