/* The tile registers of AMX, and their instructions. Tests name a header in CHARONIA_TILE_MODEL, whose functions of plain C
 * stand in for the processor's: so the same kernels are proved where there are no such registers.
 *
 * A register has up to 16 rows of up to 64 bytes. Its number is a literal, for it becomes a part of the instruction. */
#ifndef CHARONIA_TILE_REGISTERS_H
#define CHARONIA_TILE_REGISTERS_H

#include <stdint.h>

enum { TILE_REGISTERS = 8, TILE_ROWS = 16, TILE_BYTES = 1024 };

/* What the registers hold: the operand of ldtilecfg. Of one that is not used both numbers are 0. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) TileShapes;

#ifdef CHARONIA_TILE_MODEL
#define TARGET
#include CHARONIA_TILE_MODEL
#else
#include <immintrin.h>
#define TARGET TARGET_AMX
#define tile_configure(shapes) _tile_loadconfig(shapes)
#define tile_release() _tile_release()
#define tile_zero(to) _tile_zero(to)
#define tile_load(to, from, stride) _tile_loadd(to, from, stride)
#define tile_load_once(to, from, stride) _tile_stream_loadd(to, from, stride) /* not to be kept in the caches */
#define tile_store(from, to, stride) _tile_stored(from, to, stride)
#define tile_dot_int8(sums, rows, weights) _tile_dpbssd(sums, rows, weights)
#define tile_dot_int4(sums, rows, weights) _tile_dpbsud(sums, rows, weights) /* unsigned weights */
#define tile_dot_bf16(sums, rows, weights) _tile_dpbf16ps(sums, rows, weights)
#endif

/* Compilers do not know what these instructions read: what was written through `pointer` before is in memory, and what
   is written after it is not yet. */
#define WRITTEN(pointer) __asm__ volatile("" : : "r"(pointer) : "memory")

#endif
