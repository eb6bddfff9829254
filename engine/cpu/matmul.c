/* The product of any number of rows: which thread computes which tile, in what order, and what is fetched meanwhile. */
#include "matmul.h"

#include <stdlib.h>

enum { SUMS_BYTES = 1 << 18, WORTH_MULTIPLYING = 1 << 18, FEW_ROWS = 2 };

/* Groups that are worth claiming, more of them where each line is read but once; and neighbours that are worth asking
   whether they have some left. */
enum { LEAST_CLAIM = 4, LEAST_STREAM = 16, NEIGHBOURS = 3 };

/* Up to so many rows of int4 cost less without tiles, whose sums leave the registers after each span: beside tiles the
   processor has one vector unit for what scales them. Fewer in spans of LONG_SPAN inputs. */
enum { FEW_ON_TILES = 31, FEW_OF_LONG_SPANS = 15, LONG_SPAN = 128 };

/* One call: the rows as the tiles read them, and where results go. */
typedef struct {
    const Matrix *matrix;
    const Kernel *kernel;
    const Plan *plan;
    const char *rows;
    int64_t row_stride, step_bytes; /* of the rows as the tiles read them */
    int64_t steps, line_bytes;      /* of a group; bytes of a step */
    int64_t chunks;
    const float *row_scales;
    char *out;
    int64_t out_stride;
    const char *after; /* what this thread reads when it has done its part, or null */
} Product;

/* Rows and groups that are worked on together, chunk after chunk: `tiles` tiles of a panel, of at most `most` rows. */
typedef struct {
    int64_t row, rows, tiles, most, group, end;
    char *sums;
} Block;

const Kernel *kernel_of(int kind, int span, int64_t rows)
{
#ifdef CHARONIA_AMX
    const int few = span < LONG_SPAN ? FEW_ON_TILES : FEW_OF_LONG_SPANS;
    if (charonia_level() == AMX && (kind == BFLOAT16 || kind == INT8 || (kind == INT4 && rows > few)))
        return &matmul_amx[kind];
#else
    (void)span;
    (void)rows;
#endif
#ifdef CHARONIA_X86
    const int level = charonia_level();
    if (level >= AVX512BF16 || (level == AVX512 && kind != BFLOAT16))
        return &matmul_avx512[kind];
    if (level >= AVX512CORE)
        return &matmul_avx512core[kind];
    if (level >= AVX2)
        return &matmul_avx2[kind];
#endif
#ifdef CHARONIA_ARM
    const int level = charonia_level();
    if (level == BFMMLA || (level == I8MM && kind != BFLOAT16))
        return kind == FLOAT32 ? &matmul_dotprod[kind] : &matmul_i8mm[kind];
    if (level >= DOTPROD)
        return &matmul_dotprod[kind];
#endif
    return &matmul_portable[kind];
}

