/* The levels of instruction sets that kernels are written for, and which one is in use. */
#ifndef CHARONIA_LEVEL_H
#define CHARONIA_LEVEL_H

enum charonia_level { PORTABLE, AVX2, AVX512, AVX512BF16, AMX, LEVELS };

/* The level in use: the best the machine has, or a lower one that was asked for. */
int charonia_level(void);

/* Threads that a parallel region started here would have. */
int charonia_threads(void);

#define EXPORT __attribute__((visibility("default")))

#if defined(__x86_64__)
#define CHARONIA_X86 1
#define TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TARGET_AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define TARGET_AVX512BF16 \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16")))
#if defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define CHARONIA_AMX 1
#define TARGET_AMX                                                                                                  \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,amx-tile,amx-int8," \
                          "amx-bf16")))
#endif
#endif

#ifdef CHARONIA_TILE_MODEL
#define CHARONIA_AMX 1
#endif

#endif
