"""Entries of torch_geometric: convolutions and pools of a graph whose nodes are split."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import tessel
from entries import ZooEntry, made_by
from tessel import Layout

NODES, EDGES, FEATURES = 37, 90, 6
TWO, THREE, FOUR = (2,), (3,), (4,)  # parts of the nodes


def graph() -> tuple[Tensor, Tensor]:
    """Nodes with features, and edges between any of them."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(NODES, FEATURES, generator=draw)
    return x, torch.randint(NODES, (2, EDGES), generator=draw)


def split_nodes(inputs: tuple[Tensor, ...], P: tessel.Partition) -> tuple[Any, ...]:
    """Nodes in parts; every worker has all edges."""
    x, *rest = inputs
    return tessel.spread(x, Layout.split(P, x.shape, [0, None])), *rest


def split_edges(inputs: tuple[Tensor, ...], P: tessel.Partition) -> tuple[Any, ...]:
    """Edges in parts, too."""
    x, edges = split_nodes(inputs, P)
    return x, tessel.spread(edges, Layout.split(P, edges.shape, [None, 0]))


convolution = partial(made_by, "torch_geometric.nn")


def perceptron(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 5))


def around_a_perceptron(name: str, width: int) -> nn.Module:
    return convolution(name, perceptron(width))()


class Classifier(nn.Module):
    """Two convolutions, and the mean of the nodes of each graph."""

    def __init__(self) -> None:
        from torch_geometric import nn as geometric

        super().__init__()
        self.first = geometric.GCNConv(FEATURES, 8)
        self.second = geometric.GATConv(8, 5)
        self.pool = geometric.global_mean_pool

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.second(self.first(x, edges).relu(), edges)
        graphs = torch.arange(NODES) // 10
        return self.pool(x, graphs)


entry = partial(ZooEntry, "torch_geometric", inputs=graph, spread=split_nodes, train=(TWO, FOUR))
entry = partial(entry, eval=(THREE,))

ENTRIES = [
    entry("GCNConv", convolution("GCNConv", FEATURES, 5)),
    entry("GCNConv, edges split", convolution("GCNConv", FEATURES, 5), spread=split_edges),
    entry("GATConv", convolution("GATConv", FEATURES, 5, heads=2)),
    entry("GATConv, edges split", convolution("GATConv", FEATURES, 5, heads=2), spread=split_edges),
    entry("SAGEConv", convolution("SAGEConv", FEATURES, 5)),
    entry("SAGEConv, largest", convolution("SAGEConv", FEATURES, 5, aggr="max")),
    entry("GINConv", partial(around_a_perceptron, "GINConv", FEATURES)),
    entry("EdgeConv", partial(around_a_perceptron, "EdgeConv", 2 * FEATURES)),
    entry("TransformerConv", convolution("TransformerConv", FEATURES, 5, heads=2)),
    entry("two convolutions and a mean", Classifier),
]
