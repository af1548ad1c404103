"""What there is to run, from whatever it comes, and what a trace says of its surroundings."""
