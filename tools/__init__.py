"""Programs that are built on capture and replay."""
