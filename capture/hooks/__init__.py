"""Hooks into the program: dispatch mode, modules, threads, extensions, Triton and compiled code."""
