/* Tile instructions as the compiler made them, on a processor that has none: each one traps, and the model does it. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <ucontext.h>

#include "tile_registers.h"

static const int NUMBERED[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                 REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

/* The address of the operand whose ModR/M byte is at `at`, and what its index adds; returns what follows the operand. */
static const uint8_t *operand(const uint8_t *at, const greg_t *registers, int x, int b, uint64_t *base, uint64_t *index)
{
    const int mod = *at >> 6, scaled = (*at & 7) == 4;
    int from = *at++ & 7;
    *index = 0;
    if (scaled) {
        const int added = (*at >> 3 & 7) | x << 3;
        *index = added == 4 ? 0 : (uint64_t)registers[NUMBERED[added]] << (*at >> 6);
        from = *at++ & 7;
    }
    fault_unless(mod || from != 5, "an address without a register");
    *base = (uint64_t)registers[NUMBERED[from | b << 3]];
    if (mod == 1) *base += (uint64_t)(int64_t)(int8_t)*at++;
    if (mod == 2) {
        int32_t moved;
        memcpy(&moved, at, 4);
        *base += (uint64_t)(int64_t)moved;
        at += 4;
    }
    return at;
}

/* A three-byte VEX prefix, the opcode, and then registers alone or memory. */
static void execute(int signal, siginfo_t *info, void *context)
{
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *code = (const uint8_t *)registers[REG_RIP], *next = code + 5;
    const int x = !(code[1] & 0x40), b = !(code[1] & 0x20), reg = code[4] >> 3 & 7, other = code[4] & 7;
    const int memory = code[4] < 0xc0, third = ~code[2] >> 3 & 15, form = code[3] << 4 | (code[2] & 3);
    uint64_t base = 0, index = 0;
    (void)signal, (void)info;
    fault_unless(code[0] == 0xc4 && (code[1] & 31) == 2 && !(code[2] & 0x84), "an instruction that is not a tile's");
    if (memory) next = operand(code + 4, registers, x, b, &base, &index);
    if (form == 0x490 && memory) tile_configure((const TileShapes *)(base + index));
    else if (form == 0x490) tile_release();
    else if (form == 0x493) tile_zero(reg);
    else if (form == 0x4b3) tile_load(reg, (const void *)base, (int64_t)index);
    else if (form == 0x4b1) tile_load_once(reg, (const void *)base, (int64_t)index);
    else if (form == 0x4b2) tile_store(reg, (void *)base, (int64_t)index);
    else if (form == 0x5e3) tile_dot_int8(reg, other, third);
    else if (form == 0x5e2) tile_dot_int4(reg, other, third);
    else if (form == 0x5c2) tile_dot_bf16(reg, other, third);
    else fault_unless(0, "an instruction that the kernels do not use");
    registers[REG_RIP] = (greg_t)next;
}

__attribute__((constructor)) static void install(void)
{
    const struct sigaction action = {.sa_sigaction = execute, .sa_flags = SA_SIGINFO};
    sigaction(SIGILL, &action, NULL);
}
