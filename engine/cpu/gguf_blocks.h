/* Rows of GGUF's blocks. Types are numbers in the order of BLOCKS in gguf_blocks.py. */
#ifndef CHARONIA_GGUF_BLOCKS_H
#define CHARONIA_GGUF_BLOCKS_H

#include <stdint.h>

/* What a row of `n` numbers takes, whole blocks. */
int64_t gguf_row_bytes(int type, int64_t n);

/* A row as numbers of `kind`, F32 or BF16: those of charonia_dequantise, rounded. */
void decode_gguf_row(int type, const uint8_t *blocks, int64_t n, void *out, int kind);

#endif
