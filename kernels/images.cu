// Decoded photographs to the network's input in one pass: uint8, interleaved (N, H, W, 3), to
// normalised float32, float16 or bfloat16.
//
//   out = (x - offset[c]) * factor[c]     offset = 255 * mean, factor = 1 / (255 * std): the usual
//                                         (x / 255 - mean) / std with one rounding less
//   planar 1: out is (N, 3, H, W)         planar 0: (N, H, W, 3), torch's channels-last
//
// `pixels` is H * W. Float32 arithmetic, each operation rounded, one rounding to the target type.
// Four pixels at a time where H * W is a multiple of 4 and the arrays are aligned.
#include "sweep.h"

template <int N, class T>
__device__ inline void normalise(T* out, const unsigned char* in, const float* offset,
                                 const float* factor, int64 images, int64 pixels, int planar) {
    const float m[3] = {offset[0], offset[1], offset[2]};
    const float f[3] = {factor[0], factor[1], factor[2]};
    const Lanes lanes = of_grid();
    for (int64 g = lanes.first; g < images * pixels / N; g += lanes.step) {
        const int64 pixel = g * N, image = pixel / pixels;
        unsigned char x[3 * N];
        for (int k = 0; k < 3; ++k) {
            const auto part = load(Width<N>(), in + 3 * pixel + k * N);
            for (int j = 0; j < N; ++j) x[k * N + j] = part.at[j];
        }
        for (int k = 0; k < 3; ++k) {  // the k-th of three stores
            Vector<N, T> y;
            for (int j = 0; j < N; ++j) {
                const int from = planar ? 3 * j + k : k * N + j, c = planar ? k : from % 3;
                y.at[j] = rounded<T>((x[from] - m[c]) * f[c]);
            }
            store(planar ? out + pixel + (2 * image + k) * pixels : out + 3 * pixel + k * N, y);
        }
    }
}

#define IMAGES(name, T) \
    extern "C" __global__ void images_##name(T* out, const unsigned char* in, \
            const float* offset, const float* factor, int64 images, int64 pixels, int planar) { \
        if (pixels % 4 == 0 && position(out) % 4 == 0 && position(in) % 4 == 0) \
            normalise<4>(out, in, offset, factor, images, pixels, planar); \
        else \
            normalise<1>(out, in, offset, factor, images, pixels, planar); \
    }
IMAGES(float32, float)
IMAGES(float16, float16)
IMAGES(bfloat16, bfloat16)
