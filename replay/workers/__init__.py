"""Worker processes that run cases, and the journal that keeps the rows of finished cases."""
