"""What several modes make of a call before their compilers take it."""
