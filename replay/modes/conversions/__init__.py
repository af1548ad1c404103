"""Conversions that several modes share. They import torch, which the module of a mode must not import before the mode
runs.
"""
