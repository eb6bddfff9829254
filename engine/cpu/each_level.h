/* Compiles SUBJECT, a header's name, once for each level; AT(name) in it is `name` with the level behind it.

   A subject is written over the vectors of simd.h and has no parallel regions; the file that includes this one has
   those, and picks with ALL_LEVELS. No include guard: each includer is its own set. */
#include <stdint.h>
#include <string.h>

#include "level.h"

#define AT_PASTE(name, level) name##_##level
#define AT_LEVEL(name, level) AT_PASTE(name, level)
#define AT(name) AT_LEVEL(name, LEVEL)

#ifdef __clang__
#define AT_PRAGMA(text) _Pragma(#text)
#define BEGIN_TARGET(what) AT_PRAGMA(clang attribute push(__attribute__((target(what))), apply_to = function))
#define END_TARGET _Pragma("clang attribute pop")
#else
#define AT_PRAGMA(text) _Pragma(#text)
#define BEGIN_TARGET(what) _Pragma("GCC push_options") AT_PRAGMA(GCC target(what))
#define END_TARGET _Pragma("GCC pop_options")
#endif

#ifdef __aarch64__
#include <arm_neon.h>
#endif

#define LEVEL portable
#define LANES 4
#include "simd.h"
#include SUBJECT
#undef LANES
#undef LEVEL

#ifdef CHARONIA_AVX512_MODEL /* a header of tests, with functions of plain C for the intrinsics */
#include CHARONIA_AVX512_MODEL
#define LEVEL avx512core
#define LANES 16
#include "simd.h"
#include SUBJECT
#undef LANES
#undef LEVEL
#define ALL_LEVELS(name) {name##_portable, [1 ... LEVELS - 1] = name##_avx512core}
#elif defined(CHARONIA_X86)
#include <immintrin.h>

BEGIN_TARGET("avx2,fma,f16c")
#define LEVEL avx2
#define LANES 8
#include "simd.h"
#include SUBJECT
#undef LANES
#undef LEVEL
END_TARGET

BEGIN_TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#define LEVEL avx512core
#define LANES 16
#include "simd.h"
#include SUBJECT
#undef LEVEL
END_TARGET

BEGIN_TARGET("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")
#define LEVEL avx512bf16
#define BF16_DOT
#include "simd.h"
#include SUBJECT
#undef BF16_DOT
#undef LANES
#undef LEVEL
END_TARGET

/* VNNI and tile registers are used by products alone. */
#define ALL_LEVELS(name) \
    {name##_portable, name##_avx2, name##_avx512core, name##_avx512core, name##_avx512bf16, name##_avx512bf16}
#else
/* Of Arm's levels, too: every processor of 64 bits has the vectors that the portable one is compiled for. */
#define ALL_LEVELS(name) {[0 ... LEVELS - 1] = name##_portable}
#endif
