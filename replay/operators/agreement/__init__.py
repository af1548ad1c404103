"""Sizes of arguments that operators trust to agree: which a call has says a trace, a stranger's perhaps."""
