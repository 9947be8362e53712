// The 16-bit wire of a float32 buffer (Mikami: gradients travel as FP16), n elements each:
//
//   encode   words = round(values)   before each hop's send
//   decode   values = words          after each hop of the all-gather
//
// The owner of a finished chunk does both: after the all-gather all ranks hold the same bits.
// The hop's addition is add_float32_float16 / add_float32_bfloat16 in add.cu.
#include "sweep.h"

template <class To, class From> __device__ inline void convert(To* to, const From* from, int64 n) {
    sweep<4>(of_grid(), n, [=](auto width, int64 i) {
        const auto x = load(width, from + i);
        Vector<width, To> y;
        for (int k = 0; k < width; ++k) y.at[k] = rounded<To>(value(x.at[k]));
        store(to + i, y);
    }, to, from);
}

#define WIRE(Word) \
    extern "C" __global__ void wire_encode_##Word(Word* words, const float* values, int64 n) { \
        convert(words, values, n); \
    } \
    extern "C" __global__ void wire_decode_##Word(float* values, const Word* words, int64 n) { \
        convert(values, words, n); \
    }
WIRE(float16)
WIRE(bfloat16)
