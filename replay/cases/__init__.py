"""Cases: the calls to replay, and what a trace contains about the calls around each case."""
