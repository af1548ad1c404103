"""The benchmark that is built on traces: corpus, distilled traces, scores, and the commands that recorded the shipped
traces.
"""
