"""Entries of segmentation_models_pytorch."""

from entries import ZooEntry

ENTRIES: list[ZooEntry] = []
