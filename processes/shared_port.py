"""Sockets that listen on one port: to which of them the kernel gives new connections. Linux alone can be told."""

import ctypes
import socket
import struct
import sys

_ATTACH_PROGRAM = 51
"""SO_ATTACH_REUSEPORT_CBPF of <asm-generic/socket.h>, which Python does not name."""

_LOAD, _MODULO, _ADD, _RETURN = 0x20, 0x94, 0x04, 0x16
"""Instructions of classic BPF (<linux/filter.h>): of a word, by a constant, and of the accumulator."""

_RANDOM = 0xFFFFF000 + 56
"""The place from which a program loads a random word: SKF_AD_OFF + SKF_AD_RANDOM."""


def spare_first_listener(sock: socket.socket, others: int) -> bool:
    """Have new connections go to `others`: the sockets that listen on the port beside `sock`, the first. It keeps its
    queue, and gets a part while one of the others is missing. False, and all share, where the system can't do it.

    The program returns a listener's place in their order, or none: then the kernel chooses
    (https://man7.org/linux/man-pages/man7/socket.7.html, SO_ATTACH_REUSEPORT_CBPF).
    """
    if sys.platform != "linux":
        return False
    steps = (_LOAD, _RANDOM), (_MODULO, others), (_ADD, 1), (_RETURN, 0)
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", code, 0, 0, value) for code, value in steps))
    try:
        sock.setsockopt(socket.SOL_SOCKET, _ATTACH_PROGRAM, struct.pack("HP", len(steps), ctypes.addressof(program)))
    except OSError:
        return False
    return True
