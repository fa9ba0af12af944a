"""Entries of torch_geometric."""

from entries import ZooEntry

ENTRIES: list[ZooEntry] = []
