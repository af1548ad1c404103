"""Cases: what to replay, and what a trace says about the calls around each case."""
