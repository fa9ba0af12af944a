"""The version, for source trees without installed metadata."""

__version__ = "0.1.0"
