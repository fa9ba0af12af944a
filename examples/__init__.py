"""Whole programs: each runs as a script on any number of workers; `tessel demo` uses some."""
