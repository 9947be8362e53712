// The host's stand-in for CUDA: with it, g++ compiles the same .cu files and a test plays every
// thread of every block. place() says which thread the calling host thread is; a kernel with
// barriers needs one host thread per device thread of the block, the others can be looped over.
#pragma once
#include <cmath>
#include <cstring>
#include <pthread.h>
#define __global__
#define __device__
#define __shared__ static

struct Place { unsigned x; };
static Place gridDim, blockDim;
static thread_local Place blockIdx, threadIdx;
static pthread_barrier_t host_barrier;

extern "C" void grid(unsigned blocks, unsigned threads) {  // call before place()
    gridDim.x = blocks, blockDim.x = threads;
    pthread_barrier_init(&host_barrier, nullptr, threads);
}
extern "C" void place(unsigned block, unsigned thread) { blockIdx.x = block, threadIdx.x = thread; }
inline void __syncthreads() { pthread_barrier_wait(&host_barrier); }

template <class To, class From> To same_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps their number");
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}
inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
inline float __uint_as_float(unsigned u) { return same_bits<float>(u); }
inline unsigned short half_bits(float x) { return same_bits<unsigned short>((_Float16)x); }
inline float half_value(unsigned short h) { return (float)same_bits<_Float16>(h); }
