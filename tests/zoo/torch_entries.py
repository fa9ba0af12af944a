"""Entries of torch's own models."""

from entries import ZooEntry

ENTRIES: list[ZooEntry] = []
