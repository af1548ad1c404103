"""Cases as programs under modes."""
