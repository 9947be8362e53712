// The 16-bit wire of a float32 buffer (Mikami: gradients travel as FP16), n elements each:
//
//   encode   words = round(values)                   before each hop's send
//   round    words = round(values); values = words   the owner of a finished chunk, so that after
//                                                    the all-gather all ranks hold the same bits
//   decode   values = words                          after each hop of the all-gather
//
// The hop's addition is add_float32_float16 / add_float32_bfloat16 in add.cu.
#include "sweep.h"

template <class Word> __device__ inline void encode(Word* words, const float* values, int64 n) {
    sweep<4>(of_grid(), n, [=](auto width, int64 i) {
        const auto x = load(width, values + i);
        Vector<width, Word> w;
        for (int k = 0; k < width; ++k) w.at[k] = rounded<Word>(x.at[k]);
        store(words + i, w);
    }, values, words);
}
template <class Word> __device__ inline void round_both(Word* words, float* values, int64 n) {
    sweep<4>(of_grid(), n, [=](auto width, int64 i) {
        auto x = load(width, values + i);
        Vector<width, Word> w;
        for (int k = 0; k < width; ++k) {
            w.at[k] = rounded<Word>(x.at[k]);
            x.at[k] = value(w.at[k]);
        }
        store(words + i, w);
        store(values + i, x);
    }, values, words);
}
template <class Word> __device__ inline void decode(float* values, const Word* words, int64 n) {
    sweep<4>(of_grid(), n, [=](auto width, int64 i) {
        const auto w = load(width, words + i);
        Vector<width, float> x;
        for (int k = 0; k < width; ++k) x.at[k] = value(w.at[k]);
        store(values + i, x);
    }, values, words);
}

#define WIRE(Word) \
    extern "C" __global__ void wire_encode_##Word(Word* words, const float* values, int64 n) { \
        encode(words, values, n); \
    } \
    extern "C" __global__ void wire_round_##Word(Word* words, float* values, int64 n) { \
        round_both(words, values, n); \
    } \
    extern "C" __global__ void wire_decode_##Word(float* values, const Word* words, int64 n) { \
        decode(values, words, n); \
    }
WIRE(float16)
WIRE(bfloat16)
