"""Entries of timm."""

from entries import ZooEntry

ENTRIES: list[ZooEntry] = []
