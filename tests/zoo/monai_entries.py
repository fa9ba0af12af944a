"""Entries of MONAI."""

from entries import ZooEntry

ENTRIES: list[ZooEntry] = []
