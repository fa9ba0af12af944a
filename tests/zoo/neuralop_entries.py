"""Entries of neuraloperator."""

from entries import ZooEntry

ENTRIES: list[ZooEntry] = []
