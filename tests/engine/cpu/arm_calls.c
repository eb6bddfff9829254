/* Calls of the kernels for whoever asks through a pipe, with a copy of the memory that they work on.
 *
 * A request is a Call, `addresses` places, and `bytes` bytes of memory, which begin with the arguments. At each place an
 * offset into that memory stands for an address. The answer is the function's result, and the memory. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ARGUMENTS = 12 };

typedef struct {
    char name[32];
    int64_t bytes, addresses;
    float number; /* the argument that is a float, if there is one */
} Call;

/* Arm's calling convention for 64 bits passes integers and addresses alike, in order, and a float by itself; more of them
   than a function has do no harm. So this is every function's type. */
typedef int64_t Function(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                         int64_t, float);

#define FUNCTIONS(each)                                                                                              \
    each(charonia_level) each(charonia_limit) each(charonia_pack) each(charonia_pack_spans) each(charonia_matmul)     \
    each(charonia_norm) each(charonia_gate) each(charonia_rope) each(charonia_argmax)     \
    each(charonia_gate_heads) each(charonia_convolve) each(charonia_recur) each(charonia_scan_channels) each(charonia_soft_cap)

#define DECLARED(name) Function name;
#define NAMED(name) {#name, name},

FUNCTIONS(DECLARED)

static const struct {
    const char *name;
    Function *function;
} functions[] = {FUNCTIONS(NAMED)};

static void read_all(void *to, size_t bytes)
{
    if (fread(to, 1, bytes, stdin) != bytes)
        exit(0);
}

static int64_t called(const char *name, const int64_t *a, float number)
{
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (!strcmp(functions[i].name, name))
            return functions[i].function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], number);
    fprintf(stderr, "there is no function %s\n", name);
    exit(1);
}

int main(void)
{
    for (;;) {
        Call call;
        read_all(&call, sizeof call);
        int64_t *places = malloc((size_t)call.addresses * sizeof *places + 1);
        char *memory = aligned_alloc(64, (size_t)call.bytes);
        read_all(places, (size_t)call.addresses * sizeof *places);
        read_all(memory, (size_t)call.bytes);
        for (int64_t i = 0; i < call.addresses; i++)
            *(int64_t *)(memory + places[i]) += (int64_t)memory;
        const int64_t result = called(call.name, (int64_t *)memory, call.number);
        fwrite(&result, sizeof result, 1, stdout);
        fwrite(memory, 1, (size_t)call.bytes, stdout);
        fflush(stdout);
        free(places);
        free(memory);
    }
}
