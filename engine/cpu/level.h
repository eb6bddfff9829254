/* The levels of instruction sets that kernels are written for, and which one is in use. */
#ifndef CHARONIA_LEVEL_H
#define CHARONIA_LEVEL_H

/* Each processor's own, lowest first; library.py has the same. */
#if defined(__x86_64__) || defined(CHARONIA_TILE_MODEL)
enum charonia_level { PORTABLE, AVX2, AVX512CORE, AVX512, AVX512BF16, AMX, LEVELS };
#elif defined(__aarch64__) && defined(__linux__)
enum charonia_level { PORTABLE, DOTPROD, I8MM, BFMMLA, LEVELS };
#else
enum charonia_level { PORTABLE, LEVELS };
#endif

/* The level in use: the best the machine has, or a lower one that was asked for. */
int charonia_level(void);

/* Threads that a parallel region started here would have. */
int charonia_threads(void);

#define EXPORT __attribute__((visibility("default")))

#if defined(__x86_64__)
#define CHARONIA_X86 1
#define TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TARGET_AVX512CORE __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
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

/* Older compilers have no such intrinsics in functions of their own target. */
#if defined(__aarch64__) && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 16 : __GNUC__ >= 10)
#define CHARONIA_ARM 1
#define TARGET_DOTPROD __attribute__((target("arch=armv8.2-a+dotprod")))
#define TARGET_I8MM __attribute__((target("arch=armv8.2-a+dotprod+i8mm")))
#define TARGET_BFMMLA __attribute__((target("arch=armv8.2-a+dotprod+i8mm+bf16")))
#endif

#ifdef CHARONIA_TILE_MODEL
#define CHARONIA_AMX 1
#endif

#endif
