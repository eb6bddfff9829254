#include "parallel_region.h"

#ifdef CHARONIA_ARM
#include <sys/auxv.h>

/* Bits of AT_HWCAP and AT_HWCAP2, which headers of older systems do not name. */
enum { HAS_DOTPROD = 1 << 20, HAS_I8MM = 1 << 13, HAS_BF16 = 1 << 14 };
#endif

#ifndef KERNEL_SOURCES /* tests compile without setuptools */
#define KERNEL_SOURCES ""
#endif

static int chosen = -1, refused;

/* The best level without tile registers. */
static int best_vectors(void)
{
#ifdef CHARONIA_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return PORTABLE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return AVX2;
    if (!__builtin_cpu_supports("avx512vnni"))
        return AVX512CORE;
    return __builtin_cpu_supports("avx512bf16") ? AVX512BF16 : AVX512;
#elif defined(CHARONIA_ARM)
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    if (!(first & HAS_DOTPROD))
        return PORTABLE;
    if (!(second & HAS_I8MM))
        return DOTPROD;
    return second & HAS_BF16 ? BFMMLA : I8MM;
#else
    return PORTABLE;
#endif
}

#ifdef CHARONIA_TILE_MODEL
int tiles_promised(void), tiles_denied(void);
#elif defined(CHARONIA_AMX)
#include <cpuid.h>
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Bits of EDX of leaf 7: amx-bf16, amx-tile and amx-int8. */
enum { TILE_BITS = 1 << 22 | 1 << 24 | 1 << 25 };

/* Of arch_prctl(2), and the registers' number among the states that the system saves. */
enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };

static int tiles_promised(void)
{
    unsigned a, b, c, d;
    return best_vectors() == AVX512BF16 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & TILE_BITS) == TILE_BITS;
}

/* Asks the system to save the registers of this process, from now on: without that the first instruction ends it. A
   hypervisor, a sandbox or an old system may refuse what the processor promises. Returns 0, or an errno. */
static int tiles_denied(void)
{
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) ? errno : 0;
}
#endif

/* The best level that is at most `most`; permission is asked for only if it would be used. */
static int best(int most)
{
#ifdef CHARONIA_AMX
    if (most >= AMX && tiles_promised() && !(refused = tiles_denied()))
        return AMX;
#endif
    const int level = best_vectors();
    return level < most ? level : most;
}

EXPORT int charonia_level(void)
{
    if (chosen < 0)
        chosen = best(LEVELS - 1);
    return chosen;
}

/* Use at most `level`; the level that is in use from now on. */
EXPORT int charonia_limit(int level)
{
    chosen = best(level);
    return chosen;
}

/* The errno with which the system refused the tile registers that the processor has, else 0. */
EXPORT int charonia_tiles_refused(void) { return refused; }

/* Threads that a parallel region started here would have. */
EXPORT int charonia_threads(void) { return omp_get_max_threads(); }

/* source_stamp.py's hash of the sources that this library was built from: Python compares it with those beside it. */
EXPORT const char *charonia_sources(void) { return KERNEL_SOURCES; }
