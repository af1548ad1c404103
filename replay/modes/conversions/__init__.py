"""Conversions that several modes share; the modules of modes import them late, because they import torch."""
