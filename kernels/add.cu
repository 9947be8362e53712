// into[i] += from[i] for i < n: the one addition of every reduction.
//
// Same type: one addition, rounded once to that type; 16-bit types add in float32 and round, which
// is what NumPy's float16 addition gives. Integers wrap around. float32 += 16-bit is the receiving
// half of the 16-bit wire: the word is widened exactly, then one float32 addition.
// `into` and `from` must not overlap. Any alignment that suits the types.
#include "sweep.h"

template <class Into, class From>
__device__ inline void add_into(Into* into, const From* from, int64 n) {
    sweep<16 / sizeof(Into)>(of_grid(), n, [=](auto width, int64 i) {
        auto sum = load(width, into + i);
        const auto term = load(width, from + i);
        for (int k = 0; k < width; ++k)
            sum.at[k] = rounded<Into>(value(sum.at[k]) + value(term.at[k]));
        store(into + i, sum);
    }, into, from);
}

#define ADD(name, Into, From) \
    extern "C" __global__ void name(Into* into, const From* from, int64 n) { \
        add_into(into, from, n); \
    }
ADD(add_float16, float16, float16)
ADD(add_bfloat16, bfloat16, bfloat16)
ADD(add_float32, float, float)
ADD(add_float64, double, double)
ADD(add_int32, unsigned, unsigned)  // unsigned: wraps by definition, same bits as int
ADD(add_int64, unsigned long long, unsigned long long)
ADD(add_float32_float16, float, float16)
ADD(add_float32_bfloat16, float, bfloat16)
