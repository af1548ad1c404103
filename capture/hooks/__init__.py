"""Hooks into the program: the dispatch mode, modules, threads, extensions, Triton and compiled code."""
