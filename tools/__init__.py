"""Programs around capture and replay."""
