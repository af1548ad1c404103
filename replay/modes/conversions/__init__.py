"""Conversions that several modes share. They import torch, which modes must not before they run."""
