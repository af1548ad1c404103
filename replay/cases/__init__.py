"""Cases (the units of replay, made from a trace's calls), and what the trace records about the calls around
each case.
"""
