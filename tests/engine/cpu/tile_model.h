/* The tile instructions in plain C, as Intel's manual of the instruction set describes them, for the kernels that
 * tile_registers.h gives them to. What the processor answers with a fault ends the process: shapes that do not fit, or
 * registers that were not configured. Each thread has registers of its own. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROW_BYTES = 64 };

typedef union {
    uint8_t bytes_of[ROW_BYTES];
    int8_t ints[ROW_BYTES];
    uint16_t halves[ROW_BYTES / 2];
    int32_t sums[ROW_BYTES / 4];
    float floats[ROW_BYTES / 4];
} Row;

typedef struct {
    int rows, bytes; /* both 0: not in use */
    Row row[TILE_ROWS];
} Register;

static __thread Register registers[TILE_REGISTERS];

/* Threads that have registers now; and products of two registers, over all threads. */
__attribute__((visibility("default"))) int64_t tile_users, tile_products;

static inline void fault_unless(int fine, const char *what)
{
    if (!fine) {
        fprintf(stderr, "tile model: %s\n", what);
        abort();
    }
}

static inline Register *used(int at)
{
    fault_unless(registers[at].rows > 0, "a register that is not configured");
    return registers + at;
}

static inline void tile_release(void)
{
    int held = 0;
    for (int at = 0; at < TILE_REGISTERS; at++)
        held |= registers[at].rows > 0;
    memset(registers, 0, sizeof registers);
    __atomic_sub_fetch(&tile_users, held, __ATOMIC_RELAXED);
}

/* Registers are zeros afterwards. */
static inline void tile_configure(const TileShapes *shapes)
{
    static const uint8_t none[sizeof shapes->reserved];
    fault_unless(shapes->palette == 1 && !shapes->start_row, "palette 1 is the one there is");
    fault_unless(!memcmp(shapes->reserved, none, sizeof none), "reserved bytes are zeros");
    tile_release();
    for (int at = 0; at < 16; at++) {
        const int rows = shapes->rows[at], bytes = shapes->row_bytes[at];
        fault_unless(rows <= TILE_ROWS && bytes <= ROW_BYTES && !rows == !bytes, "a shape that there is not");
        fault_unless(at < TILE_REGISTERS || !rows, "a register that there is not");
        if (at < TILE_REGISTERS) {
            registers[at].rows = rows;
            registers[at].bytes = bytes;
        }
    }
    __atomic_add_fetch(&tile_users, 1, __ATOMIC_RELAXED);
}

static inline void tile_zero(int to) { memset(used(to)->row, 0, sizeof registers[to].row); }

static inline void tile_load(int to, const void *from, int64_t stride)
{
    tile_zero(to);
    for (int row = 0; row < registers[to].rows; row++)
        memcpy(registers[to].row[row].bytes_of, (const char *)from + row * stride, registers[to].bytes);
}

static inline void tile_load_once(int to, const void *from, int64_t stride) { tile_load(to, from, stride); }

static inline void tile_store(int from, void *to, int64_t stride)
{
    for (int row = 0; row < used(from)->rows; row++)
        memcpy((char *)to + row * stride, registers[from].row[row].bytes_of, registers[from].bytes);
}

static inline void check_product(const Register *sums, const Register *rows, const Register *weights)
{
    fault_unless(sums != rows && sums != weights && rows != weights, "three registers that are not three");
    fault_unless(sums->rows == rows->rows && sums->bytes == weights->bytes, "sums of another shape than the products");
    fault_unless(rows->bytes == 4 * weights->rows && sums->bytes % 4 == 0, "rows and weights that do not fit");
    __atomic_add_fetch(&tile_products, 1, __ATOMIC_RELAXED);
}

/* Signed bytes of rows times those of weights, which are signed or not, added to sums of 32 bits that wrap. */
static inline void tile_dot_bytes(int to, int from, int with, int weights_are_signed)
{
    Register *sums = used(to), *rows = used(from), *weights = used(with);
    check_product(sums, rows, weights);
    for (int m = 0; m < sums->rows; m++)
        for (int k = 0; k < rows->bytes / 4; k++)
            for (int n = 0; n < sums->bytes / 4; n++) {
                int32_t dot = 0;
                for (int i = 0; i < 4; i++) {
                    const Row *row = weights->row + k;
                    const int weight = weights_are_signed ? row->ints[4 * n + i] : row->bytes_of[4 * n + i];
                    dot += rows->row[m].ints[4 * k + i] * weight;
                }
                sums->row[m].sums[n] = (int32_t)((uint32_t)sums->row[m].sums[n] + (uint32_t)dot);
            }
}

/* tdpbssd */
static inline void tile_dot_int8(int to, int from, int with) { tile_dot_bytes(to, from, with, 1); }

/* tdpbsud */
static inline void tile_dot_int4(int to, int from, int with) { tile_dot_bytes(to, from, with, 0); }

/* What is smaller than normal numbers counts as a zero of its sign. */
static inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

static inline float wide_half(uint16_t half)
{
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return flushed(value);
}

/* tdpbf16ps: the even inputs' products and the odd ones' are summed apart, each fused, and joined at the end. */
static inline void tile_dot_bf16(int to, int from, int with)
{
    Register *sums = used(to), *rows = used(from), *weights = used(with);
    check_product(sums, rows, weights);
    for (int m = 0; m < sums->rows; m++)
        for (int n = 0; n < sums->bytes / 4; n++) {
            float part[2] = {0, 0};
            for (int k = 0; k < rows->bytes / 4; k++)
                for (int i = 0; i < 2; i++)
                    part[i] = flushed(fmaf(wide_half(rows->row[m].halves[2 * k + i]),
                                           wide_half(weights->row[k].halves[2 * n + i]), part[i]));
            sums->row[m].floats[n] = flushed(flushed(sums->row[m].floats[n]) + flushed(part[0] + part[1]));
        }
}
