"""Which of torch's operators a corpus has."""
