"""Entries of diffusers."""

from entries import ZooEntry

ENTRIES: list[ZooEntry] = []
