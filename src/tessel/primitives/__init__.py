"""The movements of data between workers, each a thin face of `tessel.Move`.

It may import `core` and `transport`.
"""
