"""Tasks that show what a cache costs in quality, memory and time."""
