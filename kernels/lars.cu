// LARS: the trust ratio of each tensor, from the norms of its weights and of its gradient.
//
//   lars_norms   sums[2p], sums[2p+1] = sum of w^2 and of g^2 over piece p, in float64
//   lars_ratio   ratio[t] from the sums of pieces first[t] .. first[t+1]-1, added in float64 and in
//                a fixed order: launched with 256 threads, the bits do not depend on the grid
//
//   NNL (nnabla's Lars)   c|w| / (|g| + decay|w|), that denominator plus eps only where it is below
//                         eps; ratio 1 where |w| < eps
//   TF  (contrib, MLPerf) c|w| / (|g| + decay|w| + eps); ratio 1 where a norm is 0
//
// decay is per tensor. A tensor with adapt 0 (bias, batch norm) has ratio 1. |.| is the Euclidean
// norm in float64: no norm of float32 values can overflow or vanish; ratio is rounded to float32.
#include "pieces.h"

extern "C" __global__ void lars_norms_float32(double* sums, const float* const* weights,
                                              const float* gradient, const Piece* pieces,
                                              int64 count) {
    for_my_pieces(pieces, count, [=](Piece piece, int64 p) {
        const float* w = part(weights[piece.tensor], piece.offset);
        const float* g = part(gradient, piece.start);
        double ww = 0, gg = 0;
        sweep<4>(of_block(), piece.length, [=, &ww, &gg](auto width, int64 i) {
            const auto x = load(width, w + i);
            const auto y = load(width, g + i);
            for (int k = 0; k < width; ++k) {
                const double a = x.at[k], b = y.at[k];
                ww += a * a;
                gg += b * b;
            }
        }, w, g);
        ww = block_sum(ww);
        gg = block_sum(gg);
        if (threadIdx.x == 0) sums[2 * p] = ww, sums[2 * p + 1] = gg;
    });
}

template <bool NNL> __device__ inline double trust(double w, double g, double decay, double c,
                                                   double eps) {
    const double below = g + decay * w;
    if (NNL) return w < eps ? 1 : c * w / (below < eps ? below + eps : below);
    return w == 0 || g == 0 ? 1 : c * w / (below + eps);
}

template <bool NNL>
__device__ inline void ratios(float* ratio, const double* sums, const int64* first,
                              const float* decay, const unsigned char* adapt, int64 tensors,
                              float coefficient, float eps) {
    for (int64 t = blockIdx.x; t < tensors; t += gridDim.x) {
        double ww = 0, gg = 0;
        for (int64 p = first[t] + threadIdx.x; p < first[t + 1]; p += blockDim.x)
            ww += sums[2 * p], gg += sums[2 * p + 1];
        ww = block_sum(ww);
        gg = block_sum(gg);
        if (threadIdx.x == 0)
            ratio[t] = adapt[t] ? (float)trust<NNL>(sqrt(ww), sqrt(gg), decay[t], coefficient, eps)
                                : 1;
    }
}

#define RATIO(name, NNL) \
    extern "C" __global__ void lars_ratio_##name(float* ratio, const double* sums, \
            const int64* first, const float* decay, const unsigned char* adapt, int64 tensors, \
            float coefficient, float eps) { \
        ratios<NNL>(ratio, sums, first, decay, adapt, tensors, coefficient, eps); \
    }
RATIO(nnl, true)
RATIO(tf, false)
