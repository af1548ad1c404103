"""Conversions that several modes share. They import torch, which a mode's module must not import before the
mode runs.
"""
