// pack: tensors into the flat buffer, unpack: the flat buffer into tensors, each value times
// `scale` in float32 and rounded once to the target's type (exact for a power of two inside the
// target's range: the only kind of scale that may stand beside the sum, Goyal remark 3).
//
//   flat[start + i] = tensors[tensor][offset + i] * scale       for the `count` pieces given;
//   tensors[tensor][offset + i] = flat[start + i] * scale       a bucket is a range of pieces
//
// Names: pack_<flat>_<tensor>, pack_back_<tensor>_<flat>. One block per piece at a time.
#include "pieces.h"

template <class To, class From>
__device__ inline void scaled_copy(To* to, const From* from, int64 n, float scale) {
    constexpr int N = 16 / (sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From));
    sweep<N>(of_block(), n, [=](auto width, int64 i) {
        const auto x = load(width, from + i);
        Vector<width, To> y;
        for (int k = 0; k < width; ++k) y.at[k] = rounded<To>(value(x.at[k]) * scale);
        store(to + i, y);
    }, to, from);
}

#define PACK(flat_name, Flat, tensor_name, Tensor) \
    extern "C" __global__ void pack_##flat_name##_##tensor_name(Flat* flat, \
            const Tensor* const* tensors, const Piece* pieces, int64 count, float scale) { \
        for_my_pieces(pieces, count, [=](Piece p, int64) { \
            scaled_copy(part(flat, p.start), part(tensors[p.tensor], p.offset), p.length, scale); \
        }); \
    } \
    extern "C" __global__ void pack_back_##tensor_name##_##flat_name(Tensor* const* tensors, \
            const Flat* flat, const Piece* pieces, int64 count, float scale) { \
        for_my_pieces(pieces, count, [=](Piece p, int64) { \
            scaled_copy(part(tensors[p.tensor], p.offset), part(flat, p.start), p.length, scale); \
        }); \
    }
#define PACK_INTO(name, Flat) \
    PACK(name, Flat, float32, float) \
    PACK(name, Flat, float16, float16) \
    PACK(name, Flat, bfloat16, bfloat16)
PACK_INTO(float32, float)
PACK_INTO(float16, float16)
PACK_INTO(bfloat16, bfloat16)
