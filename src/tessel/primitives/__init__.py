"""The movements of data between workers, each a thin layer over `tessel.Move`.

It may import `core` and `transport`.
"""
