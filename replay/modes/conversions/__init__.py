"""Conversions that several modes share. They import torch, which modes must not import before they run."""
