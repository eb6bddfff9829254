/* A stand-in for NVIDIA's driver library, as far as memory is lent between processes: two GPUs whose memory is POSIX
 * shared memory. A handle is the name of an object, filled up with zeros: one that cuMemAlloc made, or anybody. A device's pointer is no address of the host:
 * who reads it without a copy crashes. As the driver, it wants a context to be current, and that everything is closed. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201 };
enum { GPUS = 2, OPEN = 64, DEEP = 8, HANDLE = 64 };

typedef struct { char name[HANDLE]; } handle_t;
typedef struct { int device, used; char *memory; size_t size; handle_t own; } block_t;

static const uint64_t ELSEWHERE = 1ull << 60, APART = 1ull << 40;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int retained[GPUS], started;
static block_t blocks[OPEN];
static __thread int stack[DEEP], depth;

/* What tests look at: contexts that are held, allocations that are open, contexts current in this thread. */
int fake_contexts(void) { return retained[0] + retained[1]; }
int fake_depth(void) { return depth; }
int fake_open(void) {
    int count = 0;
    for (int i = 0; i < OPEN; i++) count += blocks[i].used;
    return count;
}

static int current(void) { return depth ? stack[depth - 1] : -1; }

static uint64_t address(const block_t *block) { return ELSEWHERE + APART * (uint64_t)(block - blocks); }

static block_t *find(uint64_t pointer, size_t size) {
    for (block_t *block = blocks; block < blocks + OPEN; block++) {
        uint64_t begin = address(block);
        if (block->used && pointer >= begin && pointer - begin + size <= block->size) return block;
    }
    return 0;
}

int cuInit(unsigned flags) { started = 1; return flags ? INVALID_VALUE : SUCCESS; }

int cuDeviceGet(int *device, int number) {
    if (!started || number < 0 || number >= GPUS) return INVALID_DEVICE;
    *device = number;
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    pthread_mutex_lock(&lock);
    retained[device]++;
    pthread_mutex_unlock(&lock);
    *context = (void *)(uintptr_t)(device + 1);
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    pthread_mutex_lock(&lock);
    int held = retained[device]--;
    pthread_mutex_unlock(&lock);
    return held > 0 ? SUCCESS : INVALID_CONTEXT;
}

int cuCtxPushCurrent_v2(void *context) {
    int device = (int)(uintptr_t)context - 1;
    if (device < 0 || device >= GPUS || !retained[device] || depth == DEEP) return INVALID_CONTEXT;
    stack[depth++] = device;
    return SUCCESS;
}

int cuCtxPopCurrent_v2(void **context) {
    if (!depth) return INVALID_CONTEXT;
    *context = (void *)(uintptr_t)(stack[--depth] + 1);
    return SUCCESS;
}

static int map(uint64_t *pointer, int file, handle_t own) {
    int code = INVALID_VALUE;
    struct stat state;
    if (file < 0 || fstat(file, &state)) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < OPEN && code; i++) {
        if (blocks[i].used) continue;
        char *memory = mmap(0, state.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        blocks[i] = (block_t){current(), 1, memory, state.st_size, own};
        *pointer = address(&blocks[i]);
        code = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    close(file);
    return code;
}

int cuIpcOpenMemHandle_v2(uint64_t *pointer, handle_t handle, unsigned flags) {
    if (current() < 0) return INVALID_CONTEXT;
    if (flags != 1 || handle.name[0] != '/' || memchr(handle.name, 0, HANDLE) == 0) return INVALID_VALUE;
    return map(pointer, shm_open(handle.name, O_RDWR, 0), (handle_t){""});
}

int cuMemAlloc_v2(uint64_t *pointer, size_t size) {
    static int made;
    handle_t own = {""};
    if (current() < 0) return INVALID_CONTEXT;
    snprintf(own.name, HANDLE, "/charonia_gpu_%d_own_%d", getpid(), made++);
    int file = shm_open(own.name, O_RDWR | O_CREAT | O_EXCL, 0600);
    return file < 0 || ftruncate(file, size) ? INVALID_VALUE : map(pointer, file, own);
}

int cuIpcGetMemHandle(handle_t *handle, uint64_t pointer) {
    block_t *block = find(pointer, 0);
    if (!block || !block->own.name[0]) return INVALID_VALUE;
    *handle = block->own;
    return SUCCESS;
}

__attribute__((destructor)) static void free_all(void) {
    for (int i = 0; i < OPEN; i++)
        if (blocks[i].used && blocks[i].own.name[0]) shm_unlink(blocks[i].own.name);
}

int cuIpcCloseMemHandle(uint64_t pointer) {
    pthread_mutex_lock(&lock);
    block_t *block = find(pointer, 0);
    int fits = block && block->device == current();
    if (fits) {
        munmap(block->memory, block->size);
        block->used = 0;
    }
    pthread_mutex_unlock(&lock);
    return fits ? SUCCESS : INVALID_VALUE;
}

int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t pointer) {
    block_t *block = find(pointer, 0);
    if (!block) return INVALID_VALUE;
    *base = address(block);
    *size = block->size;
    return SUCCESS;
}

static int copy(uint64_t pointer, void *host, size_t size, int upload) {
    if (current() < 0) return INVALID_CONTEXT;
    block_t *block = find(pointer, size);
    if (!block || block->device != current()) return INVALID_VALUE;
    char *memory = block->memory + (pointer - address(block));
    upload ? memcpy(memory, host, size) : memcpy(host, memory, size);
    return SUCCESS;
}

int cuMemcpyDtoH_v2(void *host, uint64_t pointer, size_t size) { return copy(pointer, host, size, 0); }
int cuMemcpyHtoD_v2(uint64_t pointer, const void *host, size_t size) { return copy(pointer, (void *)host, size, 1); }
int cuStreamSynchronize(void *stream) { return current() < 0 || stream ? INVALID_CONTEXT : SUCCESS; }

int cuGetErrorString(int code, const char **text) {
    *text = code == INVALID_VALUE     ? "invalid argument"
            : code == INVALID_DEVICE  ? "invalid device ordinal"
            : code == INVALID_CONTEXT ? "invalid device context"
                                      : 0;
    return *text ? SUCCESS : INVALID_VALUE;
}
