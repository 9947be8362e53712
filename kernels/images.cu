// Decoded photographs to the network's input in one pass: uint8, interleaved (N, H, W, 3), to
// normalised float32, float16 or bfloat16.
//
//   out = x * scale[c] + shift[c]      scale = 1 / (255 * std), shift = -mean / std: the usual
//                                      (x / 255 - mean) / std, with the bits of data/loader.py
//   planar 1: out is (N, 3, H, W)      planar 0: (N, H, W, 3), torch's channels-last
//
// `pixels` is H * W. Float32 arithmetic, each operation rounded, one rounding to the target type.
// Four pixels at a time where H * W is a multiple of 4 and the arrays are aligned.
#include "sweep.h"

template <int N, class T>
__device__ inline void normalise(T* out, const unsigned char* in, const float* scale,
                                 const float* shift, int64 images, int64 pixels, int planar) {
    const float a[3] = {scale[0], scale[1], scale[2]};
    const float b[3] = {shift[0], shift[1], shift[2]};
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
                y.at[j] = rounded<T>(x[from] * a[c] + b[c]);
            }
            store(planar ? out + pixel + (2 * image + k) * pixels : out + 3 * pixel + k * N, y);
        }
    }
}

#define IMAGES(name, T) \
    extern "C" __global__ void images_##name(T* out, const unsigned char* in, \
            const float* scale, const float* shift, int64 images, int64 pixels, int planar) { \
        if (pixels % 4 == 0 && position(out) % 4 == 0 && position(in) % 4 == 0) \
            normalise<4>(out, in, scale, shift, images, pixels, planar); \
        else \
            normalise<1>(out, in, scale, shift, images, pixels, planar); \
    }
IMAGES(float32, float)
IMAGES(float16, float16)
IMAGES(bfloat16, bfloat16)