static const Plan *plan_for(const Kernel *kernel, int64_t rows)
{
    const Plan *plan = kernel->plans;
    while (plan->upto < rows)
        plan++;
    return plan;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t whole_steps(const Kernel *kernel) { return kernel->whole ? kernel->whole : 1; }

static int64_t rounded_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

static int64_t first_step(const Product *p, int64_t chunk)
{
    if (chunk == 0 || chunk == p->chunks)
        return chunk ? p->steps : 0;
    const int64_t step = p->steps * chunk / p->chunks, whole = whole_steps(p->kernel);
    return whole == 1 ? step : step - step % whole; /* a division costs as much as ten lines of a tile */
}

static const char *lines_at(const Product *p, int64_t group, int64_t chunk)
{
    return p->matrix->lines + (group * p->steps + first_step(p, chunk)) * p->line_bytes;
}

/* The lines that the tiles after these will read; null if they are not known. */
static const char *lines_after(const Product *p, const Block *b, int64_t group, int64_t chunk)
{
    if (group + p->plan->groups < b->end)
        return lines_at(p, group + p->plan->groups, chunk);
    return chunk + 1 < p->chunks ? lines_at(p, b->group, chunk + 1) : p->after;
}

/* The tiles of a panel share the fetching: which streams fall to tile `index` of `count`, or which part of a single one.
   With nothing left to fetch a tile asks for its own lines, which costs nothing. */
static void fetch_ahead(Tile *t, const char *after, int64_t bytes, int64_t wide, int64_t index, int64_t count)
{
    const int64_t each = count >= wide || count == 3 ? 1 : wide / count;
    t->next = t->lines;
    t->streams = 1;
    if (wide == 1 && after) {
        while (t->slower < 3 && 2 << t->slower <= count)
            t->slower++;
        if (index < 1 << t->slower)
            t->next = after + (bytes / LINE * index >> t->slower) * LINE;
        return;
    }
    if (!after || index * each >= wide)
        return;
    t->next = after + index * each * t->group_stride;
    t->streams = each;
}

/* The rows of one tile, from the block's first. With a shape all are alike, and some rows computed twice. */
static int64_t first_row(const Product *p, const Block *b, int64_t tile)
{
    return p->kernel->shape ? least(tile * b->most, b->rows - b->most) : b->rows * tile / b->tiles;
}

/* All rows of the block times the groups of one panel, over one chunk. */
static void panel(const Product *p, const Block *b, int64_t group, int64_t chunk)
{
    const Plan *plan = p->plan;
    const int64_t from = first_step(p, chunk);
    const char *after = lines_after(p, b, group, chunk);
    for (int64_t tile = 0; tile < b->tiles; tile++) {
        const int64_t first = first_row(p, b, tile);
        const int64_t rows = p->kernel->shape ? b->most : first_row(p, b, tile + 1) - first;
        const int64_t row = b->row + first, width = p->matrix->out_kind == FLOAT32 ? 4 : 2;
        Tile t = {
            .matrix = p->matrix,
            .count = rows,
            .rows = p->rows + row * p->row_stride + from * p->step_bytes,
            .row_stride = p->row_stride,
            .lines = lines_at(p, group, chunk),
            .group_stride = p->steps * p->line_bytes,
            .steps = first_step(p, chunk + 1) - from,
            .sums = b->sums + ((group - b->group) * b->tiles + tile * plan->groups) * b->most * p->kernel->sum_bytes,
            .first = chunk == 0,
            .last = chunk == p->chunks - 1,
            .output = group * LANES,
            .groups = least(b->end - group, plan->groups),
            .row_scales = p->row_scales + row,
            .out = p->out + (row * p->out_stride + group * LANES) * width,
            .out_stride = p->out_stride,
        };
        fetch_ahead(&t, after, t.steps * p->line_bytes, plan->groups, tile, b->tiles);
        plan->tiles[p->kernel->shape ? 0 : rows - 1](&t);
    }
}

/* The tiles of so many rows. */
static Block block_of(const Product *p, int64_t rows)
{
    const int64_t tiles = rows > p->plan->rows ? (rows + p->plan->rows - 1) / p->plan->rows : 1;
    return (Block){.rows = rows, .tiles = tiles, .most = (rows + tiles - 1) / tiles};
}

/* Bytes of accumulators of one group. */
static int64_t group_bytes(const Product *p, const Block *b) { return b->tiles * b->most * p->kernel->sum_bytes; }

/* Groups whose accumulators stay in the cache between chunks. */
static int64_t groups_together(const Product *p, const Block *b, int64_t groups)
{
    const int64_t wide = p->plan->groups, fit = SUMS_BYTES / group_bytes(p, b) / wide * wide;
    return p->chunks == 1 ? groups : fit < wide ? wide : fit;
}

/* Bytes of accumulators that one thread keeps between chunks, at most: fewer rows (the last ones) take more groups. */
static int64_t sums_bytes(const Product *p, int64_t rows)
{
    const Block most = block_of(p, least(rows, p->plan->block));
    const int64_t panel = group_bytes(p, &most) * p->plan->groups;
    return p->chunks == 1 ? 0 : panel > SUMS_BYTES ? panel : SUMS_BYTES;
}

/* `rows` rows times the groups `from` to `to`. */
static void multiply(const Product *p, int64_t rows, int64_t from, int64_t to, char *sums)
{
    for (int64_t row = 0; row < rows; row += p->plan->block) {
        Block b = block_of(p, least(rows - row, p->plan->block));
        const int64_t groups = groups_together(p, &b, to - from);
        if (p->kernel->shape)
            p->kernel->shape(p->matrix, b.most);
        b.row = row;
        b.sums = sums;
        for (b.group = from; b.group < to; b.group = b.end) {
            b.end = least(b.group + groups, to);
            for (int64_t chunk = 0; chunk < p->chunks; chunk++)
                for (int64_t at = b.group; at < b.end; at += p->plan->groups)
                    panel(p, &b, at, chunk);
        }
    }
}

/* Bytes between prepared rows: not a multiple of 1 KiB, or they would share a few sets of the first cache. */
static int64_t spread_out(int64_t bytes)
{
    bytes = rounded_up(bytes, LINE);
    return bytes % 1024 ? bytes : bytes + LINE;
}

/* Everything but where its own memory is. */
static Product product(const MatmulCall *a)
{
    const Matrix *m = a->matrix;
    const Kernel *kernel = kernel_of(m->kind, m->span, a->rows);
    const int64_t steps = matrix_steps(m), lines = lines_a_step(m), bytes = step_bytes(kernel, m);
    const int64_t x_bytes = (m->x_kind == BFLOAT16 ? 2 : 4) * a->x_stride, whole = whole_steps(kernel);
    const int direct = kernel->direct && m->inputs % (whole * inputs_a_step(m->kind)) == 0 && (x_bytes % 1024 || a->rows == 1);
    const Plan *plan = plan_for(kernel, a->rows);
    return (Product){
        .matrix = m,
        .kernel = kernel,
        .plan = plan,
        .rows = direct ? a->x : 0,
        .row_stride = direct ? x_bytes : spread_out(rounded_up(steps, whole) * bytes),
        .step_bytes = bytes,
        .steps = steps,
        .line_bytes = lines * LINE,
        .chunks = (steps * lines + plan->chunk - 1) / plan->chunk,
        .out = a->out,
        .out_stride = a->out_stride,
    };
}

static int64_t scales_bytes(int64_t rows) { return rounded_up(rows * 4, LINE); }

/* Few rows every thread prepares for itself: that takes less time than to wait for each other. */
static int64_t copies(const MatmulCall *a, int threads) { return a->rows <= FEW_ROWS ? threads : 1; }

static int64_t prepared_bytes(const Product *p, int64_t rows)
{
    return p->rows ? 0 : scales_bytes(rows) + rows * p->row_stride;
}

int64_t product_bytes(const MatmulCall *a, int threads)
{
    const Product p = product(a);
    return copies(a, threads) * prepared_bytes(&p, a->rows) + threads * sums_bytes(&p, a->rows);
}

/* The product reads its rows, with their scales, in `memory`, where they are to be prepared. */
static void read_prepared(Product *p, const MatmulCall *a, char *memory)
{
    p->row_scales = (const float *)memory;
    p->rows = memory + scales_bytes(a->rows);
}

/* Rows `from` to `to` as the tiles read them, with scales and rows in `memory`. */
static void prepare(const Product *p, const MatmulCall *a, int64_t from, int64_t to, char *memory)
{
    const Matrix *m = p->matrix;
    const int64_t x_bytes = (m->x_kind == BFLOAT16 ? 2 : 4) * a->x_stride;
    const int64_t steps = rounded_up(p->steps, whole_steps(p->kernel));
    float *scales = (float *)memory;
    char *rows = memory + scales_bytes(a->rows);
    for (int64_t r = from; r < to; r++)
        scales[r] = p->kernel->row(m, (const char *)a->x + r * x_bytes, steps, rows + r * p->row_stride);
}

static int64_t groups_of(const Matrix *m) { return (m->outputs + LANES - 1) / LANES; }

static const char *first_lines(const Matrix *m, const Team *t)
{
    return m->lines + share_begin(groups_of(m), t, t->me) * matrix_steps(m) * lines_a_step(m) * LINE;
}

/* This thread's part, and what is left of its neighbours'. */
static void multiply_claimed(Team *t, const MatmulCall *a, Product *p, char *sums)
{
    const char *after = a->next ? first_lines(a->next, t) : 0;
    const int64_t groups = groups_of(a->matrix), smallest = a->rows > p->plan->rows ? LEAST_CLAIM : LEAST_STREAM;
    t->works++;
    for (int64_t away = 0; away < least(t->all, 1 + NEIGHBOURS); away++) {
        const int64_t owner = (t->me + away) % t->all, first = share_begin(groups, t, owner);
        const int64_t count = share_begin(groups, t, owner + 1) - first;
        for (Piece piece; (piece = claim_piece(t, owner, count, smallest)).begin < count;) {
            p->after = piece.end < count ? lines_at(p, first + piece.end, 0) : after;
            multiply(p, a->rows, first + piece.begin, first + piece.end, sums);
        }
    }
    if (p->kernel->shape)
        p->kernel->shape(p->matrix, 0);
}

void multiply_in_team(Team *t, const MatmulCall *a, char *memory)
{
    Product p = product(a);
    const int64_t prepared = prepared_bytes(&p, a->rows), own = copies(a, (int)t->all) > 1;
    const int64_t kept = sums_bytes(&p, a->rows);
    char *sums = memory + copies(a, (int)t->all) * prepared + t->me * kept;
    if (prepared && own) {
        prepare(&p, a, 0, a->rows, memory + t->me * prepared);
        read_prepared(&p, a, memory + t->me * prepared);
    } else if (prepared) {
        prepare(&p, a, share_begin(a->rows, t, t->me), share_begin(a->rows, t, t->me + 1), memory);
        read_prepared(&p, a, memory);
        barrier(t);
    }
    multiply_claimed(t, a, &p, sums);
}

/* One of several products: its first row and group among those of all, and where its rows are prepared, if they are. */
typedef struct {
    Product product;
    const MatmulCall *call;
    int64_t row, group;
    char *prepared;
    int64_t sums; /* bytes that a thread keeps between chunks */
} Part;

static int64_t parts_bytes(int64_t count) { return rounded_up((count + 1) * (int64_t)sizeof(Part), LINE); }

int64_t products_bytes(const Matrix *const *kinds, int64_t kind_count, int64_t count, int64_t rows, int threads)
{
    int64_t row = 0, sums = SUMS_BYTES;
    for (int64_t i = 0; i < 2 * kind_count; i++) {
        const MatmulCall call = {kinds[i / 2], 0, 0, kinds[i / 2]->inputs, i % 2 ? rows : 1, 0, 0};
        const Product p = product(&call);
        const Block most = block_of(&p, p.plan->block);
        const int64_t panel = group_bytes(&p, &most) * p.plan->groups;
        row = p.row_stride > row ? p.row_stride : row;
        sums = panel > sums ? panel : sums;
    }
    return parts_bytes(count) + rows * (row + 4) + count * 2 * LINE + threads * sums;
}

/* Lays the products out behind `parts`. Behind the last comes one that is none: its rows would be the threads' sums. */
static void lay_out_parts(const MatmulCall *calls, int64_t count, Part *parts)
{
    char *memory = (char *)parts + parts_bytes(count);
    int64_t row = 0, group = 0, sums = 0;
    for (int64_t i = 0; i < count; i++) {
        Part *part = parts + i;
        *part = (Part){product(calls + i), calls + i, row, group, 0, 0};
        const int64_t bytes = prepared_bytes(&part->product, calls[i].rows);
        const int64_t kept = sums_bytes(&part->product, calls[i].rows);
        sums = kept > sums ? kept : sums;
        if (bytes) {
            part->prepared = memory;
            read_prepared(&part->product, calls + i, memory);
        }
        memory += rounded_up(bytes, LINE);
        row += calls[i].rows;
        group += groups_of(calls[i].matrix);
    }
    parts[count] = (Part){.row = row, .group = group, .prepared = memory, .sums = sums};
}

/* Rows `from` to `to` of all. */
static void prepare_parts(const Part *parts, int64_t from, int64_t to)
{
    for (const Part *part = parts; part->call && part->row < to; part++)
        if (part->prepared && part[1].row > from)
            prepare(&part->product, part->call, from > part->row ? from - part->row : 0,
                    least(to, part[1].row) - part->row, part->prepared);
}

/* Groups `from` to `to` of all. */
static void multiply_parts(const Part *parts, int64_t from, int64_t to, char *sums)
{
    for (const Part *part = parts; part->call && part->group < to; part++) {
        if (part[1].group <= from)
            continue;
        Product p = part->product;
        const int64_t begin = from > part->group ? from - part->group : 0, end = least(to, part[1].group) - part->group;
        p.after = part->group + end < part[1].group ? lines_at(&p, end, 0) : part[1].call ? part[1].call->matrix->lines : 0;
        multiply(&p, part->call->rows, begin, end, sums);
        if (p.kernel->shape)
            p.kernel->shape(p.matrix, 0);
    }
}

void multiply_each_in_team(Team *t, const MatmulCall *calls, int64_t count, char *memory)
{
    Part *parts = (Part *)memory;
    if (t->me == 0)
        lay_out_parts(calls, count, parts);
    barrier(t);
    const int64_t rows = parts[count].row, groups = parts[count].group;
    const int64_t smallest = rows > count * FEW_ROWS ? LEAST_CLAIM : LEAST_STREAM;
    prepare_parts(parts, share_begin(rows, t, t->me), share_begin(rows, t, t->me + 1));
    barrier(t);
    char *sums = parts[count].prepared + t->me * parts[count].sums;
    t->works++;
    for (int64_t away = 0; away < t->all; away++) {
        const int64_t owner = (t->me + away) % t->all, first = share_begin(groups, t, owner);
        const int64_t own = share_begin(groups, t, owner + 1) - first;
        for (Piece piece; (piece = claim_piece(t, owner, own, smallest)).begin < own;)
            multiply_parts(parts, first + piece.begin, first + piece.end, sums);
    }
}

/* See MatmulCall. Returns 0, or 1 when memory is short. */
EXPORT int charonia_matmul(const Matrix *m, const void *x, int64_t x_stride, int64_t rows, void *out, int64_t out_stride)
{
    const MatmulCall call = {m, 0, x, x_stride, rows, out, out_stride};
    const int all = rows * m->outputs * m->inputs < WORTH_MULTIPLYING ? 1 : omp_get_max_threads();
    char *memory = aligned_alloc(LINE, (size_t)(product_bytes(&call, all) + LINE));
    if (!memory)
        return 1;
    PARALLEL_REGION(all, multiply_in_team(team, &call, memory));
    free(memory);
    return 0;
}
