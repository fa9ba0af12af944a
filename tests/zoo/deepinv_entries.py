"""Entries of deepinv."""

from entries import ZooEntry

ENTRIES: list[ZooEntry] = []
