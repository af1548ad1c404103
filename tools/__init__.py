"""Programs built on capture and replay."""
