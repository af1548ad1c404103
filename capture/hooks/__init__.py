"""Hooks into the program: dispatch mode, modules, threads, extension functions, Triton kernels and compiled code."""
