"""Triton kernels for GPUs, one subject a module. Only a process that computes by them imports those modules."""
