// One pass from the summed gradient to the new weights: unpack, weight decay, trust ratio,
// momentum, step. Per element of tensor t, in float32, each operation rounded:
//
//   g = gradient + decay[t] * w
//   a = (inside * ratio[t]) * g                  ratio: from lars.cu; 1 where the pointer is null
//   u = carry * u + a                            u: momentum, flat like the gradient
//   w = w - outside * (nesterov ? a + momentum * u : u)
//
//   Goyal eq. (9):  inside = 1,  outside = lr, carry = momentum
//   Goyal eq. (10): inside = lr, outside = 1,  carry = momentum * lr / (lr of the step before)
//                   (the momentum correction; without it carry = momentum)
#include "pieces.h"

extern "C" __global__ void update_float32(
        float* const* weights, float* momenta, const float* gradient, const Piece* pieces,
        int64 count, const float* decay, const float* ratio, float inside, float carry,
        float momentum, int nesterov, float outside) {
    for_my_pieces(pieces, count, [=](Piece piece, int64) {
        float* ws = part(weights[piece.tensor], piece.offset);
        float* us = part(momenta, piece.start);
        const float* gs = part(gradient, piece.start);
        const float beta = decay[piece.tensor];
        const float gain = ratio ? inside * ratio[piece.tensor] : inside;
        sweep<4>(of_block(), piece.length, [=](auto width, int64 i) {
            const auto g = load(width, gs + i);
            auto w = load(width, ws + i);
            auto u = load(width, us + i);
            for (int k = 0; k < width; ++k) {
                const float a = gain * (g.at[k] + beta * w.at[k]);
                u.at[k] = carry * u.at[k] + a;
                w.at[k] -= outside * (nesterov ? a + momentum * u.at[k] : u.at[k]);
            }
            store(us + i, u);
            store(ws + i, w);
        }, ws, us, gs);
    });
}
