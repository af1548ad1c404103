"""Whether a redacted trace replays as the one that it was made from."""
