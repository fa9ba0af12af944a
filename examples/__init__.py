"""Whole programs: each runs as a script, on any number of workers, and `tessel demo` uses them."""
