"""The version, for those who have no installed metadata to ask, as in a source tree."""

__version__ = "0.1.0"
