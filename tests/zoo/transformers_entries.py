"""Entries of transformers."""

from entries import ZooEntry

ENTRIES: list[ZooEntry] = []
