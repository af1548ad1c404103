"""What each prediction is to learn, and which are drawn."""
