// One pass from the summed gradient to the new weights: unpack, unscale, weight decay, trust ratio,
// momentum, step. Per element of tensor t, in float32, each operation rounded:
//
//   g = scale * gradient + decay[t] * w          scale: 1 / loss scale, a power of two
//   a = (inside * ratio[t]) * g                  ratio: from lars.cu; 1 where the pointer is null
//   u = carry * u + a                            u: momentum, flat like the gradient
//   w = w - outside * (nesterov ? a + momentum * u : u)
//
//   Goyal eq. (9):  inside = 1,  outside = lr, carry = momentum
//   Goyal eq. (10): inside = lr, outside = 1,  carry = momentum * lr / (lr of the step before)
//                   (the momentum correction; without it carry = momentum)
//
// If overflow is not null and *overflow is not 0, nothing changes: the decision of the whole step
// stays on the device.
#include "pieces.h"

template <class Gradient>
__device__ inline void update(float* const* weights, float* momenta, const Gradient* gradient,
                              const Piece* pieces, int64 count, const float* decay,
                              const float* ratio, const int* overflow, float scale, float inside,
                              float carry, float momentum, int nesterov, float outside) {
    if (overflow && *overflow) return;
    for_my_pieces(pieces, count, [=](Piece piece, int64) {
        float* ws = part(weights[piece.tensor], piece.offset);
        float* us = part(momenta, piece.start);
        const Gradient* gs = part(gradient, piece.start);
        const float beta = decay[piece.tensor];
        const float gain = ratio ? inside * ratio[piece.tensor] : inside;
        sweep<4>(of_block(), piece.length, [=](auto width, int64 i) {
            const auto g = load(width, gs + i);
            auto w = load(width, ws + i);
            auto u = load(width, us + i);
            for (int k = 0; k < width; ++k) {
                const float a = gain * (scale * value(g.at[k]) + beta * w.at[k]);
                u.at[k] = carry * u.at[k] + a;
                w.at[k] -= outside * (nesterov ? a + momentum * u.at[k] : u.at[k]);
            }
            store(us + i, u);
            store(ws + i, w);
        }, ws, us, gs);
    });
}

#define UPDATE(name, Gradient) \
    extern "C" __global__ void update_##name(float* const* weights, float* momenta, \
            const Gradient* gradient, const Piece* pieces, int64 count, const float* decay, \
            const float* ratio, const int* overflow, float scale, float inside, float carry, \
            float momentum, int nesterov, float outside) { \
        update(weights, momenta, gradient, pieces, count, decay, ratio, overflow, scale, inside, \
               carry, momentum, nesterov, outside); \
    }
UPDATE(float32, float)
UPDATE(float16, float16)
UPDATE(bfloat16, bfloat16)
