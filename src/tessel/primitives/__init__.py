"""The movements of data between workers, each a thin layer over `tessel.Move`.

This package may import `core` and `transport`.
"""
